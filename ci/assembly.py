"""Compare the assembly of every build of two checkouts, to see that a move of source changed none.

    python ci/assembly.py write OLD --checkout ../before     # builds alone: needs no GPU
    python ci/assembly.py write NEW
    python ci/assembly.py compare OLD NEW

``write`` runs the aot tier of each package with this Python's Triton, and fills
FOLDER/<version of Triton>/<package>. A failing test has written what it built. It builds every
shipped configuration with ``ATTN_AOT=all``.

``compare`` takes out
    names       of kernels, functions, tests and labels: a build of another name has to be the same
    lines       of source, debug sections, comments
    registers   that are renamed throughout a build. Triton numbers those of PTX as it meets them,
                and ptxas gives out others. How many there are is compared.
    parameters  where they lie. So it does not see that a kernel reads another one of that type.
                Builds that differ in where they load parameters are listed, and are no difference.

It lists every other difference, and builds that one side lacks; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("flash-attn-triton", "prefix-prefill", "blocksparse-attn", "lightning-attn")
SHOWN = 4  # lines of a build that differ

NOISE = re.compile(r"\s*(\.loc|\.file|\.param|;|\)?$|\$L__tmp|\.?Ltmp|\.cfi|\.?Linfo)")
FUNCTION = re.compile(r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$.]+)|\.type\s+([\w$.]+),@function")
LABEL = re.compile(r"(?<![\w$.])(?:\$|\.)L[A-Za-z_]*\d+(?:_\d+)?")
REGISTER = re.compile(r"(%[a-z]+)(\d+)\b")
REGISTERS_OF_AMD = re.compile(r"\b([sva])(?:(\d+)\b|\[(\d+):(\d+)\])")
INSTRUCTION = re.compile(r"\s+(@!?%p\d+\s+)?[a-z]\w+[. ;]")
# on AMD parameters lie where s[0:1] points, as long as nothing else is written there
LOAD = re.compile(r"\s*ld\.param\S*\s.*?(\[.*\])|\s*s_load_\w+ .*, (s\[0:1\], \w+)")
OVERWRITES = re.compile(r"\s*[sv]_\w+ s\[?[01]\b")


def namer(prefix: str = "") -> Callable[..., str]:
    """Return what numbers names in the order in which they come."""
    known: dict[tuple[str, ...], str] = {}
    return lambda *name: known.setdefault(name, f"{prefix or ''.join(name[:-1])}{len(known)}")


@functools.cache
def normalised(text: str, loads: bool = True) -> list[str]:
    """Return a build's lines without what is no difference, and without loads of parameters."""
    text = re.split(r"\s\.section\s+\.(?:debug|rodata|AMDGPU)", text)[0]
    functions = {a or b: f"FUNCTION{n}" for n, (a, b) in enumerate(FUNCTION.findall(text))}
    is_amd, reads_parameters = ".amdgcn_target" in text, True
    register, label = namer(), namer("L")
    left_out = "".join(x[0] for x in map(LOAD.match, text.splitlines()) if x and not loads)
    read = set(REGISTER.findall(left_out))  # registers of PTX that hold parameters

    def units(found: re.Match[str]) -> str:
        kind, one, first, last = found.groups()
        numbers = range(int(one or first), int(one or last) + 1)
        return "+".join(register(kind, str(n)) for n in numbers)

    def declared(found: re.Match[str]) -> str:
        return f"{found[1]}<{int(found[2]) - sum(kind == found[1] for kind, _ in read)}>"

    lines = [f"registers {registers_of(text)}"] if is_amd else []
    for line in text.splitlines():
        line = re.split(r"//|\s;\s", line)[0].rstrip()
        if NOISE.match(line):
            continue
        if reads_parameters and (load := LOAD.match(line)):
            if not loads:
                continue
            line = line.replace(load[1] or load[2], "[PARAMETER]")
        reads_parameters &= not (is_amd and OVERWRITES.match(line))
        line = re.sub(r"[\w$.]+_param_\d+", "PARAMETER", line)
        line = re.sub(r"[\w$.]+", lambda word: functions.get(word[0], word[0]), line)
        line = LABEL.sub(lambda found: label(found[0]), line)
        if is_amd:
            line = REGISTERS_OF_AMD.sub(units, line)
        else:
            line = re.sub(r"(%[a-z]+)<(\d+)>", declared, line)
            line = REGISTER.sub(
                lambda x: register("parameter " * (x.groups() in read), *x.groups()), line
            )
        lines.append(line.strip())
    return lines


def registers_of(text: str) -> dict[str, int]:
    """Return how many registers of each kind PTX declares, or what the highest on AMD are."""
    if ".amdgcn_target" not in text:
        return {k: int(n) for k, n in re.findall(r"\.reg\s+\.\w+\s+%([a-z]+)<(\d+)>", text)}
    numbers = sorted((kind, int(n or last)) for kind, n, _, last in REGISTERS_OF_AMD.findall(text))
    return dict(numbers)  # the last of each kind


def differences(old: str, new: str) -> list[str]:
    """Return the first lines that differ, after instructions and registers; or nothing."""
    pairs = zip_longest(normalised(old, False), normalised(new, False), fillvalue="")
    told = [f"{a} | {b}" for a, b in pairs if a != b][:SHOWN]
    counts = [
        f"{sum(bool(INSTRUCTION.match(line)) for line in text.splitlines())} instructions, "
        f"registers {registers_of(text)}"
        for text in (old, new)
    ]
    return [" | ".join(counts), *told] if told else []


def builds(folder: Path) -> dict[str, str]:
    """Return the text of each build, by its path in a folder."""
    paths = (path for path in sorted(folder.rglob("*")) if path.suffix in (".ptx", ".amdgcn"))
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


def pairs_of(old: dict[str, str], new: dict[str, str]) -> list[tuple[str, str]]:
    """Pair builds by name, else by what is in them, else by the test that made them."""
    pairs = [(name, name) for name in old if name in new]
    made = [name for name in new if name not in old]

    def is_same(one: str, other: str) -> bool:
        together = Path(one).parent == Path(other).parent
        return together and normalised(old[one], False) == normalised(new[other], False)

    def is_of_one_test(one: str, other: str) -> bool:
        return one.rsplit("-", 2)[0] == other.rsplit("-", 2)[0]

    for rule in (is_same, is_of_one_test):
        paired = {name for name, _ in pairs}
        for name in old:
            found = next((x for x in made if name not in paired and rule(name, x)), None)
            if found:
                made.remove(found)
                pairs.append((name, found))
    return pairs


def compare(old: dict[str, str], new: dict[str, str]) -> tuple[list[str], int]:
    """Return what to say of two sets of builds, and how many differences there are."""
    pairs = pairs_of(old, new)
    before, after = (set(names) for names in zip(*pairs, strict=True)) if pairs else (set(), set())
    told = [f"MISSING {name}" for name in old if name not in before]
    told += [f"NEW {name}" for name in new if name not in after]
    found, elsewhere = len(told) + (not old), 0
    for one, other in pairs:
        name = one if one == other else f"{one} -> {other}"
        if old[one] == new[other]:
            continue
        if lines := differences(old[one], new[other]):
            found += 1
            told += [f"DIFFERS {name}", *(f"    {line}" for line in lines)]
        elif normalised(old[one]) != normalised(new[other]):
            elsewhere += 1
            told.append(f"loads of parameters {name}")
    told.append(f"{len(pairs)} pairs of builds, {found} differences, {elsewhere} load elsewhere")
    return told, found


def write(folder: Path, checkout: Path, packages: Sequence[str]) -> None:
    """Fill a folder with the builds of a checkout's aot tier."""
    import triton

    sources = [str(path) for path in sorted(checkout.resolve().glob("packages/*/src"))]
    for package in packages:
        out = folder.resolve() / triton.__version__ / package
        if out.exists():
            sys.exit(f"{out} exists")
        path = os.pathsep.join([*sources, os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "ATTN_AOT_ASM": str(out), "PYTHONPATH": path}
        command = [sys.executable, "-m", "pytest", "-m", "aot", "-q", "-n", "1"]
        subprocess.run(command, cwd=checkout / "packages" / package, env=environment, check=False)
        print(f"{out}: {len(list(out.glob('*')))} builds")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write")
    writing.add_argument("folder", type=Path)
    writing.add_argument("packages", nargs="*", default=PACKAGES)
    writing.add_argument("--checkout", type=Path, default=ROOT)
    comparing = commands.add_parser("compare")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    options = parser.parse_args()
    if options.command == "write":
        write(options.folder, options.checkout, options.packages)
        return 0
    told, found = compare(builds(options.old), builds(options.new))
    print(*told, sep="\n")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
