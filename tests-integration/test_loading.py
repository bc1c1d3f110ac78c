"""``torch.load`` reads layouts and plans as it reads tensors: with ``weights_only=True``."""

import copy

import flash_attn_triton.distributed
import lightning_attn.distributed
import pytest
import torch
from blocksparse_attn import BlockSparseLayout, TokenRule

MASK = torch.ones(2, 2, dtype=torch.bool).tril()
LAYOUTS = [
    BlockSparseLayout.from_dense(MASK, 16),
    BlockSparseLayout.batched([BlockSparseLayout.from_dense(MASK, (16, 32))] * 2),
    BlockSparseLayout.from_dense(MASK, 16).with_token_rule(TokenRule.window(4, 0)),
]


def loaded(x, path):
    torch.save({"kept": x}, path)
    return torch.load(path)["kept"]


@pytest.mark.parametrize("layout", LAYOUTS, ids=["heads", "batched", "rule"])
def test_layouts_load(layout, tmp_path):
    assert loaded(layout, tmp_path / "x.pt") == layout == copy.deepcopy(layout)


def test_token_rules_load(tmp_path):
    rule = TokenRule.document(torch.tensor([0, 3, 8])) & TokenRule.window(4, 0)
    other = loaded(rule, tmp_path / "x.pt")
    assert torch.equal(rule.bounds(8, torch.device("cpu")), other.bounds(8, torch.device("cpu")))


@pytest.mark.parametrize("ours", [flash_attn_triton, lightning_attn], ids=["flash", "lightning"])
@pytest.mark.parametrize(
    "options", [{"causal": True}, {"window_size": (5, 2)}, {"shard": "zigzag"}], ids=str
)
def test_plans_load(ours, options, tmp_path):
    plan = ours.distributed.ShardPlan([0, 7, 7, 31], 2, **options)
    other = loaded(plan, tmp_path / "x.pt")
    assert other.key == plan.key
    assert torch.equal(other.indices(1), plan.indices(1))
