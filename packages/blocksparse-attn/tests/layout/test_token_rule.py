"""Rules by which queries see a part of the blocks that they keep."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from blocksparse_attn import (
    BlockSparseLayout,
    TokenRule,
    blocksparse_attention_reference,
    blocksparse_attn_func,
)
from blocksparse_attn._attention import ops
from blocksparse_attn._attention.reference import visible_keys
from blocksparse_attn._layout.kept_lists import walks_lists
from blocksparse_attn._layout.lists import ListSpec
from blocksparse_attn.token_rule import token_bounds
from torch.library import opcheck
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from .._linked.budget import Maker, assert_same
from .._numerics import Packed, Shape, check, make_case, make_packed, paged, run
from ..attention._operators import compiled, traced_alike
from ._definition import defined_lists
from ._planning import assert_planned_alike

__all__ = ["compiled"]  # a fixture


def starts(*values, device="cpu", dtype=torch.int32):
    return torch.tensor(values, device=device, dtype=dtype)


# each rule, and what it says of a query and a key
RULES = {
    "causal": (lambda _: TokenRule.causal(), lambda q, k: k <= q),
    "window": (lambda _: TokenRule.window(5, 9), lambda q, k: q - 5 <= k <= q + 9),
    "left": (lambda _: TokenRule.window(20, -1), lambda q, k: q - 20 <= k),
    "document": (
        lambda device: TokenRule.document(starts(3, 10, 10, 30, 41, device=device)),
        lambda q, k: any(a <= q < b and a <= k < b for a, b in ((3, 10), (10, 30), (30, 41))),
    ),
    "prefix": (lambda _: TokenRule.prefix(13), lambda q, k: k < 13 or k <= q),
    "document and window": (
        lambda device: (
            TokenRule.document(starts(0, 21, 50, device=device)) & TokenRule.window(7, 0)
        ),
        lambda q, k: (q < 21) == (k < 21) and max(q, k) < 50 and q - 7 <= k <= q,
    ),
}


@pytest.fixture(params=RULES)
def ruled(request, device):
    make, says = RULES[request.param]
    return make(device), says


@pytest.mark.eager
def test_bounds_are_the_definition(ruled, device):
    rule, says = ruled
    bounds = rule.bounds(48, device)
    assert (bounds.dtype, bounds.shape) == (torch.int32, (1, 48, 2))
    dense = torch.ones(1, 3, 2, dtype=torch.bool, device=device)
    for top_left in (False, True):
        diagonal = 0 if top_left else 13
        got = visible_keys(dense, (16, 32), 40, 53, False, top_left, bounds[0])[0]
        for query in range(40):
            at = query + diagonal
            want = [at < 48 and says(at, key) for key in range(53)]
            assert got[query].tolist() == want, (query, top_left)


@pytest.mark.eager
def test_prefixes_and_documents_of_each_sequence(device):
    lengths = starts(0, 3, device=device, dtype=torch.int64)
    bounds = TokenRule.prefix(lengths).bounds(4, device)
    assert bounds[..., 0].eq(0).all()
    assert bounds[..., 1].tolist() == [[0, 1, 2, 3], [2, 2, 2, 3]]
    documents = torch.stack([starts(0, 1, 4), starts(0, 2, 2)]).to(device)
    bounds = (TokenRule.document(documents) & TokenRule.causal()).bounds(4, device)
    assert bounds[0].tolist() == [[0, 0], [1, 1], [1, 2], [1, 3]]
    assert (bounds[1, 2:, 0] > bounds[1, 2:, 1]).all()
    # what they are made of may change later
    rule = TokenRule.prefix(lengths)
    lengths.fill_(9)
    assert rule.bounds(4, device)[0, 0, 1] == 0


# each kind of tile with rules that cut it
CASES = [
    (Shape(1, 37, 40, 1, 1, 16), (16, 16), "window", False),
    (Shape(1, 33, 33, 2, 1, 16), (32, 16), "document and window", True),
    (Shape(1, 20, 50, 1, 1, 16), (16, 64), "prefix", False),
    (Shape(1, 3, 40, 2, 1, 16), (16, 16), "document", False),
    (Shape(1, 20, 40, 1, 1, 16), (64, 32), "left", True),
]


@pytest.mark.parametrize(
    ("shape", "block", "name", "causal"), CASES, ids=[f"{b}-{n}" for _, b, n, _ in CASES]
)
def test_matches_reference(shape, block, name, causal, device):
    case = make_case(shape, torch.float32, device, "all", block, spare=1, causal=causal)
    rule = RULES[name][0](device)
    check(case.with_options(layout=case.options["layout"].with_token_rule(rule)))


@pytest.mark.parametrize("align", ["bottom-right", "top-left"])
def test_packed_matches_reference(align, device):
    """Sequences with rules of their own, of many queries and of a few."""
    shape = Packed((18, 1, 0), (20, 24, 5), 2, 1, 16, padding=3)
    case = make_packed(shape, torch.float32, device, causal=False, align=align)
    rule = TokenRule.prefix(starts(7, 20, 2, device=device))
    layout = case.options["layout"].with_token_rule(rule)
    check(case.with_options(layout=layout))


def test_splits_pages_and_layouts_of_sequences(device):
    case = make_packed(Packed((1, 3), (40, 17), 2, 1, 16), torch.float32, device, num_splits=2)
    layout = case.options["layout"]
    layouts = [layout.with_token_rule(rule) for rule in (TokenRule.window(21, 0), None)]
    case = case.with_options(layout=BlockSparseLayout.batched(layouts))
    check(case, grad=False)
    assert_same(run(paged(case, 5), grad=False), run(case, grad=False))


def hidden(layout, seqlen_q, seqlen_k, causal):
    bounds = layout.token_bounds[0]
    seen = visible_keys(
        layout.to_dense(), layout.block_size, seqlen_q, seqlen_k, causal, False, bounds
    )
    return ~seen.flatten(0, 1).any(0)


@pytest.mark.parametrize(
    ("block", "seqlens"),
    [((16, 16), (50, 50)), ((16, 64), (20, 60)), ((64, 16), (3, 58))],
    ids=str,
)
def test_keys_that_a_rule_hides_from_all_may_be_nan(block, seqlens, device):
    """In one tile there are rows that see keys ahead of a gap, and others that see those behind."""
    rule = TokenRule.document(starts(0, 21, 23, 43, device=device)) & TokenRule.window(1, 2)
    case = make_case(Shape(1, *seqlens, 1, 1, 16), torch.float32, device, "all", block)
    kept = case.options["layout"].to_dense()
    kept[..., ::2, :1] = False
    layout = BlockSparseLayout.from_dense(kept, block).with_token_rule(rule)
    case = case.with_options(layout=layout, causal=False)
    unseen = hidden(layout, *seqlens, False)
    assert unseen.any()
    want = run(case)
    bad = {name: case.inputs[name].clone() for name in ("k", "v")}
    for x in bad.values():
        x[:, unseen] = float("nan")
    assert_same(run(case.with_inputs(**bad)), want)


# a window ends with a block, and its other end is one key short of one
@pytest.mark.parametrize(
    ("block", "name", "causal"),
    [
        ((16, 16), (47, 46), False),
        ((16, 16), (46, 47), False),
        ((16, 32), "document", False),
        ((64, 16), "prefix", True),
    ],
    ids=str,
)
def test_whole_blocks_are_found(block, name, causal, device):
    """The kernels that plan find what plain PyTorch finds."""
    rows, cols = (-(-80 // side) for side in block)
    kept = torch.rand(2, rows, cols, generator=torch.Generator().manual_seed(0)) < 0.8
    layout = BlockSparseLayout.from_dense(kept, block).to(device)
    rule = TokenRule.window(*name) if isinstance(name, tuple) else RULES[name][0](device)
    layout = layout.with_token_rule(rule)
    specs = (
        ListSpec(False, 64, 1, 1, causal),
        ListSpec(False, block[0], 2, 2, causal),
        ListSpec(True, 32, 2, 1, causal),
    )
    assert_planned_alike(layout, *specs, device=device, rule=layout._rule)


@pytest.mark.eager
def test_a_block_is_whole_if_all_its_tokens_are(ruled, device):
    rule, says = ruled
    layout = BlockSparseLayout.from_dense(
        torch.ones(4, 2, dtype=torch.bool, device=device), (16, 32)
    )
    layout = layout.with_token_rule(rule)
    made = layout._crow, layout._col, 2, (16, 32)
    lists = defined_lists(*made, ListSpec(False, 16, 1, 1, False), layout._rule)
    for row in range(4):
        whole = [
            all(says(16 * row + i, 32 * col + j) for i in range(16) for j in range(32))
            for col in range(2)
        ]
        assert int(lists.whole[row]) == sum(whole), row


def of_flex(says):
    """A rule on tensors, as FlexAttention's masks are given."""
    return lambda b, h, q, k: says(q, k)


FLEX = {
    "window": (TokenRule.window(20, 9), lambda q, k: (q - k <= 20) & (k - q <= 9)),
    "causal document": (
        TokenRule.document(starts(0, 50, 75, 128)) & TokenRule.causal(),
        lambda q, k: (
            (k <= q) & ((q >= 50).int() + (q >= 75).int() == (k >= 50).int() + (k >= 75).int())
        ),
    ),
    "prefix": (TokenRule.prefix(40), lambda q, k: (k < 40) | (k <= q)),
}


@pytest.mark.filterwarnings("ignore:.*without torch.compile")
@pytest.mark.eager
@pytest.mark.parametrize("name", FLEX)
def test_flex_attention_agrees(name):
    """Its backward has no CPU, so gradients are those of the mask."""
    rule, says = FLEX[name]
    block_mask = create_block_mask(
        of_flex(says), None, None, 128, 128, device="cpu", BLOCK_SIZE=(32, 32)
    )
    layout = BlockSparseLayout.from_dense(block_mask.to_dense()[0].bool(), 32)
    layout = layout.with_token_rule(rule)
    m = Maker("cpu", torch.float64)
    q, k, v, dout = (m.randn(1, 128, 2, 16).double() for _ in range(4))
    transposed = [x.transpose(1, 2).requires_grad_() for x in (q, k, v)]
    flex = flex_attention(*(x.detach() for x in transposed), block_mask=block_mask)
    got = blocksparse_attention_reference(q, k, v, layout, causal=False)
    torch.testing.assert_close(got, flex.transpose(1, 2), rtol=1e-12, atol=1e-12)

    position = torch.arange(128)
    mask = says(position[:, None], position)
    want = torch.nn.functional.scaled_dot_product_attention(*transposed, mask)
    torch.testing.assert_close(want, flex, rtol=1e-12, atol=1e-12)
    exact = torch.autograd.grad(want, transposed, dout.transpose(1, 2))
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    mine = blocksparse_attn_func(*leaves, layout, causal=False)
    assert_close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
    assert_close(mine, got.float())
    for one, grad in zip(torch.autograd.grad(mine, leaves, dout.float()), exact, strict=True):
        assert_close(one, grad.transpose(1, 2).float())


@pytest.mark.eager
def test_layouts_with_rules_are_values(device, tmp_path):
    plain = BlockSparseLayout.local_strided(2, 64, 16, 1, 3, device=device)
    rule = TokenRule.window(20, 0)
    layout = plain.with_token_rule(rule)
    same = BlockSparseLayout(plain.crow, plain.col, 16, token_rule=TokenRule.window(20, 0))
    assert layout == same
    assert hash(layout) == hash(same)
    assert layout != plain
    assert plain != layout
    assert layout != plain.with_token_rule(TokenRule.window(19, 0))
    assert layout.with_token_rule(None) == plain
    assert plain.token_bounds is None
    assert torch.equal(layout.token_bounds, rule.bounds(64, device))
    layout.save(tmp_path / "layout.pt")
    others = BlockSparseLayout.load(tmp_path / "layout.pt", device), copy.deepcopy(layout)
    for other in (*others, pickle.loads(pickle.dumps(layout)), layout.to("cpu")):
        assert other == layout
    both = BlockSparseLayout.batched([layout, plain])
    assert both.token_bounds[0].tolist() == layout.token_bounds[0].tolist()
    assert both.token_bounds[1].tolist() == [[0, 2**31 - 1]] * 64
    assert repr(rule & TokenRule.prefix(3)) == "TokenRule.window[20, 0] & TokenRule.prefix[3]"


@pytest.mark.eager
def test_operators(device):
    values = torch.stack([starts(0, 1, 4), starts(0, 2, 2)]).to(device)
    for arguments in ((values, True, 9), (values[0], True, 9), (values[0], False, 9)):
        opcheck(token_bounds, arguments, test_utils=("test_schema", "test_faketensor"))
    case = make_case(Shape(1, 20, 40, 4, 2, 16), torch.float32, device)
    layout = case.options["layout"].with_token_rule(TokenRule.window(9, 9))
    csr = layout._crow, layout._col, layout.num_cols, 16, 16, False
    for kind in ("tall", "short", "dq", "dkdv") if walks_lists(device) else ():
        arguments = *csr, 2, 16, 4, True, kind, layout._rule
        opcheck(ops.plan, arguments, test_utils=("test_schema", "test_faketensor"))


@traced_alike
@pytest.mark.eager
def test_traces_whole(device, compiled):
    """A rule of tensors within the graph; others have the same graph."""
    plain = BlockSparseLayout.from_dense(torch.ones(3, 3, dtype=torch.bool, device=device), 16)

    def function(q, k, v, cu_seqlens):
        rule = TokenRule.document(cu_seqlens) & TokenRule.causal()
        return blocksparse_attn_func(q, k, v, plain.with_token_rule(rule)).sin().sum()

    fast = compiled(function)
    for values in ((0, 10, 40), (0, 25, 48)):
        m = Maker(device, torch.float32)
        leaves = [m.randn(1, 40, 2, 16).requires_grad_() for _ in range(3)]
        cu_seqlens = starts(*values, device=device)
        with torch._dynamo.config.patch(error_on_recompile=values[1] != 10):
            got = fast(*leaves, cu_seqlens)
        want = function(*leaves, cu_seqlens)
        torch.testing.assert_close(got, want)
        grads = (torch.autograd.grad(x, leaves) for x in (got, want))
        for one, exact in zip(*grads, strict=True):
            torch.testing.assert_close(one, exact)


@pytest.mark.device
def test_a_graph_captures_the_rule_of_each_replay(device):
    plain = BlockSparseLayout.from_dense(torch.ones(4, 4, dtype=torch.bool, device=device), 16)
    x = torch.randn(1, 64, 2, 64, device=device, dtype=torch.bfloat16)
    cu_seqlens = starts(0, 10, 64, device=device)

    def call():
        layout = plain.with_token_rule(TokenRule.document(cu_seqlens))
        return blocksparse_attn_func(x, x, x, layout, causal=False)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for middle in (10, 33):
        cu_seqlens[1] = middle
        graph.replay()
        assert torch.equal(out, call())


def test_the_portable_kernels_serve_rules(device, monkeypatch):
    """Lists are those of the portable kernels."""
    layout = BlockSparseLayout.local_strided(2, 64, 16, 1, 3, device=device)
    layout = layout.with_token_rule(TokenRule.window(9, 0))
    layout.prepare(2, 2, 64, torch.bfloat16, backward=True)
    assert {key[0] for key in layout._lists.known if isinstance(key[0], str)} == {
        "portable",
        "short",
        "dq",
        "dkdv",
    }


WRONG = [
    ("left must be an int, got float", TypeError, lambda: TokenRule.window(1.0, 0)),
    ("right must be from 0 to 2147483646, or -1, got -2", ValueError,
     lambda: TokenRule.window(0, -2)),
    ("lengths must be an int or a torch.Tensor, got list", TypeError,
     lambda: TokenRule.prefix([1])),
    ("lengths must be from 0 to 2147483646, got -1", ValueError, lambda: TokenRule.prefix(-1)),
    (r"lengths must be \[batch\] with one entry at least, got \[1, 1\]", ValueError,
     lambda: TokenRule.prefix(torch.zeros(1, 1, dtype=torch.int32))),
    ("cu_seqlens must be a torch.Tensor, got list", TypeError, lambda: TokenRule.document([0, 1])),
    ("cu_seqlens must be torch.int32 or torch.int64, got torch.float32", TypeError,
     lambda: TokenRule.document(torch.zeros(2))),
    (r"cu_seqlens\[2\] must be at least 4, got 3", ValueError,
     lambda: TokenRule.document(starts(0, 4, 3)).bounds(9)),
    (r"cu_seqlens\[0\] must be at least 0, got -1", ValueError,
     lambda: TokenRule.document(starts(-1, 4)).bounds(9)),
    (r"lengths\[1\] must be at least 0, got -2", ValueError,
     lambda: TokenRule.prefix(starts(1, -2)).bounds(9)),
    ("token_rule must be a TokenRule, got str", TypeError,
     lambda: square().with_token_rule("causal")),
    ("tensors of token_rule must be on the device of the layout, meta, got cpu", ValueError,
     lambda: square().to("meta").with_token_rule(TokenRule.prefix(starts(1)))),
    ("batch of token_rule must be one number, got 3 and 2|got 2 and 3", ValueError,
     lambda: (TokenRule.prefix(starts(1, 2)) & TokenRule.prefix(starts(1, 2, 3))).bounds(9)),
    ("batch of token_rule must be 1 or that of the layout, 2, got 3", ValueError,
     lambda: BlockSparseLayout.batched([square()] * 2).with_token_rule(
         TokenRule.prefix(starts(1, 2, 3)))),
    (r"must be made by causal\(\), .* got TokenRule\(\)", TypeError, TokenRule),
    (r"must be made by causal\(\), .* got TokenRule\('causal',\)", TypeError,
     lambda: TokenRule("causal")),
    (r"must be made by causal\(\), .* got TokenRule\(\(\),\)", TypeError, lambda: TokenRule(())),
    (r"must be made by causal\(\), .* got TokenRule\(\('band', 1\),\)", TypeError,
     lambda: TokenRule(("band", 1))),
    ("positions must be at least 0, got -1", ValueError, lambda: TokenRule.causal().bounds(-1)),
    (r"layouts\[0\] must have one token rule, got 2", ValueError,
     lambda: BlockSparseLayout.batched([square().with_token_rule(TokenRule.prefix(starts(1, 2)))])),
    ("batch of the layout's token_rule must be 1 or that of q, 1, got 2", ValueError,
     lambda: blocksparse_attn_func(*[torch.zeros(1, 9, 1, 16)] * 3, square().with_token_rule(
         TokenRule.prefix(starts(1, 2))))),
]  # fmt: skip


def square():
    return BlockSparseLayout.from_dense(torch.ones(2, 2, dtype=torch.bool), 16)


@pytest.mark.eager
@pytest.mark.parametrize(("message", "error", "call"), WRONG, ids=[row[0][:30] for row in WRONG])
def test_wrong_rules(message, error, call):
    with pytest.raises(error, match=message):
        call()
