"""Runs calls of kernels in child processes, and says of each: right, refused and why, or wrong.

Also a pytest plugin, ``-p recorder``: each test runs so, and a line of JSON for it goes to the file
that ``NKI_UPSTREAM_OUT`` names. ``NKI_UPSTREAM_FORMS`` is how many tests of a function run, evenly
spread over its parameters, and ``NKI_UPSTREAM_SECONDS`` how long each may take.
"""

from __future__ import annotations

import collections
import json
import os
import select
import signal
import warnings
from pathlib import Path

import pytest
from nki_paged_attn import sim
from nki_paged_attn.sim import simulator

SECONDS = float(os.environ.get("NKI_UPSTREAM_SECONDS", "20"))
FORMS = int(os.environ.get("NKI_UPSTREAM_FORMS", "3"))
# kernels that ran, the outermost of each run
KERNELS: list[tuple[str, str]] = []


class Wrong(Exception):
    """Numbers that are not those of the reference."""


def record() -> None:
    """Note each kernel that is simulated."""
    run = simulator.Simulation.__call__

    def noted(self, *arguments, **options):
        function = self.kernel.function
        code = getattr(function, "__code__", None)
        KERNELS.append((code.co_filename if code else "", function.__name__))
        return run(self, *arguments, **options)

    simulator.Simulation.__call__ = noted


def judge(function) -> tuple[str, str]:
    """Call a function; return what came of it, and why."""
    try:
        warnings.simplefilter("ignore")
        function()
    except (sim.NkiValidationError, sim.NotModelledError) as error:
        return "refused", str(error).partition("\n")[0]
    except Wrong as error:
        return "wrong", str(error)[:300]
    except pytest.skip.Exception as error:
        return "skipped", str(error)
    except BaseException as error:
        if isinstance(error, AssertionError) and is_comparison(error):
            return "wrong", " ".join(str(error).split())[:300]
        return "error", f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
    return "right", ""


def is_comparison(error: AssertionError) -> bool:
    """Return whether a test's comparison failed, and not an assertion of the kernel's own."""
    at = error.__traceback__
    while at.tb_next is not None:
        at = at.tb_next
    file = Path(at.tb_frame.f_code.co_filename)
    return file.name.startswith("test_") or "testing" in file.parts


def guarded(function, seconds: float = SECONDS) -> dict:
    """Judge a call in a child process, which ends with it or after some seconds."""
    end, start = os.pipe()
    child = os.fork()
    if not child:
        KERNELS.clear()
        status, why = judge(function)
        os.write(start, json.dumps([status, why, sorted(set(KERNELS))]).encode())
        os._exit(0)
    os.close(start)
    ready, _, _ = select.select([end], [], [], seconds)
    text = b""
    while ready and (part := os.read(end, 65536)):
        text += part
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(end)
    status, why, kernels = json.loads(text) if text else ("slow", f"over {seconds:g} s", [])
    return {"status": status, "why": why, "kernels": kernels}


def pytest_configure(config):
    record()
    config.addinivalue_line("markers", "nki_simulator: upstream's own")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    names = pyfuncitem._fixtureinfo.argnames
    given = {name: pyfuncitem.funcargs[name] for name in names}
    found = guarded(lambda: pyfuncitem.obj(**given))
    expected = pyfuncitem.get_closest_marker("xfail")
    if expected and found["status"] == "wrong":
        # so it is on AWS's simulator, too
        found |= {"status": "expected", "why": str(expected.kwargs.get("reason", ""))}
    with Path(os.environ["NKI_UPSTREAM_OUT"]).open("a") as out:
        out.write(json.dumps({"test": pyfuncitem.nodeid, **found}) + "\n")
    return True


def pytest_collectreport(report):
    if report.failed:
        lines = str(report.longrepr).splitlines()
        found = {"test": report.nodeid, "status": "error", "why": lines[-1][:300], "kernels": []}
        with Path(os.environ["NKI_UPSTREAM_OUT"]).open("a") as out:
            out.write(json.dumps(found) + "\n")


def pytest_collection_modifyitems(items):
    groups = collections.defaultdict(list)
    for item in items:
        groups[item.nodeid.partition("[")[0]].append(item)
    kept = set()
    for group in groups.values():
        count = min(FORMS, len(group))
        kept |= {id(group[(2 * n + 1) * len(group) // (2 * count)]) for n in range(count)}
    items[:] = [item for item in items if id(item) in kept]
