"""Helpers of gluon tests that other tests use too."""

from __future__ import annotations

import pytest


@pytest.fixture(params=[True, False], ids=["copies_first", "copies_last"])
def reverse(request):
    """Which partition goes ahead of the others as far as the barriers let it."""
    return request.param
