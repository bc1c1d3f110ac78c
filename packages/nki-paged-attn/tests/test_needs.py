"""What is not installed is named with what to install."""

import subprocess
import sys

import pytest

CODE = """
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == {name!r} else found(name, *rest)
import nki_paged_attn
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [("numpy", 'pip install "numpy>=1.26"'), ("ml_dtypes", 'pip install "ml-dtypes>=0.5"')],
)
def test_what_is_missing_is_named(name, words):
    command = [sys.executable, "-c", CODE.format(name=name)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr.strip().splitlines()[-1].endswith(words), done.stderr
