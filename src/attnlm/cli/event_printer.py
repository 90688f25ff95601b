"""A listener that prints the library's events, and functions for texts of several commands."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from attnlm.base.events import Note
from attnlm.base.formatting import quantity
from attnlm.base.setting_fields import Setting
from attnlm.cli.console import escape_unprintable, say, say_facts, terminal, with_flags
from attnlm.config.settings import resolve
from attnlm.config.training import TrainingConfig
from attnlm.runs.records import DatasetFacts, reference_losses
from attnlm.see.progress_bar import ProgressBar

if TYPE_CHECKING:
    from attnlm.compute.device import Device
    from attnlm.data.dataset import Dataset
    from attnlm.model.spec import ModelSpec
    from attnlm.runs.run import Run
    from attnlm.training.events import Started

BEGINNING = ("data", "model", "started from", "steps")
"""The facts of a run that are shown when it begins."""
_SIZES = (
    "layers", "heads", "kv_heads", "embed_dim", "head_size", "mlp_width",
    "block_size", "dropout",
)  # fmt: skip


def baselines(vocab_size: int, dataset: DatasetFacts | Dataset) -> str:
    """Return the losses to compare a model's loss with, in one line."""
    losses = reference_losses(vocab_size, dataset)
    return ", ".join(f"{name} {loss:z.4f}" for name, loss in losses.items()) + " nats per token"


def setting_text(value: Setting) -> str:
    """Return a setting's value for a reader: `yes`, `0.03`, `1000000`."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() else f"{value:g}"
    return str(value)


def parts_in_words(model: ModelSpec) -> str:
    """Return `heads 4, embed_dim 64, mlp none`: sizes, and settings not at the model's default."""
    settings = model.settings()
    usual = resolve({"model": model.preset}).spec.settings() if model.preset else {}
    sizes = [name for name in _SIZES if settings.get(name)]
    changed = [n for n in settings if n not in _SIZES and settings[n] != usual.get(n)]
    return ", ".join(f"{name} {setting_text(settings[name])}" for name in (*sizes, *changed))


def computation(training: TrainingConfig, device: Device, memory: int) -> dict[str, str]:
    """Return where and how a run is computed, by label; "" for what does not apply."""
    threads = f", {counted(training.threads or 1, 'thread')}" if device.name == "cpu" else ""
    processes = training.processes
    split = [counted(processes, "process")] if processes > 1 else []
    if training.micro_batch_size is not None:
        split.append(f"at most {counted(training.micro_batch_size, 'window')} at once")
    each = ", in each process" if processes > 1 else ""
    return {
        "device": f"{device.name} ({device.reason}), {device.dtype}{threads}",
        "split": ", ".join(split),
        "memory": f"about {quantity(memory, 'B')} in addition to PyTorch{each}",
    }


class Display(ProgressBar):
    """A listener for the library's events, which prints notes and the course of training runs.

    Each note is a line. Each training run has a header and then its progress: on a terminal, a bar
    below samples from the model; elsewhere, lines. With `quiet`, only notes are printed.
    """

    def __init__(self, quiet: bool = False) -> None:
        super().__init__()
        self.quiet = quiet
        self.run: Run | None = None  # once it has begun

    def __call__(self, event: object) -> None:
        """Print an event."""
        from attnlm.training.events import Evaluated, Finished, Started

        if isinstance(event, Started):
            self.run = event.run
        if isinstance(event, Finished):
            self.close()
            if event.out_of_patience:
                say(f"stopped at step {event.step}: no improvement in --patience evaluations")
        elif isinstance(event, Note) or not self.quiet:
            if isinstance(event, Started):
                say_facts(_header(event))
            elif isinstance(event, Evaluated) and event.snapshot and sys.stderr.isatty():
                self.clear()
                text = escape_unprintable(event.snapshot.text.replace("\n", "⏎"))
                line = f"step {event.step:>6}  validation {event.val_loss:.4f}  {text}"
                terminal(sys.stderr).print(line, style="dim", no_wrap=True, overflow="ellipsis")
            super().__call__(event)

    def note(self, text: str) -> None:
        """Print a note."""
        self.clear()
        say(with_flags(text))


def _header(event: Started) -> dict[str, str]:
    """Return the lines to print before a training run, by label; "" for a label without a value."""
    from attnlm.runs.run import run_summary  # loads numpy

    run = event.run
    training = run.config.training
    summary = run_summary(run)
    part = run.evaluated_part
    return {
        **{label: summary.get(label, "") for label in BEGINNING},
        "model": f"{summary['model']}: {parts_in_words(run.config.spec)}",
        "training": f"optimizer {training.optimizer}, learning rate {training.learning_rate:g}, "
        f"{training.schedule} schedule",
        "evaluation": f"on {part}, spread evenly" if part else "",
        **computation(training, event.device, event.memory),
        "run": str(run.path),
    }


def counted(number: int, noun: str) -> str:
    """Return `1 step` or `800 steps`."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{plural if number != 1 else ''}"
