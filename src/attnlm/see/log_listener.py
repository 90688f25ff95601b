"""A training followed elsewhere: its events, handed on to tools of others."""

from __future__ import annotations

import contextlib
import re
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attnlm.base import files
from attnlm.base.errors import AttnlmError
from attnlm.base.events import Note, OnEvent
from attnlm.runs.run import Run, damaged
from attnlm.see.attend import Numbers
from attnlm.see.log_tools import TOOLS, Pixels, Tool, check_tools
from attnlm.training.events import Evaluated, Finished, Started, Stepped

_RECORD = "logs.json"
_MOST_POINTS = 1000  # of a number's curve, evaluations excluded
_CELL = 6  # pixels
# Of a record of metrics.jsonl, by the names that tools show.
_MEASURED = {
    "loss/train": "train_loss",
    "loss/validation": "val_loss",
    "bits_per_byte": "bits_per_byte",
    "learning_rate": "learning_rate",
}


class LogListener:
    """Tells `on_event` of a training, then the tools of these names.

    None are those that the run had when it was trained before. A tool that fails is left out from
    then on, and one Note says so: the training goes on. What tools print goes to stderr.
    """

    def __init__(self, on_event: OnEvent, names: Sequence[str] | None) -> None:
        self._on_event, self._names = on_event, names
        self._tools: dict[str, Tool] = {}
        self._run: Run | None = None
        self._step = self._next_point = 0
        self._rated = -1  # the last step whose learning rate was reported
        self._drawn = 0
        self._is_finished = False

    def __call__(self, event: object) -> None:
        self._on_event(event)
        if isinstance(event, Started):
            self._start(event)
        elif self._run is None or not self._tools:
            return
        elif isinstance(event, Stepped):
            self._stepped(event)
        elif isinstance(event, Evaluated):
            self._evaluated(event, self._run)
        elif isinstance(event, Finished):
            self._is_finished = True
            self._show_curve(self._run)

    def close(self) -> None:
        """Lets the tools write what is left; they follow no more."""
        self._each(lambda tool: tool.close(is_finished=self._is_finished))
        self._tools = {}

    def _start(self, event: Started) -> None:
        run = event.run
        try:
            names, id = _recorded(run.path, self._names)
        except AttnlmError as error:
            self._on_event(Note(f"the run is not logged: {error.message}; {error.hint}"))
            return
        self._run, self._step, self._next_point = run, event.first_step, 0
        self._rated = -1
        self._drawn = _changed(run.path / "curve.png")
        for name in names:

            def start(name: str = name) -> None:
                self._tools[name] = TOOLS[name](run, id, event.first_step)

            self._try(name, start)

    def _stepped(self, event: Stepped) -> None:
        self._step = event.step
        if event.step < self._next_point:
            return
        self._next_point = event.step + (event.steps or 0) // _MOST_POINTS
        values = {
            "loss/batch": event.loss,
            "tokens_per_second": event.tokens_per_second,
        }
        if event.learning_rate is not None:
            values["learning_rate"] = event.learning_rate
        if event.gradient_norm is not None:
            values["gradient_norm"] = event.gradient_norm
        self._each(lambda tool: tool.numbers(event.step, values))
        self._rated = event.step

    def _evaluated(self, event: Evaluated, run: Run) -> None:
        record, snapshot = event.record, event.snapshot
        step = self._step = int(record["step"])
        measured = {name: record[key] for name, key in _MEASURED.items()}
        if step == self._rated:
            del measured["learning_rate"]  # reported with the step
        values = {name: value for name, value in measured.items() if value is not None}
        self._each(lambda tool: tool.numbers(step, values))
        if snapshot is not None:
            self._each(lambda tool: tool.text(step, "sample", snapshot.text))
        if snapshot is not None and snapshot.maps is not None:
            sheet = map_sheet(snapshot.maps)
            self._each(lambda tool: tool.image(step, "attention", sheet))
        self._show_curve(run)

    def _show_curve(self, run: Run) -> None:
        """The run's curve.png, where it was drawn again since."""
        path = run.path / "curve.png"
        if (drawn := _changed(path)) != self._drawn:
            self._drawn = drawn
            self._each(lambda tool: tool.image(self._step, "curve", _pixels(path)))

    def _each(self, tell: Callable[[Tool], None]) -> None:
        for name, tool in list(self._tools.items()):

            def told(tool: Tool = tool) -> None:
                tell(tool)

            self._try(name, told)

    def _try(self, name: str, action: Callable[[], None]) -> None:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                action()
        except Exception as error:  # noqa: BLE001 - no log is worth a run
            self._tools.pop(name, None)
            reason = (str(error) or type(error).__name__).strip().splitlines()[0]
            self._on_event(Note(f"{name} failed, and no longer logs this run: {reason}"))


def map_sheet(maps_LHTT: Numbers) -> Pixels:
    """All maps in one image, a row for each layer and a column for each head: dark is much."""
    lined = np.pad(maps_LHTT, ((0, 0), (0, 0), (0, 1), (0, 1)), constant_values=0.3)
    layers, heads, side, _ = lined.shape
    sheet = lined.transpose(0, 2, 1, 3).reshape(layers * side, heads * side)
    grey_HW = np.rint(255 * (1 - sheet)).astype(np.uint8).repeat(_CELL, 0).repeat(_CELL, 1)
    return np.repeat(grey_HW[..., None], 3, axis=2)


def _recorded(folder: Path, names: Sequence[str] | None) -> tuple[Sequence[str], str]:
    """The tools that follow a run, and its id with them: recorded, so that it can be resumed."""
    path = folder / _RECORD
    known: dict[str, Any] = {"id": secrets.token_hex(4), "tools": []}
    if path.exists():
        known = files.read_json(path)
        is_list = isinstance(known.get("tools"), list)
        if not is_list or not re.fullmatch("[0-9a-f]{8}", str(known.get("id"))):
            raise damaged(path)
    tools = known["tools"] if names is None else list(dict.fromkeys(names))
    check_tools(tools)
    if tools != known["tools"]:
        with files.explaining(folder):
            files.write_json(path, {**known, "tools": tools})
    return tools, str(known["id"])


def _changed(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def _pixels(path: Path) -> Pixels:
    from PIL import Image

    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))
