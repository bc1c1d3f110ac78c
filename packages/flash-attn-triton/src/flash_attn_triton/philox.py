"""The counter-based random numbers behind dropout, in plain PyTorch.

Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) maps a counter
and a key to four 32-bit words. Nothing is stored between draws, so that any program, in any order
and with any tile size, sees the same word for the same element.
"""

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF


def philox_4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the four output words of Philox 4x32-10.

    Args:
        counter: four int64 tensors that broadcast together, each value in ``[0, 2**32)``.
        key: two int64 tensors, likewise.

    Returns:
        Four int64 tensors of the broadcast shape, each value in ``[0, 2**32)``.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def dropout_threshold(dropout_p: float) -> int:
    """Return the 32-bit word from which on an element is kept."""
    return min(round(dropout_p * 2**32), 2**32 - 1)


def dropout_keep_mask(
    rng_state: Tensor,
    dropout_p: float,
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    first_sequence: int = 0,
) -> Tensor:
    """Return which elements of the attention matrix dropout keeps.

    Element (sequence b, query head h, row i, column j) has the counter
    ``(j, i, b * heads + h, offset)`` under the key ``seed``, and is kept iff its first output word
    is at least ``dropout_p * 2**32``.

    Args:
        rng_state: ``(seed, offset)``, int64 ``[2]``. The seed is the 64-bit key, its low word
            first; of the offset the low 32 bits count.
        dropout_p: probability of dropping an element, in ``[0, 1)``.
        batch: number of sequences.
        heads: number of query heads.
        seqlen_q: rows.
        seqlen_k: columns.
        first_sequence: the index b of the first sequence. Default: 0.

    Returns:
        bool ``[batch, heads, seqlen_q, seqlen_k]`` on the device of ``rng_state``.
    """
    device = rng_state.device
    seed, offset = rng_state.unbind()
    column = torch.arange(seqlen_k, device=device)
    row = torch.arange(seqlen_q, device=device)[:, None]
    plane = first_sequence * heads + torch.arange(batch * heads, device=device)
    plane = plane.view(batch, heads, 1, 1)
    counter = (column, row, plane, offset & _WORD)
    word, _, _, _ = philox_4x32(counter, (seed & _WORD, (seed >> 32) & _WORD))
    return word >= dropout_threshold(dropout_p)


def _multiply(constant: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and the low 32 bits of a product of 32-bit numbers held in int64."""
    # in two halves of 16 bits: the full product would overflow a signed 64-bit integer
    low = constant * (word & 0xFFFF)
    middle = constant * (word >> 16) + (low >> 16)
    return middle >> 16, (middle & 0xFFFF) << 16 | low & 0xFFFF
