"""What instructions of several engines share: choice of the engine, its memories, the log."""

from __future__ import annotations

from ..errors import require
from ..memory.access import check_enum
from ..memory.machine import machine
from ..memory.tensor import NkiTensor
from ..trace import Instruction
from .enums import engine as Engine


def strided(*tiles: NkiTensor) -> frozenset[str]:
    """Return the form of an instruction whose operands are read or written in steps."""
    return frozenset({"strided"}) if any(x.is_strided() for x in tiles) else frozenset()


def log(
    op: str,
    engine: str,
    dst: NkiTensor,
    reads: tuple[NkiTensor, ...],
    elements: int,
    *form: str,
    also: NkiTensor | None = None,
) -> None:
    """Log an instruction with one destination, and a reduction's result if there is one."""
    writes = (dst.region(),) if also is None else (dst.region(), also.region())
    machine().log(
        Instruction(
            op,
            engine,
            elements,
            form=frozenset(f for f in form if f) | strided(dst, *reads),
            reads=tuple(r.region() for r in reads),
            writes=writes,
        )
    )


def pick(call: str, engine: Engine, default: str, *allowed: str) -> str:
    """Return the engine to run on; the call must allow it."""
    page = f"nki.isa.{call.removeprefix('nisa.')}"
    engine = check_enum(call, "engine", engine, Engine)
    if engine == Engine.unknown:
        return default
    require(
        engine.name in allowed, call, "engine", f"must be {' or '.join(allowed)}", engine.name, page
    )
    return engine.name


def keep_from_psum(call: str, engine: str, **tiles: NkiTensor) -> None:
    """Raise if GpSimd would access PSUM, which it cannot reach."""
    if engine == "gpsimd":
        for operand, tile in tiles.items():
            require(
                tile.buffer != "psum",
                call,
                operand,
                "must be in SBUF for GpSimd",
                tile.buffer,
                "nki/guides/architecture, engines of a NeuronCore",
            )


def both_in_psum(call: str, first: NkiTensor, second: NkiTensor, what: str) -> None:
    """VectorE reads at most one of two inputs from PSUM."""
    require(
        not (first.buffer == "psum" and second.buffer == "psum"),
        call,
        what,
        "must not both be in PSUM",
        "psum and psum",
        f"nki.isa.{call.removeprefix('nisa.')}, memory types",
    )
