#!/usr/bin/env python3
"""Run a job of this repository on a machine that has Python 3.10 or newer, and nothing else.

python3 bootstrap.py tests [arguments]  lint, types, build, all tests that need no GPU
python3 bootstrap.py demo [--short]     embed sentences with a real model, attention by our kernels
python3 bootstrap.py nox [arguments]    nox itself, such as: nox --list

It makes a virtual environment with nox in .bootstrap/, and nox makes those of the jobs in .nox/.
Both stay, so the second run is faster. Outside this folder, only caches of pip and Triton change.
"""

import importlib.util
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".bootstrap"
REPORTS = ROOT / "build" / "reports"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")


def say(text: str) -> None:
    print(f"\n=== {text}", flush=True)


def prepare() -> str:
    """Make the environment that holds nox, and return the path of its Python."""
    python = str(BIN / "python")
    if subprocess.run([python, "-c", ""], capture_output=True).returncode if BIN.exists() else True:
        say(f"Making a virtual environment for nox in {VENV.name}/")
        if importlib.util.find_spec("ensurepip") is None:
            sys.exit(
                "This Python cannot make one; on Debian or Ubuntu: apt-get install python3-venv"
            )
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True)
    say("Installing nox, the runner, at the pinned version")
    pip = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    constraints = str(ROOT / "ci" / "constraints.txt")
    subprocess.run([*pip, "filelock", "nox", "virtualenv", "-c", constraints], check=True)
    return python


def summarize() -> None:
    """Print the counts of every process of pytest, and their sum as the last line."""
    keys = ("passed", "failed", "skipped", "seconds")
    total = dict.fromkeys(keys, 0.0)
    say("Tests, by package and tier")
    for path in sorted(REPORTS.glob("*.xml")):
        suite = ElementTree.parse(path).getroot().find("testsuite")
        if suite is None:
            continue
        count = {name: float(suite.get(name, 0)) for name in ("tests", "skipped", "time")}
        failed = float(suite.get("failures", 0)) + float(suite.get("errors", 0))
        passed = count["tests"] - failed - count["skipped"]
        row = dict(zip(keys, (passed, failed, count["skipped"], count["time"])))
        total = {key: total[key] + row[key] for key in keys}
        print(f"{path.stem:<36}" + ", ".join(f"{row[k]:.0f} {k}" for k in keys))
    print(", ".join(f"{total[k]:.0f} {k}" for k in keys[:3]), flush=True)


def main(arguments: "list[str]") -> int:
    if sys.version_info < (3, 10):
        sys.exit(f"Python 3.10 or newer is needed; this is {sys.version.split()[0]}")
    if not arguments or arguments[0] not in ("tests", "demo", "nox"):
        sys.exit(__doc__)
    # `nox -- -s lint` is `nox -s lint`: all that follows is the job's, with and without the dashes
    job, rest = arguments[0], arguments[2 if arguments[1:2] == ["--"] else 1 :]
    started = time.monotonic()
    command = [prepare(), "-m", "nox", "--noxfile", str(ROOT / "noxfile.py")]
    if job == "demo":
        say("Building the wheels, installing them with a model's weights, and running the demo")
        command += ["--session", "demo", "--", *rest]
    elif job == "tests":
        say("Checking style and types, building the wheels, and testing them, one environment each")
        for report in REPORTS.glob("*.xml"):
            report.unlink()
        command += ["--", *rest] if rest else []
    else:
        command += rest
    status = subprocess.run(command, cwd=ROOT).returncode
    if job == "tests":
        summarize()
    else:
        say(f"{job} {'failed' if status else 'done'} in {time.monotonic() - started:.0f} s")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
