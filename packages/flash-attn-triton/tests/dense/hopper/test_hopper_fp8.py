"""The forward in FP8 on Hopper: what it takes, and what it builds into."""

from __future__ import annotations

import functools

import pytest
import torch
from flash_attn_triton._dense.call import Options, Tensors
from flash_attn_triton._dense.tiles import takes_hopper_forward

from ..._linked.gpus import absent_gpu, chosen, compiling, counting
from ..._linked.spills import check_builds
from ..._numerics import Case
from ._hopper_fp8 import E4M3, HOPPER, launch

BLOCK_N = 128


# ---- what it takes


def _meta(tokens: int, width: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.empty(2, tokens, 2, width, dtype=dtype, device="meta")


@pytest.mark.eager
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "taken"),
    [
        (128, 128, True),
        (64, 64, True),
        (96, 48, True),
        (128, 16, True),
        (32, 64, True),
        (16, 64, False),  # one product sums 32 columns
        (32, 32, False),  # half of a tile would be padding
        (256, 256, True),
        (128, 256, True),
        (104, 104, False),  # rows that TMA does not read
    ],
)
def test_serves(head_dim, head_dim_v, taken):
    q, v = _meta(200, head_dim), _meta(200, head_dim_v)
    x, options = Tensors(q, q, v), Options(0.1, -1, 0, 0.0, 0.0)
    with absent_gpu(HOPPER):
        for out_dtype in (torch.bfloat16, torch.float16):
            assert takes_hopper_forward(x, options, out_dtype) == taken
        for out_dtype in (torch.float32, E4M3):
            assert not takes_hopper_forward(x, options, out_dtype)
        assert not takes_hopper_forward(x, options._replace(softmax_scale=-0.1), torch.bfloat16)
        for name in ("bias", "out_scale"):
            extra = x._replace(**{name: q})
            assert not takes_hopper_forward(extra, options, torch.bfloat16)
    with absent_gpu("nvidia:sm_80"):
        assert not takes_hopper_forward(x, options, torch.bfloat16)


@pytest.mark.eager
@pytest.mark.parametrize(
    ("tokens_q", "tokens_k", "packed", "taken"),
    [
        (1, 1024, False, False),
        (128, 2047, False, False),
        (128, 2048, False, True),
        (129, 16, False, True),
        (1, 1024, True, True),  # lengths of packed sequences may not decide
    ],
)
def test_few_queries_are_not_worth_a_copy_of_the_values(tokens_q, tokens_k, packed, taken):
    q, k = _meta(tokens_q, 128), _meta(tokens_k, 128)
    x = Tensors(q, k, k)
    if packed:
        ends = torch.empty(3, dtype=torch.int32, device="meta")
        x = Tensors(q.flatten(0, 1), k.flatten(0, 1), k.flatten(0, 1), ends, ends)
    with absent_gpu(HOPPER):
        assert takes_hopper_forward(x, Options(0.1, -1, 0, 0.0, 0.0), torch.bfloat16) == taken


# ---- what it builds into


def features(name: str) -> dict[str, object]:
    meta = functools.partial(torch.empty, device="meta")
    ends = meta(3, dtype=torch.int32)
    return {
        "full": {},
        "causal": {"causal": True},
        "packed": {"causal": True, "cu_seqlens_q": ends, "cu_seqlens_k": ends},
        "rich": {
            "window_size": (100, 0),
            "softcap": 30.0,
            "sinks": meta(4),
            "alibi_slopes": meta(4),
            "cu_seqlens_q": ends,
            "cu_seqlens_k": ends,
            "seqused_k": meta(2, dtype=torch.int32),
        },
    }[name]


def absent_case(head_dim: int, kind: str, length: int = 300) -> Case:
    """Return meta tensors with descales per head."""
    options = features(kind)
    leading = (2 * length,) if "cu_seqlens_q" in options else (2, length)
    q, kv = (torch.empty(*leading, heads, head_dim, dtype=E4M3, device="meta") for heads in (4, 2))
    descale = torch.empty(2, 2, device="meta")
    descales = {f"{name}_descale": descale for name in "qkv"}
    return Case({"q": q, "k": kv, "v": kv}, {**options, **descales})


# what is multiplied by how many loops of a warpgroup: whole tiles, diagonal, far end of a window
LOOPS = {"full": 2, "causal": 2, "packed": 2, "rich": 3}


@pytest.mark.aot
@pytest.mark.parametrize(
    ("head_dim", "kind"),
    chosen(
        [(64, "full"), (128, "full"), (128, "causal"), (128, "packed")],
        [(64, "causal"), (128, "rich"), (256, "causal")],
    ),
)
def test_builds(head_dim, kind, tmp_path):
    with compiling(HOPPER, tmp_path) as builds:
        launch(absent_case(head_dim, kind))
    first, build = builds
    assert first.kernel == "transpose_values"
    check_builds(HOPPER, f"d{head_dim} {kind} fp8", builds)
    sass = build.sass
    for instruction in ("UTMALDG", "UTMASTG", "USETMAXREG"):
        assert instruction in sass, instruction
    assert "QGMMA.64x128x32.F32.E4M3.E4M3" in sass
    assert "HGMMA" not in sass
    # two products in a loop of each warpgroup; above d=128 that with the values is four
    products = 5 if head_dim > 128 else 2
    warpgroups = 2 if head_dim > 128 else 3
    assert sass.count("WARPGROUP.ARRIVE") == warpgroups * products * LOOPS[kind]
    if kind != "rich":
        # probabilities stay where they are and become words of four at once
        assert "PRMT" not in loop_of(sass)
        assert loop_of(sass).count("F2FP.SATFINITE.E4M3") == BLOCK_N // 4


def loop_of(sass: str) -> str:
    """Return the shortest loop of a disassembly that holds exponentials and products."""
    lines = sass.splitlines()
    labels = {line.split(":")[0]: i for i, line in enumerate(lines) if line.startswith(".L_x_")}
    found = []
    for end, line in enumerate(lines):
        for label in labels:
            if f"({label})" in line and "BRA" in line and labels[label] < end:
                body = "\n".join(lines[labels[label] : end + 1])
                if "QGMMA" in body and "MUFU.EX2" in body:
                    found.append(body)
    return min(found, key=len)


@pytest.mark.aot
@pytest.mark.parametrize(("head_dim", "head_dim_v"), chosen([(32, 64)], [(128, 16)]), ids=str)
def test_builds_with_the_smallest_of_either_head_dim(head_dim, head_dim_v, tmp_path):
    case = absent_case(head_dim, "causal")
    v = torch.empty(2, 300, 2, head_dim_v, dtype=E4M3, device="meta")
    with compiling(HOPPER, tmp_path) as builds:
        launch(case.with_inputs(v=v))
    assert len(builds) == 2
    check_builds(HOPPER, f"d{head_dim}:{head_dim_v} causal fp8", builds)


@pytest.mark.aot
@pytest.mark.parametrize("kind", ["causal", "packed"])
def test_lengths_make_one_variant(kind):
    with counting(HOPPER) as variants:
        for length in (300, 4096, 5000, 70_001):
            launch(absent_case(128, kind, length))
    assert {name: len(keys) for name, keys in variants.items()} == {
        "transpose_values": 1,
        "forward_kernel": 1,
    }
