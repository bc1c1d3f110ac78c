"""Which rank holds which tokens: the rules, and the balance of plans, counted by brute force."""

from __future__ import annotations

import random

import pytest
import torch
from flash_attn_triton._linked.parallel.layout import visible_pairs
from flash_attn_triton._linked.parallel.plan import ShardPlan
from flash_attn_triton._linked.parallel.shards import shard, shard_size, unshard

pytestmark = pytest.mark.eager


def offsets(lengths):
    return [sum(lengths[:b]) for b in range(len(lengths) + 1)]


def lengths_of(kind: str, count: int = 200) -> list[int]:
    draw = random.Random(kind)
    if kind == "log-normal":
        return [max(1, int(draw.lognormvariate(6.5, 1.2))) for _ in range(count)]
    if kind == "short":
        return [draw.randint(1, 300) for _ in range(count)]
    return [50_000, *(draw.randint(1, 300) for _ in range(count))]


@pytest.mark.parametrize("rule", ["zigzag", "contiguous"])
@pytest.mark.parametrize("seqlen", [0, 1, 3, 8, 23])
def test_shards_make_the_whole(rule, seqlen):
    x = torch.arange(2 * seqlen * 3).view(2, seqlen, 3)
    for ranks in (1, 2, 3, 5):
        parts = [shard(x, ranks, rank, shard=rule) for rank in range(ranks)]
        assert [p.shape[1] for p in parts] == [
            shard_size(seqlen, ranks, rank, rule) for rank in range(ranks)
        ]
        assert torch.equal(unshard(parts, shard=rule), x)


def test_parts_of_a_zigzag():
    # 23 tokens in 6 parts: five of 4, one of 3
    assert shard(torch.arange(23), 3, 0, dim=0).tolist() == [0, 1, 2, 3, 20, 21, 22]
    assert shard(torch.arange(23), 3, 2, dim=0).tolist() == [8, 9, 10, 11, 12, 13, 14, 15]


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (2, 1), (-1, 2), (0, -1), (99, 99)])
def test_pairs_are_counted(window):
    left, right = window
    for seqlen in (1, 2, 7, 12):
        for begin in range(seqlen + 1):
            for end in range(begin, seqlen + 1):
                count = sum(
                    (left < 0 or i - left <= j) and (right < 0 or j <= i + right)
                    for i in range(begin, end)
                    for j in range(seqlen)
                )
                assert visible_pairs(begin, end, seqlen, left, right) == count


@pytest.mark.parametrize("kind", ["log-normal", "short", "giant"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("causal", [True, False])
def test_plans_are_balanced(kind, ranks, causal):
    lengths = lengths_of(kind)
    plan = ShardPlan(offsets(lengths), ranks, causal=causal)
    pairs = plan.layout.pairs
    assert sum(pairs) == sum(n * (n + 1) // 2 if causal else n * n for n in lengths)
    assert max(pairs) <= 1.02 * sum(pairs) / ranks
    assert plan.max_tokens <= 1.05 * sum(lengths) / ranks
    # what is cut travels: of short sequences none
    cut = {run.sequence for rank in range(ranks) for run in plan.runs(rank) if run.begin}
    if kind == "short":
        assert not cut
    if kind == "giant" and ranks > 1:
        assert 0 in cut
        assert len(cut) <= 2


@pytest.mark.parametrize("rule", ["balanced", "zigzag", "contiguous"])
@pytest.mark.parametrize("lengths", [[], [0], [5], [1, 0, 9, 2], [40, 3, 3, 17, 1]], ids=str)
def test_plans_distribute_every_token_once(rule, lengths):
    at = offsets(lengths)
    x = torch.randn(at[-1], 2)
    position = torch.cat([torch.arange(n) for n in lengths] or [torch.empty(0)]).long()
    for ranks in (1, 2, 3, 4):
        plan = ShardPlan(torch.tensor(at, dtype=torch.int32), ranks, causal=True, shard=rule)
        parts = [plan.shard(x, rank) for rank in range(ranks)]
        assert [len(p) for p in parts] == [plan.tokens(rank) for rank in range(ranks)]
        assert torch.equal(plan.unshard(parts), x)
        for rank in range(ranks):
            assert torch.equal(plan.positions(rank), position[plan.indices(rank)])
            assert (plan.indices(rank).diff() > 0).all()
        assert plan.max_tokens == max(map(len, parts))


def test_lengths_seen_before_are_not_planned_again():
    first, again = (ShardPlan([0, 100, 130, 131], 2, causal=True) for _ in range(2))
    assert first.layout is again.layout
    assert first.key == again.key


WRONG = [
    (lambda: shard(3, 2, 0), TypeError, "x must be a torch.Tensor, got int"),
    (lambda: shard(torch.ones(1, 4), 0, 0), ValueError, "group_size must be at least 1, got 0"),
    (lambda: shard(torch.ones(1, 4), 2, 2), ValueError, "rank must be below group_size, 2, got 2"),
    (
        lambda: shard(torch.ones(1, 4), 2, 0, shard="ring"),
        ValueError,
        "shard must be one of zigzag, contiguous, got 'ring'",
    ),
    (lambda: shard(torch.ones(1, 4), 2, 0, dim=2), ValueError, "dim must be from -2 to 1, got 2"),
    (lambda: unshard([]), ValueError, "parts must have a tensor for each rank, got none"),
    (
        lambda: unshard([torch.ones(1, 1), torch.ones(1, 3)]),
        ValueError,
        "parts[0] must have 2 of 4 tokens, got 1",
    ),
    (lambda: ShardPlan([0, 3, 2], 2), ValueError, "cu_seqlens[2] must be at least 3, got 2"),
    (lambda: ShardPlan([1, 3], 2), ValueError, "cu_seqlens must be [batch + 1] from 0 on, got [1]"),
    (lambda: ShardPlan([0, 1.0], 2), TypeError, "cu_seqlens[1] must be an int, got float"),
    (lambda: ShardPlan([0, 1], "2"), TypeError, "group_size must be an int, got str"),
    (lambda: ShardPlan([0, 1], 2, causal=1), TypeError, "causal must be a bool, got int"),
    (lambda: ShardPlan([0, 1], 2).indices(2), ValueError, "rank must be below group_size, 2"),
    (
        lambda: ShardPlan([0, 4], 2).shard(torch.ones(3), 0),
        ValueError,
        "x must be [tokens, ...] with 4 tokens, got [3]",
    ),
    (
        lambda: ShardPlan([0, 4], 2).unshard([torch.ones(2)]),
        ValueError,
        "parts must have 2 tensors, got 1",
    ),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_errors_name_the_argument(number):
    call, kind, words = WRONG[number]
    with pytest.raises(kind) as error:
        call()
    assert words in str(error.value)


def test_sequences_are_cut_over_few_ranks():
    """Of eight ranks, one that has too much for one is shared by two, which share the next too."""
    plan = ShardPlan(offsets([8192, 4096, 2048, 1024, 512, 512] * 4), 8, causal=True)
    assert max(plan.layout.pairs) <= 1.02 * sum(plan.layout.pairs) / 8
    holders = [{run.sequence for run in plan.runs(rank)} for rank in range(8)]
    for long in range(0, 24, 6):
        assert sum(long in held for held in holders) == 2
    assert plan.max_tokens <= 1.05 * 8192
