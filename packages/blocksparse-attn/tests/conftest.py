"""The tiers of tests, and the fixtures that every test has."""

from ._linked.tiers import *  # noqa: F403
