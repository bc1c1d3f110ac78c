"""Instructions that the two programs of a logical core run together."""

from __future__ import annotations

from typing import Any

from ..calls import named
from ..errors import require
from ..memory.access import check_enum, check_same_size, check_tensor, check_tile, read_raw, write
from ..memory.machine import machine
from ..memory.tensor import NkiTensor
from ..trace import Instruction
from .engines import log
from .enums import dma_engine as DmaEngine
from .enums import engine as Engine


def _check_two(call: str) -> None:
    programs = machine().programs
    page = f"nki.isa.{call.removeprefix('nisa.')}"
    require(programs == 2, call, "the kernel", "must run as kernel[2]", programs, page)


@named("nisa")
def core_barrier(
    data: NkiTensor, cores: Any, engine: Engine = Engine.gpsimd, name: str | None = None
) -> None:
    """Wait for the other program; then each may read what the other wrote to ``data``."""
    call = "nisa.core_barrier"
    engine = check_enum(call, "engine", engine, Engine)
    check_tensor(call, "data", data, "shared_hbm")
    page = "nki.isa.core_barrier"
    require(tuple(cores) == (0, 1), call, "cores", "must be (0, 1)", cores, page)
    _check_two(call)
    state = machine()
    chosen = "gpsimd" if engine == Engine.unknown else engine.name
    places = (data.region(),)
    state.log(Instruction("core_barrier", chosen, 0, reads=places, writes=places))
    traffic = data._storage.traffic
    clear = None if traffic is None else traffic.clear
    state.turns.meet(call, state.program, f"a barrier on {data.name}", clear)


@named("nisa")
def sendrecv(
    src: NkiTensor,
    dst: NkiTensor,
    send_to_rank: int,
    recv_from_rank: int,
    pipe_id: int,
    dma_engine: DmaEngine = DmaEngine.dma,
    name: str | None = None,
) -> None:
    """Send a tile of SBUF to the other program, and receive one."""
    call, page = "nisa.sendrecv", "nki.isa.sendrecv"
    check_enum(call, "dma_engine", dma_engine, DmaEngine)
    check_tile(call, "src", src, psum=False)
    check_tile(call, "dst", dst, psum=False)
    check_same_size(call, "dst", dst, src)
    require(dst.dtype == src.dtype, call, "dst", f"must be {src.dtype}", dst.dtype, page)
    _check_two(call)
    state = machine()
    other = 1 - state.program
    for operand, rank in (("send_to_rank", send_to_rank), ("recv_from_rank", recv_from_rank)):
        require(rank == other, call, operand, f"must be {other}, the other program", rank, page)
    x = read_raw(call, "src", src)
    # in order: a program may send again before the other one has taken what came first
    mail = state.turns.mail
    mail[state.program, pipe_id].append(None if x is None else x.copy())
    state.turns.meet(call, state.program, f"pipe {pipe_id}")
    write(call, dst, mail[other, pipe_id].popleft())
    log("sendrecv", "dma", dst, (src,), src.free_size)
