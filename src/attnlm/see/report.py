"""All that a trained run has to show, gathered: for one page, or to be looked at from Python."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attnlm.base.errors import AttnlmError
from attnlm.base.events import OnEvent, Progress, ignore
from attnlm.base.folders import resume_command
from attnlm.compute.device import choose_device
from attnlm.data.dataset import Dataset, ids_at
from attnlm.generation.sampling import Sampler
from attnlm.generation.sampling_config import SamplingConfig
from attnlm.model.language_model import LanguageModel
from attnlm.runs.load_model import load_model
from attnlm.runs.open_run import open_dataset_of
from attnlm.runs.run import Run
from attnlm.runs.ticker import PASSAGE, Snapshot
from attnlm.see.attend import Attention, attention_of
from attnlm.see.heads import HeadsReport, TooShortError, study_heads
from attnlm.see.lens import LensRow, logit_lens
from attnlm.see.reproduce import (
    import_command,
    prepare_command,
    sample_command,
    train_command,
)
from attnlm.see.text import ids_within_context
from attnlm.see.verdict import best_record, verdict_of
from attnlm.training.schedule import learning_rate

STAGES = 3
"""Of a report: heads, the longer text, and the page, which `report_page` makes."""

_TOKENS, _SEED = 500, 1  # of the longer text


@dataclass(frozen=True)
class Report:
    """A run: how it went, its snapshots, and what its checkpoint does with a text."""

    run: Run
    checkpoint: str
    records: Sequence[Mapping[str, Any]]
    """of its evaluations, oldest first, at least one; none of an imported run"""
    snapshots: Sequence[Snapshot]
    """at evaluations; empty in a run of an older version"""
    passage: Sequence[str]
    """the tokens that the snapshots' maps are over"""
    text_is: str
    """where the text comes from, in words"""
    ids: list[int]
    attention: Attention
    lens: Sequence[LensRow]
    heads: HeadsReport | None
    heads_over: str
    """what the heads were measured on, in words; or why they were not"""
    data_gone: str
    """why the data set can't be had, in words; empty where it can"""
    commands: Sequence[str]
    """what makes the run again"""
    sample: str
    """a longer text, without a prompt"""
    sample_command: str
    """what prints that text, on a CPU"""

    @property
    def best(self) -> Mapping[str, Any] | None:
        """The record of the best evaluation; None of an imported run."""
        return best_record(self.records) if self.records else None

    @property
    def verdict(self) -> str:
        """How its training went, in words."""
        if not self.records:
            return "it was imported, so the page shows no training"
        return verdict_of(self.run, self.records)

    @property
    def was_extended(self) -> bool:
        """Whether it was given more steps later, so that the learning rate did not fall once."""
        training = self.run.config.training
        return training.budget is None and any(
            not math.isclose(record["learning_rate"], learning_rate(int(record["step"]), training))
            for record in self.records
        )

    def facts(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "run": str(self.run.path),
            "model": self.run.config.model.model,
            "parameters": self.run.parameters,
            "parent": self.run.parent,
            "imported_from": self.run.imported_from,
            "best_val_loss": self.best and self.best["val_loss"],
            "bits_per_byte": self.best and self.best["bits_per_byte"],
            "verdict": self.verdict,
            "tokens": self.attention.tokens,
            "heads": [] if self.heads is None else self.heads.facts()["heads"],
            "sample": self.sample,
            "commands": [*self.commands, self.sample_command],
        }


def report(
    run: Run,
    *,
    text: str | None = None,
    windows: int = 16,
    ablate: bool = False,
    checkpoint: str = "auto",
    device: str = "auto",
    data_dir: Path = Path("data"),
    on_event: OnEvent = ignore,
) -> Report:
    """What a run has to show. Its stages are reported as Progress, as is that of `ablate`.

    The model looks at `text`, or at the beginning of the validation split. Heads are scored over
    `windows` windows of that split; `ablate` also measures the loss without each. Where the data
    set is gone, they are scored on `text`, if it is given, or not at all; an imported run has none,
    and random tokens stand for it.

    Raises AttnlmError when the text does not fit the context or the vocabulary, when the run was
    trained here and never evaluated, and when its files are missing or damaged.
    """
    records = run.metrics()
    if not records and not run.imported_from:
        raise AttnlmError(
            f"{run.name} has no evaluations yet",
            f"resume it: {resume_command(run.path)}",
        )
    given = None if text is None else ids_within_context(run, text)
    checkpoint = run.checkpoint(checkpoint).which
    model, _ = load_model(run, checkpoint=checkpoint, device="cpu")
    dataset, gone = _dataset(run, data_dir)
    passage = run.ticker_passage()
    ids, text_is = (given, "the text that was given") if given else _passage(run, dataset)
    if ids is None:
        gone_how = "it has no data set" if run.imported_from else "the data set is gone"
        ids, text_is = _own_words(run, model), f"the model's own first words, since {gone_how}"
    attention, seen = attention_of(run, model, ids)
    on_event(Progress("scoring heads", 0, STAGES, "step"))
    heads, heads_over = None, "the model has none"
    if run.config.model.maps_per_layer:
        heads, heads_over = _heads(
            run,
            dataset,
            given,
            gone,
            windows=windows,
            ablate=ablate,
            checkpoint=checkpoint,
            device=device,
            data_dir=data_dir,
            on_event=on_event,
        )
    on_event(Progress("sampling", 1, STAGES, "step"))
    sampler, config = _sampler(run, model), SamplingConfig(tokens=_TOKENS, seed=_SEED)
    return Report(
        run=run,
        checkpoint=checkpoint,
        records=records,
        snapshots=run.ticker(),
        passage=passage,
        text_is=text_is,
        ids=ids,
        attention=attention,
        lens=logit_lens(model, seen),
        heads=heads,
        heads_over=heads_over,
        data_gone=gone,
        commands=_commands(run, dataset),
        sample="".join(sampler.stream(sampler.prompt_ids(""), config)),
        sample_command=sample_command(run, checkpoint, _TOKENS, _SEED),
    )


def _dataset(run: Run, data_dir: Path) -> tuple[Dataset | None, str]:
    try:
        return open_dataset_of(run, data_dir), ""
    except AttnlmError as error:
        return None, error.message


def _commands(run: Run, dataset: Dataset | None) -> list[str]:
    if run.imported_from:
        return [import_command(run)]
    return [*([prepare_command(dataset)] if dataset else []), train_command(run)]


def _passage(run: Run, dataset: Dataset | None) -> tuple[list[int] | None, str]:
    """The beginning of the validation split; None where it can't be had."""
    most = min(PASSAGE, run.config.model.block_size)
    if dataset is not None:
        ids = ids_at(dataset.val, slice(most), run.vocab_size, "val.bin").tolist()
        return ids, f"the first {len(ids)} tokens of the validation split"
    try:
        ids = ids_within_context(run, "".join(run.ticker_passage()))
    except AttnlmError:  # none was recorded, or its tokens are no whole characters
        return None, ""
    return ids, f"the first {len(ids)} tokens of the validation split, as the run recorded them"


def _sampler(run: Run, model: LanguageModel) -> Sampler:
    return Sampler(model, run.tokenizer, choose_device("cpu", "float32"))


def _own_words(run: Run, model: LanguageModel) -> list[int]:
    sampler = _sampler(run, model)
    ids = sampler.prompt_ids("")
    tokens = min(PASSAGE, run.config.model.block_size) - len(ids)
    for _ in sampler.stream(ids, SamplingConfig(tokens=tokens)):
        pass
    return ids


def _heads(
    run: Run, dataset: Dataset | None, given: list[int] | None, gone: str, **how: Any
) -> tuple[HeadsReport | None, str]:
    """Measured on the data set, else on a text that was given, if it is long enough."""
    tokens = np.array(given) if dataset is None and given is not None else None
    if dataset is None and tokens is None and not run.imported_from:
        return None, gone
    try:
        studied = study_heads(run, tokens=tokens, **how)
    except TooShortError as error:
        return None, error.message
    if tokens is not None:
        why = "it has no data set" if run.imported_from else gone
        return studied, f"the {len(tokens)} tokens of the text above only, since {why}"
    if dataset is None:
        return studied, studied.measured_on
    windows = f"{studied.windows} windows of {studied.window} tokens"
    return studied, f"{windows}, spread over the validation split"
