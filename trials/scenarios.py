"""Commands that write, and what must be true after each was cut short: killed, or out of room."""

from __future__ import annotations

import contextlib
import mmap
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import attnlm
from attnlm.training.events import Evaluated
from trials.forked_children import before_each_event, in_child
from trials.small_projects import (
    TEXT,
    around_steps,
    facts_of,
    prepared,
    same_run,
    settings_of,
)
from trials.trial import place


@dataclass(frozen=True)
class Scenario:
    """A command that is stopped, and the check of its files afterwards."""

    name: str
    begin: Callable[[Path], None]
    """Makes what is there before."""
    act: Callable[[Path], None]
    check: Callable[[Path], str | None]
    """Goes on with the next command; returns what is wrong then."""

    @contextlib.contextmanager
    def begun(self, folder: Path) -> Iterator[Path]:
        """Yield a folder in which it can act."""
        with place(folder) as here:
            self.begin(here)
            yield here

    def failure(self, place: Path) -> str | None:
        """Return what `check` returns in a child."""
        return in_child(self.check, place).failure


def events_of(scenario: Scenario, folder: Path) -> list[str]:
    """Return what an uninterrupted scenario does to files."""

    def act() -> list[str]:
        events: list[str] = []
        before_each_event(here, events.append)
        scenario.act(here)
        return events

    with scenario.begun(folder) as here:
        return list(in_child(act).result)


def scenarios(rungs: Sequence[str], folder: Path) -> Iterator[Scenario]:
    data = prepared(folder / "given")
    for rung in rungs:
        yield from _training(rung, data, folder / "whole")
    yield _preparation(folder / "given")


def _training(rung: str, data: Path, folder: Path) -> Iterator[Scenario]:
    settings = settings_of(rung)
    whole, stopped = folder / rung, folder / "stopped" / rung
    in_child(_train, data, whole, settings)
    in_child(_train, data, stopped, settings, 4)
    reached = mmap.mmap(-1, 8)  # the newest step, which the child shares with us

    def begin(place: Path) -> None:
        reached[:] = bytes(8)

    def begin_to_go_on(place: Path) -> None:
        begin(place)
        shutil.copytree(stopped, place / rung)

    def note(stepper: Any) -> None:
        reached[:] = stepper.state.step.to_bytes(8, "little")

    def train(place: Path) -> None:
        with around_steps(after=note):
            _train(data, place / rung, settings)

    def go_on(place: Path) -> None:
        with around_steps(after=note):
            attnlm.train(resume=place / rung)

    def check(place: Path) -> str | None:
        made = int.from_bytes(reached[:], "little")
        if not (place / rung).exists():
            if made:
                return f"no run after {made} steps"
            train(place)
        try:
            run = attnlm.open_run(place / rung)
            if run.last.exists():
                attnlm.load_model(run, checkpoint="last", device="cpu")
                if made - facts_of(run.last)["step"] > settings["eval_every"]:
                    return f"{made} steps made, {facts_of(run.last)['step']} saved"
            attnlm.train(resume=run.path)
        except attnlm.AttnlmError as error:
            if made > settings["eval_every"] or "checkpoint not found" not in error.message:
                return error.message
            _train(data, place / "other", settings)
            run = attnlm.open_run(place / "other")
        return same_run(attnlm.open_run(whole), run)

    yield Scenario(f"train {rung}", begin, train, check)
    yield Scenario(f"train --resume {rung}", begin_to_go_on, go_on, check)


def _train(data: Path, run: Path, settings: dict[str, Any], until: int | None = None) -> None:
    """Train a run, or leave it as it was saved after the step `until`."""

    def stop(event: object) -> None:
        if isinstance(event, Evaluated) and event.step == until:
            raise ZeroDivisionError

    attnlm.train(data, checkpoint_dir=run.parent, name=run.name, on_event=stop, **settings)


def _preparation(given: Path) -> Scenario:
    """Return the scenario `prepare --force` over a data set."""
    texts = {"old": TEXT, "new": TEXT[::-1]}
    for name, text in texts.items():
        (given / f"{name}.txt").write_text(text)

    def begin(place: Path) -> None:
        attnlm.prepare(given / "old.txt", data_dir=place, name="text")

    def replace(place: Path) -> None:
        attnlm.prepare(given / "new.txt", data_dir=place, name="text", force=True)

    def check(place: Path) -> str | None:
        attnlm.open_dataset("text", data_dir=place, verify=True)
        # The next command, which has nothing to do with that name.
        attnlm.prepare(given / "old.txt", data_dir=place, name="other")
        there = attnlm.open_dataset("text", data_dir=place, verify=True)
        source = Path(there.source).stem
        if there.tokenizer.decode([*there.train, *there.val]) != texts.get(source):
            return f"not the text {source}"
        visible = {path.name for path in place.iterdir() if not path.name.startswith(".")}
        left = visible - {"text", "other", "latest"}
        return f"leftovers: {', '.join(sorted(left))}" if left else None

    return Scenario("prepare --force", begin, replace, check)
