"""CPU tensors without the interpreter: the eager operators against the definition in float64."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from prefix_prefill import mla_attn_func, paged_attn_func
from prefix_prefill._mla import reference as mla_reference
from prefix_prefill._paged import eager, ops, reference

from .._linked.budget import Maker, assert_same
from .._numerics import DENSE_SMALL, FEATURES, PACKED_SMALL, SMALL, check, make_case, run

if ops.interpreted():
    # once for all: as so many skipped tests, they would hide what else is skipped
    pytest.skip("about a process without the interpreter", allow_module_level=True)

pytestmark = pytest.mark.eager
CPU = torch.device("cpu")


@pytest.mark.parametrize("feature", [None, *FEATURES])
@pytest.mark.parametrize("problem", [*SMALL, *PACKED_SMALL, *DENSE_SMALL], ids=str)
def test_features(problem, feature):
    check(make_case(problem, torch.float32, CPU, [feature] if feature else []))


@pytest.mark.parametrize("feature", [None, *FEATURES])
def test_sequences_in_parts(feature, monkeypatch):
    monkeypatch.setattr(eager, "ROWS", 3)
    for problem in (SMALL[5], DENSE_SMALL[0]):
        check(make_case(problem, torch.float32, CPU, [feature] if feature else []))


@pytest.mark.parametrize(("window", "pairs"), [((-1, 0), 256 * 256 * 10), ((63, 0), 1024 * 319)])
def test_keys_that_a_part_does_not_see_take_no_time(window, pairs, monkeypatch):
    seen = []
    attend = reference.dense_attention

    def count(q, k, *rest):
        seen.append(q.shape[0] * k.shape[0])
        return attend(q, k, *rest)

    monkeypatch.setattr(reference, "dense_attention", count)
    q, cache = torch.randn(1024, 2, 16), torch.randn(64, 16, 2, 16)
    table, offsets = torch.arange(64, dtype=torch.int32)[None], torch.tensor([0, 1024]).int()
    lengths = offsets[1:]
    paged_attn_func(
        q, cache, cache, table, offsets, lengths, 1024, 1024, causal=True, window_size=window
    )
    assert len(seen) == 4
    assert sum(seen) <= pairs


@pytest.mark.parametrize("is_latent", [False, True], ids=["pages", "latent"])
def test_no_mask_of_a_whole_sequence(is_latent, monkeypatch):
    module = mla_reference if is_latent else reference
    masks, visible_keys = [], reference.visible_keys

    def note(*arguments):
        masks.append(visible_keys(*arguments))
        return masks[-1]

    monkeypatch.setattr(module, "visible_keys", note)
    width = 576 if is_latent else 16
    q, cache = torch.randn(1024, 2, width), torch.randn(64, 16, 2, width)
    table, offsets = torch.arange(64, dtype=torch.int32)[None], torch.tensor([0, 1024]).int()
    rest = table, offsets, offsets[1:], 1024, 1024
    if is_latent:
        mla_attn_func(q, cache[:, :, 0], *rest)
    else:
        paged_attn_func(q, cache, cache, *rest)
    assert masks
    assert max(mask.numel() for mask in masks) <= eager.ROWS * 1024


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("problem", [SMALL[5], DENSE_SMALL[0]], ids=str)
def test_half_precision_with_everything(problem, dtype):
    features = ("window", "softcap", "alibi_batch", "sinks")
    check(make_case(problem, dtype, CPU, features))


def test_autocast_does_not_round():
    case = make_case(SMALL[5], torch.float32, CPU, ["sinks"])
    want = run(case)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(run(case), want)


def test_no_kernel_is_imported():
    """In a process of its own: other tests here import kernels."""
    code = """
import sys, torch
from prefix_prefill import paged_attn_func
cache = torch.randn(3, 4, 1, 16)
table = torch.tensor([[2, 0]], dtype=torch.int32)
starts, lengths = torch.tensor([0, 5], dtype=torch.int32), torch.tensor([7], dtype=torch.int32)
paged_attn_func(torch.randn(5, 2, 16), cache, cache, table, starts, lengths, 5, 7)
sys.exit(any(name.split(".")[-1] == "launch" or name == "triton" for name in sys.modules))
"""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0


@pytest.mark.parametrize("dense", [False, True])
def test_where_memory_begins_changes_no_bit(dense):
    """Products of matrices round by how their operands lie; ours are copied to where they fit."""
    differ = 0
    for n in range(5, 45):
        m = Maker(CPU, torch.float32, n)
        shapes = {"q": (n, 1, 24), "k_cache": (9, 8, 1, 24), "v_cache": (9, 8, 1, 24)}
        if dense:
            shapes |= {"k": (n, 1, 24), "v": (n, 1, 24)}
        given = {name: m.randn(*shape) for name, shape in shapes.items()}
        table = torch.randperm(9, generator=m.generator)[None].int()
        starts, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([0, n], [n]))
        where = {"block_table": table, "cu_seqlens_q": starts, "seqlens_k": lengths}
        bounds = {"max_seqlen_q": n, "max_seqlen_k": n}
        moved = {
            name: torch.empty(x.numel() + 1)[1:].view(x.shape).copy_(x) for name, x in given.items()
        }
        strided = {
            name: torch.cat([x, torch.zeros_like(x)], -1)[..., : x.shape[-1]]
            for name, x in given.items()
        }
        want = paged_attn_func(**given, **where, **bounds)
        for other in (moved, strided):
            differ += not torch.equal(paged_attn_func(**other, **where, **bounds), want)
    assert differ == 0
