"""Functions of ``nki.language`` that return tiles, each made of instructions of ``nki.isa``.

The documents call them experimental. Operands do not broadcast; a number fits every tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from .. import isa
from ..calls import named
from ..dtypes import FLOATS, NUMPY
from ..errors import Missing, NotModelledError, is_integer, is_number, require
from ..isa.scan import QUADRANT
from ..memory.machine import machine
from ..memory.tensor import NkiTensor
from ..ops import OPS, Op


def new(shape: Any, dtype: str, buffer: str = "sbuf", name: str = "") -> NkiTensor:
    """Allocate a tile."""
    return NkiTensor.whole(machine().allocate(name, tuple(shape), dtype, buffer))


def need(call: str, operand: str, x: Any) -> None:
    page = call.replace("nl.", "nki.language.")
    require(isinstance(x, NkiTensor), call, operand, "must be a tensor", type(x).__name__, page)


def _need_number(call: str, operand: str, x: Any) -> None:
    page = call.replace("nl.", "nki.language.")
    require(is_number(x), call, operand, "must be a number", type(x).__name__, page)


def _promote(tiles: list[NkiTensor]) -> str:
    """Return the dtype of a result: the operands' dtype, or the widest of them."""
    kinds = {x.dtype for x in tiles}
    if len(kinds) == 1:
        return kinds.pop()
    floats = sorted(kinds & FLOATS, key=lambda k: NUMPY[k].itemsize)
    if not floats:
        return sorted(kinds, key=lambda k: NUMPY[k].itemsize)[-1]
    wide = [k for k in floats if NUMPY[k].itemsize == NUMPY[floats[-1]].itemsize]
    return wide[0] if len(wide) == 1 else "float32"


# tokens whose function takes more than their instruction
COMPOSED: dict[str, Callable[..., NkiTensor]] = {}


class Function(Op):
    """An operator token that may be called, on tiles and numbers."""

    def __call__(self, x: Any, y: Any = None, dtype: str | None = None) -> NkiTensor:
        if self.name in COMPOSED:
            return COMPOSED[self.name](x, dtype)
        call, page = f"nl.{self.name}", f"nki.language.{self.name}"
        tiles = [t for t in (x, y) if isinstance(t, NkiTensor)]
        require(bool(tiles), call, "x", "must be a tile", x, page)
        require(
            (y is None) == (self.binary is None),
            call,
            "y",
            "must be given" if self.binary else "must be left out",
            y,
            page,
        )
        first = tiles[0]
        require(
            all(t.shape == first.shape for t in tiles),
            call,
            "y",
            f"must have x's shape, {first.shape}; operands do not broadcast",
            tiles[-1].shape,
            page,
        )
        out = new(first.shape, dtype or _promote(tiles))
        if self.binary is None:
            isa.activation(out, self, x)
        elif len(tiles) == 2:
            isa.tensor_tensor(out, x, y, self)
        else:
            reverse = not isinstance(x, NkiTensor)
            isa.tensor_scalar(out, first, self, x if reverse else y, reverse)
        return out


TOKENS = {
    name: Function(**{f.name: getattr(op, f.name) for f in fields(Op)}) for name, op in OPS.items()
}


@named("nl")
def load(src: NkiTensor, dtype: str | None = None) -> NkiTensor:
    """Copy a tensor of HBM into SBUF."""
    need("nl.load", "src", src)
    out = new(src.shape, dtype or src.dtype)
    isa.dma_copy(out, src)
    return out


@named("nl")
def load_transpose2d(src: NkiTensor, dtype: str | None = None) -> NkiTensor:
    """Copy a tensor of HBM into SBUF with its two dimensions exchanged."""
    need("nl.load_transpose2d", "src", src)
    page = "nki.language.load_transpose2d"
    require(src.ndim == 2, "nl.load_transpose2d", "src", "must have 2 dimensions", src.ndim, page)
    turned = new(src.shape[::-1], src.dtype)
    isa.dma_transpose(turned, src)
    if dtype is None or dtype == turned.dtype:
        return turned
    out = new(turned.shape, dtype)
    isa.tensor_copy(out, turned)
    return out


@named("nl")
def store(dst: NkiTensor, value: NkiTensor) -> None:
    """Copy a tile of SBUF into HBM."""
    isa.dma_copy(dst, value)


@named("nl")
def full(
    shape: Any, fill_value: float, dtype: str, buffer: str = "sbuf", name: str = ""
) -> NkiTensor:
    """Return a tile of one number."""
    _need_number("nl.full", "fill_value", fill_value)
    out = new(shape, dtype, buffer or "sbuf", name)
    isa.memset(out, float(fill_value) if out.dtype in FLOATS else int(fill_value))
    return out


@named("nl")
def zeros(shape: Any, dtype: str, buffer: str = "sbuf", name: str = "") -> NkiTensor:
    """Return a tile of zeros."""
    return full(shape, 0, dtype, buffer, name)


@named("nl")
def ones(shape: Any, dtype: str, buffer: str = "sbuf", name: str = "") -> NkiTensor:
    """Return a tile of ones."""
    return full(shape, 1, dtype, buffer, name)


@named("nl")
def zeros_like(x: NkiTensor, dtype: str | None = None, buffer: Any = None) -> NkiTensor:
    """Return zeros in the shape of a tile."""
    return full(x.shape, 0, dtype or x.dtype, buffer or x.buffer)


@named("nl")
def empty_like(x: NkiTensor, dtype: str | None = None, buffer: Any = None) -> NkiTensor:
    """Return a tensor in the shape of another; its contents are undefined."""
    return new(x.shape, dtype or x.dtype, buffer or x.buffer)


def _reduction(name: str, op: str) -> Callable[..., NkiTensor]:
    def reduce(
        x: NkiTensor, axis: Any, dtype: str | None = None, keepdims: bool = False
    ) -> NkiTensor:
        need(f"nl.{name}", "x", x)
        axes = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
        sizes = [n if d not in axes else 1 for d, n in enumerate(x.shape)]
        if not keepdims:
            sizes = [n for d, n in enumerate(x.shape) if d not in axes] or [1]
        out = new(sizes if len(sizes) > 1 else (*sizes, 1), dtype or x.dtype)
        isa.tensor_reduce(out, OPS[op], x, axis, keepdims=keepdims)
        return out

    reduce.__name__ = name
    reduce.__doc__ = f"Reduce the last dimensions of a tile by {op}, in fp32."
    return named("nl")(reduce)


sum = _reduction("sum", "add")
prod = _reduction("prod", "multiply")
max = _reduction("max", "maximum")
min = _reduction("min", "minimum")


@named("nl")
def mean(x: NkiTensor, axis: Any, dtype: str | None = None, keepdims: bool = False) -> NkiTensor:
    """Return the mean over the last dimensions, in fp32."""
    total = sum(x, axis, "float32", keepdims)
    out = new(total.shape, dtype or x.dtype)
    isa.tensor_scalar(out, total, OPS["multiply"], total.size / x.size)
    return out


@named("nl")
def divide(x: Any, y: Any, dtype: str | None = None) -> NkiTensor:
    """Return ``x / y``: a reciprocal and a product."""
    if not isinstance(y, NkiTensor):
        _need_number("nl.divide", "y", y)
        return TOKENS["multiply"](x, float(np.float64(1) / y), dtype)
    inverse = new(y.shape, "float32")
    isa.reciprocal(inverse, y)
    return TOKENS["multiply"](x, inverse, dtype or _promote([t for t in (x, y) if _is_tile(t)]))


def _is_tile(x: Any) -> bool:
    return isinstance(x, NkiTensor)


@named("nl")
def negative(x: NkiTensor, dtype: str | None = None) -> NkiTensor:
    """Return ``-x``."""
    return TOKENS["multiply"](x, -1.0, dtype)


@named("nl")
def where(condition: NkiTensor, x: Any, y: Any, dtype: str | None = None) -> NkiTensor:
    """Return x where a tile of 1 and 0 holds 1, else y; both may be numbers."""
    need("nl.where", "condition", condition)
    tiles = [t for t in (x, y) if isinstance(t, NkiTensor)]
    out = new(condition.shape, dtype or (_promote(tiles) if tiles else "float32"))
    if isinstance(y, NkiTensor):
        isa.tensor_copy(out, y)
    else:
        isa.memset(out, float(y) if out.dtype in FLOATS else int(y))
    chosen = new(condition.shape, "uint8")
    isa.tensor_scalar(chosen, condition, OPS["not_equal"], 0.0)
    source = x
    if isinstance(x, NkiTensor) and x.dtype != out.dtype:
        source = new(x.shape, out.dtype)
        isa.tensor_copy(source, x)
    isa.tensor_copy_predicated(out, source, chosen)
    return out


@named("nl")
def transpose(x: NkiTensor, dtype: str | None = None) -> NkiTensor:
    """Return a tile with its two dimensions exchanged."""
    turned = new((x.free_size, x.shape[0]), x.dtype, "psum")
    isa.nc_transpose(turned, x, engine=isa.engine.tensor)
    out = new(turned.shape, dtype or x.dtype)
    isa.tensor_copy(out, turned)
    return out


@named("nl")
def matmul(x: NkiTensor, y: NkiTensor, transpose_x: bool = False) -> NkiTensor:
    """Return ``x @ y`` in PSUM; transpose_x: x already is the stationary operand."""
    stationary = x if transpose_x else transpose(x)
    out = new((stationary.free_size, y.free_size), "float32", "psum")
    isa.nc_matmul(out, stationary, y)
    return out


@named("nl")
def expand_dims(x: NkiTensor, axis: int) -> NkiTensor:
    """Return a view with one more dimension, of one element."""
    return x.expand_dim(axis)


@named("nl")
def broadcast_to(x: NkiTensor, shape: Any, dtype: str | None = None) -> NkiTensor:
    """Return a tile in which dimensions of one element are repeated, and one partition if so."""
    need("nl.broadcast_to", "x", x)
    same = isinstance(shape, (tuple, list)) and len(shape) == x.ndim
    page = "nki.language.broadcast_to"
    require(same, "nl.broadcast_to", "shape", f"must have {x.ndim} dimensions", shape, page)
    view = x
    if x.shape[0] == 1 != shape[0]:
        view = new((shape[0], *x.shape[1:]), x.dtype)
        for start in range(0, shape[0], QUADRANT):
            end = start + QUADRANT if start + QUADRANT < shape[0] else shape[0]
            isa.nc_stream_shuffle(view[start:end], x, [0] * QUADRANT)
    for dim, (have, size) in enumerate(zip(view.shape, shape, strict=True)):
        if have != size:
            view = view.broadcast(dim, size)
    out = new(view.shape, dtype or x.dtype)
    isa.tensor_copy(out, view)
    return out


@named("nl")
def shared_constant(constant: Any, dtype: str | None = None) -> NkiTensor:
    """Return a tensor of HBM that holds an array, or what a file ``.npy`` holds."""
    array = np.load(constant) if isinstance(constant, (str, Path)) else np.asarray(constant)
    if dtype is not None:
        array = array.astype(NUMPY[dtype])
    array = np.array(array, order="C")
    array.flags.writeable = False
    return NkiTensor.whole(machine().take("constant", array))


@named("nl")
def shared_identity_matrix(n: int, dtype: str = "uint8", dst: NkiTensor | None = None) -> NkiTensor:
    """Return the identity, ``[n, n]``, as a tile of SBUF, or in ``dst``."""
    call, page = "nl.shared_identity_matrix", "nki.language.shared_identity_matrix"
    require(is_integer(n) and n >= 1, call, "n", "must be an integer from 1", n, page)
    out = new((n, n), dtype) if dst is None else dst
    isa.dma_copy(out, shared_constant(np.eye(n), out.dtype))
    return out


def assign(view: NkiTensor, value: Any) -> None:
    """Write a tile, or a number, to a part of a tensor: ``t[...] = x``."""
    if not isinstance(value, NkiTensor):
        _need_number("t[...] = x", "x", value)
        isa.memset(view, value)
    elif view._storage.on_chip and value._storage.on_chip:
        isa.tensor_copy(view, value)
    else:
        isa.dma_copy(view, value)


NkiTensor.assign = staticmethod(assign)


def __getattr__(name: str) -> Any:
    if name in TOKENS:
        return TOKENS[name]
    if name.startswith("_"):
        raise AttributeError(name)
    if name in MISSING:
        return Missing(f"nl.{name}", f"nki.language.{name}")
    if name in OLD:
        raise NotModelledError(f"nl.{name} is of neuronxcc.nki; {OLD[name]} [nki/migration]")
    raise NotModelledError(f"nl.{name} is not modelled [nki.language.{name}]")


# names of AWS's stubs that are not modelled
MISSING = frozenset(
    {
        "abs_max",
        "abs_min",
        "all",
        "average",
        "bypass",
        "dropout",
        "fmod",
        "gather_flattened",
        "invert",
        "mod",
        "prelu",
        "rand",
        "random_seed",
        "rms_norm",
        "var",
    }
)
# functions of neuronxcc.nki, and their replacements
OLD = {
    "arange": "use slices, nl.ds or .ap()",
    "mgrid": "use slices, nl.ds or .ap()",
    "par_dim": "the first dimension is the partition",
    "spmd_dim": "use kernel[2] and nl.program_id(0)",
    "nc": "use kernel[2] and nl.program_id(0)",
    "atomic_rmw": "use nisa.dma_compute",
    "loop_reduce": "use nisa.tensor_reduce",
}
