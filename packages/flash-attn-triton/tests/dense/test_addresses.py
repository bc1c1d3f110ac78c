"""Elements further apart than 32 bits can count, without the memory for all that lies between."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from .._linked.budget import assert_same
from .._numerics import Case, Packed, Shape, incoming, make_case, make_packed

# the third element of an axis lies past 2**31, on an aligned address as before
STRIDE = 2**30 + 64
MIDDLE = 2**31
# what one tensor takes at each of its three places
ROOM = 2**12
SIZE = MIDDLE + 2 * STRIDE + 8 * ROOM
SHAPES = {
    "batch": Shape(3, 3, 3, 1, 1, 16),
    "tokens": Shape(1, 3, 3, 1, 1, 16),
    "heads": Shape(1, 3, 3, 3, 3, 16),
}
TOKENS = ("q", "k", "v", "dout")


@pytest.fixture
def memory(device, monkeypatch) -> Tensor:
    """Eight GiB of fp16, of which a test on a CPU touches a few pages: the rest is but promised.

    An offset that lost its upper bits points before the middle, so still into this memory, but not
    at what was put there.
    """
    gib = SIZE * 2 / 2**30
    # unwritten memory is filled in tests, and so would be taken
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    if device.type == "cuda" and torch.cuda.mem_get_info()[0] < SIZE * 2:
        pytest.skip(f"needs {gib:.0f} GiB of free GPU memory")
    try:
        return torch.empty(SIZE, dtype=torch.float16, device=device)
    except RuntimeError:
        pytest.skip(f"the system does not promise {gib:.0f} GiB")


def spread(x: Tensor, axis: int, memory: Tensor, place: int) -> Tensor:
    """Return the same values with one axis spread over the memory."""
    strides = list(x.select(axis, 0).contiguous().stride())
    strides.insert(axis, STRIDE)
    view = memory.as_strided(x.shape, strides, MIDDLE + place * ROOM)
    return view.copy_(x)


def results(case: Case, dout: Tensor) -> dict[str, Tensor]:
    leaves = {name: t.detach().requires_grad_() for name, t in case.inputs.items()}
    out, lse = case.with_inputs(**leaves)()
    grads = torch.autograd.grad(out, list(leaves.values()), dout)
    return {"out": out, "lse": lse, **dict(zip(leaves, grads, strict=True))}


def compare(case: Case, axes: dict[str, int], memory: Tensor) -> None:
    """Require the same bits from inputs, and an incoming gradient, that are spread."""
    dout, _ = incoming(*case())
    far = {
        name: spread(t, axes[name], memory, place) if name in axes else t
        for place, (name, t) in enumerate({**case.inputs, "dout": dout}.items())
    }
    far_dout = far.pop("dout")
    assert_same(results(case.with_inputs(**far), far_dout), results(case, dout))


@pytest.mark.parametrize("features", [("causal",), ("window_left", "bias")], ids="+".join)
@pytest.mark.parametrize("axis", SHAPES)
def test_axes_of_the_fixed_form(axis, features, memory, device):
    case = make_case(SHAPES[axis], torch.float16, device, features)
    compare(case, dict.fromkeys(TOKENS, list(SHAPES).index(axis)), memory)


@pytest.mark.parametrize("axis", ["tokens", "heads"])
def test_axes_of_the_packed_form(axis, memory, device):
    heads = SHAPES[axis].heads_q
    shape = Packed((1, 1, 1), (1, 1, 1), heads, heads, 16)
    case = make_packed(shape, torch.float16, device, ("bias",))
    compare(case, dict.fromkeys(TOKENS, ["tokens", "heads"].index(axis)), memory)


@pytest.mark.parametrize(
    ("axis", "shape"),
    list(enumerate(SHAPES[name] for name in ("batch", "heads", "tokens", "tokens"))),
    ids=["batch", "heads", "rows", "columns"],
)
def test_axes_of_the_bias(axis, shape, memory, device):
    compare(make_case(shape, torch.float16, device, ("bias",)), {"bias": axis}, memory)
