"""How a head dimension is cut into panels on Hopper."""

from __future__ import annotations

import pytest
from attn_common import is_power_of_2, next_power_of_2
from flash_attn_triton._configs import panels_of

pytestmark = pytest.mark.eager


@pytest.mark.parametrize(
    ("head_dim", "panels"),
    [
        (8, (16, 0)),
        (48, (64, 0)),
        (64, (64, 0)),
        (65, (64, 16)),
        (72, (64, 16)),
        (80, (64, 16)),
        (96, (64, 32)),
        (104, (128, 0)),
        (128, (128, 0)),
        (136, (128, 16)),
        (160, (128, 32)),
        (192, (128, 64)),
        (200, (256, 0)),
        (256, (256, 0)),
    ],
)
def test_panels_of(head_dim, panels):
    assert panels_of(head_dim) == panels


def test_panels_are_tiles_and_no_wider_than_one_tile():
    for head_dim in range(1, 257):
        wide, narrow = panels_of(head_dim)
        assert is_power_of_2(wide)
        assert narrow == 0 or (is_power_of_2(narrow) and 16 <= narrow < wide)
        assert head_dim <= wide + narrow <= max(16, next_power_of_2(head_dim))
        # the second panel is not empty
        assert narrow == 0 or head_dim > wide
