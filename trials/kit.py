"""What trials share: children to be killed, or to meet a failing disk, and small projects."""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import attnlm
from attnlm.runs.run import Run
from attnlm.training.step import Stepper
from tests import models
from tests.kit import QUICK

TEXT = "".join(f"{i} apples and {i + 1} pears are {2 * i + 1} fruits.\n" for i in range(60))
SMALL = {**QUICK, "embed_dim": 16, "steps": 12, "eval_every": 4, "device": "cpu"}
DATA, _PAIRS, RUN = map(Path, ("data/fruits-char", "data/fruits-bpe260", "checkpoints/small"))
FILES = (
    *(folder / name for folder in (DATA, _PAIRS) for name in ("meta.json", "train.bin", "val.bin")),
    *(folder / "tokenizer.json" for folder in (DATA, _PAIRS, RUN)),
    *(RUN / f"{name}.safetensors" for name in ("best", "last")),
    *(RUN / name for name in ("config.json", "metrics.jsonl", "ticker.jsonl")),
    *(Path(name) for name in ("data/latest", "checkpoints/latest", "recipe.toml", "recipe.json")),
)
"""All files of a project that are read again."""
_NOT_READ = ("fruits.txt", ".lock", "curve.png")


class ChildError(Exception):
    """What a child raised, as `Type: message`, with its traceback as a note."""


class ChildKilledError(Exception):
    """A child ended before its action."""


class Child(ForkProcess):
    """A forked process that calls `action`, whose result can be pickled."""

    def __init__(self, action: Callable[..., Any], *arguments: Any) -> None:
        super().__init__()
        self._action, self._arguments = action, arguments
        self._reader, self._writer = Pipe(duplex=False)
        self.start()
        self._writer.close()

    def run(self) -> None:
        try:
            self._writer.send((self._action(*self._arguments), None, None))
        except BaseException as raised:  # noqa: BLE001 - the parent reports it
            about = f"{type(raised).__name__}: {raised}"
            self._writer.send((None, about, traceback.format_exc()))

    def result(self) -> Any:
        """Wait for its end; return what its action returned."""
        try:
            result, error, trace = self._reader.recv()
        except EOFError:
            raise ChildKilledError from None
        finally:
            self.join()
        if error is not None:
            raised = ChildError(error)
            raised.add_note(trace)
            raise raised
        return result


def in_child(action: Callable[..., Any], *arguments: Any) -> Any:
    """Call `action` in a forked process."""
    return Child(action, *arguments).result()


def forked(test: Callable[..., None]) -> Callable[..., None]:
    """Make a test that runs in a forked process, whose threads and memory are gone at its end."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        in_child(lambda: test(**arguments))

    return run


_OF_PATHS = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "shutil.rmtree")


def before_each_event(folder: Path, act: Callable[[int, str], None]) -> None:
    """Call `act` before all that this process does to files below `folder`, until it ends.

    A write is two events: before it, and when half of it is on its way to the disk. `act` gets the
    number and the name of the event; what it raises is the system's answer.
    """
    inside, numbers = str(folder), itertools.count()

    def meet(event: str, path: object) -> None:
        if isinstance(path, (str, Path)) and str(path).startswith(inside):
            act(next(numbers), f"{event} {Path(path).name}")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in _OF_PATHS:
            meet(event, arguments[0])

    original_open, original_fsync = open, os.fsync

    def open_(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        file = original_open(path, mode, *arguments, **options)
        if mode.startswith("r") or not str(path).startswith(inside):
            return file
        write = file.write

        def write_halves(content: Any) -> int:
            half = len(content) // 2
            meet("write", path)
            write(content[:half])
            file.flush()
            meet("write the rest of", path)
            write(content[half:])
            return len(content)

        file.write = write_halves  # type: ignore[method-assign]
        return file

    def fsync(descriptor: int) -> None:
        meet("fsync", Path(f"/proc/self/fd/{descriptor}").readlink())
        original_fsync(descriptor)

    io.open = builtins.open = open_  # type: ignore[assignment]
    os.fsync = fsync  # type: ignore[assignment]
    sys.addaudithook(hook)


def settings_of(model: str, **settings: Any) -> dict[str, Any]:
    """Return SMALL for a rung, without what the rung has no use for."""
    chosen = {**SMALL, "model": model, **settings}
    if model == "bigram":
        del chosen["embed_dim"]
    return chosen


def train(project: Path, runs: Path, *, name: str = "run", on_event: Any = None, **way: Any) -> Run:
    """Train a small run on characters; `way` has the model and other settings."""
    way = {**settings_of(**way), "name": name, "on_event": on_event}
    return attnlm.train(project / DATA, checkpoint_dir=runs, **way)


@contextlib.contextmanager
def around_steps(
    before: Callable[[Any], object] = lambda stepper: None,
    after: Callable[[Any], object] = lambda stepper: None,
) -> Iterator[None]:
    """Call `before` and `after` with the Stepper around each training step of this process."""
    original = Stepper.step

    def step(self: Stepper) -> torch.Tensor:
        before(self)
        loss = original(self)
        after(self)
        return loss

    with mock.patch.object(Stepper, "step", step):
        yield


def make_project(folder: Path) -> None:
    """Make in `folder` two data sets, a run trained on the one of byte pairs, and two recipes."""
    (folder / "recipe.toml").write_text("heads = 2\n")
    (folder / "recipe.json").write_text('{"config": {"heads": 2}}')
    models.prepared(folder, TEXT)
    pairs = models.prepared(folder, TEXT, tokenizer="bpe:260")
    sizes = {"layers": 1, "heads": 2, "embed_dim": 8, "block_size": 4, "batch_size": 2}
    settings = settings_of("transformer", **sizes, steps=6, eval_every=2)
    attnlm.train(pairs.path, checkpoint_dir=folder / RUN.parent, name=RUN.name, **settings)
    made = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    assert {path for path in made if path.name not in _NOT_READ} == {*FILES}
