"""Score what attention heads attend to, and name heads by their scores.

docs/insight.md defines the scores: each is the mean share of attention that a head gives to certain
tokens, such as the previous one. A head is named by how far its scores lie above their chance
levels, the scores of uniform attention, and above the scores of the other heads.

Axes: N windows, T tokens, L layers, H heads, P patterns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnlm.base.errors import AttnlmError
from attnlm.model.inspection import check_finite
from attnlm.model.language_model import LanguageModel
from attnlm.model.recorder import Site, record, texts_at_once
from attnlm.see.pictures import Numbers
from attnlm.training.validation import Split, windows_of

PATTERNS = ("previous-token", "same-token", "first-token", "uniform", "induction")
LEAST_EXCESS = 0.2
"""The lowest excess of a score with which a head can get a pattern's name: the attention above the
chance level, as a fraction of the attention that uniform attention gives elsewhere."""

TIMES_CHANCE, TIMES_OTHERS = 2, 1.25
"""The score must also be at least these multiples of its chance level, and of the median of the
other heads' scores."""

MAJORITY = 0.5
"""A score of at least this much need not lie above the other heads' scores."""

LEAST_UNIFORM = 0.8
"""The lowest score for the name `uniform`, to which nothing else applies: any head overlaps with
uniform attention a lot."""

REPEATED = 50
"""The number of random tokens that a window for induction repeats; fewer if they do not fit."""

BATCH_TOKENS = 2**11
_SNAPSHOT_TOKENS = 2**8
_INDUCTION = PATTERNS.index("induction")


class TooShortError(AttnlmError):
    """Raised when windows have too few tokens to measure heads."""


def check_length(tokens: int) -> None:
    """Raise TooShortError if windows have fewer than two tokens."""
    if tokens < 2:
        raise TooShortError(
            f"windows of {max(0, tokens)} tokens are too short to measure heads",
            "use a longer text, or a run with a larger context",
        )


def repeated_random_tokens(vocab_size: int, block_size: int, windows: int) -> NDArray[np.int64]:
    """Return windows (N, 2 L) of L distinct random tokens, repeated once; always the same windows.

    L is REPEATED, or less if the vocabulary or the context is smaller. Each query t of the second
    half then has exactly one induction target, t − (L − 1), whatever the model has learned.
    """
    check_length(block_size)
    length = min(REPEATED, vocab_size, block_size // 2)
    random = np.random.default_rng(1)
    once_NL = [random.choice(vocab_size, length, replace=False) for _ in range(windows)]
    return np.tile(np.array(once_NL, np.int64), 2)


def mean_scores(
    model: LanguageModel,
    inputs_NT: NDArray[np.int64],
    random_NT: NDArray[np.int64],
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Return the scores of `_scores_on`: induction on `random_NT`, all others on `inputs_NT`."""
    scores_LHP, chance_P = _scores_on(model, inputs_NT, device)
    random_scores_LHP, random_chance_P = _scores_on(model, random_NT, device)
    scores_LHP[..., _INDUCTION] = random_scores_LHP[..., _INDUCTION]
    chance_P[_INDUCTION] = random_chance_P[_INDUCTION]
    return scores_LHP, chance_P


def _scores_on(
    model: LanguageModel, ids_NT: NDArray[np.int64], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the scores on P patterns of all heads, (L, H, P), and of uniform attention, (P,).

    Raises NotRecordedError if not every layer has the same number of attention maps.
    """
    layers = 0

    def sums_over(ids_NT: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal layers
        layer_sums: list[Tensor] = []  # (P, H) each

        def add_sums(site: Site, x: Tensor) -> Tensor:
            if site.kind == "maps":
                layer_sums.append(pattern_sums(x, ids_NT)[0])
            return x

        recorded = record(model, ids_NT, see=add_sums)
        check_finite(recorded.logits)
        recorded.check_maps()
        layers = len(recorded.heads)
        uniform_N1TT = _uniform(ids_NT).expand(len(ids_NT), 1, -1, -1)
        uniform_sums_P1, counts_P = pattern_sums(uniform_N1TT, ids_NT)
        return torch.cat([*layer_sums, uniform_sums_P1], 1), counts_P

    batch_size = texts_at_once(model, ids_NT.shape[1], BATCH_TOKENS)
    batches = map(sums_over, torch.from_numpy(ids_NT).to(device).split(batch_size))
    sums_PH, counts_P = (sum(batch_sums) for batch_sums in zip(*batches, strict=True))
    scores_HP = (sums_PH / counts_P.clamp(min=1)[:, None]).T.cpu()
    return scores_HP[:-1].unflatten(0, (layers, -1)), scores_HP[-1]


def snapshot_scores(model: LanguageModel, text: NDArray[Any], device: torch.device) -> Numbers:
    """Return the scores of all heads during training, (P, L, H), in the order of PATTERNS.

    They are measured as by `heads`, but over fewer windows. Raises NotRecordedError if not every
    layer has the same number of attention maps, AttnlmError for a short text or context, and
    NotFiniteError for NaN and infinity.
    """
    length = min(model.block_size, len(text) - 1, _SNAPSHOT_TOKENS)
    check_length(length)
    windows = _SNAPSHOT_TOKENS // length
    inputs_NT, _ = windows_of(Split(text), length, windows, model.vocab_size)
    random_NT = repeated_random_tokens(model.vocab_size, model.block_size, windows)
    scores_LHP, _ = mean_scores(model, inputs_NT.astype(np.int64), random_NT, device)
    return scores_LHP.movedim(-1, 0).numpy()


def pattern_sums(maps_NHTT: Tensor, ids_NT: Tensor) -> tuple[Tensor, Tensor]:
    """Return each pattern's sum of scores over queries, (P, H), and number of queries, (P,)."""
    uniform_TT = _uniform(ids_NT)
    past_TT = uniform_TT > 0
    eye_TT = torch.eye(ids_NT.size(1), device=ids_NT.device)
    same_NTT = (ids_NT[:, :, None] == ids_NT[:, None, :]) & past_TT
    earlier_NTT = same_NTT.tril(-1)
    follows_NTT = earlier_NTT.roll(1, -1).tril(-1)
    follows_NTT[:, :, 0] = False
    every_NT = torch.ones_like(ids_NT, dtype=torch.bool)
    every_NT[:, 0] = False

    def attention_on(targets: Tensor) -> Tensor:
        return (maps_NHTT * targets.expand(*same_NTT.shape)[:, None]).sum(-1)

    attention_and_counted = {
        "previous-token": (attention_on(eye_TT.roll(1, 0).tril(-1)), every_NT),
        "same-token": (attention_on(same_NTT), earlier_NTT.any(-1)),
        "first-token": (attention_on(eye_TT[:1]), every_NT),
        "uniform": (maps_NHTT.minimum(uniform_TT).sum(-1), every_NT),
        "induction": (attention_on(follows_NTT), follows_NTT.any(-1)),
    }
    attention_PNHT, counted_PNT = map(
        torch.stack, zip(*attention_and_counted.values(), strict=True)
    )
    sums_PH = (attention_PNHT * counted_PNT[:, :, None]).sum((1, 3), dtype=torch.float32)
    return sums_PH, counted_PNT.sum((1, 2))


def _uniform(ids_NT: Tensor) -> Tensor:
    """Return the map of uniform attention over the tokens of a window, (T, T)."""
    past_TT = torch.ones(ids_NT.size(1), ids_NT.size(1), device=ids_NT.device).tril()
    return past_TT / past_TT.sum(-1, keepdim=True)


def choose_name(
    scores: Mapping[str, float], chance: Mapping[str, float], others: Mapping[str, float]
) -> str:
    """Return the pattern with the largest excess among those that are clear, or "mixed".

    `others` has the medians of the other heads' scores; it is empty if there are no other heads.
    """
    clear = {}
    for pattern, score in scores.items():
        level = chance[pattern]
        excess = (score - level) / (1 - level) if level < 1 else 0.0
        beyond_others = min(MAJORITY, TIMES_OTHERS * others.get(pattern, 0.0))
        if pattern == "uniform":
            excess, level, beyond_others = score, 0.0, LEAST_UNIFORM
        if excess >= LEAST_EXCESS and score >= max(TIMES_CHANCE * level, beyond_others):
            clear[pattern] = excess
    return max(clear, key=lambda pattern: clear[pattern], default="mixed")


def by_pattern(scores_P: NDArray[Any]) -> dict[str, float]:
    return dict(zip(PATTERNS, scores_P.tolist(), strict=True))
