"""Log training to other tools: a function for each tool, and a listener that calls them.

A tool's package is imported only when a training run that it logs starts. `id` identifies the run
in the tool, and stays the same when the run is resumed.

A run may come from a stranger. So its files never start a tool: the user names the tools each time.
A tool's folder in the run may not contain links that lead out of it.
"""

from __future__ import annotations

import contextlib
import html
import importlib.util
import os
import secrets
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from attnlm.base import files
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import Note, OnEvent
from attnlm.base.setting_fields import limited, quoted, record_from_json
from attnlm.base.suggestions import suggestion
from attnlm.runs.run import Run
from attnlm.training.events import Evaluated, Finished, Started, Stepped

_PROJECT = "attnlm"
_MOST_POINTS = 1000  # points in a curve, evaluations excluded
_NUMBERS = {
    Stepped: "learning_rate tokens_per_second gradient_norm loss/batch=loss",
    Evaluated: "loss/train=train_loss loss/validation=val_loss bits_per_byte accuracy",
}
"""The fields that are logged, by type of event; `a=b` logs the field b as a."""


@dataclass(frozen=True)
class _Logged:
    """The content of logs.json."""

    id: str = limited(matches="[0-9a-f]{8}")
    """the run's id in the tools"""


class Tool(NamedTuple):
    """A tool that logs a run."""

    log: Callable[[int, Mapping[str, Any]], object]
    """takes a step, and its numbers and texts by name"""
    close: Callable[[bool], object]
    """writes all buffered data; the argument is True if the run is finished"""


def tensorboard(run: Run, id: str, first_step: int) -> Tool:
    """Write event files to the run's folder."""
    from torch.utils.tensorboard.writer import SummaryWriter

    # Discard what a killed process logged after its last saved step.
    purged = first_step + 1 if first_step else None
    writer: Any = SummaryWriter(run.path / "tensorboard", purge_step=purged)

    def log(step: int, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, str):
                # TensorBoard shows Markdown, which keeps indented text unchanged.
                text = "".join(f"    {line}\n" for line in value.split("\n"))
                writer.add_text(name, text, step)
            else:
                writer.add_scalar(name, value, step)

    settings = run.config.settings().items()
    log(first_step, {"settings": "\n".join(f"{name} = {value}" for name, value in settings)})
    return Tool(log, lambda is_finished: writer.close())


def wandb(run: Run, id: str, first_step: int) -> Tool:
    """Log to W&B project WANDB_PROJECT (default: attnlm), offline if WANDB_MODE=offline."""
    tool = importlib.import_module("wandb")
    logged = tool.init(
        project=os.environ.get("WANDB_PROJECT", _PROJECT),
        name=run.name,
        id=id,
        dir=run.path,
        config=dict(run.config.settings()),
        settings=tool.Settings(console="off"),
        resume="allow",
    )
    # W&B's own step counter can't go back to the step at which a killed run resumes.
    logged.define_metric("*", step_metric="step")
    return Tool(
        lambda step, values: logged.log({"step": step, **_shown(values, tool.Html)}),
        lambda is_finished: logged.finish(exit_code=int(not is_finished)),
    )


def trackio(run: Run, id: str, first_step: int) -> Tool:
    """Log to Trackio project attnlm, on this machine or where Trackio's settings point."""
    tool = importlib.import_module("trackio")
    name, settings = f"{run.name}-{id}", dict(run.config.settings())
    logged = tool.init(project=_PROJECT, name=name, config=settings, resume="allow")
    return Tool(
        lambda step, values: logged.log(_shown(values, tool.Markdown), step=step),
        lambda is_finished: tool.finish(),
    )


def _shown(values: Mapping[str, Any], text: Any) -> dict[str, Any]:
    """Return values with texts as objects of a tool."""
    return {
        name: text(f"<pre>{html.escape(value)}</pre>") if isinstance(value, str) else value
        for name, value in values.items()
    }


TOOLS: dict[str, Callable[[Run, str, int], Tool]] = {
    "tensorboard": tensorboard,
    "wandb": wandb,
    "trackio": trackio,
}
"""The functions that start the tools, by package name."""


def check_tools(names: Iterable[str]) -> None:
    """Raise UsageError for an unknown name, and AttnlmError if a tool's package is missing."""
    for name in names:
        if name not in TOOLS:
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
        if isinstance(event, Started):
            for name in dict.fromkeys(self._names):
                with self._dropping_failed_tool(name):
                    _check_links(event.run.path, name)
                    self._tools[name] = TOOLS[name](event.run, _id_of(event.run), event.first_step)
            if "tensorboard" in self._tools:
                runs = shlex.quote(str(event.run.path.parent))
                self._on_event(Note(f"to see it: tensorboard --logdir {runs}"))
        elif not self._tools:
            return
        elif isinstance(event, Stepped) and event.step >= self._next_point:
            self._next_point = event.step + (event.steps or 0) // _MOST_POINTS
            self._log_numbers(event)
        elif isinstance(event, Evaluated):
            self._log_numbers(event)
            if (snapshot := event.snapshot) is not None:
                self._call("log", snapshot.step, {"sample": snapshot.text})
        elif isinstance(event, Finished):
            self._is_finished = True

    def close(self) -> None:
        """Close all tools, which then write their buffered data."""
        self._call("close", self._is_finished)
        self._tools = {}

    def _log_numbers(self, event: Stepped | Evaluated) -> None:
        names = (words.partition("=") for words in _NUMBERS[type(event)].split())
        numbers = {name: getattr(event, field or name) for name, _, field in names}
        self._call("log", event.step, {name: x for name, x in numbers.items() if x is not None})

    def _call(self, function: str, *arguments: Any) -> None:
        for name, tool in list(self._tools.items()):
            with self._dropping_failed_tool(name):
                getattr(tool, function)(*arguments)

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
        inside = run.resolve() / folder.name
        for path in (folder, *folder.rglob("*")):
            is_link = path.is_symlink() and (path.is_dir() or path == folder)
            if is_link and inside not in path.resolve().parents:
                raise OSError(f"the link {path} leads out of its folder; remove the link")
