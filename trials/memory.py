"""Memory: as much as was estimated, and no more of it the longer training or sampling takes."""

from __future__ import annotations

import re
import resource
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import attnlm
from attnlm.cli import console, exits
from attnlm.model.architecture import RUNGS
from attnlm.training.events import Started, Stepped
from attnlm.training.memory import FACTOR
from trials.forked_children import in_child
from trials.small_projects import TEXT, around_steps, prepared, settings_of
from trials.trial import Tally, Trial, not_linux

_GROWTH = 12 * 2**20  # bytes: an allocator's unrest, as when another thread does a share
_MOST_TOKENS = 1_000_000
_SIZES: dict[str, Any] = {"block_size": 128, "batch_size": 48, "embed_dim": 128}
_UNUSUAL: dict[str, dict[str, Any]] = {
    # Evaluated on far more tokens than it is trained on.
    "a wide head": {
        "model": "multi-head",
        "heads": 1,
        "head_size": 2**15,
        "embed_dim": 2,
        "block_size": 8,
        "batch_size": 1,
    },
    "a long context": {"model": "transformer", "heads": 16, "block_size": 1024, "batch_size": 2},
}


@Trial("memory", short=1, full=1000, skip=not_linux, forks=True, draws=True)
def _memory(tally: Tally, folder: Path) -> None:
    """Memory stays as it is, however long; a run takes what was estimated; too much is told.

    As many thousand steps as are wanted, up to a million sampled tokens, and one estimate per rung.
    The short form, of a thousand, has only the rungs that are quick; the full one takes an hour.
    """
    cases = dict(_cases(tally.wanted, prepared(folder / "given"), folder))
    for (name, case), _ in tally.chosen(list(cases.items()), len(cases)):
        tally.count(in_child(case).failure, name)


def _cases(
    thousands: int, data: Path, folder: Path
) -> Iterator[tuple[str, Callable[[], str | None]]]:
    is_short = thousands == 1
    steps, tokens = 1000 * thousands, min(10_000 * thousands, _MOST_TOKENS)
    for rung in ("multi-head",) if is_short else ("multi-head", "transformer"):
        runs = folder / rung
        yield f"{rung}, {steps} steps", partial(_growth_of_training, data, runs, rung, steps)
        yield f"{rung}, {tokens} tokens", partial(_growth_of_sampling, data, runs, rung, tokens)
    ways: dict[str, dict[str, Any]] = {rung: {"model": rung} for rung in RUNGS} | _UNUSUAL
    for name in ("multi-head", "a wide head") if is_short else ways:
        yield name, partial(_estimated, folder / "estimated", name, ways[name])
    yield "out of memory", partial(_out_of_memory, data, folder / "poor")


def _status(what: str) -> int:
    """Return bytes of this process's memory: VmRSS now, VmHWM at most."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def _growth(sizes: list[int]) -> str | None:
    """Return how much more memory the second half of a life took than the first half."""
    if len(sizes) < 4:
        return "it was too short to tell"
    half = len(sizes) // 2
    grown = max(sizes[half:]) - max(sizes[:half])
    return f"{grown / 2**20:.1f} MiB more in the second half" if grown > _GROWTH else None


def _growth_of_training(data: Path, runs: Path, rung: str, steps: int) -> str | None:
    sizes = []

    def measure(event: object) -> None:
        if isinstance(event, Stepped):
            sizes.append(_status("VmRSS"))

    settings = settings_of(rung, steps=steps, eval_every=max(1, steps // 20))
    attnlm.train(data, checkpoint_dir=runs, name="run", on_event=measure, **settings)
    return _growth(sizes)


def _growth_of_sampling(data: Path, runs: Path, rung: str, tokens: int) -> str | None:
    run = attnlm.train(data, checkpoint_dir=runs, name="sampled", **settings_of(rung))
    pieces: Iterator[str] = attnlm.sample(run, tokens=tokens, seed=1, device="cpu")
    return _growth([_status("VmRSS") for _ in pieces])


def _estimated(runs: Path, name: str, way: dict[str, Any]) -> str | None:
    """Return the estimate and the peak of a few steps if they differ by more than FACTOR."""
    settings = settings_of(way["model"], steps=3, eval_every=3, **{**_SIZES, **way})
    content = TEXT * 10
    if name == "bigram":  # whose memory is all in its vocabulary
        content = "".join(map(chr, range(0x4E00, 0x4E00 + 1500))) * 3
    text = runs / f"{name}.txt"
    runs.mkdir(exist_ok=True)
    text.write_text(content)
    data = attnlm.prepare(text, data_dir=runs / "data", val_fraction=0.4).path
    estimates = []
    before = _status("VmRSS")

    def listen(event: object) -> None:
        if isinstance(event, Started):
            estimates.append(event.memory)

    attnlm.train(data, checkpoint_dir=runs, name="run", on_event=listen, **settings)
    shutil.rmtree(runs)
    taken = _status("VmHWM") - before
    if taken / FACTOR <= estimates[0] <= taken * FACTOR:
        return None
    return f"{estimates[0] / 1e6:.0f} MB estimated, {taken / 1e6:.0f} MB taken"


def _out_of_memory(data: Path, runs: Path) -> str | None:
    """Check that a run that finds no more memory in its eighth step is whole up to the fourth."""
    settings = settings_of("transformer", block_size=64)
    unlimited = resource.getrlimit(resource.RLIMIT_AS)

    def take_all(stepper: Any) -> None:
        if stepper.state.step == 7:
            resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + 2**26, unlimited[1]))
            torch.empty(2**28)

    told: list[str] = []
    console.fail = lambda message, hint: told.extend((message, hint))
    with around_steps(before=take_all):
        code = exits.run(lambda: attnlm.train(data, checkpoint_dir=runs, name="run", **settings))
    if code != 1 or "memory" not in told[0] or "--batch-size" not in told[1]:
        return f"exit {code}: {told}"
    resource.setrlimit(resource.RLIMIT_AS, unlimited)
    attnlm.train(resume=runs / "run")
    shutil.rmtree(runs)
    return None
