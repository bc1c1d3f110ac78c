"""The Python in every README runs as it stands, block after block, on a machine without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "ci"))
from blocks import blocks, documents  # noqa: E402

RUN = """
names = {"__name__": "__main__"}
for text in TEXTS:
    exec(compile(text, NAME, "exec"), names)
"""
# gloo's threads let go of tensors late; one that has to wait for a Python that ends aborts
LEAVE = """
import os, sys
sys.stdout.flush()
os._exit(0)
"""


# its code is for several processes
PARALLEL = ROOT / "packages" / "flash-attn-triton" / "docs" / "context-parallelism.md"
# its code asks a server, which the package's tests start
SERVING = ROOT / "packages" / "prefix-prefill" / "docs" / "serving.md"
# its code loads what `nox -s hub` wrote
RELEASING = ROOT / "docs" / "releasing.md"
DOCUMENTS = [path for path in documents() if path not in (PARALLEL, SERVING)]
# a merge runs the first; the rest have a session of their own
CASES = [
    pytest.param(path, id=str(path.relative_to(ROOT)), marks=[pytest.mark.site] * (i > 0))
    for i, path in enumerate(DOCUMENTS)
]


@pytest.mark.parametrize("path", CASES)
def test_code_blocks_run(path, python, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if path == RELEASING:
        command = [sys.executable, str(ROOT / "ci" / "hub.py"), "--hub", str(tmp_path / "hub")]
        subprocess.run(command, check=True)
    code = f"TEXTS = {blocks(path)!r}\nNAME = {path.name!r}\n{RUN}"
    python(code, cwd=tmp_path, env=environment)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.site), 2])
def test_code_for_several_ranks_runs(ranks, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["OMP_NUM_THREADS"] = "1"
    script = tmp_path / "page.py"
    script.write_text(f"TEXTS = {blocks(PARALLEL)!r}\nNAME = {PARALLEL.name!r}\n{RUN}{LEAVE}")
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, "-m", *launcher, str(script)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"


def test_every_package_shows_a_first_call(package):
    assert any("import" in text for text in blocks(ROOT / "packages" / package / "README.md"))
