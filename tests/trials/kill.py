"""kill -9 at any moment: before each thing that is done to a file, and at random times."""

from __future__ import annotations

import itertools
import mmap
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import attnlm
from attnlm import folders
from attnlm.errors import AttnlmError
from attnlm.training import Stepper
from tests.trials.children import Child, Outcome, before_each_event, in_child, in_own_process
from tests.trials.small import TEXT, prepared, same_run, settings_of
from tests.trials.trial import Tally, Trial

_RUNGS = ("multi-head", "transformer", "bigram")


@dataclass(frozen=True)
class _Scenario:
    """What is killed, and what must be true afterwards."""

    name: str
    begin: Callable[[Path], None]
    """Makes what is there before."""
    act: Callable[[Path], object]
    check: Callable[[Path], str | None]
    """Goes on with the next command; says what is wrong then."""


def _run(cases: int, seed: int, folder: Path) -> Tally:
    tally = Tally()
    is_short = cases < 100
    scenarios = list(_scenarios(_RUNGS[:1] if is_short else _RUNGS, folder))
    generator = random.Random(seed)
    # Before every event in its turn, and then at random times; in the short form half and half.
    kills = _kills_at_events(scenarios, folder)
    if is_short:
        kills = iter(generator.sample(list(kills), cases // 2))
    seconds = {scenario.name: _seconds(scenario, folder / "timed") for scenario in scenarios}
    by_time = _kills_by_time(scenarios, seconds, generator)
    for scenario, when, killed in itertools.islice(itertools.chain(kills, by_time), cases):
        place = folder / "case"
        scenario.begin(place)
        killed(place)
        problem = in_child(lambda s=scenario, p=place: s.check(p))  # type: ignore[misc]
        failure = problem.result or problem.error or problem.signum
        tally.count(f"{scenario.name}, killed {when}: {failure}" if failure else None)
        shutil.rmtree(place)
    return tally


_Kill = tuple[_Scenario, str, Callable[[Path], Outcome]]


def _kills_at_events(scenarios: list[_Scenario], folder: Path) -> Iterator[_Kill]:
    for scenario in scenarios:
        place = folder / "counted"
        scenario.begin(place)
        events = in_child(lambda s=scenario, p=place: _events(s, p)).result  # type: ignore[misc]
        shutil.rmtree(place)
        for number, event in enumerate(events):

            def kill(place: Path, scenario: _Scenario = scenario, number: int = number) -> Outcome:
                return in_child(lambda: _act_and_die(scenario, place, number))

            yield scenario, f"before event {number}, {event}", kill


def _events(scenario: _Scenario, place: Path) -> list[str]:
    events: list[str] = []
    before_each_event(place, events.append)
    scenario.act(place)
    return events


def _act_and_die(scenario: _Scenario, place: Path, number: int) -> None:
    numbers = itertools.count()

    def die(event: str) -> None:
        if next(numbers) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    before_each_event(place, die)
    scenario.act(place)


def _seconds(scenario: _Scenario, place: Path) -> float:
    scenario.begin(place)
    began = time.perf_counter()
    in_child(lambda: scenario.act(place) and None)
    seconds = time.perf_counter() - began
    shutil.rmtree(place)
    return seconds


def _kills_by_time(
    scenarios: list[_Scenario], seconds: dict[str, float], generator: random.Random
) -> Iterator[_Kill]:
    while True:
        scenario = generator.choice(scenarios)
        delay = generator.uniform(0, seconds[scenario.name])

        def kill(place: Path, scenario: _Scenario = scenario, delay: float = delay) -> Outcome:
            child = Child(lambda: scenario.act(place) and None)
            time.sleep(delay)
            child.kill()
            return child.wait()

        yield scenario, f"after {1000 * delay:.1f} ms", kill


# --- What is killed -------------------------------------------------------------------------------


def _scenarios(rungs: Sequence[str], folder: Path) -> Iterator[_Scenario]:
    data = prepared(folder / "given")
    for rung in rungs:
        yield from _training(rung, data, folder / "whole")
    for exchanges in (True, False):
        yield _preparation(folder / "given", exchanges)


def _training(rung: str, data: Path, folder: Path) -> Iterator[_Scenario]:
    settings = settings_of(rung)
    whole = in_child(
        lambda: str(attnlm.train(data, checkpoint_dir=folder, name=rung, **settings).path)
    ).result
    reached = mmap.mmap(-1, 8)  # the newest step, which the child shares with us

    def begin(place: Path) -> None:
        place.mkdir()
        reached[:] = bytes(8)

    def begin_to_go_on(place: Path) -> None:
        begin(place)
        stopped = attnlm.open_run(whole)
        shutil.copytree(whole, place / rung)
        in_child(lambda: _train_until(4, place / rung, data, settings))
        assert stopped.name == rung

    def follow() -> None:
        step = Stepper.step

        def stepping(self: Stepper, *arguments: Any) -> Any:
            result = step(self, *arguments)
            reached[:] = self.state.step.to_bytes(8, "little")
            return result

        Stepper.step = stepping  # type: ignore[assignment, method-assign]

    def train(place: Path) -> None:
        follow()
        attnlm.train(data, checkpoint_dir=place, name=rung, **settings)

    def go_on(place: Path) -> None:
        follow()
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
                if made - _saved_step(run.last) > settings["eval_every"]:
                    return f"{made} steps made, {_saved_step(run.last)} saved"
            attnlm.train(resume=run.path)
        except AttnlmError as error:
            if made > settings["eval_every"] or "there is no checkpoint" not in error.message:
                return error.message
            attnlm.train(data, checkpoint_dir=place, name="other", **settings)
            run = attnlm.open_run(place / "other")
        if left := sorted(str(p.relative_to(place)) for p in place.rglob(".*")):
            return f"leftovers: {', '.join(left)}"
        return same_run(attnlm.open_run(whole), run)

    yield _Scenario(f"train {rung}", begin, train, check)
    yield _Scenario(f"train --resume {rung}", begin_to_go_on, go_on, check)


def _train_until(step: int, path: Path, data: Path, settings: dict[str, Any]) -> None:
    """Leaves at `path` the run as it was saved after `step`."""
    from attnlm.training import Evaluated

    def stop(event: object) -> None:
        if isinstance(event, Evaluated) and event.record["step"] == step:
            raise ZeroDivisionError

    shutil.rmtree(path)
    try:
        attnlm.train(data, checkpoint_dir=path.parent, name=path.name, on_event=stop, **settings)
    except ZeroDivisionError:
        return


def _saved_step(path: Path) -> int:
    import json

    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        return int(json.loads(file.metadata()["facts"])["step"])


def _preparation(given: Path, exchanges: bool) -> _Scenario:
    """`prepare --force` over a data set; also where the system can't exchange two folders."""
    texts = {"old": TEXT, "new": TEXT[::-1]}
    for name, text in texts.items():
        (given / f"{name}.txt").write_text(text)

    def begin(place: Path) -> None:
        place.mkdir()
        attnlm.prepare(given / "old.txt", data_dir=place, name="text")

    def replace(place: Path) -> None:
        if not exchanges:
            folders._exchange_at_once = lambda *_: False
        attnlm.prepare(given / "new.txt", data_dir=place, name="text", force=True)

    def check(place: Path) -> str | None:
        if exchanges:
            attnlm.open_dataset("text", data_dir=place, verify=True)
        # The next command, which has nothing to do with that name.
        attnlm.prepare(given / "old.txt", data_dir=place, name="other")
        there = attnlm.open_dataset("text", data_dir=place, verify=True)
        source = Path(there.source).stem
        decoded = there.tokenizer.decode([*there.train.tolist(), *there.val.tolist()])
        if decoded != texts.get(source):
            return f"not the text {source}"
        left = {path.name for path in place.iterdir()} - {"text", "other", "latest"}
        return f"leftovers: {', '.join(sorted(left))}" if left else None

    return _Scenario(
        "prepare --force" + ("" if exchanges else " without exchange"), begin, replace, check
    )


TRIAL = Trial(
    name="kill",
    promise="kill -9 at any moment: nothing but one save interval is lost, nothing left over",
    short=30,
    full=1000,
    run=in_own_process(_run),
    skip=lambda: None if sys.platform == "linux" else "it counts what Linux does",
)
