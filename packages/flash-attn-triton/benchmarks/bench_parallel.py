"""Time context parallelism, as a share of one GPU's speed, beside what others offer.

    torchrun --nproc-per-node=2 benchmarks/bench_parallel.py --json two.json
    torchrun --nproc-per-node=4 benchmarks/bench_parallel.py --json four.json
    python benchmarks/bench_parallel.py --plot parallel.png two.json four.json

One GPU's speed is that of the plain function on the whole sequence with 1 / n of the heads. It and
a way are timed in turns, as GPUs that are hot are slower. A time is that of ten calls between two
events, the largest of all ranks, the median of seven such times.
Beside ours stand the same with ``head_group`` (``heads``), an all-gather of keys with our kernel,
where nothing overlaps, and PyTorch's ``context_parallel`` with its own kernels and with ours.
Packed sequences have no rival there.

Every output and every gradient is compared with the plain function before it is timed; what is not
right ends the run. What cannot run (PyTorch's on a CPU) is recorded with its error.
CUDA graphs come last, when all else is in the file. ``graphs`` are ours and one GPU in graphs, so
without the host: a forward pass, and both passes. ``graph`` is a deterministic one of both.
NVLink multicast stays off unless NCCL_NVLS_ENABLE is set.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _linked.plot import Panel, Series, draw
from _linked.ranks import (
    Results,
    Row,
    Way,
    WrongResultError,
    captured,
    check,
    differentiate,
    in_turns,
    joined,
    machine,
    parser,
    time_passes,
    way_of,
)
from flash_attn_triton import distributed, flash_attn_func, flash_attn_varlen_func
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS_Q, HEADS_K, HEAD_DIM = 32, 8, 128
MIX = (8192, 4096, 2048, 1024, 512, 512)


def peak_of(way: Way, device: torch.device) -> int | None:
    """Return the bytes that both passes take at most; None where nobody counts them."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    differentiate(way)
    return torch.cuda.max_memory_allocated() - before


def own(x: Tensor, **options: Any) -> Tensor:
    """Return this rank's part of what is whole."""
    return distributed.shard(x, dist.get_world_size(), dist.get_rank(), **options)


class AllGather(torch.autograd.Function):
    """The shards of all ranks in the order of tokens; a reduce-scatter adds up the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Gather ``[1, tokens, heads, width]``."""
        every = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(every, x)
        return distributed.unshard(every)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if dist.get_backend() == "gloo":
            # which has no reduce-scatter of lists
            dist.all_reduce(grad := grad.contiguous())
            return own(grad)
        ranks = dist.get_world_size()
        parts = [distributed.shard(grad, ranks, rank).contiguous() for rank in range(ranks)]
        found = torch.empty_like(parts[0])
        dist.reduce_scatter(found, parts)
        return found


def gathered(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute with the keys of all ranks, gathered first: a call for each run of queries."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    both: Any = AllGather.apply(torch.cat([k, v], -1))
    half = q.shape[1] // 2
    parts: list[Any] = []
    for part, rows in ((rank, q[:, :half]), (2 * ranks - 1 - rank, q[:, half:])):
        keys, values = both[:, : (part + 1) * half].split(HEAD_DIM, -1)
        parts.append(flash_attn_func(rows, keys, values, causal=True))
    return torch.cat(parts, 1)


@contextlib.contextmanager
def ours(every: list[Tensor], deterministic: bool = False, **_: Any) -> Iterator[Way]:
    """The functions of this package."""
    options = {"causal": True, "deterministic": deterministic}
    function = functools.partial(distributed.flash_attn_func, **options)
    yield way_of(function, [own(x) for x in every], cut=own)


@contextlib.contextmanager
def all_gather(every: list[Tensor], **_: Any) -> Iterator[Way]:
    """Our kernel on keys that are gathered first."""
    with ours(every) as way:
        yield way._replace(function=gathered)


@contextlib.contextmanager
def torch_parallel(every: list[Tensor], backend: SDPBackend, repeats: bool) -> Iterator[Way]:
    """PyTorch's, which cuts heads-first buffers where they lie."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh(every[0].device.type, (dist.get_world_size(),))
    buffers = [x.transpose(1, 2).contiguous() for x in every]

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if repeats:
            k, v = (x.repeat_interleave(HEADS_Q // HEADS_K, 1) for x in (k, v))
        options = {"is_causal": True, "enable_gqa": not repeats}
        return functional.scaled_dot_product_attention(q, k, v, **options)

    whole = set(buffers)
    with (
        context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=whole),
        sdpa_kernel([backend]),
    ):
        leaves = [x.detach().requires_grad_() for x in buffers[:3]]
        yield Way(function, leaves, buffers[3], lambda x: own(x.transpose(1, 2), dim=2))


@contextlib.contextmanager
def torch_ours(every: list[Tensor], backend: SDPBackend, repeats: bool) -> Iterator[Way]:
    """PyTorch's, with our kernels registered."""
    from flash_attn_triton.integrations import torch as integration

    with (
        integration.register(),
        torch_parallel(every, SDPBackend.FLASH_ATTENTION, repeats) as way,
    ):
        yield way


@contextlib.contextmanager
def heads(every: list[Tensor], **_: Any) -> Iterator[Way]:
    """The functions of this package, with heads in place of tokens distributed while they run."""
    alone, _ = dist.new_subgroups(1)
    groups = {"group": alone, "head_group": dist.group.WORLD}
    function = functools.partial(distributed.flash_attn_func, causal=True, **groups)
    cut = functools.partial(own, shard="contiguous")
    yield way_of(function, [cut(x) for x in every], cut=cut)
    dist.destroy_process_group(alone)


WAYS: dict[str, Callable[..., contextlib.AbstractContextManager[Way]]] = {
    "ours": ours,
    "heads": heads,
    "all-gather": all_gather,
    "torch": torch_parallel,
    "torch-ours": torch_ours,
}


# one sequence on one GPU
plain_dense = functools.partial(flash_attn_func, causal=True)


def draw_inputs(tokens: int, device: torch.device) -> list[Tensor]:
    """Return q, k, v and the gradient of the output, the same on every rank."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    g = torch.Generator(device).manual_seed(0)
    heads = HEADS_Q, HEADS_K, HEADS_K, HEADS_Q
    return [
        torch.randn(1, tokens, n, HEAD_DIM, generator=g, device=device, dtype=dtype) for n in heads
    ]


def mix_of(tokens: int, ranks: int) -> list[int]:
    """Return the lengths of a pack: ``MIX`` over and over, shorter where ranks have less."""
    scale = max(1, 8192 // tokens)
    left, lengths = tokens * ranks, []
    while left:
        lengths.append(min(left, max(1, MIX[len(lengths) % len(MIX)] // scale)))
        left -= lengths[-1]
    return lengths


def measure_dense(tokens: int, device: torch.device, names: list[str]) -> list[Row]:
    """Measure one sequence of so many tokens a rank."""
    every = draw_inputs(tokens * dist.get_world_size(), device)
    results = differentiate(way_of(plain_dense, every))
    rows = []
    for name in names:
        is_rival = name.startswith("torch")
        # not every version takes fewer heads of keys
        for repeats in (False, True) if is_rival else (False,):
            row: Row = {"case": "dense", "way": name}
            if is_rival:
                row["repeats_keys"] = repeats
            try:
                with WAYS[name](every, backend=SDPBackend.CUDNN_ATTENTION, repeats=repeats) as way:
                    check(f"dense, {name}", differentiate(way), [way.cut(x) for x in results])
                    add_times(row, way, plain_way(plain_dense, every), device)
                break
            except (RuntimeError, NotImplementedError, ValueError, AssertionError) as error:
                if not is_rival or isinstance(error, WrongResultError):
                    raise
                row["error"] = str(error)[:300]
        rows.append(row)
    return rows


def measure_packed(tokens: int, device: torch.device) -> list[Row]:
    """Measure packed sequences of so many tokens a rank."""
    way, one, wanted, row = packed_ways(tokens, device)
    check("packed", differentiate(way), wanted)
    add_times(row, way, one, device)
    return [row]


def packed_ways(tokens: int, device: torch.device) -> tuple[Way, Way, list[Tensor], Row]:
    """Return ours and one GPU's way, this rank's part of the results, and what is told of both."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    lengths = mix_of(tokens, ranks)
    offsets = [sum(lengths[:b]) for b in range(len(lengths) + 1)]
    plan = distributed.ShardPlan(offsets, ranks, causal=True)
    starts = torch.tensor(offsets, dtype=torch.int32, device=device)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Any:
        longest = max(lengths)
        found: Any = flash_attn_varlen_func(
            q[0], k[0], v[0], starts, starts, longest, longest, causal=True
        )
        return found[None]

    def cut(x: Tensor) -> Tensor:
        return plan.shard(x[0], rank)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return distributed.flash_attn_varlen_func(q, k, v, plan)

    every = draw_inputs(tokens * ranks, device)
    way = way_of(function, [cut(x) for x in every], cut=cut)
    row: Row = {"case": "packed", "way": "ours", "lengths": lengths}
    row["pairs_over_mean"] = max(plan.layout.pairs) * ranks / sum(plan.layout.pairs)
    return way, plain_way(plain, every), [cut(x) for x in differentiate(way_of(plain, every))], row


def plain_way(plain: Callable[..., Tensor], every: list[Tensor]) -> Way:
    """Return what one GPU does with its share of the heads."""
    heads = max(1, HEADS_K // dist.get_world_size())
    group = HEADS_Q // HEADS_K
    some = [x[:, :, : heads * (group if x.shape[2] == HEADS_Q else 1)] for x in every]
    return way_of(plain, some)


def add_times(row: Row, way: Way, one: Way, device: torch.device) -> None:
    """Add the times of a way, and of one GPU."""
    row["peak_bytes"] = peak_of(way, device)
    base, row["ms"] = time_passes([one, way], device)
    row["one_gpu_ms"] = of_all_heads(base, one)
    row["share"] = [x / y for x, y in zip(row["one_gpu_ms"], row["ms"], strict=True)]


def of_all_heads(ms: list[float], one: Way) -> list[float]:
    """Return one GPU's times as those of 1 / n of all heads, where a head is not cut."""
    ranks, heads = dist.get_world_size(), one.leaves[1].shape[2]
    return [x * HEADS_K / (heads * ranks) for x in ms]


def measure_in_graphs(tokens: int, device: torch.device) -> list[Row]:
    """Measure both cases in CUDA graphs."""
    every = draw_inputs(tokens * dist.get_world_size(), device)
    with ours(every) as way:
        dense = in_graphs("dense", way, plain_way(plain_dense, every), device)
    way, one, *_ = packed_ways(tokens, device)
    return [dense, in_graphs("packed", way, one, device)]


def in_graphs(case: str, way: Way, one: Way, device: torch.device) -> Row:
    """Return the times of a forward pass and of both, replayed, once these gave what calls give."""
    row: Row = {"case": case, "way": "graphs"}
    replays = []
    wanted = differentiate(way)
    try:
        for each in (one, way):
            with torch.no_grad():
                replays.append(captured(functools.partial(each.function, *each.leaves))[0])
            replay, got = captured(functools.partial(differentiate, each))
            replays.append(replay)
        replay()
        check(f"{case}, graphs", got, wanted)
        times = in_turns(replays, device)
    except WrongResultError:
        raise
    except RuntimeError as error:
        return {**row, "error": str(error)[:300]}
    row["one_gpu_graph_ms"], row["graph_ms"] = of_all_heads(times[:2], one), times[2:]
    pairs = zip(row["one_gpu_graph_ms"], row["graph_ms"], strict=True)
    return {**row, "graph_share": [x / y for x, y in pairs]}


def capture(tokens: int, device: torch.device) -> Row:
    """Put both passes into a graph, and hold its gradients to those of a call, bit for bit."""
    row: Row = {"case": "dense", "way": "graph"}
    every = draw_inputs(tokens * dist.get_world_size(), device)
    with ours(every, deterministic=True) as way:
        want = differentiate(way)
        try:
            replay, got = captured(lambda: differentiate(way))
            replay()
            row["same_bits"] = [torch.equal(x, y) for x, y in zip(got, want, strict=True)]
            (row["ms"],) = in_turns([replay], device)
        except RuntimeError as error:
            row["error"] = str(error)[:300]
    return row


def plot(path: Path, files: list[Path]) -> None:
    """Draw the share of one GPU's speed over tokens a GPU: a column a file, a line a pass."""
    found = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    panels = []
    for number, word in enumerate(("forward", "backward")):
        for one in found:
            shares: dict[str, dict[int, float]] = {}
            for row in one["results"]:
                if "share" in row:
                    name = f"{row['case']}, {row['way']}"
                    shares.setdefault(name, {})[row["tokens"]] = row["share"][number]
            series = [
                Series(name, points, f"C{i}") for i, (name, points) in enumerate(shares.items())
            ]
            title = f"{one['machine']['ranks']} ranks, {word}"
            panels.append(Panel(title, series, "share of one GPU's speed", "tokens a rank", False))
    where = found[0]["machine"]
    note = f"{where['device']}, torch {where['torch']}, Triton {where['triton']}, {where['date']}"
    draw(panels, path, len(found), "Attention across GPUs", note)


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[4096, 8192, 16384, 32768],
        help="tokens of a sequence",
    )
    made.add_argument(
        "--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="what to measure"
    )
    made.add_argument("--plot", type=Path, help="draw files of results, and measure nothing")
    made.add_argument("files", nargs="*", type=Path, help="with --plot: what --json wrote")
    args = made.parse_args()
    if args.plot:
        plot(args.plot, args.files)
        return
    if any(tokens < 2 or tokens % 2 for tokens in args.tokens):
        made.error("--tokens must be even: the rivals take parts of one length")
    with joined(args.device) as device:
        heads = {"heads": [HEADS_Q, HEADS_K, HEAD_DIM]}
        results = Results({**machine("flash_attn_triton", device), **heads}, args.json)

        def keep(rows: list[Row], tokens: int) -> None:
            for row in rows:
                results.add({"tokens": tokens, **row})

        for tokens in args.tokens:
            keep(measure_dense(tokens, device, args.ways), tokens)
            keep(measure_packed(tokens, device), tokens)
        if device.type == "cuda":
            for tokens in args.tokens:
                keep(measure_in_graphs(tokens, device), tokens)
            keep([capture(args.tokens[0], device)], args.tokens[0])


if __name__ == "__main__":
    main()
