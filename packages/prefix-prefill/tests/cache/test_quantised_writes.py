"""Writing caches of int8 and int4: codes, scales, and the messages of all that takes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attn_common import detect, fp8_dtype
from prefix_prefill import (
    paged_attention_reference,
    paged_attn_func,
    reshape_and_cache,
    shared_prefix_attn_func,
    validate_paged,
)
from torch import Tensor
from torch.library import opcheck

from .._linked.budget import Maker
from .._linked.tiers import INTERPRETED

pytestmark = pytest.mark.eager

STORED = {"int8": torch.int8, "int4": torch.uint8}
LARGEST = {"int8": 127, "int4": 7}
truncated = pytest.mark.skipif(INTERPRETED, reason="interpreted rounding to bf16 truncates")
SCALES = [torch.float16, pytest.param(torch.bfloat16, marks=truncated), torch.float32]
kinds = pytest.mark.parametrize("kind", STORED)


def caches(kind, scale_dtype, device, page=5, heads=2, head_dim=24, blocks=6):
    """Caches full of sevens, with scales that are NaN."""
    width = head_dim if kind == "int8" else head_dim // 2
    stored = {
        f"{x}_cache": torch.full((blocks, page, heads, width), 7).to(STORED[kind]) for x in "kv"
    }
    scales = {f"{x}_scale_cache": torch.full((blocks, page, heads), float("nan")) for x in "kv"}
    scales = {name: x.to(scale_dtype) for name, x in scales.items()}
    return {name: x.to(device) for name, x in (stored | scales).items()}


def codes_of(kind, cache):
    """Return the codes of a cache, one by one."""
    if kind == "int8":
        return cache.int()
    low, high = cache.int() % 16, cache.int() // 16
    codes = torch.stack([low, high], -1).flatten(-2)
    return torch.where(codes > 7, codes - 16, codes)


def write(kind, x, scale_dtype=torch.float32, largest_slot=30):
    """Write rows as keys, their negatives as values; return the codes and scales of each row."""
    made = caches(kind, scale_dtype, x.device, heads=x.shape[1], head_dim=x.shape[2])
    slots = torch.randperm(largest_slot, generator=torch.Generator().manual_seed(1))[: len(x)]
    slots = slots.to(x.device)
    reshape_and_cache(x, -x, slot_mapping=slots, kv_dtype=kind, **made)
    codes = [codes_of(kind, made[f"{n}_cache"]).flatten(0, 1)[slots] for n in "kv"]
    scales = [made[f"{n}_scale_cache"].flatten(0, 1)[slots] for n in "kv"]
    assert torch.equal(codes[0], -codes[1])
    assert torch.equal(scales[0].nan_to_num(-1.0), scales[1].nan_to_num(-1.0))
    untouched = torch.ones(30, dtype=torch.bool)
    untouched[slots.cpu()] = False
    assert made["v_scale_cache"].flatten(0, 1).cpu()[untouched].isnan().all()
    assert (made["v_cache"].flatten(0, 1).cpu()[untouched] == 7).all()
    return codes[0], scales[0]


@kinds
@pytest.mark.parametrize("scale_dtype", SCALES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_codes_are_the_nearest(dtype, scale_dtype, kind, device):
    """By the scale that is stored, not by the one before it was rounded."""
    x = Maker(device, dtype).randn(21, 2, 24)
    codes, scales = write(kind, x, scale_dtype)
    wide = x.double()
    exact = wide.abs().amax(-1) / LARGEST[kind]
    assert torch.equal(scales, exact.float().to(scale_dtype))
    assert torch.equal(codes, (wide / scales.double()[..., None]).round().int())
    # the scale before it was rounded gives others
    if scale_dtype == torch.bfloat16 and kind == "int8":
        assert not torch.equal(codes, (wide / exact[..., None]).round().int())


@kinds
def test_halves_go_to_the_even_code(kind, device):
    top = LARGEST[kind]
    row = [top, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, top - 0.5]
    x = torch.tensor([row, [4 * n for n in row]], device=device)[:, None].bfloat16()
    codes, scales = write(kind, x.float())
    want = [top, 0, 2, 2, 0, -2, -2, top - 1]
    assert codes[:, 0].tolist() == [want, want]
    assert scales[:, 0].tolist() == [1.0, 4.0]


@kinds
def test_a_row_of_zeros_gives_zeros(kind, device):
    x = torch.zeros(3, 1, 8, device=device)
    x[1, 0, 2] = 3.0
    codes, scales = write(kind, x)
    assert not codes[[0, 2]].any()
    assert not scales[[0, 2]].any()
    assert codes[1, 0].tolist() == [0, 0, LARGEST[kind], 0, 0, 0, 0, 0]


@kinds
def test_a_scale_that_is_rounded_down_saturates(kind, device):
    """The smallest number of fp16 is 2**-24; 1.4 of it is stored as 1, a third of it as 0."""
    top = LARGEST[kind]
    x = torch.tensor([[1.4 * top, -1.4 * top] + [top / 2] * 6, [top / 3.0] * 8], device=device)
    codes, scales = write(kind, x[:, None] * 2.0**-24, torch.float16)
    assert scales[:, 0].tolist() == [2.0**-24, 0.0]
    assert codes[0, 0, :2].tolist() == [top, -top]
    assert not codes[1].any()


@kinds
@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=str)
def test_what_is_not_finite_stays_visible(poison, kind, device):
    x = torch.ones(2, 2, 8, device=device)
    x[1, 0, 3] = poison
    codes, scales = write(kind, x)
    assert not scales[1, 0].isfinite()
    assert not codes[1, 0].any()
    assert scales[1, 1].isfinite()
    assert scales[0].isfinite().all()


@kinds
def test_slots_and_strides(kind, device):
    m = Maker(device, torch.bfloat16)
    k, v = m.randn(9, 2, 24), m.randn(9, 2, 24)
    slots = torch.tensor([29, -1, 0, 7, -5, 8, 9], device=device)
    plain = caches(kind, torch.float16, device)
    odd = caches(kind, torch.float16, device)
    for name, x in list(odd.items()):
        wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1] + 1, dtype=x.dtype, device=device)
        odd[name] = wide[..., 1::2]
        odd[name].copy_(x)
    reshape_and_cache(k, v, slot_mapping=slots, kv_dtype=kind, **plain)
    reshape_and_cache(k, v, slot_mapping=slots, kv_dtype=kind, **odd)
    for name, x in plain.items():
        assert torch.equal(odd[name].double().nan_to_num(-1), x.double().nan_to_num(-1))
    written = ~plain["k_scale_cache"].flatten(0, 1).isnan().any(-1)
    assert written.nonzero()[:, 0].tolist() == [0, 7, 8, 9, 29]
    # slot 0 has the scale of its own token, not of one that is left out
    largest = k[2].float().abs().amax(-1) / LARGEST[kind]
    assert torch.equal(plain["k_scale_cache"][0, 0], largest.half())


@kinds
def test_passes_opcheck(kind, device):
    from prefix_prefill._paged import ops

    made = {name: x.nan_to_num(0.0) for name, x in caches(kind, torch.float16, device).items()}
    new = [torch.randn(5, 2, 24, device=device) for _ in "kv"]
    slots = torch.tensor([3, -1, 20, 0, 7], device=device)
    names = "k_cache", "v_cache", "k_scale_cache", "v_scale_cache"
    k_cache, v_cache, *scales = (made[name] for name in names)
    arguments = (*new, k_cache, v_cache, slots, None, None, *scales)
    opcheck(ops.reshape_and_cache, arguments, test_utils=("test_schema", "test_faketensor"))
    q, out = (torch.randn(3, 4, 24, device=device) for _ in range(2))
    table = torch.tensor([[2, 0]], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 3], dtype=torch.int32, device=device)
    lengths = torch.tensor([7], dtype=torch.int32, device=device)
    arguments = (q, k_cache, v_cache, None, None, table, starts, lengths, *[None] * 5, *scales)
    arguments += (None, None, None, out, None, 3, 7, 0.2, -1, 0, 0.0, 0)
    arguments += (False, False, False, True, False)
    opcheck(ops.attention, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.skipif(INTERPRETED, reason="tracing sees the operators alone")
def test_a_step_compiles(device):
    """Written, then read: the order is kept, and lengths do not recompile."""

    def step(q, k, made, slots, table, starts, lengths):
        reshape_and_cache(k, k, slot_mapping=slots, kv_dtype="int4", **made)
        return paged_attn_func(
            q,
            **made,
            block_table=table,
            cu_seqlens_q=starts,
            seqlens_k=lengths,
            max_seqlen_q=5,
            max_seqlen_k=30,
            kv_dtype="int4",
        )

    m = Maker(device, torch.float32)
    q, k = m.randn(5, 4, 24), m.randn(5, 2, 24)
    slots = torch.tensor([10, 11, 12, 13, 14], device=device)
    table = torch.tensor([[2]], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 5], dtype=torch.int32, device=device)
    lengths = torch.tensor([5], dtype=torch.int32, device=device)
    made = [caches("int4", torch.float16, device) for _ in range(2)]
    want = step(q, k, made[0], slots, table, starts, lengths)
    torch.compiler.reset()
    fast = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    got = fast(q, k, made[1], slots, table, starts, lengths)
    torch.testing.assert_close(got, want)
    assert torch.equal(made[0]["k_cache"], made[1]["k_cache"])


# ---- messages


def arguments(kind: str = "int8") -> dict[str, Any]:
    made = caches(kind, torch.float16, "cpu", page=8, head_dim=16)
    return {
        "q": torch.zeros(7, 4, 16),
        **made,
        "kv_dtype": kind,
        "block_table": torch.zeros(2, 3, dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 5, 7], dtype=torch.int32),
        "seqlens_k": torch.tensor([9, 8], dtype=torch.int32),
        "max_seqlen_q": 5,
        "max_seqlen_k": 9,
    }


def paged(**changes: Any) -> Any:
    return paged_attn_func(**{**arguments(), **changes})


def reference(**changes: Any) -> Any:
    return paged_attention_reference(**{**arguments(), **changes})


def shared(**changes: Any) -> Any:
    given = {"shared_pages": torch.tensor([0]), "shared_len": 8}
    return shared_prefix_attn_func(**{**arguments(), **given, **changes})


def cache(**changes: Any) -> Any:
    given = arguments()
    given = {n: x for n, x in given.items() if "cache" in n or n == "kv_dtype"}
    new = {"k": torch.zeros(7, 2, 16), "v": torch.zeros(7, 2, 16)}
    return reshape_and_cache(**{**new, **given, "slot_mapping": torch.arange(7), **changes})


FORM = "[num_blocks, block_size, heads_k, head_dim]"
WIDE = {n: torch.zeros(6, 8, 2, 16) for n in ("k_cache", "v_cache")}
NO_SCALES: dict[str, Any] = {"k_scale_cache": None, "v_scale_cache": None}
PACKED: dict[str, Tensor] = {
    "k_cache": torch.zeros(6, 2, 1, 8, 16, dtype=torch.int8),
    "v_cache": torch.zeros(6, 2, 16, 8, dtype=torch.int8),
}
CASES = [
    ("kv_dtype must be None, 'int8', 'int4', 'int8_per_token_head', 'int4_per_token_head' or "
        "'fp8_per_token_head', got 'fp8'", ValueError, {"kv_dtype": "fp8"}),
    ("k_cache must be torch.uint8 for kv_dtype 'int4', got torch.int8", TypeError,
     {"kv_dtype": "int4"}),
    ("k_cache must be torch.int8 for kv_dtype 'int8', got torch.float32", TypeError, WIDE),
    (f"k_cache must be {FORM} for kv_dtype 'int8', got [6, 2, 1, 8, 16]; the packed layout holds "
     "FP8", NotImplementedError, PACKED),
    ("k_scale_cache must be given for kv_dtype 'int8', got None", ValueError, NO_SCALES),
    ("v_scale_cache must be given for kv_dtype 'int8', got None", ValueError,
     {"v_scale_cache": None}),
    ("k_scale_cache must be None unless kv_dtype is given, got Tensor", ValueError,
     {**WIDE, "kv_dtype": None}),
    ("k_scale_cache must be a torch.Tensor, got float", TypeError, {"k_scale_cache": 1.0}),
    ("v_scale_cache must be torch.float16, torch.bfloat16 or torch.float32, got torch.int32",
     TypeError, {"v_scale_cache": torch.zeros(6, 8, 2, dtype=torch.int32)}),
    ("v_scale_cache must have the dtype of k_scale_cache, torch.float16, got torch.float32",
     TypeError, {"v_scale_cache": torch.zeros(6, 8, 2)}),
    ("k_scale_cache must be [num_blocks, block_size, heads_k], [6, 8, 2], got [6, 8]", ValueError,
     {"k_scale_cache": torch.zeros(6, 8)}),
    ("k_scale_cache must be on the device of k_cache, cpu, got meta", ValueError,
     {"k_scale_cache": torch.zeros(6, 8, 2, device="meta")}),
]  # fmt: skip


@pytest.mark.parametrize("call", [paged, reference, shared, cache])
@pytest.mark.parametrize(("message", "kind", "changes"), CASES, ids=[c[0][:60] for c in CASES])
def test_says_what_is_wrong(message, kind, changes, call):
    with pytest.raises(kind) as raised:
        call(**changes)
    assert str(raised.value) == message


@pytest.mark.parametrize("call", [paged, reference, shared])
@pytest.mark.parametrize("name", ["k", "v"])
def test_two_kinds_of_scales(name, call):
    message = f"^{name}_descale must be None beside {name}_scale_cache, got Tensor$"
    with pytest.raises(ValueError, match=message):
        call(**{f"{name}_descale": torch.ones(1)})
    if call is paged:
        message = f"^{name}_scale must be None beside {name}_scale_cache, got Tensor$"
        with pytest.raises(ValueError, match=message):
            cache(**{f"{name}_scale": torch.ones(1)})


def test_a_cache_of_half_the_head_dim(device):
    """It is of the head dim that its bytes hold."""
    given = arguments("int4")
    with pytest.raises(ValueError, match=r"^head_dim of k_cache must be that of q, 8, got 16$"):
        paged_attn_func(**{**given, "q": torch.zeros(7, 4, 8)})
    names = ("k_scale_cache", "v_scale_cache")
    validate_paged(**{n: x for n, x in given.items() if n not in names})
    with pytest.raises(TypeError, match=r"^k_cache must have the dtype of q, .* got torch.int8$"):
        paged(**NO_SCALES, kv_dtype=None)


# ---- vLLM's formats: codes by the inverse of the scale, and zero points in its lowest bits

ROWS = [
    # scale 1 where the largest is 127: halves go away from zero
    [127.0, 0.5, 1.5, -2.5, -0.5, 126.5, -126.5, 3.0],
    [0.0] * 8,
    [2.0] * 8,
    [-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0, 12.0],
    [1e-9, 0.0, -1e-9, 0.0, 0.0, 0.0, 0.0, 0.0],
]


def made_in_fp32(kind: str, row: list[float]) -> tuple[list[int], float]:
    """Return the codes of a row and its scale, step by step in fp32."""
    one = torch.tensor

    def nearest(x: Tensor) -> int:
        return int(x + 0.5) if x >= 0 else int(x - 0.5)

    if kind == "int8_per_token_head":
        scale = torch.maximum(one(max(map(abs, row))) / 127.0, one(1e-6))
        inverse = 1.0 / scale
        return [max(-128, min(127, nearest(one(x) * inverse))) for x in row], scale.item()
    scale = torch.maximum((one(max(row)) - one(min(row))) / 15.0, one(1e-6))
    zero = max(0, min(15, nearest(-one(min(row)) / scale)))
    inverse = 1.0 / scale
    codes = [max(0, min(15, nearest(one(x) * inverse + zero))) for x in row]
    bits = scale.view(torch.int32).item() & ~15 | zero
    return codes, one(bits, dtype=torch.int32).view(torch.float32).item()


@pytest.mark.parametrize("kind", ["int8_per_token_head", "int4_per_token_head"])
def test_codes_of_vllm_bit_for_bit(kind, device):
    m = Maker(device, torch.float32)
    rows = torch.cat([torch.tensor(ROWS, device=device), m.randn(20, 8) * 3 + 1])
    x = rows[:, None].contiguous()
    made = caches(kind[:4], torch.float32, device, heads=1, head_dim=8)
    slots = torch.arange(len(x), device=device)
    reshape_and_cache(x, -x, slot_mapping=slots, kv_dtype=kind, **made)
    for name, sign in (("k", 1), ("v", -1)):
        codes = made[f"{name}_cache"].flatten(0, 1)[: len(x), 0].cpu()
        if kind == "int4_per_token_head":
            codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
        scales = made[f"{name}_scale_cache"].flatten(0, 1)[: len(x), 0].cpu()
        for i, row in enumerate((sign * rows).tolist()):
            want, scale = made_in_fp32(kind, row)
            assert codes[i].tolist() == want, (i, row)
            assert scales[i].item() == scale, (i, row)


@pytest.mark.skipif(INTERPRETED, reason="interpreted FP8 stores round wrongly")
def test_fp8_of_vllm(device):
    if not detect(device).supports_fp8:
        pytest.skip("no FP8")
    stored = getattr(torch, fp8_dtype(detect(device)))
    x = Maker(device, torch.bfloat16).randn(20, 2, 24)
    x[3] = 0.0
    made = caches("int8", torch.float32, device)
    made |= {f"{n}_cache": made[f"{n}_cache"].view(stored) for n in "kv"}
    slots = torch.arange(20, device=device)
    reshape_and_cache(x, x, slot_mapping=slots, kv_dtype="fp8_per_token_head", **made)
    scale = (x.float().abs().amax(-1) / torch.finfo(stored).max).clamp_min(1e-6)
    assert torch.equal(made["k_scale_cache"].flatten(0, 1)[:20], scale)
    want = (x.float() * (1.0 / scale)[..., None]).to(stored)
    found = made["v_cache"].flatten(0, 1)[:20]
    assert torch.equal(found.view(torch.uint8), want.view(torch.uint8))


def test_what_vllms_formats_need(device):
    x = torch.ones(2, 2, 24, device=device)
    slots = torch.arange(2, device=device)
    made = caches("int4", torch.float16, device)
    with pytest.raises(TypeError, match=r"k_scale_cache must be torch.float32 .* zero points"):
        reshape_and_cache(x, x, slot_mapping=slots, kv_dtype="int4_per_token_head", **made)
    made = caches("int8", torch.float32, device)
    with pytest.raises(TypeError, match=r"k_cache must be torch.float8_e4m3"):
        reshape_and_cache(x, x, slot_mapping=slots, kv_dtype="fp8_per_token_head", **made)
    with pytest.raises(ValueError, match=r"kv_dtype must be .*'int4_per_token_head'"):
        reshape_and_cache(x, x, slot_mapping=slots, kv_dtype="int2", **made)
