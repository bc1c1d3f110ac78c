"""The cases that every numerics test is made of, and what they are held to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from attn_common import detect
from flash_attn_triton import _configs, api, flash_attn_func, flash_attn_varlen_func
from flash_attn_triton._linked.host.forms import Memory
from flash_attn_triton.reference import attention_reference, varlen_attention_reference
from torch import Tensor

from ._linked.budget import TF32X3_UNIT, Maker, assert_no_worse_than_eager, offsets

DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks")


class Shape(NamedTuple):
    """A fixed-length problem."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int | None = None

    def __str__(self) -> str:
        text = "b{}-q{}-k{}-h{}:{}-d{}".format(*self[:6])
        return text if self.head_dim_v is None else f"{text}:{self.head_dim_v}"


class Packed(NamedTuple):
    """A packed problem; ``padding`` tokens follow the last sequence on both sides."""

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int | None = None
    padding: int = 0

    def __str__(self) -> str:
        text = "q{}-k{}".format(*("_".join(map(str, n)) for n in self[:2]))
        return f"{text}-h{self.heads_q}:{self.heads_k}-d{self.head_dim}-p{self.padding}"

    @property
    def as_fixed(self) -> Shape:
        """The smallest fixed-length problem that holds every sequence."""
        return Shape(
            len(self.lengths_q), max(self.lengths_q, default=0), max(self.lengths_k, default=0),
            self.heads_q, self.heads_k, self.head_dim, self.head_dim_v,
        )  # fmt: skip


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


@dataclass
class Case:
    """Arguments of one call: what may require grad, and everything else."""

    inputs: dict[str, Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    packed: bool = False

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

    def with_inputs(self, **changes: Tensor) -> Case:
        return Case({**self.inputs, **changes}, self.options, self.packed)

    def with_options(self, **changes: Any) -> Case:
        return Case(self.inputs, {**self.options, **changes}, self.packed)


def _bias(batch: bool, head: bool, row: bool, col: bool, dtype: torch.dtype | None = None) -> Any:
    def make(m: Maker, s: Shape) -> dict[str, Any]:
        size = (s.batch, s.heads_q, s.seqlen_q, s.seqlen_k)
        kept = (n if keep else 1 for n, keep in zip(size, (batch, head, row, col), strict=True))
        return {"bias": m.randn(*kept, dtype=dtype)}

    return make


def _fixed(**options: Any) -> Any:
    return lambda _maker, _shape: options


# name: arguments of a call, made for a shape. Two features go together when they set different
# arguments; values are of an order at which a kernel that ignored them would be far off.
FEATURES: dict[str, Callable[[Maker, Shape], dict[str, Any]]] = {
    "causal": _fixed(causal=True),
    "window_left": _fixed(window_size=(5, -1)),
    "window_right": _fixed(window_size=(-1, 3)),
    "window": _fixed(window_size=(7, 2)),
    "window_self": _fixed(window_size=(0, 0)),
    "window_wide": _fixed(window_size=(5000, 5000)),
    "softcap": _fixed(softcap=1.5),
    "alibi": lambda m, s: {"alibi_slopes": m.uniform(s.heads_q, low=0.05, high=0.5)},
    "alibi_batch": lambda m, s: {"alibi_slopes": m.uniform(s.batch, s.heads_q, low=0.05, high=0.5)},
    "bias": _bias(True, True, True, True),
    "bias_fp32": _bias(False, True, True, True, torch.float32),
    "bias_keys": _bias(True, False, False, True),
    "sinks": lambda m, s: {"sinks": m.randn(s.heads_q, dtype=torch.float32)},
    "dropout": _fixed(dropout_p=0.3),
    "scale_zero": _fixed(softmax_scale=0.0),
    "scale_negative": _fixed(softmax_scale=-0.7),
}


def compatible(names: Iterable[str]) -> bool:
    """Say whether these features set different arguments."""
    maker, shape = Maker("cpu", torch.float32), Shape(1, 1, 1, 1, 1, 1)
    arguments = [key for name in names for key in FEATURES[name](maker, shape)]
    return len(arguments) == len(set(arguments))


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
    return _split(made, packed=True)


def _split(made: dict[str, Any], packed: bool) -> Case:
    inputs = {name: made.pop(name) for name in DIFFERENTIABLE if name in made}
    return Case(inputs, made, packed)


def run(
    case: Case,
    function: Callable[..., Any] | None = None,
    *,
    grad: bool = True,
    unrounded_out: Tensor | None = None,
    nudge: float = 0.0,
) -> dict[str, Tensor]:
    """Call and differentiate: ``out``, ``lse`` and, with ``grad``, ``dq``, ``dk``, ``dv``, ....

    The gradients that arrive at ``out`` and ``lse`` are random and the same whatever the dtype of
    ``case``, as they are rounded to bf16 first. With ``unrounded_out`` the softmax is
    differentiated through the rounded output, as a kernel must that keeps ``out`` alone for its
    backward: ``ds = p * (dp - dout @ out)``, and an error there is one in ``dlse``. ``nudge`` moves
    all that enters by that relative amount, up or down, and ``dout @ out`` by a quarter of it, as
    a sum is not rounded like its like in ``dp``, with which it cancels.
    """
    function = function or case.function
    torch.manual_seed(0)  # dropout draws its seed here
    m = Maker(case.inputs["q"].device, torch.float32, seed=2)

    def moved(t: Tensor) -> Tensor:
        return t * (1 + nudge * m.randn(*t.shape).sign()) if nudge else t

    inputs = {name: moved(t.detach()) for name, t in case.inputs.items()}
    if not grad:
        with torch.no_grad():
            out, lse = function(**inputs, **case.options, return_lse=True)
        return {"out": out, "lse": lse}
    leaves = {name: t.requires_grad_() for name, t in inputs.items()}
    out, lse = function(**leaves, **case.options, return_lse=True)
    names = [f"d{name}" for name in leaves]
    if not out.requires_grad and function is case.reference:  # nothing was computed: no sequence
        return {
            "out": out,
            "lse": lse,
            **dict(zip(names, map(torch.zeros_like, inputs.values()), strict=True)),
        }
    dout, dlse = (moved(t) for t in incoming(out, lse))
    if nudge:
        terms = (dout * out.detach()).abs().sum(-1).transpose(-1, -2)
        dlse = dlse + nudge / 4 * terms * m.randn(*terms.shape).sign()
    if unrounded_out is not None:
        slip = (dout.double() * (unrounded_out - out.detach().double())).sum(-1)
        dlse = dlse + slip.transpose(-1, -2).to(dlse.dtype)
    grads = torch.autograd.grad((out, lse), list(leaves.values()), (dout, dlse))
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(names, grads, strict=True))}


def incoming(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients that arrive at the two outputs of a call."""
    m = Maker(out.device, torch.bfloat16, seed=1)
    return m.randn(*out.shape).to(out.dtype), m.randn(*lse.shape).to(lse.dtype)


def run_oracle(case: Case, *, grad: bool = True, nudge: float = 0.0) -> dict[str, Tensor]:
    """Do the same in float64, on the same, already rounded, inputs."""
    wide = {name: t.double() for name, t in case.inputs.items()}
    options = {name: value for name, value in case.options.items() if name != "out_dtype"}
    wide_case = Case(wide, options, case.packed)
    return run(wide_case, case.reference, grad=grad, nudge=nudge)


def run_eager(case: Case, oracle: dict[str, Tensor], *, grad: bool = True) -> dict[str, Tensor]:
    """Do the same in plain PyTorch: inputs and output in the dtype, scores and LSE in fp32.

    Results are sums, at times of few terms that nearly cancel, and eager is exact by luck there.
    So where float64 on inputs that are slightly off is further from the oracle, it takes the
    place of an eager element. Slightly is four units of fp32 for the LSE, which is exact
    otherwise, and for all else half a unit of a 16-bit dtype, to which a kernel rounds
    probabilities and their gradients as it multiplies them. An fp32 product on a GPU is three of
    TF32, and sums of them are cut off where others round: there it is two of their units.
    """
    eager = run(case, case.reference, grad=grad, unrounded_out=oracle["out"])
    q = case.inputs["q"]
    is_tf32 = q.device.type == "cuda" and q.dtype == torch.float32
    fine = 2 * TF32X3_UNIT if is_tf32 else 4 * torch.finfo(torch.float32).eps
    coarse = max(fine, torch.finfo(q.dtype).eps / 2)
    nudged = run_oracle(case, grad=grad, nudge=coarse)
    if coarse > fine:
        nudged["lse"] = run_oracle(case, grad=False, nudge=fine)["lse"]
    for name, value in eager.items():
        error, moved = (value.double() - oracle[name]).abs(), (nudged[name] - oracle[name]).abs()
        eager[name] = torch.where(moved > error, nudged[name], value.double())
    return eager


@contextlib.contextmanager
def only_portable() -> Iterator[None]:
    """Keep calls from the kernels for Hopper."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_configs, "HOPPER", False)
        patch.setattr(api, "_known", Memory())
        yield


def check(case: Case, *, grad: bool = True) -> dict[str, Tensor]:
    """Run function, eager and oracle, and compare all results; returns the function's.

    On Hopper the portable kernels, which serve what its own do not, are held to the same.
    """
    got = run(case, grad=grad)
    oracle = run_oracle(case, grad=grad)
    eager = run_eager(case, oracle, grad=grad)
    if detect(case.inputs["q"].device).is_hopper:
        with only_portable():
            _compare(case, run(case, grad=grad), oracle, eager)
    return _compare(case, got, oracle, eager)


def _compare(
    case: Case, got: dict[str, Tensor], oracle: dict[str, Tensor], eager: dict[str, Tensor]
) -> dict[str, Tensor]:
    dtype = case.inputs["q"].dtype
    assert got["out"].dtype == case.options.get("out_dtype", dtype)
    assert got["lse"].dtype == torch.float32
    for name, value in got.items():
        if name in ("out", "lse"):
            assert_no_worse_than_eager(name, value, eager[name], oracle[name])
            continue
        assert value.dtype == case.inputs[name[1:]].dtype
        # gradients of fp32 biases and sinks come from tiles in the dtype of q
        eps = max(torch.finfo(value.dtype).eps, torch.finfo(dtype).eps)
        eps = max(eps, TF32X3_UNIT) if value.device.type == "cuda" else eps
        assert_no_worse_than_eager(name, value, eager[name], oracle[name], 3.0, eps)
    return got
