"""Log training to other tools: an adapter for each tool, and a listener that calls the adapters.

A tool's package is imported only when a training run that it logs starts. An adapter takes the
numbers, texts and images of a step. Its argument `id` identifies the run in the tool, and stays the
same when the run is resumed. `close` writes all buffered data.

A run may come from a stranger. So its files never start a tool: the user names the tools each time.
A tool's folder in the run may not contain links that lead out of it.
"""

from __future__ import annotations

import contextlib
import html
import importlib.util
import os
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attnlm.base import files
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import Note, OnEvent
from attnlm.base.json_records import limited, record_from_json
from attnlm.base.setting_fields import quoted
from attnlm.base.suggestions import suggestion
from attnlm.runs.run import Run
from attnlm.see.pictures import Pixels, maps_image
from attnlm.training.events import Evaluated, Finished, Started, Stepped

_PROJECT = "attnlm"
_MOST_POINTS = 1000  # points in a curve, evaluations excluded


@dataclass(frozen=True)
class _Logged:
    """The content of logs.json."""

    id: str = limited(matches="[0-9a-f]{8}")
    """the run's id in the tools"""


class TensorBoard:
    """An adapter that writes event files to the run's folder."""

    def __init__(self, run: Run, id: str, first_step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        # Discard what a killed process logged after its last saved step.
        first_discarded = first_step + 1 if first_step else None
        self._writer: Any = SummaryWriter(run.path / "tensorboard", purge_step=first_discarded)
        settings = run.config.settings().items()
        self.text(first_step, "settings", "\n".join(f"{name} = {v}" for name, v in settings))

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def text(self, step: int, name: str, text: str) -> None:
        # TensorBoard shows Markdown, which keeps indented text unchanged.
        self._writer.add_text(name, "".join(f"    {line}\n" for line in text.split("\n")), step)

    def image(self, step: int, name: str, pixels: Pixels) -> None:
        self._writer.add_image(name, pixels, step, dataformats="HWC")

    def close(self, *, is_finished: bool) -> None:
        self._writer.close()


class WeightsAndBiases:
    """An adapter for W&B project WANDB_PROJECT (default: attnlm), offline if WANDB_MODE=offline."""

    name, text_type = "wandb", "Html"

    def __init__(self, run: Run, id: str, first_step: int) -> None:
        self._tool: Any = importlib.import_module(self.name)
        settings = dict(run.config.settings())
        self._run: Any = self._tool.init(**self._call(run, id), config=settings, resume="allow")

    def _call(self, run: Run, id: str) -> dict[str, Any]:
        project = os.environ.get("WANDB_PROJECT", _PROJECT)
        quiet = self._tool.Settings(console="off")
        return {"project": project, "name": run.name, "id": id, "dir": run.path, "settings": quiet}

    def numbers(self, step: int, values: Mapping[str, Any]) -> None:
        # W&B's own step counter can't go back to the step at which a killed run resumes.
        self._run.define_metric("*", step_metric="step")
        self._run.log({"step": step, **values})

    def text(self, step: int, name: str, text: str) -> None:
        shown = getattr(self._tool, self.text_type)(f"<pre>{html.escape(text)}</pre>")
        self.numbers(step, {name: shown})

    def image(self, step: int, name: str, pixels: Pixels) -> None:
        self.numbers(step, {name: self._tool.Image(pixels)})

    def close(self, *, is_finished: bool) -> None:
        self._run.finish(exit_code=0 if is_finished else 1)


class Trackio(WeightsAndBiases):
    """An adapter for Trackio project attnlm, on this machine or where Trackio's settings point.

    Trackio has W&B's interface, but other names for texts and steps.
    """

    name, text_type = "trackio", "Markdown"

    def _call(self, run: Run, id: str) -> dict[str, Any]:
        return {"project": _PROJECT, "name": f"{run.name}-{id}"}

    def numbers(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, *, is_finished: bool) -> None:
        self._tool.finish()


Tool = TensorBoard | WeightsAndBiases
TOOLS: dict[str, type[Tool]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}
"""The adapters by package name."""


def check_tools(names: Iterable[str]) -> None:
    """Raise UsageError for an unknown name, and AttnlmError if a tool's package is missing."""
    for name in names:
        if str(name) not in TOOLS:
            hint = suggestion(str(name), TOOLS, f"choose from {', '.join(TOOLS)}")
            raise UsageError(f"invalid value for `log`: {quoted(name)}", hint)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a folder with this name is not a package
            raise AttnlmError(
                f"`log` {name} needs the package {name}, which is not installed",
                f"install it: pip install {name}",
            )


class LogListener:
    """A listener that passes training events to `on_event`, then to the tools in `names`.

    The listener drops a tool that fails and sends one Note; training continues. Output printed by
    tools goes to stderr.
    """

    def __init__(self, on_event: OnEvent, names: Sequence[str]) -> None:
        self._on_event = on_event
        self._names = names
        self._tools: dict[str, Tool] = {}
        self._next_point = 0
        self._is_finished = False

    def __call__(self, event: object) -> None:
        self._on_event(event)
        if isinstance(event, Started) and self._names:
            self._start(event)
        elif not self._tools:
            return
        elif isinstance(event, Stepped) and event.step >= self._next_point:
            self._next_point = event.step + (event.steps or 0) // _MOST_POINTS
            self._log_numbers(
                event, "learning_rate tokens_per_second gradient_norm loss/batch=loss"
            )
        elif isinstance(event, Evaluated):
            losses = "loss/train=train_loss loss/validation=val_loss"
            self._log_numbers(event, f"{losses} bits_per_byte accuracy")
            if (snapshot := event.snapshot) is not None:
                self._call_tools("text", snapshot.step, "sample", snapshot.text)
                if snapshot.maps is not None:
                    maps = maps_image(snapshot.maps)
                    self._call_tools("image", snapshot.step, "attention", maps)
        elif isinstance(event, Finished):
            self._is_finished = True
            curve = event.run.path / "curve.png"
            if curve.exists():
                self._call_tools("image", event.step, "curve", _pixels(curve))

    def close(self) -> None:
        """Close all tools, which then write their buffered data."""
        self._call_tools("close", is_finished=self._is_finished)
        self._tools = {}

    def _start(self, event: Started) -> None:
        self._next_point = 0
        for name in dict.fromkeys(self._names):
            with self._dropping_failed_tool(name):
                _check_links(event.run.path, name)
                self._tools[name] = TOOLS[name](event.run, _id_of(event.run), event.first_step)

    def _log_numbers(self, event: Stepped | Evaluated, names: str) -> None:
        """Log fields of an event that are not None; `a=b` logs the field b as a."""
        values = {}
        for name, _, field in (one.partition("=") for one in names.split()):
            values[name] = getattr(event, field or name)
        measured = {name: value for name, value in values.items() if value is not None}
        self._call_tools("numbers", event.step, measured)

    def _call_tools(self, method: str, *arguments: Any, **options: Any) -> None:
        for name, tool in list(self._tools.items()):
            with self._dropping_failed_tool(name):
                getattr(tool, method)(*arguments, **options)

    @contextlib.contextmanager
    def _dropping_failed_tool(self, name: str) -> Iterator[None]:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                yield
        except Exception as error:  # noqa: BLE001 - a run must not fail for a log
            self._tools.pop(name, None)
            reason = (str(error) or type(error).__name__).strip().splitlines()[0]
            self._on_event(Note(f"{name} failed and no longer logs this run: {reason}"))


def _id_of(run: Run) -> str:
    """Return the saved id by which the tools continue the log of a resumed run."""
    path = run.path / "logs.json"
    if not path.exists():
        files.write_json(path, {"id": secrets.token_hex(4)})
    return record_from_json(_Logged, files.read_json(path), path).id


def _check_links(run: Path, tool: str) -> None:
    """Raise OSError if a link leads out of the tool's folder in the run, to another folder.

    Links to files are left alone: W&B makes such links to its own logs, and a tool's new files have
    names that nobody can foresee.
    """
    for folder in (run / tool, run / f".{tool}"):  # W&B prefers .wandb
        inside = os.path.realpath(run) + f"/{folder.name}/"
        for path in (folder, *folder.rglob("*")):
            is_link = path.is_symlink() and (path.is_dir() or path == folder)
            if is_link and not os.path.realpath(path).startswith(inside):
                raise OSError(f"the link {path} leads out of its folder; remove the link")


def _pixels(path: Path) -> Pixels:
    from PIL import Image

    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))
