"""A run that is stopped after any step and goes on is the run that was never stopped."""

from __future__ import annotations

import itertools
import shutil
import signal
from pathlib import Path
from typing import Any

import attnlm
from attnlm.compute.native import native_library
from attnlm.config.settings import resolve
from attnlm.model.architecture import RUNGS
from attnlm.training.kernel_choice import has_native_ops
from attnlm.workflows.autotune import _has_compiler
from trials.forked_children import in_child
from trials.small_projects import around_steps, facts_of, prepared, same_run, settings_of
from trials.trial import Tally, Trial

_STOPS = range(1, 12)
_SHORT = 100  # fewer cases than this leave out what takes a minute


@Trial("resume", short=7, full=509, forks=True)
def _resume(tally: Tally, folder: Path) -> None:
    """Stopped after any step and resumed: the same bytes as never stopped."""
    data = prepared(folder / "given")
    stopped = list(itertools.product(_ways(attnlm.open_dataset(data).vocab_size), _STOPS))
    if tally.wanted >= _SHORT and _has_compiler():
        compiled = {"model": "transformer", "dropout": 0.2, "compile": "on", "optimizer": "muon"}
        stopped += [(compiled, stop) for stop in (1, 6, 11)]
    for (way, stop), _ in tally.chosen(stopped, tally.wanted):
        settings = settings_of(way["model"], **way)
        key = "-".join(map(str, way.values()))
        whole, parts = folder / key, folder / f"stopped-{tally.number}"
        outcome = in_child(_compare, data, whole, parts, settings, stop)
        tally.count(outcome.failure, f"{key}, stopped after step {stop}")
        shutil.rmtree(parts, ignore_errors=True)


def _ways(vocab_size: int) -> list[dict[str, Any]]:
    """Return every rung with every optimizer and sampling, and with dropout if it has it.

    Without dropout, rungs of one layer have another, faster way to step, and a third one in C.
    """
    ways: list[dict[str, Any]] = []
    for rung, sampling in itertools.product(RUNGS, ("epoch", "random")):
        plain = rung in ("bigram", "average", "dot-product")
        for optimizer in ("adamw",) if plain else ("adamw", "muon"):
            way = {"model": rung, "sampling": sampling, "optimizer": optimizer}
            ways.append(way if plain else {**way, "dropout": 0.2})
            config = resolve(settings_of(rung, **way))
            tokens = config.training.batch_size * config.spec.block_size
            if has_native_ops(config.spec, vocab_size, tokens):
                ways.append(way)
                if native_library() is not None:
                    ways.append({**way, "compile": "parts"})
    return ways


def _compare(
    data: Path, whole: Path, parts: Path, settings: dict[str, Any], stop: int
) -> str | None:
    if not whole.exists():
        attnlm.train(data, checkpoint_dir=whole, name="run", **settings)

    def stop_it(stepper: Any) -> None:
        if stepper.state.step == stop:
            signal.raise_signal(signal.SIGTERM)

    try:
        with around_steps(after=stop_it):
            attnlm.train(data, checkpoint_dir=parts, name="run", **settings)
        return "it was not stopped"
    except KeyboardInterrupt:
        pass
    if (saved := facts_of(parts / "run" / "last.safetensors")["step"]) != stop:
        return f"step {saved} was saved"
    return same_run(attnlm.open_run(whole / "run"), attnlm.train(resume=parts / "run"))
