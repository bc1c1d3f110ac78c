"""What arguments mean at their limits, and what values on the CPU are checked in every call."""

from __future__ import annotations

import math

import pytest
import torch
from lightning_attn import (
    lightning_attention,
    lightning_attention_decode_reference,
    lightning_attention_reference,
    lightning_attention_varlen_reference,
    lightning_attn_decode,
    lightning_attn_func,
    lightning_attn_varlen_func,
    linear_decode_forward_triton,
    validate_decay,
    validate_varlen,
)

from .._linked.budget import Maker, assert_no_worse_than_eager
from .._linked.tiers import INTERPRETED

pytestmark = pytest.mark.eager

# no decay, some, and one that forgets all
RATES = (0.0, 0.3, math.inf)
STARTS = (0, 5, 5, 12)


def fixed(device="cpu", requires_grad=False):
    m = Maker(device, torch.float32)
    shapes = {"q": (2, 12, 3, 16), "k": (2, 12, 3, 16), "v": (2, 12, 3, 32)}
    made = {name: m.randn(*shape) for name, shape in shapes.items()}
    made |= {"decay": torch.tensor(RATES, device=device), "initial_state": m.randn(2, 3, 16, 32)}
    return {name: x.requires_grad_(requires_grad) for name, x in made.items()}


def packed(device="cpu", dtype=torch.int32):
    made = {name: x[0] for name, x in fixed(device).items() if name in "qkv"}
    starts = torch.tensor(STARTS, dtype=dtype, device=device)
    return {**made, "decay": torch.tensor(RATES, device=device), "cu_seqlens": starts}


def step(device="cpu"):
    m = Maker(device, torch.float32)
    made = {"q": m.randn(2, 3, 3, 16), "k": m.randn(2, 3, 3, 16), "v": m.randn(2, 3, 3, 32)}
    made |= {"state_cache": m.randn(4, 3, 16, 32), "decay": torch.tensor(RATES, device=device)}
    return {**made, "slot_idx": torch.tensor([2, 0], device=device)}


def judge(got, eager, exact):
    for i, (one, other, truth) in enumerate(zip(got, eager, exact, strict=True)):
        assert_no_worse_than_eager(f"result {i}", one, other, truth, factor=3.0)


def in_float64(arguments):
    return {n: x.double() if x.is_floating_point() else x for n, x in arguments.items()}


def test_an_infinite_decay_forgets_all_before(device):
    """Forward and every gradient, that of the decay included."""
    given = fixed(device)

    def run(function, arguments):
        leaves = {name: x.detach().clone().requires_grad_() for name, x in arguments.items()}
        out, state = function(**leaves, output_final_state=True)
        grads = torch.autograd.grad((out.sum(), state.sum()), list(leaves.values()))
        return [out.detach(), state.detach(), *grads]

    exact = run(lightning_attention_reference, in_float64(given))
    # the first state and the decay of that head have no influence
    assert not exact[-1][:, 2].any()
    assert not exact[-2][2].any()
    judge(run(lightning_attn_func, given), run(lightning_attention_reference, given), exact)
    validate_decay(given["decay"])


def test_an_infinite_decay_packed_and_cached(device):
    given, m = packed(device), Maker(device, torch.float32, seed=1)
    cache = m.randn(3, 3, 16, 32)
    results = []
    for function, wide in (
        (lightning_attn_varlen_func, False),
        (lightning_attention_varlen_reference, False),
        (lightning_attention_varlen_reference, True),
    ):
        mine = cache.double() if wide else cache.clone()
        arguments = in_float64(given) if wide else given
        out, _ = function(**arguments, state_cache=mine)
        results.append([out, mine])
    judge(*results)


def test_an_infinite_decay_in_decoding(device):
    given = step(device)
    results = []
    for function, wide in (
        (lightning_attn_decode, False),
        (lightning_attention_decode_reference, False),
        (lightning_attention_decode_reference, True),
    ):
        arguments = {n: x.clone() for n, x in (in_float64(given) if wide else given).items()}
        results.append([function(**arguments), arguments["state_cache"]])
    judge(*results)


def test_no_scale_is_that_of_the_head_dimension(device):
    calls = (
        (lightning_attn_func, fixed(device)),
        (lightning_attn_varlen_func, packed(device)),
        (lightning_attention_reference, fixed(device)),
        (lightning_attention_varlen_reference, packed(device)),
    )
    for function, given in calls:
        got, want = function(**given, scale=None)[0], function(**given, scale=0.25)[0]
        assert torch.equal(got, want)
        assert not torch.equal(got, function(**given)[0])
    for function in (lightning_attn_decode, lightning_attention_decode_reference):
        assert torch.equal(
            function(**step(device), scale=None), function(**step(device), scale=0.25)
        )


def test_offsets_of_64_bits_are_converted(device):
    want, _ = lightning_attn_varlen_func(**packed(device))
    wide = packed(device, torch.int64)
    for _ in range(2):  # the second call knows the form
        assert torch.equal(lightning_attn_varlen_func(**wide)[0], want)
    validate_varlen(wide["q"], wide["cu_seqlens"])
    with pytest.raises(TypeError, match=r"cu_seqlens must be torch.int32, got torch.int16"):
        lightning_attn_varlen_func(**packed(device, torch.int16))


# Names that other libraries have for what is meant.

NAMES = {
    "softmax_scale": "use scale",
    "sm_scale": "use scale",
    "g_gamma": "use decay, .* decay is -g_gamma",
    "slope_rate": "use decay",
    "kv_history": "use initial_state",
    "num_splits": "use schedule",
    "window_size": "the decay is what forgets",
    "nonsense": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_elsewhere_is_told_from_ours(name):
    hint = NAMES[name]
    calls = ((lightning_attn_func, fixed()), (lightning_attn_varlen_func, packed()))
    for function, given in (*calls, (lightning_attn_decode, step())):
        with pytest.raises(
            TypeError, match=rf"^{name} is no argument here{': ' if hint else '$'}"
        ) as e:
            function(**given, **{name: 1})
        assert hint is None or e.match(hint)


# Values. On the CPU the kernels look at them; a GPU's would have to be waited for.


def heads_first(given):
    return [given[name].transpose(1, 2) for name in "qkv"]


def one_step(given):
    rows = [given[name][:, :1].transpose(1, 2) for name in "qkv"]
    return (*rows, given["state_cache"], given["decay"], given["slot_idx"])


DECAYS = {
    "fixed": lambda x: lightning_attn_func(**{**fixed(), "decay": x}),
    "with a gradient": lambda x: lightning_attn_func(**{**fixed(requires_grad=True), "decay": x}),
    "packed": lambda x: lightning_attn_varlen_func(**{**packed(), "decay": x}),
    "cached": lambda x: lightning_attn_varlen_func(
        **{**packed(), "decay": x}, state_cache=torch.zeros(3, 3, 16, 32)
    ),
    "decode": lambda x: lightning_attn_decode(**{**step(), "decay": x}),
    "drop-in": lambda x: lightning_attention(*heads_first(fixed()), x),
    "drop-in, decode": lambda x: linear_decode_forward_triton(*one_step({**step(), "decay": x})),
    "reference": lambda x: lightning_attention_reference(**{**fixed(), "decay": x}),
}


# the caller's name of the argument
RENAMED = {"drop-in": "ed", "drop-in, decode": "slope_rate"}


@pytest.mark.parametrize("kind", DECAYS)
def test_a_decay_below_zero_raises(kind):
    call, name = DECAYS[kind], RENAMED.get(kind, "decay")
    call(torch.tensor([0.1, 0.0, 2.0]))
    for _ in range(2):  # the second call knows the form
        with pytest.raises(ValueError, match=rf"^{name}\[1\] must be at least 0, got -0.5"):
            call(torch.tensor([0.1, -0.5, 2.0]))
    with pytest.raises(ValueError, match=rf"^{name}\[0\] must be at least 0, got nan"):
        call(torch.tensor([math.nan, 0.0, 0.0]))


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ([0, 13, 12], r"cu_seqlens\[1\] must be from 0 to the number of tokens, 12, got 13"),
        ([0, 7, 5], r"cu_seqlens\[2\] must be at least 7, as before it, got 5"),
        ([-1, 7, 12], r"cu_seqlens\[0\] must be from 0 to the number of tokens, 12, got -1"),
    ],
)
def test_wrong_offsets_raise(starts, message):
    wrong = {**packed(), "cu_seqlens": torch.tensor(starts, dtype=torch.int32)}
    for function in (lightning_attn_varlen_func, lightning_attention_varlen_reference):
        with pytest.raises(ValueError, match=message):
            function(**wrong)
    with pytest.raises(ValueError, match=message):
        lightning_attn_varlen_func(**wrong, state_cache=torch.zeros(2, 3, 16, 32))


def test_wrong_slots_raise():
    wrong = {**step(), "slot_idx": torch.tensor([0, 4])}
    before = wrong["state_cache"].clone()
    for function in (lightning_attn_decode, lightning_attention_decode_reference):
        with pytest.raises(ValueError, match=r"^slot_idx\[1\] must be below 4, got 4"):
            function(**wrong)
    assert torch.equal(wrong["state_cache"], before)
    cache, slots = torch.zeros(3, 3, 16, 32), torch.tensor([1, -1, 1])
    message = r"^state_indices\[2\] must differ from state_indices\[0\]"
    for function in (lightning_attn_varlen_func, lightning_attention_varlen_reference):
        with pytest.raises(ValueError, match=message):
            function(**packed(), state_cache=cache, state_indices=slots)
    assert not cache.any()


@pytest.mark.skipif(INTERPRETED, reason="tracing sees the operators alone")
def test_a_trace_is_whole_and_its_calls_are_checked():
    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(given):
        return lightning_attn_varlen_func(**given, scale=None)[0]

    given = packed(dtype=torch.int64)
    assert torch.equal(compiled(given), lightning_attn_varlen_func(**given, scale=None)[0])
    for name, value in (("decay", [0.1, -0.5, 0.0]), ("cu_seqlens", [0, 5, 4, 12])):
        wrong = {**given, name: torch.tensor(value, dtype=given[name].dtype)}
        with pytest.raises(ValueError, match=f"^{name}"):
            compiled(wrong)
