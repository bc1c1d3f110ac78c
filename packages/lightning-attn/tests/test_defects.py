"""One test for each defect of the kernels that this package succeeds (L1 to L14 of the list)."""

from __future__ import annotations

import pytest
import torch
from lightning_attn import (
    lightning_attention,
    lightning_attn_decode,
    lightning_attn_func,
    lightning_attn_varlen_func,
    linear_decode_forward_triton,
    validate_slots,
)
from torch.utils._python_dispatch import TorchDispatchMode

from ._linked.budget import Maker, offsets
from ._numerics import Shape, check, make_case, run

pytestmark = pytest.mark.eager


def test_l1_history_counts_as_much_as_in_decoding(device):
    """The old output weighed all that lies before a block by exp(s) too much."""
    case = make_case(Shape(1, 300, 1, 16, 16), torch.float32, device, "slopes", scale=1.0)
    case = case.with_inputs(decay=torch.full((1,), 0.5, device=device))
    turned = [case.inputs[name].transpose(1, 2) for name in "qkv"]
    out, _ = lightning_attention(
        *turned, case.inputs["decay"], kv_history=case.inputs["initial_state"]
    )
    cache = case.inputs["initial_state"].clone()
    slots = torch.zeros(1, dtype=torch.int32, device=device)
    first = lightning_attn_decode(
        *(case.inputs[name][:, :1] for name in "qkv"), cache, case.inputs["decay"], slots
    )
    torch.testing.assert_close(out[:, :, :1].transpose(1, 2), first, rtol=1e-4, atol=1e-4)
    # behind the first block of 256, too
    want = run(case, case.reference, grad=False)["o"]
    torch.testing.assert_close(out.transpose(1, 2), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("d", "e"), [(32, 80), (80, 32), (96, 96), (192, 16), (16, 208)])
def test_l2_dimensions_need_no_power_of_two(d, e, device):
    check(make_case(Shape(1, 17, 1, d, e), torch.float32, device), grad=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_l3_half_precision_with_fp32_decays(dtype, device):
    got = check(make_case(Shape(1, 20, 2, 16, 16), dtype, device), grad=False)
    assert got["o"].dtype == dtype


def test_l4_fp32_is_not_tf32(device):
    """Ten bits of fraction would be off by 1e-3; the budget of fp32 allows for 1e-6."""
    check(make_case(Shape(1, 70, 1, 64, 32), torch.float32, device), grad=False)


class Allocations(TorchDispatchMode):
    """Sums up the bytes of all tensors that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and "empty" in str(func):
            self.total += result.numel() * result.element_size()
        return result


@pytest.mark.aot
@pytest.mark.parametrize("schedule", ["sequential", "parallel"])
def test_l5_memory_is_linear_and_small(schedule):
    """A million tokens, 64 heads of 128: the old buffer of states took 17 GB, twice."""
    from ._linked.gpus import recording
    from .linear._aot import Config

    config = Config(128, schedule=schedule)
    q = torch.empty(1, 2**20, 64, 128, dtype=torch.bfloat16, device="meta")
    decay = torch.empty(64, device="meta")
    from lightning_attn._linear import launch as linear_launch
    from lightning_attn._linear.call import Options, Tensors

    with recording("nvidia:sm_90"), Allocations() as made:
        linear_launch.forward(
            Tensors(q, q, q, decay, None, None), Options(1.0, config.schedule, True)
        )
    out = q.numel() * 2
    state = 64 * 128 * 128 * 4
    extra = made.total - out - state
    # nothing, or a state for every segment of 1024 tokens
    assert extra == (0 if schedule == "sequential" else 1024 * state)
    assert extra <= out / 2


def test_l6_addresses_hold_64_bits():
    """The kernels' strides are tested at size on a device; here, that no offset is 32 bits wide."""
    from pathlib import Path

    import lightning_attn

    folder = Path(lightning_attn.__file__).parent / "_linear"
    portable = [f"portable/{name}.py" for name in ("walk", "combine", "decode", "decay_gradient")]
    for name in ["hopper/walk.py", *portable]:
        source = (folder / name).read_text()
        assert "to(tl.int64)" in source or "to(gl.int64)" in source, name


@pytest.mark.aot
def test_l7_programs_divide_the_state():
    from ._linked.gpus import recording
    from .linear._aot import Config, launch_forward

    with recording("nvidia:sm_90") as launches:
        launch_forward(Config(128))
    (launch,) = launches
    # two sequences of four heads: the columns of a state go to programs of their own
    assert launch.grid[0] == 8 * 128 // (64 * launch.options["WARPGROUPS"])
    assert launch.grid[0] > 8


def test_l8_packed_sequences_have_slots(device):
    m = Maker(device, torch.float32)
    q, k, v = (m.randn(30, 2, 16) for _ in range(3))
    cache = m.randn(4, 2, 16, 16)
    before = cache.clone()
    slots = torch.tensor([3, 1], device=device)
    decay = m.uniform(2, low=0.1, high=1.0)
    starts = offsets([11, 19], device)
    out, _ = lightning_attn_varlen_func(
        q, k, v, decay, starts, state_cache=cache, state_indices=slots
    )
    for b, rows in enumerate((slice(0, 11), slice(11, 30))):
        slot = slice(int(slots[b]), int(slots[b]) + 1)
        want, state = lightning_attn_func(
            q[None, rows],
            k[None, rows],
            v[None, rows],
            decay,
            initial_state=before[slot],
            output_final_state=True,
            schedule="sequential",
        )
        torch.testing.assert_close(out[rows], want[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(cache[slot], state, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("d", "e"), [(16, 16), (48, 48), (80, 32), (32, 112)])
def test_l9_decoding_in_any_dimension(d, e, device):
    m = Maker(device, torch.float32)
    q, k, v = m.randn(2, 1, 1, d), m.randn(2, 1, 1, d), m.randn(2, 1, 1, e)
    cache = m.randn(2, 1, d, e)
    want = 0.5 * cache + k.view(2, 1, d, 1) * v.view(2, 1, 1, e)
    slots = torch.arange(2, device=device)
    decay = torch.full((1,), 0.5, device=device).log().neg()
    out = linear_decode_forward_triton(q, k, v, cache, decay, slots)
    torch.testing.assert_close(cache, want)
    read = torch.einsum("bhd,bhde->bhe", q[:, :, 0], want)
    torch.testing.assert_close(out, read.view(2, e), rtol=1e-5, atol=1e-5)


def test_l10_decoding_of_strided_views(device):
    m = Maker(device, torch.float32)
    fused = m.randn(3, 2, 1, 48)
    q, k, v = fused.split(16, dim=-1)
    cache = m.randn(3, 2, 16, 16)
    other = cache.clone()
    decay, slots = m.uniform(2, low=0.1, high=1.0), torch.arange(3, device=device)
    got = linear_decode_forward_triton(q, k, v, cache, decay, slots)
    dense = (t.contiguous() for t in (q, k, v))
    assert torch.equal(got, linear_decode_forward_triton(*dense, other, decay, slots))
    assert torch.equal(cache, other)


def test_l11_rows_of_padding_are_zero(device):
    m = Maker(device, torch.bfloat16)
    q, k, v = (m.randn(3, 2, 1, 16) for _ in range(3))
    cache = m.randn(3, 2, 16, 16, dtype=torch.float32)
    slots = torch.tensor([-1, 2, -1], device=device)
    out = linear_decode_forward_triton(q, k, v, cache, torch.zeros(2, device=device), slots)
    assert not out[[0, 2]].any()
    assert out[1].any()


def test_l12_what_a_token_writes_is_not_rounded(device):
    m = Maker(device, torch.bfloat16)
    q, k, v = (m.randn(1, 2, 1, 16) for _ in range(3))
    cache = torch.zeros(1, 2, 16, 16, device=device)
    slots = torch.zeros(1, dtype=torch.int32, device=device)
    linear_decode_forward_triton(q, k, v, cache, torch.zeros(2, device=device), slots)
    # a product of two bf16 numbers is exact in fp32
    assert torch.equal(cache[0], k[0, :, 0, :, None].float() * v[0, :, 0, None].float())
    with pytest.raises(ValueError, match=r"slots\[1\] must differ from slots\[0\]"):
        validate_slots(torch.tensor([3, 3]), torch.empty(4, 1, 16, 16))
    with pytest.raises(ValueError, match=r"slots\[0\] must be below 4, got 4"):
        validate_slots(torch.tensor([4, 3]), torch.empty(4, 1, 16, 16))


def test_l13_block_size_counts_and_the_last_sum_is_rounded_once(device):
    case = make_case(Shape(1, 40, 1, 16, 16), torch.bfloat16, device, scale=1.0)
    turned = [case.inputs[name].transpose(1, 2) for name in "qkv"]
    shapes = [
        lightning_attention(*turned, case.inputs["decay"], block_size=size)[1].shape[2]
        for size in (256, 16, 7)
    ]
    assert shapes == [2, 4, 7]
    check(case, grad=False)


def test_l14_history_in_another_dtype_is_refused(device):
    case = make_case(Shape(1, 5, 1, 16, 16), torch.bfloat16, device)
    turned = [case.inputs[name].transpose(1, 2) for name in "qkv"]
    history = case.inputs["initial_state"].bfloat16()
    with pytest.raises(TypeError, match=r"kv_history must be torch.float32, got torch.bfloat16"):
        lightning_attention(*turned, case.inputs["decay"], kv_history=history)
