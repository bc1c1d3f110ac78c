"""Messages that lead to the line: of an error, of the first NaN and of the first infinity."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from nki_paged_attn.sim import NkiValidationError, load, simulate

KERNEL = """
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


def helper(result, source):
    nisa.tensor_copy(dst=result, src=source)


@nki.jit
def kernel(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    scores = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.sbuf)
    half = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.sbuf)
    sums = nl.ndarray((x.shape[0], 1), dtype=nl.float32, buffer=nl.sbuf)
    product = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.psum)
    nisa.dma_copy(dst=scores, src=x)
    nisa.tensor_copy(dst=half[:, 0:2], src=scores[:, 0:2])
    FAULT
    nisa.dma_copy(dst=out, src=scores)
    return out


if __name__ == "__main__":
    kernel(np.full((8, 4), -1.0, np.float32))
"""
FAULTS = {
    "nisa.tensor_tensor(dst=scores, data1=half, data2=scores, op=nl.add)": "data1 is half",
    "nisa.tensor_tensor(dst=scores, data1=scores, data2=sums, op=nl.add)": "data2 is sums",
    "nisa.nc_matmul(dst=scores, stationary=scores, moving=scores)": "dst is scores",
    "helper(product, half)": "src is source",
    "nisa.activation(dst=scores, op=nl.log, data=scores[0:8, :])": "data is scores",
    "nisa.tensor_copy(dst=scores, src=scores, engine='vector')": "engine must be one of",
}


def write(tmp_path, fault):
    """Return a file with one fault, and the number of the line that the message should name."""
    path = tmp_path / "faulty.py"
    path.write_text(KERNEL.replace("FAULT", fault))
    wanted = "nisa.tensor_copy(dst=result" if fault.startswith("helper") else fault
    lines = path.read_text().splitlines()
    return path, next(n for n, text in enumerate(lines, 1) if wanted in text)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda x: x.partition("(")[0])
@pytest.mark.parametrize("programs", [1, 2])
def test_a_message_names_the_line_and_the_variable(fault, programs, tmp_path):
    path, line = write(tmp_path, fault)
    with pytest.raises(NkiValidationError) as caught:
        load(path).kernel[programs](np.full((8, 4), -1.0, np.float32))
    text = str(caught.value)
    assert f"at faulty.py:{line} in " in text
    assert path.read_text().splitlines()[line - 1].strip() in text
    assert FAULTS[fault] in text
    assert caught.value.place == f"{path}:{line}"


def test_a_capacity_error_says_what_the_kernel_needs(tmp_path):
    fault = "kept = [nl.ndarray((128, 2**14), nl.float32, nl.sbuf) for _ in range(7)]"
    fault += "; [nisa.memset(t, 0.0) for t in kept]; [nisa.tensor_copy(t, t) for t in kept]"
    path, line = write(tmp_path, fault)
    with pytest.raises(NkiValidationError, match="are live at once, got 4587") as caught:
        load(path).kernel(np.zeros((8, 4), np.float32))
    assert caught.value.value >= 7 * 2**16
    assert caught.value.place == f"{path}:{line}"


def find(tmp_path, fault, x):
    path, line = write(tmp_path, fault)
    run = simulate(load(path).kernel, strict=False)
    run.find_bad = True
    run(x)
    return run.bad, f"at faulty.py:{line} in kernel: {fault}"


def test_the_first_nan_and_the_first_infinity_have_a_line(tmp_path):
    fault = "nisa.reciprocal(dst=scores, data=scores)"
    bad, place = find(tmp_path, fault, np.zeros((8, 4), np.float32))
    assert bad == {"inf": f"nisa.reciprocal, to scores, {place}"}
    fault = "nisa.tensor_tensor(dst=scores, data1=scores, data2=scores, op=nl.subtract)"
    bad, place = find(tmp_path, fault, np.full((8, 4), np.inf, np.float32))
    assert bad == {"inf": "the argument x", "nan": f"nisa.tensor_tensor, to scores, {place}"}
    bad, _ = find(tmp_path, "pass", np.ones((8, 4), np.float32))
    assert bad == {}


def test_what_nothing_wrote_is_no_nan(tmp_path):
    path, _ = write(tmp_path, "nisa.memset(dst=half[:, 3:4], value=0.0)")
    run = simulate(load(path).kernel)
    run.find_bad = True
    run(np.ones((8, 4), np.float32))
    assert run.bad == {}


def test_the_command_line(tmp_path):
    path, line = write(tmp_path, "nisa.activation(dst=scores, op=nl.exp, data=scores, bias=1e3)")
    command = [sys.executable, "-m", "nki_paged_attn.sim", "run", "--nan", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0
    assert f"first inf: nisa.activation, to scores, at faulty.py:{line} in kernel" in done.stderr
    fault = "nisa.tensor_tensor(dst=scores, data1=half, data2=scores, op=nl.add)"
    path, line = write(tmp_path, fault)
    command.remove("--nan")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"at faulty.py:{line} in kernel: {fault}" in done.stderr
    command.insert(4, "--no-strict")
    assert subprocess.run(command, capture_output=True, text=True).returncode == 0
    command[-1] = "absent.py"
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "file must be a Python file, got 'absent.py'" in done.stderr
