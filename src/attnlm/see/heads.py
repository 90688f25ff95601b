"""Measure and name the heads of a run, and the loss without each head.

Axes: N windows, T tokens, L layers, H heads, P patterns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnlm.base.errors import AttnlmError, NotFiniteError
from attnlm.base.events import OnEvent, Progress, ignore
from attnlm.base.files import read_text
from attnlm.data.dataset import ids_at
from attnlm.data.examples import Examples, limit_per_window
from attnlm.model.language_model import LanguageModel
from attnlm.model.loss import cross_entropy
from attnlm.model.recorder import Head, no_attention_error, record, texts_at_once
from attnlm.model.spec import Use
from attnlm.runs.load_model import load_model
from attnlm.runs.run import Run, open_dataset_of, open_run
from attnlm.see.head_scores import (
    BATCH_TOKENS,
    PATTERNS,
    TooShortError,
    by_pattern,
    choose_name,
    evenly_spaced_windows,
    evenly_spaced_with_last,
    mean_scores,
    repeated_random_tokens,
)
from attnlm.see.heat_maps import Grid, HeatMaps
from attnlm.see.shown_tokens import check_windows


@dataclass(frozen=True)
class HeadReport:
    """One head: its layer and number, from 0; scores by pattern, name, and effect on the loss."""

    layer: int
    head: int
    scores: dict[str, float]
    name: str
    loss_change: float | None
    """loss without the head minus loss with it, in nats per token, if measured"""


@dataclass(frozen=True, repr=False)
class HeadsReport:
    """Scores of all heads of a run, measured over `windows` windows of `window` tokens."""

    run: str
    windows: int
    window: int
    repeated: int
    """the number of random tokens that each window for induction has twice"""
    has_text: bool
    """True if only induction is measured on random tokens, and all other scores on a text"""
    windows_of_text: int
    """the number of windows of the whole text, of which `windows` are measured; 0 without a text"""
    heads: list[HeadReport]
    chance: dict[str, float]
    """the score of uniform attention, by pattern"""
    loss: float | None
    """the loss over the same windows with no head silenced, if measured"""

    def __repr__(self) -> str:
        return f"<HeadsReport of {self.run!r}: {len(self.heads)} heads>"

    def __str__(self) -> str:
        """Return a table with a row for each head."""
        return "\n".join(heads_table(self))

    @property
    def measures_all(self) -> bool:
        """True if all windows of the text are measured."""
        return self.windows == self.windows_of_text

    @property
    def measured_on(self) -> str:
        """The number and the length of the windows, in words."""
        random = f"{self.repeated} random tokens, repeated once"
        if not self.has_text:
            return f"{self.windows:,} windows of {random}"
        measured = "all" if self.measures_all else f"{self.windows:,} of"
        windows = f"{measured} {self.windows_of_text:,} windows of {self.window} tokens"
        return f"{windows} (induction: {random})"

    @property
    def maps(self) -> HeatMaps:
        """The scores as tables: layers by heads."""
        last = self.heads[-1]
        rows = [f"layer {n + 1}" for n in range(last.layer + 1)]
        columns = [str(n + 1) for n in range(last.head + 1)]
        shape = len(rows), len(columns)
        values = {p: np.reshape([head.scores[p] for head in self.heads], shape) for p in PATTERNS}
        grids = [Grid(p, rows, columns, scores, "head") for p, scores in values.items()]
        caption = f"{self.run}, measured over {self.measured_on}"
        return HeatMaps(f"{self.run}: scores of heads", [caption], grids)

    def facts(self) -> dict[str, Any]:
        """Return the fields as JSON values, in which layers and heads count from 1."""
        heads = [{**vars(h), "layer": h.layer + 1, "head": h.head + 1} for h in self.heads]
        return {**vars(self), "heads": heads}


def heads(
    run: str | Path | Run | None = None,
    *,
    windows: int = 64,
    ablate: bool = False,
    text: str | Path | list[int] | None = None,
    checkpoint: str = "auto",
    device: str = "auto",
    checkpoint_dir: str | Path = "checkpoints",
    data_dir: str | Path = "data",
    on_event: OnEvent | None = None,
) -> HeadsReport:
    """Score and name every head of a run (default: the one trained last) by what it attends to.

        report = attnlm.heads("multi-head-001", windows=8, ablate=True)
        for head in report.heads:
            print(head.layer, head.head, head.name, head.scores["previous-token"], head.loss_change)
        print(report)  # as a table

    At most `windows` windows of a text are measured, evenly spaced. `text` is the path of a file,
    or ids; default: the run's validation split. If the split consists of questions with answers,
    windows hold whole examples, and the loss counts the same targets as in training. Induction is
    always measured on random tokens. If the run was imported and `text` is None, all other scores
    are measured on them too. If `ablate` is True, one head after another is silenced, and the loss
    is measured over the same windows. `on_event` receives events of type Progress.

    Raises AttnlmError if `ablate` is True but there is no text, if files are missing or damaged,
    for a text or a context that is too short, for a model without attention, and for NaN and
    infinity.
    """
    check_windows(windows)
    run = open_run(run, checkpoint_dir=checkpoint_dir)
    if run.config.spec.reason_against(Use.ATTENTION_MAPS) is not None:
        raise no_attention_error()
    random_NT = repeated_random_tokens(run.vocab_size, run.config.spec.block_size, windows)
    text_windows = None
    if text is not None or not run.imported_from:
        text_windows = _windows_of_text(run, text, Path(data_dir), windows)
        random_NT = random_NT[: len(text_windows.inputs)]
    elif ablate:
        message = f"{run.name} was imported and has no text to measure a loss on"
        raise AttnlmError(message, "use `text`")
    elif run.config.spec.block_size < 2:
        raise TooShortError(run.config.spec.block_size)
    inputs_NT = random_NT if text_windows is None else text_windows.inputs
    model, model_device = load_model(run, checkpoint=checkpoint, device=device)
    scores_LHP, chance_P = mean_scores(
        model, run.tokenizer, inputs_NT, random_NT, model_device.torch
    )
    loss: float | None = None
    loss_changes: Mapping[Head, float] = {}
    if ablate and text_windows is not None:
        shape = scores_LHP.shape[:2]
        loss, loss_changes = _losses_without_heads(
            model, text_windows, model_device.torch, shape, on_event or ignore
        )
    chance = by_pattern(chance_P.numpy())
    return HeadsReport(
        run=run.name,
        windows=len(inputs_NT),
        window=inputs_NT.shape[1],
        repeated=random_NT.shape[1] // 2,
        has_text=text_windows is not None,
        windows_of_text=0 if text_windows is None else text_windows.windows_of_text,
        heads=_head_reports(scores_LHP, chance, loss_changes),
        chance=chance,
        loss=loss,
    )


def _head_reports(
    scores_LHP: Tensor, chance: Mapping[str, float], loss_changes: Mapping[Head, float]
) -> list[HeadReport]:
    """Return a report for each head. `loss_changes` has the changes of the loss, if measured."""
    scores_NP = scores_LHP.flatten(0, 1).numpy()
    reports = []
    for number, scores_P in enumerate(scores_NP):
        layer, head = divmod(number, scores_LHP.size(1))
        scores = by_pattern(scores_P)
        others_MP = np.delete(scores_NP, number, 0)
        others_medians = by_pattern(np.median(others_MP, 0)) if len(others_MP) else {}
        name = choose_name(scores, chance, others_medians)
        reports.append(HeadReport(layer, head, scores, name, loss_changes.get((layer, head))))
    return reports


class _TextWindows(NamedTuple):
    """Windows of a text, (N, T), and the number of windows of the whole text."""

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    windows_of_text: int


def _windows_of_text(
    run: Run, text: str | Path | list[int] | None, data_dir: Path, most: int
) -> _TextWindows:
    """Return at most `most` windows, evenly spaced in a text (None: the validation split)."""
    tokens, origin, examples = _ids_to_measure(run, text, data_dir)
    length = min(run.config.spec.block_size, len(tokens) - 1)
    if length < 2:
        raise TooShortError(length)
    if examples is None:
        windows_NT = evenly_spaced_windows(tokens, length, most, run.vocab_size, origin)
        return _TextWindows(windows_NT[:, :-1], windows_NT[:, 1:], (len(tokens) - 1) // length)
    first_W = examples.packed(length)
    inputs_NT, targets_NT = examples.windows(
        read=lambda places: ids_at(tokens, places, run.vocab_size, origin),
        first_W=first_W[evenly_spaced_with_last(len(first_W), most)],
        length=length,
        only_answers=run.config.training.loss_on != "all",
    )
    return _TextWindows(inputs_NT, targets_NT, len(first_W))


def _ids_to_measure(
    run: Run, text: str | Path | list[int] | None, data_dir: Path
) -> tuple[NDArray[Any], str, Examples | None]:
    """Return the ids to measure on, their name for error messages, and the places of examples."""
    if isinstance(text, list):
        return np.array(text), "the text", None
    if text is None:
        try:
            dataset = open_dataset_of(run, data_dir)
            most = run.config.training.examples_per_window
            return dataset.val, "val.bin", limit_per_window(dataset.val_examples, most)
        except AttnlmError as error:
            raise AttnlmError(error.message, f"{error.hint}; or use `text`") from None
    # an array, since the file may be long
    return run.tokenizer.encode_array(read_text(Path(text))), str(text), None


def _losses_without_heads(
    model: LanguageModel,
    windows: _TextWindows,
    device: torch.device,
    shape: Sequence[int],
    on_event: OnEvent,
) -> tuple[float, dict[Head, float]]:
    """Return the loss, and its change without each head. `shape` is (L, H)."""
    inputs_NT = torch.from_numpy(windows.inputs).to(device)
    targets_NT = torch.from_numpy(windows.targets).to(device)
    loss = _loss_without(model, inputs_NT, targets_NT, None)
    changes = {}
    for number, (layer, head) in enumerate(np.ndindex(*shape)):
        on_event(Progress("ablate", number, math.prod(shape), "head"))
        changes[layer, head] = _loss_without(model, inputs_NT, targets_NT, (layer, head)) - loss
    return loss, changes


def _loss_without(
    model: LanguageModel, inputs_NT: Tensor, targets_NT: Tensor, silenced: Head | None
) -> float:
    """Return the mean loss of all windows with a silenced head, or with none."""
    losses = []
    batch_size = texts_at_once(model, inputs_NT.size(1), BATCH_TOKENS)
    batches = zip(inputs_NT.split(batch_size), targets_NT.split(batch_size), strict=True)
    for inputs_BT, targets_BT in batches:
        # `watch` discards the attention weights, to save memory.
        logits = record(model, inputs_BT, silenced, watch=lambda _: None).logits
        losses.append(float(cross_entropy(logits, targets_BT)) * int((targets_BT >= 0).sum()))
    loss = math.fsum(losses) / max(1, int((targets_NT >= 0).sum()))
    if not math.isfinite(loss):
        raise NotFiniteError
    return loss


def heads_table(report: HeadsReport) -> Iterator[str]:
    """Yield the lines of a table with a row for each head, which fits 80 columns.

    The words of a title are stacked, since most titles are wider than their numbers.
    """
    titles = [pattern.split("-") for pattern in PATTERNS]
    widths = [max(map(len, [*words, "0.000"])) for words in titles]
    if report.loss is not None:
        titles.append(["loss", "change"])
        widths.append(len("+0.0000"))

    def row(start: str, cells: Sequence[str]) -> str:
        columns = (f" {cell:>{width}}" for cell, width in zip(cells, widths, strict=False))
        return f"{start:<25}{''.join(columns)}".rstrip()

    *above, last = reversed([*itertools.zip_longest(*map(reversed, titles), fillvalue="")])
    yield from (row("", words) for words in above)
    yield row("layer head name", last)
    for head in report.heads:
        cells = [f"{head.scores[pattern]:.3f}" for pattern in PATTERNS]
        if head.loss_change is not None:
            cells.append(f"{head.loss_change:+z.4f}")
        yield row(f"{head.layer + 1:>5} {head.head + 1:>4} {head.name}", cells)
    yield row("uniform attention", [f"{report.chance[pattern]:.3f}" for pattern in PATTERNS])
