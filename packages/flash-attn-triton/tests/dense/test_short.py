"""The backward of short sequences: all gradients in one launch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from flash_attn_triton import api, attention_reference
from flash_attn_triton._dense import ops, tiles
from flash_attn_triton._dense.call import Options, Tensors
from flash_attn_triton._dense.portable import backward_launch
from flash_attn_triton._linked.host.forms import Memory

from .._linked.fences import run_fenced
from .._linked.gpus import GPUS, absent_gpu, compiling
from .._numerics import MEDIUM, Shape, check, make_case, run

interpreted = pytest.mark.skipif(not ops.interpreted(), reason="on a GPU other tests come here")

# lengths are against the interpreter's 16 x 16 tiles
SHAPES = [
    Shape(1, 16, 16, 1, 1, 16),  # one tile exactly
    Shape(2, 33, 33, 2, 2, 32),  # tails of one, two sequences
    Shape(1, 17, 40, 4, 2, 24),  # GQA, more keys than queries
    Shape(2, 40, 17, 3, 1, 64, 16),  # more queries than keys, v narrower
    Shape(1, 1, 1, 2, 1, 16),
]


@pytest.fixture
def launched(monkeypatch):
    """Let every call take the kernel that short ones take, and count its launches."""
    found = []
    launch = backward_launch.ShortGradients.__call__

    def counted(self, *arguments):
        found.append(self)
        return launch(self, *arguments)

    monkeypatch.setattr(backward_launch.ShortGradients, "__call__", counted)
    monkeypatch.setattr(backward_launch, "takes_short_backward", lambda *_: True)
    monkeypatch.setattr(api, "_known", Memory())
    return found


@interpreted
@pytest.mark.parametrize("features", [(), ("causal",), ("window",)], ids="-".join)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_match_reference(shape, features, launched, device):
    check(make_case(shape, torch.float32, device, features))
    assert launched


# a block of keys that one query of a further tile sees, and none
@interpreted
@pytest.mark.parametrize("left", [0, 1, 17])
def test_gradients_of_windows_at_tile_edges(left, launched, device):
    case = make_case(Shape(1, 33, 33, 1, 1, 16), torch.float32, device)
    check(case.with_options(window_size=(left, -1)))
    assert launched


@interpreted
@pytest.mark.parametrize("feature", ["softcap", "scale_zero", "scale_negative", "window_left"])
def test_gradients_with_each_feature(feature, launched, device):
    check(make_case(MEDIUM, torch.bfloat16, device, (feature,)))
    assert launched


@interpreted
def test_rows_without_a_key_take_no_notice_of_what_arrives(launched, device):
    case = make_case(Shape(1, 40, 17, 2, 1, 16), torch.float32, device, ("causal",))
    leaves = [x.clone().requires_grad_() for x in case.inputs.values()]
    out, lse = api.flash_attn_func(*leaves, causal=True, return_lse=True)
    dout, dlse = torch.ones_like(out), torch.ones_like(lse)
    want = torch.autograd.grad((out, lse), leaves, (dout, dlse), retain_graph=True)
    dout[:, :23], dlse[:, :, :23] = torch.nan, torch.nan  # 40 queries face 17 keys
    got = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    assert all(map(torch.equal, got, want))
    assert len(launched) == 2


@interpreted
def test_a_nan_stays_out_of_tiles_that_do_not_see_it(launched, device):
    """A block of queries walks no tile that is hidden from it, nor does a block of keys."""
    shape = Shape(1, 33, 33, 1, 1, 16)
    case = make_case(shape, torch.float32, device, ("causal",))
    k = case.inputs["k"].clone()
    k[:, 32] = torch.nan  # the last query alone sees it
    want, got = run(case), run(case.with_inputs(k=k))
    assert torch.equal(got["dq"][:, :32], want["dq"][:, :32])
    assert got["dq"][:, 32].isnan().all()

    case = make_case(shape, torch.float32, device).with_options(window_size=(0, -1))
    q = case.inputs["q"].clone()
    q[:, 16] = torch.nan  # keys from the second tile on see it
    want, got = run(case), run(case.with_inputs(q=q))
    assert torch.equal(got["dk"][:, :16], want["dk"][:, :16])
    assert got["dk"][:, 16].isnan().all()
    assert len(launched) == 4


@interpreted
def test_no_read_beyond_a_tensor():
    code = """
import torch
from flash_attn_triton._dense.call import BackwardCall
from flash_attn_triton._dense.launch import launch_backward
from flash_attn_triton._linked.host.operators import structured
from flash_attn_triton._dense.portable import backward_launch
backward_launch.takes_short_backward = lambda *_: True
for head_dim in (16, 24):
    q, out, dout = (fenced(torch.randn(1, 20, 2, head_dim)) for _ in range(3))
    k, v = (fenced(torch.randn(1, 36, 2, head_dim)) for _ in range(2))
    lse, dlse = (fenced(torch.randn(1, 2, 20)) for _ in range(2))
    numbers = 20, 36, 0.25, -1, 0, 0.0, 0.0
    given = dout, q, k, v, out, lse, dlse, *[None] * 8, *numbers, False, False
    grads = launch_backward(structured(BackwardCall, given))
    assert all(x.isfinite().all() for x in grads[:3])
"""
    run_fenced(code, __file__)


@interpreted
def test_strides_do_not_change_a_bit(launched, device):
    case = make_case(Shape(2, 17, 20, 4, 2, 16), torch.float16, device, ("causal",))
    wide = {n: torch.zeros(*x.shape[:-1], 24, dtype=x.dtype) for n, x in case.inputs.items()}
    for name, x in case.inputs.items():
        wide[name][..., :16] = x
    apart = case.with_inputs(**{n: x[..., :16] for n, x in wide.items()})
    want, got = run(case), run(apart)
    assert all(torch.equal(got[name], x) for name, x in want.items())
    assert len(launched) == 2


@interpreted
def test_output_gradients_of_one_form_may_have_other_strides(launched, device):
    q, k, v = make_case(Shape(2, 17, 20, 2, 2, 16), torch.float32, device).inputs.values()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    dout = torch.randn(2, 17, 2, 16, device=device)
    apart = dout.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.zeros(2, 17, 2, 20, device=device)
    wide[..., :16] = dout
    assert len({x.stride() for x in (dout, apart, wide)}) == 3
    grads = [
        torch.autograd.grad(api.flash_attn_func(q, k, v), leaves, x)
        for x in (dout, apart, wide[..., :16], apart, dout)
    ]
    for got in grads[1:]:
        assert all(map(torch.equal, got, grads[0]))
    assert len(set(launched)) == 1  # one plan


@interpreted
def test_lse_counts_in_one_call_and_not_in_another(launched, device):
    case = make_case(Shape(1, 17, 20, 2, 2, 16), torch.float32, device)
    leaves = [x.requires_grad_() for x in case.inputs.values()]
    reference = [x.detach().double().requires_grad_() for x in leaves]
    for weight in (0.0, 1.0, 0.0):
        grads = []
        for function, inputs in (
            (api.flash_attn_func, leaves),
            (attention_reference, reference),
        ):
            out, lse = function(*inputs, return_lse=True)
            loss = out.square().sum()
            if weight:
                loss = loss + lse.square().sum()
            grads.append(torch.autograd.grad(loss, inputs))
        for got, want in zip(*grads, strict=True):
            assert (got - want).abs().max() < 1e-4
    assert len(set(launched)) == 1  # one plan


# ---- which calls


@interpreted
@pytest.mark.parametrize(("features", "is_short"), [((), True), (("dropout",), False)])
def test_dropout_is_not_forgotten(features, is_short, launched, device, monkeypatch):
    monkeypatch.setattr(backward_launch, "takes_short_backward", tiles.takes_short_backward)
    monkeypatch.setattr(tiles, "detect", lambda _: SimpleNamespace(is_hopper=True))
    check(make_case(Shape(1, 33, 33, 2, 2, 32), torch.float16, device, features))
    assert bool(launched) == is_short


@pytest.mark.eager
def test_which_calls_it_serves():
    def served(
        size_q=(3, 128, 8, 64),
        size_k=(3, 128, 2, 64),
        dtype=torch.bfloat16,
        dropout_p=0.0,
        **others,
    ):
        q, k = (torch.empty(n, dtype=dtype, device="meta") for n in (size_q, size_k))
        options = Options(0.125, -1, -1, 0.0, dropout_p)
        return tiles.takes_short_backward(Tensors(q, k, k, **others), options, dtype)

    with absent_gpu("nvidia:sm_90"):
        assert served()
        assert served((3, 1, 8, 64))
        assert served(dtype=torch.float16)
        assert not served((3, 129, 8, 64))
        assert not served(size_k=(3, 129, 2, 64))
        assert not served(dtype=torch.float32)
        assert not served((3, 128, 8, 72), (3, 128, 2, 72))
        assert not served((0, 128, 8, 64), (0, 128, 2, 64))
        sinks = torch.empty(8, device="meta")
        assert not served(sinks=sinks)
        # whose random numbers are not among the tensors of a plan
        assert not served(dropout_p=0.1)
        # the rule asks for no number of sequences: they would change each other's bits
        assert served((4096, 128, 8, 64), (4096, 128, 2, 64))
    with absent_gpu("nvidia:sm_80"):
        assert not served()


@pytest.mark.eager
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_plans_know_of_dropout(dropout_p, monkeypatch):
    """They are made before its random numbers are drawn."""
    from flash_attn_triton._dense import launch as dense_launch

    monkeypatch.setattr(dense_launch, "_build_others", lambda *_: None)
    q = torch.empty(2, 33, 4, 64, dtype=torch.bfloat16, device="meta")
    with absent_gpu("nvidia:sm_90"):
        options = Options(0.125, -1, -1, 0.0, dropout_p)
        plan = dense_launch.plan_calls(
            Tensors(q, q, q),
            options,
            q.dtype,
            deterministic=False,
            needs_gradient=True,
            invariant=False,
        )
    is_short = isinstance(plan.backward, backward_launch.ShortGradients)
    assert is_short == (dropout_p == 0.0)


@pytest.mark.aot
@pytest.mark.parametrize("head_dim", [32, 64])
def test_builds_for_hopper(head_dim, tmp_path):
    from flash_attn_triton._dense.call import BackwardCall
    from flash_attn_triton._dense.launch import launch_backward
    from flash_attn_triton._linked.host.operators import structured

    gpu = "nvidia:sm_90"
    q = torch.empty(2, 128, 8, head_dim, dtype=torch.bfloat16, device="meta")
    lse = torch.empty(2, 8, 128, device="meta")
    numbers = 128, 128, head_dim**-0.5, -1, 0, 0.0, 0.0
    with compiling(gpu, tmp_path) as builds:
        given = q, q, q, q, q, lse, None, *[None] * 8, *numbers, False, False
        launch_backward(structured(BackwardCall, given))
    (build,) = builds
    assert build.kernel == "short_kernel"
    assert build.shared <= GPUS[gpu].shared_limit
    assert not build.unset
    assert not build.spilled
