"""Checks of the options: scale, masks, number of splits, flags."""

from torch import Tensor

from .._linked.host.arguments import (
    check_count,
    check_flag,
    check_scale,
    check_softcap,
    check_window,
)
from .call import ORDINARY, Options

# one pass merges the results of all splits
MAX_SPLITS = 1024


def check_options(
    q: Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    num_splits: int,
    return_lse: bool,
    invariant: bool = False,
) -> Options:
    """Check the options; return them as the operator takes them."""
    for name, flag in (("causal", causal), ("return_lse", return_lse), ("invariant", invariant)):
        check_flag(name, flag)
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    else:
        softmax_scale = check_scale("softmax_scale", softmax_scale)
    softcap = check_softcap(softcap, softmax_scale)
    left, right = check_window(window_size)
    check_count("num_splits", num_splits, 0)
    if num_splits > MAX_SPLITS:
        raise ValueError(
            f"num_splits must be from 0 to {MAX_SPLITS}, where 0 decides by load, got {num_splits}"
        )
    if invariant and num_splits != 0:
        raise NotImplementedError(
            "num_splits must be 0 beside invariant=True: keys are cut where the law says, "
            f"got {num_splits}; leave it out"
        )
    return ORDINARY._replace(
        softmax_scale=softmax_scale,
        window_left=left,
        window_right=0 if causal else right,
        softcap=softcap,
        num_splits=num_splits,
        invariant=bool(invariant),
    )
