"""The cases that every numerics test is made of, and what they are held to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from attn_common import detect
from lightning_attn import (
    api,
    build_slopes,
    lightning_attention_reference,
    lightning_attention_varlen_reference,
    lightning_attn_func,
    lightning_attn_varlen_func,
)
from lightning_attn._linear import tiles
from lightning_attn._linked.host.forms import Memory, interpreted
from torch import Tensor

from ._linked import numerics
from ._linked.budget import TF32X3_UNIT, Maker, assert_no_worse_than_eager, offsets
from ._linked.numerics import further, nudged
from ._linked.rounding import Bounded, assert_within
from ._linked.walk_bounds import lightning_bounds

# what a state is made of: values of two terms of 8 bits, of one term of TF32, of three products
STATE_UNITS = {torch.bfloat16: 2.0**-15, torch.float16: 2.0**-10, torch.float32: TF32X3_UNIT}
SCHEDULES = ("sequential", "parallel")


class Shape(NamedTuple):
    """A fixed-length problem."""

    batch: int
    seqlen: int
    heads: int
    d: int
    e: int

    def __str__(self) -> str:
        return "b{}-t{}-h{}-d{}:{}".format(*self)


class Packed(NamedTuple):
    """A packed problem; ``padding`` tokens follow the last sequence, ``ahead`` tokens the start."""

    lengths: tuple[int, ...]
    heads: int
    d: int
    e: int
    padding: int = 0
    ahead: int = 0

    def __str__(self) -> str:
        text = "_".join(map(str, self.lengths))
        return f"t{text}-h{self.heads}-d{self.d}:{self.e}-p{self.padding}-a{self.ahead}"

    @property
    def tokens(self) -> int:
        return sum(self.lengths) + self.padding + self.ahead

    def rows(self, b: int) -> slice:
        """Rows of one sequence."""
        begin = self.ahead + sum(self.lengths[:b])
        return slice(begin, begin + self.lengths[b])


# lengths are against the interpreter's chunks of 16 and segments of 32 tokens
SMALL = [
    Shape(1, 16, 1, 16, 16),  # one chunk exactly
    Shape(2, 33, 2, 32, 16),  # a tail of one, behind a segment; e narrower
    Shape(1, 70, 2, 16, 48),  # three segments; e wider, no power of two
    Shape(1, 64, 1, 32, 32),  # two segments exactly
    Shape(1, 20, 3, 48, 80),  # three heads, neither a power of two
    Shape(1, 18, 1, 112, 16),
    Shape(1, 5, 1, 16, 256),  # widest values
    Shape(1, 17, 1, 256, 16),  # widest keys
    Shape(2, 1, 2, 16, 16),  # one token
    Shape(2, 0, 2, 16, 16),  # none
    Shape(0, 5, 2, 16, 16),  # no sequence
]
# two sequences, two heads, chunks and segments with tails: for what is tried one by one
MEDIUM = Shape(2, 35, 2, 16, 16)
LARGE = [
    Shape(1, 8192, 4, 128, 128),
    Shape(2, 3001, 3, 64, 64),
    Shape(1, 2000, 2, 256, 256),
    Shape(1, 1500, 2, 96, 192),
    Shape(3, 129, 40, 128, 64),
    Shape(1, 4097, 1, 80, 16),
]
PACKED = [
    Packed((17, 0, 5, 33), 2, 16, 32),
    Packed((1, 70), 1, 32, 16, padding=20),
    Packed((40,), 2, 16, 16, padding=3, ahead=18),
    Packed((0, 0), 1, 16, 16, padding=4),
    Packed((), 1, 16, 16, padding=4),
]
PACKED_MEDIUM = Packed((20, 0, 35, 3), 2, 16, 16, padding=5, ahead=2)

# name: decays of a number of heads
DECAYS: dict[str, Callable[[Maker, int], Tensor]] = {
    "drawn": lambda m, h: m.uniform(h, low=0.01, high=0.5),
    "none": lambda m, h: torch.zeros(h, device=m.device),
    "slopes": lambda m, h: build_slopes(h, 1, 4).to(m.device),
    "strong": lambda m, h: m.uniform(h, low=3.0, high=30.0),
    # exp(-s) is 0 in fp32
    "underflowing": lambda m, h: m.uniform(h, low=110.0, high=1e6),
    "mixed": lambda m, h: torch.tensor([0.0, 0.3, 1e30], device=m.device).repeat(h)[:h],
}


class Case(numerics.Case):
    """Arguments of one call: what may require grad, and everything else."""

    @property
    def function(self) -> Callable[..., Any]:
        return lightning_attn_varlen_func if self.packed else lightning_attn_func

    @property
    def reference(self) -> Callable[..., Any]:
        if self.packed:
            return lightning_attention_varlen_reference
        return lightning_attention_reference

    def on(self, schedule: str) -> Case:
        return self.with_options(schedule=schedule)


def make_case(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device | str,
    decay: str = "drawn",
    *,
    state: bool = True,
    scale: float = 0.6,
    seed: int = 0,
) -> Case:
    """Make a fixed-length case with values of order one."""
    m = Maker(device, dtype, seed)
    b, t, h, d, e = shape
    made = {"q": m.randn(b, t, h, d), "k": m.randn(b, t, h, d), "v": m.randn(b, t, h, e)}
    made["decay"] = DECAYS[decay](m, h)
    if state:
        made["initial_state"] = m.randn(b, h, d, e, dtype=torch.float32)
    return Case(made, {"scale": scale})


def make_packed(
    shape: Packed,
    dtype: torch.dtype,
    device: torch.device | str,
    decay: str = "drawn",
    *,
    state: bool = True,
    scale: float = 0.6,
    seed: int = 0,
) -> Case:
    """Make a packed case."""
    m = Maker(device, dtype, seed)
    t, h, d, e = shape.tokens, shape.heads, shape.d, shape.e
    made = {"q": m.randn(t, h, d), "k": m.randn(t, h, d), "v": m.randn(t, h, e)}
    made["decay"] = DECAYS[decay](m, h)
    if state:
        made["initial_state"] = m.randn(len(shape.lengths), h, d, e, dtype=torch.float32)
    starts = offsets(shape.lengths, device) + shape.ahead
    return Case(made, {"scale": scale, "cu_seqlens": starts}, packed=True)


def incoming(out: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return gradients that arrive, the same values whatever the dtype."""
    m = Maker(out.device, torch.float32, seed=2)
    dout = m.randn(*out.shape).to(torch.bfloat16).to(out.dtype)
    return dout, m.randn(*state.shape).to(torch.bfloat16).to(state.dtype)


def run(
    case: Case,
    function: Callable[..., Any] | None = None,
    *,
    grad: bool = True,
    nudge: float = 0.0,
) -> dict[str, Tensor]:
    """Call and differentiate: ``o``, ``state`` and, with ``grad``, ``dq``, ``dk``, ``dv``, ....

    ``nudge`` moves all that enters by that relative amount, up or down.
    """
    function = function or case.function
    m = Maker(case.inputs["q"].device, torch.float32, seed=3)
    inputs = {name: nudged(m, t.detach(), nudge) for name, t in case.inputs.items()}
    options = dict(case.options)
    if function is case.reference:
        options.pop("schedule", None)
    if not grad:
        with torch.no_grad():
            out, state = function(**inputs, **options, output_final_state=True)
        return {"o": out, "state": state}
    leaves = {name: t.requires_grad_() for name, t in inputs.items()}
    out, state = function(**leaves, **options, output_final_state=True)
    dout, dstate = incoming(out, state)
    results = [
        (x, g) for x, g in ((out, dout), (state, nudged(m, dstate, nudge))) if x.requires_grad
    ]
    grads: Sequence[Tensor | None] = [None] * len(leaves)
    if results:
        grads = torch.autograd.grad(
            [x for x, _ in results],
            list(leaves.values()),
            [g for _, g in results],
            allow_unused=True,
        )
    found = {"o": out.detach(), "state": state.detach()}
    for (name, leaf), got in zip(leaves.items(), grads, strict=True):
        found[f"d{name}"] = torch.zeros_like(leaf) if got is None else got
    return found


def run_oracle(case: Case, *, grad: bool = True, nudge: float = 0.0) -> dict[str, Tensor]:
    """Do the same from the definition in float64, on the same rounded inputs."""
    wide = case.with_inputs(**{name: t.double() for name, t in case.inputs.items()})
    return run(wide, case.reference, grad=grad, nudge=nudge)


def run_eager(case: Case, oracle: dict[str, Tensor], *, grad: bool = True) -> dict[str, Tensor]:
    """Do the same in plain PyTorch: inputs and output in the dtype, the state in fp32.

    Eager is at times exact by luck. So where float64 on inputs that are slightly off is further
    from the oracle, it takes the place of an eager element. Slightly is four units of fp32 for
    states, and for all else half a unit of a 16-bit dtype, to which a kernel rounds scores and the
    states that it reads as it multiplies them.
    """
    eager = run(case, case.reference, grad=grad)
    dtype = case.inputs["q"].dtype
    fine = 4 * torch.finfo(torch.float32).eps
    coarse = max(fine, torch.finfo(dtype).eps / 2)
    moved = run_oracle(case, grad=grad, nudge=coarse)
    if coarse > fine:
        exact = run_oracle(case, grad=grad, nudge=fine)
        moved.update({name: exact[name] for name in STATES if name in exact})
    return further(eager, moved, oracle)


STATES = ("state", "dinitial_state")


@contextlib.contextmanager
def only_portable() -> Iterator[None]:
    """Keep calls from the kernel for Hopper."""
    from lightning_attn._linear.portable import walk_launch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "HOPPER", False)
        for memory in ("_forward", "_packed"):
            patch.setattr(api, memory, Memory())
        patch.setattr(walk_launch, "_walks", Memory())
        yield


def bounds_of(case: Case, got: dict[str, Tensor]) -> dict[str, Bounded]:
    """Return the a-priori bounds of a fixed-length case whose results are given."""
    dout, dstate = incoming(got["o"], got["state"]) if "dq" in got else (None, None)
    truncates = interpreted() and got["o"].device.type == "cpu"
    given = {"scale": case.options["scale"], "dout": dout, "dstate": dstate}
    bounds = lightning_bounds(**case.inputs, **given, truncates=truncates)
    return {name: x for name, x in bounds.items() if name in got}


def check_bounds(case: Case, got: dict[str, Tensor]) -> None:
    """Hold results to their a-priori bounds, element by element; packed cases have none."""
    if not case.packed:
        assert_within(got, bounds_of(case, got))


def check(case: Case, *, grad: bool = True) -> dict[str, Tensor]:
    """Run function, eager and oracle, and compare all results; returns the function's.

    On Hopper the portable kernel, which serves what its own does not, is held to the same.
    """
    got = run(case, grad=grad)
    oracle = run_oracle(case, grad=grad)
    eager = run_eager(case, oracle, grad=grad)
    q = case.inputs["q"]
    if q.device.type == "cuda" and detect(q.device).is_hopper and q.dtype == torch.bfloat16:
        with only_portable():
            _compare(case, run(case, grad=grad), oracle, eager)
    return _compare(case, got, oracle, eager)


def _compare(
    case: Case, got: dict[str, Tensor], oracle: dict[str, Tensor], eager: dict[str, Tensor]
) -> dict[str, Tensor]:
    dtype = case.inputs["q"].dtype
    assert got["o"].dtype == dtype
    assert got["state"].dtype == torch.float32
    for name, value in got.items():
        eps = max(torch.finfo(value.dtype).eps, torch.finfo(dtype).eps)
        if dtype == torch.float32:
            eps = TF32X3_UNIT
        if name in STATES:
            eps = STATE_UNITS[dtype]
        factor = 3.0 if name.startswith("d") else 2.0
        assert_no_worse_than_eager(name, value, eager[name], oracle[name], factor, eps)
    return got
