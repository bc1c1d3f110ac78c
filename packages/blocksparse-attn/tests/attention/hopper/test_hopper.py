"""The forward kernel for Hopper: what it takes, what it builds into, and its numbers on a GPU."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from attn_common import detect
from blocksparse_attn import BlockSparseLayout
from blocksparse_attn._attention.call import Bounds, ListForm, Options, Pattern, Tensors, Walks
from blocksparse_attn._attention.tiles import (
    HALVED,
    hopper_shape,
    hopper_tile,
    takes_hopper_forward,
)
from blocksparse_attn._layout.kept_lists import spec_of

from ..._linked.budget import assert_same
from ..._linked.gpus import absent_gpu, chosen, compiling, counting, recording
from ..._linked.spills import check_builds
from ..._linked.views import VIEWS
from ..._numerics import (
    Packed,
    Shape,
    check,
    make_case,
    make_packed,
    only_portable,
    run,
    takes_hopper,
)
from .._aot import Config, launch_forward
from ._hopper import served

HOPPER = "nvidia:sm_90"

# ---- what it takes


def pattern_of(block_q: int, block_k: int, shared: bool = False) -> Pattern:
    return Pattern(shared, 4, 4, block_q, block_k, False, 4)


@pytest.mark.eager
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "dtype", "block", "causal", "taken"),
    [
        (128, 128, torch.bfloat16, (64, 64), True, True),
        (64, 64, torch.float16, (128, 128), True, True),
        (40, 128, torch.bfloat16, (128, 32), True, True),
        (128, 8, torch.bfloat16, (64, 32), False, True),
        (128, 128, torch.bfloat16, (32, 64), False, True),
        (128, 128, torch.bfloat16, (32, 64), True, False),  # keys that no row sees
        (128, 128, torch.bfloat16, (16, 16), True, True),
        (32, 32, torch.bfloat16, (64, 64), True, False),  # half of a tile would be padding
        (192, 128, torch.bfloat16, (64, 64), True, False),
        (128, 128, torch.float32, (64, 64), True, False),
    ],
)
def test_serves(head_dim, head_dim_v, dtype, block, causal, taken):
    q, v = (torch.empty(1, 20, 2, d, dtype=dtype, device="meta") for d in (head_dim, head_dim_v))
    x, pattern, options = Tensors(q, q, v), pattern_of(*block), Options(0.1, causal, 0, False)
    with absent_gpu(HOPPER):
        assert takes_hopper_forward(x, pattern, options) == taken
        for scale in (0.0, -1.0, 1e-60):
            assert not takes_hopper_forward(x, pattern, options._replace(softmax_scale=scale))
        assert not takes_hopper_forward(x._replace(block_table=q), pattern, options)
        with only_portable():
            assert not takes_hopper_forward(x, pattern, options)
    with absent_gpu("nvidia:sm_80"):
        assert not takes_hopper_forward(x, pattern, options)


@pytest.mark.eager
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tiles_fit_the_barriers_of_the_hardware(head_dim):
    tile = hopper_tile(head_dim)
    # eight numbers are left to stages; see ``pipeline.EMPTY``
    assert tile.stages_k + tile.stages_v <= 8
    # 240 registers of two consumers and 32 of the copying warp's group
    assert 128 * (2 * 240 + 32) <= 65536


@pytest.mark.eager
def test_who_shares_a_tile():
    """One list for two heads of one pattern, or for 128 positions of one head."""
    for block_q, group, shared, heads, positions, span in (
        (64, 4, True, 2, 64, 64),
        (32, 4, True, 2, 64, 64),
        (64, 3, True, 1, 128, 128),
        (128, 4, True, 1, 128, 128),
        (64, 4, False, 1, 128, 128),
        (16, 1, False, 1, 128, 128),
    ):
        shape = hopper_shape(128, block_q, group, shared)
        assert (shape.heads, shape.positions, shape.span) == (heads, positions, span)


@pytest.mark.eager
def test_lists_of_calls_that_it_refuses_are_the_portable_ones():
    with absent_gpu(HOPPER):
        choice = detect("meta"), pattern_of(64, 64), ListForm(4, 128, 2, True)
        assert spec_of("tall", *choice).span == 128
        assert spec_of("portable", *choice).span == 64
        with only_portable():
            assert spec_of("tall", *choice) == spec_of("portable", *choice)


@pytest.mark.aot
@pytest.mark.parametrize(
    ("block", "cols", "shared", "causal", "taken"),
    [
        ((64, 64), 2, False, True, True),
        ((64, 64), 128, False, True, True),
        ((64, 64), 129, False, True, False),  # longer rows are no faster
        ((64, 64), 2, False, False, False),
        ((64, 64), 2, True, True, False),  # two heads share a tile
        ((32, 32), 2, False, True, False),
        ((64, 32), 2, False, True, False),
        ((128, 64), 2, False, True, False),
        ((128, 128), 2, False, True, False),
    ],
)
def test_who_takes_half_steps(block, cols, shared, causal, taken):
    """The lists and the launch agree; the layout decides, and whether a call is packed does not."""
    from blocksparse_attn._attention.launch import Plan

    pattern, options = Pattern(shared, 4, cols, *block, False, 4), Options(0.1, causal, 0, False)
    q, k = (torch.empty(40, n, 128, dtype=torch.bfloat16, device="meta") for n in (4, 2))
    cu = torch.empty(3, dtype=torch.int32, device="meta")
    with absent_gpu(HOPPER):
        choice = detect("meta"), pattern, ListForm(2, 128, 2, causal)
        assert spec_of("tall", *choice).halves == taken
        for kind in "short", "portable", "dq":
            assert not spec_of(kind, *choice).halves
        for x in Tensors(q[None], k[None], k[None]), Tensors(q, k, k, cu, cu):
            launch = Plan(x, pattern, options)._tall.launch
            assert launch._constants["OPTIONS"].HALVES is taken


# ---- what it builds into

CONFIGS = {
    "causal": Config(128),
    "long": Config(128),
    "full": Config(128, causal=False),
    "packed": Config(128, packed=True),
    "packed full": Config(128, packed=True, causal=False),
    "shared": Config(128, shared=True),
    "wide": Config(128, block=(128, 128)),
    "small": Config(128, block=(32, 32)),
    "smallest": Config(128, block=(16, 16)),
    "mixed": Config(128, block=(16, 128), causal=False),
    "narrow": Config(64),
    "unequal": Config(96, head_dim_v=40),
}


@pytest.mark.aot
@pytest.mark.parametrize("kind", chosen(CONFIGS, ["packed", "smallest"]))
def test_builds(kind, tmp_path):
    with compiling(HOPPER, tmp_path) as builds:
        # a layout that is too long for half steps
        launch_forward(CONFIGS[kind], 2 * HALVED if kind == "long" else 1024)
    (build,) = builds
    assert build.kernel == "hopper_query_kernel"
    check_builds(HOPPER, kind, builds)
    for instruction in ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG"):
        assert instruction in build.sass, instruction


@pytest.mark.aot
@pytest.mark.parametrize(("tokens_q", "tokens_k"), [(0, 90), (90, 0), (0, 0)])
@pytest.mark.parametrize("packed", [False, True], ids=["fixed", "packed"])
def test_empty_tensors_are_not_mapped(packed, tokens_q, tokens_k):
    """The copy engine has no map of a tensor without tokens, for whatever lengths a call allows."""
    from blocksparse_attn._attention.launch import Plan

    q, k = (torch.empty(n, 2, 128, dtype=torch.bfloat16) for n in (tokens_q, tokens_k))
    cu = torch.zeros(3, dtype=torch.int32)
    x = Tensors(q, k, k, cu, cu) if packed else Tensors(q[None], k[None], k[None])
    walk = tuple(torch.zeros(5, dtype=torch.int64) for _ in range(4))
    with recording(HOPPER) as launches:
        plan = Plan(x, pattern_of(64, 64), Options(0.1, True, 1, False))
        out, lse = plan.forward(x, Walks(tall=walk), Bounds(200, 200))
    assert not launches
    assert not out.any()
    assert (lse == -math.inf).all()


@pytest.mark.aot
def test_maps_of_packed_queries_end_with_their_tensor():
    """Calls of one form differ in the number of tokens, and may begin at the same place."""
    with absent_gpu(HOPPER):
        from blocksparse_attn._attention.hopper.queries.launch import PackedForm

        long, short = (torch.empty(n, 2, 128, dtype=torch.bfloat16) for n in (900, 300))
        form = PackedForm(long, 64, 128)
        maps = form(long), form(short)
        assert [one.shape for one in maps] == [[1, 1, 2, 900, 128], [1, 1, 2, 300, 128]]
        maps[0].keep([1], shipped=False)
        assert form(long).encoded(shipped=False) is None


@pytest.mark.aot
@pytest.mark.parametrize("lengths", [(16, 4096, 5000), (16_384, 40_000, 70_001)], ids=str)
@pytest.mark.parametrize("kind", ["causal", "packed"])
def test_lengths_make_one_variant(kind, lengths):
    """Layouts that have half steps make one, and longer ones another."""
    with counting(HOPPER) as variants:
        for length in lengths:
            launch_forward(CONFIGS[kind], length)
    assert [len(keys) for keys in variants.values()] == [1]


# ---- numbers

SHAPES = [
    Shape(2, 128, 128, 2, 2, 128),
    Shape(1, 9, 9, 1, 1, 64),
    Shape(2, 333, 900, 8, 2, 128),  # a chunk: its first tile begins ahead of it
    Shape(1, 70, 150, 8, 4, 128),  # and ends with it
    Shape(2, 900, 333, 4, 1, 64),  # rows ahead of the first key
    Shape(2, 129, 257, 2, 1, 96),
    Shape(1, 500, 513, 2, 2, 40, 128),
    Shape(1, 200, 300, 2, 1, 128, 24),
    Shape(1, 300, 0, 2, 1, 128),
    Shape(3, 3000, 3000, 8, 2, 128),  # more tiles than programs
]
BLOCKS = [(64, 64), (128, 128), (128, 64), (64, 32), (32, 32), (128, 32), (64, 16), (16, 16)]


@pytest.mark.device
@pytest.mark.parametrize("pattern", ["random", "local"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, pattern, device):
    served(make_case(shape, torch.bfloat16, device, pattern, (64, 64), spare=1))


@pytest.mark.device
@pytest.mark.parametrize("shared", [False, True], ids=["per_head", "shared"])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_blocks(block, shared, device):
    shape = Shape(2, 700, 900, 4, 2, 128)
    served(make_case(shape, torch.float16, device, "random", block, shared=shared))


@pytest.mark.device
@pytest.mark.parametrize("block", [(64, 64), (16, 128), (128, 32)], ids=str)
@pytest.mark.parametrize("spare", [0, 3])
def test_without_a_causal_mask(spare, block, device):
    shape = Shape(2, 700, 900, 4, 2, 128)
    case = make_case(shape, torch.bfloat16, device, "random", block, spare=spare, causal=False)
    served(case)


@pytest.mark.device
@pytest.mark.parametrize("pattern", ["all", "none"])
def test_everything_and_nothing(pattern, device):
    got = served(
        make_case(Shape(1, 700, 700, 4, 1, 128), torch.bfloat16, device, pattern, (64, 64))
    )
    if pattern == "none":
        assert not got["out"].any()
        assert (got["lse"] == -math.inf).all()


@pytest.mark.device
@pytest.mark.parametrize("shared", [False, True], ids=["per_head", "shared"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_packed(causal, shared, device):
    lengths = (500, 0, 129, 128, 1, 9, 3, 300), (500, 30, 257, 4096, 5, 9, 100, 100)
    shape = Packed(*lengths, 6, 3, 128, padding=7)
    served(
        make_packed(
            shape, torch.bfloat16, device, "random", (64, 64), shared=shared, causal=causal, spare=1
        )
    )


@pytest.mark.device
def test_many_short_sequences(device):
    shape = Packed((50,) * 300, (90,) * 300, 4, 2, 64)
    served(make_packed(shape, torch.bfloat16, device, "local", (64, 64)))


@pytest.mark.device
@pytest.mark.parametrize("form", ["fixed", "packed"])
def test_packed_is_bitwise_the_fixed_form_and_a_chunk_its_whole(form, device):
    whole = make_case(Shape(1, 900, 900, 4, 2, 128), torch.bfloat16, device, "local", (64, 64))
    want = run(whole, grad=False)
    q, k, v = whole.inputs.values()
    if form == "fixed":
        chunk = whole.with_inputs(q=q[:, 333:])
        got = run(chunk, grad=False)
        assert torch.equal(got["out"], want["out"][:, 333:])
        assert torch.equal(got["lse"], want["lse"][..., 333:])
        return
    packed = make_packed(Packed((567, 300), (900, 300), 4, 2, 128), torch.bfloat16, device)
    packed = packed.with_options(layout=whole.options["layout"])
    packed.inputs["q"][:567], packed.inputs["k"][:900] = q[0, 333:], k[0]
    packed.inputs["v"][:900] = v[0]
    got = run(packed, grad=False)
    assert torch.equal(got["out"][:567], want["out"][0, 333:])
    assert torch.equal(got["lse"][:, :567], want["lse"][0, :, 333:])


@pytest.mark.device
def test_keys_that_nobody_sees(device):
    """NaN in blocks kept by rows that the chunk has not, behind the end, and around the inputs."""
    kept = torch.zeros(16, 16, dtype=torch.bool)
    kept[torch.arange(16), torch.arange(16)] = True
    kept[8, 2] = True  # rows from 512 on; its neighbour in the tile does not keep it
    layout = BlockSparseLayout.from_dense(kept.expand(2, 16, 16), 64).to(device)
    case = make_case(Shape(1, 400, 980, 2, 2, 128), torch.bfloat16, device)
    case = case.with_options(layout=layout)
    want = served(case)
    bad = {name: t.clone() for name, t in case.inputs.items()}
    for name in "kv":
        bad[name][:, :576] = math.nan
    assert_same(run(case.with_inputs(**bad), grad=False), want)
    inside = {name: VIEWS["inside"](t) for name, t in case.inputs.items()}
    assert_same(run(case.with_inputs(**inside), grad=False), want)


@pytest.mark.device
def test_neighbours_of_a_packed_sequence_may_be_nan(device):
    shape = Packed((300, 100, 200), (300, 350, 270), 4, 2, 128, padding=9)
    case = make_packed(shape, torch.bfloat16, device, "local", (64, 64))
    want = served(case)
    bad = {name: t.clone() for name, t in case.inputs.items()}
    for name, middle in (("q", slice(300, 400)), ("k", slice(300, 650)), ("v", slice(300, 650))):
        alone = torch.full_like(bad[name], math.nan)
        alone[middle] = bad[name][middle]
        bad[name] = alone
    got = run(case.with_inputs(**bad), grad=False)
    assert torch.equal(got["out"][300:400], want["out"][300:400])
    assert torch.equal(got["lse"][:, 300:400], want["lse"][:, 300:400])


@pytest.mark.device
@pytest.mark.parametrize("view", sorted(VIEWS))
def test_views(view, device):
    case = make_case(Shape(2, 300, 333, 4, 2, 128), torch.bfloat16, device, "local", (64, 64))
    want = run(case, grad=False)
    seen = {name: VIEWS[view](t) for name, t in case.inputs.items()}
    assert_same(run(case.with_inputs(**seen), grad=False), want)


@pytest.mark.device
@pytest.mark.parametrize("block", [(64, 64), (16, 16)], ids=str)
def test_repeats_and_independence(block, device):
    case = make_case(Shape(3, 1500, 1500, 6, 6, 128), torch.bfloat16, device, "local", block)
    want = run(case, grad=False)
    differing = torch.zeros((), dtype=torch.int64, device=device)
    with torch.no_grad():
        for _ in range(300):
            out, lse = case()
            differing += (out != want["out"]).sum() + (lse != want["lse"]).sum()
    assert not differing
    alone = run(case.with_inputs(**{n: t[1:2] for n, t in case.inputs.items()}), grad=False)
    assert torch.equal(alone["out"][0], want["out"][1])
    assert torch.equal(alone["lse"][0], want["lse"][1])


@pytest.mark.device
def test_graphs_do_not_share_a_counter(device):
    """Two graphs that were captured on one stream may run at once."""
    from blocksparse_attn._linked.hopper import tickets

    case = make_case(Shape(2, 2000, 2000, 8, 8, 128), torch.bfloat16, device, "local", (64, 64))
    want = run(case, grad=False)
    graphs, results = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph in graphs:
        with torch.no_grad(), torch.cuda.graph(graph):
            results.append(case())
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for out, lse in results:
        assert torch.equal(out, want["out"])
        assert torch.equal(lse, want["lse"])
    assert all(int(t) == 0 for t in tickets._tickets.values())


@pytest.mark.device
def test_calls_that_it_refuses_share_a_layout_with_those_it_takes(device):
    """A scale that is not positive: the portable kernel walks lists of its own."""
    case = make_case(Shape(1, 700, 700, 4, 2, 128), torch.bfloat16, device, "random", (64, 64))
    served(case)
    refused = case.with_options(softmax_scale=-0.1)
    assert not takes_hopper(refused)
    check(refused, grad=False)
    check(case.with_options(layout=copy.copy(case.options["layout"])))
