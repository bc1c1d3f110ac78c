"""Decoding steps: in place, padding, strides, several tokens, states on the side."""

from __future__ import annotations

import pytest
import torch
from lightning_attn import (
    lightning_attention_decode_reference,
    lightning_attn_decode,
    lightning_attn_varlen_func,
)

from .._linked.budget import DTYPES, Maker, assert_no_worse_than_eager
from .._linked.views import VIEWS, same_values

# (d, e): multiples of 16, powers of two or not, alike or not
DIMS = [(16, 16), (48, 16), (16, 80), (128, 64), (256, 16), (16, 256)]


def make(dtype, device, d=32, e=48, tokens=1, batch=3, heads=2, seed=0):
    m = Maker(device, dtype, seed)
    q, k = m.randn(batch, tokens, heads, d), m.randn(batch, tokens, heads, d)
    v, decay = m.randn(batch, tokens, heads, e), m.uniform(heads, low=0.01, high=2.0)
    cache = m.randn(6, heads, d, e, dtype=torch.float32)
    slots = torch.tensor([4, 0, 3][:batch], dtype=torch.int32, device=device)
    return q, k, v, cache, decay, slots


def references(q, k, v, cache, decay, slots, states=False):
    """Eager and oracle: ``(out, cache, states_out)`` each."""
    results = []
    for dtype in (q.dtype, torch.float64):
        wide = cache.double() if dtype == torch.float64 else cache.clone()
        after = wide.new_zeros((*q.shape[:3], q.shape[3], v.shape[3])) if states else None
        out = lightning_attention_decode_reference(
            *(t.to(dtype) for t in (q, k, v)), wide, decay, slots, scale=0.7, states_out=after
        )
        results.append((out, wide, after))
    return results


def check(q, k, v, cache, decay, slots):
    eager, oracle = references(q, k, v, cache, decay, slots)
    out = lightning_attn_decode(q, k, v, cache, decay, slots, scale=0.7)
    assert out.dtype == q.dtype
    assert_no_worse_than_eager("o", out, eager[0], oracle[0])
    # products of inputs in fp32, whatever the dtype: the cache is exact to fp32
    assert_no_worse_than_eager("cache", cache, eager[1], oracle[1])
    return out


@pytest.mark.eager
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_matches_reference(tokens, dtype, device):
    check(*make(dtype, device, tokens=tokens))


@pytest.mark.parametrize(("d", "e"), DIMS)
def test_every_kind_of_dimension(d, e, device):
    check(*make(torch.float32, device, d, e, batch=2, heads=1))


@pytest.mark.device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("d", "e"), [(128, 128), (96, 192), (256, 256), (64, 128)])
def test_at_size(d, e, dtype, device):
    check(*make(dtype, device, d, e, tokens=4, heads=32))


@pytest.mark.eager
def test_padding_rows_are_zero_and_write_nothing(device):
    q, k, v, cache, decay, slots = make(torch.float32, device, tokens=2)
    slots[1] = -1
    before = cache.clone()
    out = lightning_attn_decode(q, k, v, cache, decay, slots)
    assert not out[1].any()
    assert out[[0, 2]].all()
    assert torch.equal(cache[[0, 1, 2, 5]], before[[0, 1, 2, 5]])
    assert (cache[[4, 3]] != before[[4, 3]]).all()


@pytest.mark.eager
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("what", ["qkv", "q", "cache", "out", "states_out"])
def test_strides_do_not_change_a_bit(what, view, device):
    q, k, v, cache, decay, slots = make(torch.float32, device, tokens=2)
    out = torch.full_like(v, float("nan"))
    states = torch.full((3, 2, 2, 32, 48), float("nan"), device=device)
    options = {"states_out": states} if what == "states_out" else {}
    want_cache = cache.clone()
    want = lightning_attn_decode(q, k, v, want_cache, decay, slots, **options).clone()
    moved_q, moved_k, moved_v, moved_cache, moved_out = q, k, v, cache, out
    moved_states = torch.full_like(states, float("nan"))
    if what == "qkv":
        moved_q, moved_k, moved_v = (same_values(view, t) for t in (q, k, v))
    if what == "q":
        moved_q = same_values(view, q)
    if what == "cache":
        moved_cache = same_values(view, cache)
    if what == "out":
        moved_out = same_values(view, out)
    if what == "states_out":
        moved_states = same_values(view, moved_states)
        options = {"states_out": moved_states}
    got = lightning_attn_decode(
        moved_q, moved_k, moved_v, moved_cache, decay, slots, out=moved_out, **options
    )
    assert got is moved_out
    if what == "cache" and device.type == "cuda":
        # rows of a state that begin between two accesses are read, and so summed, in another order:
        # each sum of d terms rounds d times at most
        lightning_attn_decode(q, k, v, cache.clone(), decay, slots, states_out=states)
        sizes = torch.einsum("bthd,bthde->bthe", q.double().abs(), states.double().abs())
        assert ((got - want).abs() <= 2 * q.shape[-1] * 2.0**-24 * sizes).all()
    else:
        assert torch.equal(got, want)
    assert torch.equal(moved_cache, want_cache)
    if options:
        assert torch.equal(moved_states, states)


@pytest.mark.eager
def test_states_on_the_side_leave_the_cache_alone(device):
    q, k, v, cache, decay, slots = make(torch.float32, device, tokens=4)
    slots[2] = -1
    before = cache.clone()
    states = torch.full((3, 4, 2, 32, 48), float("nan"), device=device)
    out = lightning_attn_decode(q, k, v, cache, decay, slots, states_out=states)
    assert torch.equal(cache, before)
    assert states[2].isnan().all()
    # an engine commits what it accepts: the same bits as one step after the other
    for t in range(4):
        now = slice(t, t + 1)
        one = lightning_attn_decode(q[:, now], k[:, now], v[:, now], cache, decay, slots)
        assert torch.equal(one, out[:, now])
        assert torch.equal(cache[[4, 0]], states[:2, t])


@pytest.mark.eager
def test_a_sequence_does_not_depend_on_its_batch(device):
    q, k, v, cache, decay, slots = make(torch.float32, device)
    whole = cache.clone()
    out = lightning_attn_decode(q, k, v, whole, decay, slots)
    for b in range(3):
        one = slice(b, b + 1)
        alone = cache.clone()
        got = lightning_attn_decode(q[one], k[one], v[one], alone, decay, slots[one])
        assert torch.equal(got, out[one])
        assert torch.equal(alone[slots[b]], whole[slots[b]])


@pytest.mark.eager
@pytest.mark.parametrize("rate", [0.0, 200.0, 1e30])
def test_extreme_decays(rate, device):
    q, k, v, cache, decay, slots = make(torch.float32, device)
    decay.fill_(rate)
    check(q, k, v, cache, decay, slots)
    assert cache.isfinite().all()


@pytest.mark.eager
def test_an_empty_batch(device):
    q, k, v, cache, decay, slots = make(torch.float32, device)
    before = cache.clone()
    out = lightning_attn_decode(q[:0], k[:0], v[:0], cache, decay, slots[:0])
    assert out.shape == (0, 1, 2, 48)
    assert torch.equal(cache, before)


@pytest.mark.eager
def test_slots_in_64_bits(device):
    q, k, v, cache, decay, slots = make(torch.float32, device)
    other = cache.clone()
    want = lightning_attn_decode(q, k, v, cache, decay, slots)
    assert torch.equal(lightning_attn_decode(q, k, v, other, decay, slots.long()), want)
    assert torch.equal(other, cache)


@pytest.mark.eager
@pytest.mark.parametrize(
    "names",
    [("out", "q"), ("out", "k"), ("out", "v"), ("state_cache", "q"), ("out", "state_cache")]
    + [("state_cache", "states_out"), ("out", "states_out")],
    ids="-".join,
)
def test_what_is_written_shares_no_memory(names, device):
    """Also on a warm call: its form knows no addresses."""
    q, k, v, cache, decay, slots = make(torch.float32, device, d=16, e=16)
    given = {"q": q, "k": k, "v": v, "state_cache": cache, "out": torch.zeros_like(q)}
    if "states_out" in names:
        given["states_out"] = cache.new_zeros(3, 1, 2, 16, 16)
    first, second = names
    lightning_attn_decode(**given, decay=decay, slot_idx=slots)
    largest = max((given[name] for name in names), key=torch.Tensor.numel).flatten()
    shared = {name: largest[: given[name].numel()].view_as(given[name]) for name in names}
    wrong = given | shared
    before = {name: x.clone() for name, x in wrong.items()}
    with pytest.raises(ValueError, match=f"{first} must not share memory with {second},"):
        lightning_attn_decode(**wrong, decay=decay, slot_idx=slots)
    for name, x in wrong.items():
        assert torch.equal(x, before[name])


@pytest.mark.eager
def test_a_cache_of_sequences_shares_no_memory(device):
    q, k, v, cache, decay, slots = make(torch.float32, device, d=16, e=16)
    q, k, v = (x[:, 0] for x in (q, k, v))
    starts = torch.tensor([0, 1, 3, 3], device=device)
    lightning_attn_varlen_func(q, k, v, decay, starts, state_cache=cache, state_indices=slots)
    within = cache.flatten()[: q.numel()].view_as(q)
    wrong = {"state_cache": cache, "state_indices": slots}
    with pytest.raises(ValueError, match="state_cache must not share memory with k, for it is"):
        lightning_attn_varlen_func(q, within, v, decay, starts, **wrong)


@pytest.mark.eager
def test_the_reference_refuses_overlaps_too(device):
    q, k, v, cache, decay, slots = make(torch.float32, device)
    wide = cache[:1].expand_as(cache)
    with pytest.raises(ValueError, match="state_cache must not be expanded"):
        lightning_attention_decode_reference(q, k, v, wide, decay, slots)


@pytest.mark.eager
@pytest.mark.parametrize("name", ["q", "k", "v", "state_cache", "decay", "out", "states_out"])
def test_what_requires_a_gradient_is_named(name, device):
    q, k, v, cache, decay, slots = make(torch.float32, device, d=16, e=16)
    given = {"q": q, "k": k, "v": v, "state_cache": cache, "decay": decay, "slot_idx": slots}
    given |= {"out": torch.zeros_like(q), "states_out": cache.new_zeros(3, 1, 2, 16, 16)}
    given[name] = given[name].clone().requires_grad_()
    before = given[name].detach().clone()
    with pytest.raises(NotImplementedError, match=f"got requires_grad=True of {name};"):
        lightning_attn_decode(**given)
    assert torch.equal(given[name].detach(), before)
