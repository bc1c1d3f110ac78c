"""Random tensors, and error budgets taken from the data: the same file in every kernel package."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# What a product made of three of TF32 misses at most. The upper half of an operand is rounded to 11
# bits, so the lower one is within 2**-11 of it; of both lower halves there is no product: 2**-22. A
# lower half has 12 bits, and tensor cores read 11: either operand loses its last, 2**-23.
TF32X3_UNIT = 2.0**-21


class Maker:
    """Draws tensors on the CPU, so that a case is the same on every device."""

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

    The floor is two units in the last place of the largest value, for where eager is exact;
    ``eps`` is that unit where the result's own dtype is finer than what it was computed from.
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
