"""kill -9 at any moment: before each thing that is done to a file, and at random times."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random

from tests.trials.children import Child, before_each_event, in_child
from tests.trials.scenarios import Scenario, events_of, scenarios
from tests.trials.trial import Tally, not_linux, trial

_RUNGS = ("multi-head", "transformer", "bigram")
_Kill = tuple[Scenario, str, Callable[[Path], object]]


@trial("kill", short=10, full=1000, skip=not_linux, forks=True)
def _kill(tally: Tally, folder: Path) -> None:
    """kill -9 at any moment: nothing but one save interval is lost, nothing left over."""
    is_short = tally.wanted < 100
    written = list(scenarios(_RUNGS[:1] if is_short else _RUNGS, folder))
    events = [(scenario, events_of(scenario, folder / "counted")) for scenario in written]
    for (scenario, happening), _ in tally.chosen(events, len(events)):
        tally.count(_in_the_open(happening), scenario.name)
    # Before every event in its turn, and then at random times; in the short form half and half.
    kills = list(_kills_at_events(events))
    at_events = tally.wanted // 2 if is_short else tally.wanted
    by_time = max(0, tally.wanted - min(at_events, len(kills)))
    seconds = {scenario.name: _seconds(scenario, folder / "timed") for scenario in written}
    drawn = (
        _kill_by_time(written, seconds, generator)
        for _, generator in tally.drawn(by_time, len(events) + len(kills))
    )
    chosen = (kill for kill, _ in tally.chosen(kills, at_events, len(events)))
    for scenario, when, killed in itertools.chain(chosen, drawn):
        place = folder / "case"
        scenario.begin(place)
        killed(place)
        failure = scenario.failure(place)
        tally.count(failure, f"{scenario.name}, killed {when}")
        shutil.rmtree(place)


def _in_the_open(events: list[str]) -> str | None:
    """Return which file is written under its final name: a kill would leave half of it.

    Lines may be added: one that was cut short is known by its missing end.
    """
    for event in events:
        done, _, name = event.partition(" ")
        if done == "open" and not name.startswith(".") and not name.endswith(".jsonl"):
            return f"{name} is written under its final name"
    return None


def _kills_at_events(written: list[tuple[Scenario, list[str]]]) -> Iterator[_Kill]:
    for scenario, events in written:
        for number, event in enumerate(events):
            killed = partial(in_child, _act_and_die, scenario, number)
            yield scenario, f"before event {number}, {event}", killed


def _act_and_die(scenario: Scenario, number: int, place: Path) -> None:
    numbers = itertools.count()

    def die(event: str) -> None:
        if next(numbers) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    before_each_event(place, die)
    scenario.act(place)


def _seconds(scenario: Scenario, place: Path) -> float:
    scenario.begin(place)
    began = time.perf_counter()
    in_child(scenario.act, place)
    seconds = time.perf_counter() - began
    shutil.rmtree(place)
    return seconds


def _kill_by_time(written: list[Scenario], seconds: dict[str, float], generator: Random) -> _Kill:
    scenario = generator.choice(written)
    delay = generator.uniform(0, seconds[scenario.name])

    def kill(place: Path) -> None:
        child = Child(lambda: scenario.act(place))
        time.sleep(delay)
        child.kill()
        child.wait()

    return scenario, f"after {1000 * delay:.1f} ms", kill
