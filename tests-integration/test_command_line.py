"""``python -m <package>``: its help, and a reader that stops reading."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

# nki-paged-attn has commands and tests of its own
PACKAGES = [
    "attn_common",
    "blocksparse_attn",
    "flash_attn_triton",
    "lightning_attn",
    "prefix_prefill",
]
# an option and its help in one line, or in the next
ENTRY = re.compile(r"^  \S+(, \S+)*( {2,}\S|\n {6,}\S)", re.MULTILINE)


# all in one process, which imports torch once
HELP = """
import contextlib, io, json, runpy, sys
found = {}
for name in sys.argv[1:]:
    sys.argv[1:], out = ["--help"], io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            runpy.run_module(name, run_name="__main__")
        except SystemExit as end:
            found[name] = end.code, out.getvalue()
print(json.dumps(found))
"""


def run(*arguments, **options):
    command = [sys.executable, *arguments]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120, **options)


def test_help_names_each_argument():
    done = run("-c", HELP, *PACKAGES, stdout=subprocess.PIPE)
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert list(found) == PACKAGES
    for name, (code, text) in found.items():
        assert code == 0
        assert text.startswith(f"usage: python -m {name} [-h]")
        listed = [line for line in text.splitlines() if re.match(r"  \S", line)]
        assert len(ENTRY.findall(text)) == len(listed) == 2


# the rest share its code
@pytest.mark.parametrize("name", PACKAGES[:2])
def test_a_reader_may_stop_reading(name):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = run("-m", name, stdout=writing)
    finally:
        os.close(writing)
    assert done.stderr == ""
    assert done.returncode == -signal.SIGPIPE
