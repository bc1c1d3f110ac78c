"""The cost of a run: engine cycles, DMA time, a schedule, and pages that show it."""

from .scheduling import schedule
from .totals import Cost, cost

__all__ = ["Cost", "cost", "schedule"]
