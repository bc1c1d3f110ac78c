"""Values in FP8 as Hopper's products read them, and the factors that descales become."""

from __future__ import annotations

import math

import pytest
import torch
import triton
from attn_common import cdiv
from flash_attn_triton._dense.hopper.forward.arguments import (
    ValuesNumbers,
    ValuesOptions,
    ValuesTensors,
)
from flash_attn_triton._dense.hopper.forward.values import transpose_values
from flash_attn_triton._linked.launch.entries import flat
from flash_attn_triton._linked.portable.strides import Strides

from ..._linked.budget import Maker, offsets

BLOCK_N = 128


def transposed(v: torch.Tensor) -> torch.Tensor:
    """Return ``[tokens, heads, width]`` as ``[tiles, heads, 2**n columns, BLOCK_N keys]``."""
    tokens, heads, width = v.shape
    tiles, wide = max(1, cdiv(tokens, BLOCK_N)), triton.next_power_of_2(width)
    padded = v.new_zeros(tiles * BLOCK_N, heads, wide)
    padded[:tokens, :, :width] = v
    # sixteen keys as two of eight, those as four of two, in the order of the accumulators
    halves = padded.view(tiles, BLOCK_N // 16, 2, 4, 2, heads, wide)
    return halves.permute(0, 5, 6, 1, 3, 2, 4).reshape(tiles, heads, wide, BLOCK_N)


def run_transposition(v, descales=(None,) * 3, *, window_left=-1, starts=None, used=None):
    """Launch the kernel on codes; return what it wrote, and the factors."""
    heads, width = v.shape[-2:]
    if starts is None:
        batch, tokens = v.shape[:2]
        starts, tiles = (None, None), cdiv(tokens, BLOCK_N)
        slots, strides = batch * tiles, v.stride()[:3]
    else:
        tokens, batch, tiles = len(v), len(starts[0]) - 1, 0
        slots, strides = tokens // BLOCK_N + batch + 1, (0, *v.stride()[:2])
    wide = triton.next_power_of_2(width)
    out = torch.full((slots, heads, wide, BLOCK_N), 7, dtype=torch.uint8, device=v.device)
    factors = torch.full((batch, heads, 2), math.nan, device=v.device)
    numbers = ValuesNumbers(
        window_left=window_left,
        batch=batch,
        heads_k=heads,
        tokens_q=10,
        tokens_k=tokens,
        tiles=tiles,
        v=Strides(*strides),
    )
    transpose_values[(slots * heads,)](
        *ValuesTensors(v, out, factors, *descales, *starts, used),
        *flat(numbers),
        **ValuesOptions(
            HEAD_DIM=width,
            HAS_LEFT=window_left >= 0,
            DESCALE_PER_HEAD=any(d is not None and d.numel() > 1 for d in descales),
            BLOCK_N=BLOCK_N,
            BLOCK_D=wide,
        )._asdict(),
    )
    return out, factors


@pytest.fixture
def codes(device):
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randint(0, 256, size, generator=generator, dtype=torch.uint8).to(device)

    return draw


@pytest.mark.parametrize("tokens", [1, 16, 300])
@pytest.mark.parametrize("width", [48, 128])
def test_values_are_transposed(width, tokens, codes):
    v = codes(2, tokens, 3, width)
    out, factors = run_transposition(v)
    assert torch.equal(out, torch.cat([transposed(one) for one in v]))
    assert (factors == 1).all()


def test_values_of_strided_tensors(codes):
    v = codes(2, 3, 50, 80)[..., 16:64].transpose(1, 2)
    assert torch.equal(run_transposition(v)[0], torch.cat([transposed(one) for one in v]))


def test_descales_become_factors(codes, device):
    m = Maker(device, torch.float32)
    q, k, v = (m.uniform(2, 3, low=-1.0, high=1.0) for _ in range(3))
    _, factors = run_transposition(codes(2, 20, 3, 16), (q, k, v))
    assert torch.equal(factors, torch.stack([q * k, v], -1))
    one = m.uniform(1, low=0.1, high=1.0)
    _, factors = run_transposition(codes(2, 20, 3, 16), (None, one, None))
    assert torch.equal(factors[..., 0], one.expand(2, 3))
    assert (factors[..., 1] == 1).all()


def test_packed_values_and_what_nobody_sees(codes, device):
    lengths_q, lengths_k, used = (5, 0, 30, 1), (0, 137, 260, 1), (0, 100, 251, 1)
    v = codes(3 + sum(lengths_k) + 9, 2, 48)
    starts = offsets(lengths_q, device), offsets(lengths_k, device) + 3
    counts = torch.tensor(used, dtype=torch.int32, device=device)
    out, factors = run_transposition(v, window_left=40, starts=starts, used=counts)
    for b, start in enumerate(starts[1][:-1].tolist()):
        seen = v[start : start + used[b]].clone()
        seen[: max(0, used[b] - lengths_q[b] - 40)] = 0
        want = transposed(seen)
        first = start // BLOCK_N + b
        assert torch.equal(out[first : first + len(want)], want)
    assert (factors == 1).all()
