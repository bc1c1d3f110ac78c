"""The calls whose kernels are compiled for GPUs that are not there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from lightning_attn._linear.call import (
    BackwardTensors,
    CachedTensors,
    Inputs,
    Options,
    StepTensors,
    Tensors,
)
from torch import Tensor


@dataclass(frozen=True)
class Config:
    """One shape class: sequences of one length with a state in and out, or packed ones."""

    d: int = 128
    dtype: str = "bfloat16"
    e: int | None = None
    packed: bool = False
    schedule: str = "sequential"
    heads: int = 4
    # the kernels that run elsewhere, on Hopper
    portable: bool = False

    def __str__(self) -> str:
        dims = f"d{self.d}" if self.e is None else f"d{self.d}:{self.e}"
        form = "packed" if self.packed else "fixed"
        heads = "" if self.heads == 4 else f"-h{self.heads}"
        path = "-portable" if self.portable else ""
        return f"{dims}-{self.dtype}-{form}-{self.schedule}{heads}{path}"

    def tokens(self, seqlen: int, width: int, batch: int = 2) -> Tensor:
        leading = (batch * seqlen,) if self.packed else (batch, seqlen)
        return meta(*leading, self.heads, width, dtype=getattr(torch, self.dtype))

    @property
    def width(self) -> int:
        return self.d if self.e is None else self.e

    def inputs(self, seqlen: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Return q, k, v, the decays and the offsets."""
        q, k = self.tokens(seqlen, self.d), self.tokens(seqlen, self.d)
        offsets = meta(3, dtype=torch.int32) if self.packed else None
        return q, k, self.tokens(seqlen, self.width), meta(self.heads), offsets


def meta(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")


def launch_forward(config: Config, seqlen: int = 4096) -> None:
    """Run the forward operator's launcher on meta tensors."""
    from lightning_attn._linear import launch as linear_launch

    state = meta(2, config.heads, config.d, config.width)
    x = Tensors(*config.inputs(seqlen), state)
    linear_launch.forward(x, Options(1.0, config.schedule, output_final_state=True))


def launch_cached(config: Config, seqlen: int = 4096) -> None:
    """Run the launcher of the operator on a cache of states."""
    from lightning_attn._linear import launch as linear_launch

    cache, slots = meta(9, config.heads, config.d, config.width), meta(2, dtype=torch.int32)
    flags = meta(2, dtype=torch.bool)
    x = CachedTensors(*config.inputs(seqlen), cache, slots, flags)
    linear_launch.forward_cached(x, config.tokens(seqlen, config.width), 1.0, config.schedule)


def launch_backward(config: Config, seqlen: int = 4096) -> None:
    """Run the launchers of all gradients."""
    from lightning_attn._linear import launch as linear_launch

    dout, state = config.tokens(seqlen, config.width), meta(2, config.heads, config.d, config.width)
    x = BackwardTensors(dout, *config.inputs(seqlen), state, state)
    linear_launch.read_gradient(x, 1.0, config.schedule)
    linear_launch.write_gradients(x, 1.0, config.schedule, True)


def launch_decay_gradient(config: Config, seqlen: int = 4096) -> None:
    """Run the launcher of the gradient of the decays."""
    from lightning_attn._linear import launch as linear_launch

    dout = config.tokens(seqlen, config.width)
    linear_launch.decay_gradient(BackwardTensors(dout, *config.inputs(seqlen)), 1.0)


def launch_sharded(config: Config, seqlen: int = 4096) -> None:
    """Run the launchers of what a rank does with states that arrive, and with its own."""
    from lightning_attn._linked.parallel.cut import cut_alike
    from lightning_attn._parallel.kernels import launch as parallel_launch
    from lightning_attn._parallel.passes import Sharded

    cut = cut_alike(2, 2 * seqlen, 2, (-1, -1), "contiguous", 1)
    options = Sharded(1.0, config.schedule, False, True, *cut, 2, "")
    table = options.table
    on = table.on(torch.device("meta"))
    q, k, v, decay, _ = config.inputs(seqlen)
    states = meta(table.rows, config.heads, config.d, config.width)
    last = meta(2, config.heads, config.d, config.width)
    x = BackwardTensors(v, q, k, v, decay, on.cu_seqlens)
    gradients = x.walk_of_dv()._replace(last=last)
    parallel_launch.write_runs(gradients, None, True, options)
    parallel_launch.arrive(states, decay, None, on.earlier)
    x = Inputs(q, k, v, decay, on.cu_seqlens)
    kept = parallel_launch.write_runs(x._replace(last=last), None, False, options)
    parallel_launch.read_runs(x._replace(first=states[:2]), kept, options)


def launch_decode(config: Config, tokens: int = 1) -> None:
    """Run the decoding launcher; ``packed`` stands for states behind each token."""
    from lightning_attn._linear import launch as linear_launch

    dtype = getattr(torch, config.dtype)
    q = meta(3, tokens, 4, config.d, dtype=dtype)
    v = meta(3, tokens, 4, config.width, dtype=dtype)
    cache = meta(9, 4, config.d, config.width)
    states = meta(3, tokens, 4, config.d, config.width) if config.packed else None
    slots = meta(3, dtype=torch.int32)
    linear_launch.decode(
        StepTensors(torch.empty_like(v), q, q, v, cache, meta(4), slots, states), 1.0
    )


LAUNCHERS = {
    "forward": launch_forward,
    "cached": launch_cached,
    "backward": launch_backward,
    "decay": launch_decay_gradient,
    "decode": launch_decode,
    "sharded": launch_sharded,
}
