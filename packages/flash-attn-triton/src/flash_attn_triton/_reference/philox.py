"""The counter-based random numbers of dropout, in plain PyTorch.

Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) maps a counter and a key
to words of 32 bits. Nothing is stored between draws, so an element gets the same bits in any
program, in any order and with any tile size. Seven rounds are the fewest that pass BigCrush.
"""

import torch
from torch import Tensor

_MULTIPLIERS_4 = (0xD2511F53, 0xCD9E8D57)
_MULTIPLIER_2 = 0xD256D193
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 7
_WORD = 0xFFFFFFFF
# an element uses half a word
_DRAWS = 2**16


def philox_4x32(
    counter: tuple[Tensor, ...], key: tuple[Tensor, ...], rounds: int = _ROUNDS
) -> tuple[Tensor, ...]:
    """Return the four output words of Philox 4x32.

    Args:
        counter: four int64 tensors that broadcast together, each value in ``[0, 2**32)``.
        key: two int64 tensors that broadcast with them, each value in ``[0, 2**32)``.
        rounds: number of rounds. Default: 7.

    Returns:
        Four int64 tensors of the broadcast shape, each value in ``[0, 2**32)``.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = _multiply(_MULTIPLIERS_4[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS_4[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def philox_2x32(
    counter: tuple[Tensor, Tensor], key: Tensor, rounds: int = _ROUNDS
) -> tuple[Tensor, Tensor]:
    """Return the two output words of Philox 2x32; arguments as for :func:`philox_4x32`."""
    c0, c1 = counter
    for _ in range(rounds):
        high, low = _multiply(_MULTIPLIER_2, c0)
        c0, c1 = high ^ key ^ c1, low
        key = (key + _KEY_STEPS[0]) & _WORD
    return c0, c1


def dropout_threshold(dropout_p: float) -> int:
    """Return the smallest draw, of 16 bits, for which an element is kept."""
    return min(round(dropout_p * _DRAWS), _DRAWS - 1)


def keep_scale(dropout_p: float) -> float:
    """Return ``1 / (1 - dropout_p)``, with the probability rounded to a multiple of ``2**-16``.

    This is the inverse of the share of draws that keep an element, so the mean does not change.
    """
    return _DRAWS / (_DRAWS - dropout_threshold(dropout_p))


def dropout_draws(
    rng_state: Tensor,
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    first_sequence: int = 0,
    corner: tuple[int, int] = (0, 0),
) -> Tensor:
    """Return the draw of each element of the attention matrix.

    Each sequence b and query head h has its own key: three words of Philox 4x32 of the counter
    ``(b * heads + h, offset, 0, 0)`` under the key ``seed``. Four elements share a draw: two rows
    eight apart and two columns eight apart, which tensor cores keep in one thread's registers. Row
    i and column j have the counter ``(i // 16 * 8 + i % 8, j // 16 * 8 + j % 8)``. Its two parts
    are xored with the second and the third word of the head's key, and drawn under the first word
    by Philox 2x32. Bit 3 of i selects the output word, bit 3 of j its half, the low half first.

    Args:
        rng_state: ``(seed, offset)``, int64 ``[2]``. The seed is the 64-bit key, its low word
            first; the low 32 bits of the offset are used.
        batch: number of sequences.
        heads: number of query heads.
        seqlen_q: rows.
        seqlen_k: columns.
        first_sequence: the index b of the first sequence. Default: 0.
        corner: the first row and the first column. Default: (0, 0).

    Returns:
        int64 ``[batch, heads, seqlen_q, seqlen_k]`` on the device of ``rng_state``, each value in
        ``[0, 2**16)``.
    """
    device = rng_state.device
    seed, offset = rng_state.unbind()
    plane = first_sequence * heads + torch.arange(batch * heads, device=device)
    plane = plane.view(batch, heads, 1, 1)
    zero = torch.zeros_like(plane)
    key, row_word, column_word, _ = philox_4x32(
        (plane, offset & _WORD, zero, zero), (seed & _WORD, (seed >> 32) & _WORD)
    )
    column = torch.arange(seqlen_k, device=device) + corner[1]
    row = torch.arange(seqlen_q, device=device)[:, None] + corner[0]
    words = philox_2x32((_place(row) ^ row_word, _place(column) ^ column_word), key)
    word = torch.where(row & 8 == 0, *words)
    return torch.where(column & 8 == 0, word & 0xFFFF, word >> 16)


def dropout_keep_mask(
    rng_state: Tensor,
    dropout_p: float,
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    first_sequence: int = 0,
    corner: tuple[int, int] = (0, 0),
) -> Tensor:
    """Return True where dropout keeps an element, bool ``[batch, heads, seqlen_q, seqlen_k]``.

    ``dropout_p`` is in ``[0, 1)``; :func:`dropout_draws` explains the other arguments. The result
    is on the device of ``rng_state``.
    """
    draws = dropout_draws(rng_state, batch, heads, seqlen_q, seqlen_k, first_sequence, corner)
    return draws >= dropout_threshold(dropout_p)


def _place(index: Tensor) -> Tensor:
    """Return the group that a row or a column belongs to."""
    return index >> 4 << 3 | index & 7


def _multiply(constant: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and the low 32 bits of a product of 32-bit numbers held in int64."""
    # in two halves of 16 bits: the full product would overflow a signed 64-bit integer
    low = constant * (word & 0xFFFF)
    middle = constant * (word >> 16) + (low >> 16)
    return middle >> 16, (middle & 0xFFFF) << 16 | low & 0xFFFF
