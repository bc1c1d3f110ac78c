"""A register of programs in the style of AWS's documents, and what each computes."""

from __future__ import annotations

import numpy as np

from ._nki import run


class Programs:
    """Bodies by name, with the page whose title each follows."""

    def __init__(self):
        self.cases = {}

    def __call__(self, page, *arrays, expected=None, **how):
        """Register a body.

        Args:
            arrays: what the body is given.
            expected: function of the arrays, in NumPy.
            how: options of ``run``.
        """

        def register(body):
            assert body.__name__ not in self.cases
            self.cases[body.__name__] = (page, body, arrays, expected, how)
            return body

        return register

    def check(self, name):
        """Run a program, and compare what it returns with NumPy."""
        _, body, arrays, expected, how = self.cases[name]
        got = run(body, *(a.copy() for a in arrays), **({"strict": True} | how))
        want = expected(*arrays)
        got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            assert g.shape == w.shape
            np.testing.assert_allclose(
                g.astype(np.float64), np.asarray(w, np.float64), rtol=2e-5, atol=2e-5
            )
