"""Commands that write, cut short: by kill -9 at any moment, by a disk that fails at any write."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

import attnlm
from tests.models import assert_same_run
from trials import kit

_SCENARIOS = (
    *("train multi-head", "train transformer", "train bigram"),
    *("resume multi-head", "resume transformer", "resume bigram"),
    "prepare --force",
)
_FULL = (errno.ENOSPC, errno.EIO, errno.EDQUOT)
_TAKES_ROOM = ("write", "open", "fsync", "os.mkdir")
_REACHED = mmap.mmap(-1, 8)
"""The newest step of a training, which the child that makes it shares with us."""


@dataclass
class Scenario:
    """A command that is cut short in a copy of the folder `before`."""

    before: Path
    act: Callable[[Path], None]
    check: Callable[[Path], None]
    """Asserts what must be true of the folder afterwards, and goes on with the next command."""
    events: int = 0
    """How often it does something to a file, when nobody disturbs it."""
    seconds: float = 0.0


@pytest.fixture(scope="module", params=_SCENARIOS)
def scenario(
    request: pytest.FixtureRequest, project: Path, tmp_path_factory: pytest.TempPathFactory
) -> Scenario:
    folder = tmp_path_factory.mktemp("scenario")
    command, rung = request.param.split()
    made = _preparation(folder) if rung == "--force" else _training(command, rung, project, folder)

    def count() -> int:
        numbers: list[int] = []
        kit.before_each_event(folder, lambda number, event: numbers.append(number))
        made.act(folder / "counted")
        return len(numbers)

    shutil.copytree(made.before, folder / "counted")
    began = time.perf_counter()
    made.events = kit.in_child(count)
    made.seconds = time.perf_counter() - began
    return made


@pytest.fixture
def here(scenario: Scenario, place: Path) -> Path:
    """A folder in which the scenario can act."""
    _REACHED[:] = bytes(8)
    return Path(shutil.copytree(scenario.before, place, dirs_exist_ok=True))


@pytest.mark.parametrize("case", range(150))
def test_a_kill_loses_at_most_a_save_interval(
    scenario: Scenario, case: int, here: Path, generator: Random
) -> None:
    """Before an event, or at any time."""
    chosen = generator.randrange(scenario.events * 3 // 2)

    def die(number: int, event: str) -> None:
        if number == chosen:
            os.kill(os.getpid(), signal.SIGKILL)

    if chosen < scenario.events:
        with contextlib.suppress(kit.ChildKilledError):
            kit.in_child(_act_with, die, scenario, here)
    else:
        child = kit.Child(scenario.act, here)
        time.sleep(generator.uniform(0, scenario.seconds))
        child.kill()
        child.join()
    kit.in_child(scenario.check, here)


@pytest.mark.parametrize("case", range(70))
def test_a_failing_disk_is_one_line_of_error(
    scenario: Scenario, case: int, here: Path, generator: Random
) -> None:
    """An error at one event, or from then on at all that take room: a full disk stays full."""
    first, error = generator.randrange(scenario.events), generator.choice(_FULL)
    stays = generator.random() < 0.5

    def fail(number: int, event: str) -> None:
        if number == first or (stays and number > first and event.startswith(_TAKES_ROOM)):
            raise OSError(error, os.strerror(error))

    try:
        kit.in_child(_act_with, fail, scenario, here)
    except kit.ChildError as told:
        assert re.fullmatch("AttnlmError: cannot (write|lock) .*", str(told))
    kit.in_child(scenario.check, here)


def _act_with(disturb: Callable[[int, str], None], scenario: Scenario, here: Path) -> None:
    kit.before_each_event(here, disturb)
    scenario.act(here)


def _training(command: str, rung: str, project: Path, folder: Path) -> Scenario:
    # No learning rate depends on the number of steps: the run of 6 steps goes on as others.
    way: dict[str, Any] = {"model": rung, "schedule": "constant", "eval_every": 3}

    def note(stepper: Any) -> None:
        _REACHED[:] = stepper.state.step.to_bytes(8, "little")

    def train(place: Path, steps: int = kit.SMALL["steps"]) -> None:
        with kit.around_steps(after=note):
            kit.train(project, place, steps=steps, **way)

    def resume(place: Path) -> None:
        with kit.around_steps(after=note):
            attnlm.train(resume=place / "run", steps=kit.SMALL["steps"])

    def check(place: Path) -> None:
        made = int.from_bytes(_REACHED[:], "little")
        if not (place / "run").exists():
            assert made == 0
            train(place)
        try:
            run = attnlm.open_run(place / "run")
            if run.last.exists():
                attnlm.load_model(run, checkpoint="last", device="cpu")[0]
                assert made - run.checkpoint("last").step <= way["eval_every"]
            attnlm.train(resume=run.path, steps=kit.SMALL["steps"])
        except attnlm.AttnlmError as error:
            assert made <= way["eval_every"] and "checkpoint not found" in error.message, error
            train(place / "other")
            run = attnlm.open_run(place / "other" / "run")
        assert_same_run(attnlm.open_run(folder / "whole" / "run"), run)

    (before := folder / "before").mkdir()
    kit.in_child(train, folder / "whole")
    if command == "resume":
        kit.in_child(train, before, 6)
    return Scenario(before, train if command == "train" else resume, check)


def _preparation(folder: Path) -> Scenario:
    """Return the scenario `prepare --force` over a data set."""
    texts = {"old": kit.TEXT, "new": kit.TEXT[::-1]}
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)

    def prepare(text: str, place: Path, name: str = "text") -> None:
        attnlm.prepare(folder / f"{text}.txt", data_dir=place, name=name, force=True)

    def check(place: Path) -> None:
        attnlm.open_dataset("text", data_dir=place, verify=True)
        prepare("old", place, name="other")  # which has nothing to do with that name
        there = attnlm.open_dataset("text", data_dir=place, verify=True)
        assert there.tokenizer.decode([*there.train, *there.val]) == texts[Path(there.source).stem]
        visible = {path.name for path in place.iterdir() if not path.name.startswith(".")}
        assert visible <= {"text", "other", "latest"}

    kit.in_child(prepare, "old", folder / "before")
    return Scenario(folder / "before", lambda place: prepare("new", place), check)
