"""Results over the keys of several ranks, merged or added up, against the definition."""

from __future__ import annotations

import pytest
import torch
from flash_attn_triton._dense import ops
from flash_attn_triton._linked.host.forms import Memory
from flash_attn_triton._parallel import passes
from flash_attn_triton._parallel import pieces as parallel_pieces

from .._linked.budget import Maker
from .._linked.gpus import compiling

pytestmark = pytest.mark.eager

RASTERS = {
    "two": [(0, 80, 80, 1), (3, 33, 33, 1)],
    "apart": [(0, 40, 40, 2), (3, 70, 70, 1)],
    "groups": [(0, 20, 20, 4), (5, 11, 20, 4), (0, 80, 80, 1)],
    "four": [(0, 80, 80, 1), (40, 40, 40, 1), (0, 7, 7, 1), (1, 19, 40, 2)],
}


@pytest.mark.parametrize("rasters", RASTERS.values(), ids=RASTERS)
@pytest.mark.parametrize("is_sum", [False, True], ids=["merge", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_merges_equal_the_definition(rasters, is_sum, dtype, device):
    """Rows that one side alone, or none, saw a key for are among them."""
    merge = parallel_pieces.merge_eagerly
    if device.type != "cpu" or ops.interpreted():
        from flash_attn_triton._parallel.kernels.launch import merge
    m, heads, width, tokens = Maker(device, dtype), 3, 20, 80
    pieces, wide, logs = [], [], []
    for begin, size, step, batch in rasters:
        out = m.randn(batch, size, heads, width)
        lse = 9 * m.randn(batch, heads, size, dtype=torch.float32)
        lse[..., : size // 3] = -torch.inf
        # those of the first piece may stay as they are; of others they are never read
        out[:, : size // 3] = 1.0 if is_sum else torch.nan if pieces else 0.0
        pieces.append(
            parallel_pieces.Piece(out, None if is_sum else lse, (begin, size, step, batch))
        )
        rows = [begin + b * step + i for b in range(batch) for i in range(size)]
        wide.append(torch.zeros(tokens, heads, width, dtype=torch.float64))
        wide[-1][rows] = out.nan_to_num().cpu().double().flatten(0, 1)
        logs.append(torch.full((heads, tokens), -torch.inf, dtype=torch.float64))
        logs[-1][:, rows] = lse.cpu().double().transpose(0, 1).flatten(1)
    # the first piece may be overwritten
    got, got_lse = merge(pieces, tokens, dtype)
    want = torch.stack(wide).sum(0)
    if not is_sum:
        both = torch.stack(logs).logsumexp(0)
        weights = torch.exp(torch.stack(logs) - both.masked_fill(both.isinf(), 0.0))
        want = (weights.transpose(1, 2).unsqueeze(-1) * torch.stack(wide)).sum(0)
        assert torch.equal(got_lse.cpu().isinf(), both.isinf())
        assert (got_lse.cpu() - both).abs().nan_to_num(0.0).max() <= 1e-5
    eps = 2 * torch.finfo(dtype).eps
    assert got.dtype == dtype
    assert (got.cpu().double() - want).abs().max() <= eps * want.abs().max()


def test_many_pieces_are_rounded_once(device):
    m = Maker(device, torch.bfloat16)
    pieces, wide = passes.Pieces(8, torch.bfloat16), 0
    for _ in range(11):
        out = m.randn(1, 8, 1, 16)
        wide += out[0].double()
        pieces.add(parallel_pieces.Piece(out, None, (0, 8, 8, 1)))
        assert len(pieces._held) <= parallel_pieces.MERGED
    # one rounding, which the interpreter makes towards zero
    error = (pieces.result()[0].double() - wide).abs()
    assert (error <= torch.finfo(torch.bfloat16).eps * wide.abs()).all()


@pytest.mark.aot
@pytest.mark.parametrize("gpu", ["nvidia:sm_90", "amd:gfx942"])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("has_lse", [True, False], ids=["merge", "sum"])
def test_merges_compile(gpu, count, has_lse, tmp_path, monkeypatch):
    from flash_attn_triton._parallel.kernels import launch

    monkeypatch.setattr(launch, "_launches", Memory())
    pieces = []
    for dtype in [torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16][:count]:
        out = torch.empty(1, 4096, 32, 128, dtype=dtype, device="meta")
        lse = torch.empty(1, 32, 4096, device="meta") if has_lse else None
        pieces.append(parallel_pieces.Piece(out, lse, (0, 4096, 4096, 1)))
    with compiling(gpu, tmp_path) as builds:
        launch.merge(pieces, 4096, torch.bfloat16)
    assert [build.kernel for build in builds] == ["merge_kernel"]
    assert not any(build.spilled or build.unset for build in builds)
    if gpu.startswith("nvidia"):
        # warps share rows of the first piece: all have read before one overwrites it
        lines = builds[0].sass.splitlines()
        places = {
            name: [i for i, line in enumerate(lines) if f" {name}" in line]
            for name in ("LDG", "BAR.SYNC", "STG")
        }
        assert all(places.values())
        assert any(places["LDG"][-1] < i < places["STG"][0] for i in places["BAR.SYNC"])


@pytest.mark.aot
@pytest.mark.parametrize("gpu", ["nvidia:sm_80", "nvidia:sm_90", "amd:gfx942"])
def test_exchanges_have_a_head_start(gpu, tmp_path, monkeypatch):
    from flash_attn_triton._parallel.kernels import launch

    monkeypatch.setattr(launch, "_launches", Memory())
    with compiling(gpu, tmp_path) as builds:
        launch.give_way(torch.empty(8, device="meta"))
    # read before the wait and in each of its rounds; another clock on AMD, where nothing waits
    reads = [build.sass.count("SR_GLOBALTIMERLO") for build in builds]
    assert reads == ([2] if gpu.startswith("nvidia") else [])
