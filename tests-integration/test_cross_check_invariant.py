"""The law of ``invariant=True``: a training forward, prefills and decodes have the same bits."""

import random
import sys
from dataclasses import replace

import pytest
import torch

from .conftest import ROOT

sys.path.insert(0, str(ROOT / "ci"))
import cuts

flash_attn_triton = pytest.importorskip("flash_attn_triton")
prefix_prefill = pytest.importorskip("prefix_prefill")

INTERPRETED = prefix_prefill._paged.ops.interpreted()
ON_GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if ON_GPU else "cpu"
COUNT = 1000 if ON_GPU else 6 if INTERPRETED else 30
SIZE = cuts.Size() if ON_GPU else replace(cuts.SMALL, cuts=4, longest=(30, 80))


@pytest.mark.parametrize("seed", range(2))
def test_random_cuts_have_the_bits_of_a_training_forward(seed):
    told = cuts.check_cuts(DEVICE, COUNT, 1e9, seed, SIZE)
    assert not told["differing"], told["first"]
    assert told["cuts"] >= COUNT


@pytest.mark.parametrize("way", [cuts.by_pages, cuts.by_dropin, cuts.by_appending])
@pytest.mark.parametrize("fp8", [False, True])
def test_every_way_and_one_wrong_bit(way, fp8):
    """Each function is asked, and one bit that differs is found."""
    draw = random.Random(1)
    form = cuts.Form("float16", fp8, 16, {"window_size": (37, 0)}, False, 16)
    made = cuts.make_round(draw, DEVICE, replace(cuts.SMALL, longest=(40,)), form)
    cuts.train(made)
    n = len(made.q[0])
    chunks = [cuts.Chunk(0, n - 1, n), cuts.Chunk(1, 0, 1)]
    if fp8 and way is cuts.by_appending:
        assert way not in cuts.ways(made, chunks)  # no scales there
        return
    assert way in cuts.ways(made, chunks)
    out, lse = way(made, chunks, 16, draw)
    assert not cuts.differing(made, chunks, out, lse)
    out.view(torch.int16)[0, 0, 0] ^= 1
    assert cuts.differing(made, chunks, out, lse) == chunks[:1]


def test_forms_take_every_value():
    drawn = cuts.forms(random.Random(0), cuts.Size(), has_fp8=True)
    some = [next(drawn) for _ in range(-(-2000 // cuts.Size().cuts))]
    assert {form.head_dim for form in some} == set(cuts.Size().head_dims)
    assert {form.page for form in some} == set(cuts.PAGES)
    assert {(form.dtype, form.fp8) for form in some} >= {("bfloat16", True), ("float32", False)}
    assert {form.has_sinks for form in some} == {False, True}
    assert all(any(form.options == options for form in some) for options in cuts.OPTIONS)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(16, 40), (40, 16), (64, 128)])
def test_chunks_have_the_bits_of_a_training_forward_whatever_the_width_of_values(
    head_dim, head_dim_v
):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, 70, heads, n, generator=generator).to(DEVICE, torch.float16)
        for heads, n in ((4, head_dim), (2, head_dim), (2, head_dim_v))
    )
    whole, lse = flash_attn_triton.flash_attn_func(
        q, k, v, causal=True, invariant=True, return_lse=True
    )
    pages = [x.reshape(10, 7, 2, -1).flip(0).contiguous() for x in (k, v)]
    table = torch.arange(9, -1, -1, dtype=torch.int32, device=DEVICE)[None]
    for first, last in ((0, 33), (33, 34), (34, 70)):
        part, lse_part = prefix_prefill.paged_attn_func(
            q[0, first:last],
            *pages,
            table,
            torch.tensor([0, last - first], dtype=torch.int32, device=DEVICE),
            torch.tensor([last], dtype=torch.int32, device=DEVICE),
            last - first,
            last,
            invariant=True,
            return_lse=True,
        )
        assert torch.equal(part, whole[0, first:last])
        assert torch.equal(lse_part, lse[0, :, first:last])


def test_without_the_law_the_bits_differ():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 70, heads, 16, generator=generator).to(DEVICE) for heads in (2, 1, 1))
    lawful, plain = (
        flash_attn_triton.flash_attn_func(q, k, v, causal=True, invariant=invariant)
        for invariant in (True, False)
    )
    torch.testing.assert_close(plain, lawful, rtol=1e-4, atol=1e-4)
    assert not torch.equal(plain, lawful)
