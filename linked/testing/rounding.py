"""How kernels round, and results beside how far they may be off; docs/numerics.md has the symbols.

``bounds.py`` and ``walk_bounds.py`` compute, in float64, what a call has to give, and for every
element how far a kernel may be off that rounds as the document says. The bounds are made of the
data and of the precision of each step; nothing in them is measured.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FP32 = 2.0**-24  # one rounding to nearest
SUM = 2.0**-23  # one addition of a tensor core, which may cut off
EXP2 = 2.0**-22  # relative, of the hardware's exponential; absolute, of its logarithm
TINY = 2.0**-126
# one rounding to nearest, and the smallest distance of numbers, halved
ROUNDING = {
    torch.bfloat16: (2.0**-8, 2.0**-134),
    torch.float16: (2.0**-11, 2.0**-25),
    torch.float32: (2.0**-24, 2.0**-150),
    torch.float8_e4m3fn: (2.0**-4, 2.0**-10),
    torch.float8_e4m3fnuz: (2.0**-4, 2.0**-11),
}
TF32X3 = 2.0**-21  # a product of fp32, which is three of TF32


class Bounded(NamedTuple):
    """What is exact, and how far from it a kernel may be, element by element."""

    exact: Tensor
    bound: Tensor

    def ratio(self, got: Tensor) -> Tensor:
        """Return measured error over bound where both are finite; infinity where one is not."""
        wide = got.double()
        finite = torch.isfinite(self.exact)
        error = torch.where(finite, (wide - self.exact).abs(), 0.0)
        wrong = torch.where(finite, ~torch.isfinite(wide), wide != self.exact)
        ratio = torch.where(error > 0, error / self.bound.clamp_min(1e-300), 0.0)
        return torch.where(wrong, torch.inf, ratio)


def assert_within(got: dict[str, Tensor], bounds: dict[str, Bounded]) -> None:
    """Require that no element is further from the exact one than its bound; NaN fails."""
    for name, bounded in bounds.items():
        ratio = bounded.ratio(got[name])
        assert ratio.numel() == 0 or bool(ratio.max() <= 1), (
            f"{name}: {float(ratio.max()):.3g} times its bound"
        )


def median(bounded: Bounded, got: Tensor) -> float:
    """Return the median of error over bound: of a bound that says something it is not tiny."""
    ratio = bounded.ratio(got)
    return float(ratio.median()) if ratio.numel() else 0.0


def gamma(terms: int) -> float:
    """Return the relative error of a sum of so many terms, in any order."""
    return terms * SUM / (1 - terms * SUM)


def product_error(dtype: torch.dtype) -> float:
    """Return the relative error of a product of operands in a dtype; 16 and 8 bits are exact."""
    return TF32X3 if dtype == torch.float32 else 0.0


def stored_unit(dtype: torch.dtype, truncates: bool) -> float:
    """Return the last rounding of a result; Triton's interpreter cuts off those of 16 bits."""
    unit, _ = ROUNDING[dtype]
    return 2 * unit if truncates and dtype != torch.float32 else unit
