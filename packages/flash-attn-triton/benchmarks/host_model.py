"""What the host does for a small call, on any CPU: launches do nothing, all else is as on Hopper.

Beside it stand SDPA on tensors too small to take time, which goes through C++ alone, and a function
of autograd that only allocates, which is the least that a derivative in Python takes. Printed are
the smallest times of a call. The driver's part is missing, and a GPU's allocator and thread.

    python benchmarks/host_model.py --rounds 200

Beside other work instructions say more than times. Callgrind counts them, into an empty folder:

    valgrind --tool=callgrind --instr-atstart=no --callgrind-out-file=FOLDER/out \
        python benchmarks/host_model.py --count FOLDER
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import re
import subprocess
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# heads, head dimension, causal; the gradients of the first take one launch, the others' three
CASES = {"d64": (8, 64, False), "d128, causal": (16, 128, True)}
TOKENS = 2  # what a CPU computes with them, as a sum, takes no time
# lengths over two ranks, of which the longest are cut
MIX = (64, 32, 16, 8, 4, 4)
CALLS = 40
# calls ahead of those that are counted: tensors then lie where earlier ones did
AHEAD = 600
# what the driver makes of a tensor map, with its shape and strides
ENCODED = [0] * 11

# where a kernel's arguments begin among those of a launch
FIRST = 9

Run = Callable[[], Any]


def always(value: Any) -> Callable[..., Any]:
    """Return a function that returns a value."""
    return lambda *_, **__: value


@contextmanager
def without_launches() -> Iterator[None]:
    """Plan calls on CPU tensors as on Hopper, and launch nothing."""
    from flash_attn_triton import api
    from flash_attn_triton._dense import launch as dense_launch
    from flash_attn_triton._dense.hopper.backward import launch as hopper_backward
    from flash_attn_triton._dense.hopper.forward import launch as forward_launch
    from flash_attn_triton._dense.portable import backward_launch
    from flash_attn_triton._linked.hopper import tma
    from flash_attn_triton._linked.host.forms import Memory
    from flash_attn_triton._linked.launch import runtime

    kernel = SimpleNamespace(function=None, packed_metadata=None)
    ticket = torch.zeros(1, dtype=torch.int32)

    def launch(*arguments: Any) -> None:
        if arguments[FIRST].__class__ is tma.TensorMap:
            for one in arguments[FIRST:]:
                if one.__class__ is tma.TensorMap and one.encoded is None:
                    one.keep(ENCODED)

    def look_up(self: Any, variant: Any, *_: Any) -> runtime.Ready:
        # of a CPU tensor this is the device's index
        ready = runtime.Ready(kernel, -1, (), launch, always(0))
        self._ready[variant] = ready
        return ready

    def is_short(x: Any, *_: Any) -> bool:
        return x.q.shape[-1] <= 64

    made = hopper_backward.HopperBackward
    with (
        mock.patch.object(api, "_known", Memory()),
        mock.patch.object(dense_launch, "takes_hopper_forward", always(True)),
        mock.patch.object(backward_launch, "takes_hopper_backward", always(True)),
        mock.patch.object(backward_launch, "takes_short_backward", is_short),
        mock.patch.object(made, "is_worth_it", always(True)),
        mock.patch.object(forward_launch, "multiprocessors", always(132)),
        mock.patch.object(forward_launch, "kept_ticket", always(ticket)),
        mock.patch.object(runtime, "current_device", always(-1)),
        mock.patch.object(runtime.Launch, "_look_up", look_up),
        mock.patch.object(tma.MapLaunch, "_look_up", look_up),
        _alone_of_two(),
    ):
        yield


@contextmanager
def _alone_of_two() -> Iterator[None]:
    """Let this process be the first of two ranks, whose exchanges do nothing."""
    import torch.distributed as dist
    from flash_attn_triton import distributed
    from flash_attn_triton._linked.parallel.groups import Where
    from flash_attn_triton._parallel import exchange

    with (
        mock.patch.object(dist, "all_to_all_single", always(None)),
        mock.patch.object(exchange, "group_named", always(None)),
        mock.patch.object(distributed, "check_group", always(None)),
        mock.patch.object(distributed, "where", always(Where("", 0, 2))),
        mock.patch.object(distributed, "compare_calls", always(None)),
    ):
        yield


class Empty(torch.autograd.Function):
    """Allocates an output, an LSE and gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


def leaves_of(*size: int) -> list[Tensor]:
    return [torch.randn(size, dtype=torch.bfloat16).requires_grad_() for _ in "qkv"]


def step(call: Callable[..., Tensor], leaves: list[Tensor]) -> Run:
    """Return a forward and a backward, as a training loop calls them."""

    def run() -> None:
        call(*leaves).sum().backward()
        for x in leaves:
            x.grad = None

    return run


def runs() -> dict[str, Run]:
    """Return what is timed, by what it is called."""
    from flash_attn_triton import distributed, flash_attn_func

    found: dict[str, Run] = {}
    for name, (heads, head_dim, causal) in CASES.items():
        leaves = leaves_of(1, TOKENS, heads, head_dim)
        plain = [x.detach() for x in leaves]

        def call(*qkv: Tensor, causal: bool = causal) -> Any:
            return flash_attn_func(*qkv, causal=causal)

        found[f"{name}: forward"] = lambda call=call, plain=plain: call(*plain)
        found[f"{name}: forward with a gradient"] = lambda call=call, x=leaves: call(*x)
        found[f"{name}: step"] = step(call, leaves)
    lengths = [0, *itertools.accumulate(MIX)]
    plan = distributed.ShardPlan(lengths, 2, causal=True)
    for name, size in {"packed": (plan.tokens(0),), "dense": (1, TOKENS)}.items():
        leaves = [leaves_of(*size, heads, 128)[0] for heads in (4, 2, 2)]
        plain = [x.detach() for x in leaves]

        def over_two(*qkv: Tensor, is_packed: bool = name == "packed") -> Any:
            if is_packed:
                return distributed.flash_attn_varlen_func(*qkv, plan)
            return distributed.flash_attn_func(*qkv, causal=True)

        found[f"{name}, two ranks: forward"] = lambda call=over_two, plain=plain: call(*plain)
        found[f"{name}, two ranks: step"] = step(over_two, leaves)
    found["empty function: step"] = step(lambda *x: Empty.apply(*x)[0], leaves_of(1, TOKENS, 8, 64))
    found["SDPA, 4 tokens: step"] = step(scaled_dot_product_attention, leaves_of(1, 2, 4, 8))
    return found


def measured(rounds: int, calls: int = CALLS) -> dict[str, float]:
    """Return the smallest time of each call, in microseconds; they take turns."""
    best: dict[str, float] = {}
    with without_launches():
        timed = runs()
        for _ in range(rounds):
            for name, run in timed.items():
                took = timeit.timeit(run, number=calls) / calls * 1e6
                best[name] = min(best.get(name, took), took)
    return best


def counted(folder: Path, calls: int = CALLS) -> dict[str, float]:
    """Return the instructions of each call, in thousands; see above how callgrind is started."""

    def control(*what: str) -> None:
        command = ["callgrind_control", *what, str(os.getpid())]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    found: dict[str, float] = {}
    gc.disable()
    with without_launches():
        for place, (name, run) in enumerate(runs().items(), start=1):
            for _ in range(AHEAD):
                run()
            control("--zero")
            control("--instr=on")
            for _ in range(calls):
                run()
            control("--instr=off")
            control("--dump")
            text = (folder / f"out.{place}").read_text()
            found[name] = int(re.findall(r"^totals: (\d+)", text, re.MULTILINE)[0]) / calls / 1e3
    return found


def main() -> None:
    """Print the times, or how many instructions there are."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100, help="turns of all calls")
    parser.add_argument("--count", type=Path, help="count instructions; callgrind's folder")
    arguments = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "1"  # else CPU tensors run eager code
    torch.set_num_threads(1)
    unit = "us" if arguments.count is None else "thousand instructions"
    rounds, folder = arguments.rounds, arguments.count
    for name, took in (measured(rounds) if folder is None else counted(folder)).items():
        print(f"{name:<40}{took:8.1f} {unit}")


if __name__ == "__main__":
    main()
