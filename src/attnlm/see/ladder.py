"""The rungs of the ladder side by side: each trained alike, measured, and asked to speak."""

from __future__ import annotations

import functools
import itertools
import operator
import os
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import attnlm
from attnlm import files
from attnlm.checkpoint import load_checkpoint
from attnlm.config import RUNGS, Setting, flag, resolve
from attnlm.dataset import Dataset, open_dataset
from attnlm.device import choose_device
from attnlm.errors import AttnlmError, UsageError
from attnlm.events import Note, OnEvent, ignore
from attnlm.folders import check_name, find_folder, trained_alone, workspace
from attnlm.launch import TRIAL_SHARE, check_fits, measure_pace, plan, settle, train
from attnlm.readable import duration
from attnlm.run import Run, open_run
from attnlm.sampling import SamplingConfig, drawn_seed, load_sampler
from attnlm.suggestions import suggestion
from attnlm.verdict import verdict

DEFAULT_RUNGS = ("bigram", "average", "single-head", "multi-head", "transformer")
DEFAULT_BUDGET = 120.0
_RECORD, _FORMAT = "ladder.json", 1
# What every rung shares beside the seed and the steps: the defaults of most of them.
_BLOCK_SIZE, _BATCH_SIZE = 64, 32


@dataclass(frozen=True)
class Plan:
    """What a ladder was asked for, settled: its record, from which it goes on."""

    dataset: str
    dataset_path: str
    train_sha256: str
    val_sha256: str
    rungs: tuple[str, ...]
    seed: int
    steps: int
    eval_every: int
    block_size: int
    batch_size: int
    prompt: str
    tokens: int
    budget: float | None = None
    """Seconds that the steps were planned for, where they were."""

    def settings(self, rung: str) -> dict[str, Any]:
        """What is given to a rung's training."""
        alike = ("seed", "steps", "eval_every", "block_size", "batch_size")
        return {"model": rung, **{key: getattr(self, key) for key in alike}}


@dataclass(frozen=True)
class LadderStarted:
    """The ladder in the folder `path` is about to train its rungs, or to go on with them."""

    path: Path
    plan: Plan


@dataclass(frozen=True)
class Rung:
    """A trained rung: its run, the lines of its metrics, and what it said."""

    run: Run
    records: Sequence[Mapping[str, Any]]
    text: str

    @property
    def model(self) -> str:
        return self.run.config.model.model

    @property
    def best(self) -> Mapping[str, Any]:
        """The record of the best evaluation: that of the checkpoint which speaks."""
        return min(self.records, key=lambda record: float(record["val_loss"]))

    @property
    def last(self) -> Mapping[str, Any]:
        return self.records[-1]

    @property
    def verdict(self) -> str:
        """How its training went, in words."""
        about = self.run.dataset
        return verdict(self.records, bigram_loss=about["bigram_loss"], floor=about["floor"])


@dataclass(frozen=True)
class Ladder:
    """The rungs of a ladder, trained; `path` is its own folder, beside the runs' folders."""

    path: Path
    plan: Plan
    rungs: tuple[Rung, ...]

    @property
    def gains(self) -> list[float | None]:
        """By how much each rung's loss is below the lowest of those before; None for the first."""
        losses = [float(rung.best["val_loss"]) for rung in self.rungs]
        lowest = itertools.accumulate(losses, min)
        return [None, *(best - loss for best, loss in zip(lowest, losses[1:], strict=False))]

    @property
    def command(self) -> str:
        """What to type to get the same again: the steps stand for the budget."""
        given = self.plan
        usual = Path(given.dataset_path) == Path("data") / given.dataset
        dataset = given.dataset if usual else given.dataset_path
        words = ["attnlm", "ladder", dataset, "--rungs", ",".join(given.rungs)]
        for name in ("steps", "eval_every", "seed", "tokens"):
            words += [flag(name), str(getattr(given, name))]
        return shlex.join([*words, *(["--prompt", given.prompt] if given.prompt else [])])

    @property
    def warnings(self) -> list[str]:
        """Wherever the comparison is not like for like."""
        return list(_warnings(self))


def _warnings(ladder: Ladder) -> Iterator[str]:
    configs = {rung.model: rung.run.config for rung in ladder.rungs}
    training = {model: config.training for model, config in configs.items()}
    tuned = {m: f"{t.optimizer} {t.learning_rate:g}" for m, t in training.items()}
    if differ := _differing(tuned):
        yield f"optimizer and learning rate are each rung's own defaults: {differ}"
    widths = {m: f"{c.model.embed_dim}" for m, c in configs.items() if c.model.embed_dim}
    if differ := _differing(widths):
        yield f"embeddings are not equally wide: {differ}"
    machines = {
        m: f"{t.device} {t.dtype}, {t.threads} thread{'s' if t.threads != 1 else ''}"
        for m, t in training.items()
    }
    if differ := _differing(machines):
        yield f"seconds compare only in part, since each rung ran with what suits it: {differ}"
    for rung in ladder.rungs:
        step, best = rung.last["step"], rung.best["step"]
        if step != ladder.plan.steps:
            yield f"{rung.model} made {step:,} steps, not {ladder.plan.steps:,}"
        if rung.last["val_loss"] > rung.best["val_loss"]:
            yield f"{rung.model} is shown as it was at step {best:,}: its loss rose after that"
    falling = [r.model for r in ladder.rungs if r.verdict.startswith("still falling")]
    if falling:
        yield f"too few steps to tell what the rungs can do: still falling are {', '.join(falling)}"


def _differing(facts: Mapping[str, str]) -> str:
    """Which rungs have which fact; empty where all have the same."""
    if len(set(facts.values())) < 2:
        return ""
    by_fact: dict[str, list[str]] = {}
    for model, fact in facts.items():
        by_fact.setdefault(fact, []).append(model)
    return "; ".join(f"{', '.join(models)} {fact}" for fact, models in by_fact.items())


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
    A ladder that exists, by `resume` or by its `name`, goes on from what is done; what is given
    beside it must be what it began with. `on_event` hears LadderStarted and all that `train` tells.

    Raises AttnlmError (UsageError where the arguments alone are wrong); Interrupted on a signal,
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
    hint = "wait until that ends, or stop it; or begin another ladder"
    with trained_alone(path, hint):
        on_event(LadderStarted(path, made))
        trained = []
        for number, rung in enumerate(made.rungs, 1):
            on_event(Note(f"rung {number} of {len(made.rungs)}: {rung}"))
            trained.append(_trained(path, made, rung, opened, Path(data_dir), on_event))
        return Ladder(path, made, tuple(_spoken(run, made) for run in trained))


def read_plan(path: Path) -> Plan:
    """The record in a ladder's folder. Raises AttnlmError when it is missing or damaged."""
    content = files.read_json(path / _RECORD)
    facts = content.get("plan")
    if (
        content.get("format") != _FORMAT
        or not isinstance(facts, dict)
        or facts.keys() != _KINDS.keys()
    ):
        raise AttnlmError(
            f"{path / _RECORD} was written by another version of attnlm", "use that version"
        )
    try:
        if not all(type(facts[key]) in kinds for key, kinds in _KINDS.items()):
            raise UsageError("a fact has another type", "")
        made = Plan(**{**facts, "rungs": _checked_rungs(facts["rungs"])})
        SamplingConfig(tokens=made.tokens, seed=made.seed)
        "".join((made.dataset, made.dataset_path, made.prompt)).encode()  # no half surrogate pairs
        for rung in made.rungs:
            resolve(made.settings(rung))
    except (UsageError, UnicodeEncodeError):
        raise _damaged(path / _RECORD) from None
    return made


_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("dataset", "dataset_path", "train_sha256", "val_sha256", "prompt"), (str,)),
    **dict.fromkeys(("seed", "steps", "eval_every", "block_size", "batch_size", "tokens"), (int,)),
    "rungs": (list,),
    "budget": (float, type(None)),
}


def _existing(name: str | None, resume: str | Path | None, checkpoint_dir: Path) -> Path | None:
    """The folder of the ladder that goes on; None where a new one is to begin."""
    if resume is not None:
        if name is not None:
            raise UsageError("--resume and --name exclude each other", "give one of them")
        return find_folder(resume, checkpoint_dir, kind="ladder")
    if name is None:
        return None
    check_name(name, "--name")
    return checkpoint_dir / name if (checkpoint_dir / name / _RECORD).exists() else None


def _check_unchanged(made: Plan, given: Mapping[str, Any]) -> None:
    for key, value in given.items():
        if value != getattr(made, key):
            raise UsageError(
                f"{flag(key)} can't be changed in a ladder that goes on",
                "leave it out, or begin another ladder with another --name",
            )


def _same_dataset(made: Plan, named: str | Path | Dataset | None, data_dir: Path) -> Dataset:
    recorded = Path(made.dataset_path)
    dataset = open_dataset(
        named or (recorded if recorded.is_dir() else made.dataset), data_dir=data_dir
    )
    if (dataset.train_sha256, dataset.val_sha256) != (made.train_sha256, made.val_sha256):
        raise AttnlmError(
            f"{dataset.path} is not the data set that the ladder began with",
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
    rungs = _checked_rungs(given.get("rungs", DEFAULT_RUNGS))
    prompt, tokens = given.get("prompt", ""), given.get("tokens", 200)
    seed = given.get("seed", drawn_seed())
    SamplingConfig(tokens=tokens)
    dataset.tokenizer.encode(prompt)  # a prompt that it can't read is told before hours of training
    block_size = min(_BLOCK_SIZE, dataset.largest_block_size)
    if block_size < _BLOCK_SIZE:
        on_event(Note(f"{dataset.name} is small: the rungs get a context of {block_size} tokens"))
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
        facts = {**asdict(made), "rungs": list(rungs)}
        content = {"format": _FORMAT, "attnlm": attnlm.__version__, "plan": facts}
        files.write_json(new / _RECORD, content)
        path = checkpoint_dir / (name or _free_name(checkpoint_dir, rungs))
        for taken in (path, *(_run_path(path, rung) for rung in rungs)):
            if os.path.lexists(taken):
                raise AttnlmError(
                    f"{taken} is there already, and runs are never overwritten",
                    "give the ladder another --name",
                )
        new.rename(path)
    return path, made


def _checked_rungs(rungs: Sequence[str]) -> tuple[str, ...]:
    for rung in rungs:
        if rung not in RUNGS:
            hint = suggestion(str(rung), RUNGS, f"choose from {', '.join(RUNGS)}")
            raise UsageError(f"--rungs can't have {rung!r}", hint)
    if not rungs or len(set(rungs)) < len(rungs):
        raise UsageError(
            "--rungs has a rung twice, or none", "name each once, as in bigram,average"
        )
    return tuple(rungs)


def _settled_steps(
    dataset: Dataset, rungs: Sequence[str], alike: Mapping[str, Setting], on_event: OnEvent
) -> tuple[int, int]:
    """Steps and steps between evaluations, for every rung: as asked for, or as the budget holds."""
    configs = [resolve({**alike, "model": rung}) for rung in rungs]
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


def _free_name(checkpoint_dir: Path, rungs: Sequence[str]) -> str:
    return next(
        name
        for name in (f"ladder-{number:03}" for number in itertools.count(1))
        if not any(
            os.path.lexists(path)
            for path in (
                checkpoint_dir / name,
                *(_run_path(checkpoint_dir / name, rung) for rung in rungs),
            )
        )
    )


def _run_path(path: Path, rung: str) -> Path:
    return path.with_name(f"{path.name}-{rung}")


def _trained(
    path: Path, made: Plan, rung: str, dataset: Dataset, data_dir: Path, on_event: OnEvent
) -> Run:
    """The run of a rung: made, gone on with, or as it is where it is done."""
    where, folder = _run_path(path, rung), path.parent
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
        if recorded[key] != expected[key]:
            raise AttnlmError(
                f"{run.path} is not this ladder's: its {key} is another",
                "move it away, or begin another ladder",
            )


def _spoken(run: Run, made: Plan) -> Rung:
    sampler = load_sampler(run, device=run.config.training.device)
    config = SamplingConfig(tokens=made.tokens, seed=made.seed)
    text = "".join(sampler.stream(sampler.prompt_ids(made.prompt), config))
    return Rung(run, run.metrics(), text)


def _damaged(path: Path) -> AttnlmError:
    return AttnlmError(
        f"{path} is damaged or not ours", "begin another ladder, with another --name"
    )
