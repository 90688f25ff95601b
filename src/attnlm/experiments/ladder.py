"""Trains the rungs of a ladder alike, measures them, and samples from them."""

from __future__ import annotations

import functools
import itertools
import operator
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import Note, OnEvent, ignore
from attnlm.base.folders import find_folder, trained_alone, workspace
from attnlm.base.names import check_name
from attnlm.base.readable import duration
from attnlm.base.settings import Setting
from attnlm.compute.device import choose_device
from attnlm.config.settings import resolve
from attnlm.config.variants import variant
from attnlm.data.dataset import Dataset, open_dataset
from attnlm.experiments.budget import TRIAL_SHARE, measure_pace, plan
from attnlm.experiments.settle import check_fits, settle
from attnlm.experiments.train import train
from attnlm.generation.sampling import SamplingConfig, drawn_seed, load_sampler
from attnlm.runs.checkpoint import load_checkpoint
from attnlm.runs.ladder_plan import RECORD, Plan, checked_rungs, read_plan, run_path
from attnlm.runs.open_run import open_run
from attnlm.runs.run import Run
from attnlm.see.ladder import Ladder, Rung

DEFAULT_RUNGS = ("bigram", "average", "single-head", "multi-head", "transformer")
DEFAULT_BUDGET = 120.0
# What every rung shares beside the seed and the steps: the defaults of most of them.
_BLOCK_SIZE, _BATCH_SIZE = 64, 32


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

    Each is a run of its own, `<ladder>-<rung>`. `budget` is in seconds for all of them together.
    A ladder that exists, by `resume` or by its `name`, is resumed; other arguments must then equal
    those it was started with. `on_event` receives LadderStarted and all events of `train`.

    Raises AttnlmError (UsageError for invalid arguments); Interrupted on a signal,
    after the last complete step was saved.
    """
    on_event = on_event or ignore
    asked: dict[str, Any] = {
        "rungs": None if rungs is None else tuple(rungs),
        "budget": budget,
        "steps": steps,
        "eval_every": eval_every,
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
        trained = []
        for number, rung in enumerate(made.rungs, 1):
            on_event(Note(f"rung {number} of {len(made.rungs)}: {rung}"))
            trained.append(_trained(path, made, rung, opened, Path(data_dir), on_event))
        return Ladder(
            path, made, tuple(_sampled(*one, made) for one in zip(made.rungs, trained, strict=True))
        )


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
    dataset.tokenizer.encode(prompt)  # a prompt that it can't read is told before hours of training
    block_size = min(_BLOCK_SIZE, dataset.largest_block_size)
    if block_size < _BLOCK_SIZE:
        on_event(Note(f"{dataset.name} is small: the context of the rungs is {block_size} tokens"))
    alike: dict[str, Setting] = {
        "seed": seed,
        "block_size": block_size,
        "batch_size": _BATCH_SIZE,
        **{key: given[key] for key in ("steps", "budget", "eval_every") if key in given},
    }
    if not alike.keys() & {"steps", "budget"}:
        alike["budget"] = DEFAULT_BUDGET
    steps, eval_every = _settled_steps(dataset, rungs, alike, on_event)
    made = Plan(
        dataset=dataset.name,
        dataset_path=str(dataset.path),
        train_sha256=dataset.train_sha256,
        val_sha256=dataset.val_sha256,
        rungs=rungs,
        seed=seed,
        steps=steps,
        eval_every=eval_every,
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


def _settled_steps(
    dataset: Dataset, rungs: Sequence[str], alike: Mapping[str, Setting], on_event: OnEvent
) -> tuple[int, int]:
    """Steps and steps between evaluations, for every rung: as asked for, or as the budget holds."""
    configs = [resolve({**alike, **variant(rung)}) for rung in rungs]
    training = configs[0].training
    device = choose_device(training.device, training.dtype)
    for config in configs:
        check_fits(config, dataset, device)
    if training.budget is not None:
        began, threads = time.perf_counter(), torch.get_num_threads()
        share = TRIAL_SHARE * training.budget / len(rungs)
        try:
            paces = [
                measure_pace(settle(config, device, dataset), dataset, device, share)
                for config in configs
            ]
        finally:
            torch.set_num_threads(threads)
        together = functools.reduce(operator.add, paces)
        budget = training.budget
        training = plan(training, together, budget - (time.perf_counter() - began))
        on_event(
            Note(
                f"{training.steps:,} steps of each rung fit into {duration(budget)}: one of each "
                f"takes {duration(together.step)}, an evaluation of each "
                f"{duration(together.evaluation, 2)}"
            )
        )
    assert training.steps is not None and training.eval_every is not None
    return training.steps, training.eval_every


def _taken(path: Path, rungs: Sequence[str]) -> Path | None:
    """What exists where a ladder's folder or one of its runs would be."""
    return next(filter(os.path.lexists, (path, *(run_path(path, rung) for rung in rungs))), None)


def _trained(
    path: Path, made: Plan, rung: str, dataset: Dataset, data_dir: Path, on_event: OnEvent
) -> Run:
    """The run of a rung: made, gone on with, or as it is where it is done."""
    where, folder = run_path(path, rung), path.parent
    if where.is_dir():
        run = open_run(where)
        _check_belongs(run, made, rung)
        if run.last.exists():
            _, facts, _ = load_checkpoint(run.last, run.config.model, run.vocab_size)
            if facts.get("evaluated_step") == run.config.training.steps:
                run.metrics_until(facts["evaluated_step"])  # refuses where some are missing
                on_event(Note(f"{run.name} is done"))
                return run
            return train(resume=where, checkpoint_dir=folder, data_dir=data_dir, on_event=on_event)
        with run.alone():  # nothing was saved yet: it begins again
            shutil.rmtree(where)
    return train(
        dataset.path,
        name=where.name,
        checkpoint_dir=folder,
        data_dir=data_dir,
        on_event=on_event,
        **made.settings(rung),
    )


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


def _sampled(rung: str, run: Run, made: Plan) -> Rung:
    sampler = load_sampler(run, device=run.config.training.device)
    config = SamplingConfig(tokens=made.tokens, seed=made.seed)
    text = "".join(sampler.stream(sampler.prompt_ids(made.prompt), config))
    return Rung(rung, run, run.metrics(), text)
