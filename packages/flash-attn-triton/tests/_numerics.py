"""The cases that every numerics test is made of, and what they are held to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from attn_common import detect
from flash_attn_triton import api, flash_attn_func, flash_attn_varlen_func
from flash_attn_triton._dense import ops, tiles
from flash_attn_triton._linked.host.forms import Memory
from flash_attn_triton._reference.fixed import visible_keys
from flash_attn_triton._reference.philox import dropout_keep_mask, keep_scale
from flash_attn_triton._reference.reference import attention_reference, varlen_attention_reference
from torch import Tensor

from ._linked import numerics
from ._linked.bounds import attention_bounds
from ._linked.budget import Maker, offsets
from ._linked.numerics import Feature, Packed, Shape, compare, fixed, run, run_eager, run_oracle
from ._linked.numerics import incoming as incoming  # for tests
from ._linked.rounding import Bounded, assert_within

DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks")

# lengths are against the interpreter's 16 x 16 tiles
SMALL = [
    Shape(1, 16, 16, 1, 1, 16),  # one tile exactly
    Shape(2, 33, 33, 2, 2, 32),  # a tail of one; two sequences
    Shape(1, 17, 40, 4, 2, 24),  # GQA, more keys than queries, head_dim no power of two
    Shape(1, 40, 17, 2, 1, 64),  # MQA, more queries than keys: causal hides a tile of rows
    Shape(2, 1, 50, 4, 1, 80),  # decode
    Shape(2, 1, 1, 2, 1, 16),  # one token
    Shape(1, 5, 7, 1, 1, 1),  # one number per head
    Shape(1, 20, 20, 1, 1, 96),
    Shape(1, 20, 20, 1, 1, 112),
    Shape(1, 20, 33, 2, 1, 192, 128),  # v narrower
    Shape(1, 17, 17, 1, 1, 16, 40),  # v wider
    Shape(1, 17, 17, 1, 1, 256),  # widest
    Shape(2, 0, 5, 2, 1, 16),  # no query
    Shape(2, 5, 0, 2, 1, 16),  # no key
    Shape(0, 5, 5, 2, 1, 16),  # no sequence
]
# two sequences, GQA, two tiles with a tail on either side: for what is tried one by one
MEDIUM = Shape(2, 17, 20, 2, 1, 16)
LARGE = [
    Shape(2, 1024, 1024, 8, 2, 128),
    Shape(1, 2000, 4000, 4, 4, 256),
    Shape(1, 4096, 4096, 4, 1, 64),
    Shape(1, 1500, 1500, 2, 2, 192, 128),
    Shape(4, 1, 4096, 8, 1, 128),
    Shape(1, 1100, 1030, 2, 2, 96),
    Shape(3, 129, 257, 2, 1, 65),
    Shape(1, 513, 777, 4, 2, 80),
]


class Case(numerics.Case):
    """Arguments of one call: what may require grad, and everything else."""

    @property
    def function(self) -> Callable[..., Any]:
        return flash_attn_varlen_func if self.packed else flash_attn_func

    @property
    def reference(self) -> Callable[..., Any]:
        return varlen_attention_reference if self.packed else attention_reference

    def __call__(self, **changes: Any) -> tuple[Tensor, Tensor]:
        """Call the function under test: ``(out, lse)``."""
        torch.manual_seed(0)  # dropout draws its seed here
        return self.function(**self.inputs, **{**self.options, "return_lse": True, **changes})


def _bias(batch: bool, head: bool, row: bool, col: bool, dtype: torch.dtype | None = None) -> Any:
    def make(m: Maker, s: Shape) -> dict[str, Any]:
        size = (s.batch, s.heads_q, s.seqlen_q, s.seqlen_k)
        kept = (n if keep else 1 for n, keep in zip(size, (batch, head, row, col), strict=True))
        return {"bias": m.randn(*kept, dtype=dtype)}

    return make


def _spans(batch: bool, count: int) -> Any:
    """Spans around a diagonal, with ends inside tiles and past the keys; some rows see nothing."""

    def make(m: Maker, s: Shape) -> dict[str, Any]:
        size = (s.batch if batch else 1, s.seqlen_q, count)
        place = torch.arange(s.seqlen_q, device=m.device)[None, :, None] * s.seqlen_k
        place = place.float() / max(s.seqlen_q, 1)
        start, length = (m.uniform(*size, low=0.0, high=s.seqlen_k / 2) for _ in range(2))
        start = (place - start).int()
        return {"spans": torch.stack([start, start + length.int() * 2 - 3], -1).int()}

    return make


# name: arguments of a call, made for a shape. Two features go together when they set different
# arguments; values are of an order at which a kernel that ignored them would be far off.
FEATURES: dict[str, Feature] = {
    "causal": fixed(causal=True),
    "window_left": fixed(window_size=(5, -1)),
    "window_right": fixed(window_size=(-1, 3)),
    "window": fixed(window_size=(7, 2)),
    "window_self": fixed(window_size=(0, 0)),
    "window_wide": fixed(window_size=(5000, 5000)),
    "softcap": fixed(softcap=1.5),
    "alibi": lambda m, s: {"alibi_slopes": m.uniform(s.heads_q, low=0.05, high=0.5)},
    "alibi_batch": lambda m, s: {"alibi_slopes": m.uniform(s.batch, s.heads_q, low=0.05, high=0.5)},
    "bias": _bias(True, True, True, True),
    "bias_fp32": _bias(False, True, True, True, torch.float32),
    "bias_keys": _bias(True, False, False, True),
    "sinks": lambda m, s: {"sinks": m.randn(s.heads_q, dtype=torch.float32)},
    "dropout": fixed(dropout_p=0.3),
    "spans": _spans(False, 1),
    "spans_batch": _spans(True, 1),
    "spans_two": _spans(True, 2),
    "scale_zero": fixed(softmax_scale=0.0),
    "scale_negative": fixed(softmax_scale=-0.7),
}


# what spans take the place of, and what does not go with them
EXCLUDED = ("causal", "window", "bias", "alibi")


def compatible(names: Iterable[str]) -> bool:
    """Say whether these features set different arguments, of which none excludes another."""
    names = list(names)
    others = [name for name in names if not name.startswith("spans")]
    if len(others) < len(names) and any(name.startswith(EXCLUDED) for name in others):
        return False
    return numerics.compatible(FEATURES, names, Shape(1, 1, 1, 1, 1, 1))


def make_case(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device | str,
    features: Sequence[str] = (),
    seed: int = 0,
) -> Case:
    """Make a fixed-length case with values of order one."""
    m = Maker(device, dtype, seed)
    b, sq, sk, hq, hk, d, dv = shape
    made = {"q": m.randn(b, sq, hq, d), "k": m.randn(b, sk, hk, d)}
    made["v"] = m.randn(b, sk, hk, d if dv is None else dv)
    for name in features:
        made.update(FEATURES[name](m, shape))
    return _split(made, packed=False)


def make_packed(
    shape: Packed,
    dtype: torch.dtype,
    device: torch.device | str,
    features: Sequence[str] = (),
    seed: int = 0,
) -> Case:
    """Make a packed case; biases and slopes are those of the padded form."""
    m = Maker(device, dtype, seed)
    fixed = shape.as_fixed
    tq, tk = sum(shape.lengths_q) + shape.padding, sum(shape.lengths_k) + shape.padding
    hq, hk, d = shape.heads_q, shape.heads_k, shape.head_dim
    made = {"q": m.randn(tq, hq, d), "k": m.randn(tk, hk, d)}
    made["v"] = m.randn(tk, hk, d if shape.head_dim_v is None else shape.head_dim_v)
    made["cu_seqlens_q"] = offsets(shape.lengths_q, device)
    made["cu_seqlens_k"] = offsets(shape.lengths_k, device)
    made.update(max_seqlen_q=fixed.seqlen_q, max_seqlen_k=fixed.seqlen_k)
    for name in features:
        made.update(FEATURES[name](m, fixed))
    if "spans" in made:
        spans = made["spans"].expand(fixed.batch, *made["spans"].shape[1:])
        rows = [own[:length] for own, length in zip(spans, shape.lengths_q, strict=True)]
        made["spans"] = torch.cat([*rows, spans.new_zeros(shape.padding, *spans.shape[2:])])
    return _split(made, packed=True)


def _split(made: dict[str, Any], packed: bool) -> Case:
    inputs = {name: made.pop(name) for name in DIFFERENTIABLE if name in made}
    return Case(inputs, made, packed)


@contextlib.contextmanager
def only_portable() -> Iterator[None]:
    """Keep calls from the kernels for Hopper."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "HOPPER", False)
        patch.setattr(api, "_known", Memory())
        yield


def bounds_of(case: Case, got: dict[str, Tensor]) -> dict[str, Bounded]:
    """Return the a-priori bounds of a fixed-length case whose results are given; {} if packed."""
    if case.packed:
        return {}
    options = {name: x for name, x in case.options.items() if name != "deterministic"}
    options |= dropped(case, options.pop("dropout_p", 0.0))
    if (spans := options.pop("spans", None)) is not None:
        lengths = case.inputs["q"].shape[1], case.inputs["k"].shape[1]
        options["visible"] = visible_keys(*lengths, -1, -1, spans.device, spans=spans)
    dout, dlse = incoming(got["out"], got["lse"]) if "dq" in got else (None, None)
    options |= {"dout": dout, "dlse": dlse, "truncates": truncates(got["out"])}
    return attention_bounds(**case.inputs, **options)


def truncates(out: Tensor) -> bool:
    """Say whether what made a result cuts off where others round."""
    return ops.interpreted() and out.device.type == "cpu"


def dropped(case: Case, dropout_p: float) -> dict[str, Any]:
    """Return, for bounds, which weights of a fixed-length case ``run`` keeps; {} without dropout.

    A call draws seed and offset once, and ``run`` seeds the generator before.
    """
    if not dropout_p:
        return {}
    (batch, queries, heads), keys = case.inputs["q"].shape[:3], case.inputs["k"].shape[1]
    torch.manual_seed(0)
    device = case.inputs["q"].device
    state = torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=device)
    kept = dropout_keep_mask(state, dropout_p, batch, heads, queries, keys)
    return {"kept": kept, "keep_scale": keep_scale(dropout_p)}


def check(case: Case, *, grad: bool = True, portable: bool = True) -> dict[str, Tensor]:
    """Run function, eager and oracle, and compare all results; returns the function's.

    On Hopper the portable kernels, which serve what its own do not, are held to the same, if asked.
    """
    got = run(case, grad=grad)
    oracle = run_oracle(case, grad=grad)
    eager = run_eager(case, oracle, grad=grad)
    if portable and detect(case.inputs["q"].device).is_hopper:
        with only_portable():
            compare(case, run(case, grad=grad), oracle, eager)
    return compare(case, got, oracle, eager)


def check_bounds(case: Case, got: dict[str, Tensor]) -> None:
    """Hold results to their a-priori bounds, element by element."""
    assert_within(got, bounds_of(case, got))
