"""Show the progress of a task: a bar in a terminal or a notebook, lines elsewhere.

Outside `cli`, this is the only module that writes to the screen, and only if a ProgressBar is
passed as `on_event`.
"""

from __future__ import annotations

import sys
import time
from html import escape
from types import SimpleNamespace
from typing import Any

from attnlm.base.events import Note, Progress
from attnlm.base.formatting import escape_control_characters

_SECONDS_BETWEEN_LINES = 10.0
# tqdm's own estimate of the time left counts evaluations as steps.
_TRAINING = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{left}, {words}]"


class ProgressBar:
    """A listener that shows the progress of a task.

        run = attnlm.train("tales-char", steps=50, on_event=attnlm.ProgressBar())

    The listener shows a bar in a terminal or notebook. Elsewhere, it writes a line for each
    evaluation of a training run, and a line every ten seconds of any other task. In both cases, it
    writes a line at the end of a training run and for each event of type Note.
    """

    def __init__(self) -> None:
        self._bar: Any = None  # a tqdm, in a terminal or a notebook
        self._task = ""
        self._next_line = 0.0
        self._losses: dict[str, float] = {}
        self._best: tuple[float, int] | None = None

    def __call__(self, event: object) -> None:
        """Show an event."""
        if isinstance(event, Progress):
            if event.task != self._task:
                self.begin(event.task, event.total, event.unit, event.done)
            if self._bar is not None:
                self._bar.total = event.total
                self._bar.update(event.done - self._bar.n)
            elif time.perf_counter() >= self._next_line:
                _write_line(str(event))
                self._next_line = time.perf_counter() + _SECONDS_BETWEEN_LINES
            if event.done == event.total:
                self.close()
        elif isinstance(event, Note):
            self.clear()
            _write_line(event.text)
        else:
            self._follow_training(event)

    def begin(self, task: str, total: float | None, unit: str, done: float = 0) -> None:
        """Start to show a task, in place of the previous one."""
        self.close()
        self._task = task
        self._losses, self._best = {}, None
        self._next_line = time.perf_counter() + _SECONDS_BETWEEN_LINES
        if _in_notebook() or sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=total,
                initial=done,
                unit=unit,
                unit_scale=unit != "step",
                miniters=1,
                desc=escape_control_characters(task),
                file=_notebook_output() if _in_notebook() else sys.stderr,
                dynamic_ncols=True,
                leave=False,
            )

    def clear(self) -> None:
        """Clear the bar to print a line in the terminal; the bar returns with the next event."""
        if self._bar is not None:
            self._bar.clear()

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
        self._bar, self._task = None, ""

    def _follow_training(self, event: object) -> None:
        from attnlm.training.events import Evaluated, Finished, Started, Stepped

        if isinstance(event, Started):
            self.begin("train", event.run.config.training.steps, "step", event.first_step)
        elif isinstance(event, Stepped):
            self._losses["loss"] = event.loss
            if self._bar is not None:
                self._bar.total = event.steps or self._bar.total
            self._show(event.step, event.tokens_per_second, event.seconds_left)
        elif isinstance(event, Evaluated):
            self._losses["val"] = event.val_loss
            self._best = min(self._best or (float("inf"), 0), (event.val_loss, event.step))
            if self._bar is None:
                _write_line(str(event))
            self._show(event.step, event.tokens_per_second)
        elif isinstance(event, Finished):
            best = ""
            if self._best is not None:
                best = f"; best validation loss {self._best[0]:.4f}, of step {self._best[1]:,}"
            self.close()
            _write_line(f"{event}{best}")

    def _show(self, done: int, tokens_per_second: float | None, left: float | None = None) -> None:
        """Redraw the bar; it ends with `loss 2.345  val 2.367  690,460 tokens/s`."""
        if (bar := self._bar) is None:
            return
        bar.n = done
        if tokens_per_second is not None:
            losses = "".join(f"{name} {loss:.3f}  " for name, loss in self._losses.items())
            time_left = "?" if left is None else bar.format_interval(left)
            words = f"{losses}{tokens_per_second:,.0f} tokens/s"
            bar.bar_format = _TRAINING.replace("{left}", time_left).replace("{words}", words)
        bar.refresh()


def _notebook_output() -> Any:
    """Return a file for tqdm in a notebook cell, where each write replaces the previous one."""
    from IPython.display import display

    handle = display({"text/plain": ""}, raw=True, display_id=True)

    def write(text: str) -> None:
        line = text.strip()
        content = {"text/plain": line, "text/html": f"<pre>{escape(line)}</pre>" if line else ""}
        handle.update(content, raw=True)

    return SimpleNamespace(write=write, flush=lambda: None)


def _write_line(text: str) -> None:
    """Write a line to stderr; in a notebook to stdout, since notebooks show stderr as warnings."""
    stream = sys.stdout if _in_notebook() else sys.stderr
    stream.write(f"{escape_control_characters(text) if stream.isatty() else text}\n")
    stream.flush()


def _in_notebook() -> bool:
    """Return True in a notebook, that is, in IPython with a kernel."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")
