"""The checks that read what only the device knows."""

from __future__ import annotations

import pytest
import torch
from prefix_prefill import validate_paged, validate_slot_mapping

from .._numerics import MEDIUM, PACKED, Problem, make_case

pytestmark = pytest.mark.eager


def arguments(device, dense=False, **changes):
    case = make_case(MEDIUM._replace(dense=dense), torch.float16, device)
    return {**case.inputs, **case.options, **changes}


@pytest.mark.parametrize("dense", [False, True])
def test_right_values_pass(dense, device):
    validate_paged(**arguments(device, dense))
    case = make_case(Problem(((1, 5),), 2, 1, 16, layout=PACKED), torch.float16, device)
    validate_paged(**case.inputs, **case.options)


def changed(tensor, where, value):
    tensor = tensor.clone()
    tensor[where] = value
    return tensor


CASES = [
    ("cu_seqlens_q", 3, 22, r"cu_seqlens_q\[3\] must be from 0 to the number of tokens, 21, got"),
    ("cu_seqlens_q", 0, -1, r"cu_seqlens_q\[0\] must be from 0 to the number of tokens, 21"),
    ("cu_seqlens_q", 2, 16, r"cu_seqlens_q\[2\] must be at least cu_seqlens_q\[1\], 17, got 16"),
    ("cu_seqlens_q", 1, 18, r"cu_seqlens_q\[1\] must be at most max_seqlen_q, 17, beyond "),
    ("seqlens_k", 1, -1, r"seqlens_k\[1\] must be from 0 to max_seqlen_k, 36, got -1"),
    ("seqlens_k", 2, 37, r"seqlens_k\[2\] must be from 0 to max_seqlen_k, 36, got 37"),
    ("block_table", (0, 5), -1, r"block_table\[0, 5\] must be from 0 to num_blocks - 1, 13"),
    ("block_table", (2, 1), 14, r"block_table\[2, 1\] must be from 0 to num_blocks - 1, 13"),
]


@pytest.mark.parametrize(("name", "where", "value", "message"), CASES)
def test_wrong_values_are_named(name, where, value, message, device):
    call = arguments(device)
    call[name] = changed(call[name], where, value)
    with pytest.raises(ValueError, match=message):
        validate_paged(**call)


def test_fewer_keys_than_new_ones(device):
    call = arguments(device, dense=True)
    call["seqlens_k"] = changed(call["seqlens_k"], 0, 16)
    with pytest.raises(ValueError, match=r"seqlens_k\[0\] must be from 17 to max_seqlen_k, 36"):
        validate_paged(**call)


def test_a_table_without_room(device):
    call = arguments(device)
    call["block_table"] = call["block_table"][:, :5]
    with pytest.raises(ValueError, match=r"seqlens_k\[0\] must be at most what block_table has"):
        validate_paged(**call)


def test_entries_that_are_not_looked_at_may_be_anything(device):
    call = arguments(device)
    call["block_table"] = changed(call["block_table"], (1, 3), 10**6)
    validate_paged(**call)
    # 20 keys lie before the window of the second sequence
    call["block_table"] = changed(call["block_table"], (1, 0), -1)
    with pytest.raises(ValueError, match=r"block_table\[1, 0\]"):
        validate_paged(**call)
    validate_paged(**call, window_size=(7, 0))


@pytest.mark.parametrize("layout", ["nhd", PACKED])
def test_slots(layout, device):
    case = make_case(MEDIUM._replace(layout=layout), torch.float16, device)
    caches = case.inputs["k_cache"], case.inputs["v_cache"]
    good = torch.tensor([3, -1, 97, -1, 0], device=device)
    validate_slot_mapping(good, *caches)
    with pytest.raises(ValueError, match=r"slot_mapping\[2\] must be below the number of slots"):
        validate_slot_mapping(changed(good, 2, 98), *caches)
    with pytest.raises(ValueError, match=r"slot_mapping\[4\] must be a slot of its own, got 3"):
        validate_slot_mapping(changed(good, 4, 3), *caches)
