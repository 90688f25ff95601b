"""Train the rungs of a ladder on the same batches, evaluate them, and sample from them."""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attnlm.base.atomic_folders import (
    locked_for_training,
    move_to_free,
    numbered_paths,
    workspace,
)
from attnlm.base.clock import budget_start
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import Note, OnEvent, ignore
from attnlm.base.folders import check_name, find_folder
from attnlm.base.own_code import own_traceback
from attnlm.base.setting_fields import Settings, differing_names
from attnlm.compute.device import choose_device
from attnlm.config.settings import resolve
from attnlm.config.variants import named_codes
from attnlm.data.dataset import Dataset, open_dataset
from attnlm.generation.question_format import QuestionFormat, answers, format_of
from attnlm.generation.sampler import load_sampler
from attnlm.generation.sampling_config import SamplingConfig, draw_seed
from attnlm.runs.ladder_plan import RECORD, REPAIR, LadderPlan, Trial, read_plan
from attnlm.runs.records import DatasetFacts
from attnlm.runs.run import Run, open_recorded
from attnlm.see.curves import median
from attnlm.see.ladder import Ladder, Rung
from attnlm.training.eval_budget import affordable_eval_tokens, step_cost
from attnlm.workflows.answers import select_pairs
from attnlm.workflows.autotune import check_fits
from attnlm.workflows.check_own_code import check_causal, check_opened
from attnlm.workflows.match_compute import relative_steps, with_steps, with_widths
from attnlm.workflows.train_all import reason_of_failure, train_all

DEFAULT_RUNGS = ("bigram", "average", "single-head", "multi-head", "transformer")
DEFAULT_BUDGET = 120.0
# Sizes of all rungs, and the defaults of most models.
_BLOCK_SIZE, _BATCH_SIZE = 64, 32
_TRIAL_FRACTION = 0.2  # of the steps, or of the time of one seed, for each value of `tune`
_TRAINING_SHARE = 0.9  # of a budget; the rest is for texts and the page
_SHORTEST = 0.1  # seconds of a training within a budget
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
    first rung with matmuls. time: each rung gets the same share of the `budget`.

    A rung whose training diverges, or whose own code raises an error, has its reason in
    `plan.failed`; the others are trained and compared.

    Raises AttnlmError (UsageError for invalid arguments) also if all rungs fail, and Interrupted on
    a signal, after saving the last complete step.
    """
    began = budget_start()
    folder = Path(checkpoint_dir)
    data_dir = Path(data_dir)
    on_event = on_event or ignore
    if rungs is not None:
        rungs = tuple(r.strip() for r in (rungs.split(",") if isinstance(rungs, str) else rungs))
    arguments = {
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
    arguments = {key: value for key, value in arguments.items() if value is not None}
    if resume is not None and name is not None:
        raise UsageError("`resume` and `name` cannot be combined", "use only one")
    if name is not None:
        check_name(name)
        if (folder / name / RECORD).exists():
            resume = folder / name
    if resume is None:
        opened = open_dataset(dataset, data_dir=data_dir)
        plan = _new_plan(opened, arguments, on_event)
        path = _new_folder(plan, name, folder)
    else:
        path = find_folder(resume, folder, kind="ladder")
        plan, opened = _read_recorded_plan(path, arguments, dataset, data_dir)
    with locked_for_training(
        path, "wait until that process ends, or stop it, or start another ladder"
    ):
        on_event(LadderStarted(path, plan))
        return _train_rungs(path, plan, opened, began, on_event)


def _train_rungs(
    path: Path, plan: LadderPlan, dataset: Dataset, began: float, on_event: OnEvent
) -> Ladder:
    """Train or resume the rungs of the ladder at `path`, and return them."""
    configs = {rung: resolve({}, plan.settings(rung, plan.seed)) for rung in plan.rungs}
    costs = {r: step_cost(c, dataset.vocab_size) + _STEP_OVERHEAD for r, c in configs.items()}
    relative = relative_steps(plan, dataset.vocab_size)
    durations = {r: 1.0 if plan.equal == "time" else costs[r] * relative[r] for r in plan.rungs}
    if plan.tune is not None:
        plan = _run_trials(path, plan, dataset, durations, on_event)
    order = list(plan.rungs)
    if plan.budget is not None:  # the largest takes most of the time, and sets the steps
        order.sort(key=lambda rung: -costs[rung])
    paths = plan.runs(path)
    runs: dict[str, list[Run]] = {}
    for number, rung in enumerate(order, 1):
        if rung in plan.failed:
            continue
        seeds = list(range(plan.seed, plan.seed + plan.seeds))
        title = f"rung {number} of {len(order)}: {rung}"
        train_rung = functools.partial(
            train_all, dataset=dataset, folder=path.parent, on_event=on_event, title=title
        )
        runs[rung] = []
        try:
            if "steps" not in (settings := plan.settings(rung, plan.seed)):
                assert plan.budget is not None
                left = _TRAINING_SHARE * plan.budget
                if plan.equal != "time":  # in which all runs have the same share
                    left += began - time.perf_counter()
                others = (durations[r] for r in plan.rungs if r not in plan.failed)
                share = durations[rung] / sum(others) / plan.seeds
                settings["budget"] = max(left * share, _SHORTEST)
                first = paths[rung, seeds.pop(0)].name
                runs[rung] += train_rung({first: settings}).values()
                plan = _with_steps_made(runs[rung][0], rung, plan, relative)
                plan.write(path)
            named = {paths[rung, seed].name: plan.settings(rung, seed) for seed in seeds}
            runs[rung] += train_rung(named).values()
        except Exception as error:  # noqa: BLE001 - own code may raise anything
            plan = _with_failed(path, plan, rung, error, on_event)
    compared = []
    trained = [rung for rung in plan.rungs if rung not in plan.failed]
    is_whole = all(run.whole() for rung in trained for run in runs[rung])
    for rung in trained:
        try:
            compared.append(_sample_rung(rung, runs[rung], plan, is_whole, on_event))
        except Exception as error:  # noqa: BLE001 - own code may raise anything
            plan = _with_failed(path, plan, rung, error, on_event)
    if not compared:
        reasons = (f"{rung}: {reason}" for rung, reason in plan.failed.items())
        raise AttnlmError(f"all rungs failed: {'; '.join(reasons)}", REPAIR)
    return Ladder(path, plan, tuple(compared))


def _with_failed(
    path: Path, plan: LadderPlan, rung: str, error: Exception, on_event: OnEvent
) -> LadderPlan:
    """Return the plan, and write it, with the rung marked as failed. Raises other errors again."""
    reason = reason_of_failure(error, plan.settings(rung, plan.seed))
    plan = replace(plan, failed={**plan.failed, rung: reason})
    plan.write(path)
    for line in (own_traceback(error) or "").splitlines():
        on_event(Note(line))
    on_event(Note(f"{rung} failed: {reason}"))
    return plan


def _with_steps_made(
    run: Run, rung: str, plan: LadderPlan, relative: Mapping[str, float]
) -> LadderPlan:
    """Return the plan with the steps that the first run of a rung made within its time."""
    steps = run.evaluations()[-1].step
    plan = replace(plan, eval_tokens=run.config.training.eval_tokens)
    if plan.equal == "time":  # all seeds of a rung make as many steps as its first
        return replace(plan, adapted={**plan.adapted, rung: {"steps": steps}})
    plan = replace(plan, steps=max(1, round(steps / relative[rung])))
    return with_steps(plan, relative)


def _read_recorded_plan(
    path: Path, arguments: Mapping[str, Any], dataset: str | Path | Dataset | None, data_dir: Path
) -> tuple[LadderPlan, Dataset]:
    """Return the plan of the ladder at `path`, and its data set.

    Raises AttnlmError if `arguments` or the data set named by the caller differ from the plan.
    """
    plan = read_plan(path)
    for key in differing_names(arguments, vars(plan)):
        raise UsageError(
            f"`{key}` cannot be changed in a ladder that is resumed",
            "leave it out, or start a new ladder with another `name`",
        )
    facts = DatasetFacts(
        name=plan.dataset,
        path=plan.dataset_path,
        train_sha256=plan.train_sha256,
        val_sha256=plan.val_sha256,
    )
    return plan, open_recorded(path.name, facts, data_dir, dataset)


def _new_plan(dataset: Dataset, arguments: dict[str, Any], on_event: OnEvent) -> LadderPlan:
    """Return the plan of a new ladder after checking it, without writing anything."""
    block_size = min(_BLOCK_SIZE, dataset.largest_block_size)
    if block_size < _BLOCK_SIZE:
        on_event(Note(f"{dataset.name} is small: the context of the rungs is {block_size} tokens"))
    prompt = ""
    if dataset.examples is not None:
        format = QuestionFormat(dataset.examples.question_end)
        questions = (format.prompt(question) for question, _ in select_pairs(dataset, 1))
        prompt = next(questions, "")
    defaults = {"rungs": DEFAULT_RUNGS, "prompt": prompt, "tokens": 200, "seed": draw_seed()}
    if "steps" not in arguments:
        defaults["budget"] = DEFAULT_BUDGET
    plan = LadderPlan(
        dataset=dataset.name,
        dataset_path=str(dataset.path),
        train_sha256=dataset.train_sha256,
        val_sha256=dataset.val_sha256,
        block_size=block_size,
        batch_size=_BATCH_SIZE,
        **{**defaults, **arguments},
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
    for rung, config in zip(plan.rungs, configs, strict=True):
        device = choose_device(config.training.device, config.training.dtype)
        try:
            check_fits(config, dataset, device)
        except AttnlmError as error:
            if isinstance(error, UsageError):  # it names the setting as the rung does
                raise
            settings = re.sub(r"`(\w+)`", r"\1", error.hint)
            hint = f"{settings}; a rung has its settings in its name, as {rung}:block_size=16"
            raise AttnlmError(f"{rung}: {error.message}", hint) from None
        if leaks := check_causal(config.spec, dataset.vocab_size):
            leak, _, remedy = leaks.partition("; ")
            raise AttnlmError(f"{rung} is not causal: {leak}", remedy)
        if config.codes and (opened := check_opened(config, dataset.vocab_size)).is_fatal:
            raise AttnlmError(f"{rung}: {opened.text}", opened.remedy)
    if plan.steps is None:
        return plan
    sizes = dataset.vocab_size, dataset.val_tokens
    counts = [n for c in configs if (n := affordable_eval_tokens(c, *sizes)) is not None]
    return replace(plan, eval_tokens=plan.eval_tokens or min(counts, default=None))


def _new_folder(plan: LadderPlan, name: str | None, folder: Path) -> Path:
    """Create the folder of a new ladder and return its path. The folder never lacks the plan."""

    def taken(path: Path) -> list[Path]:
        return list(filter(os.path.lexists, (path, *plan.runs(path).values())))

    with workspace(folder) as work:
        new = work / "new"
        new.mkdir()
        plan.write(new)
        if name is None:
            return move_to_free(new, (p for p in numbered_paths(folder, "ladder") if not taken(p)))
        existing = taken(folder / name)
        if not existing:
            return move_to_free(new, [folder / name])
    raise AttnlmError(
        f"{existing[0]} exists, and runs are never overwritten",
        "choose another `name` for the ladder",
    )


def _sample_rung(
    model: str, runs: list[Run], plan: LadderPlan, is_whole: bool, on_event: OnEvent
) -> Rung:
    """Return a rung, with the run of median loss and a text sampled from this run.

    `runs` has one run per seed, in the order of the seeds.
    """
    results = [result for run in runs if (result := run.result()) is not None]
    if not is_whole:
        results = [replace(result, whole={}) for result in results]
    pairs = list(zip(runs, results, strict=True))
    run, _ = median(pairs, key=lambda pair: pair[1].final.val_loss)
    device = "cpu" if run.config.training.device == "cpu" else "auto"
    sampler = load_sampler(run, device=device, on_event=on_event)
    format = format_of(run)
    if format is not None and plan.prompt:
        (text,) = answers(sampler, format, [plan.prompt], plan.tokens)
    else:
        config = SamplingConfig(tokens=plan.tokens, seed=plan.seed)
        text = "".join(sampler.stream(sampler.prompt_ids(plan.prompt), config))
    return Rung(model, run, text, results)


# --- The best value of a training setting for each rung -------------------------------------------


def _run_trials(
    path: Path,
    plan: LadderPlan,
    dataset: Dataset,
    durations: Mapping[str, float],
    on_event: OnEvent,
) -> LadderPlan:
    """Return the plan with all trials of the setting `tune`, after making those that it lacks.

    Each trial is written to the plan in the ladder's folder `path`. `durations` are the expected
    durations of a run of each rung, in any unit.
    """
    held_out = _with_held_out(dataset)
    for rung in plan.rungs:
        share = _TRIAL_FRACTION * durations[rung] / sum(durations.values()) / (1 + plan.seeds)
        tried = [trial.value for trial in plan.trials if trial.rung == rung]
        values = plan.grid(rung)
        untried = [value for value in values if value not in tried]
        for value in untried:
            settings = {**plan.settings(rung, plan.seed), str(plan.tune): value}
            steps: Any = settings.get("steps")
            if steps is not None:
                steps = max(1, round(steps * _TRIAL_FRACTION))
            else:  # the rung's first trial has a budget, and the others make as many steps
                made = (trial.steps for trial in plan.trials if trial.rung == rung)
                steps = next(filter(None, made), None)
            if steps is None:
                settings["budget"] = share * (plan.budget or 0)
            else:
                settings |= {"steps": steps, "eval_every": steps}
            trial, result = _run_trial(path, rung, value, settings, held_out, on_event)
            plan = replace(plan, trials=(*plan.trials, trial))
            plan.write(path)
            on_event(Note(f"tried {rung} with {plan.tune} {value:g}: {result}"))
        best = plan.settings(rung, plan.seed).get(str(plan.tune))
        if untried and best in (max(values), min(values)):
            end = "largest" if best == max(values) else "smallest"
            on_event(Note(f"{rung} prefers {plan.tune} {best:g}, the {end} value that was tried"))
    return plan


def _run_trial(
    path: Path,
    rung: str,
    value: float,
    settings: Settings,
    dataset: Dataset,
    on_event: OnEvent,
) -> tuple[Trial, str]:
    """Train a rung with `settings` in a temporary folder; return the trial, and it in words."""

    def pass_notes(event: object) -> None:
        if isinstance(event, Note):  # not the headers and evaluations of each trial
            on_event(event)

    with workspace(path) as folder:
        try:
            run = train_all({"trial": settings}, dataset, folder, pass_notes)["trial"]
        except Exception as error:  # noqa: BLE001 - own code may raise anything
            return Trial(rung, value, None), reason_of_failure(error, settings)
        last = run.evaluations()[-1]
        return Trial(rung, value, last.val_loss, last.step), f"loss {last.val_loss:.4f}"


def _with_held_out(dataset: Dataset) -> Dataset:
    """Return a data set of the training split alone, whose last tenth is for validation."""
    first = dataset.train_tokens - dataset.train_tokens // 10
    examples: dict[str, Any] = {}
    if dataset.train_examples is not None:
        before, after = dataset.train_examples.divide_at(len(dataset.train_examples) * 9 // 10)
        examples = {"train_examples": before, "val_examples": after}
        first = len(before.is_answer)
    return replace(
        dataset,
        train=dataset.train[:first],
        val=dataset.train[first:],
        train_tokens=first,
        val_tokens=dataset.train_tokens - first,
        **examples,
    )
