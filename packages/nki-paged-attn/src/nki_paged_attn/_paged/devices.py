"""Tensors of a Neuron device: what crosses from the host, and how the kernel is called on them.

Queries, keys, values and caches stay on the device. Only a call's table, its sinks and factors, and
the order of new tokens cross from the host, by ``put``.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, replace
from functools import lru_cache
from types import GenericAlias
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from ..sim.arrays import Array, is_tensor
from .backends import find_programs, load_kernel
from .call import Options
from .checks import largest_of
from .forms import WRITES, Buckets, Form
from .launch import (
    find_folding,
    find_form,
    form_tables,
    static_arguments,
)
from .sequences import Packed
from .tables import Tables

# PyTorch's names of Neuron devices, and modules that have the operator, the newest first
TORCH_DEVICES = ("neuron", "privateuseone", "xla")
TORCH_MODULES = (
    "torch_neuronx",
    "torch_neuronx.nki_hop",
    "libtorch_neuronx_lite.nki.nki_hop",
)
JAX_PLATFORMS = ("neuron",)
TENSORS = ("q", "k_new", "v_new", "k_cache", "v_cache", "tables", "numbers")


@dataclass(frozen=True)
class Described:
    """Shape and dtype of a tensor that NumPy cannot see."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def ndim(self) -> int:
        return len(self.shape)


class Device(Protocol):
    """Operations of a framework that a launch needs."""

    def put(self, array: Array) -> Any:
        """Return an array of the host on the device."""

    def put_into(self, array: Array, size: int) -> Any:
        """Return a tensor on the device that begins with an array; the rest is undefined."""

    def pad_rows(self, x: Any, rows: int) -> Any:
        """Return a tensor with undefined rows after its own."""

    def by_head(self, x: Any, places: Array) -> Any:
        """Return ``[tokens, heads, d]`` as ``[heads, places, d]``; 0 where there is no token."""

    def zeros(self, shape: tuple[int, ...], like: Any) -> Any:
        """Return zeros in the dtype of a tensor."""

    def multiply(self, x: Any, factor: float) -> Any:
        """Return a tensor times a number, in fp32, in its own dtype."""

    def finish_lse(self, lse: Any, threshold: float) -> Any:
        """Return ``-inf`` for values of at most a threshold."""

    def run(self, arguments: dict[str, Any], programs: int) -> Any:
        """Run the kernel of a form."""


def find_device(x: Any) -> Device | None:
    """Return the adapter of a tensor that is on a Neuron device, or None."""
    if is_tensor(x) and x.device.type in TORCH_DEVICES:
        return TorchDevice(x.device)
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(x, jax.Array):
        platforms = {d.platform for d in x.devices()}
        if platforms <= set(JAX_PLATFORMS):
            return JaxDevice()
        raise ValueError(
            f"a JAX array must be on a Neuron device, got {sorted(platforms)}; "
            "elsewhere pass NumPy arrays"
        )
    return None


def describe(x: Any) -> Described:
    """Return the shape and dtype of a tensor."""
    name = str(x.dtype).removeprefix("torch.")
    found = getattr(ml_dtypes, name, None)
    return Described(tuple(int(n) for n in x.shape), np.dtype(found or name))


class TorchDevice:
    """PyTorch on Neuron, through the operator for NKI kernels of PyTorch's Neuron package."""

    def __init__(self, device: Any) -> None:
        self.torch = sys.modules["torch"]
        self.device = device

    def put(self, array: Array) -> Any:
        return self.torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def put_into(self, array: Array, size: int) -> Any:
        found = self.put(array)
        result = found.new_empty((size,))
        result[: len(array)] = found
        return result

    def pad_rows(self, x: Any, rows: int) -> Any:
        if len(x) == rows:
            return x.contiguous()
        result = x.new_empty((rows, *x.shape[1:]))
        result[: len(x)] = x
        return result

    def by_head(self, x: Any, order: Any) -> Any:
        # a row of zeros after the tokens, for places without a token
        padded = self.torch.cat([x, x.new_zeros((1, *x.shape[1:]))])
        return padded.index_select(0, order).transpose(0, 1).contiguous()

    def zeros(self, shape: tuple[int, ...], like: Any) -> Any:
        return like.new_zeros(shape)

    def multiply(self, x: Any, factor: float) -> Any:
        return (x.float() * factor).to(x.dtype)

    def finish_lse(self, lse: Any, threshold: float) -> Any:
        return lse.masked_fill(lse <= threshold, float("-inf"))

    def run(self, arguments: dict[str, Any], programs: int) -> Any:
        return torch_operator()(arguments, programs)


class JaxDevice:
    """JAX on Neuron: ``nki.jit`` takes its arrays."""

    def __init__(self) -> None:
        self.numpy = importlib.import_module("jax.numpy")

    def put(self, array: Array) -> Any:
        return self.numpy.asarray(array)

    def put_into(self, array: Array, size: int) -> Any:
        return self.pad_rows(self.put(array), size)

    def pad_rows(self, x: Any, rows: int) -> Any:
        spare = [(0, rows - x.shape[0])] + [(0, 0)] * (x.ndim - 1)
        return self.numpy.pad(x, spare)

    def by_head(self, x: Any, order: Any) -> Any:
        padded = self.pad_rows(x, x.shape[0] + 1)
        return self.numpy.take(padded, order, axis=0).transpose(1, 0, 2)

    def zeros(self, shape: tuple[int, ...], like: Any) -> Any:
        return self.numpy.zeros(shape, like.dtype)

    def multiply(self, x: Any, factor: float) -> Any:
        return (x.astype("float32") * factor).astype(x.dtype)

    def finish_lse(self, lse: Any, threshold: float) -> Any:
        return self.numpy.where(lse <= threshold, -np.inf, lse)

    def run(self, arguments: dict[str, Any], programs: int) -> Any:
        return load_kernel()[programs](**arguments)


@lru_cache(maxsize=1)
def torch_operator() -> Any:
    """Return a function of the kernel's arguments and the programs, as PyTorch's operator.

    ``nki_op`` makes an operator with a fake implementation, which torch.compile does not break up.
    If there is only ``wrap_nki``, as in vllm-neuron's light package, that is called.
    """
    found: dict[str, Any] = {}
    for name in TORCH_MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        for wanted in ("wrap_nki", "nki_op"):
            if hasattr(module, wanted):
                found.setdefault(wanted, getattr(module, wanted))
    wrap = found.get("wrap_nki")
    if wrap is None:
        raise ImportError(
            "tensors of a Neuron device need torch_neuronx or libtorch_neuronx_lite with wrap_nki, "
            "and found neither"
        )
    kernel = wrap(load_kernel())

    def call(statics: dict[str, Any], programs: int, tensors: tuple[Any, ...]) -> Any:
        # without the written caches, which follow
        return kernel[programs](**dict(zip(TENSORS, tensors, strict=True)), **statics)[:2]

    if not found.get("nki_op"):
        return lambda arguments, programs: call(*_split(arguments, programs))
    # the operator takes the number of the constants that are compiled in
    forms: list[tuple[dict[str, Any], int]] = []

    def form(q, k_new, v_new, k_cache, v_cache, tables, numbers, number):  # type: ignore[no-untyped-def]
        statics, programs = forms[number]
        tensors = (q, k_new, v_new, k_cache, v_cache, tables, numbers)
        return call(statics, programs, tensors)

    tensor = sys.modules["torch"].Tensor
    form.__annotations__ = dict.fromkeys(TENSORS, tensor) | {
        "number": int,
        "return": GenericAlias(tuple, (tensor, tensor)),
    }
    make = found["nki_op"]
    operators = {
        False: make("nki_paged_attn::form", mutates_args={})(form),
        True: make("nki_paged_attn::form_that_writes", mutates_args={"k_cache", "v_cache"})(form),
    }

    def run(arguments: dict[str, Any], programs: int) -> Any:
        statics, _, tensors = _split(arguments, programs)
        if (statics, programs) not in forms:
            forms.append((statics, programs))
        writes = statics["loops"][0][0] == WRITES
        return operators[writes](*tensors, forms.index((statics, programs)))

    return run


def _split(arguments: dict[str, Any], programs: int) -> tuple[dict[str, Any], int, tuple[Any, ...]]:
    statics = {name: x for name, x in arguments.items() if name not in TENSORS}
    return statics, programs, tuple(arguments[name] for name in TENSORS)


@dataclass(frozen=True)
class Prepared:
    """What calls with one batch share: the form, and its table on the device.

    Attributes:
        tokens, heads: of the queries.
        order: token at each place of new keys, on the device; a place without a token has the
            number after all tokens. None if the keys are in the cache.
        multiplier: of the queries, if the scale is too small to be a factor; None for zeros.
    """

    form: Form
    options: Options
    tokens: int
    heads: int
    tables: Any
    numbers: Any
    order: Any
    multiplier: float | None


def prepare(
    device: Device,
    batch: Packed,
    options: Options,
    buckets: Buckets,
    heads: int,
    page: tuple[int, int],
) -> Prepared:
    """Plan a batch on the host, and put its table on the device.

    Args:
        page: tokens of a block, and the head dimension.
    """
    kv_heads = len(options.k_scales)
    programs = find_programs()
    form = find_form(batch, buckets, heads, kv_heads, *page, programs)
    multiplier, options = find_folding(options)
    tables, places = form_tables(batch, form, options)
    order = None
    if form.has_new:
        order = device.put(np.where(places < 0, batch.tokens, places).astype(np.int32))
    return Prepared(
        form,
        options,
        batch.tokens,
        heads,
        _put_tables(device, tables),
        device.put(tables.numbers),
        order,
        multiplier,
    )


def _put_tables(device: Device, tables: Tables) -> Any:
    # only the used part crosses
    return device.put_into(tables.table[: tables.used], len(tables.table))


def launch_prepared(
    device: Device, q: Any, new: tuple[Any, Any], caches: tuple[Any, Any], prepared: Prepared
) -> tuple[Any, Any]:
    """Run a form on tensors of the device; return out like q, and lse or None.

    Args:
        q: ``[tokens, heads, head_dim]``.
        new: keys and values by place, ``[kv_heads, places, head_dim]``.
        caches: of keys and of values, ``[blocks, kv_heads, block_size, head_dim]``.
    """
    form, options = prepared.form, prepared.options
    if form.writes:
        dtype = describe(caches[0]).dtype.name
        options = replace(options, largest=largest_of(dtype, options.target))
    rows = prepared.tokens * prepared.heads
    if prepared.multiplier is None:
        q = device.zeros(tuple(q.shape), q)
    elif prepared.multiplier != 1.0:
        q = device.multiply(q, prepared.multiplier)
    statics = static_arguments(form, options)
    arguments = {
        "q": device.pad_rows(q.reshape(rows, q.shape[-1]), form.bucket.tokens * prepared.heads),
        "k_new": new[0],
        "v_new": new[1],
        "k_cache": caches[0],
        "v_cache": caches[1],
        "tables": prepared.tables,
        "numbers": prepared.numbers,
        **statics,
    }
    out, lse, *_ = device.run(arguments, form.programs)
    out = out[:rows].reshape(q.shape)
    if not options.has_lse:
        return out, None
    lse = lse[:rows].reshape(prepared.tokens, prepared.heads).T
    return out, device.finish_lse(lse, -statics["no_maximum"] / 2)
