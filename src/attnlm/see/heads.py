"""Name attention heads by measured patterns, and measure the loss without each head.

docs/insight.md defines the scores: each is the mean share of attention that a head gives to certain
tokens, such as the previous one. A head is named by how far its scores lie above their chance
levels, the scores of uniform attention, and above the scores of the other heads.
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
from attnlm.model.inspection import check_finite
from attnlm.model.language_model import LanguageModel
from attnlm.model.ops.loss import cross_entropy
from attnlm.model.recorder import Head, NotRecordedError, no_attention, record
from attnlm.model.spec import Use
from attnlm.runs.load_model import load_model
from attnlm.runs.run import Run, open_dataset_of, open_run
from attnlm.see.attend import Numbers
from attnlm.see.heat_maps import Grid, HeatMaps
from attnlm.see.text import check_windows
from attnlm.tokens.tokenizer import Tokenizer

PATTERNS = ("previous-token", "same-token", "first-token", "uniform", "start-of-word", "induction")
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

_BATCH_TOKENS = 2**11
_SNAPSHOT_TOKENS = 2**8
_MOST_SNAPSHOTS = 11  # in a table, which then has 80 columns
_INDUCTION = PATTERNS.index("induction")


class TooShortError(AttnlmError):
    """Raised when windows have too few tokens to measure heads."""

    def __init__(self, tokens: int) -> None:
        super().__init__(
            f"windows of {max(0, tokens)} tokens are too short to measure heads",
            "use a longer text, or a run with a larger context",
        )


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
        part = "all" if self.measures_all else f"{self.windows:,} of"
        windows = f"{part} {self.windows_of_text:,} windows of {self.window} tokens"
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
    if run.config.spec.supports(Use.ATTENTION_MAPS) is not None:
        raise no_attention()
    random_NT = repeated_random_tokens(run.vocab_size, run.config.spec.block_size, windows)
    measured = None
    if text is not None or not run.imported_from:
        measured = _windows_of_text(run, text, Path(data_dir), windows)
        random_NT = random_NT[: len(measured.inputs)]
    elif ablate:
        message = f"{run.name} was imported and has no text to measure a loss on"
        raise AttnlmError(message, "use `text`")
    elif run.config.spec.block_size < 2:
        raise TooShortError(run.config.spec.block_size)
    inputs_NT = random_NT if measured is None else measured.inputs
    model, model_device = load_model(run, checkpoint=checkpoint, device=device)
    where = model_device.torch
    scores_LHP, chance_P = _mean_scores(model, run.tokenizer, inputs_NT, random_NT, where)
    loss: float | None = None
    changes: Mapping[Head, float] = {}
    if ablate and measured is not None:
        shape = scores_LHP.shape[:2]
        loss, changes = _ablated(model, measured, where, shape, on_event or ignore)
    chance = _by_pattern(chance_P.numpy())
    return HeadsReport(
        run=run.name,
        windows=len(inputs_NT),
        window=inputs_NT.shape[1],
        repeated=random_NT.shape[1] // 2,
        has_text=measured is not None,
        windows_of_text=0 if measured is None else measured.windows_of_text,
        heads=_head_reports(scores_LHP, chance, changes),
        chance=chance,
        loss=loss,
    )


def _head_reports(
    scores_LHP: Tensor, chance: Mapping[str, float], changes: Mapping[Head, float]
) -> list[HeadReport]:
    """Return a report for each head. `changes` has the change of the loss, if measured."""
    scores_NP = scores_LHP.flatten(0, 1).numpy()
    reports = []
    for number, scores_P in enumerate(scores_NP):
        layer, head = divmod(number, scores_LHP.size(1))
        scores = _by_pattern(scores_P)
        others_MP = np.delete(scores_NP, number, 0)
        others = _by_pattern(np.median(others_MP, 0)) if len(others_MP) else {}
        name = name_of(scores, chance, others)
        reports.append(HeadReport(layer, head, scores, name, changes.get((layer, head))))
    return reports


def _by_pattern(scores_P: NDArray[Any]) -> dict[str, float]:
    return dict(zip(PATTERNS, scores_P.tolist(), strict=True))


class _Windows(NamedTuple):
    """Windows of a text, (N, T), and the number of windows of the whole text."""

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    windows_of_text: int


def _windows_of_text(
    run: Run, text: str | Path | list[int] | None, data_dir: Path, most: int
) -> _Windows:
    """Return at most `most` windows, evenly spaced in a text (None: the validation split)."""
    tokens, origin, examples = _tokens(run, text, data_dir)
    length = min(run.config.spec.block_size, len(tokens) - 1)
    if length < 2:
        raise TooShortError(length)
    if examples is None:
        windows_NT = _evenly_spaced_windows(tokens, length, most, run.vocab_size, origin)
        return _Windows(windows_NT[:, :-1], windows_NT[:, 1:], (len(tokens) - 1) // length)
    first_W = examples.packed(length)
    inputs_NT, targets_NT = examples.windows(
        read=lambda places: ids_at(tokens, places, run.vocab_size, origin),
        first_W=first_W[_evenly_spaced_with_last(len(first_W), most)],
        length=length,
        only_answers=run.config.training.loss_on != "all",
    )
    return _Windows(inputs_NT, targets_NT, len(first_W))


def _tokens(
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


def _evenly_spaced_windows(
    tokens: NDArray[Any], length: int, most: int, vocab_size: int, origin: str
) -> NDArray[np.int64]:
    """Return at most `most` windows of `length` tokens and the last one's target, (N, T + 1)."""
    starts_N = length * _evenly_spaced_with_last((len(tokens) - 1) // length, most)
    places_NT = starts_N[:, None] + np.arange(length + 1)
    return ids_at(tokens, places_NT, vocab_size, origin).astype(np.int64)


def _evenly_spaced_with_last(total: int, most: int) -> NDArray[np.int64]:
    """Return at most `most` of the numbers below `total`, evenly spaced, with the last one."""
    return np.unique(np.linspace(0, total - 1, min(most, total)).astype(np.int64))


def repeated_random_tokens(vocab_size: int, block_size: int, windows: int) -> NDArray[np.int64]:
    """Return windows (N, 2 L) of L distinct random tokens, repeated once; always the same windows.

    L is REPEATED, or less if the vocabulary or the context is smaller. Each query t of the second
    half then has exactly one induction target, t − (L − 1), whatever the model has learned.
    """
    length = min(REPEATED, vocab_size, block_size // 2)
    random = np.random.default_rng(1)
    once_NL = [random.choice(vocab_size, length, replace=False) for _ in range(windows)]
    return np.tile(np.array(once_NL, np.int64), 2)


def word_starts(tokenizer: Tokenizer, ids_NT: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return True for each token that starts a word.

    A token starts a word if it begins with a letter or digit and the token before it ends with
    neither. It also starts a word if it begins with another character and has a letter or digit
    after that, such as " the". Bytes above 127 count as letters. A window's first token gives
    False, since the token before it is unknown.
    """
    begins = np.zeros(tokenizer.vocab_size, bool)
    ends = begins.copy()
    within = begins.copy()
    for token in np.unique(ids_NT).tolist():
        letters = [bytes([b]).isalnum() or b > 127 for b in tokenizer.decode_bytes([token])]
        if letters:
            begins[token] = letters[0]
            ends[token] = letters[-1]
            within[token] = any(letters) and not letters[0]
    starts = within[ids_NT] | begins[ids_NT]
    starts[:, 1:] &= within[ids_NT[:, 1:]] | ~ends[ids_NT[:, :-1]]
    starts[:, 0] = False
    return starts


def _mean_scores(
    model: LanguageModel,
    tokenizer: Tokenizer,
    inputs_NT: NDArray[np.int64],
    random_NT: NDArray[np.int64],
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Return the scores of `_scores_on`: induction on `random_NT`, all others on `inputs_NT`."""
    scores_LHP, chance_P = _scores_on(model, tokenizer, inputs_NT, device)
    if random_NT is not inputs_NT:
        random_scores_LHP, random_chance_P = _scores_on(model, tokenizer, random_NT, device)
        scores_LHP[..., _INDUCTION] = random_scores_LHP[..., _INDUCTION]
        chance_P[_INDUCTION] = random_chance_P[_INDUCTION]
    return scores_LHP, chance_P


def _scores_on(
    model: LanguageModel, tokenizer: Tokenizer, ids_NT: NDArray[np.int64], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the scores on P patterns of all heads, (L, H, P), and of uniform attention, (P,).

    Raises NotRecordedError if not every layer has the same number of attention maps.
    """
    length = ids_NT.shape[1]
    layers = 0
    uniform_TT = torch.ones(length, length, device=device).tril()
    uniform_TT /= uniform_TT.sum(-1, keepdim=True)

    def sums_over(ids_NT: Tensor, starts_NT: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal layers
        layer_sums: list[Tensor] = []  # (P, H) each

        def add_sums(maps_NHTT: Tensor) -> None:
            layer_sums.append(pattern_sums(maps_NHTT, ids_NT, starts_NT)[0])

        recorded = record(model, ids_NT, watch=add_sums)
        check_finite(recorded.logits)
        if not recorded.has_equal_layers:
            raise NotRecordedError
        layers = len(recorded.layers)
        uniform_N1TT = uniform_TT.expand(len(ids_NT), 1, -1, -1)
        uniform_sums_P1, counts_P = pattern_sums(uniform_N1TT, ids_NT, starts_NT)
        return torch.cat([*layer_sums, uniform_sums_P1], 1), counts_P

    batch_size = max(1, _BATCH_TOKENS // length)
    ids_batches = torch.from_numpy(ids_NT).to(device).split(batch_size)
    starts_batches = torch.from_numpy(word_starts(tokenizer, ids_NT)).to(device).split(batch_size)
    batches = map(sums_over, ids_batches, starts_batches)
    sums_PH, counts_P = (sum(batch_sums) for batch_sums in zip(*batches, strict=True))
    scores_HP = (sums_PH / counts_P.clamp(min=1)[:, None]).T.cpu()
    return scores_HP[:-1].unflatten(0, (layers, -1)), scores_HP[-1]


def snapshot_scores(
    model: LanguageModel, tokenizer: Tokenizer, text: NDArray[Any], device: torch.device
) -> Numbers:
    """Return the scores of all heads during training, (P, L, H), in the order of PATTERNS.

    They are measured as by `heads`, but over fewer windows. Raises NotRecordedError if not every
    layer has the same number of attention maps, TooShortError for a short text or context, and
    NotFiniteError for NaN and infinity.
    """
    length = min(model.block_size, len(text) - 1, _SNAPSHOT_TOKENS)
    if length < 2:
        raise TooShortError(length)
    windows = _SNAPSHOT_TOKENS // length
    inputs_NT = _evenly_spaced_windows(text, length, windows, model.vocab_size, "val.bin")[:, :-1]
    random_NT = repeated_random_tokens(model.vocab_size, model.block_size, windows)
    scores_LHP, _ = _mean_scores(model, tokenizer, inputs_NT, random_NT, device)
    return scores_LHP.movedim(-1, 0).numpy()


def pattern_sums(maps_NHTT: Tensor, ids_NT: Tensor, starts_NT: Tensor) -> tuple[Tensor, Tensor]:
    """Return each pattern's sum of scores over queries, (P, H), and number of queries, (P,).

    `starts_NT` marks the starts of words.
    """
    length = ids_NT.size(1)
    device = ids_NT.device
    past_TT = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    uniform_TT = past_TT / past_TT.sum(-1, keepdim=True)
    eye_TT = torch.eye(length, device=device)
    same_NTT = (ids_NT[:, :, None] == ids_NT[:, None, :]) & past_TT
    earlier_NTT = same_NTT.tril(-1)
    follows_NTT = (earlier_NTT.roll(1, -1)).tril(-1)
    follows_NTT[:, :, 0] = False
    starts_NTT = starts_NT[:, None, :] & past_TT
    every_NT = (torch.arange(length, device=device) >= 1).expand(len(ids_NT), -1)

    def attention_on(targets: Tensor) -> Tensor:
        return (maps_NHTT * targets.expand(len(ids_NT), length, -1)[:, None]).sum(-1)

    attention_and_counted = {
        "previous-token": (attention_on(eye_TT.roll(1, 0).tril(-1)), every_NT),
        "same-token": (attention_on(same_NTT), earlier_NTT.any(-1)),
        "first-token": (attention_on(eye_TT[:1]), every_NT),
        "uniform": (maps_NHTT.minimum(uniform_TT).sum(-1), every_NT),
        "start-of-word": (attention_on(starts_NTT), starts_NTT.any(-1) & every_NT),
        "induction": (attention_on(follows_NTT), follows_NTT.any(-1)),
    }
    sums_P = [
        (attention_NHT * counted_NT[:, None]).sum((0, 2), dtype=torch.float32)
        for attention_NHT, counted_NT in attention_and_counted.values()
    ]
    counts_P = [counted_NT.sum() for _, counted_NT in attention_and_counted.values()]
    return torch.stack(sums_P), torch.stack(counts_P)


def name_of(
    scores: Mapping[str, float], chance: Mapping[str, float], others: Mapping[str, float]
) -> str:
    """Return the pattern with the largest excess among those that are clear, or "mixed".

    `others` has the medians of the other heads' scores; it is empty if there are no other heads.
    """
    clear = {}
    if scores["uniform"] >= LEAST_UNIFORM:
        clear["uniform"] = scores["uniform"]
    for pattern in (pattern for pattern in PATTERNS if pattern != "uniform"):
        score = scores[pattern]
        level = chance[pattern]
        excess = (score - level) / (1 - level) if level < 1 else 0.0
        beyond_others = min(MAJORITY, TIMES_OTHERS * others.get(pattern, 0.0))
        if excess >= LEAST_EXCESS and score >= max(TIMES_CHANCE * level, beyond_others):
            clear[pattern] = excess
    return max(clear, key=lambda pattern: clear[pattern], default="mixed")


def _ablated(
    model: LanguageModel,
    windows: _Windows,
    device: torch.device,
    shape: Sequence[int],
    on_event: OnEvent,
) -> tuple[float, dict[Head, float]]:
    """Return the loss, and its change without each head. `shape` is (L, H)."""
    inputs_NT = torch.from_numpy(windows.inputs).to(device)
    targets_NT = torch.from_numpy(windows.targets).to(device)
    loss = _loss(model, inputs_NT, targets_NT, None)
    changes = {}
    for number, (layer, head) in enumerate(np.ndindex(*shape)):
        on_event(Progress("ablate", number, math.prod(shape), "head"))
        changes[layer, head] = _loss(model, inputs_NT, targets_NT, (layer, head)) - loss
    return loss, changes


def _loss(
    model: LanguageModel, inputs_NT: Tensor, targets_NT: Tensor, silenced: Head | None
) -> float:
    losses = []
    batch_size = max(1, _BATCH_TOKENS // inputs_NT.size(1))
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


@dataclass(frozen=True, repr=False)
class HeadsOverTraining:
    """The scores of all heads of a run at each of S snapshots."""

    run: str
    steps: list[int]
    """the step of each snapshot"""
    scores: dict[str, Numbers]
    """(S, L, H): how the scores of each pattern change"""

    def __repr__(self) -> str:
        return f"<HeadsOverTraining of {self.run!r}: {len(self.steps)} snapshots>"

    def __str__(self) -> str:
        """Return a table for each pattern, with a row for each head."""
        return str(self.maps)

    @property
    def maps(self) -> HeatMaps:
        """The scores as tables: heads by steps, of which the first, the last and 9 others."""
        last = len(self.steps) - 1
        shown = np.linspace(0, last, min(last + 1, _MOST_SNAPSHOTS)).round().astype(int)
        layers, heads = next(iter(self.scores.values())).shape[1:]
        rows = [f"layer {n + 1} head {h + 1}" for n, h in np.ndindex(layers, heads)]
        steps = [str(self.steps[number]) for number in shown]
        grids = [
            Grid(pattern, rows, steps, scores_SLH[shown].reshape(len(shown), -1).T, "step")
            for pattern, scores_SLH in self.scores.items()
        ]
        caption = f"Scores of the heads of {self.run} in snapshots during its training"
        return HeatMaps(f"{self.run}: heads over training", [caption], grids)

    def facts(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        rounded = {name: x.astype(float).round(3).tolist() for name, x in self.scores.items()}
        return {**vars(self), "scores": rounded}


def heads_over_training(
    run: str | Path | Run | None = None, *, checkpoint_dir: str | Path = "checkpoints"
) -> HeadsOverTraining:
    """Return the scores of every head of a run (default: the one trained last) in each snapshot.

        over_training = attnlm.heads_over_training("transformer-001")
        over_training.scores["induction"][:, 1, 0]  # of layer 2, head 1, at over_training.steps
        print(over_training)  # as tables

    Training measured them as `heads` does, over fewer windows, and kept them in the run's
    snapshots. Raises AttnlmError for a run without such snapshots, for a damaged file, and for a
    model without attention.
    """
    run = open_run(run, checkpoint_dir=checkpoint_dir)
    if run.config.spec.supports(Use.ATTENTION_MAPS) is not None:
        raise no_attention()
    measured = {s.step: s.scores for s in run.ticker() if s.scores is not None}
    shape = [*measured.values()][-1].shape if measured else ()
    scores_by_step = {step: x_PLH for step, x_PLH in measured.items() if x_PLH.shape == shape}
    if not scores_by_step:
        raise AttnlmError(
            f"{run.name} has no snapshots with scores of its heads",
            "this version keeps them every `eval_every` steps of training, if it observes maps",
        )
    scores_PSLH = np.stack([*scores_by_step.values()], 1)
    scores = dict(zip(PATTERNS, scores_PSLH, strict=False))
    return HeadsOverTraining(run.name, [*scores_by_step], scores)
