"""Train the rungs of a ladder on the same batches, evaluate them, and sample from them."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attnlm.base.atomic_folders import (
    delete_folder,
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
from attnlm.model.own_specs import CODE, with_defaults
from attnlm.runs.ladder_plan import RECORD, REPAIR, Adapted, LadderPlan, read_plan
from attnlm.runs.records import has_same_ids
from attnlm.runs.run import Run, open_recorded, open_run
from attnlm.see.ladder import Ladder, Rung, median
from attnlm.training.eval_budget import affordable_eval_tokens, step_cost
from attnlm.training.state import read_saved_state
from attnlm.workflows.answers import select_pairs
from attnlm.workflows.autotune import check_fits
from attnlm.workflows.check_own_code import check_causal, check_opened
from attnlm.workflows.match_compute import relative_steps, with_steps, with_widths
from attnlm.workflows.train import train
from attnlm.workflows.tune import reason_of_failure, run_trials

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
        plan = run_trials(path, plan, dataset, durations, on_event)
    paths = plan.runs(path)
    order = list(paths)
    budgets = None
    if plan.budget is not None:  # train the largest first: it takes most of the time
        order.sort(key=lambda key: (-costs[key[0]], key[1]))
        budgets = _BudgetOfRuns(plan, plan.budget, began)
    runs: dict[tuple[str, int], Run] = {}
    for number, (rung, seed) in enumerate(order, 1):
        if rung in plan.failed:
            continue
        title = f"rung {number} of {len(order)}: {rung}"
        on_event(Note(title if plan.seeds == 1 else f"{title}, seed {seed}"))
        settings = plan.settings(rung, seed)
        has_steps = "steps" in settings
        if budgets is not None:
            left = (durations[r] for r, _ in order[number - 1 :] if r not in plan.failed)
            settings["budget"] = budgets.seconds_of_next(*left)
            if has_steps:
                settings.setdefault("eval_every", max(1, math.ceil(settings["steps"] / 10)))
        try:
            run = _train_or_resume(paths[rung, seed], plan, settings, dataset, on_event)
        except Exception as error:  # noqa: BLE001 - own code may raise anything
            plan = _with_failed(path, plan, rung, error, on_event)
            continue
        runs[rung, seed] = run
        if budgets is not None:
            budgets.record(run)
        if not has_steps:
            plan = _with_steps_made(run, rung, plan, relative)
            plan.write(path)
    compared = []
    is_whole = all(run.whole() for key, run in runs.items() if key[0] not in plan.failed)
    for rung in [rung for rung in plan.rungs if rung not in plan.failed]:
        of_rung = [run for key, run in runs.items() if key[0] == rung]
        try:
            compared.append(_sample_rung(rung, of_rung, plan, is_whole, on_event))
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
        return replace(plan, adapted=(*plan.adapted, Adapted(rung, "steps", steps)))
    plan = replace(plan, steps=max(1, round(steps / relative[rung])))
    return with_steps(plan, relative)


class _BudgetOfRuns:
    """The division of a ladder's budget, in seconds, among its runs."""

    def __init__(self, plan: LadderPlan, budget: float, began: float) -> None:
        """Begin with the first run. The budget counts from `began`."""
        speaking = len(plan.rungs) * min(_SPEAKING, _SPEAKING_FRACTION * budget)
        self._ends = began + budget - speaking
        self._late = max(_LATE, _LATE_FRACTION * budget)
        self._is_equal = plan.equal == "time"
        self._duration = 0.0
        self._first_budget: float | None = None
        self._seconds_per_unit: float | None = None

    def seconds_of_next(self, own: float, *others: float) -> float:
        """Return the seconds that the next run may take.

        `own` is its expected duration, and `others` are those of the runs after it, in any unit.
        The first run gets its share of the time. Each later run gets time for its steps, or less if
        the ladder would otherwise end much too late; with `equal` time, it gets as much as the
        first.
        """
        if self._is_equal and self._first_budget is not None:
            return self._first_budget
        self._duration = own
        share = own / (own + sum(others))
        left = self._ends - time.perf_counter()
        if self._seconds_per_unit is None:
            return max(left * share, _SHORTEST)
        left = max(left + self._late, self._late)
        return max(left - self._seconds_per_unit * sum(others), left * share)

    def record(self, run: Run) -> None:
        """Record that the run has been trained."""
        if self._seconds_per_unit is None:
            self._seconds_per_unit = run.evaluations()[-1].seconds / self._duration
            self._first_budget = run.config.training.budget


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
    recorded = Path(plan.dataset_path)
    if dataset is None:
        opened = open_recorded(path.name, recorded, plan.dataset, data_dir)
    else:
        opened = open_dataset(dataset, data_dir=data_dir)
    if not has_same_ids(opened, plan):
        raise AttnlmError(
            f"{opened.path} is not the data set that the ladder was started with",
            f"prepare the original data set again, or move it to {recorded}",
        )
    return plan, opened


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


def _train_or_resume(
    path: Path, plan: LadderPlan, settings: Settings, dataset: Dataset, on_event: OnEvent
) -> Run:
    """Return the finished run at `path`, after training or resuming it if necessary."""
    if path.is_dir():
        run = open_run(path)
        _check_belongs(run, plan, settings)
        if run.last.exists():
            saved = read_saved_state(run)
            if saved.evaluated_step == saved.step == run.config.training.steps:
                run.evaluations_until(saved.step)  # raises AttnlmError if some are missing
                on_event(Note(f"{run.name} is done"))
                return run
            if not Path(run.dataset.path).exists():  # the data set was moved
                facts_of_data = replace(run.dataset, path=str(dataset.path.absolute()))
                with run.training_lock():
                    replace(run, dataset=facts_of_data).save_config()
            return train(resume=path, on_event=on_event)
        with run.training_lock():
            pass  # no other process trains it
        delete_folder(path)  # nothing was saved yet: start again
    return train(
        dataset, recipe=settings, name=path.name, checkpoint_dir=path.parent, on_event=on_event
    )


def _check_belongs(run: Run, plan: LadderPlan, settings: Settings) -> None:
    """Raise AttnlmError if a run has other settings or data than its ladder gives it."""
    config = resolve({}, settings)
    full = replace(config, spec=with_defaults(config.spec)).settings()
    fixed = {*settings, CODE} - {"steps", "eval_every", "budget"}
    expected = {key: value for key, value in full.items() if key in fixed}
    expected["train_sha256"] = plan.train_sha256
    recorded = {**run.config.settings(), "train_sha256": run.dataset.train_sha256}
    for key in differing_names(expected, recorded):
        raise AttnlmError(
            f"{run.path} does not belong to this ladder: its {key} differs",
            "move or rename it, or start another ladder",
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
