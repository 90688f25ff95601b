"""Collect the results of a run for an HTML page, or for use in Python."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from attnlm.base import files
from attnlm.base.errors import AttnlmError
from attnlm.base.events import OnEvent, Progress, ignore
from attnlm.base.folders import resume_command
from attnlm.compute.device import choose_device
from attnlm.data.dataset import Dataset, ids_at
from attnlm.generation.sampler import Sampler, sampler_of
from attnlm.generation.sampling_config import SamplingConfig
from attnlm.model.inspection import check_finite
from attnlm.model.language_model import LanguageModel, Transformer
from attnlm.model.recorder import NotRecordedError, Recorder
from attnlm.model.spec import Use
from attnlm.runs.journal import PASSAGE, Snapshot
from attnlm.runs.load_model import load_model
from attnlm.runs.run import Result, Run, open_dataset_of, open_run
from attnlm.see.attend import Attention, compute_attention
from attnlm.see.attribution import attribution
from attnlm.see.curves import verdict
from attnlm.see.head_scores import TooShortError
from attnlm.see.heads import HeadsReport, heads
from attnlm.see.heads_over_training import HeadsOverTraining, heads_over_training
from attnlm.see.reproduce import import_command, prepare_command, sample_command, train_command
from attnlm.see.shown_tokens import check_windows, ids_within_context
from attnlm.training.learning_rate import learning_rate

STAGES = 3
"""The number of stages in progress events: scoring heads, sampling, and drawing the page."""

_TOKENS = 500  # in `Report.sample`
_SEED = 1


@dataclass(frozen=True)
class LensRow:
    """A row of `logit_lens`: the K likeliest next tokens for each of T tokens, likeliest first."""

    name: str
    ids: NDArray[np.int64]
    """(T, K)"""
    probabilities: NDArray[np.float32]
    """(T, K)"""


@dataclass(frozen=True, repr=False)
class Report:
    """A run's training, its snapshots, and the forward pass of its checkpoint over a text."""

    run: Run
    checkpoint: str
    result: Result | None
    """the results of the run's evaluations; None for an imported run"""
    snapshots: Sequence[Snapshot]
    """snapshots at evaluations and early steps; empty if not recorded"""
    passage: Sequence[str]
    """the tokens that the snapshots' maps show"""
    text_is: str
    """the origin of the text that the model read, in words"""
    ids: list[int]
    attention: Attention
    lens: Sequence[LensRow]
    added: Sequence[tuple[str, float]]
    """what embedding, heads, MLPs and biases add to the logit of the likeliest token after the
    text; empty for a model without a residual stream"""
    heads: HeadsReport | None
    heads_over: str
    """the text that the heads were measured on, or why they were not measured"""
    over_training: HeadsOverTraining | None
    """the scores of heads in snapshots; None if they were not recorded"""
    data_gone: str
    """why the data set is missing, in words; empty if it was found"""
    commands: Sequence[str]
    """the commands that reproduce the run"""
    sample: str
    """a text of 500 tokens, sampled without a prompt"""
    sample_command: str
    """the command that prints `sample` again, on a CPU"""

    def __repr__(self) -> str:
        return f"<Report of {self.run.name!r}: {self.verdict}>"

    def write_page(self, path: str | Path | None = None) -> Path:
        """Write all of this as one HTML page that works offline; return the page's path.

        The default path is report.html in the run's folder. A file at `path` is replaced.
        """
        from attnlm.see.report_page import report_page

        page = self.run.path / "report.html" if path is None else Path(path)
        files.write_bytes(page, report_page(self))
        return page

    @property
    def verdict(self) -> str:
        """A sentence on how the training went."""
        if self.result is None:
            return "it was imported, so the page shows no training"
        return verdict(self.result.records, self.run.dataset, self.run.config.spec.name)

    @property
    def was_extended(self) -> bool:
        """True if steps were added later, so that the learning rate did not follow one schedule."""
        training = self.run.config.training
        return training.budget is None and any(
            not math.isclose(record.learning_rate, learning_rate(record.step, training))
            for record in (self.result.records if self.result else ())
        )

    def facts(self) -> dict[str, Any]:
        """Return the main results as JSON values."""
        return {
            "run": str(self.run.path),
            "model": self.run.config.spec.name,
            "parameters": self.run.parameters,
            "parent": self.run.parent and asdict(self.run.parent),
            "imported_from": self.run.imported_from,
            "best_val_loss": self.result and self.result.best.val_loss,
            "bits_per_byte": self.result and self.result.best.bits_per_byte,
            "accuracy": self.result and self.result.best.accuracy,
            "verdict": self.verdict,
            "tokens": self.attention.tokens,
            "added": [{"part": part, "logit": logit} for part, logit in self.added],
            "heads": [] if self.heads is None else self.heads.facts()["heads"],
            "sample": self.sample,
            "commands": [*self.commands, self.sample_command],
        }


def report(
    run: str | Path | Run | None = None,
    *,
    text: str | None = None,
    windows: int = 16,
    ablate: bool = False,
    checkpoint: str = "auto",
    device: str = "auto",
    checkpoint_dir: str | Path = "checkpoints",
    data_dir: str | Path = "data",
    on_event: OnEvent | None = None,
) -> Report:
    """Collect the results of a run (default: the one trained last).

        report = attnlm.report("multi-head-001", windows=4)
        print(report.verdict)
        report.write_page("report.html")

    The model reads `text` (default: the beginning of the validation split). Heads are scored over
    `windows` windows of that split. If `ablate` is set, the loss is also measured with each head
    silenced in turn. If the data set is missing, heads are scored on `text` only; if `text` is None
    too, they are not scored. An imported run has no data set: its heads are scored on `text`, or,
    if `text` is None, on random tokens. `on_event` receives events of type Progress, for each stage
    and each silenced head.

    Raises AttnlmError if the text does not fit the context or the vocabulary, if the run was
    trained here and never evaluated, and if the run's files are missing or damaged.
    """
    check_windows(windows)
    on_event = on_event or ignore
    run = open_run(run, checkpoint_dir=checkpoint_dir)
    result = run.result()
    if result is None and not run.imported_from:
        message = f"{run.name} has no evaluations yet"
        raise AttnlmError(message, f"resume it: {resume_command(run.path)}")
    text_ids = None if text is None else ids_within_context(run, text)
    checkpoint = run.checkpoint(checkpoint).which
    model, _ = load_model(run, checkpoint=checkpoint, device="cpu")
    sampler = sampler_of(model, run.tokenizer, choose_device("cpu", "float32"), on_event)
    dataset: Dataset | None = None
    why_missing = "it has no data set" if run.imported_from else ""
    if not run.imported_from:
        try:
            dataset = open_dataset_of(run, Path(data_dir))
        except AttnlmError as error:
            why_missing = error.message
    if text_ids is None:
        ids, text_is = _default_text(run, dataset, sampler, why_missing)
    else:
        ids, text_is = text_ids, "the text that was given"
    attention, recorder = compute_attention(run, model, ids)
    on_event(Progress("scoring heads", 0, STAGES, "step"))
    score = functools.partial(
        heads,
        run,
        windows=windows,
        ablate=ablate,
        checkpoint=checkpoint,
        device=device,
        data_dir=data_dir,
        on_event=on_event,
    )
    scores, heads_over = _scores_of_heads(run, score, dataset, text_ids, why_missing)
    over_training = None
    with contextlib.suppress(AttnlmError):
        over_training = heads_over_training(run)
    on_event(Progress("sampling", 1, STAGES, "step"))
    config = SamplingConfig(tokens=_TOKENS, seed=_SEED)
    commands = [prepare_command(dataset)] if dataset else []
    return Report(
        run=run,
        checkpoint=checkpoint,
        result=result,
        snapshots=run.ticker(),
        passage=run.ticker_passage(),
        text_is=text_is,
        ids=ids,
        attention=attention,
        lens=logit_lens(model, recorder),
        added=attribution(model, ids, int(recorder.logits[0, -1].argmax())),
        heads=scores,
        heads_over=heads_over,
        over_training=over_training,
        data_gone=why_missing,
        commands=[*commands, import_command(run) if run.imported_from else train_command(run)],
        sample="".join(sampler.stream(sampler.prompt_ids(""), config)),
        sample_command=sample_command(run, checkpoint, _TOKENS, _SEED),
    )


def _scores_of_heads(
    run: Run,
    score: Callable[..., HeadsReport],
    dataset: Dataset | None,
    text_ids: list[int] | None,
    why_missing: str,
) -> tuple[HeadsReport | None, str]:
    """Return the scores, and the text that they were measured on or why they were not measured.

    The text is the validation split if there is a data set, or else the text that was given.
    """
    if run.config.spec.reason_against(Use.ATTENTION_MAPS) is not None:
        return None, "the model has none"
    if dataset is None and text_ids is None and not run.imported_from:
        return None, why_missing
    try:
        report = score(text=text_ids if dataset is None else None)
    except (NotRecordedError, TooShortError) as error:
        return None, error.message
    if dataset is not None:
        return report, f"{report.measured_on}, spread over the validation split"
    if text_ids is not None:
        return report, f"{report.measured_on} of the text above only, since {why_missing}"
    return report, report.measured_on


def _default_text(
    run: Run, dataset: Dataset | None, sampler: Sampler, why_missing: str
) -> tuple[list[int], str]:
    """Return the ids that the model reads if no text was given, and their origin in words.

    The ids are the start of the validation split, from the data set or as the run recorded it. If
    neither exists, they are what the model itself begins with.
    """
    most = min(PASSAGE, run.config.spec.block_size)
    if dataset is not None:
        ids = ids_at(dataset.val, slice(most), run.vocab_size, "val.bin").tolist()
        return ids, f"the first {len(ids)} tokens of the validation split"
    try:
        ids = ids_within_context(run, "".join(run.ticker_passage()))
    except AttnlmError:  # not recorded, or its tokens are not whole characters
        ids = sampler.prompt_ids("")
        config = SamplingConfig(tokens=most - len(ids), ignore_eos=True)
        for _ in sampler.stream(ids, config):  # which extends `ids`
            pass
        return ids, f"the model's own first words, since {why_missing}"
    return ids, f"the first {len(ids)} tokens of the validation split, as the run recorded them"


@torch.inference_mode()
def logit_lens(model: LanguageModel, recorder: Recorder, count: int = 5) -> list[LensRow]:
    """Return the logit lens: the LM head applied after each layer (nostalgebraist, 2020).

    In a transformer every layer adds to one residual stream. The final norm and the LM head turn
    the last state of the stream into the prediction. The lens applies this norm and head to the
    earlier states too, skipping the layers above. The result has one row for the embeddings and one
    for each layer; the last row is the model's prediction. A row has the `count` likeliest tokens,
    or the whole vocabulary if it is smaller.

    The result is empty for a model without a residual stream. Raises NotFiniteError for NaN and
    infinity.
    """
    if not isinstance(model, Transformer) or not model.architecture.residual:
        return []
    streams = {"embedding": recorder.embedded}
    streams |= {f"layer {n}": layer.stream for n, layer in enumerate(recorder.layers, 1)}
    rows = []
    for name, stream_BTC in streams.items():
        if stream_BTC is None:
            continue
        logits_TV = model.read_out(stream_BTC[0])
        check_finite(logits_TV)
        likeliest = torch.softmax(logits_TV, -1).topk(min(count, model.vocab_size))
        rows.append(LensRow(name, likeliest.indices.numpy(), likeliest.values.numpy()))
    return rows
