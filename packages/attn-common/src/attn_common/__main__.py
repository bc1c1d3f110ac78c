"""``python -m attn_common [check]``: print version and platform, and check the FP8 table."""

from __future__ import annotations

import argparse
import signal
import sys

from . import __version__, detect, fp8_dtype
from .fp8 import FORMATS


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m attn_common",
        description="Print the version, the platform, its FP8; compare the FP8 table with torch.",
        epilog="Exits with 1 if the table differs.",
    )
    parser.add_argument(
        "command", nargs="?", choices=["check"], metavar="check", help="the same as without it"
    )
    parser.parse_args(arguments)
    # a reader that closes the pipe early, such as head, causes no traceback
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    platform = detect()
    print(f"attn-common {__version__}, Python {sys.version.split()[0]}")
    print(f"platform {platform}: {platform.shared_memory_per_block} bytes of shared memory a block")
    print(f"FP8: {fp8_dtype(platform) if platform.supports_fp8 else 'no'}")
    try:
        import torch
    except ImportError:
        print("torch is not installed: the FP8 table was not compared with it")
        return 0
    failed = False
    for name, info in FORMATS.items():
        values = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name)).double()
        finite = values[values.isfinite()]
        found = (finite.max().item(), finite.min().item(), finite[finite > 0].min().item())
        agrees = found == (info.max, info.min, info.smallest_subnormal)
        failed |= not agrees
        print(f"{name}: {'ok' if agrees else f'MISMATCH, torch {torch.__version__} has {found}'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
