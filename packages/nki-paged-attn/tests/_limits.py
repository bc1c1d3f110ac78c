"""A register of bodies that break documented limits, and the two tests of each."""

from __future__ import annotations

import pytest
from nki_paged_attn.sim import NkiValidationError

from ._nki import nisa, nl, psum, run, sbuf, zeros

ARCH = "nki/guides/architecture"


class Limits:
    """Bodies by name; each breaks a limit that a documentation page states."""

    def __init__(self):
        self.cases = {}

    def __call__(self, page, operation, text, target="trn2", *, of_values=False):
        """Register a body; ``of_values`` are limits that only show when values are computed."""

        def register(body):
            self.cases[body.__name__] = (body, page, operation, text, target, of_values)
            return body

        return register

    def names(self, *, of_values=True):
        return [name for name, case in self.cases.items() if of_values or not case[5]]

    def check(self, name):
        """The error names call, operand, limit and value, and the page."""
        body, page, operation, text, target, _ = self.cases[name]
        with pytest.raises(NkiValidationError) as caught:
            run(body, target=target)
        error = caught.value
        assert text in str(error)
        assert error.operation == operation
        assert page in error.page
        assert error.operand in str(error)

    def check_without_computing(self, name):
        """A run that only logs checks all the same."""
        body, _, _, _, target, _ = self.cases[name]
        with pytest.raises(NkiValidationError):
            run(body, target=target, execute=False)


def matmul(k=8, m=8, n=8, dtypes=("float32", "float32"), dst=None, **options):
    dst = psum((m, n)) if dst is None else dst
    nisa.nc_matmul(dst, zeros((k, m), dtypes[0]), zeros((k, n), dtypes[1]), **options)


def range_select(**options):
    arguments = {"comp_op0": nl.greater_equal, "comp_op1": nl.less} | options
    for name in ("bound0", "bound1"):
        arguments.setdefault(name, zeros((8, 1)))
    nisa.range_select(sbuf((8, 8)), zeros((8, 8)), **arguments)
