"""``python -m nki_paged_attn.sim run FILE``: run a file whose ``import nki`` is the simulator."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path

from .loader import install
from .simulator import NAN, STRICT
from .targets import find_target


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``run``."""
    parser.add_argument("file", help="a Python file, with kernels and what calls them")
    parser.add_argument("--target", help="trn1, trn2 or trn3 (trn2)")
    parser.add_argument(
        "--no-strict",
        action="store_true",
        help="let called kernels read what nothing wrote: NaN, or 4 among integers",
    )
    parser.add_argument(
        "--nan", action="store_true", help="print where the first NaN and infinity come from"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the file is given")


def run_file(arguments: argparse.Namespace) -> int:
    """Run a file as a program, with the simulator as its nki."""
    path = Path(arguments.file)
    if not path.is_file():
        raise OSError(f"file must be a Python file, got {arguments.file!r}")
    if not install():
        raise ImportError(f"nki is installed: run the file with it, python {arguments.file}")
    if arguments.target is not None:
        os.environ["NEURON_PLATFORM_TARGET_OVERRIDE"] = find_target(arguments.target).name
    if arguments.no_strict:
        os.environ[STRICT] = "0"
    if arguments.nan:
        os.environ[NAN] = "1"
    sys.argv = [arguments.file, *arguments.arguments]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(arguments.file, run_name="__main__")
    return 0


def main(arguments: list[str]) -> int:
    """Run the command line; 2 if it cannot run."""
    parser = argparse.ArgumentParser(prog="python -m nki_paged_attn.sim", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    add_run(commands.add_parser("run", help="run a file whose `import nki` is the simulator"))
    try:
        return run_file(parser.parse_args(arguments))
    except (ImportError, OSError) as error:
        print(f"python -m nki_paged_attn.sim: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
