"""The tiers of tests, and the fixtures that every test has."""

from ._linked.tiers import *  # noqa: F403
from .paged.hopper._hopper_serves import *  # noqa: F403
