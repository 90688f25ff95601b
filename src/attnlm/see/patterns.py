"""What heads are scored and named by: the patterns that their attention may follow.

Of a head with weights a (T, T) over a window of tokens x, row t the looking token:

    previous-token   mean over t ≥ 1 of a[t, t−1]
    same-token       mean of Σ a[t, s] over s ≤ t with x_s = x_t
    first-token      mean over t ≥ 1 of a[t, 0]
    uniform          mean over t ≥ 1 of Σ min(a[t, s], 1/(t+1)) over s ≤ t
    start-of-word    mean of Σ a[t, s] over s ≤ t where a word starts
    induction        mean of Σ a[t, s] over 1 ≤ s < t with x_{s−1} = x_t

Each is a share of attention, from 0 to 1. The means of same-token, start-of-word and induction are
over those t ≥ 1 where there is something to look at: an earlier x_s = x_t, a start of a word, such
an s. All means are over all windows at once.

Induction is measured as in the literature (Olsson et al., 2022), on L random tokens that come
twice: there it is the mean of a[t, t − (L − 1)] over the second L. The others are measured on a
text, where there is one.

Some of a score is chance: what equal shares of attention, a[t, s] = 1/(t+1), would score there.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnlm.tokens.tokenizer import Tokenizer

PATTERNS = (
    "previous-token",
    "same-token",
    "first-token",
    "uniform",
    "start-of-word",
    "induction",
)
THRESHOLDS = dict.fromkeys(PATTERNS, 0.5) | {"uniform": 0.8}
"""What a score must reach to give a head its name. Any head overlaps with a uniform one by much."""

TIMES_CHANCE = 2
"""And it must be so many times the score of equal shares (but for uniform, which those are)."""

REPEATED = 50
"""Random tokens that come twice in a window that induction is measured on, where there is room."""


def name_of(scores: dict[str, float], chance: dict[str, float]) -> str:
    """The pattern with the highest score among those that are clear enough, else "mixed"."""

    def is_clear(pattern: str) -> bool:
        beyond_chance = scores[pattern] >= TIMES_CHANCE * chance[pattern]
        return scores[pattern] >= THRESHOLDS[pattern] and (pattern == "uniform" or beyond_chance)

    return max(filter(is_clear, PATTERNS), key=lambda pattern: scores[pattern], default="mixed")


def pattern_sums(weights_NHTT: Tensor, ids_NT: Tensor, starts_NT: Tensor) -> tuple[Tensor, Tensor]:
    """For each pattern the attention that falls on it, summed, and of how many tokens.

    `starts_NT` says where words start. Returns (P, H) and (P,), the patterns in their order.
    """
    length = ids_NT.size(1)
    past_TT = torch.ones(length, length, dtype=torch.bool, device=ids_NT.device).tril()
    same_NTT = (ids_NT[:, :, None] == ids_NT[:, None, :]) & past_TT
    earlier_NTT = same_NTT.tril(-1)
    follows_NTT = (earlier_NTT.roll(1, -1)).tril(-1)
    follows_NTT[:, :, 0] = False
    later_T = torch.arange(length, device=ids_NT.device) >= 1
    every_NT = later_T.expand(len(ids_NT), -1)
    starts_NTT = starts_NT[:, None, :] & past_TT
    wanted = {
        "previous-token": (torch.eye(length, device=ids_NT.device).roll(1, 0).tril(-1), every_NT),
        "same-token": (same_NTT, earlier_NTT.any(-1)),
        "first-token": (torch.eye(length, device=ids_NT.device)[0].expand(length, -1), every_NT),
        "start-of-word": (starts_NTT, starts_NTT.any(-1) & every_NT),
        "induction": (follows_NTT, follows_NTT.any(-1)),
    }
    sums, counts = [], []
    uniform_TT = past_TT / past_TT.sum(-1, keepdim=True)
    for pattern in PATTERNS:
        if pattern == "uniform":
            share_NHT, counted_NT = weights_NHTT.minimum(uniform_TT).sum(-1), every_NT
        else:
            looked_at, counted_NT = wanted[pattern]
            looked_at = looked_at.expand(len(ids_NT), -1, -1)[:, None]
            share_NHT = (weights_NHTT * looked_at).sum(-1)
        sums.append((share_NHT * counted_NT[:, None]).sum((0, 2), dtype=torch.float32))
        counts.append(counted_NT.sum())
    return torch.stack(sums), torch.stack(counts)


def word_starts(tokenizer: Tokenizer, ids_NT: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Where a word starts: a letter or digit after a token that ends on none, (N, T).

    A token that begins with other signs, as " the" does, starts a word if letters follow. Bytes
    above 127 count as letters. Of a window's first token it is not known, and so it does not.
    """
    begins, ends, within = (np.zeros(tokenizer.vocab_size, bool) for _ in range(3))
    for token in np.unique(ids_NT).tolist():
        letters = [bytes([b]).isalnum() or b > 127 for b in tokenizer.decode_bytes([token])]
        if letters:
            begins[token], ends[token] = letters[0], letters[-1]
            within[token] = any(letters) and not letters[0]
    starts = within[ids_NT] | begins[ids_NT]
    starts[:, 1:] &= within[ids_NT[:, 1:]] | ~ends[ids_NT[:, :-1]]
    starts[:, 0] = False
    return starts


def repeated_random_tokens(vocab_size: int, block_size: int, windows: int) -> NDArray[np.int64]:
    """L random tokens, no two of them alike, and the same again: (N, 2 L), always the same.

    L is REPEATED, or what vocabulary and context have room for. Each token of the second half has
    thus one place to look at, a[t, t − (L − 1)], whatever a model knows of texts.
    """
    length = min(REPEATED, vocab_size, block_size // 2)
    random = np.random.default_rng(1)
    once_NL = [random.choice(vocab_size, length, replace=False) for _ in range(windows)]
    return np.tile(np.array(once_NL, np.int64), 2)
