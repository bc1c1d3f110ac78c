"""Rows packed as trees, and the probabilities of their tokens: against each row alone."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from flash_attn_triton import attention_reference, tree_attention_reference, trees, validate_tree
from flash_attn_triton._linked.host.forms import interpreted
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from .._linked.gpus import counting
from .test_tree_operators import launch

pytestmark = pytest.mark.eager

# few letters, so that most rows share something
ROWS = st.lists(st.lists(st.integers(0, 2), max_size=7), max_size=9)


def joined(rows):
    return list(itertools.chain.from_iterable(rows))


def paths(batch):
    """Each segment's tokens from the root down."""
    starts, parents = batch.cu_seqlens.tolist(), batch.parents.tolist()
    found = []
    for i, parent in enumerate(parents):
        own = range(starts[i], starts[i + 1])
        found.append([*(found[parent] if parent >= 0 else []), *own])
    return found


# ---- pack


def test_a_prompt_stands_once():
    batch = trees.pack([[7, 8, 9, 1], [7, 8, 9, 2, 3], [7, 8, 9], [], [5], [7, 8, 9, 2, 3]])
    assert batch.tokens.tolist() == [7, 8, 9, 1, 2, 3, 5]
    assert batch.positions.tolist() == [0, 1, 2, 3, 3, 4, 0]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 6, 7]
    assert batch.parents.tolist() == [-1, 0, 0, -1]
    assert batch.max_seqlen == 3
    assert batch.gather.tolist() == [0, 1, 2, 3, 0, 1, 2, 4, 5, 0, 1, 2, 6, 0, 1, 2, 4, 5]
    assert [x.dtype for x in batch if not isinstance(x, int)] == [
        torch.int64,
        torch.int64,
        torch.int32,
        torch.int32,
        torch.int64,
    ]
    assert batch.to("meta").gather.device.type == "meta"


@settings(deadline=None)
@given(st.data(), ROWS)
def test_every_row_is_a_path(data, rows):
    ids = st.lists(st.sampled_from("ab"), min_size=len(rows), max_size=len(rows))
    group = data.draw(st.one_of(st.none(), ids))
    batch = trees.pack(rows, group=group)
    tokens = len(batch.tokens)
    assert batch.tokens[batch.gather].tolist() == joined(rows)
    assert batch.positions[batch.gather].tolist() == joined(range(len(row)) for row in rows)
    validate_tree(torch.empty(tokens, 1, 1), batch.cu_seqlens, batch.parents, batch.max_seqlen)
    lengths = batch.cu_seqlens.diff().tolist()
    assert batch.max_seqlen == max(lengths, default=0)
    assert 0 not in lengths
    assert sum(lengths) == tokens
    # as few tokens as there are beginnings, and no segment that could be part of another
    names = group or [None] * len(rows)
    begun = {
        (name, *row[: n + 1])
        for name, row in zip(names, rows, strict=True)
        for n in range(len(row))
    }
    assert tokens == len(begun)
    following = batch.parents.tolist()
    assert all(following.count(parent) != 1 for parent in following if parent >= 0)
    # a row is the begin of a path, and no two groups share one
    found, start, owners = paths(batch), 0, {}
    for name, row in zip(names, rows, strict=True):
        place = batch.gather[start : start + len(row)].tolist()
        start += len(row)
        assert not row or any(path[: len(row)] == place for path in found)
        assert all(owners.setdefault(token, name) == name for token in place)


@settings(deadline=None)
@given(ROWS, st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(rows, draw):
    mixed = draw.sample(rows, len(rows))
    a, b = trees.pack(rows), trees.pack(mixed)
    assert len(a.tokens) == len(b.tokens)
    assert sorted(a.cu_seqlens.diff().tolist()) == sorted(b.cu_seqlens.diff().tolist())


def test_rows_may_be_tensors_and_tuples():
    want = trees.pack([[1, 2], [1, 3], [4]], group=[0, 0, 1])
    rows = [torch.tensor([1, 2]), (1, 3), torch.tensor([4], dtype=torch.uint8)]
    got = trees.pack(rows, group=torch.tensor([0, 0, 1]))
    for x, y in zip(got, want, strict=True):
        assert x == y if isinstance(x, int) else torch.equal(x, y)


def test_rows_are_not_compared_with_each_other(monkeypatch):
    compared = []
    real = trees._alike
    monkeypatch.setattr(trees, "_alike", lambda row, run: compared.append(1) or real(row, run))
    trees.pack([[i] for i in range(3000)])
    assert not compared
    trees.pack([[0, i] for i in range(3000)])
    assert len(compared) == 2999
    # as deep as it gets: each row leaves the path one token earlier
    deep = trees.pack([[1] * n + [0] for n in range(1500, 0, -1)])
    assert len(deep.parents) == 2 * 1500 - 1


LARGE = 2**70
PACK_ERRORS = [
    ("sequences must be a list of rows, got Tensor", TypeError, torch.zeros(2, 2).long(), None),
    (
        "sequences[1] must be a list of ints or a 1-D integer tensor, got int",
        TypeError,
        [[1], 2],
        None,
    ),
    (
        "sequences[0] must be a list of ints or a 1-D integer tensor, got str",
        TypeError,
        ["ab"],
        None,
    ),
    ("sequences[0][1] must be an int, got float", TypeError, [[1, 2.0]], None),
    ("sequences[0][0] must be an int, got bool", TypeError, [[True]], None),
    (
        "sequences[1][1] must fit 64 bits, got 1180591620717411303424",
        ValueError,
        [[], [1, LARGE]],
        None,
    ),
    (
        "sequences[0] must be of an integer dtype, got torch.float32",
        TypeError,
        [torch.zeros(2)],
        None,
    ),
    ("sequences[0] must be 1-D, got [1, 2]", ValueError, [torch.zeros(1, 2).long()], None),
    (
        "sequences[0] must be on the CPU, where rows are compared, got meta",
        ValueError,
        [torch.zeros(2, device="meta").long()],
        None,
    ),
    ("group must have one id per row of sequences, 2, got 1", ValueError, [[1], [2]], [0]),
    (
        "group must be a list with an id for each row or a 1-D integer tensor, got str",
        TypeError,
        [[1]],
        "a",
    ),
    ("group[0] must be hashable, got list", TypeError, [[1]], [[0]]),
    ("group must be of an integer dtype, got torch.bool", TypeError, [[1]], torch.tensor([True])),
]


@pytest.mark.parametrize(
    ("message", "error", "rows", "group"), PACK_ERRORS, ids=lambda x: str(x)[:40]
)
def test_what_is_no_row_is_refused(message, error, rows, group):
    with pytest.raises(error) as caught:
        trees.pack(rows, group=group)
    assert str(caught.value) == message


# ---- log_probs


def next_tokens(rows):
    return torch.tensor(joined([*row[1:], trees.IGNORED] if row else [] for row in rows)).long()


def alone(logits, batch, labels):
    wanted = labels.where(labels >= 0, 0)
    return logits.log_softmax(1)[batch.gather, wanted].where(labels >= 0, 0)


@settings(deadline=None, max_examples=40)
@given(ROWS, st.sampled_from([1, 3, 2**24]))
def test_each_row_has_its_own_probabilities(rows, at_once):
    batch, labels = trees.pack(rows), next_tokens(rows)
    logits = torch.randn(len(batch.tokens), 3, dtype=torch.float64, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trees, "_AT_ONCE", at_once)
        got, want = trees.log_probs(logits, batch, labels), alone(logits, batch, labels)
        torch.testing.assert_close(got, want)
        incoming = torch.randn_like(got)
        grads = (torch.autograd.grad(x, logits, incoming)[0] for x in (got, want))
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_gradients_are_rounded_once(dtype):
    # one token before very many rows, of which several go on alike
    rows = [[0, i % 5] for i in range(64)]
    batch, labels = trees.pack(rows), next_tokens(rows)
    logits = torch.randn(6, 5).to(dtype).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    incoming = torch.rand(128)
    got, want = trees.log_probs(logits[None], batch, labels), alone(exact, batch, labels)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)
    (got,) = torch.autograd.grad(got, logits, incoming)
    (want,) = torch.autograd.grad(want, exact, incoming.double())
    assert got.dtype == dtype
    error = (got.double() - want).abs()
    assert (error <= torch.finfo(dtype).eps / 2 * want.abs() + 1e-5).all()


def test_no_row_of_logits_is_written_out(monkeypatch):
    monkeypatch.setattr(trees, "_AT_ONCE", 2**8)
    rows = [[0] * 30 + [i] for i in range(32)]
    batch, labels = trees.pack(rows), next_tokens(rows)
    logits = torch.randn(len(batch.tokens), 64, dtype=torch.bfloat16, requires_grad=True)
    largest = {}

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            out = f(*args, **(kwargs or {}))
            for x in out if isinstance(out, (list, tuple)) else [out]:
                if isinstance(x, torch.Tensor):
                    largest[x.dtype] = max(largest.get(x.dtype, 0), x.numel())
            return out

    with Sizes():
        trees.log_probs(logits, batch, labels).sum().backward()
    assert largest[torch.bfloat16] == logits.numel()
    assert largest[torch.float32] <= max(2**8, len(batch.gather))


def test_a_second_derivative_is_refused():
    batch = trees.pack([[1, 2]])
    logits = torch.randn(2, 3, requires_grad=True)
    found = trees.log_probs(logits, batch, torch.tensor([2, 0]))
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(found.sum(), logits, create_graph=True)


LABELS = torch.tensor([2, 0, 3, -100])
LOG_PROBS_ERRORS = [
    ("logits must be a torch.Tensor, got list", TypeError, {"logits": []}),
    (
        "logits must be of a float dtype, got torch.int64",
        TypeError,
        {"logits": torch.zeros(3, 5).long()},
    ),
    (
        "logits must be [3, vocabulary] or [1, 3, vocabulary], with a row for each of "
        "batch.tokens, got [4, 5]",
        ValueError,
        {"logits": torch.ones(4, 5)},
    ),
    ("batch must be a TreeBatch, which pack returns, got tuple", TypeError, {"batch": ()}),
    ("labels must be a torch.Tensor, got list", TypeError, {"labels": [1]}),
    (
        "labels must be of an integer dtype, got torch.bool",
        TypeError,
        {"labels": LABELS > 0},
    ),
    (
        "labels must be [4], one for each of batch.gather, got [3]",
        ValueError,
        {"labels": LABELS[:3]},
    ),
    (
        "labels[2] must be from 0 to 2, or -100 for none, got 3",
        ValueError,
        {"logits": torch.ones(3, 3)},
    ),
    (
        "batch must be on the device of logits, cpu, got meta",
        ValueError,
        {"batch": trees.pack([[1, 2], [1, 3]]).to("meta")},
    ),
    (
        "labels must be on the device of logits, cpu, got meta",
        ValueError,
        {"labels": LABELS.to("meta")},
    ),
]


@pytest.mark.parametrize(
    ("message", "error", "change"),
    LOG_PROBS_ERRORS,
    ids=[message[:30] for message, *_ in LOG_PROBS_ERRORS],
)
def test_wrong_arguments_of_log_probs_are_refused(message, error, change):
    right = {"logits": torch.randn(3, 5), "batch": trees.pack([[1, 2], [1, 3]]), "labels": LABELS}
    trees.log_probs(**right)
    with pytest.raises(error) as caught:
        trees.log_probs(**{**right, **change})
    assert str(caught.value) == message


# ---- both, with attention between them


@pytest.mark.parametrize("seed", range(4))
def test_attention_over_the_tree_is_that_of_each_row(seed):
    draw = random.Random(seed)
    rows = [[draw.randint(0, 1) for _ in range(draw.randint(0, 9))] for _ in range(8)]
    rows += [rows[0], rows[1][:2], [1]]
    batch = trees.pack(rows, group=[draw.randint(0, 1) for _ in rows])
    labels = next_tokens(rows)
    table = torch.randn(2, 10, 3, 8, dtype=torch.float64, requires_grad=True)  # letter, position

    x = table[batch.tokens, batch.positions]
    tree = batch.cu_seqlens, batch.parents, batch.max_seqlen
    out = tree_attention_reference(x, x, x, *tree)
    got = trees.log_probs(out[:, 0, :2], batch, labels)
    want = []
    for row in filter(None, rows):
        x = table[torch.tensor(row), torch.arange(len(row))][None]
        logits = attention_reference(x, x, x, causal=True)[0, :, 0, :2]
        want.append(alone(logits, trees.pack([row]), next_tokens([row])))
    want = torch.cat(want)
    torch.testing.assert_close(got, want)
    incoming = torch.randn_like(got)
    grads = (torch.autograd.grad(y, table, incoming)[0] for y in (got, want))
    torch.testing.assert_close(*grads)


def random_batch(seed):
    draw = random.Random(seed)
    prompt, *answers = (
        [draw.randint(0, 49) for _ in range(draw.randint(1, 12))] for _ in range(draw.randint(3, 7))
    )
    return trees.pack([[*prompt, i, *answer] for i, answer in enumerate(answers)])


@pytest.mark.skipif(interpreted(), reason="tracing sees the operators alone")
def test_200_trees_compile_once():
    from flash_attn_triton import flash_attn_tree_func

    torch.compiler.reset()

    def step(table, batch, labels):
        x = table[batch.tokens]
        tree = batch.cu_seqlens, batch.parents, batch.max_seqlen
        out = flash_attn_tree_func(x, x, x, *tree).flatten(1)
        return trees.log_probs(out, batch, labels).mean()

    fast = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for seed in range(200):
        batch = random_batch(seed)
        table = torch.randn(50, 2, 32, requires_grad=True)
        labels = batch.tokens[batch.gather].roll(-1)
        with torch._dynamo.config.patch(error_on_recompile=seed > 1):
            got = torch.autograd.grad(fast(table, batch, labels), table)
        if seed % 20 == 0:
            torch.testing.assert_close(got, torch.autograd.grad(step(table, batch, labels), table))
    torch.compiler.reset()


@pytest.mark.aot
def test_200_trees_build_no_further_kernel():
    with counting("nvidia:sm_90") as variants:
        for seed in range(200):
            batch = random_batch(seed)
            launch(64, torch.bfloat16, len(batch.tokens), len(batch.parents))
    counts = {name: len(keys) for name, keys in variants.items()}
    assert len(counts) == 6
    assert all(n == (2 if name == "round_kernel" else 1) for name, n in counts.items()), variants
