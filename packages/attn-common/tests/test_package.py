"""Import, command line and public names, each in a process of its own where that matters."""

import subprocess
import sys

import attn_common
import pytest

BLOCK = "import sys; sys.modules.update(torch=None, triton=None, numpy=None); "


def run(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True)


def test_works_with_torch_and_triton_blocked():
    code = BLOCK + (
        "from attn_common import *;"
        "assert fp8_info('float8_e5m2').max == 57344;"
        "assert fp8_dtype(Platform.parse('amd:gfx942')) == 'float8_e4m3fnuz';"
        "assert str(detect('cpu')) == 'cpu';"
        "assert cdiv(7, 2) == round_up(3, 4) == next_power_of_2(3) == 4"
    )
    done = run("-c", code)
    assert done.returncode == 0, done.stderr


def test_import_loads_the_standard_library_only():
    code = (
        "import sys, attn_common;"
        "tops = {name.partition('.')[0] for name in sys.modules} - {'attn_common', '__main__'};"
        "print(sorted(t for t in tops if t not in sys.stdlib_module_names))"
    )
    # without the site module, whose .pth files may import anything
    root = attn_common.__path__[0].rpartition("attn_common")[0]
    done = run("-S", "-c", f"import sys; sys.path.insert(0, {root!r}); {code}")
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_import_changes_no_environment():
    code = "import os; old = dict(os.environ); import attn_common; assert dict(os.environ) == old"
    done = run("-c", code)
    assert done.returncode == 0, done.stderr


def test_all_names_exist_and_are_sorted():
    assert sorted(attn_common.__all__) == attn_common.__all__
    for name in attn_common.__all__:
        assert getattr(attn_common, name).__module__.startswith("attn_common.")


@pytest.mark.parametrize("arguments", [[], ["check"]])
def test_command_line_reports_and_agrees(arguments):
    done = run("-m", "attn_common", *arguments)
    assert done.returncode == 0, done.stderr
    assert f"attn-common {attn_common.__version__}" in done.stdout
    assert done.stdout.count(": ok") == 4


def test_command_line_without_torch():
    code = (
        BLOCK
        + "import runpy; sys.argv[1:] = []; runpy.run_module('attn_common', run_name='__main__')"
    )
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    assert "torch is not installed" in done.stdout


def test_command_line_fails_on_a_mismatch():
    code = (
        "import sys, dataclasses, attn_common.fp8 as fp8;"
        "wrong = dataclasses.replace(fp8.fp8_info('float8_e4m3fn'), max=449.0);"
        "fp8.FORMATS['float8_e4m3fn'] = wrong;"
        "from attn_common.__main__ import main;"
        "sys.exit(main([]))"
    )
    done = run("-c", code)
    assert done.returncode == 1, done.stderr
    assert "float8_e4m3fn: MISMATCH" in done.stdout


def test_command_line_refuses_other_words():
    done = run("-m", "attn_common", "chekc")
    assert done.returncode == 2
    assert "usage: python -m attn_common [-h] [check]" in done.stderr
    assert "chekc" in done.stderr
