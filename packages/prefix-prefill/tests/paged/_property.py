"""Helpers of property tests that other tests use too."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from hypothesis import HealthCheck, Phase, settings

# of an example
BATCHES = 5


EXAMPLES = int(os.environ.get("PREFIX_PREFILL_EXAMPLES", "4"))


# a merge sees the same examples every time; a number asked for draws anew
DERANDOMIZE = "PREFIX_PREFILL_EXAMPLES" not in os.environ


bounded = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=DERANDOMIZE,
    print_blob=True,
    database=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    # the fixtures of each function are constant: a filled torch.empty, and seeds
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def apart(function, *arguments, **options):
    """Call in a new thread.

    Under Hypothesis the call stack is so deep that interpreted kernels cross the end of one of
    Python's stack chunks, which then is mapped and unmapped at every call.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *arguments, **options).result()
