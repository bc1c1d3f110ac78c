"""Cases of numerics tests, and the comparison of softmax attention in all packages.

A package's ``_numerics`` makes the cases and names the function under test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .budget import TF32X3_UNIT, Maker, assert_no_worse_than_eager

C = TypeVar("C", bound="Case")
# makes the arguments of a feature for a problem
Feature = Callable[[Maker, Any], dict[str, Any]]


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
            len(self.lengths_q),
            max(self.lengths_q, default=0),
            max(self.lengths_k, default=0),
            self.heads_q,
            self.heads_k,
            self.head_dim,
            self.head_dim_v,
        )


@dataclass
class Case:
    """Arguments of one call: tensors of values, which may require grad, and everything else."""

    inputs: dict[str, Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    packed: bool = False

    @property
    def function(self) -> Callable[..., Any]:
        """The function under test."""
        raise NotImplementedError

    @property
    def reference(self) -> Callable[..., Any]:
        """The reference of the function."""
        raise NotImplementedError

    def with_inputs(self: C, **changes: Tensor) -> C:
        return replace(self, inputs={**self.inputs, **changes})

    def with_options(self: C, **changes: Any) -> C:
        return replace(self, options={**self.options, **changes})


def fixed(**options: Any) -> Feature:
    """Return a feature whose arguments are the same for every problem."""
    return lambda _maker, _problem: options


def compatible(features: Mapping[str, Feature], names: Iterable[str], problem: Any) -> bool:
    """Return whether the features set different arguments."""
    maker = Maker("cpu", torch.float32)
    arguments = [key for name in names for key in features[name](maker, problem)]
    return len(arguments) == len(set(arguments))


def nudged(m: Maker, x: Tensor, nudge: float) -> Tensor:
    """Return ``x`` with every element moved by a relative ``nudge``, up or down."""
    return x * (1 + nudge * m.randn(*x.shape).sign()) if nudge else x


def nudges(q: Tensor) -> tuple[float, float]:
    """Return how far inputs are moved: for the LSE, and for all other results.

    Four units of fp32 for the LSE, which is exact otherwise. For other results half a unit of a
    16-bit dtype, because a kernel rounds probabilities and their gradients to it before products.
    On a GPU an fp32 product is three TF32 products whose sums are truncated: there two units of
    such a product.
    """
    is_tf32 = q.device.type == "cuda" and q.dtype == torch.float32
    fine = 2 * TF32X3_UNIT if is_tf32 else 4 * torch.finfo(torch.float32).eps
    return fine, max(fine, torch.finfo(q.dtype).eps / 2)


def further(
    eager: dict[str, Tensor], moved: dict[str, Tensor], oracle: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return, by element, the eager or the nudged result, whichever is further from the oracle.

    Some results are sums of few terms that nearly cancel, where eager is exact by luck.
    """
    found = {}
    for name, value in eager.items():
        error, distance = ((x.double() - oracle[name]).abs() for x in (value, moved[name]))
        found[name] = torch.where(distance > error, moved[name], value.double())
    return found


# ---- softmax attention with gradients


def run(
    case: Case,
    function: Callable[..., Any] | None = None,
    *,
    grad: bool = True,
    unrounded_out: Tensor | None = None,
    nudge: float = 0.0,
) -> dict[str, Tensor]:
    """Call and differentiate: ``out``, ``lse`` and, with ``grad``, ``dq``, ``dk``, ``dv``, ....

    The gradients that arrive at ``out`` and ``lse`` are random, and equal for all dtypes because
    they are rounded to bf16 first. With ``unrounded_out`` the softmax is differentiated through the
    rounded output, like a kernel that keeps only ``out`` for its backward: ``ds = p * (dp - dout @
    out)``, where an error acts like one of ``dlse``. ``nudge`` moves all inputs by that relative
    amount, up or down, and ``dout @ out`` by a quarter of it, since its rounding differs from the
    rounding of ``dp``, with which it cancels.
    """
    function = function or case.function
    torch.manual_seed(0)  # dropout draws its seed here
    m = Maker(case.inputs["q"].device, torch.float32, seed=2)
    inputs = {name: nudged(m, t.detach(), nudge) for name, t in case.inputs.items()}
    if not grad:
        with torch.no_grad():
            out, lse = function(**inputs, **case.options, return_lse=True)
        return {"out": out, "lse": lse}
    leaves = {name: t.requires_grad_() for name, t in inputs.items()}
    out, lse = function(**leaves, **case.options, return_lse=True)
    names = [f"d{name}" for name in leaves]
    if not out.requires_grad and function is case.reference:  # no sequence, nothing was computed
        zeros = map(torch.zeros_like, inputs.values())
        return {"out": out, "lse": lse, **dict(zip(names, zeros, strict=True))}
    dout, dlse = (nudged(m, t, nudge) for t in incoming(out, lse))
    if nudge:
        terms = (dout * out.detach()).abs().sum(-1).transpose(-1, -2)
        dlse = dlse + nudge / 4 * terms * m.randn(*terms.shape).sign()
    if unrounded_out is not None:
        slip = (dout.double() * (unrounded_out - out.detach().double())).sum(-1)
        dlse = dlse + slip.transpose(-1, -2).to(dlse.dtype)
    grads = torch.autograd.grad((out, lse), list(leaves.values()), (dout, dlse))
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(names, grads, strict=True))}


def incoming(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return random gradients of the two outputs of a call."""
    m = Maker(out.device, torch.bfloat16, seed=1)
    return m.randn(*out.shape).to(out.dtype), m.randn(*lse.shape).to(lse.dtype)


def run_oracle(case: Case, *, grad: bool = True, nudge: float = 0.0) -> dict[str, Tensor]:
    """``run`` the reference in float64 on the same, already rounded, inputs."""
    wide = {name: t.double() for name, t in case.inputs.items()}
    options = {name: value for name, value in case.options.items() if name != "out_dtype"}
    return run(replace(case, inputs=wide, options=options), case.reference, grad=grad, nudge=nudge)


def run_eager(case: Case, oracle: dict[str, Tensor], *, grad: bool = True) -> dict[str, Tensor]:
    """``run`` the reference with inputs and output in the dtype, scores and LSE in fp32.

    An element is replaced by the float64 result on slightly moved inputs (``nudges``) if that is
    further from the oracle (``further``).
    """
    eager = run(case, case.reference, grad=grad, unrounded_out=oracle["out"])
    fine, coarse = nudges(case.inputs["q"])
    moved = run_oracle(case, grad=grad, nudge=coarse)
    if coarse > fine:
        moved["lse"] = run_oracle(case, grad=False, nudge=fine)["lse"]
    return further(eager, moved, oracle)


def compare(
    case: Case, got: dict[str, Tensor], oracle: dict[str, Tensor], eager: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Hold results to twice the error of eager code, gradients to three times."""
    dtype = case.inputs["q"].dtype
    assert got["out"].dtype == case.options.get("out_dtype", dtype)
    assert got["lse"].dtype == torch.float32
    for name, value in got.items():
        if name in ("out", "lse"):
            assert_no_worse_than_eager(name, value, eager[name], oracle[name])
            continue
        assert value.dtype == case.inputs[name[1:]].dtype
        # gradients of fp32 biases and sinks are computed from tiles in the dtype of q
        eps = max(torch.finfo(value.dtype).eps, torch.finfo(dtype).eps)
        eps = max(eps, TF32X3_UNIT) if value.device.type == "cuda" else eps
        assert_no_worse_than_eager(name, value, eager[name], oracle[name], 3.0, eps)
    return got
