"""Trains the rungs of a ladder alike, measures them, and samples from them."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attnlm.base import clock
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import Note, OnEvent, ignore
from attnlm.base.folders import check_name, find_folder
from attnlm.base.settings import Setting
from attnlm.base.workspaces import delete_folder, trained_alone, workspace
from attnlm.compute.device import choose_device
from attnlm.config.new_training import Resolved
from attnlm.config.settings import resolve
from attnlm.config.training import TrainingConfig
from attnlm.config.variants import variant
from attnlm.data.dataset import Dataset, open_dataset
from attnlm.experiments.settle import check_fits
from attnlm.experiments.train import train
from attnlm.generation.sampling import load_sampler
from attnlm.generation.sampling_config import SamplingConfig, drawn_seed
from attnlm.runs.checkpoint import load_checkpoint
from attnlm.runs.ladder_plan import RECORD, Plan, check_tokens, checked_rungs, read_plan, run_path
from attnlm.runs.open_run import open_run
from attnlm.runs.run import Run
from attnlm.see.ladder import Ladder, Rung
from attnlm.training.price import affordable_tokens, step_price

DEFAULT_RUNGS = ("bigram", "average", "single-head", "multi-head", "transformer")
DEFAULT_BUDGET = 120.0
# What every rung shares beside the seed and the steps: the defaults of most of them.
_BLOCK_SIZE, _BATCH_SIZE = 64, 32
# Of a budget: seconds for a rung's sample and the page, the smaller of two; the shortest training;
# and by how much a ladder may end too late for equal numbers of steps, the larger of two.
_SPEAKING, _SPEAKING_SHARE, _SHORTEST, _LATE, _LATE_SHARE = 0.8, 0.015, 0.1, 3.0, 0.05
_STEP_OVERHEAD = 2e7
"""Operations that a step could make in the time it takes for anything else."""
_SETTINGS = ("steps", "budget", "eval_every", "eval_tokens", "threads")


@dataclass(frozen=True)
class LadderStarted:
    """The ladder in the folder `path` is about to train its rungs, or to resume them."""

    path: Path
    plan: Plan


def climb(
    dataset: str | Path | Dataset | None = None,
    *,
    rungs: Sequence[str] | None = None,
    budget: float | None = None,
    steps: int | None = None,
    eval_every: int | None = None,
    eval_tokens: int | None = None,
    threads: int | None = None,
    seed: int | None = None,
    prompt: str | None = None,
    tokens: int | None = None,
    name: str | None = None,
    resume: str | Path | None = None,
    checkpoint_dir: str | Path = "checkpoints",
    data_dir: str | Path = "data",
    on_event: OnEvent | None = None,
) -> Ladder:
    """Trains the rungs on the same batches, and returns them in their order.

    Each is a run of its own, `<ladder>-<rung>`. `budget` is in seconds for all of them together:
    the largest is then trained first, in its share of the time, and the others make as many steps.
    A ladder that exists, by `resume` or by its `name`, is resumed; other arguments must then equal
    those it was started with. `on_event` receives LadderStarted and all events of `train`.

    Raises AttnlmError (UsageError for invalid arguments); Interrupted on a signal,
    after the last complete step was saved.
    """
    began = clock.began()
    on_event = on_event or ignore
    asked: dict[str, Any] = {
        "rungs": None if rungs is None else tuple(rungs),
        "budget": budget,
        "steps": steps,
        "eval_every": eval_every,
        "eval_tokens": eval_tokens,
        "threads": threads,
        "seed": seed,
        "prompt": prompt,
        "tokens": tokens,
    }
    given = {key: value for key, value in asked.items() if value is not None}
    checkpoint_dir = Path(checkpoint_dir)
    path = _existing(name, resume, checkpoint_dir)
    if path is None:
        opened = open_dataset(dataset, data_dir=Path(data_dir))
        path, made = _begin(opened, given, name, checkpoint_dir, on_event)
    else:
        made = read_plan(path)
        _check_unchanged(made, given)
        opened = _same_dataset(made, dataset, Path(data_dir))
    hint = "wait until that ends, or stop it; or start another ladder"
    with trained_alone(path, hint):
        on_event(LadderStarted(path, made))
        trained: dict[str, Run] = {}
        for rung in _in_order(made, opened.vocab_size):
            on_event(Note(f"rung {len(trained) + 1} of {len(made.rungs)}: {rung}"))
            share = None if made.budget is None else _share(made, rung, trained, opened, began)
            run = _trained(path, made, rung, opened, Path(data_dir), on_event, share)
            if made.steps is None:
                made = _as_made(made, run)
                made.write(path)
            trained[rung] = run
        wholes = {rung: run.whole() for rung, run in trained.items()}
        is_whole = all(wholes.values())
        return Ladder(
            path,
            made,
            tuple(
                _sampled(rung, trained[rung], made, wholes[rung]["best"] if is_whole else {})
                for rung in made.rungs
            ),
        )


def _in_order(made: Plan, vocab_size: int) -> list[str]:
    """For a budget the largest first: it takes most of the time, and so sets the steps of all."""
    if made.budget is None:
        return list(made.rungs)
    return sorted(made.rungs, key=lambda rung: -_price(made, rung, vocab_size))


def _share(
    made: Plan, rung: str, trained: Mapping[str, Run], dataset: Dataset, began: float
) -> float:
    """Return the seconds of a rung: those of the first decide how many steps all of them make.

    Its share follows from the operations of a step. The others make fewer steps than it only where
    the ladder would end much too late.
    """
    assert made.budget is not None
    prices = {rung: _price(made, rung, dataset.vocab_size) for rung in made.rungs}
    own = prices[rung]
    others = sum(prices[other] for other in made.rungs if other not in (rung, *trained))
    left = began + made.budget - time.perf_counter()
    left -= len(made.rungs) * min(_SPEAKING, _SPEAKING_SHARE * made.budget)
    if not trained:
        return max(left * own / (own + others), _SHORTEST)
    first = next(iter(trained))
    rate = float(trained[first].metrics()[-1]["seconds"]) / prices[first]
    late = max(_LATE, _LATE_SHARE * made.budget)
    left = max(left + late, late)
    return max(left - rate * others, left * own / (own + others))


def _price(made: Plan, rung: str, vocab_size: int) -> float:
    return step_price(resolve({}, made.settings(rung)), vocab_size) + _STEP_OVERHEAD


def _as_made(made: Plan, run: Run) -> Plan:
    """The plan with the steps that its first run made; the others make as many."""
    training = run.config.training
    steps = run.metrics()[-1]["step"]
    every = made.eval_every or max(1, math.ceil(steps / 10))
    return replace(made, steps=steps, eval_every=every, eval_tokens=training.eval_tokens)


def _existing(name: str | None, resume: str | Path | None, checkpoint_dir: Path) -> Path | None:
    """The folder of the ladder that goes on; None where a new one is to begin."""
    if resume is not None:
        if name is not None:
            raise UsageError("`resume` and `name` exclude each other", "give one of them")
        return find_folder(resume, checkpoint_dir, kind="ladder")
    if name is None:
        return None
    check_name(name)
    return checkpoint_dir / name if (checkpoint_dir / name / RECORD).exists() else None


def _check_unchanged(made: Plan, given: Mapping[str, Any]) -> None:
    for key, value in given.items():
        if value != getattr(made, key):
            raise UsageError(
                f"`{key}` can't be changed in a ladder that is resumed",
                "leave it out, or start another ladder with another `name`",
            )


def _same_dataset(made: Plan, named: str | Path | Dataset | None, data_dir: Path) -> Dataset:
    recorded = Path(made.dataset_path)
    dataset = open_dataset(
        named or (recorded if recorded.is_dir() else made.dataset), data_dir=data_dir
    )
    if (dataset.train_sha256, dataset.val_sha256) != (made.train_sha256, made.val_sha256):
        raise AttnlmError(
            f"{dataset.path} is not the data set that the ladder was started with",
            f"prepare that one again, or move it to {recorded}",
        )
    return dataset


def _begin(
    dataset: Dataset,
    given: dict[str, Any],
    name: str | None,
    checkpoint_dir: Path,
    on_event: OnEvent,
) -> tuple[Path, Plan]:
    """A new ladder's folder, whole from the first, and its plan."""
    rungs = checked_rungs(given.get("rungs", DEFAULT_RUNGS))
    prompt, tokens = given.get("prompt", ""), given.get("tokens", 200)
    seed = given.get("seed", drawn_seed())
    SamplingConfig(tokens=tokens)
    check_tokens(tokens)
    dataset.tokenizer.encode(prompt)  # a prompt that it can't read is told before hours of training
    block_size = min(_BLOCK_SIZE, dataset.largest_block_size)
    if block_size < _BLOCK_SIZE:
        on_event(Note(f"{dataset.name} is small: the context of the rungs is {block_size} tokens"))
    alike: dict[str, Setting] = {
        "seed": seed,
        "block_size": block_size,
        "batch_size": _BATCH_SIZE,
        **{key: given[key] for key in _SETTINGS if key in given},
    }
    if not alike.keys() & {"steps", "budget"}:
        alike["budget"] = DEFAULT_BUDGET
    training = _settled(dataset, rungs, alike)
    made = Plan(
        dataset=dataset.name,
        dataset_path=str(dataset.path),
        train_sha256=dataset.train_sha256,
        val_sha256=dataset.val_sha256,
        rungs=rungs,
        seed=seed,
        steps=training.steps,
        eval_every=training.eval_every,
        eval_tokens=training.eval_tokens,
        threads=given.get("threads"),
        block_size=block_size,
        batch_size=_BATCH_SIZE,
        prompt=prompt,
        tokens=tokens,
        budget=float(alike["budget"]) if "budget" in alike else None,
    )
    with workspace(checkpoint_dir) as work:
        new = work / "new"
        new.mkdir()
        made.write(new)
        numbered = (checkpoint_dir / f"ladder-{number:03}" for number in itertools.count(1))
        free = (path for path in numbered if _taken(path, rungs) is None)
        path = checkpoint_dir / name if name else next(free)
        if taken := _taken(path, rungs):
            raise AttnlmError(
                f"{taken} exists, and runs are never overwritten", "give the ladder another `name`"
            )
        new.rename(path)
    return path, made


def _settled(
    dataset: Dataset, rungs: Sequence[str], alike: Mapping[str, Setting]
) -> TrainingConfig:
    """Steps and evaluations that all rungs share, where these do not follow a clock."""
    configs = [resolve({**alike, **variant(rung)}) for rung in rungs]
    training = configs[0].training
    device = choose_device(training.device, training.dtype)
    for config in configs:
        check_fits(config, dataset, device)
    if training.budget is None and training.eval_tokens is None:
        sizes = dataset.vocab_size, dataset.val_tokens
        parts = [affordable_tokens(config, *sizes) for config in configs]
        part = min((part for part in parts if part is not None), default=None)
        training = replace(training, eval_tokens=part)
    return training


def _taken(path: Path, rungs: Sequence[str]) -> Path | None:
    """What exists where a ladder's folder or one of its runs would be."""
    return next(filter(os.path.lexists, (path, *(run_path(path, rung) for rung in rungs))), None)


def _trained(
    path: Path,
    made: Plan,
    rung: str,
    dataset: Dataset,
    data_dir: Path,
    on_event: OnEvent,
    share: float | None,
) -> Run:
    """The run of a rung: made, gone on with, or as it is where it is done."""
    where, folder = run_path(path, rung), path.parent
    if where.is_dir():
        run = open_run(where)
        _check_belongs(run, made, rung)
        if run.last.exists():
            facts, _, _ = load_checkpoint(run.last, run.config.model, run.vocab_size)
            if facts.get("evaluated_step") == facts["step"] == run.config.training.steps:
                run.metrics_until(facts["evaluated_step"])  # refuses where some are missing
                on_event(Note(f"{run.name} is done"))
                return run
            return train(resume=where, checkpoint_dir=folder, data_dir=data_dir, on_event=on_event)
        with run.alone():  # nothing was saved yet: it begins again
            delete_folder(where)
    settings = made.settings(rung)
    config = resolve({}, settings if share is None else {**settings, "budget": share})
    asked = Resolved(config, began=time.perf_counter())
    return train(dataset, recipe=asked, name=where.name, checkpoint_dir=folder, on_event=on_event)


def _check_belongs(run: Run, made: Plan, rung: str) -> None:
    """A run that was made longer since still belongs; the warnings name it."""
    recorded = {**run.config.settings(), **run.dataset}
    expected = {**made.settings(rung), "train_sha256": made.train_sha256}
    for key in expected.keys() - {"steps", "eval_every"}:
        if recorded.get(key) != expected[key]:
            raise AttnlmError(
                f"{run.path} does not belong to this ladder: its {key} differs",
                "move or rename it, or start another ladder",
            )


def _sampled(rung: str, run: Run, made: Plan, whole: Mapping[str, Any]) -> Rung:
    sampler = load_sampler(run, device=run.config.training.device)
    config = SamplingConfig(tokens=made.tokens, seed=made.seed)
    text = "".join(sampler.stream(sampler.prompt_ids(made.prompt), config))
    return Rung(rung, run, run.metrics(), text, whole)
