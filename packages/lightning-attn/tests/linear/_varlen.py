"""Helpers of varlen tests that other tests use too."""

from __future__ import annotations

import torch


def cached(case, slots, flags=None, device="cpu", total=7):
    """The same case with its states in a cache of NaN."""
    states = case.inputs["initial_state"]
    cache = torch.full((total, *states.shape[1:]), float("nan"), device=device)
    for b, slot in enumerate(slots):
        if slot >= 0:
            cache[slot] = states[b]
    options = {
        "state_cache": cache,
        "state_indices": torch.tensor(slots, dtype=torch.int32, device=device),
    }
    if flags is not None:
        options["has_initial_state"] = torch.tensor(flags, device=device)
    rest = {name: t for name, t in case.inputs.items() if name != "initial_state"}
    return rest, {**case.options, **options}, cache
