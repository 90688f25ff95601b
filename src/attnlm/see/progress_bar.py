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
from attnlm.base.formatting import duration, escape_control_characters

_SECONDS_BETWEEN_LINES = 10.0
# tqdm's own estimate of the time left counts evaluations as steps.
_TRAINING_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"


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
            self.note(event.text)
        else:
            self._follow_training(event)

    def begin(self, task: str, total: float | None, unit: str, done: float = 0) -> None:
        """Start to show a task, in place of the previous one."""
        self.close()
        self._task, self._losses = task, {}
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
                bar_format=_TRAINING_FORMAT if task == "train" else None,
            )

    def note(self, text: str) -> None:
        """Write the text of a Note."""
        self.clear()
        _write_line(text)

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
            self.close()
            best = result.best if (result := event.run.result()) else None
            said = best and f"; best validation loss {best.val_loss:.4f}, of step {best.step:,}"
            _write_line(f"{event}{said or ''}")
        elif isinstance(event, Stepped | Evaluated):
            if isinstance(event, Stepped):
                self._losses["train"] = event.loss
            else:
                self._losses["validation"] = event.val_loss
            if self._bar is None:
                if isinstance(event, Evaluated):
                    _write_line(str(event))
                return
            words = [f"{name} {loss:.3f}" for name, loss in self._losses.items()]
            words.append(f"{event.tokens_per_second:,.0f} tokens/s")
            if isinstance(event, Stepped):
                words.insert(0, f"{duration(event.seconds_left, 2)} left")
                self._bar.total = event.steps or self._bar.total
            self._bar.set_postfix_str(", ".join(words), refresh=False)
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
