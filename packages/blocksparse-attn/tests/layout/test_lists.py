"""What kernels walk, against a loop over blocks."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from blocksparse_attn import BlockSparseLayout
from blocksparse_attn._attention.call import ListForm
from blocksparse_attn._layout.lists import COUNTED

from .._numerics import Packed, make_packed, paged, run
from ._definition import key_lists, query_lists
from ._lists import random_layout

SIDES = (16, 32, 64)
BLOCKS = list(itertools.product(SIDES, SIDES))


def entries(lists, owner):
    part = slice(int(lists.begin[owner]), int(lists.begin[owner + 1]))
    pairs = zip(lists.items[part].tolist(), lists.members[part].tolist(), strict=True)
    return list(pairs), int(lists.whole[owner])


def expected(found, members, is_clear):
    """Sort what was found: whole items first."""
    everyone = (1 << members) - 1
    whole = [(i, found[i]) for i in sorted(found) if found[i] == everyone and is_clear(i)]
    rest = [(i, found[i]) for i in sorted(found) if (i, found[i]) not in whole]
    return whole + rest, len(whole)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_lists_of_queries(block, seed, causal):
    layout = random_layout(seed, block)
    dense = layout.to_dense()
    heads, rows, cols = dense.shape
    block_q, block_k = block
    for span, group, pack in ((32, 1, 1), (64, 1, 1), (16, heads, 4), (16, heads, min(heads, 2))):
        if pack > 1 and span > block_q:
            continue
        lists = query_lists(layout._crow, layout._col, cols, block, span, group, pack, causal)
        stack = max(span // block_q, 1)
        owners, packs = -(-rows // stack), -(-group // pack)
        for kv, p, tile in itertools.product(range(heads // group), range(packs), range(owners)):
            found = {}
            first = kv * group + p * pack
            own = range(first, min(first + pack, (kv + 1) * group))
            for h, r, c in itertools.product(
                own, range(tile * stack, min((tile + 1) * stack, rows)), range(cols)
            ):
                if dense[h, r, c] and not (causal and c * block_k >= (r + 1) * block_q):
                    member = h - first if pack > 1 else r % stack
                    found[c] = found.get(c, 0) | 1 << member
            want = expected(
                found,
                len(own) if pack > 1 else stack,
                lambda c, t=tile, s=stack: not causal or (c + 1) * block_k - 1 <= t * s * block_q,
            )
            assert entries(lists, (kv * packs + p) * owners + tile) == want


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_what_one_half_sees_alone_comes_last(block, seed):
    layout = random_layout(seed, block)
    arguments = layout._crow, layout._col, layout.num_cols, block, 128, 1, 1, True
    plain, lists = (query_lists(*arguments, halves=halves) for halves in (False, True))
    half = (1 << 64 // block[0]) - 1
    for owner in range(len(plain.whole)):
        found, whole = entries(plain, owner)
        apart, counts = entries(lists, owner)
        both = [one for one in found[whole:] if one[1] & half and one[1] > half]
        second = [one for one in found[whole:] if not one[1] & half]
        first = [one for one in found[whole:] if one[1] <= half]
        assert apart == found[:whole] + both + second + first
        assert counts == whole + COUNTED * len(second) + COUNTED**2 * len(first)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_lists_of_keys(block, seed, causal):
    layout = random_layout(seed, block)
    dense = layout.to_dense()
    heads, rows, cols = dense.shape
    block_q, block_k = block
    for span, group in ((32, 1), (64, heads)):
        lists = key_lists(layout._crow, layout._col, cols, block, span, group, causal)
        stack = max(span // block_k, 1)
        owners = -(-cols // stack)
        for kv, tile in itertools.product(range(heads // group), range(owners)):
            found = {}
            for g, r, c in itertools.product(
                range(group), range(rows), range(tile * stack, min((tile + 1) * stack, cols))
            ):
                if dense[kv * group + g, r, c] and not (
                    causal and c * block_k >= (r + 1) * block_q
                ):
                    item = r * group + g
                    found[item] = found.get(item, 0) | 1 << (c % stack)
            want = expected(
                found,
                stack,
                lambda i, t=tile, s=stack, g=group: (
                    not causal or i // g * block_q >= (t + 1) * s * block_k - 1
                ),
            )
            assert entries(lists, kv * owners + tile) == want


def test_lists_are_made_once(device):
    from blocksparse_attn import blocksparse_attn_func

    layout = BlockSparseLayout.local_strided(2, 64, 16, 2, 3, device=device)
    lists = [layout._lists.of("tall", ListForm(1, 16, 4, True)) for _ in range(2)]
    assert lists[0] is lists[1]
    # another layer of other heads may want other lists; the same spec shares them
    other = layout._lists.of("tall", ListForm(1, 8, 4, True))
    assert other is lists[0]
    x = torch.randn(1, 64, 2, 16, device=device)
    before = blocksparse_attn_func(x, x, x, layout)
    known = len(layout._lists.known)
    assert torch.equal(blocksparse_attn_func(x, x, x, layout), before)
    assert len(layout._lists.known) == known


class Stream:
    """A stream that nobody runs: it knows which events it is behind."""

    def __init__(self, number):
        self.cuda_stream, self.seen = number, set()

    def record_event(self):
        self.seen.add((self.cuda_stream, len(self.seen)))
        return set(self.seen)

    def wait_event(self, event):
        self.seen |= event


class Part:
    def __init__(self):
        self.readers = []

    def record_stream(self, stream):
        self.readers.append(stream.cuda_stream)


def test_streams_wait_for_all_that_others_planned(monkeypatch):
    from blocksparse_attn._layout import kept_lists

    lists = kept_lists.KeptLists(SimpleNamespace(device=torch.device("cuda", 0)), *[None] * 3)
    first, second, third = streams = [Stream(i) for i in range(3)]
    now = [first]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: now[0])
    monkeypatch.setattr(kept_lists, "is_capturing", lambda _: capturing)
    capturing = False
    parts = [Part(), Part()]
    lists.join()  # nothing is planned
    for now[0], part in zip((first, second), parts, strict=True):
        lists.keep((part,), (part,))
    made = set(second.seen)
    assert first.seen < made
    now[0], capturing = third, True
    lists.join()
    assert not third.seen
    capturing = False
    lists.join()
    lists.join()
    assert third.seen == made
    assert [part.readers for part in parts] == [[1, 2], [2]]
    assert lists.ready.streams == {stream.cuda_stream for stream in streams[1:]}


@pytest.mark.parametrize("in_pages", [False, True])
def test_what_is_prepared_is_what_calls_walk(in_pages, device):
    case = make_packed(Packed((20, 3), (40, 9), 4, 2, 16), torch.float32, device)
    case = paged(case, 16) if in_pages else case
    layout = case.options["layout"].prepare(4, 2, 16, torch.float32, paged=in_pages)
    known = set(layout._lists.known)
    run(case, grad=False)
    assert set(layout._lists.known) == known
