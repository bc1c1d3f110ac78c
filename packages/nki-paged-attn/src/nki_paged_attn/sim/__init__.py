"""A simulator of the NKI surface that kernels of this package use, for machines without Trainium.

NumPy semantics with documented rounding, every documented limit of gen2, gen3 and gen4 enforced,
and a log from which ``cost`` estimates engine and DMA time.
"""

from .cost import Cost, cost, schedule
from .errors import NkiValidationError, NotModelledError, UnwrittenError
from .lint import lint
from .simulator import ArraySpec, Kernel, Loader, Simulation, install, jit, load, simulate
from .targets import TARGETS, Target, find_target
from .tensor import NkiTensor
from .timeline import timeline_events, timeline_html, write_timeline
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
