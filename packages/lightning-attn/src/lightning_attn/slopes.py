"""Decays of models with lightning attention."""

import math

import torch
from torch import Tensor

from ._linked.host.arguments import check_count


def build_slopes(
    num_heads: int, layer_idx: int | None = None, num_layers: int | None = None
) -> Tensor:
    """Return the decay of every head in TransNormer and MiniMax.

    If ``num_heads`` is a power of two, head h has ``2 ** (-8 * (h + 1) / num_heads)``, the slopes
    of ALiBi (Press et al. 2021). Otherwise the slopes of the next lower power of two come first,
    then every second slope of the next higher one. A layer multiplies them by
    ``1 - layer_idx / (num_layers - 1) + 1e-5``, so that later layers forget less.

    Args:
        num_heads: number of heads, at least 1.
        layer_idx: index of the layer, from 0 to ``num_layers - 1``. Default: None (no factor).
        num_layers: number of layers; required with ``layer_idx``. Default: None.

    Returns:
        decays, fp32 ``[num_heads]``, on the CPU, all positive.

    Raises:
        TypeError: if an argument is no int.
        ValueError: if an argument is out of range, or only one of ``layer_idx`` and ``num_layers``
            is given.
    """
    check_count("num_heads", num_heads)
    if layer_idx is not None:
        check_count("layer_idx", layer_idx, 0)
    if num_layers is not None:
        check_count("num_layers", num_layers)
    factor = 1.0
    if layer_idx is None or num_layers is None:
        if layer_idx is not num_layers:
            raise ValueError(
                "layer_idx and num_layers must be given together, got "
                f"layer_idx {layer_idx} and num_layers {num_layers}"
            )
    else:
        if not 0 <= layer_idx < num_layers:
            raise ValueError(f"layer_idx must be from 0 to {num_layers - 1}, got {layer_idx}")
        factor = 1.0 - layer_idx / max(num_layers - 1, 1) + 1e-5
    lower = 2 ** int(math.log2(num_heads))
    slopes = _of_power_of_two(lower)
    slopes += _of_power_of_two(2 * lower)[0::2][: num_heads - lower]
    return torch.tensor([slope * factor for slope in slopes], dtype=torch.float32, device="cpu")


def _of_power_of_two(heads: int) -> list[float]:
    return [2.0 ** (-8.0 * (h + 1) / heads) for h in range(heads)]
