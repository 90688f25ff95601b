"""Two processes: trainers of one run, readers beside a writer."""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attnlm
from attnlm.training.events import Evaluated
from trials.forked_children import Child, in_child
from trials.small_projects import prepared, same_run, settings_of
from trials.trial import Tally, Trial, place


@Trial("two", short=4, full=60, forks=True)
def _two(tally: Tally, folder: Path) -> None:
    """Check that two processes on one run give one error, and no mixed files."""
    data = prepared(folder / "given")
    whole = folder / "whole"
    in_child(_train, data, whole)
    kinds = (_two_trainers, _readers)
    for case, generator in tally.drawn(tally.wanted):
        kind = kinds[case % len(kinds)]
        with place(folder) as here:
            tally.count(kind(data, whole / "run", here, generator), kind.__name__)


def _train(data: Path, runs: Path, **settings: Any) -> None:
    attnlm.train(data, checkpoint_dir=runs, name="run", **settings_of("multi-head", **settings))


@contextlib.contextmanager
def _paused(data: Path, runs: Path, step: int) -> Iterator[Child]:
    """Yield a child that trains a run, and waits after this step's evaluation until we are done."""
    reached, goes_on = multiprocessing.Semaphore(0), multiprocessing.Semaphore(0)

    def wait(event: object) -> None:
        if isinstance(event, Evaluated) and event.step == step:
            reached.release()
            goes_on.acquire()

    child = Child(lambda: _train(data, runs, on_event=wait))
    reached.acquire()
    try:
        yield child
    finally:
        goes_on.release()


def _resumed(run: Path, whole: Path) -> str | None:
    """Say what is wrong unless the run, resumed, is the one that nobody disturbed."""

    def check() -> str | None:
        attnlm.train(resume=run)
        return same_run(attnlm.open_run(whole), attnlm.open_run(run))

    return in_child(check).failure


def _two_trainers(data: Path, whole: Path, here: Path, generator: random.Random) -> str | None:
    """The second is refused, while the first lives; a kill gives the run free."""
    is_killed = generator.random() < 0.5
    with _paused(data, here, generator.choice((0, 4, 8, 12))) as first:
        second = in_child(lambda: attnlm.train(resume=here / "run") and None)
        if is_killed:
            first.kill()
    outcome = first.wait()
    if second.error != "AttnlmError: run is being trained by another process":
        return f"the second: {second}"
    if not is_killed and outcome.error:
        return f"the first: {outcome}"
    return _resumed(here / "run", whole)


def _readers(data: Path, whole: Path, here: Path, generator: random.Random) -> str | None:
    """`sample` and `eval` of a run that is being trained."""
    seed = generator.randrange(2**31)
    writer = Child(lambda: _train(data, here, steps=40, eval_every=1, seed=seed))
    while not (here / "run" / "last.safetensors").exists():
        time.sleep(0.001)

    def read() -> None:
        for which in ("best", "last") * 5:
            run = attnlm.open_run(here / "run")
            attnlm.evaluate(run, checkpoint=which, device="cpu")
            "".join(attnlm.sample(run, tokens=5, seed=1, checkpoint=which, device="cpu"))

    return in_child(read).failure or writer.wait().failure
