"""Calls over trees: operators, wrong arguments, and what is built ahead of time."""

from __future__ import annotations

import itertools
import math
import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from flash_attn_triton import (
    attention_reference,
    flash_attn_tree_func,
    tree_attention_reference,
    validate_tree,
)
from flash_attn_triton._linked.host.forms import interpreted
from flash_attn_triton._tree import ops
from torch import Tensor
from torch.library import opcheck

from .._linked.budget import offsets
from .._linked.gpus import absent_gpu, chosen, compiling, counting
from .._linked.spills import check_builds
from ._trees import Case, Tree, make, portable


def arguments_of(case: Case) -> tuple[Any, ...]:
    i, o = case.inputs, case.options
    tree = o["cu_seqlens"], o["parents"], i.get("sinks"), o["max_seqlen"]
    return i["q"], i["k"], i["v"], *tree, 0.25, 0.0


@pytest.mark.eager
@pytest.mark.parametrize("features", [(), ("sinks",)], ids=["plain", "sinks"])
def test_operators_pass_opcheck(features, device):
    case = make(Tree((5, 2), (-1, 0), 2, 1, 16, 8, padding=1), torch.float32, device, features)
    arguments = arguments_of(case)
    tests = ("test_schema", "test_faketensor")
    opcheck(ops.forward, arguments, test_utils=tests)
    out, lse = ops.forward(*arguments)
    q, k, v, *rest = arguments
    arguments = torch.ones_like(out), q, k, v, out, lse, torch.ones_like(lse), *rest, False
    opcheck(ops.backward, arguments, test_utils=tests)


@pytest.mark.eager
def test_fakes_say_what_comes(device):
    case = make(Tree((5, 2), (-1, 0), 2, 1, 24, 8), torch.float16, device)
    real = flash_attn_tree_func(**case.inputs, **case.options, return_lse=True)
    on_meta = {
        name: x.to("meta") if isinstance(x, Tensor) else x
        for name, x in {**case.inputs, **case.options}.items()
    }
    for got, want in zip(flash_attn_tree_func(**on_meta, return_lse=True), real, strict=True):
        assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())


@pytest.mark.skipif(interpreted(), reason="tracing sees the operators alone")
@pytest.mark.eager
def test_compiles_once_for_all_trees(device):
    torch.compiler.reset()

    def loss(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, parents: Tensor, n: int) -> Any:
        out, lse = flash_attn_tree_func(q, k, v, cu_seqlens, parents, n, return_lse=True)
        return out.sin().sum() + lse.sin().sum()

    fast = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    trees = [((5, 6, 2), (-1, 0, 0)), ((9, 3, 4, 10), (-1, 0, -1, 2)), ((20, 7), (-1, 0))]
    for lengths, parents in trees:
        case = make(Tree(lengths, parents, 6, 2), torch.float32, device)
        leaves = [[x.clone().requires_grad_() for x in case.inputs.values()] for _ in range(2)]
        rest = case.options.values()
        with torch._dynamo.config.patch(error_on_recompile=lengths != (5, 6, 2)):
            losses = fast(*leaves[0], *rest), loss(*leaves[1], *rest)
        torch.testing.assert_close(*losses)
        grads = (torch.autograd.grad(x, y) for x, y in zip(losses, leaves, strict=True))
        for got, want in zip(*grads, strict=True):
            torch.testing.assert_close(got, want)
    torch.compiler.reset()


@pytest.mark.eager
def test_a_list_and_one_tensor_as_all_three_compile(device):
    torch.compiler.reset()
    cu_seqlens = offsets((3, 2), device)

    def loss(x: Tensor) -> Tensor:
        return flash_attn_tree_func(x, x, x, cu_seqlens, [-1, 0], 3).sin().sum()

    fast = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    x = make(Tree((3, 2), (-1, 0), 1, 1), torch.float32, device).inputs["k"].requires_grad_()
    got, want = (torch.autograd.grad(f(x), x) for f in (fast, loss))
    torch.testing.assert_close(got, want)
    torch.compiler.reset()


@pytest.mark.eager
def test_gradients_come_only_where_they_are_asked_for(device):
    case = make(Tree((3, 2), (-1, 0), 1, 1), torch.float32, device, ("sinks",))
    for wanted in case.inputs:
        leaves = {n: x.clone().requires_grad_(n == wanted) for n, x in case.inputs.items()}
        flash_attn_tree_func(**leaves, **case.options).sum().backward()
        assert [name for name, x in leaves.items() if x.grad is not None] == [wanted]


@pytest.mark.eager
def test_a_second_derivative_is_refused(device):
    case = make(Tree((3, 2), (-1, 0), 1, 1), torch.float32, device)
    leaves = [x.requires_grad_() for x in case.inputs.values()]
    out = flash_attn_tree_func(*leaves, **case.options)
    (grad,) = torch.autograd.grad(out.sum(), leaves[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        grad.sum().backward()


@pytest.mark.eager
def test_the_gradient_of_a_function_is_that_of_a_tape(device):
    case = make(Tree((3, 2), (-1, 0), 1, 1), torch.float32, device)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_tree_func(q, k, v, **case.options).sin().sum()

    leaves = [x.clone().requires_grad_() for x in case.inputs.values()]
    want = torch.autograd.grad(loss(*leaves), leaves)
    got = torch.func.grad(loss, argnums=(0, 1, 2))(*case.inputs.values())
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs)
    with pytest.raises(NotImplementedError, match="forward-mode differentiation"):
        torch.func.jvp(loss, tuple(case.inputs.values()), tuple(case.inputs.values()))


# ---- wrong arguments


def zeros(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.zeros(shape).to(dtype)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def call(function: Any = flash_attn_tree_func, **changes: Any) -> Any:
    given = {"q": zeros(9, 4, 8), "k": zeros(9, 2, 8), "v": zeros(9, 2, 6)}
    given |= {"cu_seqlens": ints(0, 5, 7, 9), "parents": [-1, 0, 0], "max_seqlen": 5}
    return function(**{**given, **changes})


WRONG: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (TypeError, "q must be a torch.Tensor, got int", {"q": 1}),
    (TypeError, "k must have the dtype of q, torch.float16", {"k": zeros(9, 2, 8).float()}),
    (NotImplementedError, "q must be torch.float16, torch.bfloat16 or torch.float32: trees",
     {"q": zeros(9, 4, 8, dtype=torch.float8_e4m3fn)}),
    (TypeError, "q must be torch.float16", {"q": zeros(9, 4, 8, dtype=torch.float64)}),
    (ValueError, "q must be [tokens_q, heads_q, head_dim], got [1, 9, 4, 8]",
     {"q": zeros(1, 9, 4, 8)}),
    (ValueError, "head_dim of q must be from 1 to 256, got 257",
     {"q": zeros(9, 4, 257), "k": zeros(9, 2, 257)}),
    (ValueError, "heads_q must be a positive multiple of heads_k", {"q": zeros(9, 3, 8)}),
    (ValueError, "k must have as many tokens as q, 9, got 8",
     {"k": zeros(8, 2, 8), "v": zeros(8, 2, 6)}),
    (ValueError, "v must have the shape of k but for head_dim", {"v": zeros(8, 2, 6)}),
    (TypeError, "cu_seqlens must be torch.int32, got torch.int16",
     {"cu_seqlens": ints(0, 5, 7, 9).short()}),
    (ValueError, "cu_seqlens must have one dimension, got [1, 4]",
     {"cu_seqlens": ints(0, 5, 7, 9)[None]}),
    (ValueError, "cu_seqlens must be [segments + 1], got [0]", {"cu_seqlens": ints()}),
    (ValueError, "cu_seqlens must be on the device of q, cpu, got meta",
     {"cu_seqlens": ints(0, 5, 7, 9).to("meta")}),
    (ValueError, "cu_seqlens[3] must be from 0 to the number of tokens, 9, got 10",
     {"cu_seqlens": ints(0, 5, 7, 10)}),
    (ValueError, "cu_seqlens[2] must be at least cu_seqlens[1], 5, got 4",
     {"cu_seqlens": ints(0, 5, 4, 9)}),
    (ValueError, "cu_seqlens[1] must be at most max_seqlen, 4, beyond cu_seqlens[0], 0, got 5",
     {"max_seqlen": 4}),
    (TypeError, "max_seqlen must be an int, got float", {"max_seqlen": 5.0}),
    (ValueError, "max_seqlen must be at least 0, got -1", {"max_seqlen": -1}),
    (TypeError, "parents must be a list of ints or a torch.int32 tensor, got int", {"parents": 0}),
    (TypeError, "parents must be torch.int32, got torch.int16",
     {"parents": ints(-1, 0, 0).short()}),
    (ValueError, "parents must have one dimension, got []", {"parents": torch.tensor(0).int()}),
    (ValueError, "parents must be on the device of q, cpu, got meta",
     {"parents": ints(-1, 0, 0).to("meta")}),
    (ValueError, "parents must have one entry per segment of cu_seqlens, 3, got 2",
     {"parents": [-1, 0]}),
    (TypeError, "parents[1] must be an int, got float", {"parents": [-1, 0.0, 0]}),
    (TypeError, "parents[2] must be an int, got bool", {"parents": [-1, 0, True]}),
    (ValueError, "parents[0] must be -1, as no segment is ahead of it, got 0",
     {"parents": [0, 0, 0]}),
    (ValueError, "parents[2] must be -1 or a segment ahead of it, from 0 to 1, got 2",
     {"parents": [-1, 0, 2]}),
    (ValueError, "parents[1] must be -1 or a segment ahead of it, from 0 to 0, got -2",
     {"parents": ints(-1, -2, 0)}),
    (TypeError, "sinks must be torch.float16, torch.bfloat16 or torch.float32, got torch.int32",
     {"sinks": ints(1, 2, 3, 4)}),
    (ValueError, "sinks must be [heads_q], [4], got [2]", {"sinks": zeros(2)}),
    (TypeError, "softmax_scale must be a float, got str", {"softmax_scale": "1"}),
    (ValueError, "softmax_scale must be finite, got inf", {"softmax_scale": math.inf}),
    (ValueError, "softcap must be finite and at least 0.0, got -1.0", {"softcap": -1.0}),
    (TypeError, "deterministic must be a bool, got int", {"deterministic": 1}),
    (TypeError, "return_lse must be a bool, got int", {"return_lse": 1}),
]  # fmt: skip


@pytest.mark.eager
@pytest.mark.parametrize(("error", "message", "changes"), WRONG, ids=lambda _: None)
def test_wrong_arguments(error, message, changes):
    with pytest.raises(error) as caught:
        call(**changes)
    assert str(caught.value).startswith(message)


@pytest.mark.eager
@pytest.mark.parametrize(("error", "message", "changes"), WRONG, ids=lambda _: None)
def test_wrong_arguments_of_the_reference(error, message, changes):
    """What makes the tree is checked alike; dtypes and head dimensions are free."""
    if not {"cu_seqlens", "parents", "max_seqlen", "sinks"} & set(changes):
        pytest.skip("of the values, which the reference takes in other dtypes and widths")
    if error is TypeError and "sinks" in changes:
        pytest.skip("the reference takes sinks of any dtype")
    with pytest.raises(error) as caught:
        call(tree_attention_reference, **changes)
    assert str(caught.value).startswith(message)


@pytest.mark.eager
def test_the_reference_refuses_tokens_that_do_not_match():
    for changes in ({"k": zeros(8, 2, 8), "v": zeros(8, 2, 6)}, {"q": zeros(8, 4, 8)}):
        with pytest.raises(ValueError, match="k must have as many tokens as q"):
            call(tree_attention_reference, **changes)


@pytest.mark.eager
@pytest.mark.parametrize(
    ("error", "state"),
    [
        (TypeError, torch.tensor([1, 2], dtype=torch.int32)),
        (TypeError, torch.tensor([1.0, 2.0])),
        (ValueError, torch.tensor([1])),
        (ValueError, torch.tensor([1, 2, 3])),
    ],
)
def test_the_reference_refuses_a_wrong_rng_state(error, state):
    x = torch.zeros(1, 3, 1, 4)
    with pytest.raises(error, match="rng_state must be"):
        attention_reference(x, x, x, 0.5, rng_state=state)


@pytest.mark.eager
def test_validate_tree_reads_the_values(device):
    q = torch.zeros(9, 4, 8, device=device)
    good = ints(0, 5, 7, 9).to(device), ints(-1, 0, 0).to(device), 5
    validate_tree(q, *good)
    with pytest.raises(ValueError, match=r"parents\[1\] must be -1 or a segment ahead"):
        validate_tree(q, good[0], ints(-1, 1, 0).to(device), 5)
    with pytest.raises(ValueError, match=r"cu_seqlens\[1\] must be at most max_seqlen, 4"):
        validate_tree(q, *good[:2], 4)


# ---- builds


def launch(
    head_dim: int,
    dtype: torch.dtype,
    tokens: int = 1024,
    segments: int = 5,
    softcap: float = 0.0,
    has_sinks: bool = False,
) -> None:
    """Run both launchers on meta tensors."""
    from flash_attn_triton._tree.call import TreeBackwardCall, TreeCall
    from flash_attn_triton._tree.launch import launch_tree_backward, launch_tree_forward

    q = torch.empty(tokens, 8, head_dim, dtype=dtype, device="meta")
    k = torch.empty(tokens, 2, head_dim, dtype=dtype, device="meta")
    tree = (torch.empty(n, dtype=torch.int32, device="meta") for n in (segments + 1, segments))
    sinks = torch.empty(8, device="meta") if has_sinks else None
    rest = *tree, sinks, tokens, head_dim**-0.5, softcap
    out, lse = launch_tree_forward(TreeCall(q, k, k, *rest))
    launch_tree_backward(TreeBackwardCall(out, q, k, k, out, lse, lse, *rest, False))


@pytest.mark.aot
@pytest.mark.parametrize(
    ("gpu", "head_dim"),
    chosen([("nvidia:sm_90", 64)], [("nvidia:sm_90", 128), ("amd:gfx942", 128)]),
)
def test_compiles_fits_and_does_not_spill(gpu, head_dim, tmp_path):
    with compiling(gpu, tmp_path) as builds, portable():
        launch(head_dim, torch.bfloat16)
    assert len(builds) == 5
    check_builds(gpu, f"d{head_dim} tree", builds)


# How many of them a step over a tile reads again, forward and backward: most in the masked steps of
# the backward at head dimension 64 with Triton 3.9.
RELOADS = {64: (0, 30), 128: (0, 4)}


def reloads(sass):
    """Return how often a step reads what was spilled, of each innermost loop with products."""
    lines = sass.splitlines()
    labels = {x.strip(): i for i, x in enumerate(lines) if x.startswith(".L_x_")}
    loops = []
    for end, line in enumerate(lines):
        # without a condition it comes back from where a barrier is tried again
        target = re.search(r"@!?U?P\d BRA.*(\.L_x_\d+)", line)
        begin = labels.get(f"{target.group(1)}:", end) if target else end
        if begin < end and any(" HGMMA." in x for x in lines[begin:end]):
            loops.append((begin, end))
    inner = [(a, b) for a, b in loops if not any(a <= c and d < b for c, d in loops)]
    return [sum(" LDL" in x for x in lines[a:b]) for a, b in inner]


@pytest.mark.aot
@pytest.mark.parametrize(
    ("head_dim", "is_rich"), chosen(itertools.product((64, 128, 256), (False, True)), [(128, True)])
)
def test_builds_for_hopper(head_dim, is_rich, tmp_path):
    with compiling("nvidia:sm_90", tmp_path) as builds:
        launch(head_dim, torch.bfloat16, softcap=30.0 if is_rich else 0.0, has_sinks=is_rich)
    check_builds("nvidia:sm_90", f"d{head_dim} tree{' rich' if is_rich else ''}", builds)
    for build in builds:
        if build.kernel in ("tree_forward_kernel", "tree_backward_kernel"):
            assert " HGMMA." in build.sass
            assert " UTMALDG." in build.sass
            # serialised products have an arrival each
            assert build.sass.count(" WARPGROUP.ARRIVE") < build.sass.count(" HGMMA.") / 3
            if head_dim in RELOADS:  # the loops of others are not told apart
                found = reloads(build.sass)
                assert len(found) == 4  # of two warpgroups, with masks and without
                assert max(found) <= RELOADS[head_dim][build.kernel == "tree_backward_kernel"]
    assert {build.kernel for build in builds} == {
        "tree_forward_kernel",
        "tree_backward_kernel",
        "row_kernel",
        "count_below_kernel",
        "link_kernel",
        "round_kernel",
    }


@pytest.mark.aot
@pytest.mark.parametrize("is_portable", [True, False])
def test_new_trees_do_not_recompile(is_portable):
    with counting("nvidia:sm_90") as variants, portable() if is_portable else nullcontext():
        for tokens, segments in ((64, 1), (99, 1), (1040, 16), (4096, 17), (30000, 300)):
            launch(64, torch.bfloat16, tokens, segments)
    assert len(variants) == (5 if is_portable else 6)
    # dq is rounded by one, dk and dv by another
    counts = {name: len(keys) for name, keys in variants.items()}
    assert all(n == (2 if name == "round_kernel" else 1) for name, n in counts.items()), variants


@pytest.mark.eager
def test_which_calls_the_kernels_for_hopper_serve():
    pytest.importorskip("triton")
    from flash_attn_triton._dense.call import Options, Tensors
    from flash_attn_triton._tree import launch as tree_launch

    def served(head_dim, head_dim_v=None, dtype=torch.bfloat16, scale=0.1):
        q, v = (
            torch.empty(9, 2, d, dtype=dtype, device="meta")
            for d in (head_dim, head_dim_v or head_dim)
        )
        tree = torch.empty(3, dtype=torch.int32, device="meta")
        plan = tree_launch._plan_of(Tensors(q, q, v, tree, tree), Options(scale, -1, 0, 0.0, 0.0))
        return plan._hopper_forward is not None, plan._hopper_gradients is not None

    with absent_gpu("nvidia:sm_90"):
        assert served(64) == served(256, dtype=torch.float16) == served(40) == (True, True)
        assert served(64, 32) == (True, False)
        assert served(32) == served(64, dtype=torch.float32) == (False, False)
        assert served(64, scale=0.0) == served(64, scale=-1.0) == (False, True)
        with portable():
            assert served(64) == (False, False)
    with absent_gpu("nvidia:sm_80"):
        assert served(64) == (False, False)


@pytest.mark.eager
def test_an_exported_graph_takes_another_number_of_segments():
    class Tree(torch.nn.Module):
        def forward(self, q, k, v, cu_seqlens, parents):
            return flash_attn_tree_func(q, k, v, cu_seqlens, parents, q.shape[0])

    def inputs(*lengths):
        tokens = sum(lengths)
        starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        parents = torch.tensor([-1] + [0] * (len(lengths) - 1), dtype=torch.int32)
        return *(torch.randn(tokens, 2, 16) for _ in "qkv"), starts, parents

    dims = ({0: torch.export.Dim.AUTO},) * 5
    module = torch.export.export(Tree(), inputs(5, 2, 2), dynamic_shapes=dims, strict=False)
    fresh = inputs(4, 1, 3, 2)
    torch.testing.assert_close(module.module()(*fresh), Tree()(*fresh))
