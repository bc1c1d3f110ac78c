"""Results lie within the a-priori bounds of docs/numerics.md, and what is wrong does not."""

from __future__ import annotations

import pytest
import torch
from lightning_attn import lightning_attn_decode
from lightning_attn._linear.reference import lightning_attention_decode_reference

from .._linked.budget import DTYPES, Maker
from .._linked.rounding import assert_within, median
from .._linked.walk_bounds import lightning_bounds
from .._numerics import Shape, bounds_of, make_case, run, run_oracle

CASES = [(Shape(2, 33, 2, 32, 16), "sequential"), (Shape(1, 70, 2, 16, 48), "parallel")]
LONG = Shape(1, 70, 1, 16, 16)
pytestmark = pytest.mark.eager


@pytest.mark.parametrize("decay", ["drawn", "none", "mixed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "schedule"), CASES, ids=str)
def test_within(shape, schedule, dtype, decay, device):
    case = make_case(shape, dtype, device, decay)
    got, oracle = run(case.on(schedule)), run_oracle(case)
    bounds = bounds_of(case, got)
    assert bounds.keys() == got.keys() - {"ddecay"}
    for name, bounded in bounds.items():
        torch.testing.assert_close(bounded.exact, oracle[name], msg=name)
    assert_within(got, bounds)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decoding_within(dtype, device):
    m = Maker(device, dtype)
    q, k, v = m.randn(2, 5, 2, 32), m.randn(2, 5, 2, 32), m.randn(2, 5, 2, 16)
    cache, decay = m.randn(3, 2, 32, 16, dtype=torch.float32), m.uniform(2, low=0.0, high=0.5)
    slots = torch.tensor([2, 0], dtype=torch.int32, device=device)
    first = cache[slots.long()]
    bounds = lightning_bounds(q, k, v, decay, initial_state=first, truncates=True, decodes=True)
    wide = cache.double()
    exact = lightning_attention_decode_reference(
        q.double(), k.double(), v.double(), wide, decay.double(), slots
    )
    torch.testing.assert_close(bounds["o"].exact, exact)
    out = lightning_attn_decode(q, k, v, cache, decay, slots)
    assert_within({"o": out, "state": cache[slots.long()]}, bounds)
    # a state that keeps 16 bits on its way does not pass
    coarse = first * (1 + 2.0**-16)
    with pytest.raises(AssertionError, match="state"):
        assert_within({"state": cache[slots.long()] + coarse - first}, {"state": bounds["state"]})


def without_a_token(case):
    value = case.inputs["v"].clone()
    value[:, 60] = 0
    return case.with_inputs(v=value)


def with_faster_decay(case):
    return case.with_inputs(decay=case.inputs["decay"] * 1.05)


def with_a_coarse_state(case):
    """A state that keeps the eight bits of bf16 on its way from one piece to the next."""
    return case.with_inputs(initial_state=case.inputs["initial_state"] * (1 - 2.0**-8))


@pytest.mark.parametrize(
    ("change", "dtype", "decay", "names"),
    [
        (without_a_token, torch.bfloat16, "drawn", ("o", "state", "dq", "dk")),
        (without_a_token, torch.float16, "drawn", ("o", "state", "dq", "dk")),
        (with_faster_decay, torch.bfloat16, "drawn", ("state", "dinitial_state")),
        (with_faster_decay, torch.float16, "drawn", ("o", "state", "dv", "dinitial_state")),
        (with_a_coarse_state, torch.bfloat16, "none", ("state",)),
    ],
)
def test_what_is_off_is_not_within(change, dtype, decay, names, device):
    case = make_case(LONG, dtype, device, decay)
    got, off = run(case), run(change(case))
    bounds = bounds_of(case, got)
    assert_within(got, bounds)
    for name in names:
        with pytest.raises(AssertionError, match="times its bound"):
            assert_within(off, {name: bounds[name]})


def as_a_gpu(case, terms):
    """The forward in chunks of 64, rounded as docs/how-it-works.md says of bf16."""
    q, k, v = (case.inputs[n].float().transpose(1, 2) for n in "qkv")
    state, scale = case.inputs["initial_state"], case.options["scale"]
    decay = case.inputs["decay"][:, None, None]
    outputs = []
    for q_c, k_c, v_c in zip(*(x.split(64, 2) for x in (q, k, v)), strict=True):
        index = torch.arange(q_c.shape[2], device=q.device)
        apart = index[:, None] - index
        weights = torch.exp(-decay * apart.clamp(min=0)).tril() * scale
        scores = (q_c @ k_c.mT * weights).bfloat16().float()
        arrived = torch.exp(-decay * (index + 1)[:, None]) * scale
        outputs.append((q_c @ state.bfloat16().float()) * arrived + scores @ v_c)
        faded = v_c * torch.exp(-decay * (len(index) - 1 - index)[:, None])
        upper = (faded.view(torch.int32) & -65536).view(torch.float32)
        rest = (faded - upper).bfloat16().float() if terms == 2 else 0.0
        state = state * torch.exp(-decay * len(index)) + k_c.mT @ (upper + rest)
    return {"o": torch.cat(outputs, 2).transpose(1, 2).bfloat16(), "state": state}


def test_within_as_a_gpu_rounds(device):
    """In bf16, and a state whose values have one term of bf16 and not two is not within."""
    case = make_case(Shape(1, 200, 2, 64, 32), torch.bfloat16, device)
    got = as_a_gpu(case, 2)
    bounds = bounds_of(case, got)
    assert_within(got, bounds)
    for name, bounded in bounds.items():
        assert median(bounded, got[name]) > 0.003, name
    with pytest.raises(AssertionError, match="state"):
        assert_within(as_a_gpu(case, 1), {"state": bounds["state"]})


def test_the_bounds_say_something(device):
    """Half of all elements use more of their bound than this: it is not far above what happens."""
    case = make_case(LONG, torch.bfloat16, device)
    got = run(case)
    for name, bounded in bounds_of(case, got).items():
        if name not in ("state", "dinitial_state"):  # 16 bits only on a GPU
            assert median(bounded, got[name]) > 0.003, name
