"""Keys over ranks: two processes, each with half of the keys, against the whole on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from prefix_prefill import distributed
from prefix_prefill._paged import ops

from ._linked.budget import Maker, assert_no_worse_than_eager
from ._numerics import Case, Problem, make_case, run_eager, run_oracle

pytestmark = [
    pytest.mark.eager,
    pytest.mark.skipif(ops.interpreted(), reason="the operator's, which has tests of its own"),
]
RANKS = 2
PROBLEM = Problem(((9, 40), (1, 21), (20, 17), (3, 3), (2, 1), (0, 5)), 4, 2, 16, page=5, padding=2)
CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window_size": (7, 0)},
    "left": {"causal": False, "window_size": (7, -1)},
    "right": {"causal": False, "window_size": (-1, 3)},
    "both": {"causal": False, "window_size": (6, 3)},
    "softcap": {"softcap": 1.5},
    "splits": {"num_splits": 3},
    "decode": {},
    "decode, window": {"window_size": (7, 0)},
}
DECODE = Problem(((1, 40), (1, 1), (0, 9), (1, 2), (1, 21)), 4, 2, 16, page=5, padding=2)
EXTRAS = ((), ("alibi",), ("alibi_batch", "sinks"), ("sinks",))


def problem_of(name: str) -> Problem:
    return DECODE if name.startswith("decode") else PROBLEM


# values with a head dimension of their own
OWN = PROBLEM._replace(head_dim_v=40)
OWN_OPTIONS = {"window_size": (7, 0), "num_splits": 3}


def of_rank(case: Any, problem: Problem, rank: int) -> dict[str, Any]:
    """Return the arguments of a rank: every second key, in pages of its own."""
    m = Maker("cpu", torch.float32, rank)
    batch, page = len(problem.lengths), 3
    own = [len(range(rank, keys, RANKS)) for _, keys in problem.lengths]
    blocks = -(-max(own) // page)
    table = torch.randperm(batch * blocks, generator=m.generator).view(batch, blocks).int()
    shape = (batch * blocks, page, problem.heads_k)
    caches = {
        f"{name}_cache": torch.full((*shape, n), torch.nan) for name, n in problem.widths.items()
    }
    for b, (_, keys) in enumerate(problem.lengths):
        for at in range(rank, keys, RANKS):
            to = table[b, at // RANKS // page], at // RANKS % page
            where = case.options["block_table"][b, at // problem.page], at % problem.page
            for name, cache in caches.items():
                cache[to] = case.inputs[name][where]
    return {**case.inputs, **case.options, **caches, "block_table": table}


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    found = {}
    for name, options in CASES.items():
        for extras in EXTRAS:
            if "causal" in options and any("alibi" in extra for extra in extras):
                continue
            problem = problem_of(name)
            case = make_case(problem, torch.float32, "cpu", extras).with_options(**options)
            given = of_rank(case, problem, rank)
            found[name, extras] = distributed.paged_attn_func(**given, return_lse=True)
    case = make_case(OWN, torch.float32, "cpu", ["sinks"]).with_options(**OWN_OPTIONS)
    found["own", ()] = distributed.paged_attn_func(**of_rank(case, OWN, rank), return_lse=True)
    given = of_rank(make_case(PROBLEM, torch.float32, "cpu"), PROBLEM, rank)
    messages = []
    wrong = (
        {"window_size": (6, 0)},
        {"causal": False, "alibi_slopes": torch.ones(4)},
        {"tree_mask": torch.ones(37, dtype=torch.int64)},
    )
    for changes in wrong:
        try:
            distributed.paged_attn_func(**{**given, **changes})
        except (NotImplementedError, TypeError) as error:
            messages.append(str(error))
    torch.save((found, messages), f"{folder}/{rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        # the processes import this module by its name, along the path of this one
        patch.syspath_prepend(Path(__file__).parent.parent)
        mp.spawn(work, (str(folder),), nprocs=RANKS)
    return [torch.load(folder / str(rank)) for rank in range(RANKS)]


@pytest.mark.parametrize("name", CASES)
def test_ranks_together_are_one(name, results):
    keys = [key for key in results[0][0] if key[0] == name]
    assert keys
    for key in keys:
        problem = problem_of(name)
        case = make_case(problem, torch.float32, "cpu", key[1]).with_options(**CASES[name])
        judge(case, key, results)


def test_values_with_a_head_dim_of_their_own(results):
    case = make_case(OWN, torch.float32, "cpu", ["sinks"]).with_options(**OWN_OPTIONS)
    judge(case, ("own", ()), results)


def judge(case: Case, key: Any, results: Any) -> None:
    """Hold what both ranks return to the whole on one."""
    oracle = run_oracle(case)
    eager = run_eager(case, oracle)
    got = [dict(zip(("out", "lse"), found[key], strict=True)) for found, _ in results]
    for which, value in got[0].items():
        assert torch.equal(value, got[1][which])
        assert_no_worse_than_eager(which, value, eager[which], oracle[which])


def test_what_is_not_offered_is_named(results):
    assert results[0][1] == [
        "window_size must show a multiple of 2 keys over 2 ranks, got 7; 8 is one",
        "alibi_slopes must be None over several ranks unless causal, got Tensor; pass causal=True",
        "tree_mask is no argument here",
    ]
