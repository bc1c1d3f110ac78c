"""A simulator of the NKI surface that kernels of this package use, for machines without Trainium.

It computes in NumPy with the documented rounding, enforces every documented limit of gen2, gen3 and
gen4, and logs each run; ``cost`` estimates engine and DMA time from the log.
"""

from .cost import Cost, cost, schedule
from .cost.timeline import timeline_events, timeline_html, write_timeline
from .errors import NkiValidationError, NotModelledError, UnwrittenError
from .lint import lint
from .loader import Loader, install, load
from .memory.tensor import NkiTensor
from .simulator import ArraySpec, Kernel, Simulation, jit, simulate
from .targets import TARGETS, Target, find_target
from .trace import Instruction, Trace

__all__ = [
    "TARGETS",
    "ArraySpec",
    "Cost",
    "Instruction",
    "Kernel",
    "Loader",
    "NkiTensor",
    "NkiValidationError",
    "NotModelledError",
    "Simulation",
    "Target",
    "Trace",
    "UnwrittenError",
    "cost",
    "find_target",
    "install",
    "jit",
    "lint",
    "load",
    "schedule",
    "simulate",
    "timeline_events",
    "timeline_html",
    "write_timeline",
]
