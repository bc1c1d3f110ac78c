"""Every place in the simulator that refuses something has a case that reaches it.

The places are found in the source, and what the cases reach in the tracebacks of their errors.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from nki_paged_attn import sim
from nki_paged_attn.sim import NotModelledError

from .. import test_registers as registers
from .._nki import run
from .._scope import NOT_MODELLED
from . import test_arguments as arguments
from . import test_engines as engines
from . import test_memory as memory
from . import test_more as more
from . import test_programs as programs
from . import test_scalar_dma as scalar_dma
from . import test_tensor as tensor
from . import test_vector as vector

SIM = Path(sim.__file__).parent
REGISTERS = (arguments, engines, memory, more, programs, registers, scalar_dma, tensor, vector)


def places(*names):
    """Return (file, first line, last line) of each call of functions or errors."""
    found = set()
    for path in sorted(SIM.rglob("*.py")):
        if path.name == "errors.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in names:
                found.add((path.relative_to(SIM), node.lineno, node.end_lineno))
    return found


def place_of(error, known):
    """Return which of the known places raised an error."""
    reached = [
        (Path(str(entry.path)).relative_to(SIM), entry.lineno + 1)
        for entry in error.traceback
        if SIM in Path(str(entry.path)).parents and Path(str(entry.path)).name != "errors.py"
    ]
    file, line = reached[-1]
    return {p for p in known if p[0] == file and p[1] <= line <= p[2]}


def test_every_limit_has_a_case():
    known = places("require", "NkiValidationError", "UnwrittenError")
    reached = set()
    for module in REGISTERS:
        for name in module.limit.names():
            reached |= place_of(module.limit.caught(name), known)
    assert not known - reached


def test_everything_that_is_not_modelled_has_a_case():
    known = places("NotModelledError")
    reached = set()
    for body, _, how in NOT_MODELLED:
        with pytest.raises(NotModelledError) as caught:
            run(body, **how)
        reached |= place_of(caught, known)
    assert not known - reached
