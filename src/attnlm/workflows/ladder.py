"""Train the rungs of a ladder on the same batches, and compare them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import Note, OnEvent, ignore
from attnlm.base.files import workspace
from attnlm.base.folders import (
    CHECKPOINT_DIR,
    DATA_DIR,
    find_folder,
)
from attnlm.base.setting_fields import describe_settings, differing_names
from attnlm.base.suggestions import suggestion
from attnlm.compute.device import choose_device
from attnlm.config.settings import Config, check_setting
from attnlm.config.variants import named_codes
from attnlm.data.dataset import Dataset, open_dataset
from attnlm.generation.sampling import sample
from attnlm.generation.sampling_config import draw_seed
from attnlm.runs.ladder_plan import RATE, REPAIR, SETTINGS, LadderPlan
from attnlm.runs.records import dataset_facts
from attnlm.runs.run import Run, open_recorded
from attnlm.see.comparison import Comparison, Group
from attnlm.see.reproduce import ladder_command
from attnlm.training.schedule import affordable_eval_tokens
from attnlm.workflows.answers import QuestionFormat, generate, select_pairs
from attnlm.workflows.autotune import check_fits, seconds_per_token
from attnlm.workflows.check_own_code import check_required
from attnlm.workflows.compare import check_baseline, compare_groups
from attnlm.workflows.match_compute import with_widths
from attnlm.workflows.train_all import noting_failures, reason_of_failure, train_all

DEFAULT_RUNGS = ("bigram", "average", "single-head", "multi-head", "transformer")
DEFAULT_BUDGET = 120.0
_TRIAL_FRACTION = 0.2  # of the steps of a run, for each value of `tune`
_MEASURED = 0.02  # the fraction of a budget in which the steps of all rungs are timed
_STEPS_SHARE = 0.7  # of a budget; the rest is for evaluations, texts and the page


def ladder(
    dataset: str | Path | Dataset | None = None,
    *,
    rungs: str | Sequence[str] | None = None,
    baseline: str | None = None,
    name: str | None = None,
    resume: str | Path | None = None,
    checkpoint_dir: str | Path = CHECKPOINT_DIR,
    data_dir: str | Path = DATA_DIR,
    on_event: OnEvent | None = None,
    **settings: Any,
) -> Comparison:
    """Train several models on the same batches, and compare them.

        compared = attnlm.ladder("tales-char", rungs=["bigram", "multi-head"], steps=50, seed=1)
        for rung in compared.groups:
            print(rung.name, rung.mean, rung.text)
        compared.save("ladder.html")

    The result has a group for each rung, in the given order; those that failed come last. A rung is
    a model, or a variant such as `transformer:learning_rate=0.005`; default: bigram, average,
    single-head, multi-head and transformer. Each rung is trained with `seeds` seeds (default: 1),
    from `seed` on. With one seed, the run is named `<ladder>-<rung>`. Each rung is compared with
    each earlier one, or if `baseline` names a rung, with that. `steps` are the updates of each run.
    `budget` takes their place: about the seconds of all rungs together (default: 120), for which a
    few steps of each rung are timed first. Each model continues `prompt` by `tokens` tokens
    (default: 200); a model of questions with answers answers it instead, by default a question of
    the validation split. `resume` names a ladder to resume; other arguments must equal the original
    ones. `on_event` receives all events of `train`.

    With `tune`, each rung gets the best of five learning rates, 1/4 to 4 times its default. Each is
    tried with the first seed for a fifth of the steps, without the last tenth of the training
    split, which measures the loss.

    `equal` is what is held equal in all rungs. tokens (default): the steps. parameters: the width
    of each rung, and if necessary its number of heads, give it about as many parameters as the
    first rung. flops: each rung makes the steps that need as many operations as the `steps` of the
    first rung with matmuls. time: each rung makes the steps that take as long as the `steps` of the
    first.

    A rung whose training diverges, or whose own code raises an error, is `failed`; the others are
    trained and compared.

    Raises AttnlmError (UsageError for invalid arguments) also if all rungs fail, and Interrupted on
    a signal, after saving the last complete step.
    """
    folder = Path(checkpoint_dir)
    on_event = on_event or ignore
    given = {k: v for k, v in settings.items() if v is not None and v is not False}
    for key in given.keys() - SETTINGS.keys():
        hint = suggestion(key, SETTINGS, f"the settings are {', '.join(SETTINGS)}")
        raise UsageError(f"`{key}` is not a setting of a ladder", hint)
    if rungs is not None:
        listed = rungs.split(",") if isinstance(rungs, str) else rungs
        if not all(isinstance(rung, str) for rung in listed):
            hint = "name own code in a file: multi-head:scores=mine.py:NAME"
            raise UsageError("a rung is the name of a model with its settings", hint)
        given["rungs"] = tuple(rung.strip() for rung in listed)
    if resume is None:
        opened = open_dataset(dataset, data_dir=data_dir)
        plan = _new_plan(opened, given, on_event)
        check_baseline(baseline, plan.rungs)
        path = plan.create_folder(folder, name)
    else:
        path = find_folder(resume, folder, kind="ladder")
        plan = LadderPlan.read(path)
        check_baseline(baseline, plan.rungs)
        given |= {} if name is None else {"name": name}
        for key in differing_names(given, vars(plan)):
            raise UsageError(
                f"`{key}` cannot be changed in a ladder that is resumed",
                "leave it out, or start a new ladder with another `name`",
            )
        opened = open_recorded(path.name, plan.dataset, Path(data_dir), dataset)
        if not any(run.exists() for paths in plan.runs(path).values() for run in paths):
            on_event(Note(f"no run of {path.name} exists; if it was renamed, rename its runs too"))
    with plan.training(path, on_event):
        return _compared(path, plan, opened, baseline, on_event)


ladder.__doc__ = f"""{inspect.cleandoc(ladder.__doc__ or "")}

Settings:

{describe_settings(SETTINGS)}
"""


def _compared(
    path: Path, plan: LadderPlan, dataset: Dataset, baseline: str | None, on_event: OnEvent
) -> Comparison:
    """Train or resume the rungs and compare them; record what tuning chose, and failures."""
    if plan.tune:
        plan = _tuned(path, plan, dataset, on_event)
    runs: dict[str, list[Run]] = {}
    texts = {}
    for number, (rung, paths) in enumerate(plan.runs(path).items(), 1):
        if rung in plan.failed:
            continue
        named = {p.name: plan.settings(rung, plan.seed + more) for more, p in enumerate(paths)}
        title = f"rung {number} of {len(plan.rungs)}: {rung}"
        with noting_failures(rung, plan.settings(rung, plan.seed), on_event) as reasons:
            trained = [*train_all(named, dataset, path.parent, on_event, title).values()]
            texts[rung] = _continued(compare_groups({rung: trained}).groups[0].shown, plan)
            runs[rung] = trained
        for reason in reasons:
            plan = replace(plan, failed={**plan.failed, rung: reason})
            plan.write(path)
    if not runs:
        failed = (f"{rung}: {reason}" for rung, reason in plan.failed.items())
        raise AttnlmError(f"all rungs failed: {'; '.join(failed)}", REPAIR)
    found = compare_groups(runs, baseline=None if baseline in plan.failed else baseline)
    groups = [replace(group, text=texts[group.name]) for group in found.groups]
    groups += [Group(rung, (), failed=why) for rung, why in plan.failed.items()]
    command = ladder_command(plan, baseline)
    return replace(found, groups=tuple(groups), plan=plan, path=path, command=command)


def _continued(run: Run, plan: LadderPlan) -> str:
    """Return how a run continues the ladder's prompt, or answers it."""
    device = "cpu" if run.config.training.device == "cpu" else "auto"
    if plan.prompt and run.dataset.question_end is not None:
        return generate(run, plan.prompt, tokens=plan.tokens, device=device)[0]
    text = sample(run, prompt=plan.prompt, tokens=plan.tokens, seed=plan.seed, device=device)
    return "".join(text).removeprefix(plan.prompt)


# --- The plan -------------------------------------------------------------------------------------


def _new_plan(dataset: Dataset, arguments: Mapping[str, Any], on_event: OnEvent) -> LadderPlan:
    """Return the plan of a new ladder after checking it, without writing anything."""
    given = {"rungs": DEFAULT_RUNGS, "seed": draw_seed(), **arguments}
    budget = given.pop("budget", None if "steps" in given else DEFAULT_BUDGET)
    if budget is not None:
        check_setting("budget", budget)
        if "steps" in given:
            raise UsageError("`steps` and `budget` cannot be combined", "use only one")
    if dataset.examples is not None and not given.get("prompt"):
        format = QuestionFormat(dataset.examples.question_end)
        given["prompt"] = next((format.prompt(q) for q, _ in select_pairs(dataset, 1)), "")
    if (longest := dataset.largest_block_size) < LadderPlan.block_size:
        given["block_size"] = longest
        small = f"{dataset.name} is small: the context of the rungs is {longest} tokens"
        on_event(Note(small))
    codes = named_codes(given["rungs"])
    plan = LadderPlan(dataset=dataset_facts(dataset), codes=codes, **given)
    plan.check()
    if plan.equal == "parameters":
        plan = with_widths(plan, dataset.vocab_size)
    if plan.tune and dataset.train_tokens // 10 <= plan.block_size:
        raise UsageError(
            f"`tune` needs a tenth of the training split, and {dataset.name} is too small for it",
            "use a longer text, or leave `tune` out",
        )
    dataset.tokenizer.encode(plan.prompt)
    for rung, config in plan.configs().items():
        _check_rung(rung, config, dataset)
    plan = _with_steps(plan, dataset, budget, on_event)
    if plan.adapted:
        on_event(Note(f"for equal {plan.equal}: {plan.adaptation}"))
    if plan.eval_tokens is None:  # all are measured on the same part
        sizes = dataset.vocab_size, dataset.val_tokens
        affordable = [affordable_eval_tokens(one, *sizes) for one in plan.configs().values()]
        plan = replace(plan, eval_tokens=min(filter(None, affordable), default=None))
    return plan


def _check_rung(rung: str, config: Config, dataset: Dataset) -> None:
    """Raise AttnlmError if a rung does not fit the data or the memory, or if its code is wrong."""
    try:
        check_fits(config, dataset, choose_device(config.training.device, config.training.dtype))
    except AttnlmError as error:
        if isinstance(error, UsageError):  # it names the setting as the rung does
            raise
        hint = f"{error.hint}; a rung has its settings in its name, as {rung}:block_size=16"
        raise AttnlmError(f"{rung}: {error.message}", hint) from None
    try:
        check_required(config, dataset.vocab_size)
    except AttnlmError as error:
        raise AttnlmError(f"{rung}: {error.message}", error.hint) from None


def _with_steps(
    plan: LadderPlan, dataset: Dataset, budget: float | None, on_event: OnEvent
) -> LadderPlan:
    """Return the plan with the steps that fit into the budget, and those of each rung if they
    differ."""
    configs = plan.configs()
    seconds: dict[str, float] = {}
    if budget is not None or plan.equal == "time":
        on_event(Note("measuring how long the steps of each rung take"))
        least = _MEASURED * (budget or DEFAULT_BUDGET) / len(configs)
        for rung, config in configs.items():
            try:
                each = seconds_per_token(config, dataset, least)
                seconds[rung] = each * config.tokens_per_step
            except Exception as error:  # noqa: BLE001 - own code may raise anything
                reason_of_failure(error, plan.settings(rung, plan.seed))
                seconds[rung] = 0.0  # it will fail again
    costs = seconds if plan.equal == "time" else dict.fromkeys(configs, 1.0)
    if plan.equal == "flops":
        V = dataset.vocab_size
        costs = {r: c.spec.costs(V).training_flops * c.tokens_per_step for r, c in configs.items()}
    first = next(filter(None, costs.values()), 1)  # a model without matmuls costs nothing
    relative = {rung: first / (cost or first) for rung, cost in costs.items()}
    if budget is not None:
        of_one = sum(seconds[rung] * relative[rung] for rung in configs)
        runs = plan.seeds + plan.tune  # five trials of a fifth take as long as a run
        plan = replace(plan, steps=max(1, round(_STEPS_SHARE * budget / max(of_one * runs, 1e-3))))
    if plan.equal not in ("flops", "time"):
        return plan
    return plan.adapting({r: {"steps": max(1, round(plan.steps * n))} for r, n in relative.items()})


# --- The best learning rate of each rung ----------------------------------------------------------


def _tuned(path: Path, plan: LadderPlan, dataset: Dataset, on_event: OnEvent) -> LadderPlan:
    """Return the plan in which each rung has its best learning rate, and write it."""
    held_out = _with_held_out(dataset)

    def pass_notes(event: object) -> None:
        if isinstance(event, Note):  # not the headers and evaluations of each trial
            on_event(event)

    for rung in plan.rungs:
        losses = {}
        for rate in plan.rates(rung):
            settings = {**plan.settings(rung, plan.seed), RATE: rate}
            steps = max(1, round(settings["steps"] * _TRIAL_FRACTION))
            settings |= {"steps": steps, "eval_every": steps}
            try:
                with workspace(path) as folder:
                    (run,) = train_all({"trial": settings}, held_out, folder, pass_notes).values()
                    losses[rate] = run.evaluations()[-1].val_loss
                said = f"loss {losses[rate]:.4f}"
            except Exception as error:  # noqa: BLE001 - own code may raise anything
                said = reason_of_failure(error, settings)
            on_event(Note(f"tried {rung} with learning rate {rate:g}: {said}"))
        if losses:
            best = min(losses, key=losses.__getitem__)
            if best in (max(losses), min(losses)):
                on_event(Note(f"{rung} prefers a rate of {best:g}, at the end of what was tried"))
            plan = plan.adapting({rung: {RATE: best}})
            plan.write(path)
    return plan


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
