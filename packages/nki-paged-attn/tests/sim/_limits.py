"""A register of bodies that break documented limits, and the two tests of each."""

from __future__ import annotations

import re

import pytest
from nki_paged_attn.sim import NkiValidationError

from ._nki import nisa, nl, psum, run, sbuf, zeros

ARCH = "nki/guides/architecture"


class Limits:
    """Bodies by name; each breaks a limit that a documentation page states."""

    def __init__(self):
        self.cases = {}

    def __call__(self, page, message, target="trn2", *, of_values=False, **how):
        """Register a body, with the page on which its limit rests, and the whole message.

        Args:
            message: ``call: operand limit, got value``.
            of_values: the limit only shows when values are computed.
            how: options of ``run``, and ``arrays`` for the body.
        """
        how = {"target": target} | how
        arrays = how.pop("arrays", ())

        def register(body):
            assert body.__name__ not in self.cases
            self.cases[body.__name__] = (page, message, of_values, (body, *arrays), how)
            return body

        return register

    def names(self, *, of_values=True):
        return [name for name, case in self.cases.items() if of_values or not case[2]]

    def caught(self, name):
        """Run a body, and return its error."""
        *_, arguments, how = self.cases[name]
        with pytest.raises(NkiValidationError) as caught:
            run(*arguments, **how)
        return caught

    def check(self, name):
        """The error names call, operand, limit and value, and the page."""
        page, message, *_ = self.cases[name]
        error = self.caught(name).value
        first, *place = without_numbers(str(error)).split("\n")
        assert first == f"{message} [{error.page}]"
        # errors of a run as a whole have no place
        assert bool(error.place) == (place != []) == (place[:1] != [] and place[0][:5] == "  at ")
        assert error.page.startswith(page)
        start = without_numbers(f"{error.operation}: {error.operand} {error.limit}, got ")
        assert message.startswith(start)
        assert len(message) > len(start)

    def check_without_computing(self, name):
        """A run that only logs checks all the same."""
        _, message, _, arguments, how = self.cases[name]
        with pytest.raises(NkiValidationError) as caught:
            run(*arguments, **how, execute=False)
        assert without_numbers(str(caught.value)).startswith(message)


def without_numbers(text):
    """Return a message with tensors that have no name by their memory alone."""
    return re.sub(r"\b(sbuf|psum|shared_hbm|private_hbm)_\d+", r"\1", text)


def matmul(k=8, m=8, n=8, dtypes=("float32", "float32"), dst=None, **options):
    dst = psum((m, n)) if dst is None else dst
    nisa.nc_matmul(dst, zeros((k, m), dtypes[0]), zeros((k, n), dtypes[1]), **options)


def range_select(**options):
    arguments = {"comp_op0": nl.greater_equal, "comp_op1": nl.less} | options
    for name in ("bound0", "bound1"):
        arguments.setdefault(name, zeros((8, 1)))
    nisa.range_select(sbuf((8, 8)), zeros((8, 8)), **arguments)
