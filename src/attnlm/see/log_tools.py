"""Tools that trainings are followed with: an adapter for each, through its own package.

A package is imported when a training starts that it follows, not before.
"""

from __future__ import annotations

import html
import importlib.util
import os
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.settings import quoted
from attnlm.base.suggestions import suggestion

if TYPE_CHECKING:
    from attnlm.runs.run import Run

Pixels = NDArray[np.uint8]
"""(height, width, 3)"""
_PROJECT = "attnlm"


class Tool(Protocol):
    """What follows a run: `id` tells it from others, and stays when the run is resumed."""

    def __init__(self, run: Run, id: str, first_step: int) -> None: ...

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Takes numbers by their names."""

    def text(self, step: int, name: str, text: str) -> None:
        """Takes a text, of any characters."""

    def image(self, step: int, name: str, pixels: Pixels) -> None:
        """Takes an image."""

    def close(self, *, is_finished: bool) -> None:
        """Writes what is left; the training has ended, `is_finished` or not."""


class TensorBoard:
    """Event files in the run's own folder."""

    def __init__(self, run: Run, id: str, first_step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        # What an earlier process reported after the step that it saved is taken back.
        again = first_step + 1 if first_step else None
        self._writer: Any = SummaryWriter(run.path / "tensorboard", purge_step=again)
        self.text(first_step, "settings", _lines(run))

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def text(self, step: int, name: str, text: str) -> None:
        # It is shown as Markdown, where what is indented stays as it is.
        self._writer.add_text(name, "".join(f"    {line}\n" for line in text.split("\n")), step)

    def image(self, step: int, name: str, pixels: Pixels) -> None:
        self._writer.add_image(name, pixels, step, dataformats="HWC")

    def close(self, *, is_finished: bool) -> None:
        self._writer.close()


class WeightsAndBiases:
    """The project that WANDB_PROJECT names, or attnlm; offline with WANDB_MODE=offline."""

    def __init__(self, run: Run, id: str, first_step: int) -> None:
        import wandb

        self._wandb: Any = wandb
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=run.name,
            id=id,
            resume="allow",
            dir=run.path,
            config=dict(run.config.settings()),
            settings=wandb.Settings(console="off"),
        )
        # Its own count of steps can't go back to where a killed training is resumed.
        self._run.define_metric("*", step_metric="step")

    def numbers(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log({"step": step, **values})

    def text(self, step: int, name: str, text: str) -> None:
        self.numbers(step, {name: self._wandb.Html(f"<pre>{html.escape(text)}</pre>")})

    def image(self, step: int, name: str, pixels: Pixels) -> None:
        self.numbers(step, {name: self._wandb.Image(pixels)})

    def close(self, *, is_finished: bool) -> None:
        self._run.finish(exit_code=0 if is_finished else 1)


class MLflow:
    """Where MLFLOW_TRACKING_URI says, in the experiment of MLFLOW_EXPERIMENT_NAME, or attnlm."""

    def __init__(self, run: Run, id: str, first_step: int) -> None:
        import mlflow
        from mlflow.entities import Metric, Param

        self._metric: Any = Metric
        self._client: Any = mlflow.MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        there = mlflow.set_experiment(name).experiment_id
        if found := self._client.search_runs([there], f"tags.{_PROJECT} = '{id}'"):
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        made = self._client.create_run(there, tags={_PROJECT: id}, run_name=run.name)
        self._id = made.info.run_id
        params = [Param(name, str(value)) for name, value in run.config.settings().items()]
        self._client.log_batch(self._id, params=params)

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def text(self, step: int, name: str, text: str) -> None:
        self._client.log_text(self._id, text, f"{name}/{step:08}.txt")

    def image(self, step: int, name: str, pixels: Pixels) -> None:
        self._client.log_image(self._id, pixels, key=name, step=step)

    def close(self, *, is_finished: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if is_finished else "KILLED")


class Trackio:
    """A project on this machine, or where Trackio's own settings say."""

    def __init__(self, run: Run, id: str, first_step: int) -> None:
        import trackio

        self._trackio: Any = trackio
        self._run: Any = trackio.init(
            project=_PROJECT,
            name=f"{run.name}-{id}",
            config=dict(run.config.settings()),
            resume="allow",
        )

    def numbers(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log(dict(values), step=step)

    def text(self, step: int, name: str, text: str) -> None:
        self.numbers(step, {name: self._trackio.Markdown(f"<pre>{html.escape(text)}</pre>")})

    def image(self, step: int, name: str, pixels: Pixels) -> None:
        self.numbers(step, {name: self._trackio.Image(pixels)})

    def close(self, *, is_finished: bool) -> None:
        self._trackio.finish()


TOOLS: dict[str, type[Tool]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "trackio": Trackio,
}
"""By the names of their packages"""


def check_tools(names: Iterable[str]) -> None:
    """Raises UsageError for a name that is none, and AttnlmError where a package is missing."""
    for name in names:
        if str(name) not in TOOLS:
            hint = suggestion(str(name), TOOLS, f"choose from {', '.join(TOOLS)}")
            raise UsageError(f"`log` can't be {quoted(name)}", hint)
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a folder of that name is no package
            raise AttnlmError(
                f"`log` {name} needs the package {name}, which is not installed",
                f"install it: pip install {name}",
            )


def _lines(run: Run) -> str:
    return "\n".join(f"{name} = {value}" for name, value in run.config.settings().items())
