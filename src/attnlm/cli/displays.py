"""Listeners that display the library's events, and texts that several commands print."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attnlm.base.events import Note, Progress
from attnlm.base.readable import byte_size, duration, harmless
from attnlm.cli.console import (
    has_colour,
    result,
    say,
    say_aside,
    say_facts,
    with_flags,
    write,
)
from attnlm.cli.help import in_words
from attnlm.config.settings import Config, resolve
from attnlm.config.training import TrainingConfig
from attnlm.model.sizes import adapter_numbers
from attnlm.see.progress_bar import ProgressBar

if TYPE_CHECKING:
    from attnlm.compute.device import Device
    from attnlm.generation.sampling import Choice
    from attnlm.model.architecture import Architecture
    from attnlm.runs.run import Run


def reference_losses(vocab_size: int, bigram: float | None, floor: float | None) -> str:
    """Return the known losses to compare a model's loss with: guessing, bigram and floor."""
    parts = [f"guessing (ln V) {math.log(vocab_size):.4f}"]
    if bigram is not None:
        parts.append(f"counted bigram {bigram:z.4f}")
    if floor is not None:
        parts.append(f"floor {floor:z.4f}")
    return ", ".join(parts) + " nats per token"


_SIZES = (
    *("layers", "heads", "kv_heads", "embed_dim", "head_size", "mlp_width"),
    *("block_size", "dropout"),
)


def parts_in_words(model: Architecture) -> str:
    """Return `heads 4, embed_dim 64, mlp none`: sizes, and settings not at the default."""
    settings, usual = model.settings(), resolve({"model": model.model}).model.settings()
    sizes = [name for name in _SIZES if settings.get(name)]
    changed = [n for n in settings if n not in _SIZES and settings[n] != usual.get(n)]
    return ", ".join(f"{name} {in_words(settings[name])}" for name in (*sizes, *changed))


class PreparationDisplay:
    """Listener that prints notes as lines, and progress as bars, or as lines without a terminal."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet, self._bar = quiet, ProgressBar()

    def __call__(self, event: object) -> None:
        if isinstance(event, Note):
            self.close()
            say(with_flags(event.text))
        elif isinstance(event, Progress) and not self._quiet:
            self._bar(event)

    def close(self) -> None:
        """End the open bar."""
        self._bar.close()


_SECONDS_BETWEEN_LINES = 0.25
# Without a terminal, the time left is printed once, after this many seconds of steps, and only if
# it is at least this long.
_SECONDS_OF_STEPS, _SECONDS_WORTH_TELLING = 3.0, 60.0


_TENSORBOARD = "tensorboard --logdir"


@dataclass
class TrainingDisplay:
    """Listener to `train` that prints a header, then a bar below samples, or a line per loss."""

    quiet: bool = False
    log: Sequence[str] = ()
    """The tools named with --log."""
    run: Run | None = None
    """The run, once it has begun."""
    memory: int | None = None
    """Estimated memory of the run, in bytes."""
    _bar: ProgressBar | None = None  # on a terminal
    _next_line: float = 0.0
    _tell_time_at: float | None = None  # None before the first steps

    def __call__(self, event: object) -> None:
        from attnlm.training.events import Evaluated, Finished, Started, Stepped

        if isinstance(event, Note):
            self._say(with_flags(event.text))
        elif isinstance(event, Started):
            self.run, self.memory = event.run, event.memory
            if not self.quiet:
                self._started(event)
        elif isinstance(event, Stepped) and not self.quiet:
            self._stepped(event)
        elif isinstance(event, Evaluated) and not self.quiet:
            self._evaluated(event)
        elif isinstance(event, Finished):
            self.close()
            if event.out_of_patience:
                self._say(f"stopped at step {event.step}: --patience ran out")

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _started(self, event: Any) -> None:
        run, training, dataset = event.run, event.run.config.training, event.run.dataset
        model, part = run.config.model, run.evaluated_part
        folder = shlex.quote(str(run.path.parent))
        is_shown = "tensorboard" in self.log or (run.path / "tensorboard").exists()
        say_facts(
            {
                "data": f"{dataset['name']}: {run.vocab_size:,} ids, "
                f"{dataset['train_tokens']:,} tokens to train on, "
                f"{dataset['val_tokens']:,} to validate",
                "model": f"{model.model}, {run.parameters:,} parameters: {parts_in_words(model)}",
                **({"start": f"the weights of {run.started_from}"} if run.started_from else {}),
                **adapters_in_words(run.config),
                "training": f"{_length_in_words(training)} of "
                f"{training.batch_size} × {model.block_size} tokens, "
                f"{training.optimizer} {training.learning_rate:g} "
                f"{training.schedule}, seed {training.seed}",
                **({"evaluation": f"on {part}, spread evenly"} if part else {}),
                "device": _device_in_words(event.device, training.threads),
                **({"split": division} if (division := division_in_words(training)) else {}),
                "memory": f"about {byte_size(event.memory)} in addition to PyTorch"
                + (", in each process" if training.processes > 1 else ""),
                "run": str(run.path),
                **({"log": f"to see it: {_TENSORBOARD} {folder}"} if is_shown else {}),
            }
        )
        if sys.stderr.isatty():
            self._bar = ProgressBar()
            self._bar(event)
        self._tell_time_at = None

    def _stepped(self, event: Any) -> None:
        if self._bar is not None:
            self._bar(event)
            return
        now = time.perf_counter()
        if self._tell_time_at is None:
            self._tell_time_at = now + _SECONDS_OF_STEPS
        elif now >= self._tell_time_at:
            self._tell_time_at = math.inf
            if event.seconds_left >= _SECONDS_WORTH_TELLING:
                say(f"step {event.step:>6}  about {duration(event.seconds_left, 2)} left")

    def _evaluated(self, event: Any) -> None:
        if self._bar is None:
            say(str(event))
            return
        self._said(event)
        self._bar(event)

    def _said(self, event: Any) -> None:
        """Print the model's current sample above the bar; skip some if evaluations come quickly."""
        assert self._bar is not None
        now = time.perf_counter()
        if event.snapshot is None or (now < self._next_line and not event.is_last):
            return
        self._next_line = now + _SECONDS_BETWEEN_LINES
        self._bar.clear()
        text = event.snapshot.text.replace("\n", "⏎")
        say_aside(f"step {event.step:>6}  {event.record['val_loss']:.4f}  {text}")

    def _say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.clear()
        say(text)


def adapters_in_words(config: Config) -> dict[str, str]:
    """Return `rank 8 on query, value: 294,912 parameters are trained`; {} without adapters."""
    lora = config.training.adapters
    if lora is None:
        return {}
    numbers = adapter_numbers(config.model, lora)
    on = ", ".join(lora.on)
    return {"adapters": f"rank {lora.rank} on {on}: {numbers:,} parameters are trained"}


def division_in_words(training: TrainingConfig) -> str:
    """Return `2 processes, sharded, at most 8 windows at once, activations recomputed`, or some."""
    words = [_counted(training.processes, "process")] if training.processes > 1 else []
    words += ["sharded"] if training.is_sharded else []
    if training.micro_batch_size is not None:
        words.append(f"at most {_counted(training.micro_batch_size, 'window')} at once")
    return ", ".join([*words, *(["activations recomputed"] if training.recompute else [])])


def _device_in_words(device: Device, threads: int) -> str:
    on_cpu = f", {_counted(threads, 'thread')}" if device.name == "cpu" else ""
    return f"{device.name} ({device.reason}), {device.dtype}{on_cpu}"


def _length_in_words(training: TrainingConfig) -> str:
    """Return `800 steps`, `2 min in steps` or `2 min, at most 800 steps`."""
    steps = "in steps" if training.steps is None else _counted(training.steps, "step")
    if training.budget is None:
        return steps
    most = "" if training.steps is None else ", at most"
    return f"{duration(training.budget)}{most} {steps}"


def _counted(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{plural if number != 1 else ''}"


@dataclass
class ChoiceDisplay:
    """Display of tokens with probabilities: tinted text on a terminal, else a line per token."""

    _boldest: list[Choice] = field(default_factory=list)

    def begin(self, prompt: str) -> None:
        """Print the prompt, if the text is shown in colour."""
        if has_colour():
            write(prompt)

    def __call__(self, choice: Choice) -> None:
        if not has_colour():
            result(choice_in_words(choice))
            return
        from rich.console import Console
        from rich.text import Text

        from attnlm.see.text import tint

        # Print line ends without colour: the tint would fill the rest of the line.
        for piece in choice.text.splitlines(keepends=True):
            line = piece.rstrip("\r\n")
            Console(file=sys.stdout, highlight=False, soft_wrap=True).print(
                Text.assemble((harmless(line), tint(choice.probability))),
                end="\n" if piece.endswith("\n") else "",
            )
        sys.stdout.flush()
        self._boldest = sorted([*self._boldest, choice], key=lambda c: c.probability)[:_BOLDEST]

    def end(self) -> None:
        """Print the least likely choices with the likeliest others, after a coloured text."""
        if self._boldest:
            write("\n\nleast likely tokens, each with the likeliest others\n")
            for choice in self._boldest:
                result(choice_in_words(choice))


_BOLDEST = 10


def choice_in_words(choice: Choice) -> str:
    """Return one line: token, probability, runners-up."""
    from attnlm.see.text import visible

    others = (f"{visible(token)} {p:.4f}" for token, p in choice.runners_up)
    return "\t".join((visible(choice.token), f"{choice.probability:.4f}", "  ".join(others)))
