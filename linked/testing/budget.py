"""Random tensors, and error budgets taken from the data."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Largest relative error of an fp32 product made of three TF32 products. The upper half of an
# operand is rounded to 11 bits, so its lower half is at most 2**-11. The product of both lower
# halves is left out: 2**-22. Tensor cores read 11 of a lower half's 12 bits: 2**-23 per operand.
TF32X3_UNIT = 2.0**-21


class Maker:
    """Draws tensors on the CPU, so that cases are equal on all devices."""

    def __init__(self, device: torch.device | str, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self.dtype = torch.device(device), dtype
        self.generator = torch.Generator("cpu").manual_seed(seed)

    def randn(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.randn(*size, generator=self.generator)
        return values.to(self.device, dtype or self.dtype)

    def uniform(self, *size: int, low: float, high: float) -> Tensor:
        values = torch.rand(*size, generator=self.generator) * (high - low) + low
        return values.to(self.device)


def offsets(lengths: Sequence[int], device: torch.device | str) -> Tensor:
    """Cumulative sequence lengths, ``[batch + 1]`` int32."""
    ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return torch.tensor(ends, dtype=torch.int32, device=device)


def assert_no_worse_than_eager(
    name: str,
    actual: Tensor,
    eager: Tensor,
    oracle: Tensor,
    factor: float = 2.0,
    eps: float | None = None,
) -> None:
    """Hold a kernel's max error to ``factor`` times that of eager code in the same dtype.

    The floor, for exact eager results, is two units in the last place of the largest value.
    ``eps`` is that unit if the result's dtype is finer than the dtype of its computation.
    Infinities must match exactly, and a NaN never passes.
    """
    assert actual.shape == oracle.shape, f"{name}: {actual.shape} != {oracle.shape}"
    wide = actual.double()
    finite = torch.isfinite(oracle)
    assert torch.equal(wide[~finite], oracle[~finite].double()), f"{name}: inf or NaN differs"
    if not finite.any():
        return
    eps = torch.finfo(actual.dtype).eps if eps is None else eps
    budget = factor * (eager.double()[finite] - oracle[finite]).abs().max()
    budget += 2 * eps * oracle[finite].abs().max()
    errors = torch.where(finite, (wide - oracle).abs(), 0.0)
    where = tuple(int(i) for i in torch.unravel_index(errors.argmax(), errors.shape))
    # written so that NaN on either side fails
    assert bool(errors.max() <= budget), (
        f"{name}: error {errors.max():.3e} over budget {budget:.3e} at {where}: "
        f"{wide[where]:.6g}, expected {oracle[where]:.6g}"
    )


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], what: str = "") -> None:
    """Require the same bits in every result."""
    assert got.keys() == want.keys()
    for name, value in got.items():
        same = value.dtype == want[name].dtype and torch.equal(value, want[name])
        assert same, f"{what}{name}: {int((value != want[name]).sum())} elements differ"
