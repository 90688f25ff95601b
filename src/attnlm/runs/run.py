"""A run's folder: configuration, tokenizer, metrics, checkpoints and ticker (model snapshots).

Importing this module does not load torch, which takes a second.
"""

from __future__ import annotations

import base64
import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import attnlm
from attnlm.base import files
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.folders import (
    CHECKPOINT_DIR,
    DATA_DIR,
    find_folder,
    how_to_make,
    is_folder,
    locked_for_training,
    put_back,
)
from attnlm.base.formatting import nats_and_bits
from attnlm.base.own_code import OwnCode, is_code_name
from attnlm.base.setting_fields import fields_of, read_record, record_from_json
from attnlm.config.settings import CHOSEN_BY_NAME, Config, resolve
from attnlm.data.dataset import Dataset, open_dataset
from attnlm.model.own_arguments import CODE
from attnlm.runs.checkpoint import load_facts
from attnlm.runs.journal import (
    EARLY_STEPS,
    EvaluationRecord,
    Journal,
    Snapshot,
    ranking_key,
)
from attnlm.runs.records import (
    NOT_COMPARABLE,
    CheckpointFacts,
    DatasetFacts,
    RunFacts,
    StoredRun,
    has_same_ids,
    reference_losses,
)
from attnlm.tokens import tokenizer

FORMAT = 1

COPY_THE_RUN = "copy the run's folder again from its source"
_FULL_TICKER = 2**25  # bytes
_KEPT = "step-{:06}.safetensors"


@dataclass(frozen=True)
class Result:
    """The results of a run's evaluations."""

    records: Sequence[EvaluationRecord]
    """one per evaluation during training, oldest first"""
    whole: Mapping[str, EvaluationRecord]
    """losses of `best` and `last` on the whole validation split; empty if not measured"""
    _evaluated_part: str
    _by_accuracy: bool = False

    @property
    def last(self) -> EvaluationRecord:
        """The newest record."""
        return self.records[-1]

    @property
    def best(self) -> EvaluationRecord:
        """The record with the lowest validation loss or, with `best_by` accuracy, the highest
        accuracy."""

        def key(record: EvaluationRecord) -> tuple[float, float]:
            return ranking_key(record.val_loss, record.accuracy if self._by_accuracy else None)

        return min(self.records, key=key)

    @property
    def final(self) -> EvaluationRecord:
        """The best checkpoint's step and losses; those on the whole split if they were measured."""
        return self.whole.get("best", self.best)

    @property
    def part(self) -> str:
        """The part that `final` is measured on: `65,536 of 1,115,394 tokens`; "" for all."""
        return "" if self.whole else self._evaluated_part

    def facts(self) -> dict[str, Any]:
        """Return the step reached, the best losses and the seconds of training."""
        return {
            "step": self.last.step,
            "val_loss": self.final.val_loss,
            "bits_per_byte": self.final.bits_per_byte,
            "seconds": self.last.seconds,
        }


@dataclass(frozen=True)
class Checkpoint:
    """One of a run's checkpoints."""

    which: str
    """best, last or, for weights that `keep_every` kept, their step"""
    path: Path
    step: int
    val_loss: float | None
    """in nats per token; None if no evaluation at this step is recorded"""
    part: str = ""
    """the part of the validation split that the loss was measured on; "" for the whole split"""
    leaks: bool = False
    """True if the model sees later tokens, so that the loss means nothing"""

    def __str__(self) -> str:
        evaluated = "no evaluation recorded"
        if self.val_loss is not None:
            evaluated = f"validation loss {self.val_loss:.4f}"
            evaluated += f" on {self.part}" if self.part else ""
            evaluated += f", {NOT_COMPARABLE}" if self.leaks else ""
        return f"{_kind_of(self.which)} checkpoint (step {self.step}, {evaluated})"


def _kind_of(which: str) -> str:
    """Return the word for a checkpoint: best, last or, for a step, kept."""
    return "kept" if which.isdecimal() else which


@dataclass(frozen=True)
class Run(RunFacts):
    """A model and its training. The folder `path` has all that sampling needs; resuming also needs
    the data set."""

    path: Path
    config: Config
    data_dir: Path = field(default=Path(DATA_DIR), compare=False)
    """where its data set is looked up by name if it is not at its recorded path"""

    def __repr__(self) -> str:
        return f"<Run {self.name!r}: {self.config.spec.name}, {self.parameters:,} parameters>"

    def _repr_html_(self) -> str | None:
        """Return HTML for a notebook, or None for damaged files: the notebook then shows repr.

        The HTML has a table about the run, and its loss curve if curve.png exists.
        """
        picture = ""
        try:
            facts = {"run": self.name, "folder": str(self.path), **run_summary(self)}
            if (curve := self.path / "curve.png").is_file():
                content = base64.b64encode(files.read_bytes(curve)).decode()
                picture = (
                    f'<img alt="loss by step" width="560" src="data:image/png;base64,{content}"/>'
                )
        except (AttnlmError, OSError):
            return None
        cell = '<tr><th style="text-align:left">{}</th><td style="text-align:left">{}</td></tr>'
        rows = "".join(cell.format(escape(label), escape(fact)) for label, fact in facts.items())
        return f"<div><table>{rows}</table>{picture}</div>"

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def best(self) -> Path:
        return self.path / "best.safetensors"

    @property
    def last(self) -> Path:
        return self.path / "last.safetensors"

    @property
    def started_from(self) -> str:
        """The origin of its weights: `multi-head-001, best checkpoint (step 1,000)`, or ""."""
        if self.parent is None:
            return ""
        kind = _kind_of(self.parent.checkpoint)
        return f"{self.parent.name}, {kind} checkpoint (step {self.parent.step:,})"

    @property
    def evaluated_part(self) -> str:
        """The part evaluated: `65,536 of 1,115,394 tokens`; "" for the whole validation split."""
        most = self.config.training.eval_tokens
        length = self.config.spec.block_size
        if most is None or most >= self.dataset.val_tokens - 1:
            return ""
        return f"{max(1, most // length) * length:,} of {self.dataset.val_tokens:,} tokens"

    @property
    def is_finished(self) -> bool:
        """Return True if the run has made all its steps, or its patience ran out."""
        if not self.last.exists():
            return False
        saved, training = self.facts(self.last), self.config.training
        is_out_of_patience = training.patience is not None and saved.stale >= training.patience
        is_complete = saved.step == training.steps or is_out_of_patience
        return saved.step == saved.evaluated_step and is_complete

    def kept(self, step: int) -> Path:
        """Return the file of the weights that `keep_every` keeps of a step."""
        return self.path / _KEPT.format(step)

    def kept_steps(self) -> list[int]:
        """Return the steps whose weights were kept."""
        found = (re.fullmatch(r"step-(\d+)\.safetensors", p.name) for p in self.path.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def checkpoint(self, which: str | int | Checkpoint = "auto") -> Checkpoint:
        """Return the checkpoint `best`, `last` or `auto`, or the one that was kept of a step.

        `auto` means best, but last if best is missing or if only step 0 was evaluated. Raises
        UsageError for any other word and for a step that was not kept, AttnlmError if the file is
        missing or damaged.
        """
        if isinstance(which, Checkpoint):
            return which
        which = str(which)
        if which == "auto":
            which = "best"
            if self.last.exists():
                is_untrained = self.best.exists() and self.facts(self.best).step == 0
                last = self.facts(self.last) if is_untrained else None
                if not self.best.exists() or (last and last.evaluated_step == 0 < last.step):
                    which = "last"
        paths = {str(step): self.kept(step) for step in self.kept_steps()}
        paths |= {"best": self.best, "last": self.last}
        if which not in paths:
            raise UsageError(
                f"invalid value for `checkpoint`: {which!r}",
                f"of {self.name}, choose from {', '.join(paths)}, auto",
            )
        facts = self.facts(paths[which])
        loss = facts.val_loss
        if loss is None:
            with contextlib.suppress(AttnlmError):  # the checkpoint is usable without metrics
                losses = {record.step: record.val_loss for record in self.evaluations()}
                loss = losses.get(facts.step)
        part, leaks = self.evaluated_part, bool(self.leaks)
        return Checkpoint(which, paths[which], facts.step, loss, part, leaks)

    def facts(self, path: Path) -> CheckpointFacts:
        """Return what the checkpoint at `path` holds with the tensors. Raises AttnlmError."""
        return record_from_json(CheckpointFacts, load_facts(path), path, COPY_THE_RUN)

    @cached_property
    def tokenizer(self) -> tokenizer.Tokenizer:
        """The tokenizer of the run's data, loaded from the run's folder."""
        path = self.path / "tokenizer.json"
        loaded = tokenizer.load_tokenizer(path)
        if loaded.vocab_size != self.vocab_size:
            raise AttnlmError(
                f"{path} has {loaded.vocab_size:,} ids, but config.json has {self.vocab_size:,}",
                COPY_THE_RUN,
            )
        loaded.dataset = self.dataset.name
        return loaded

    def open_dataset(self, *, verify: bool = False) -> Dataset:
        """Return the run's data set, at the path that it recorded or by its name in `data_dir`.

        Raises AttnlmError if the data set is missing or has changed, or if the run was imported.
        """
        if self.imported_from:
            raise AttnlmError(
                f"{self.name} was imported and has no data set",
                f"prepare one with `tokenizer` {self.path}, then name it as `data`",
            )
        return open_recorded(
            self.name, self.dataset, self.data_dir, verify=verify, vocab_size=self.vocab_size
        )

    def metrics(self) -> list[dict[str, Any]]:
        """Return one record per evaluation, oldest first. A line cut off by a crash is left out.

            losses = [(record["step"], record["val_loss"]) for record in run.metrics()]

        `pandas.DataFrame(run.metrics())` makes a table. Raises AttnlmError if the file is
        damaged, or if it has not the best and the newest evaluation that the last checkpoint names.
        """
        return [
            {name: value for name, value in asdict(record).items() if name != "checkpoint"}
            for record in self.evaluations()
        ]

    def evaluations(self) -> list[EvaluationRecord]:
        """Return the records of `metrics`. Raises AttnlmError as `metrics` does."""
        return [record for record in self._records() if not record.checkpoint]

    def whole(self) -> dict[str, EvaluationRecord]:
        """Return the losses of the `best` and the `last` checkpoint on the whole validation split.

        The result is empty if evaluations covered the whole split anyway, or if measuring the whole
        split would have taken too long. Raises AttnlmError if the file is damaged.
        """
        return {record.checkpoint: record for record in self._records() if record.checkpoint}

    def result(self) -> Result | None:
        """Return the results of the run's evaluations, or None before the first.

        Raises AttnlmError if a file is damaged.
        """
        return self._result(self.evaluations(), self.whole())

    def _result(
        self, records: list[EvaluationRecord], whole: Mapping[str, EvaluationRecord]
    ) -> Result | None:
        by_accuracy = self.config.training.best_by == "accuracy"
        return Result(records, whole, self.evaluated_part, by_accuracy) if records else None

    def _records(self) -> list[EvaluationRecord]:
        """Return all lines of the metrics, after comparing them with the last checkpoint.

        Raises AttnlmError if they contradict it or each other.
        """
        saved = None  # read first: training adds a record before it saves the step
        with contextlib.suppress(AttnlmError):
            saved = self.facts(self.last)
        records = self._metrics.records()
        for record in records:  # bits and nats differ by the same factor in all of them
            first = records[0]
            bits, others = record.bits_per_byte or 0.0, first.bits_per_byte or 0.0
            if record.checkpoint and not math.isclose(
                record.val_loss * others, first.val_loss * bits, rel_tol=1e-6
            ):
                raise self._metrics.damaged_error()
        if saved is None or saved.evaluated_step < 0 or not self._metrics.path.exists():
            return records
        last = saved.evaluated_step
        known = [r for r in records if not r.checkpoint and r.step <= last]
        if result := self._result(known, {}):
            best = result.best
            accuracy = best.accuracy if self.config.training.best_by == "accuracy" else None
            found = (result.last.step, best.step, best.val_loss, accuracy)
            if found == (last, saved.best_step, saved.best_loss, saved.best_accuracy):
                return records
        raise AttnlmError(
            f"{self._metrics.path} is damaged: by {self.last.name}, the last evaluation is of step "
            f"{last}, and the best one of step {saved.best_step}, with loss {saved.best_loss:.4f}",
            COPY_THE_RUN,
        )

    def evaluations_until(self, evaluated_step: int) -> list[EvaluationRecord]:
        """Return the records up to the step `evaluated_step`; [] for −1 (before any evaluation).

        Raises AttnlmError if the record of `evaluated_step` is missing, or if steps do not rise.
        """
        records = [record for record in self.evaluations() if record.step <= evaluated_step]
        steps = [-1, *(record.step for record in records)]
        if steps[-1] != evaluated_step or steps != sorted(set(steps)):
            raise self._metrics.damaged_error()
        return records

    def ticker(self) -> list[Snapshot]:
        """Return the snapshots of the model, oldest first; [] for imported runs.

        Training takes them at evaluations and at steps 1, 3, 10 and 30.

        Raises AttnlmError if the file is damaged. Missing lines are not detected.
        """
        return self._ticker.records()

    def ticker_passage(self) -> list[str]:
        """Return the tokens whose attention the snapshots' maps show, or [] if there are none."""
        return next((list(r.passage) for r in self.ticker() if r.passage), [])

    def references(self) -> dict[str, float]:
        """Return losses to compare with, in nats per token, keyed by a label such as `floor`."""
        return reference_losses(self.vocab_size, self.dataset)

    def append_evaluations(self, *records: EvaluationRecord) -> None:
        """Add records to the metrics."""
        self._metrics.append(*records)

    def append_snapshot(self, snapshot: Snapshot) -> None:
        """Add a snapshot to the ticker unless it is full; only its first line has the passage."""
        if size := self._ticker.size():
            snapshot = replace(snapshot, passage=())
        if size < _FULL_TICKER:
            self._ticker.append(snapshot)

    def discard_after(self, evaluated_step: int, step: int) -> None:
        """Drop evaluations after `evaluated_step`, snapshots from `step` on, losses on the whole
        split, and weights that were kept of steps after `step`."""
        metrics = self.evaluations_until(evaluated_step)
        steps = {record.step for record in metrics} | {n for n in EARLY_STEPS if n < step}
        ticker = [snapshot for snapshot in self.ticker() if snapshot.step in steps]
        self._metrics.replace(metrics)
        self._ticker.replace(ticker)
        for kept in self.kept_steps():
            if kept > step:
                self.kept(kept).unlink()

    @property
    def _metrics(self) -> Journal[EvaluationRecord]:
        path = self.path / "metrics.jsonl"
        return Journal(path, EvaluationRecord, COPY_THE_RUN)

    @property
    def _ticker(self) -> Journal[Snapshot]:
        hint = "remove it: the run does not need it, and will write a new one"
        return Journal(self.path / "ticker.jsonl", Snapshot, hint)

    @contextlib.contextmanager
    def training_lock(self) -> Iterator[None]:
        """Hold the run's training lock. Once it is held, remove the leftovers of killed processes.

        Raises AttnlmError if another process is training the run.
        """
        with locked_for_training(
            self.path, "wait until that process ends, or stop it, or train another run"
        ):
            files.remove_leftovers(self.path)
            files.remove_leftovers(self.path.parent)
            yield

    def save_config(self) -> None:
        """Write config.json."""
        values = {name: getattr(self, name) for name in fields_of(StoredRun)}
        stored = StoredRun(**{**values, "config": self.config.settings()})
        content = {"format": FORMAT, "attnlm": attnlm.__version__, **asdict(stored)}
        files.write_json(self.path / "config.json", content)


def open_run(
    name: str | Path | Run | None = None,
    *,
    checkpoint_dir: str | Path = CHECKPOINT_DIR,
    data_dir: str | Path = DATA_DIR,
) -> Run:
    """Return the run called `name` in `checkpoint_dir`, or at the path `name`; default: the newest.

        run = attnlm.open_run("multi-head-001")
        run.config.training.steps, run.metrics()[-1]["val_loss"]

    All functions that take a run take it by its name or path, or open. The run's data set is looked
    up in `data_dir` if it was moved. A Run is returned unchanged. Raises AttnlmError if the run
    does not exist or its configuration is not valid.
    """
    if isinstance(name, Run):
        return name
    path = find_folder(name, Path(checkpoint_dir), kind="run")
    if not (path / "config.json").exists():
        raise AttnlmError(
            f"{path} is not a run: it has no config.json", how_to_make("run", Path(checkpoint_dir))
        )
    stored = read_record(StoredRun, path / "config.json", format=FORMAT, hint=COPY_THE_RUN)
    try:
        config = resolve({}, with_recorded_code(stored.config, path / CODE))
    except AttnlmError as error:
        reason = error.message.removeprefix("in the recipe: ").replace("`", "")
        raise AttnlmError(
            f"{path / 'config.json'} is not valid: {reason}", f"{error.hint}; or {COPY_THE_RUN}"
        ) from None
    return Run(path, data_dir=Path(data_dir), **{**vars(stored), "config": config})


def with_recorded_code(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the settings in config.json with the own code that the run keeps in a folder."""
    hashes = dict(re.findall(r"(.+?):([0-9a-f]{64})(?: |$)", str(config.get(CODE, ""))))
    settings = dict(config)
    for name in CHOSEN_BY_NAME:
        value = settings.get(name)
        file = str(value).rpartition(":")[0]
        if is_code_name(value) and file in hashes and file == Path(file).name:
            settings[name] = OwnCode(str(value), folder / file, hashes[file])
    return settings


def open_recorded(
    owner: str,
    recorded: DatasetFacts,
    data_dir: Path,
    dataset: str | Path | Dataset | None = None,
    *,
    verify: bool = False,
    vocab_size: int | None = None,
) -> Dataset:
    """Return the data set that a run or ladder, the `owner`, recorded.

    It is `dataset` or, by default, at its recorded path or else in `data_dir` by its name. Raises
    AttnlmError if it is missing, or has other ids than recorded or not `vocab_size` of them.
    """
    path = Path(recorded.path)
    if dataset is None:
        put_back(data_dir)
        dataset = path if is_folder(path) else recorded.name
        if not is_folder(path) and not is_folder(data_dir / recorded.name):
            raise AttnlmError(
                f"the data set of {owner} is gone: {path}",
                "prepare it again, or move it back to this place",
            )
    opened = open_dataset(dataset, data_dir=data_dir, verify=verify)
    if not has_same_ids(opened, recorded) or vocab_size not in (None, opened.vocab_size):
        raise AttnlmError(
            f"{opened.path} is not the data set that {owner} was trained on",
            f"prepare the original data set again, or move it to {path}",
        )
    return opened


def run_summary(run: Run) -> dict[str, str]:
    """Return facts about a run by label: its model, data and losses, but no times."""
    training = run.config.training
    dataset = run.dataset
    summary = {"model": f"{run.config.spec.name}, {run.parameters:,} parameters"}
    if run.imported_from:
        vocabulary = f"{run.vocab_size:,} ids ({run.tokenizer.name})"
        return {**summary, "vocabulary": vocabulary, "imported from": run.imported_from}
    summary["data"] = (
        f"{dataset.name}: {run.vocab_size:,} ids, {dataset.train_tokens:,} tokens for training, "
        f"{dataset.val_tokens:,} for validation"
    )
    if run.started_from:
        summary["started from"] = run.started_from
    result = run.result()
    step = 0 if result is None else result.last.step
    batch = f"{training.batch_size} × {run.config.spec.block_size} tokens"
    summary["steps"] = f"{step:,} of {training.length_text}, each {batch}, seed {training.seed}"
    if result is not None:
        best = f"best loss, {run.evaluated_part or 'whole split'}"
        losses = {best: result.best}
        losses |= {f"{which} loss, whole split": result.whole[which] for which in result.whole}
        for label, record in losses.items():
            right = "" if record.accuracy is None else f"{record.accuracy:.1%} of answers right, "
            summary[label] = (
                f"{right}{nats_and_bits(record.val_loss, record.bits_per_byte)}, "
                f"at step {record.step:,}"
            )
    if run.leaks:
        summary["not comparable"] = run.leaks
    baselines = (f"{name} {loss:z.4f}" for name, loss in run.references().items())
    return {**summary, "baselines": ", ".join(baselines)}
