"""Traps that kernels of this family have fallen into, and which test holds each shut.

Those with a test of their own here aside:

- dead tiles: ``test_aot.py::test_the_grid_holds_little_but_live_tiles``
- a window is a mask only; keys outside of it are loaded: ``test_poison.py``, everything on windows
- pages of a size that is no power of two, or below 16: ``test_attention.py::test_page_sizes``
- registers spill: ``test_aot.py::test_compiles_fits_and_does_not_spill``
- heads of a group read their keys again: ``test_aot.py::test_the_short_tile_packs_the_group``
- offsets wrap at 2**31: ``test_device.py``, all that is beyond it
- a table read past its end: ``test_poison.py::test_no_read_beyond_a_tensor``
- strides and lengths compile anew: ``test_recompilation.py``
- a sum that starts at 1: ``test_attention.py::test_windows_at_tile_edges``
- no LSE, softcap, mask to the right, FP8 queries: ``test_attention.py``, ``test_fp8.py``
- rows beyond a bound that is too small are not written, int64 tables, unnamed errors:
  ``test_api_errors.py``, ``test_attention.py::test_page_numbers_of_both_widths``
- new keys count unrounded, later ones rounded: ``test_fp8.py::test_new_keys_have_no_scale``
- rows that are skipped: ``test_dropin.py::test_skipped_rows_stay_as_they_are``
- empty splits, a sink counted twice, padding of a graph: ``test_independence.py``,
  ``test_poison.py::test_padding_after_the_last_sequence``
- a row that is masked in every tile: ``test_attention.py``, more queries than keys
- two structures for one body of a jit function: every build; see ``refuse_mixed_structures``
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from attn_common import Platform, detect
from prefix_prefill import context_attention_fwd, paged_attn_func
from prefix_prefill._paged.tiles import long_tile, short_tile
from triton.compiler.errors import CompilationError

from .._dropin import judge
from .._linked.budget import Maker, assert_no_worse_than_eager
from .._linked.gpus import GPUS, compiling
from .._numerics import MEDIUM, PACKED, Problem, check, make_case, run_oracle


@pytest.mark.eager
def test_the_default_scale_comes_from_the_head_dim(device):
    """Not from the number of heads; with scores near 0 nobody would see it."""
    problem = Problem(((1, 20), (5, 19)), 2, 1, 48, page=8, layout=PACKED, dense=True)
    case = make_case(problem, torch.float32, device)
    case = case.with_inputs(q=case.inputs["q"] * 3)
    judge(context_attention_fwd, case, problem)


@pytest.mark.eager
@pytest.mark.parametrize("dense", [False, True])
def test_slopes_may_be_negative(dense, device):
    """A positive bias must not be taken for a mask."""
    case = make_case(MEDIUM._replace(dense=dense), torch.float32, device, ["alibi"])
    check(case.with_inputs(alibi_slopes=-case.inputs["alibi_slopes"]))


@pytest.mark.eager
@pytest.mark.parametrize("layout", ["nhd", PACKED])
def test_slopes_beside_sinks_and_a_window(layout, device):
    problem = MEDIUM._replace(layout=layout)
    check(make_case(problem, torch.float32, device, ["alibi_batch", "sinks", "window"]))


@pytest.mark.eager
@pytest.mark.parametrize("scale", [1e5, 1e-6, -1e5])
def test_softcap_neither_overflows_nor_cancels(scale, device):
    case = make_case(MEDIUM, torch.float32, device).with_options(softcap=30.0, softmax_scale=scale)
    got = check(case)
    assert got["out"].isfinite().all()


@pytest.mark.eager
@pytest.mark.parametrize("window", [1, 2, 16, 17])
def test_decoding_with_a_window_and_scores_below_minus_10000(window, device):
    problem = Problem(((1, 40), (1, 17)), 4, 2, 16, page=8)
    case = make_case(problem, torch.float32, device).with_options(window_size=(window - 1, 0))
    q = case.inputs["q"].abs() + 1
    k = -case.inputs["k_cache"].abs() - 1
    check(case.with_inputs(q=q * 40, k_cache=k * 40).with_options(softmax_scale=1.0))


@pytest.mark.eager
@pytest.mark.parametrize("name", GPUS)
def test_fp32_is_never_single_tf32(name):
    platform = Platform.parse(name)
    for head_dim in (16, 64, 128, 256):
        tiles = long_tile(platform, head_dim, 4), short_tile(platform, head_dim, 4, 4)
        expected = "tf32x3" if platform.vendor == "nvidia" else "ieee"
        assert [tile.precision for tile in tiles] == [expected] * 2


@pytest.mark.eager
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_prefill_has_a_tile_that_fills_the_tensor_cores(head_dim):
    assert long_tile(Platform.parse("nvidia:sm_90"), head_dim, 2).block_m == 128


@pytest.mark.device
def test_small_probabilities_do_not_vanish_in_fp8(device):
    """Thousands of keys whose probabilities FP8 would round to 0, if it were not for a factor."""
    platform = detect(device)
    if not platform.supports_fp8:
        pytest.skip(f"{platform} has no FP8")
    problem = Problem(((1, 4001),), 1, 1, 16, page=16)
    case = make_case(problem, torch.float32, device, cache_dtype=torch.float8_e4m3fn)
    # one key with a score of 7 above all others
    k = torch.zeros_like(case.inputs["k_cache"].float())
    k[case.options["block_table"][0, 0], 0, 0, 0] = 7.0
    v = case.inputs["v_cache"].float().nan_to_num(0.0).abs()
    q = torch.zeros(1, 1, 16, device=device)
    q[..., 0] = 1.0
    fp8 = torch.float8_e4m3fn
    case = case.with_inputs(q=q.to(fp8), k_cache=k.to(fp8), v_cache=v.to(fp8))
    case = case.with_options(softmax_scale=1.0, num_splits=1)
    want = run_oracle(case)["out"]
    torch.testing.assert_close(case()["out"].double(), want, rtol=0.03, atol=0.0)


@pytest.mark.eager
def test_a_sequence_longer_than_announced_is_not_left_out_where_that_can_be_seen(device):
    case = make_case(Problem(((20, 30), (1, 9)), 2, 1, 16), torch.float32, device)
    if device.type == "cpu":
        with pytest.raises(ValueError, match=r"cu_seqlens_q\[1\] must be at most max_seqlen_q, 1,"):
            case(max_seqlen_q=1)
    else:
        assert torch.equal(case(max_seqlen_q=1)["out"], case()["out"])


@pytest.mark.eager
def test_an_engine_s_table_of_garbage_behind_the_last_page(device):
    m = Maker(device, torch.float32)
    cache = m.randn(3, 8, 1, 16)
    table = torch.tensor([[2, 1, 2**30, -(2**30)]], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 3], dtype=torch.int32, device=device)
    lengths = torch.tensor([16], dtype=torch.int32, device=device)
    q = m.randn(3, 2, 16)
    out, lse = paged_attn_func(q, cache, cache, table, starts, lengths, 3, 16, return_lse=True)
    keys = torch.cat([cache[2], cache[1]])[:, 0].double()
    scores = torch.einsum("ihd,jd->hij", q.double(), keys) / 4
    hidden = torch.arange(16, device=device) > torch.arange(13, 16, device=device)[:, None]
    scores = scores.masked_fill(hidden, -math.inf)
    want = torch.einsum("hij,jd->ihd", scores.softmax(-1), keys)
    assert_no_worse_than_eager("out", out, want.float(), want, eps=1e-6)
    assert_no_worse_than_eager("lse", lse, scores.logsumexp(-1).float(), scores.logsumexp(-1))


class Segment(NamedTuple):
    begin: Any
    end: Any


class Span(NamedTuple):
    end: Any
    begin: Any


@triton.jit
def _length(x):
    return x.end - x.begin


@triton.jit
def _mixed_kernel(out_ptr, begin, end):
    # Triton makes one body, and the second is end - begin turned round
    tl.store(out_ptr, _length(Segment(begin, end)))
    tl.store(out_ptr + 1, _length(Span(end, begin)))


@triton.jit
def _same_kernel(out_ptr, begin, end):
    tl.store(out_ptr, _length(Segment(begin, end)))
    tl.store(out_ptr + 1, _length(Segment(begin, end + 1)))


@pytest.mark.aot
def test_a_build_refuses_two_structures_for_one_body(tmp_path):
    out = torch.empty(2, dtype=torch.int32, device="meta")
    with compiling("nvidia:sm_90", tmp_path):
        _same_kernel[(1,)](out, 3, 9, enable_fp_fusion=True)
    refused = pytest.raises(CompilationError, match="one body for")
    with refused, compiling("nvidia:sm_90", tmp_path):
        _mixed_kernel[(1,)](out, 3, 9, enable_fp_fusion=True)
