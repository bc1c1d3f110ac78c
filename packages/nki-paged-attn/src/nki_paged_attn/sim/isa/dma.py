"""DMA: copies between HBM and SBUF, by static patterns or by indices that a tile holds."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from ..calls import named
from ..dtypes import NUMPY, Array, convert
from ..errors import NotModelledError, require
from ..memory.access import check_enum, check_pattern, check_tensor, mark, note_read
from ..memory.machine import machine
from ..memory.tensor import Indirection, NkiTensor
from ..memory.virtual import VirtualRegister
from ..trace import Instruction, Region
from .enums import dge_mode as DgeMode
from .enums import engine as Engine
from .enums import oob_mode as OobMode

COPY = "nki.isa.dma_copy"
TRANSPOSE = "nki.isa.dma_transpose"
AXES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}


@named("nisa")
def dma_copy(
    dst: NkiTensor,
    src: NkiTensor,
    priority: int | None = None,
    oob_mode: OobMode = OobMode.error,
    dge_mode: DgeMode = DgeMode.unknown,
    engine: Engine = Engine.unknown,
    name: str | None = None,
) -> None:
    """Copy between HBM and SBUF; other dtypes go through fp32."""
    call = "nisa.dma_copy"
    _check_memory(call, dst, src)
    require(
        dst.size == src.size, call, "dst", f"must have src's {src.size} elements", dst.size, COPY
    )
    oob_mode = check_enum(call, "oob_mode", oob_mode, OobMode)
    dge_mode = check_enum(call, "dge_mode", dge_mode, DgeMode)
    engine = check_enum(call, "engine", engine, Engine)
    _check_mode(call, dst, src, priority, dge_mode, engine)
    if not dst.is_indirect() and not src.is_indirect():
        _move(call, dst, src)
        rows = dst.size // max(_row(src), 1)
        _log("dma_copy", dst, src, src.size, rows)
        return
    require(
        not (dst.is_indirect() and src.is_indirect()),
        call,
        "dst and src",
        "must not both be indirect",
        "both",
        COPY,
    )
    moved, rows, places = _indirect(call, dst, src, oob_mode)
    form = "indirect" if _needs_gpsimd(dst, src, dge_mode) else "dynamic"
    _log("dma_copy", dst, src, moved, rows, form, places)


def _needs_gpsimd(dst: NkiTensor, src: NkiTensor, mode: DgeMode) -> bool:
    """Return whether GpSimd writes the descriptors; for one offset of all rows hardware does."""
    by_row = any(x.indirection and x.indirection.per_partition for x in (dst, src))
    if by_row or mode == DgeMode.swdge:
        return True
    return not machine().target.has_hwdge or dst.dtype != src.dtype


def _check_memory(call: str, dst: NkiTensor, src: NkiTensor) -> None:
    for operand, x in (("dst", dst), ("src", src)):
        check_tensor(call, operand, x, "sbuf", "private_hbm", "shared_hbm")
        if x._storage.on_chip:
            # DMA may begin at any partition
            check_pattern(call, operand, x)


def _check_mode(
    call: str, dst: NkiTensor, src: NkiTensor, priority: int | None, mode: DgeMode, engine: Engine
) -> None:
    target = machine().target
    if priority is not None:
        require(target.has_dma_priority, call, "priority", "is for trn3 or newer", priority, COPY)
        require(0 <= priority <= 3, call, "priority", "must be from 0 to 3", priority, COPY)
    if mode == DgeMode.hwdge:
        require(target.has_hwdge, call, "dge_mode", "may be hwdge from trn2 on", target.name, COPY)
        require(
            dst.dtype == src.dtype,
            call,
            "dst",
            "must have src's dtype for hwdge",
            f"{dst.dtype} and {src.dtype}",
            COPY,
        )
    if engine != Engine.unknown:
        require(
            mode == DgeMode.hwdge and engine in (Engine.sync, Engine.scalar),
            call,
            "engine",
            "must be sync or scalar, with hwdge",
            engine.name,
            COPY,
        )
    by_vector = [x for x in (dst, src) if x.indirection and x.indirection.per_partition]
    require(
        not by_vector or mode in (DgeMode.unknown, DgeMode.swdge),
        call,
        "dge_mode",
        "must be swdge for a vector_offset",
        mode.name,
        COPY,
    )


def _move(call: str, dst: NkiTensor, src: NkiTensor) -> None:
    note_read(call, "src", src)
    out, x = dst.array(), src.array()
    value = None
    if x is not None and out is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            value = convert(x, out.dtype).reshape(out.shape)
    mark(call, dst, value=value)
    if x is None:
        dst._storage.data = None
    elif out is not None:
        out[...] = value


def offsets(call: str, x: NkiTensor) -> Array:
    """Return the run-time indices of an indirect view, as int64."""
    way = cast(Indirection, x.indirection)
    if isinstance(way.index, VirtualRegister):
        return np.array([way.index.read(call)], np.int64)
    note_read(call, "the offset", way.index)
    index = way.index.array()
    if index is None:
        raise NotModelledError(f"{call}: indices that are not there without execution")
    found: Array = index.astype(np.int64).reshape(-1)
    return found


def _indirect(
    call: str, dst: NkiTensor, src: NkiTensor, mode: OobMode
) -> tuple[int, int, list[tuple[int, int]]]:
    """Move row by row, or all rows by one offset.

    Returns:
        the elements moved, the descriptors, and the ranges of elements on the indirect side.
    """
    view, direct = (dst, src) if dst.is_indirect() else (src, dst)
    way = cast(Indirection, view.indirection)
    index = offsets(call, view)
    fits = (index >= 0) & (index < way.limit)
    if not machine().weight:
        # a loop body that is traced without running has no indices
        fits, mode = np.zeros_like(fits), OobMode.skip
    require(
        bool(fits.all()) or mode == OobMode.skip,
        call,
        "an index",
        f"must be from 0 to {way.limit - 1}; oob_mode.error raises",
        index[~fits][:1],
        f"{COPY}, oob_mode",
    )
    count = view.shape[0]
    require(
        direct.shape[0] == count,
        call,
        "dst and src",
        f"must have the same {count} rows",
        direct.shape[0],
        f"{COPY}, indirect addressing",
    )
    rows = np.flatnonzero(fits) if way.per_partition else np.arange(count * int(fits.all()))
    places: list[tuple[int, int]] = []
    if len(rows):
        chosen = index[rows] if way.per_partition else np.full(len(rows), index[0])
        starts = view._offset + chosen * way.stride + rows * view._strides[0]
        inner = _inner(view)
        last = int(starts.max() + inner.max())
        # the pattern's offset may lead past the end even if the index is within bounds
        require(
            last < view._storage.size,
            call,
            view.name,
            f"must stay within its {view._storage.size} elements",
            last,
            COPY,
        )
        _note(call, dst, src, direct, rows, starts, inner)
        _copy_rows(view, direct, rows, starts, inner, gather=view is src)
        places = _ranges(starts, int(inner.max()) + 1)
    return len(rows) * (view.size // count), len(rows), places


def _ranges(starts: Array, length: int) -> list[tuple[int, int]]:
    """Return the ranges that rows cover; adjacent ranges are joined."""
    found: list[tuple[int, int]] = []
    for start in sorted(starts.tolist()):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], start + length))
        else:
            found.append((start, start + length))
    return found


def _inner(view: NkiTensor) -> Array:
    """Return the distances of the elements of a row from its first."""
    found = np.zeros(1, np.int64)
    for s, n in zip(view._strides[1:], view.shape[1:], strict=True):
        found = (found[:, None] + s * np.arange(n, dtype=np.int64)).reshape(-1)
    return found


def _note(
    call: str,
    dst: NkiTensor,
    src: NkiTensor,
    direct: NkiTensor,
    rows: Array,
    starts: Array,
    inner: Array,
) -> None:
    """Note the elements that are read and written on either side: those of rows that move."""
    for x in (src, dst):
        is_marked = x._storage.state is not None or x._storage.traffic is not None
        places = starts[:, None] + inner if is_marked else np.zeros(0, np.int64)
        parts = [x]
        if x is direct and len(rows) < x.shape[0] and is_marked:
            parts = [x.slice(0, int(r), int(r) + 1) for r in rows]
        where = None if x is direct else places
        for part in parts:
            if x is src:
                note_read(call, "src", part, where)
            else:
                mark(call, part, places=where)


def _copy_rows(
    view: NkiTensor, direct: NkiTensor, rows: Array, starts: Array, inner: Array, *, gather: bool
) -> None:
    dtype = NUMPY[view.dtype]
    # as bits, because NumPy makes windows of some dtypes only
    bits = np.dtype(f"u{dtype.itemsize}")
    data, other = view._storage.data, direct.array()
    if data is None or other is None:
        return
    flat = data.view(bits)
    with np.errstate(over="ignore", invalid="ignore"):
        if gather:
            if len(inner) == inner[-1] + 1:
                windows = np.lib.stride_tricks.sliding_window_view(flat, len(inner))
                found = windows[starts]
            else:
                found = flat[starts[:, None] + inner]
            value = convert(found.view(dtype), other.dtype)
            other[rows] = value.reshape(len(rows), *other.shape[1:])
        else:
            value = convert(other, dtype).reshape(other.shape[0], -1)[rows]
            flat[starts[:, None] + inner] = value.view(bits)


@named("nisa")
def dma_transpose(
    dst: NkiTensor,
    src: NkiTensor,
    axes: Any = None,
    priority: int | None = None,
    dge_mode: DgeMode = DgeMode.unknown,
    oob_mode: OobMode = OobMode.error,
    name: str | None = None,
) -> None:
    """Transpose on the way into SBUF; with a vector_offset, gather rows first."""
    call = "nisa.dma_transpose"
    if priority is not None or oob_mode != OobMode.error:
        raise NotModelledError(f"{call}: priority and oob_mode [{TRANSPOSE}]")
    dge_mode = check_enum(call, "dge_mode", dge_mode, DgeMode)
    check_tensor(call, "dst", dst, "sbuf")
    check_pattern(call, "dst", dst)
    check_tensor(call, "src", src, "sbuf", "private_hbm", "shared_hbm")
    require(src.ndim in AXES, call, "src", "must have 2, 3 or 4 dimensions", src.ndim, TRANSPOSE)
    expected = AXES[src.ndim]
    require(
        axes is None or tuple(axes) == expected,
        call,
        "axes",
        f"must be {expected} for {src.ndim} dimensions",
        axes,
        TRANSPOSE,
    )
    require(
        dst.dtype == src.dtype,
        call,
        "dst",
        f"must have src's dtype, {src.dtype}",
        dst.dtype,
        TRANSPOSE,
    )
    shape = tuple(src.shape[a] for a in expected)
    require(
        dst.shape == shape,
        call,
        "dst",
        f"must be {shape}, the transposed source",
        dst.shape,
        TRANSPOSE,
    )
    require(not dst.is_indirect(), call, "dst", "must not be indirect", dst, TRANSPOSE)
    if src.is_indirect():
        _gather_transposed(call, dst, src, expected, dge_mode)
        return
    _check_direct(call, src, dge_mode)
    note_read(call, "src", src)
    mark(call, dst)
    x, out = src.array(), dst.array()
    if x is not None and out is not None:
        out[...] = x.transpose(expected)
    _log("dma_transpose", dst, src, src.size, src.shape[0])


def _check_direct(call: str, src: NkiTensor, mode: DgeMode) -> None:
    """Check a transpose against the limits of hardware descriptors.

    Up to NKI 0.5 the last dimension had to be a multiple of 128; from 0.6 on it may be at most 128.
    All versions accept 128.
    """
    page = f"{TRANSPOSE}, direct"
    require(
        mode in (DgeMode.unknown, DgeMode.hwdge),
        call,
        "dge_mode",
        "must be hwdge or unknown unless src is indirect",
        mode.name,
        page,
    )
    if mode == DgeMode.unknown:
        return
    target = machine().target
    require(target.has_hwdge, call, "dge_mode", "may be hwdge from trn2 on", target.name, page)
    require(
        src.itemsize == 2, call, "src", "must have a dtype of 2 bytes for hwdge", src.dtype, page
    )
    require(
        src.shape[0] == 16 and src.shape[-1] == 128,
        call,
        "src",
        "must have 16 rows and 128 columns for hwdge",
        src.shape,
        page,
    )


def _gather_transposed(
    call: str, dst: NkiTensor, src: NkiTensor, axes: tuple[int, ...], mode: DgeMode
) -> None:
    way = cast(Indirection, src.indirection)
    rows = src.shape[0]
    target = machine().target
    page = f"{TRANSPOSE}, indirect"
    require(
        target.has_indirect_transpose,
        call,
        "src",
        "may be indirect from trn2 on",
        target.name,
        page,
    )
    require(
        mode in (DgeMode.unknown, DgeMode.swdge), call, "dge_mode", "must be swdge", mode.name, page
    )
    require(src.itemsize == 2, call, "src", "must have a dtype of 2 bytes", src.dtype, page)
    # columns become partitions: at most 128
    require(
        rows % 16 == 0 and 16 <= rows <= 128,
        call,
        "src",
        "must have 16 to 128 rows, in multiples of 16",
        rows,
        page,
    )
    require(
        way.index.dtype == "uint32", call, "the indices", "must be uint32", way.index.dtype, page
    )
    if src.ndim != 2 or not way.per_partition:
        raise NotModelledError(f"{call}: an indirect source but of rows in 2 dimensions [{page}]")
    index = offsets(call, src)
    fits = (index >= 0) & (index < way.limit)
    require(
        bool(fits.all()), call, "an index", f"must be below {way.limit}", index[~fits][:1], page
    )
    places = (src._offset + index * way.stride)[:, None] + _inner(src)
    last, size = int(places.max()), src._storage.size
    require(last < size, call, src.name, f"must stay within its {size} elements", last, page)
    note_read(call, "src", src, places)
    mark(call, dst)
    out = dst.array()
    if out is not None and src._storage.data is not None:
        out[...] = src._storage.data.view(NUMPY[src.dtype])[places].T
    _log("dma_transpose", dst, src, src.size, rows, "indirect")


def _row(x: NkiTensor) -> int:
    """Return the contiguous elements that one descriptor moves."""
    piece = 1
    for stride, size in zip(reversed(x._strides), reversed(x.shape), strict=True):
        if stride != piece and size != 1:
            break
        piece *= size
    on_chip = x._storage.on_chip
    return min(piece, x.free_size) if on_chip else piece


def _log(
    op: str,
    dst: NkiTensor,
    src: NkiTensor,
    elements: int,
    rows: int,
    form: str = "",
    places: list[tuple[int, int]] | None = None,
) -> None:
    wide = max(dst.itemsize if dst._storage.on_chip else 0, 0)
    outer = [x for x in (dst, src) if not x._storage.on_chip]
    # bytes of the HBM side; between tiles, of the destination
    nbytes = elements * (outer[0].itemsize if outer else wide)
    if not form:
        pieces = [_row(x) for x in (dst, src)]
        rows = max(1, elements // max(1, min(pieces)))
    reads = [src.region()]
    for x in (dst, src):
        if x.indirection is not None and isinstance(x.indirection.index, NkiTensor):
            reads.append(x.indirection.index.region())
    hbm = outer[0].name if outer else ""
    writes: tuple[Region, ...] = (dst.region(),)
    if dst.is_indirect():
        size = dst.itemsize
        writes = tuple((dst._storage.id, a * size, b * size) for a, b in places or ())
    if src.is_indirect():
        reads[0] = (src._storage.id, 0, 2**62)
    machine().log(
        Instruction(
            op,
            "dma",
            dst.free_size if dst._storage.on_chip else src.free_size,
            form=frozenset({form} - {""}),
            nbytes=nbytes,
            rows=rows,
            reads=tuple(reads),
            writes=writes,
            hbm=hbm,
            is_store=not dst._storage.on_chip,
        )
    )
