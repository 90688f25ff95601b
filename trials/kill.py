"""kill -9 at any moment: before each thing that is done to a file, and at random times."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path

from trials.forked_children import Child, before_each_event, in_child
from trials.scenarios import Scenario, events_of, scenarios
from trials.trial import Tally, Trial, not_linux

_RUNGS = ("multi-head", "transformer", "bigram")


@Trial("kill", short=10, full=1000, skip=not_linux, forks=True)
def _kill(tally: Tally, folder: Path) -> None:
    """kill -9 at any moment: nothing but one save interval is lost, nothing left over."""
    is_short = tally.wanted < 100
    written = list(scenarios(_RUNGS[:1] if is_short else _RUNGS, folder))
    events = [(scenario, events_of(scenario, folder)) for scenario in written]
    for (scenario, happening), _ in tally.chosen(events, len(events)):
        tally.count(_in_the_open(happening), scenario.name)
    kills = [
        (scenario, number, event)
        for scenario, happening in events
        for number, event in enumerate(happening)
    ]
    # Before every event in its turn, and then at random times; in the short form half and half.
    at_events = tally.wanted // 2 if is_short else tally.wanted
    for (scenario, number, event), _ in tally.chosen(kills, at_events, len(events)):
        with scenario.begun(folder) as here:
            in_child(_act_and_die, scenario, number, here)
            failure = scenario.failure(here)
        tally.count(failure, f"{scenario.name}, killed before event {number}, {event}")
    seconds = {scenario.name: _seconds(scenario, folder) for scenario in written}
    by_time = max(0, tally.wanted - min(at_events, len(kills)))
    for _, generator in tally.drawn(by_time, len(events) + len(kills)):
        scenario = generator.choice(written)
        delay = generator.uniform(0, seconds[scenario.name])
        with scenario.begun(folder) as here:
            child = Child(scenario.act, here)
            time.sleep(delay)
            child.kill()
            child.wait()
            failure = scenario.failure(here)
        tally.count(failure, f"{scenario.name}, killed after {1000 * delay:.1f} ms")


def _in_the_open(events: list[str]) -> str | None:
    """Return which file is written under its final name: a kill would leave half of it.

    Lines may be added: one that was cut short is known by its missing end.
    """
    for event in events:
        done, _, name = event.partition(" ")
        if done == "open" and not name.startswith(".") and not name.endswith(".jsonl"):
            return f"{name} is written under its final name"
    return None


def _act_and_die(scenario: Scenario, number: int, place: Path) -> None:
    numbers = itertools.count()

    def die(event: str) -> None:
        if next(numbers) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    before_each_event(place, die)
    scenario.act(place)


def _seconds(scenario: Scenario, folder: Path) -> float:
    with scenario.begun(folder) as here:
        began = time.perf_counter()
        in_child(scenario.act, here)
        return time.perf_counter() - began
