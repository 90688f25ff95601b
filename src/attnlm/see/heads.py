"""Names for heads by measurement, and what each head is worth. docs/heads.md has it in prose.

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

Some of a score is chance: what equal shares of attention, a[t, s] = 1/(t+1), would score there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnlm.base.errors import AttnlmError, NotFiniteError, UsageError
from attnlm.base.events import OnEvent, Progress, ignore
from attnlm.data.dataset import ids_at
from attnlm.data.shards import Shards
from attnlm.model.inspection import check_finite
from attnlm.model.language_model import LanguageModel
from attnlm.model.ops.loss import cross_entropy
from attnlm.model.recorder import Head, record
from attnlm.runs.load_model import load_model
from attnlm.runs.open_run import open_dataset_of
from attnlm.runs.run import Run
from attnlm.tokens.tokenizer import Tokenizer, safe_pieces

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

_TOKENS_AT_ONCE = 2**11


class TooShortError(AttnlmError):
    """A text of too few tokens to measure heads by."""


@dataclass(frozen=True)
class HeadReport:
    """One head: its place, its scores by pattern, its name, and what it is worth."""

    layer: int
    head: int
    scores: dict[str, float]
    name: str
    loss_change: float | None
    """validation loss with it silenced less that with it, nats per token; None if not measured"""

    def facts(self) -> dict[str, Any]:
        """As JSON values; layers and heads count from 1."""
        return {
            "layer": self.layer + 1,
            "head": self.head + 1,
            "name": self.name,
            "scores": self.scores,
            "loss_change": self.loss_change,
        }


@dataclass(frozen=True)
class HeadsReport:
    """All heads of a run, over `windows` windows of `window` tokens."""

    run: str
    windows: int
    window: int
    heads: list[HeadReport]
    chance: dict[str, float]
    """by pattern, what equal shares of attention score"""
    loss: float | None
    """with all heads, over these windows; None if not measured"""

    def facts(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "run": self.run,
            "windows": self.windows,
            "window": self.window,
            "loss": self.loss,
            "chance": self.chance,
            "heads": [head.facts() for head in self.heads],
        }


def study_heads(
    run: Run,
    *,
    windows: int = 64,
    ablate: bool = False,
    text: Path | None = None,
    tokens: NDArray[Any] | Shards | None = None,
    checkpoint: str = "auto",
    device: str = "auto",
    data_dir: Path = Path("data"),
    on_event: OnEvent | None = None,
) -> HeadsReport:
    """Scores every head over at most `windows` windows, spread evenly over the validation split.

    The text is the run's own validation split, or the file `text`, or ids (N,), `tokens`. With
    `ablate` each head is silenced in turn and the loss measured over the same windows. Raises
    AttnlmError when there is no such text, when files are missing or damaged, and for a bigram;
    TooShortError when the text is too short; NotFiniteError for NaN and infinity.
    """
    if windows < 1:
        raise UsageError(f"`windows` can't be {windows}", "it must be 1 or more")
    origin = "the text"
    if tokens is None:
        origin = "val.bin"
        tokens = _validation_tokens(run, text, data_dir)
    model, chosen = load_model(run, checkpoint=checkpoint, device=device)
    places_NT = _windows(len(tokens), run.config.model.block_size, windows)
    windows_NT = ids_at(tokens, places_NT, run.vocab_size, origin).astype(np.int64)
    inputs_NT, targets_NT = windows_NT[:, :-1], windows_NT[:, 1:]
    ids_NT, next_NT = (torch.from_numpy(x).to(chosen.torch) for x in (inputs_NT, targets_NT))
    starts_NT = torch.from_numpy(word_starts(run.tokenizer, inputs_NT)).to(chosen.torch)
    scores_LHP, chance_P = _mean_scores(model, ids_NT, starts_NT)
    chance = dict(zip(PATTERNS, chance_P.tolist(), strict=True))
    places = [(layer, head) for layer, head in np.ndindex(*scores_LHP.shape[:2])]
    loss, changes = None, dict.fromkeys(places)
    if ablate:
        loss, changes = _ablate(model, ids_NT, next_NT, places, on_event or ignore)
    heads = []
    for layer, head in places:
        scores = dict(zip(PATTERNS, scores_LHP[layer, head].tolist(), strict=True))
        heads.append(HeadReport(layer, head, scores, name_of(scores, chance), changes[layer, head]))
    return HeadsReport(run.name, len(ids_NT), ids_NT.size(1), heads, chance, loss)


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


def _validation_tokens(run: Run, text: Path | None, data_dir: Path) -> NDArray[Any] | Shards:
    if text is not None:
        try:
            pieces = safe_pieces([text.read_text(encoding="utf-8-sig")])
            # An array, since the file may be long.
            return np.concatenate(
                [np.empty(0, np.uint32), *map(run.tokenizer.encode_piece, pieces)]
            )
        except UnicodeDecodeError:
            raise AttnlmError(f"{text} is not UTF-8", "convert it, then try again") from None
    try:
        return open_dataset_of(run, data_dir).val
    except AttnlmError as error:
        hint = "give a `text`" if run.imported_from else f"{error.hint}; or give a `text`"
        raise AttnlmError(error.message, hint) from None


def _windows(count: int, block_size: int, most: int) -> NDArray[np.int64]:
    """Where windows of block_size and their targets lie among `count` tokens, (N, T + 1).

    One short one where none fits.
    """
    length = min(block_size, count - 1)
    if length < 2:
        raise TooShortError(
            f"the text has {count} tokens, too few to measure heads by", "give a longer one"
        )
    there = (count - 1) // length
    chosen = np.unique(np.linspace(0, there - 1, min(most, there)).astype(np.int64))
    places: NDArray[np.int64] = chosen[:, None] * length + np.arange(length + 1)
    return places


def _parts(ids_NT: Tensor) -> Iterator[slice]:
    at_once = max(1, _TOKENS_AT_ONCE // ids_NT.size(1))
    for first in range(0, len(ids_NT), at_once):
        yield slice(first, first + at_once)


def _mean_scores(model: LanguageModel, ids_NT: Tensor, starts_NT: Tensor) -> tuple[Tensor, Tensor]:
    """(L, H, P), and what equal shares score, (P,)."""
    length = ids_NT.size(1)
    equal_TT = torch.ones(length, length, device=ids_NT.device).tril()
    equal_TT /= equal_TT.sum(-1, keepdim=True)
    sums: Any = 0
    counts: Any = 0
    for part in _parts(ids_NT):
        seen = record(model, ids_NT[part])
        weights_LNHTT = seen.weights
        check_finite(weights_LNHTT, seen.logits)
        equal_NHTT = equal_TT.expand(weights_LNHTT.shape[1:])
        found = [
            pattern_sums(weights_NHTT, ids_NT[part], starts_NT[part])
            for weights_NHTT in (*weights_LNHTT, equal_NHTT)
        ]
        sums = sums + torch.stack([layer_sums for layer_sums, _ in found])
        counts = counts + found[0][1]
    scores_LHP = (sums / counts.clamp(min=1)[:, None]).transpose(1, 2).cpu()
    return scores_LHP[:-1], scores_LHP[-1, 0]


def _ablate(
    model: LanguageModel, ids_NT: Tensor, next_NT: Tensor, places: list[Head], on_event: OnEvent
) -> tuple[float, dict[Head, float | None]]:
    whole = _loss(model, ids_NT, next_NT, None)
    changes: dict[Head, float | None] = {}
    for place in places:
        on_event(Progress("ablate", len(changes), len(places), "head"))
        changes[place] = _loss(model, ids_NT, next_NT, place) - whole
    return whole, changes


def _loss(model: LanguageModel, ids_NT: Tensor, next_NT: Tensor, silenced: Head | None) -> float:
    losses = [
        float(cross_entropy(record(model, ids_NT[part], silenced).logits, targets))
        * targets.numel()
        for part in _parts(ids_NT)
        for targets in [next_NT[part]]
    ]
    loss = math.fsum(losses) / next_NT.numel()
    if not math.isfinite(loss):
        raise NotFiniteError
    return loss


def in_words(report: HeadsReport) -> Iterator[str]:
    """A table: a line for each head."""
    column: Callable[[str], str] = "{:>14}".format
    columns = "".join(map(column, PATTERNS))
    yield f"layer  head  {'name':<14}{columns}{column('loss change') if report.loss else ''}"
    for head in report.heads:
        scores = "".join(column(f"{head.scores[pattern]:.3f}") for pattern in PATTERNS)
        change = "" if head.loss_change is None else column(f"{head.loss_change:+z.4f}")
        yield f"{head.layer + 1:>5}  {head.head + 1:>4}  {head.name:<14}{scores}{change}"
    chance = "".join(column(f"{report.chance[pattern]:.3f}") for pattern in PATTERNS)
    yield f"{'equal shares score':<27}{chance}"
