"""Attention over trees of segments: against the definition, and what holds for every tree."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from flash_attn_triton import (
    attention_reference,
    flash_attn_tree_func,
    flash_attn_varlen_func,
    tree_attention_reference,
)
from flash_attn_triton._linked.host.forms import Memory, interpreted
from torch import Tensor

from .._linked import numerics
from .._linked.budget import DTYPES, assert_same, offsets
from .._linked.numerics import run
from .._linked.views import VIEWS
from ._trees import FEATURES, Case, Tree, check, make, random_tree

# lengths are against the interpreter's 16 x 16 tiles
CHAIN = Tree((17, 1, 16, 5), (-1, 0, 1, 2))
STAR = Tree((33, 5, 0, 16, 1), (-1, 0, 0, 0, 0), padding=3)
# numbered level by level: what hangs below a segment does not follow it
LEVELS = Tree((3, 18, 2, 4, 0, 5, 2), (-1, -1, 0, 1, 0, 2, 4), 1, 1)
SMALL = [
    CHAIN,
    STAR,
    LEVELS,
    Tree((0, 7, 20), (-1, 0, 1), 4, 2, 24, 40),  # an empty root, odd widths
    Tree((1,) * 6, (-1, 0, 1, 2, 2, 0), 2, 2),  # a drafted tree
    Tree((15, 16), (-1, -1), 1, 1, 33, padding=17),  # a tile of padding
    Tree((0,), (-1,)),
    Tree((), ()),
    Tree((), (), padding=2),
]
LARGE = [
    Tree((2048, *(513,) * 8), (-1, *(0,) * 8), 8, 2, 128),
    Tree((300, 1, 700, 128, 65, 1000), (-1, 0, 1, 0, 3, 2), 4, 1, 64, padding=77),
    Tree(tuple(range(1, 151)), (-1, *range(149)), 2, 2, 64),
    Tree((513, 200, 300), (-1, 0, 0), 2, 2, 256),
    Tree((513, 200, 300), (-1, 0, 0), 2, 1, 192, 128),
    Tree((513, 200, 300), (-1, 0, 0), 4, 2, 80),
]


# ---- numbers


@pytest.mark.eager
@pytest.mark.parametrize("tree", SMALL, ids=str)
def test_matches_reference(tree, device):
    check(make(tree, torch.float32, device))


@pytest.mark.eager
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype, device):
    check(make(Tree((17, 5, 2), (-1, 0, 0)), dtype, device, ("sinks",)))


@pytest.mark.eager
@pytest.mark.parametrize("features", [("softcap", "sinks"), ("scale_zero",), ("scale_negative",)])
def test_each_feature(features, device):
    check(make(Tree((17, 3), (-1, 0), 2, 1), torch.float32, device, features))


@pytest.mark.parametrize("seed", range(3 if interpreted() else 12))
@pytest.mark.eager
def test_random_trees(seed, device):
    check(make(random_tree(seed), torch.float32, device))


@pytest.mark.device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tree", LARGE, ids=str)
def test_matches_reference_at_length(tree, dtype, device):
    check(make(tree, dtype, device))


@pytest.mark.device
@pytest.mark.parametrize("features", [("softcap",), ("sinks",), ("scale_negative",)])
def test_each_feature_at_length(features, device):
    check(make(LARGE[1], torch.bfloat16, device, features))


@pytest.mark.eager
def test_reference_is_attention_over_each_path():
    tree = LEVELS
    case = make(tree, torch.float64, "cpu")
    q, k, v = case.inputs.values()
    out, lse = tree_attention_reference(**case.inputs, **case.options, return_lse=True)
    for segment, length in enumerate(tree.lengths):
        index = torch.cat([torch.arange(len(q))[tree.rows(s)] for s in tree.path(segment)])
        want, want_lse = attention_reference(
            q[None, index], k[None, index], v[None, index], causal=True, return_lse=True
        )
        own = len(index) - length
        torch.testing.assert_close(out[tree.rows(segment)], want[0, own:])
        torch.testing.assert_close(lse[:, tree.rows(segment)], want_lse[0, :, own:])


# ---- what holds for every tree


@pytest.mark.eager
def test_roots_alone_are_packed_sequences(device):
    tree = Tree((17, 0, 5), (-1, -1, -1), padding=2)
    case = make(tree, torch.float16, device, ("sinks",))
    cu_seqlens = case.options["cu_seqlens"]

    def packed(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, **_: Any) -> Any:
        return flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens,
            cu_seqlens,
            17,
            17,
            causal=True,
            sinks=sinks,
            deterministic=True,
            return_lse=True,
        )

    assert_same(run(case, grad=interpreted()), run(case, packed, grad=interpreted()))


@pytest.mark.eager
def test_a_path_does_not_depend_on_what_hangs_beside_it(device):
    whole = Tree((18, 9, 5, 20, 3), (-1, 0, 1, 0, 2))
    case = make(whole, torch.float16, device)
    got = run(case, grad=False)
    kept = whole.path(4)
    index = torch.cat([torch.arange(sum(whole.lengths))[whole.rows(s)] for s in kept]).to(device)
    alone = Tree(tuple(whole.lengths[s] for s in kept), (-1, 0, 1, 2))
    inputs = {name: x[index] for name, x in case.inputs.items()}
    want = run(Case(inputs, make(alone, torch.float16, device).options, packed=True), grad=False)
    assert torch.equal(got["out"][index], want["out"])
    assert torch.equal(got["lse"][:, index], want["lse"])


@pytest.mark.eager
@pytest.mark.parametrize("poison", [math.nan, -math.inf], ids=str)
def test_segments_that_a_query_does_not_see(poison, device):
    tree = Tree((17, 5, 3, 2), (-1, 0, 1, 0), 1, 1)
    case = make(tree, torch.float32, device)
    want, rows = run(case), tree.rows(1)
    changes = {name: case.inputs[name].clone() for name in "kv"}
    for x in changes.values():
        x[rows] = poison
    got = run(case.with_inputs(**changes))
    # what is neither the poisoned segment nor below it, and for gradients of keys not above it
    unseen = torch.cat([torch.arange(27)[tree.rows(s)] for s in (0, 3)]).to(device)
    for name in ("out", "dq"):
        assert torch.equal(got[name][unseen], want[name][unseen]), name
    assert torch.equal(got["lse"][:, unseen], want["lse"][:, unseen])
    for name in ("dk", "dv"):
        assert torch.equal(got[name][tree.rows(3)], want[name][tree.rows(3)]), name
    assert got["out"][rows].isnan().any()


@pytest.mark.eager
def test_padding_may_hold_anything(device):
    tree = Tree((17, 3), (-1, 0), 1, 1, padding=4)
    case = make(tree, torch.float32, device, ("sinks",))

    def results(value: float) -> list[Tensor]:
        leaves = {name: x.clone() for name, x in case.inputs.items()}
        for name in "qkv":
            leaves[name][20:] = value
        for x in leaves.values():
            x.requires_grad_()
        out, lse = case.function(**leaves, **case.options, return_lse=True)
        dout, dlse = numerics.incoming(out, lse)
        dout[20:], dlse[:, 20:] = value, value
        grads = torch.autograd.grad((out, lse), list(leaves.values()), (dout, dlse))
        assert not out[20:].any()
        assert (lse[:, 20:] == -math.inf).all()
        assert not any(grad[20:].any() for grad in grads[:3])
        return [out, lse, *grads]

    for got, want in zip(results(math.nan), results(1.0), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("view", ["inside"])
def test_strides_do_not_change_the_result(view, device):
    case = make(Tree((17, 2), (-1, 0), 2, 1, 24), torch.float32, device)
    moved = {name: VIEWS[view](x) for name, x in case.inputs.items()}
    assert_same(run(case.with_inputs(**moved)), run(case))


@pytest.mark.eager
@pytest.mark.parametrize("kind", [list, tuple])
def test_parents_may_be_a_list(kind, device):
    tree = Tree((3, 2, 1), (-1, 0, 0), 1, 1)
    case = make(tree, torch.float32, device)
    listed = case.with_options(parents=kind(tree.parents))
    assert_same(run(listed, grad=False), run(case, grad=False))


@pytest.mark.device
def test_a_graph_replays_another_tree(device):
    case = make(Tree((300, 100, 50), (-1, 0, 0), 2, 1, 64), torch.bfloat16, device)
    run(case)

    def step() -> list[Tensor]:
        leaves = {name: x.detach().requires_grad_() for name, x in case.inputs.items()}
        out = flash_attn_tree_func(**leaves, **case.options)
        return [out, *torch.autograd.grad(out.square().sum(), list(leaves.values()))]

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = step()
    case.options["parents"].copy_(torch.tensor([-1, 0, 1]))
    graph.replay()
    for got, want in zip(held, step(), strict=True):
        # on Hopper, what goes to dq is added in no fixed order
        assert (got - want).norm() <= 2.0**-8 * want.norm()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        case.inputs["q"].square()
        with pytest.raises(NotImplementedError, match="parents must be a tensor"):
            flash_attn_tree_func(**case.inputs, **{**case.options, "parents": [-1, 0, 0]})


@pytest.mark.device
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_path_alone_at_length(head_dim, device):
    whole = Tree((700, 300, 0, 130, 65, 513), (-1, 0, 1, 0, 2, 2), 4, 2, head_dim)
    case = make(whole, torch.bfloat16, device)
    got = run(case, grad=False)
    kept = whole.path(5)
    index = torch.cat([torch.arange(sum(whole.lengths))[whole.rows(s)] for s in kept]).to(device)
    alone = Tree(tuple(whole.lengths[s] for s in kept), (-1, 0, 1, 2))
    inputs = {name: x[index] for name, x in case.inputs.items()}
    options = make(alone, torch.bfloat16, device).options
    want = run(Case(inputs, options, packed=True), grad=False)
    assert torch.equal(got["out"][index], want["out"])
    assert torch.equal(got["lse"][:, index], want["lse"])


@pytest.mark.device
def test_gradients_repeat_bit_for_bit(device):
    case = make(LARGE[0], torch.bfloat16, device).with_options(deterministic=True)
    assert_same(run(case), run(case))


@pytest.mark.parametrize("segments", [1, 150])
def test_tiles_of_all_segments_below_are_counted(segments, device):
    from flash_attn_triton._linked.launch.runtime import Launch
    from flash_attn_triton._tree.hopper.launch import count_below_kernel

    tree = random_tree(2, segments, 40)
    tensors = offsets(tree.lengths, device), torch.tensor(tree.parents, device=device).int()
    below = torch.zeros(segments, dtype=torch.int32, device=device)
    launch = Launch(count_below_kernel, {"BLOCK": 64, "BLOCK_M": 16, "num_warps": 4})
    launch(-(-segments // 64), (*tensors, below), (segments,))
    want = [0] * segments
    for segment, length in enumerate(tree.lengths):
        for above in tree.path(segment)[:-1]:
            want[above] += -(-length // 16)
    assert below.tolist() == want


def test_calls_of_one_form_are_planned_once(device, monkeypatch):
    from flash_attn_triton._tree import launch as tree_launch

    planned = []
    real = tree_launch.TreePlan
    monkeypatch.setattr(tree_launch, "_plans", Memory())
    monkeypatch.setattr(tree_launch, "TreePlan", lambda *x: planned.append(x) or real(*x))
    for lengths in ((3, 2), (4, 1), (2, 5)):
        run(make(Tree(lengths, (-1, 0), 1, 1), torch.float32, device))
    assert len(planned) == 1
    others = [
        make(Tree((3, 2), (-1, 0), 1, 1), torch.float16, device),
        make(Tree((3, 2), (-1, 0), 2, 1), torch.float32, device),
        make(Tree((3, 2), (-1, 0), 1, 1, 24), torch.float32, device),
        make(Tree((3, 2, 1), (-1, 0, 0), 1, 1), torch.float32, device),
        *(make(Tree((3, 2), (-1, 0), 1, 1), torch.float32, device, (f,)) for f in FEATURES),
    ]
    for case in others:
        run(case, grad=False)
    assert len(planned) == 1 + len(others)


@pytest.mark.parametrize("segments", [1, 64, 150])
def test_links_lead_to_all_segments_below(segments, device):
    from flash_attn_triton._linked.launch.runtime import Launch
    from flash_attn_triton._tree.portable.links import link_kernel

    tree = random_tree(1, segments)
    links = torch.empty(2, segments, dtype=torch.int32, device=device)
    parents = torch.tensor(tree.parents, dtype=torch.int32, device=device)
    grid = -(-segments // 64)
    Launch(link_kernel, {"BLOCK": 64, "num_warps": 4})(grid, (parents, links), (segments,))
    children = [[c for c in range(segments) if tree.parents[c] == s] for s in range(segments)]
    child, sibling = links.tolist()
    assert child == [(*below, -1)[0] for below in children]
    for below in children:
        assert [sibling[c] for c in below] == [*below[1:], -1][: len(below)]


@pytest.mark.skipif(not interpreted(), reason="calls the launchers, which trust their arguments")
def test_wrong_parents_on_a_gpu_end_the_walk():
    from flash_attn_triton._tree.call import TreeBackwardCall, TreeCall
    from flash_attn_triton._tree.launch import launch_tree_backward, launch_tree_forward

    q = torch.randn(4, 1, 16)
    tree = offsets((2, 2), "cpu"), torch.tensor([1, 1], dtype=torch.int32), None
    options = 2, 0.25, 0.0
    out, lse = launch_tree_forward(TreeCall(q, q, q, *tree, *options))
    given = TreeBackwardCall(out, q, q, q, out, lse, None, *tree, *options, False)
    launch_tree_backward(given)
