"""Train the rungs of a ladder on the same batches, evaluate them, and sample from them."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attnlm.base import clock
from attnlm.base.atomic_folders import (
    delete_folder,
    move_to_free,
    numbered,
    trained_alone,
    workspace,
)
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import Note, OnEvent, ignore
from attnlm.base.folders import check_name, find_folder
from attnlm.base.settings import Settings, differing
from attnlm.compute.device import choose_device
from attnlm.config.settings import Config, resolve
from attnlm.config.variants import named_codes
from attnlm.data.dataset import Dataset, open_dataset
from attnlm.generation.questions import QuestionFormat, answers, format_of
from attnlm.generation.sampling import load_sampler
from attnlm.generation.sampling_config import SamplingConfig, drawn_seed
from attnlm.model.own_specs import CODE, with_defaults
from attnlm.runs.ladder_plan import RECORD, Adapted, LadderPlan, Trial, read_plan
from attnlm.runs.records import has_same_ids
from attnlm.runs.run import Run, open_run
from attnlm.see.ladder import Ladder, Rung, median
from attnlm.training.eval_budget import affordable_tokens, step_cost
from attnlm.training.state import read_saved_state
from attnlm.training.step import StepNotFiniteError
from attnlm.workflows.answers import pairs_of
from attnlm.workflows.autotune import check_fits
from attnlm.workflows.match_compute import relative_steps, with_steps, with_widths
from attnlm.workflows.train import train, train_config

DEFAULT_RUNGS = ("bigram", "average", "single-head", "multi-head", "transformer")
DEFAULT_BUDGET = 120.0
# Sizes of all rungs, and the defaults of most models.
_BLOCK_SIZE, _BATCH_SIZE = 64, 32
# Within a budget, a rung's sample and page get the smaller of _SPEAKING s and a fraction of the
# budget, and a training at least _SHORTEST s. To make the same number of steps in all runs, a
# ladder may end late by the larger of _LATE s and a fraction of the budget.
_SPEAKING = 0.8
_SPEAKING_FRACTION = 0.015
_SHORTEST = 0.1
_LATE = 3.0
_LATE_FRACTION = 0.05
_TRIAL_FRACTION = 0.2  # of the steps, for each value that `tune` tries
_STEP_OVERHEAD = 2e7
"""The overhead of a step, as the number of operations that would take the same time."""


@dataclass(frozen=True)
class LadderStarted:
    """The event that a ladder, in the folder `path`, is about to train or resume its rungs."""

    path: Path
    plan: LadderPlan


def ladder(
    dataset: str | Path | Dataset | None = None,
    *,
    rungs: str | Sequence[str] | None = None,
    budget: float | None = None,
    steps: int | None = None,
    eval_every: int | None = None,
    eval_tokens: int | None = None,
    threads: int | None = None,
    seed: int | None = None,
    seeds: int | None = None,
    tune: str | None = None,
    equal: str | None = None,
    prompt: str | None = None,
    tokens: int | None = None,
    name: str | None = None,
    resume: str | Path | None = None,
    checkpoint_dir: str | Path = "checkpoints",
    data_dir: str | Path = "data",
    on_event: OnEvent | None = None,
) -> Ladder:
    """Train several models on the same batches, and compare them.

        compared = attnlm.ladder("tales-char", rungs=["bigram", "multi-head"], steps=50, seed=1)
        for rung, gain in zip(compared.rungs, compared.gains):
            print(rung.model, rung.loss, gain and gain.nats)
        compared.write_page()  # index.html and curves.png in the ladder's folder

    The result has the `rungs` in the given order. A rung is a model, or a variant such as
    `transformer:learning_rate=0.005`; default: bigram, average, single-head, multi-head and
    transformer. Each rung is trained with `seeds` seeds (default: 1), from `seed` on; the result
    has the run with the median loss. With one seed, the run is named `<ladder>-<rung>`. `budget` is
    in seconds for all rungs together (default: 120): the largest rung is trained first, for a
    fraction of the budget, and the others make the same number of steps. `steps` are the updates of
    each run, instead of `budget`. Each model continues `prompt` by `tokens` tokens (default: 200);
    a model of questions with answers answers it instead, by default a question of the validation
    split. An existing ladder, given by `resume` or `name`, is resumed; other arguments must equal
    the original ones. `on_event` receives LadderStarted and all events of `train`.

    `tune` names a number of the training, such as learning_rate. Each rung gets the best of five
    values, 1/4 to 4 times its default. Each is tried with the first seed for a fifth of the steps,
    or with a budget for a fifth of the time of one seed, without the last tenth of the training
    split, which measures the loss.

    `equal` is what is held equal in all rungs. tokens (default): the steps. parameters: the width
    of each rung, and if necessary its number of heads, give it about as many parameters as the
    first rung. flops: each rung makes the steps that need as many operations as the `steps` of the
    first rung with matmuls. time: each rung gets the same part of the `budget`.

    Raises AttnlmError (UsageError for invalid arguments), and Interrupted on a signal, after saving
    the last complete step.
    """
    began = clock.began()
    folder = Path(checkpoint_dir)
    data_dir = Path(data_dir)
    on_event = on_event or ignore
    if rungs is not None:
        rungs = tuple(r.strip() for r in (rungs.split(",") if isinstance(rungs, str) else rungs))
    asked = {
        "rungs": rungs,
        "budget": budget,
        "steps": steps,
        "eval_every": eval_every,
        "eval_tokens": eval_tokens,
        "threads": threads,
        "seed": seed,
        "seeds": seeds,
        "tune": tune and tune.replace("-", "_"),
        "equal": equal,
        "prompt": prompt,
        "tokens": tokens,
    }
    given = {key: value for key, value in asked.items() if value is not None}
    if resume is not None and name is not None:
        raise UsageError("`resume` and `name` cannot be combined", "use only one")
    if name is not None:
        check_name(name)
        if (folder / name / RECORD).exists():
            resume = folder / name
    if resume is None:
        opened = open_dataset(dataset, data_dir=data_dir)
        plan = _planned(opened, given, on_event)
        path = _new_folder(plan, name, folder)
    else:
        path = find_folder(resume, folder, kind="ladder")
        plan, opened = _recorded(path, given, dataset, data_dir)
    with trained_alone(path, "wait until that process ends, or stop it, or start another ladder"):
        on_event(LadderStarted(path, plan))
        return _train_rungs(path, plan, opened, began, data_dir, on_event)


def _train_rungs(
    path: Path, plan: LadderPlan, dataset: Dataset, began: float, data_dir: Path, on_event: OnEvent
) -> Ladder:
    """Train or resume the rungs of the ladder at `path`, and return them."""
    runs = plan.runs(path)
    trained: dict[tuple[str, int], Run] = {}
    configs = {rung: resolve({}, plan.settings(rung, plan.seed)) for rung in plan.rungs}
    costs = {r: step_cost(c, dataset.vocab_size) + _STEP_OVERHEAD for r, c in configs.items()}
    relative = relative_steps(plan, dataset.vocab_size)
    durations = {r: 1.0 if plan.equal == "time" else costs[r] * relative[r] for r in costs}
    if plan.tune is not None:
        plan = _tuned(path, plan, dataset, durations, on_event)
    order = list(runs)
    if plan.budget is not None:  # train the largest first: it takes most of the time
        order.sort(key=lambda key: (-costs[key[0]], key[1]))
    for number, (rung, seed) in enumerate(order):
        named = f"rung {number + 1} of {len(runs)}: {rung}"
        on_event(Note(named if plan.seeds == 1 else f"{named}, seed {seed}"))
        settings = plan.settings(rung, seed)
        if plan.budget is not None:
            left = [durations[other] for other, _ in order[number:]]
            settings["budget"] = _seconds_of_next(
                plan, plan.budget, left, trained, durations, began
            )
            if "steps" in settings:
                settings.setdefault("eval_every", max(1, math.ceil(settings["steps"] / 10)))
        run = _trained(runs[rung, seed], plan, settings, dataset, data_dir, on_event)
        trained[rung, seed] = run
        if "steps" not in plan.settings(rung, seed):
            steps = run.evaluations()[-1].step
            plan = replace(plan, eval_tokens=run.config.training.eval_tokens)
            if plan.equal == "time":  # all seeds of a rung make as many steps as its first
                plan = replace(plan, adapted=(*plan.adapted, Adapted(rung, "steps", steps)))
            else:
                steps = max(1, round(steps / relative[rung]))
                plan = with_steps(replace(plan, steps=steps), relative)
            plan.write(path)
    is_whole = all(run.whole() for run in trained.values())
    each = {r: [run for key, run in trained.items() if key[0] == r] for r in plan.rungs}
    shown = (_shown(rung, each[rung], plan, is_whole, on_event) for rung in plan.rungs)
    return Ladder(path, plan, tuple(shown))


def _tuned(
    path: Path, plan: LadderPlan, dataset: Dataset, lengths: Mapping[str, float], on_event: OnEvent
) -> LadderPlan:
    """Return the plan with all trials of the setting `tune`, after making those that it lacks."""
    part = _training_part(dataset)

    def tell(event: object) -> None:
        if isinstance(event, Note):  # not the headers and evaluations of each trial
            on_event(event)

    for rung in plan.rungs:
        tried = [trial.value for trial in plan.trials if trial.rung == rung]
        left = [value for value in plan.grid(rung) if value not in tried]
        length: dict[str, Any] = {}
        if plan.budget is not None:
            share = _TRIAL_FRACTION * plan.budget / (1 + plan.seeds)
            length = {"budget": share * lengths[rung] / sum(lengths.values())}
        if (steps := plan.settings(rung, plan.seed).get("steps")) is not None:
            steps = max(1, round(steps * _TRIAL_FRACTION))
        for value in left:
            if steps is not None:
                length = {"steps": steps, "eval_every": steps}
            settings = {**plan.settings(rung, plan.seed), str(plan.tune): value, **length}
            loss = None
            with workspace(path) as work:
                try:
                    config = _config(settings)
                    run = train_config(config, part, checkpoint_dir=work, on_event=tell)
                    loss, steps = run.evaluations()[-1].val_loss, run.evaluations()[-1].step
                except AttnlmError as error:
                    if not isinstance(error.__cause__, StepNotFiniteError):
                        raise
            plan = replace(plan, trials=(*plan.trials, Trial(rung, value, loss)))
            plan.write(path)
            found = "its numbers are not finite" if loss is None else f"loss {loss:.4f}"
            on_event(Note(f"tried {rung} with {plan.tune} {value:g}: {found}"))
        best = plan.settings(rung, plan.seed).get(str(plan.tune))
        if left and best in (max(plan.grid(rung)), min(plan.grid(rung))):
            end = "largest" if best == max(plan.grid(rung)) else "smallest"
            on_event(Note(f"{rung} prefers {plan.tune} {best:g}, the {end} value that was tried"))
    return plan


def _training_part(dataset: Dataset) -> Dataset:
    """Return a data set of the training split alone, whose last tenth is for validation."""
    first = dataset.train_tokens - dataset.train_tokens // 10
    places: dict[str, Any] = {}
    if dataset.train_examples is not None:
        before, after = dataset.train_examples.divided(len(dataset.train_examples) * 9 // 10)
        places = {"train_examples": before, "val_examples": after}
        first = len(before.is_answer)
    return replace(
        dataset,
        train=dataset.train[:first],
        val=dataset.train[first:],
        train_tokens=first,
        val_tokens=dataset.train_tokens - first,
        **places,
    )


def _recorded(
    path: Path, given: Mapping[str, Any], named: str | Path | Dataset | None, data_dir: Path
) -> tuple[LadderPlan, Dataset]:
    """Return the plan of the ladder at `path`, and its data set. Raises AttnlmError if `given` or
    the data set named by the caller differ from the plan."""
    plan = read_plan(path)
    for key in differing(given, vars(plan)):
        raise UsageError(
            f"`{key}` cannot be changed in a ladder that is resumed",
            "leave it out, or start a new ladder with another `name`",
        )
    recorded = Path(plan.dataset_path)
    known = recorded if recorded.is_dir() else plan.dataset
    dataset = open_dataset(named or known, data_dir=data_dir)
    if not has_same_ids(dataset, plan):
        raise AttnlmError(
            f"{dataset.path} is not the data set that the ladder was started with",
            f"prepare the original data set again, or move it to {recorded}",
        )
    return plan, dataset


def _planned(dataset: Dataset, given: dict[str, Any], on_event: OnEvent) -> LadderPlan:
    """Return the plan of a new ladder after checking it, without writing anything."""
    block_size = min(_BLOCK_SIZE, dataset.largest_block_size)
    if block_size < _BLOCK_SIZE:
        on_event(Note(f"{dataset.name} is small: the context of the rungs is {block_size} tokens"))
    length = {} if "steps" in given else {"budget": DEFAULT_BUDGET}
    prompt = _first_question(dataset)
    about = {"rungs": DEFAULT_RUNGS, "prompt": prompt, "tokens": 200, "seed": drawn_seed()}
    plan = LadderPlan(
        dataset=dataset.name,
        dataset_path=str(dataset.path),
        train_sha256=dataset.train_sha256,
        val_sha256=dataset.val_sha256,
        block_size=block_size,
        batch_size=_BATCH_SIZE,
        **{**length, **about, **given},
    )
    plan = replace(plan, codes=named_codes(plan.rungs))
    plan.check()
    plan = with_widths(plan, dataset.vocab_size)
    plan = with_steps(plan, relative_steps(plan, dataset.vocab_size))
    if plan.adapted:
        on_event(Note(f"for equal {plan.equal}: {plan.adaptation}"))
    if plan.tune is not None and dataset.train_tokens // 10 <= block_size:
        raise UsageError(
            f"`tune` needs a tenth of the training split, and {dataset.name} is too small for it",
            "use a longer text, or leave `tune` out",
        )
    dataset.tokenizer.check(plan.prompt)
    budget: Settings = {} if plan.budget is None else {"budget": plan.budget}
    configs = [resolve({**plan.settings(rung, plan.seed), **budget}) for rung in plan.rungs]
    for config in configs:
        check_fits(config, dataset, choose_device(config.training.device, config.training.dtype))
    if plan.steps is None:
        return plan
    sizes = dataset.vocab_size, dataset.val_tokens
    parts = [part for c in configs if (part := affordable_tokens(c, *sizes)) is not None]
    return replace(plan, eval_tokens=plan.eval_tokens or min(parts, default=None))


def _first_question(dataset: Dataset) -> str:
    """Return a question of the validation split, with its end; "" for a text."""
    if dataset.examples is None:
        return ""
    form = QuestionFormat(dataset.examples.question_end)
    return next((form.prompt(question) for question, _ in pairs_of(dataset, 1)), "")


def _new_folder(plan: LadderPlan, name: str | None, folder: Path) -> Path:
    """Create the folder of a new ladder and return its path. The folder never lacks the plan."""

    def taken(path: Path) -> list[Path]:
        return list(filter(os.path.lexists, (path, *plan.runs(path).values())))

    with workspace(folder) as work:
        new = work / "new"
        new.mkdir()
        plan.write(new)
        if name is None:
            return move_to_free(new, (p for p in numbered(folder, "ladder") if not taken(p)))
        found = taken(folder / name)
        if not found:
            return move_to_free(new, [folder / name])
    raise AttnlmError(
        f"{found[0]} exists, and runs are never overwritten", "choose another `name` for the ladder"
    )


def _seconds_of_next(
    plan: LadderPlan,
    budget: float,
    durations_left: list[float],
    trained: Mapping[tuple[str, int], Run],
    durations: Mapping[str, float],
    began: float,
) -> float:
    """Return the seconds that the next run may take.

    `durations_left` holds the expected duration of each remaining run, in any unit, the next run
    first. The first run of the ladder gets its part of the time. Each later run gets time for its
    steps, or less if the ladder would otherwise end much too late; with `equal` time, it gets as
    much as the first.
    """
    first = next(iter(trained.values()), None)
    first_budget = None if first is None else first.config.training.budget
    if plan.equal == "time" and first_budget is not None:
        return first_budget
    own, *others_left = durations_left
    others = sum(others_left)
    left = began + budget - time.perf_counter()
    left -= len(durations) * min(_SPEAKING, _SPEAKING_FRACTION * budget)
    if first is None:
        return max(left * own / (own + others), _SHORTEST)
    rung, _ = next(iter(trained))
    rate = first.evaluations()[-1].seconds / durations[rung]
    late = max(_LATE, _LATE_FRACTION * budget)
    left = max(left + late, late)
    return max(left - rate * others, left * own / (own + others))


def _trained(
    path: Path,
    plan: LadderPlan,
    settings: dict[str, Any],
    dataset: Dataset,
    data_dir: Path,
    on_event: OnEvent,
) -> Run:
    """Return the finished run at `path`, after training or resuming it if necessary."""
    config = _config(settings)
    if path.is_dir():
        run = open_run(path)
        recorded = {**run.config.settings(), "train_sha256": run.dataset.train_sha256}
        full = config.settings()
        fixed = {*settings, CODE} - {"steps", "eval_every", "budget"}
        expected = {key: value for key, value in full.items() if key in fixed}
        expected["train_sha256"] = plan.train_sha256
        for key in differing(expected, recorded):
            raise AttnlmError(
                f"{run.path} does not belong to this ladder: its {key} differs",
                "move or rename it, or start another ladder",
            )
        if run.last.exists():
            saved = read_saved_state(run)
            if saved.evaluated_step == saved.step == run.config.training.steps:
                run.evaluations_until(saved.step)  # raises AttnlmError if some are missing
                on_event(Note(f"{run.name} is done"))
                return run
            return train(resume=path, data_dir=data_dir, on_event=on_event)
        with run.training_lock():  # nothing was saved yet: start again
            delete_folder(path)
    return train_config(
        config, dataset, name=path.name, checkpoint_dir=path.parent, on_event=on_event
    )


def _config(settings: Settings) -> Config:
    """Return the configuration of a run with these settings, which may name own code."""
    config = resolve({}, settings)
    return replace(config, spec=with_defaults(config.spec))


def _shown(
    model: str, runs: list[Run], plan: LadderPlan, is_whole: bool, on_event: OnEvent
) -> Rung:
    """Return a rung, with the run of median loss and a text sampled from this run.

    `runs` has one run per seed, in the order of the seeds.
    """
    results = [result for run in runs if (result := run.result()) is not None]
    if not is_whole:
        results = [replace(result, whole={}) for result in results]
    run, _ = median(list(zip(runs, results, strict=True)), key=lambda one: one[1].final.val_loss)
    sampler = load_sampler(run, device=run.config.training.device, on_event=on_event)
    form = format_of(run)
    if form is not None and plan.prompt:
        (text,) = answers(sampler, form, [plan.prompt], plan.tokens)
    else:
        config = SamplingConfig(tokens=plan.tokens, seed=plan.seed)
        text = "".join(sampler.stream(sampler.prompt_ids(plan.prompt), config))
    return Rung(model, run, text, results)
