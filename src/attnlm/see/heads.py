"""Names for heads by measurement, and what each is worth. docs/heads.md has it in prose."""

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
from attnlm.model.inspection import check_finite
from attnlm.model.language_model import LanguageModel
from attnlm.model.ops.loss import cross_entropy
from attnlm.model.recorder import Head, no_attention, record
from attnlm.runs.load_model import load_model
from attnlm.runs.open_run import open_dataset_of
from attnlm.runs.run import Run
from attnlm.see.patterns import (
    PATTERNS,
    name_of,
    pattern_sums,
    repeated_random_tokens,
    word_starts,
)
from attnlm.tokens.tokenizer import safe_pieces

_INDUCTION = PATTERNS.index("induction")
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
    """All heads of a run, over `windows` windows of `window` tokens, and as many random ones."""

    run: str
    windows: int
    window: int
    repeated: int
    """the random tokens that come twice in each window that induction is measured on"""
    has_text: bool
    """whether the other scores are of a text, not of those random tokens too"""
    heads: list[HeadReport]
    chance: dict[str, float]
    """by pattern, what equal shares of attention score"""
    loss: float | None
    """with all heads, over these windows; None if not measured"""

    @property
    def measured_on(self) -> str:
        """The windows, in words."""
        random = f"{self.repeated} random tokens that come twice"
        if not self.has_text:
            return f"{self.windows} windows of {random}"
        return f"{self.windows} windows of {self.window} tokens (induction: {random})"

    def facts(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "run": self.run,
            "windows": self.windows,
            "window": self.window,
            "repeated": self.repeated,
            "has_text": self.has_text,
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
    tokens: NDArray[Any] | None = None,
    checkpoint: str = "auto",
    device: str = "auto",
    data_dir: Path = Path("data"),
    on_event: OnEvent | None = None,
) -> HeadsReport:
    """Scores every head over at most `windows` windows, spread evenly over the validation split.

    The text is the run's own validation split, or the file `text`, or ids (N,), `tokens`. Induction
    is measured on random tokens, and so is all of an imported run, which has no such split. With
    `ablate` each head is silenced in turn and the loss measured over the same windows. Raises
    AttnlmError when there is no such text, when files are missing or damaged, and for a bigram;
    TooShortError when the text is too short; NotFiniteError for NaN and infinity.
    """
    if windows < 1:
        raise UsageError(f"`windows` can't be {windows}", "it must be 1 or more")
    if not run.config.model.maps_per_layer:
        raise no_attention()
    has_text = not (run.imported_from and text is None and tokens is None)
    if ablate and not has_text:
        raise AttnlmError(
            f"{run.name} was imported, and has no text to measure a loss on", "give a `text`"
        )
    block_size = run.config.model.block_size
    random_NT = repeated_random_tokens(run.vocab_size, block_size, windows)
    windows_NT = random_NT
    if not has_text and block_size < 2:
        raise TooShortError(
            f"a context of {block_size} token is too short to measure heads by", "see another run"
        )
    if has_text:
        origin = "val.bin" if tokens is None else "the text"
        tokens = _validation_tokens(run, text, data_dir) if tokens is None else tokens
        places_NT = _windows(len(tokens), block_size, windows)
        windows_NT = ids_at(tokens, places_NT, run.vocab_size, origin).astype(np.int64)
        random_NT = random_NT[: len(windows_NT)]
    model, chosen = load_model(run, checkpoint=checkpoint, device=device)

    def scored(inputs_NT: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        starts_NT = word_starts(run.tokenizer, inputs_NT)
        tensors = (torch.from_numpy(x).to(chosen.torch) for x in (inputs_NT, starts_NT))
        return _mean_scores(model, *tensors)

    inputs_NT = windows_NT[:, :-1] if has_text else windows_NT
    scores_LHP, chance_P = scored(inputs_NT)
    if has_text:
        of_random = scored(random_NT)
        scores_LHP[..., _INDUCTION], chance_P[_INDUCTION] = (x[..., _INDUCTION] for x in of_random)
    chance = dict(zip(PATTERNS, chance_P.tolist(), strict=True))
    places = [(layer, head) for layer, head in np.ndindex(*scores_LHP.shape[:2])]
    loss, changes = None, dict.fromkeys(places)
    if ablate:
        ids_NT = torch.from_numpy(windows_NT).to(chosen.torch)
        loss, changes = _ablate(model, ids_NT[:, :-1], ids_NT[:, 1:], places, on_event or ignore)
    heads = []
    for layer, head in places:
        scores = dict(zip(PATTERNS, scores_LHP[layer, head].tolist(), strict=True))
        heads.append(HeadReport(layer, head, scores, name_of(scores, chance), changes[layer, head]))
    return HeadsReport(
        run=run.name,
        windows=len(inputs_NT),
        window=inputs_NT.shape[1],
        repeated=random_NT.shape[1] // 2,
        has_text=has_text,
        heads=heads,
        chance=chance,
        loss=loss,
    )


def _validation_tokens(run: Run, text: Path | None, data_dir: Path) -> NDArray[Any]:
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
        raise AttnlmError(error.message, f"{error.hint}; or give a `text`") from None


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
        found: list[tuple[Tensor, Tensor]] = []

        def score(weights_NHTT: Tensor, part: slice = part, found: Any = found) -> None:
            check_finite(weights_NHTT)
            found.append(pattern_sums(weights_NHTT, ids_NT[part], starts_NT[part]))

        check_finite(record(model, ids_NT[part], watch=score).logits)
        score(equal_TT.expand(len(ids_NT[part]), model.architecture.maps_per_layer, -1, -1))
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
        float(cross_entropy(_logits(model, ids_NT[part], silenced), targets)) * targets.numel()
        for part in _parts(ids_NT)
        for targets in [next_NT[part]]
    ]
    loss = math.fsum(losses) / next_NT.numel()
    if not math.isfinite(loss):
        raise NotFiniteError
    return loss


def _logits(model: LanguageModel, ids_NT: Tensor, silenced: Head | None) -> Tensor:
    return record(model, ids_NT, silenced, watch=lambda _: None).logits


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
