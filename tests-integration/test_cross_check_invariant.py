"""The law of ``invariant=True``: a training forward, prefills and decodes have the same bits."""

import random

import pytest
import torch

flash_attn_triton = pytest.importorskip("flash_attn_triton")
prefix_prefill = pytest.importorskip("prefix_prefill")

INTERPRETED = prefix_prefill._ops.interpreted()
ON_GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OPTIONS = ({}, {"window_size": (37, 0)}, {"softcap": 2.0}, {"softmax_scale": -0.2})
CUTS = 2000 if ON_GPU else 4 if INTERPRETED else 40


def make(draw, *shape, dtype):
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, torch.int32)


def trained(sequences, options):
    """Return the results of whole sequences, packed, by flash-attn-triton."""
    lengths = [len(q) for q, _, _ in sequences]
    packed = (torch.cat(xs) for xs in zip(*sequences, strict=True))
    starts = offsets(lengths)
    out, lse = flash_attn_triton.flash_attn_varlen_func(
        *packed,
        starts,
        starts,
        max(lengths),
        max(lengths),
        causal=True,
        **options,
        invariant=True,
        return_lse=True,
    )
    return out.split(lengths), lse.split(lengths, 1)


def served(chunks, sequences, page, dense, options, draw):
    """Return the results of chunks ``(sequence, begin, end)`` over pages, by prefix-prefill."""
    held = [begin if dense else end for _, begin, end in chunks]
    counts = [-(-n // page) for n in held]
    order = draw.sample(range(sum(counts) + 2), sum(counts))
    table = torch.full((len(chunks), max(1, *counts)), sum(counts) + 1, dtype=torch.int32)
    _, k, v = sequences[0]
    caches = [x.new_full((sum(counts) + 2, page, *x.shape[1:]), float("nan")) for x in (k, v)]
    for b, (which, _, _) in enumerate(chunks):
        pages = torch.tensor([order.pop() for _ in range(counts[b])], dtype=torch.int64)
        table[b, : counts[b]] = pages
        keys = torch.arange(held[b])
        slots = (pages[keys // page] * page + keys % page).to(DEVICE)
        for cache, x in zip(caches, sequences[which][1:], strict=True):
            cache.flatten(0, 1)[slots] = x[: held[b]]
    new = [
        torch.cat([sequences[which][i][begin:end] for which, begin, end in chunks])
        for i in range(3)
    ]
    lengths = [end - begin for _, begin, end in chunks]
    ends = [end for _, _, end in chunks]
    return prefix_prefill.paged_attn_func(
        new[0],
        *caches,
        table.to(DEVICE),
        offsets(lengths),
        torch.tensor(ends, dtype=torch.int32, device=DEVICE),
        max(lengths),
        max(ends),
        **({"k": new[1], "v": new[2]} if dense else {}),
        **options,
        invariant=True,
        return_lse=True,
    )


@pytest.mark.parametrize("seed", range(4))
def test_random_cuts_have_the_bits_of_a_training_forward(seed):
    draw = random.Random(seed)
    options, dtype = OPTIONS[seed], DTYPES[seed % 3]
    if seed % 2:
        options = {**options, "sinks": make(draw, 4, dtype=torch.float32)}
    longest = 3000 if ON_GPU else 100
    done = 0
    while done < max(1, CUTS // 4):
        heads_k, head_dim = draw.choice([1, 2, 4]), draw.choice([64, 128] if ON_GPU else [16])
        sequences = [
            tuple(make(draw, n, heads, head_dim, dtype=dtype) for heads in (4, heads_k, heads_k))
            for n in (draw.randint(1, longest) for _ in range(2 if INTERPRETED else 3))
        ]
        chunks = []
        for which, (q, _, _) in enumerate(sequences):
            n = len(q)
            ends = sorted({n, max(1, n - 1), *(draw.randint(1, n) for _ in range(2))})
            chunks += [(which, *cut) for cut in zip([0, *ends], ends, strict=False)]
        draw.shuffle(chunks)
        outs, lses = trained(sequences, options)
        size = draw.randint(1, len(chunks))
        for first in range(0, len(chunks), size):
            some = chunks[first : first + size]
            page, dense = draw.choice([1, 16, 33, 128]), draw.random() < 0.5
            out, lse = served(some, sequences, page, dense, options, draw)
            at = 0
            for which, begin, end in some:
                rows = slice(at, at + end - begin)
                assert torch.equal(out[rows], outs[which][begin:end]), (which, begin, end)
                assert torch.equal(lse[:, rows], lses[which][:, begin:end]), (which, begin, end)
                at = rows.stop
        done += len(chunks)


def test_without_the_law_the_bits_differ():
    draw = random.Random(0)
    sequences = [tuple(make(draw, 90, heads, 16, dtype=torch.float32) for heads in (4, 2, 2))]
    outs, _ = trained(sequences, {})
    q, k, v = sequences[0]
    plain = flash_attn_triton.flash_attn_func(q[None], k[None], v[None], causal=True)
    torch.testing.assert_close(plain[0], outs[0], rtol=1e-4, atol=1e-4)
    assert not torch.equal(plain[0], outs[0])
