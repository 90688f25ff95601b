"""A listener that prints the library's events, and functions for texts of several commands."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from attnlm.base.events import Note
from attnlm.base.formatting import byte_size, duration
from attnlm.cli.console import say, say_aside, say_facts, with_flags
from attnlm.cli.help import setting_text
from attnlm.config.settings import resolve
from attnlm.config.training import TrainingConfig
from attnlm.runs.records import DatasetFacts, reference_losses
from attnlm.see.progress_bar import ProgressBar

if TYPE_CHECKING:
    from attnlm.data.dataset import Dataset
    from attnlm.model.spec import ModelSpec
    from attnlm.runs.run import Run
    from attnlm.training.events import Started


def baselines(vocab_size: int, dataset: DatasetFacts | Dataset) -> str:
    """Return the losses to compare a model's loss with, in one line."""
    losses = reference_losses(vocab_size, dataset)
    return ", ".join(f"{name} {loss:z.4f}" for name, loss in losses.items()) + " nats per token"


_SIZES = (
    "layers", "heads", "kv_heads", "embed_dim", "head_size", "mlp_width",
    "block_size", "dropout",
)  # fmt: skip


def parts_in_words(model: ModelSpec) -> str:
    """Return `heads 4, embed_dim 64, mlp none`: sizes, and settings not at the model's default."""
    settings = model.settings()
    usual = resolve({"model": model.preset}).spec.settings() if model.preset else {}
    sizes = [name for name in _SIZES if settings.get(name)]
    changed = [n for n in settings if n not in _SIZES and settings[n] != usual.get(n)]
    return ", ".join(f"{name} {setting_text(settings[name])}" for name in (*sizes, *changed))


class Display(ProgressBar):
    """A listener for the library's events, which prints notes and the course of training runs.

    Each note is a line. Each training run has a header and then its progress: on a terminal, a bar
    below samples from the model; elsewhere, lines. With `quiet`, only notes are printed. `log` has
    the experiment trackers named with --log, such as tensorboard.
    """

    def __init__(self, quiet: bool = False, log: Sequence[str] = ()) -> None:
        super().__init__()
        self.quiet, self.log = quiet, log
        self.run: Run | None = None  # once it has begun
        self.memory: int | None = None  # its estimate in bytes

    def __call__(self, event: object) -> None:
        """Print an event."""
        from attnlm.training.events import Evaluated, Finished, Started

        if isinstance(event, Started):
            self.run, self.memory = event.run, event.memory
        if isinstance(event, Note):
            self.clear()
            say(with_flags(event.text))
        elif isinstance(event, Finished):
            self.close()
            if event.out_of_patience:
                say(f"stopped at step {event.step}: no improvement in --patience evaluations")
        elif not self.quiet:
            if isinstance(event, Started):
                say_facts(_header(event, self.log))
            elif isinstance(event, Evaluated) and event.snapshot is not None:
                self.clear()
                text = event.snapshot.text.replace("\n", "⏎")
                say_aside(f"step {event.step:>6}  {event.val_loss:.4f}  {text}")
            super().__call__(event)


def _header(event: Started, log: Sequence[str]) -> dict[str, str]:
    """Return the lines to print before a training run, by label; "" for a label without a value."""
    run = event.run
    dataset = run.dataset
    model = run.config.spec
    training = run.config.training.complete()
    device = event.device
    part = run.evaluated_part
    threads = f", {counted(training.threads, 'thread')}" if device.name == "cpu" else ""
    folder = shlex.quote(str(run.path.parent))
    each = ", in each process" if training.processes > 1 else ""
    return {
        "data": f"{dataset.name}: {run.vocab_size:,} ids, "
        f"{dataset.train_tokens:,} tokens to train on, {dataset.val_tokens:,} to validate",
        "model": f"{model.name}, {run.parameters:,} parameters: {parts_in_words(model)}",
        "start": f"the weights of {run.started_from}" if run.started_from else "",
        "training": f"{_length_in_words(training)} of {training.batch_size} × {model.block_size} "
        f"tokens, {training.optimizer} {training.learning_rate:g} {training.schedule}, "
        f"seed {training.seed}",
        "evaluation": f"on {part}, spread evenly" if part else "",
        "device": f"{device.name} ({device.reason}), {device.dtype}{threads}",
        "split": division_in_words(training),
        "memory": f"about {byte_size(event.memory)} in addition to PyTorch{each}",
        "run": str(run.path),
        "log": f"to see it: tensorboard --logdir {folder}" if "tensorboard" in log else "",
    }


def division_in_words(training: TrainingConfig) -> str:
    """Return `2 processes, at most 8 windows at once`, as far as this applies."""
    words = [counted(training.processes, "process")] if training.processes > 1 else []
    if training.micro_batch_size is not None:
        words.append(f"at most {counted(training.micro_batch_size, 'window')} at once")
    return ", ".join([*words, *(["activations recomputed"] if training.recompute else [])])


def _length_in_words(training: TrainingConfig) -> str:
    """Return the length of training: `800 steps`, `2 min, at most 800 steps` or `2 min in steps`.

    The header continues it: `2 min in steps of 32 × 64 tokens`.
    """
    steps = "in steps" if training.steps is None else counted(training.steps, "step")
    if training.budget is None:
        return steps
    most = "" if training.steps is None else ", at most"
    return f"{duration(training.budget)}{most} {steps}"


def counted(number: int, noun: str) -> str:
    """Return `1 step` or `800 steps`."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{plural if number != 1 else ''}"
