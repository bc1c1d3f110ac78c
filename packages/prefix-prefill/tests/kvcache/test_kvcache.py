"""flash_attn_with_kvcache against a plain loop in float64, on a GPU, eager or interpreted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from prefix_prefill import flash_attn_with_kvcache
from prefix_prefill._paged import ops
from torch.library import opcheck

from .._linked.budget import DTYPES
from .._linked.fences import run_fenced
from .._linked.tiers import INTERPRETED
from ._kvcache import Call, check, make

ROWS = Call()
PAGED = Call(page=7)
F32 = torch.float32


CALLS = [
    ROWS,
    PAGED,
    ROWS._replace(new=0, queries=2, lengths=(9, 48)),  # nothing to append
    PAGED._replace(new=0, queries=1, lengths=(9, 49)),  # decoding
    ROWS._replace(new=5, queries=2, lengths=(9, 0)),  # more new keys than queries
    ROWS._replace(lengths=(17, 3), rows=(3, 1)),
    ROWS._replace(lengths=(17, 30), pads=(5, 30)),  # of which the second is empty
    ROWS._replace(lengths=(33, 16), pads=(1, 16), rows=(2, 0), rotary=16),
    ROWS._replace(heads_q=5, heads_k=1, head_dim=24, rotary=10),  # a part, no power of two
    PAGED._replace(heads_q=2, heads_k=1, head_dim=320, rotary=32, lengths=(9, 17)),
    PAGED._replace(rotary=16),
    PAGED._replace(page=16, rotary=8, queries=17, new=17, lengths=(9, 30)),
    ROWS._replace(lengths=(40,), slots=150, queries=1, new=90, rotary=4),  # over two pages
    PAGED._replace(lengths=(9,), heads_q=2, heads_k=1, head_dim=264, rotary=24),
]


@pytest.mark.eager
@pytest.mark.parametrize("number", range(len(CALLS)), ids=lambda i: str(CALLS[i]))
def test_matches_a_loop(number, device):
    check(CALLS[number], F32, device, causal=number % 2 == 1)


@pytest.mark.device
@pytest.mark.parametrize("number", range(len(CALLS)), ids=lambda i: str(CALLS[i]))
def test_matches_a_loop_with_the_other_mask(number, device):
    check(CALLS[number], F32, device, causal=number % 2 == 0)


@pytest.mark.eager
@pytest.mark.parametrize("call", [ROWS._replace(rotary=12), PAGED._replace(rotary=16)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "interleaved"), [(torch.float16, True), (torch.bfloat16, False)], ids=str
)
def test_rotary_embeddings_of_both_styles(dtype, call, interleaved, device):
    check(call, dtype, device, causal=True, rotary_interleaved=interleaved)


@pytest.mark.eager
@pytest.mark.parametrize(
    "options",
    [
        {"window_size": (6, 2)},
        {"window_size": (6, None)},
        {"softcap": 1.5, "causal": True},
        {"softmax_scale": -0.4},
        {"num_splits": 3},
        {"num_splits": 1, "causal": True},
    ],
    ids=str,
)
def test_options(options, device):
    call = (ROWS if "num_splits" in options else PAGED)._replace(lengths=(9, 30), rotary=8)
    window = options.get("window_size")
    plain = (
        options
        if window is None
        else {"window_size": tuple(-1 if n is None else n for n in window)}
    )
    given = make(call, F32, device)
    check(call, F32, device, **plain)
    got = flash_attn_with_kvcache(**given, **options)
    assert torch.equal(got, flash_attn_with_kvcache(**make(call, F32, device), **plain))


@pytest.mark.eager
@pytest.mark.parametrize("per_sequence", [False, True])
def test_alibi(per_sequence, device):
    shape = (3, 4) if per_sequence else (4,)
    slopes = torch.rand(shape, device=device) * 0.5 + 0.05
    check(ROWS, F32, device, alibi_slopes=slopes, causal=True)
    check(PAGED, F32, device, alibi_slopes=slopes)


@pytest.mark.eager
def test_lengths_as_a_number_as_none_and_in_64_bits(device):
    call = ROWS._replace(lengths=(9, 9, 9))
    want = flash_attn_with_kvcache(**make(call, F32, device))
    for other in (9, torch.full((3,), 9, device=device)):
        for _ in range(2):  # the second call knows the form
            given = {**make(call, F32, device), "cache_seqlens": other}
            assert torch.equal(flash_attn_with_kvcache(**given), want)
    full = make(ROWS._replace(lengths=(48,) * 3, new=0), F32, device)
    want = flash_attn_with_kvcache(**full)
    assert torch.equal(flash_attn_with_kvcache(**{**full, "cache_seqlens": None}), want)


def heads_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def with_gaps(x: torch.Tensor) -> torch.Tensor:
    """Rows that lie no whole number of slots apart."""
    row = x[0].numel() + 24
    out = torch.full((x.shape[0] * row,), math.nan, dtype=x.dtype, device=x.device)
    out = out.as_strided(x.shape, (row, *x.stride()[1:]))
    return out.copy_(x)


def side_by_side(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, torch.full_like(x, math.nan)], dim=-1)[..., : x.shape[-1]]


@pytest.mark.eager
@pytest.mark.parametrize(
    ("view", "both"),
    [(heads_first, False), (heads_first, True), (with_gaps, True), (side_by_side, False)],
)
def test_strides_of_the_cache_are_free(view, both, device):
    """Not one bit hangs on them, and what is written lands in the view."""
    call = ROWS._replace(head_dim=24, lengths=(9, 30, 17), rotary=24)
    want, given = make(call, F32, device), make(call, F32, device)
    given["k_cache"] = view(given["k_cache"])
    if both:
        given["v_cache"] = view(given["v_cache"])
    out = flash_attn_with_kvcache(**given, causal=True)
    assert torch.equal(out, flash_attn_with_kvcache(**want, causal=True))
    for name in ("k_cache", "v_cache"):
        torch.testing.assert_close(given[name], want[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.eager
def test_new_tokens_may_be_views_of_one_projection(device):
    call = ROWS._replace(heads_q=2, heads_k=2)
    given = make(call, F32, device)
    want = flash_attn_with_kvcache(**given)
    again = make(call, F32, device)
    both = torch.cat([again[name] for name in "qkv"], dim=2)
    again |= dict(zip("qkv", both.split(2, dim=2), strict=True))
    assert torch.equal(flash_attn_with_kvcache(**again), want)


@pytest.mark.eager
@pytest.mark.parametrize("call", [ROWS._replace(rotary=16), PAGED], ids=str)
def test_a_sequence_alone_gives_the_same_bits(call, device):
    call = call._replace(lengths=(9, 30))
    given = make(call, torch.bfloat16, device)
    want, lse = flash_attn_with_kvcache(**given, causal=True, num_splits=1, return_softmax_lse=True)
    given = make(call, torch.bfloat16, device)
    for name in ("q", "k", "v", "cache_seqlens", "block_table"):
        if name in given:
            given[name] = given[name][1:]
    if "block_table" not in given:
        given["cache_batch_idx"] = torch.tensor([1], device=device)
    got = flash_attn_with_kvcache(**given, causal=True, num_splits=1, return_softmax_lse=True)
    assert torch.equal(got[0], want[1:])
    assert torch.equal(got[1], lse[1:])


@pytest.mark.eager
@pytest.mark.parametrize("where", ["batch", "queries", "new"])
def test_empty(where, device):
    call = {
        "batch": ROWS._replace(lengths=()),
        "queries": ROWS._replace(queries=0),
        "new": ROWS._replace(new=0),
    }[where]
    given = make(call, F32, device)
    if where == "new":
        given |= dict.fromkeys("kv", given["q"][:, :0, :2])
    out, lse = flash_attn_with_kvcache(**given, return_softmax_lse=True)
    assert out.shape == given["q"].shape
    assert lse.shape == (len(call.lengths), 4, call.queries)
    if where == "queries":  # and yet the keys are there
        assert not given["k_cache"][1, 30:33].isnan().any()


@pytest.mark.parametrize("page", [10**6, -1, "behind the last"])
@pytest.mark.parametrize("call", [ROWS, PAGED], ids=str)
def test_nothing_is_written_beyond_the_cache(call, page, device):
    """A GPU's lengths and pages are not checked."""
    from prefix_prefill._kvcache.kernels.launch import launch_append

    given = make(call, F32, device)
    given["cache_seqlens"][1] = 47 if call is ROWS else 48
    if call is PAGED:
        given["block_table"][2, 0] = page if isinstance(page, int) else len(given["k_cache"])
    frames = {}
    for name in ("k_cache", "v_cache"):
        cache = given[name]
        frame = torch.full((len(cache) + 2, *cache.shape[1:]), 7.0, device=device)
        frame[1:-1] = cache.nan_to_num(0.0)
        frames[name], given[name] = frame, frame[1:-1]
    want = {name: frame.clone() for name, frame in frames.items()}
    for new, name in (("k", "k_cache"), ("v", "v_cache")):
        cache = want[name][1:-1]
        for b in range(3):
            for i in range(3):
                at = int(given["cache_seqlens"][b]) + i
                if call is ROWS and at < 48:
                    cache[b, at] = given[new][b, i]
                elif call is PAGED and at < 49 and b != 2:
                    cache[given["block_table"][b, at // 7], at % 7] = given[new][b, i]
    packed = [given[name].flatten(0, 1) for name in "qkv"]
    caches = given["k_cache"], given["v_cache"], given["cache_seqlens"]
    no = [None] * 5
    launch_append(*packed, *caches, None, given.get("block_table"), *no, True, True)
    for name, frame in frames.items():
        assert torch.equal(frame, want[name])


@pytest.mark.skipif(not INTERPRETED, reason="needs memory that faults on a CPU")
def test_no_read_beyond_a_tensor():
    """The new keys of the last sequence do not fit: no entry behind its last page is read."""
    code = """
import torch
from prefix_prefill._kvcache.kernels.launch import launch_append
for d in (16, 24):
    q, k, v = (fenced(torch.randn(4 * 3, heads, d)) for heads in (4, 2, 2))
    lengths = fenced(torch.tensor([0, 3, 7, 11], dtype=torch.int32))
    cos, sin = (fenced(torch.rand(16, 8)) for _ in range(2))
    for page in (4, 0):
        cache = torch.zeros(13, 4, 2, d) if page else torch.zeros(5, 12, 2, d)
        table = fenced(torch.arange(12, dtype=torch.int32).view(4, 3)) if page else None
        rows = None if page else fenced(torch.arange(4, dtype=torch.int32))
        caches = fenced(cache), fenced(cache)
        places = lengths, rows, table
        turned = torch.zeros_like(q)
        launch_append(q, k, v, *caches, *places, cos, sin, turned, None, None, True, True)
        at = (11, 3) if page else (3, 11)
        assert torch.equal(caches[1][at], v[9]), page
        assert caches[1].count_nonzero() == v[:10].numel()
"""
    run_fenced(code, __file__)


# ---- what PyTorch sees


@pytest.mark.eager
@pytest.mark.parametrize("call", [ROWS._replace(rotary=16), PAGED], ids=str)
def test_operators_pass_opcheck(call, device):
    given = make(call, F32, device)
    clean = {n: x.nan_to_num(0.0) if n.endswith("cache") else x for n, x in given.items()}
    packed = [clean[name].flatten(0, 1) for name in "qkv"]
    caches = clean["k_cache"], clean["v_cache"]
    names = ("cache_seqlens", "cache_batch_idx", "block_table", "rotary_cos", "rotary_sin")
    where = [clean.get(name) for name in names]
    utils = ("test_schema", "test_faketensor")
    rotated = torch.zeros_like(packed[0]) if call.rotary else None
    append: tuple[Any, ...] = *packed, *caches, *where, rotated, None, None, True, False
    opcheck(ops.append_kvcache, append, test_utils=utils)
    places = clean["cache_seqlens"], None, None, clean.get("block_table"), None
    out, lse = torch.zeros_like(packed[0]), torch.zeros(4, 9, device=device)
    attend = packed[0], *caches, *places, None, None, out, lse, 3, 0.25, -1, 0, 0.0, 0
    opcheck(ops.attend_kvcache, attend, test_utils=utils)


@pytest.mark.skipif(INTERPRETED, reason="tracing sees the operators alone")
@pytest.mark.eager
def test_a_step_compiles(device):
    call = PAGED._replace(rotary=16)

    def step(given):
        out, lse = flash_attn_with_kvcache(**given, causal=True, return_softmax_lse=True)
        # what was appended is seen behind the call, too
        return out + 1, lse, given["k_cache"].nan_to_num(0.0).sum()

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ((9, 30, 0), (1, 2, 40, 7)):
        one, other = (make(call._replace(lengths=lengths), F32, device) for _ in range(2))
        for got, want in zip(compiled(one), step(other), strict=True):
            torch.testing.assert_close(got, want)
        for name in ("k_cache", "v_cache"):
            torch.testing.assert_close(one[name], other[name], equal_nan=True)
    torch.compiler.reset()


# ---- wrong calls

WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "q": ({"q": None}, TypeError, "q must be a torch.Tensor, got NoneType"),
    "q dtype": ({"q": torch.zeros(3, 3, 4, 16).double()}, TypeError, "q must be torch.float16, "),
    "q shape": (
        {"q": torch.zeros(9, 4, 16)}, ValueError, "q must be [batch, seqlen_q, heads_q, head_dim]"
    ),
    "head_dim": ({"q": torch.zeros(3, 3, 4, 20)}, ValueError, "head_dim of q must be a multiple"),
    "k_cache": ({"k_cache": 3}, TypeError, "k_cache must be a torch.Tensor, got int"),
    "k_cache shape": (
        {"k_cache": torch.zeros(4, 48, 16)}, ValueError,
        "k_cache must be [batch_cache, seqlen_cache, heads_k, head_dim] with the head_dim of q",
    ),
    "v_cache shape": (
        {"v_cache": torch.zeros(4, 47, 2, 16)}, ValueError,
        "v_cache must be shaped like k_cache but for its head_dim, [4, 48, 2, 16], got [4, 47, 2,",
    ),
    "v_cache head_dim": (
        {"v_cache": torch.zeros(4, 48, 2, 20)}, ValueError,
        "head_dim of v_cache must be a multiple of 8 from 8 to 512, got 20",
    ),
    "k_cache dtype": (
        {"k_cache": torch.zeros(4, 48, 2, 16).half()}, TypeError,
        "k_cache must have the dtype of q, torch.float32, got torch.float16",
    ),
    "heads": (
        {"q": torch.zeros(3, 3, 3, 16)}, ValueError, "heads_q must be a positive multiple of "
    ),
    "k alone": ({"v": None}, ValueError, "k and v must be given together or not at all, got k T"),
    "k shape": (
        {"k": torch.zeros(3, 3, 1, 16)}, ValueError,
        "k must be [batch, seqlen_new, heads_k, head_dim], [3, seqlen_new, 2, 16], got [3, 3, 1,",
    ),
    "v shape": ({"v": torch.zeros(3, 2, 2, 16)}, ValueError, "v must be [batch, seqlen_new, "),
    "v width": (
        {"v": torch.zeros(3, 3, 2, 24)}, ValueError,
        "v must be [batch, seqlen_new, heads_k, head_dim_v], [3, seqlen_new, 2, 16], got [3, 3, 2,",
    ),
    "many": (
        {"k": torch.zeros(3, 49, 2, 16), "v": torch.zeros(3, 49, 2, 16)}, ValueError,
        "k must have at most as many keys as the cache has room for, 48, got 49",
    ),
    "no lengths": ({"cache_seqlens": None}, ValueError, "cache_seqlens must say behind which keys"),
    "cos alone": (
        {"rotary_cos": torch.zeros(48, 4)}, ValueError,
        "rotary_cos and rotary_sin must be given together or not at all",
    ),
    "cos shape": (
        {"rotary_cos": torch.zeros(48, 9), "rotary_sin": torch.zeros(48, 9)}, ValueError,
        "rotary_cos must be [seqlen_ro, rotary_dim / 2], at least 48 and at most 8, got [48, 9]",
    ),
    "cos length": (
        {"rotary_cos": torch.zeros(47, 8), "rotary_sin": torch.zeros(47, 8)}, ValueError,
        "rotary_cos must be [seqlen_ro, rotary_dim / 2], at least 48",
    ),
    "cos dtype": (
        {"rotary_cos": torch.zeros(48, 8).half(), "rotary_sin": torch.zeros(48, 8)}, TypeError,
        "rotary_cos must have the dtype of q, torch.float32, or be torch.float32",
    ),
    "sin": (
        {"rotary_cos": torch.zeros(48, 8), "rotary_sin": torch.zeros(48, 7)}, ValueError,
        "rotary_sin must be like rotary_cos",
    ),
    "cos without k": (
        {"rotary_cos": torch.zeros(48, 8), "rotary_sin": torch.zeros(48, 8), "k": None, "v": None},
        ValueError, "k and v must be given beside rotary_cos and rotary_sin, got None",
    ),
    "lengths": (
        {"cache_seqlens": torch.zeros(2, dtype=torch.int32)}, ValueError,
        "cache_seqlens must be [batch], [3], got [2]",
    ),
    "lengths dtype": ({"cache_seqlens": torch.zeros(3)}, TypeError, "cache_seqlens must be torch"),
    "length": ({"cache_seqlens": 3.0}, TypeError, "cache_seqlens must be an int, got float"),
    "length of all": (
        {"cache_seqlens": 46}, ValueError,
        "cache_seqlens must leave room for 3 new keys of 48, got 46",
    ),
    "rows": (
        {"cache_batch_idx": torch.zeros(3)}, TypeError, "cache_batch_idx must be torch.int32 or "
    ),
    "few rows": (
        {"k_cache": torch.zeros(2, 48, 2, 16), "v_cache": torch.zeros(2, 48, 2, 16)}, ValueError,
        "k_cache must have a row for each of the 3 sequences of q, got 2",
    ),
    "leftpad": (
        {"cache_leftpad": torch.zeros(2, dtype=torch.int32)}, ValueError,
        "cache_leftpad must be [batch], [3], got [2]",
    ),
    "table": (
        {"block_table": torch.zeros(2, 1, dtype=torch.int32)}, ValueError,
        "block_table must be [batch, max_blocks], [3, max_blocks], got [2, 1]",
    ),
    "table and rows": (
        {
            "block_table": torch.zeros(3, 1, dtype=torch.int32),
            "cache_batch_idx": torch.arange(3),
        },
        NotImplementedError, "cache_batch_idx must be None beside block_table, got Tensor",
    ),
    "slopes": ({"alibi_slopes": torch.zeros(3)}, ValueError, "alibi_slopes must be [heads_q] or "),
    "interleaved": ({"rotary_interleaved": 1}, TypeError, "rotary_interleaved must be a bool"),
    "lse": ({"return_softmax_lse": 0}, TypeError, "return_softmax_lse must be a bool, got int"),
    "gradient": (
        {"q": torch.zeros(3, 3, 4, 16, requires_grad=True)}, NotImplementedError,
        "attention over a paged cache has no gradient",
    ),
    "seqused_k": ({"seqused_k": 1}, TypeError, "seqused_k is no argument here: use cache_seqlens"),
    "sinks": ({"sinks": 1}, TypeError, "sinks is no argument here: paged_attn_func takes them"),
}  # fmt: skip


@pytest.mark.eager
@pytest.mark.parametrize("case", WRONG)
def test_wrong_calls_are_named(case):
    changes, error, message = WRONG[case]
    with pytest.raises(error) as caught:
        flash_attn_with_kvcache(**{**make(ROWS, F32, "cpu"), **changes})
    assert str(caught.value).startswith(message)


@pytest.mark.eager
@pytest.mark.parametrize(
    ("call", "changes", "message"),
    [
        (ROWS, {"cache_seqlens": [9, 46, 0]}, r"cache_seqlens\[1\] must be from 0 to 45, which le"),
        (ROWS, {"cache_seqlens": [-1, 4, 0]}, r"cache_seqlens\[0\] must be from 0 to 45"),
        (
            ROWS,
            {"cache_batch_idx": [0, 4, 1]},
            r"cache_batch_idx\[1\] must be from 0 to batch_cache",
        ),
        (
            ROWS,
            {"cache_leftpad": [0, 31, 0]},
            r"cache_leftpad\[1\] must be from 0 to cache_seqlens",
        ),
        (
            PAGED,
            {"block_table": [[0] * 7, [1] * 7, [22] * 7]},
            r"block_table\[2, 0\] must be from 0",
        ),
        (
            ROWS,
            {"cache_batch_idx": [2, 0, 2], "cache_seqlens": [9, 30, 4]},
            r"cache_batch_idx\[2\] must be a row of its own .* 2, which is cache_batch_idx\[0\]",
        ),
        (
            PAGED,
            {"block_table": [[3] * 7, [1] * 7, [3] * 7], "cache_seqlens": [9, 30, 10]},
            r"block_table\[\d, \d\] must give new keys slots of their own, got page 3, to whose sl",
        ),
    ],
    ids=["long", "negative", "row", "pad", "page", "same row", "same slot"],
)
@pytest.mark.parametrize("in_graph", [False, True])
def test_wrong_values_are_named_before_the_cache_changes(call, changes, message, in_graph):
    given = make(call, F32, "cpu")
    given |= {n: torch.tensor(x, dtype=torch.int32) for n, x in changes.items()}
    before = {n: given[n].clone() for n in ("k_cache", "v_cache")}
    function = flash_attn_with_kvcache
    if in_graph:
        function = torch.compile(function, fullgraph=True, backend="eager")
    with pytest.raises(ValueError, match=message):
        function(**given)
    for name, x in before.items():
        torch.testing.assert_close(given[name], x, rtol=0, atol=0, equal_nan=True)


@pytest.mark.eager
def test_pages_of_earlier_keys_are_checked_before_the_cache_changes():
    given = make(PAGED, F32, "cpu")
    before = given["k_cache"].clone()
    given["block_table"][1, 0] = 99
    with pytest.raises(ValueError, match=r"block_table\[1, 0\] must be from 0 to num_blocks - 1"):
        flash_attn_with_kvcache(**given)
    torch.testing.assert_close(given["k_cache"], before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(not INTERPRETED, reason="only kernels need rows that lie alike")
def test_rows_that_lie_unlike_are_refused_before_the_cache_changes():
    given = make(ROWS._replace(pads=(3, 0, 0)), F32, "cpu")
    rows, slots, *inner = given["k_cache"].shape
    wide = given["k_cache"].new_zeros(rows, slots + 1, *inner)[:, :slots]
    given["k_cache"] = wide
    before = given["v_cache"].clone()
    with pytest.raises(NotImplementedError, match="cache_leftpad: k_cache and v_cache must be"):
        flash_attn_with_kvcache(**given)
    assert not wide.any()
    torch.testing.assert_close(given["v_cache"], before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.eager
def test_sequences_may_share_pages_and_rows_without_new_keys():
    call = ROWS._replace(new=0)
    given = make(call, F32, "cpu") | {"cache_batch_idx": torch.tensor([1, 1, 0])}
    flash_attn_with_kvcache(**given)


@pytest.mark.eager
def test_a_query_beyond_the_rotations(device):
    call = ROWS._replace(rotary=16, queries=5, new=1, lengths=(9, 46, 0))
    given = make(call, F32, "cpu")
    given |= {n: given[n][:48] for n in ("rotary_cos", "rotary_sin")}
    flash_attn_with_kvcache(**given)  # all at one position
    with pytest.raises(ValueError, match="rotary_cos must hold the position of every query, up to"):
        flash_attn_with_kvcache(**given, causal=True)


@pytest.mark.device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page", [0, 16, 48])
@pytest.mark.parametrize("rotary", [0, 64])
def test_large(rotary, page, dtype, device):
    call = Call((700, 0, 1000), 130, 130, 8, 2, 128, 1500, page, rotary)
    check(call, dtype, device, causal=True)
    check(call._replace(queries=1, new=1), dtype, device)
    if not page:
        check(call._replace(pads=(3, 0, 500), rows=(3, 1, 0)), dtype, device, causal=True)


@pytest.mark.device
@pytest.mark.parametrize("call", [ROWS._replace(rotary=16), PAGED], ids=str)
def test_a_graph_replays_decoding(call, device):
    """Lengths are device data: a captured step serves every next token."""
    call = call._replace(queries=1, new=1)
    static = make(call, torch.bfloat16, device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        flash_attn_with_kvcache(**make(call, torch.bfloat16, device), causal=True)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn_with_kvcache(**static, causal=True)
    for seed in (1, 2):
        fresh = make(call._replace(lengths=(20, 1, 31)), torch.bfloat16, device, seed)
        for name, x in fresh.items():
            static[name].copy_(x)
        graph.replay()
        want = flash_attn_with_kvcache(**fresh, causal=True)
        assert torch.equal(out, want)
        torch.testing.assert_close(static["k_cache"], fresh["k_cache"], equal_nan=True)
