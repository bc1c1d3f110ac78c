"""The backward for Hopper, run on a CPU by the interpreter for Gluon: numbers."""

from __future__ import annotations

import pytest
import torch
from flash_attn_triton._dense import ops
from flash_attn_triton._dense.hopper_tiles import hopper_backward_tile

from ..._linked.budget import assert_same
from ..._numerics import Packed, Shape, check, make_case, make_packed, run
from ._gluon import PACKED, forward, reverse
from ._gluon_backward import KINDS, USED, backward, kinds

__all__ = ["backward", "forward", "reverse"]  # fixtures

pytestmark = pytest.mark.skipif(not ops.interpreted(), reason="about the interpreter")


CASES = [
    ("rows", Shape(1, 200, 150, 2, 1, 64), ()),
    ("rows", Shape(1, 70, 330, 1, 1, 48), ("causal", "sinks")),
    ("columns", Shape(2, 130, 200, 2, 1, 128), ("causal",)),
    ("columns", Shape(1, 200, 100, 1, 1, 48, 80), ("window", "softcap")),  # rows without a key
    ("columns", Shape(1, 100, 300, 4, 1, 64), ("window_left",)),
    ("softcap", Shape(1, 280, 150, 2, 1, 64), ("softcap", "window_right")),
    ("wide", Shape(1, 200, 150, 2, 1, 192), ()),
    ("wide", Shape(1, 100, 170, 1, 1, 256), ("causal", "softcap")),
    ("wide", Shape(1, 170, 140, 1, 1, 160, 256), ("window",)),
    # in panels: 64 + 16, 64 + 32, 128 + 16, 128 + 32, 128 + 64
    ("columns", Shape(1, 200, 150, 2, 1, 80), ()),
    ("columns", Shape(1, 130, 200, 2, 1, 96), ("causal", "softcap")),
    ("columns", Shape(1, 100, 300, 1, 1, 72, 48), ("window",)),
    ("columns", Shape(1, 140, 150, 1, 1, 40, 96), ("causal",)),
    ("rows", Shape(1, 200, 150, 1, 1, 96, 80), ("causal",)),
    ("wide", Shape(1, 130, 150, 1, 1, 136), ("causal",)),
    ("wide", Shape(1, 130, 150, 2, 1, 192, 128), ("causal",)),
    ("wide", Shape(1, 100, 140, 1, 1, 96, 192), ("window_left",)),
    # dv by a launch of its own
    ("apart", Shape(1, 300, 150, 2, 1, 192), ()),
    ("apart", Shape(1, 270, 200, 1, 1, 160), ("causal", "softcap")),
    ("apart", Shape(2, 100, 300, 2, 2, 192, 128), ("window",)),
    ("apart", Shape(1, 200, 330, 1, 1, 48, 144), ("causal",)),
]


@pytest.mark.parametrize(("tile", "shape", "features"), CASES, ids=str)
def test_backward(tile, shape, features, backward, reverse):
    backward(KINDS[tile], reverse)
    check(make_case(shape, torch.bfloat16, "cpu", features))


FEATURES = [
    ("columns", Shape(2, 130, 150, 2, 1, 64), ("dropout",)),
    # queries without a key: 60 and 57, no multiple of 16
    ("rows", Shape(1, 200, 140, 1, 1, 128), ("causal", "dropout", "sinks")),
    ("columns", Shape(1, 157, 100, 2, 1, 48, 80), ("causal", "softcap", "dropout")),
    # keys ahead of every window
    ("columns", Shape(1, 70, 190, 1, 1, 64), ("window", "dropout")),
    ("wide", Shape(1, 130, 100, 2, 1, 192), ("causal", "dropout")),
    ("wide", Shape(1, 70, 140, 1, 1, 256), ("softcap", "dropout")),
    ("wide", Shape(1, 100, 210, 1, 1, 160, 256), ("window_left", "dropout")),
    # queries ahead of a block of keys, across it and behind it
    ("columns", Shape(1, 400, 400, 2, 1, 64), ("alibi",)),
    ("rows", Shape(1, 200, 330, 1, 1, 64), ("alibi", "causal", "dropout")),
    ("columns", Shape(2, 150, 60, 2, 2, 128), ("alibi_batch", "window_right", "softcap")),
    ("wide", Shape(1, 280, 250, 1, 1, 256), ("alibi",)),
    ("columns", Shape(1, 130, 150, 2, 1, 96), ("causal", "dropout", "alibi")),
    ("apart", Shape(1, 300, 280, 2, 1, 160), ("alibi",)),
]


@pytest.mark.parametrize(("tile", "shape", "features"), FEATURES, ids=str)
def test_backward_of_features(tile, shape, features, backward):
    backward(KINDS[tile], features=features)
    check(make_case(shape, torch.bfloat16, "cpu", features))


ORDERED = [
    ("rows", Shape(1, 200, 260, 2, 1, 64), ()),
    ("columns", Shape(1, 200, 130, 1, 1, 128), ("causal",)),  # rows without a key
    ("columns", Shape(1, 140, 300, 2, 1, 48), ("window", "softcap")),
    ("wide", Shape(1, 130, 170, 2, 1, 192), ("causal",)),
    ("wide", Shape(1, 100, 150, 1, 1, 256), ("window_left",)),
    # what is a query head's own changes from step to step
    ("columns", Shape(1, 140, 200, 2, 1, 64), ("alibi", "dropout")),
    ("wide", Shape(1, 130, 140, 2, 1, 160), ("alibi", "causal", "dropout")),
    ("columns", Shape(1, 140, 200, 2, 1, 80), ("causal",)),
]


@pytest.mark.parametrize(("tile", "shape", "features"), ORDERED, ids=str)
def test_backward_in_order(tile, shape, features, backward):
    backward(KINDS[tile], features=features)
    case = make_case(shape, torch.bfloat16, "cpu", features)
    check(case.with_options(deterministic=True))


SHARED = [
    ("columns", Shape(1, 200, 150, 2, 1, 128), (), 2),
    # a program walks two of six heads
    ("rows", Shape(2, 130, 200, 6, 1, 64), ("causal",), 3),
    ("columns", Shape(1, 100, 300, 6, 2, 64), ("window_left",), 3),  # keys ahead of every window
    ("columns", Shape(1, 140, 150, 3, 1, 96), ("causal", "softcap"), 3),
    ("columns", Shape(1, 130, 150, 4, 2, 48, 80), ("dropout", "alibi"), 2),
    ("wide", Shape(1, 130, 150, 2, 1, 192, 128), ("window",), 2),
    ("wide", Shape(2, 100, 150, 3, 1, 256), ("causal", "dropout"), 3),
    ("apart", Shape(1, 300, 150, 2, 1, 192), ("causal",), 2),
    ("apart", Shape(1, 100, 300, 4, 2, 160, 48), ("window_left",), 2),
]


@pytest.mark.parametrize(("tile", "shape", "features", "shares"), SHARED, ids=str)
def test_backward_of_shared_keys(tile, shape, features, shares, backward):
    backward(KINDS[tile], features=features, shares=shares)
    check(make_case(shape, torch.bfloat16, "cpu", features))


# in order, dv has no launch of its own
SHARED_IN_ORDER = [case for case in SHARED if case[0] != "apart"]


@pytest.mark.parametrize(("tile", "shape", "features", "shares"), SHARED_IN_ORDER, ids=str)
def test_backward_of_shared_keys_in_order(tile, shape, features, shares, backward):
    backward(KINDS[tile], features=features, shares=shares)
    case = make_case(shape, torch.bfloat16, "cpu", features)
    check(case.with_options(deterministic=True))


@kinds
@pytest.mark.parametrize("features", [("causal", "sinks"), ("window", "softcap")], ids="-".join)
def test_backward_of_shared_keys_of_packed_tensors(tile, features, backward):
    backward(KINDS[tile], shares=2)
    check(make_packed(PACKED, torch.float16, "cpu", features))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 160, 192, 256])
def test_tiles_that_serve_calls(head_dim, causal, backward):
    backward(hopper_backward_tile(head_dim))
    shape = Shape(1, 270, 400, 1, 1, head_dim)
    check(make_case(shape, torch.float16, "cpu", ["causal"] if causal else []))


@kinds
@pytest.mark.parametrize("features", [("causal", "sinks"), ("window",)], ids="-".join)
def test_backward_of_packed_tensors(tile, features, backward, reverse):
    backward(KINDS[tile], reverse)
    check(make_packed(PACKED, torch.float16, "cpu", features))


@kinds
def test_backward_of_packed_tensors_with_features(tile, backward):
    backward(KINDS[tile])
    check(make_packed(PACKED, torch.float16, "cpu", ("causal", "dropout", "alibi_batch")))


@pytest.mark.parametrize("shares", [1, 2])
@pytest.mark.parametrize(
    ("tile", "features"),
    [("rows", ("causal", "dropout")), ("columns", ("window",)), ("wide", ("alibi",))],
    ids=str,
)
def test_backward_of_keys_that_are_not_used(tile, features, shares, backward):
    """What is there may be NaN; gradients of it are 0."""
    backward(KINDS[tile], shares=shares)
    shape = Packed((70, 20, 150, 1), (230, 40, 90, 33), 2, 1, 48, padding=70)
    case = make_packed(shape, torch.float16, "cpu", features).with_options(seqused_k=USED)
    got = check(case)
    spoilt = {name: case.inputs[name].clone() for name in "kv"}
    for x in spoilt.values():
        x[37:270] = float("nan")
        x[360:] = float("nan")
    again = run(case.with_inputs(**spoilt))
    for name in ("dk", "dv"):
        assert not got[name][37:270].any()
        # programs run one after the other here: also shared sums repeat
        assert torch.equal(again[name], got[name])


@kinds
@pytest.mark.parametrize("shares", [1, 2])
def test_backward_reads_nothing_of_others(tile, shares, backward):
    backward(KINDS[tile], shares=shares)
    case = make_packed(PACKED, torch.bfloat16, "cpu", ("causal",))
    want = run(case)
    inputs = {name: t.clone() for name, t in case.inputs.items()}
    for name, rows in (("q", (70, 220)), ("k", (140, 230)), ("v", (140, 230))):
        inputs[name][: rows[0]] = float("nan")
        inputs[name][rows[1] :] = float("nan")
    got = run(case.with_inputs(**inputs))
    assert torch.equal(got["dk"][140:230], want["dk"][140:230])
    assert torch.equal(got["dv"][140:230], want["dv"][140:230])
    assert (got["dq"][70:220] - want["dq"][70:220]).norm() <= 2.0**-8 * want["dq"].norm()


@pytest.mark.parametrize(
    ("tile", "shares"), [("rows", 1), ("columns", 1), ("wide", 1), ("columns", 2)], ids=str
)
def test_bits_in_order_are_those_of_a_sequence_alone(tile, shares, backward):
    backward(KINDS[tile], shares=shares)
    case = make_packed(PACKED, torch.bfloat16, "cpu", ("causal",)).with_options(deterministic=True)
    parts = {"q": slice(70, 220), "k": slice(140, 230), "v": slice(140, 230)}
    alone = case.with_inputs(**{name: case.inputs[name][part] for name, part in parts.items()})
    alone = alone.with_options(
        cu_seqlens_q=torch.tensor([0, 150], dtype=torch.int32),
        cu_seqlens_k=torch.tensor([0, 90], dtype=torch.int32),
    )
    got = _gradients(case)
    got = {name: gradient[parts[name]] for name, gradient in got.items()}
    assert_same(got, _gradients(alone))


def _gradients(case):
    """Those of the squares of the output, which come out alike whatever else is in a batch."""
    leaves = {name: t.detach().requires_grad_() for name, t in case.inputs.items()}
    out, _ = case.with_inputs(**leaves)()
    found = torch.autograd.grad(out.float().square().sum(), list(leaves.values()))
    return dict(zip(leaves, found, strict=True))
