"""How the command line looks: results on stdout, all else on stderr, bars only on a terminal."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attnlm.events import Note, Progress
from attnlm.readable import duration

if TYPE_CHECKING:
    from rich.text import Text
    from tqdm import tqdm

    from attnlm.run import Run
    from attnlm.sampling import Choice


def write(text: str) -> None:
    """A piece of what was asked for; on a terminal nothing in it can take that over."""
    sys.stdout.write(_harmless(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def _harmless(text: str) -> str:
    """With escapes in place of control characters, which move a terminal's cursor or command it.

    A text and its file's name may come from anybody, and a model may say what it read.
    """
    return text.translate(_ESCAPES)


_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}
_ESCAPES |= {ord(c): c for c in "\t\n"} | {ord("\r"): ""}  # line ends of Windows stay line ends


def result(text: str) -> None:
    """A line of what was asked for."""
    write(f"{text}\n")


def result_json(content: Mapping[str, Any]) -> None:
    """One object on one line. Raises ValueError for NaN and infinity, which JSON does not have."""
    result(json.dumps(content, allow_nan=False))


def has_colour() -> bool:
    """Whether stdout is a terminal whose reader wants colour."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not plain


def result_in_colour(lines: Callable[[int], Iterable[Text]]) -> None:
    """Lines of what was asked for, made for the terminal's width."""
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False)
    for line in lines(console.width):
        console.print(line)


@dataclass
class ChoiceDisplay:
    """Shows tokens with their probabilities: tinted on a terminal, a line for each elsewhere."""

    quiet: bool = False
    _boldest: list[Choice] = field(default_factory=list)

    def begin(self, prompt: str) -> None:
        """The prompt, where there is a text to read."""
        if not self.quiet and has_colour():
            write(prompt)

    def __call__(self, choice: Choice) -> None:
        if self.quiet:
            return
        if not has_colour():
            result(choice_in_words(choice))
            return
        from rich.console import Console
        from rich.text import Text

        from attnlm.see.tint import tint

        # Line ends without colour, or it would run to the end of the line.
        for piece in choice.text.splitlines(keepends=True):
            line = piece.rstrip("\r\n")
            Console(file=sys.stdout, highlight=False, soft_wrap=True).print(
                Text.assemble((_harmless(line), tint(choice.probability))),
                end="\n" if piece.endswith("\n") else "",
            )
        sys.stdout.flush()
        self._boldest = sorted([*self._boldest, choice], key=lambda c: c.probability)[:_BOLDEST]

    def end(self) -> None:
        """On a terminal, the least likely choices beside what was likelier."""
        if self._boldest:
            write("\n\nleast likely, beside the likeliest others\n")
            for choice in self._boldest:
                result(choice_in_words(choice))


_BOLDEST = 10


def choice_in_words(choice: Choice) -> str:
    """One line: token, probability, runners-up."""
    from attnlm.see.text import visible

    others = (f"{visible(token)} {p:.4f}" for token, p in choice.runners_up)
    return "\t".join((visible(choice.token), f"{choice.probability:.4f}", "  ".join(others)))


def say(text: str) -> None:
    """A line for the person at the keyboard."""
    shown = _harmless(text) if sys.stderr.isatty() else text
    print(shown, file=sys.stderr, flush=True)  # noqa: T201


def say_facts(facts: Mapping[str, str]) -> None:
    """Aligned lines `label  value`, the labels in colour on a terminal."""
    width = max(map(len, facts))
    for label, value in facts.items():
        say_styled(f"{label:<{width}}", "cyan", f"  {value}")


def say_styled(text: str, style: str, rest: str = "") -> None:
    """`text` in a style, `rest` plain; on anything but a terminal all plain."""
    if not sys.stderr.isatty():
        say(text + rest)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text.assemble((_harmless(text), style), _harmless(rest)))


def say_aside(text: str) -> None:
    """A dimmed line on a terminal, cut to its width."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    console.print(Text(_one_line(text), "dim"), no_wrap=True, overflow="ellipsis")


def say_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Rows under their header, the first column to the left and numbers to the right."""
    if sys.stderr.isatty():
        from rich.box import SIMPLE
        from rich.console import Console
        from rich.table import Table

        table = Table(*header, box=SIMPLE)
        for column in table.columns[1:]:
            column.justify = "right"
        for row in rows:
            table.add_row(*row)
        Console(stderr=True, highlight=False).print(table)
        return
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for first, *rest in (header, *rows):
        cells = [f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True)]
        say("  ".join([f"{first:<{widths[0]}}", *cells]).rstrip())


def say_next(command: str) -> None:
    """What to type after this."""
    say_styled("next", "bold green", f"  {command}")


def fail(message: str, hint: str) -> None:
    """What went wrong, and what to do about it."""
    say_styled("error:", "bold red", f" {_one_line(message)}")
    say_styled("hint:", "bold yellow", f" {_one_line(hint)}")


def _one_line(text: str) -> str:
    """With what is not printable escaped: names of files may hold anything."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def bar(total: float | None, unit: str, label: str, initial: float = 0) -> tqdm[Any]:
    """A progress bar on a terminal; nothing elsewhere."""
    from tqdm import tqdm

    return tqdm(
        total=total,
        initial=initial,
        unit=unit,
        unit_scale=unit != "step",
        desc=_harmless(label),
        file=sys.stderr,
        disable=not sys.stderr.isatty(),
        dynamic_ncols=True,
        leave=False,
    )


@dataclass
class PreparationDisplay:
    """Listens to `prepare`: notes as lines, progress as bars."""

    _bar: tqdm[Any] | None = None
    _task: str = ""

    def __call__(self, event: object) -> None:
        if isinstance(event, Note):
            self.close()
            say(event.text)
        elif isinstance(event, Progress) and sys.stderr.isatty():
            if self._bar is None or event.task != self._task:
                self.close()
                self._bar, self._task = bar(event.total, event.unit, event.task), event.task
            self._bar.n = event.done
            self._bar.refresh()

    def close(self) -> None:
        """Ends the bar that is open."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


_SECONDS_BETWEEN_LINES = 0.25
# Elsewhere than on a terminal the time left is told once: after steps of so many seconds, if it is
# as long as that.
_SECONDS_OF_STEPS, _SECONDS_WORTH_TELLING = 3.0, 60.0
# tqdm's own time left takes evaluations for steps, and begins far too long.
_TRAINING_BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


@dataclass
class TrainingDisplay:
    """Listens to `train`: a header; then a bar and what the model says, or losses line by line."""

    quiet: bool = False
    run: Run | None = None
    """The run, once it has begun."""
    _losses: dict[str, float] = field(default_factory=dict)
    _bar: tqdm[Any] | None = None
    _next_line: float = 0.0
    _time_left: str = "?"
    _tell_time_at: float | None = None  # None before the first steps

    def __call__(self, event: object) -> None:
        from attnlm.training import Evaluated, Finished, Started, Stepped

        if isinstance(event, Note):
            self._say(event.text)
        elif isinstance(event, Started):
            self.run = event.run
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
        """Ends the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _started(self, event: Any) -> None:
        from attnlm.memory import shown

        run, training, dataset = event.run, event.run.config.training, event.run.dataset
        model = run.config.model
        sizes = {
            "layers": model.layers,
            "heads": model.heads,
            "embed_dim": model.embed_dim,
            "head_size": model.head_size,
            "block_size": model.block_size,
            "dropout": model.dropout,
        }
        shape = ", ".join(f"{name} {value}" for name, value in sizes.items() if value)
        device = event.device
        say_facts(
            {
                "data": f"{dataset['name']}: {run.vocab_size:,} ids, "
                f"{dataset['train_tokens']:,} tokens to train on, "
                f"{dataset['val_tokens']:,} to validate",
                "model": f"{model.model}, {run.parameters:,} parameters: {shape}",
                "training": f"{training.steps:,} step{'s' if training.steps > 1 else ''} of "
                f"{training.batch_size} × "
                f"{model.block_size} tokens, {training.optimizer} {training.learning_rate:g} "
                f"{training.schedule}, seed {training.seed}",
                "device": f"{device.name} ({device.reason}), {device.dtype}"
                + (
                    f", {training.threads} thread{'s' if training.threads > 1 else ''}"
                    if device.name == "cpu"
                    else ""
                ),
                "memory": f"about {shown(event.memory)} beside PyTorch's own",
                "run": str(run.path),
            }
        )
        if sys.stderr.isatty():
            self._bar = bar(training.steps, "step", "train", event.first_step)
        self._time_left, self._tell_time_at = "?", None

    def _stepped(self, event: Any) -> None:
        if self._bar is not None:
            self._bar.n = event.step
            self._losses["loss"] = event.loss
            self._time_left = self._bar.format_interval(event.seconds_left)
            self._show(event.tokens_per_second)
            return
        now = time.perf_counter()
        if self._tell_time_at is None:
            self._tell_time_at = now + _SECONDS_OF_STEPS
        elif now >= self._tell_time_at:
            self._tell_time_at = math.inf
            if event.seconds_left >= _SECONDS_WORTH_TELLING:
                say(f"step {event.step:>6}  about {duration(event.seconds_left, 2)} left")

    def _evaluated(self, event: Any) -> None:
        record = event.record
        self._losses["val"] = record["val_loss"]
        if self._bar is not None:
            self._bar.n = record["step"]
            self._said(event)
            self._show(record["tokens_per_second"])
            return
        train, speed = record["train_loss"], record["tokens_per_second"]
        say(
            f"step {record['step']:>6}"
            f"  train {'  –   ' if train is None else format(train, '.4f')}"
            f"  validation {record['val_loss']:.4f}{'*' if event.improved else ' '}"
            f"  {f'{speed:,}' if speed else '–':>9} tokens/s"
            f"  {record['seconds']:>7.1f} s"
        )

    def _said(self, event: Any) -> None:
        """What the model says now, above the bar; calmly where evaluations follow each other."""
        assert self._bar is not None
        now, step = time.perf_counter(), event.record["step"]
        if event.moment is None or (now < self._next_line and step != self._bar.total):
            return
        self._next_line = now + _SECONDS_BETWEEN_LINES
        self._bar.clear()
        text = event.moment.text.replace("\n", "⏎")
        say_aside(f"step {step:>6}  {event.record['val_loss']:.4f}  {text}")

    def _show(self, tokens_per_second: float) -> None:
        assert self._bar is not None
        self._bar.bar_format = _TRAINING_BAR.replace("{remaining}", self._time_left)
        shown = "  ".join(f"{name} {value:.3f}" for name, value in self._losses.items())
        self._bar.set_postfix_str(f"{shown}  {tokens_per_second:,.0f} tokens/s", refresh=True)

    def _say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.clear()
        say(text)
