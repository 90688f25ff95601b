"""How far a task is: a bar in a terminal or a notebook, lines elsewhere.

The only module below `cli` that writes to the screen: a listener, for those who hand it over.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from html import escape
from typing import Any, Protocol

from attnlm.base.events import Note, Progress
from attnlm.base.readable import harmless

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_UPDATES = 0.1  # of a page


class ProgressBar:
    """A listener that shows how far a task is.

        run = attnlm.train("tales-char", steps=50, on_event=attnlm.ProgressBar())

    In a notebook and in a terminal it is a bar, which leaves one line when a training ends. Notes
    are lines. Where nobody watches, as in a log file, evaluations are lines too, and so is a long
    task now and then.
    """

    def __init__(self) -> None:
        self.total: float | None = None
        """Of the task that is shown: how much there is to do, None where it can't be known."""
        self._bar: _Bar | None = None
        self._task = ""
        self._done: float = 0
        self._losses: dict[str, float] = {}
        self._best: tuple[float, int] | None = None

    def __call__(self, event: object) -> None:
        """Shows what happened."""
        if isinstance(event, Progress):
            if self._bar is None or event.task != self._task:
                self.begin(event.task, event.total, event.unit, event.done)
            self.total, self._done = event.total, event.done
            self._show("")
        elif isinstance(event, Note):
            self._say(event.text)
        else:
            self._follow_training(event)

    def begin(self, task: str, total: float | None, unit: str, done: float = 0) -> None:
        """Shows a task from now on, in place of the one before."""
        self.close()
        self._task, self.total, self._done = task, total, done
        self._losses, self._best = {}, None
        self._bar = _new_bar(harmless(task), total, unit, done)

    def clear(self) -> None:
        """Makes room for a line in the terminal; the bar comes back with the next event."""
        if self._bar is not None:
            self._bar.clear()

    def close(self, last: str = "") -> None:
        """Ends the bar, with a `last` line in its place."""
        if self._bar is not None:
            self._bar.close(last)
            self._bar = None

    def _follow_training(self, event: object) -> None:
        from attnlm.training.events import Evaluated, Finished, Replanned, Started, Stepped

        if isinstance(event, Started):
            self.begin("train", event.run.config.training.steps, "step", event.first_step)
        elif isinstance(event, Replanned):
            self.total = event.run.config.training.steps
        elif isinstance(event, Stepped):
            self._losses["loss"], self._done = event.loss, event.step
            self._show(_training_words(self._losses, event.tokens_per_second), event.seconds_left)
        elif isinstance(event, Evaluated):
            record = event.record
            self._losses["val"], self._done = record["val_loss"], record["step"]
            self._best = min(self._best or (float("inf"), 0), (record["val_loss"], record["step"]))
            if isinstance(self._bar, _Lines):
                self._say(str(event))
            self._show(_training_words(self._losses, record["tokens_per_second"]))
        elif isinstance(event, Finished):
            best = ""
            if self._best is not None:
                best = f"; best validation loss {self._best[0]:.4f}, of step {self._best[1]:,}"
            self.close(f"{event}{best}")

    def _show(self, words: str, seconds_left: float | None = None) -> None:
        if self._bar is not None:
            self._bar.show(self._done, self.total, words, seconds_left)

    def _say(self, text: str) -> None:
        self.clear()
        _write_line(text)


def _training_words(losses: Mapping[str, float], tokens_per_second: float) -> str:
    """`loss 2.345  val 2.367  690,460 tokens/s`."""
    shown = "  ".join(f"{name} {value:.3f}" for name, value in losses.items())
    return f"{shown}  {tokens_per_second:,.0f} tokens/s"


def _write_line(text: str) -> None:
    """A line on stderr, or in the cell of a notebook, where stderr is for warnings."""
    stream = sys.stdout if _in_notebook() else sys.stderr
    stream.write(f"{harmless(text) if stream.isatty() else text}\n")
    stream.flush()


class _Bar(Protocol):
    """What shows a task."""

    def show(
        self, done: float, total: float | None, words: str, seconds_left: float | None
    ) -> None: ...

    def clear(self) -> None: ...

    def close(self, last: str) -> None: ...


def _new_bar(task: str, total: float | None, unit: str, done: float) -> _Bar:
    if _in_notebook():
        return _NotebookBar(task, unit)
    kind = _TerminalBar if sys.stderr.isatty() else _Lines
    return kind(task, total, unit, done)


class _TerminalBar:
    """A line on stderr that is written over; it is gone in the end."""

    # tqdm's own time left takes evaluations for steps, and begins far too long.
    _TRAINING = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"

    def __init__(self, task: str, total: float | None, unit: str, done: float) -> None:
        from tqdm import tqdm

        self._left = "?"
        self._bar: tqdm[Any] = tqdm(
            total=total,
            initial=done,
            unit=unit,
            unit_scale=unit != "step",
            desc=task,
            file=sys.stderr,
            dynamic_ncols=True,
            leave=False,
        )

    def show(
        self, done: float, total: float | None, words: str, seconds_left: float | None
    ) -> None:
        self._bar.n, self._bar.total = done, total
        if seconds_left is not None:
            self._left = self._bar.format_interval(seconds_left)
        if words:
            self._bar.bar_format = self._TRAINING.replace("{remaining}", self._left)
        self._bar.set_postfix_str(words, refresh=True)

    def clear(self) -> None:
        self._bar.clear()

    def close(self, last: str) -> None:
        self._bar.close()
        if last:
            _write_line(last)


class _Lines:
    """A line for a long task now and then; only the last line of a training, whose evaluations are
    lines of their own."""

    def __init__(self, task: str, total: float | None, unit: str, done: float) -> None:
        self._task, self._unit = task, unit
        self._next = time.perf_counter() + _SECONDS_BETWEEN_LINES

    def show(
        self, done: float, total: float | None, words: str, seconds_left: float | None
    ) -> None:
        now = time.perf_counter()
        if not words and now >= self._next:
            _write_line(str(Progress(self._task, int(done), _whole(total), self._unit)))
            self._next = now + _SECONDS_BETWEEN_LINES

    def clear(self) -> None:
        """Lines stay."""

    def close(self, last: str) -> None:
        if last:
            _write_line(last)


class _NotebookBar:
    """A bar of plain HTML in the cell that began it: without scripts and without ipywidgets."""

    def __init__(self, task: str, unit: str) -> None:
        self._task, self._unit = task, unit
        self._next = 0.0
        self._handle: Any = None

    def show(
        self, done: float, total: float | None, words: str, seconds_left: float | None
    ) -> None:
        now = time.perf_counter()
        if now < self._next and done != total:
            return
        self._next = now + _SECONDS_BETWEEN_UPDATES
        line = str(Progress(self._task, int(done), _whole(total), self._unit))
        left = "" if seconds_left is None else f"{seconds_left:,.0f} s left"
        line = "  ".join(part for part in (line, words, left) if part)
        share = f' value="{done / total:.3f}"' if total else ""
        self._put(line, f"<progress{share}></progress> {escape(line)}")

    def clear(self) -> None:
        """Lines have their own place in a cell."""

    def close(self, last: str) -> None:
        if self._handle is not None or last:
            self._put(last, escape(last))

    def _put(self, text: str, html: str) -> None:
        from IPython.display import display

        content = {"text/plain": text, "text/html": f"<div>{html}</div>" if html else ""}
        if self._handle is None:
            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)


def _whole(total: float | None) -> int | None:
    return None if total is None else int(total)


def _in_notebook() -> bool:
    """Whether this is the process of a notebook: IPython with a kernel."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")
