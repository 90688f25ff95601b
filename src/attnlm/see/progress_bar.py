"""Show the progress of a task: a bar in a terminal or a notebook, lines elsewhere.

Outside `cli`, this is the only module that writes to the screen, and only if a ProgressBar is
passed as `on_event`.
"""

from __future__ import annotations

import math
import sys
import time
from html import escape
from types import SimpleNamespace
from typing import Any

from attnlm.base.events import Note, Progress
from attnlm.base.formatting import escape_control_characters

_SECONDS_BETWEEN_LINES = 10.0


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
        self._best = (math.inf, 0)

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
        self._losses, self._best = {}, (math.inf, 0)
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
        elif isinstance(event, Finished):
            loss, step = self._best
            best = f"; best validation loss {loss:.4f}, of step {step:,}"
            self.close()
            _write_line(f"{event}{best if math.isfinite(loss) else ''}")
        elif isinstance(event, Stepped | Evaluated):
            left = "?"
            if isinstance(event, Stepped):
                self._losses["train"] = event.loss
                if self._bar is not None:
                    left = self._bar.format_interval(event.seconds_left)
            else:
                self._losses["validation"] = event.val_loss
                self._best = min(self._best, (event.val_loss, event.step))
                if self._bar is None:
                    _write_line(str(event))
            if self._bar is not None:
                # tqdm's own estimate of the time left counts evaluations as steps.
                losses = "".join(f"{name} {loss:.3f}  " for name, loss in self._losses.items())
                words = f"{losses}{event.tokens_per_second:,.0f} tokens/s"
                counted = "{n_fmt}/{total_fmt} [{elapsed}<"
                self._bar.bar_format = f"{{l_bar}}{{bar}}| {counted}{left}, {words}]"
                if isinstance(event, Stepped):
                    self._bar.total = event.steps or self._bar.total
                self._bar.n = event.step
                self._bar.refresh()


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
