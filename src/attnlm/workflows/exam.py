"""Examine a part or a model: what can it do, task by task, beside the standard one?"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import attnlm
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import OnEvent, ignore
from attnlm.base.folders import (
    CHECKPOINT_DIR,
    find_folder,
)
from attnlm.base.heads import head_names, list_heads
from attnlm.base.own_code import is_code_name
from attnlm.base.setting_fields import Settings, differing_names
from attnlm.base.suggestions import suggestion
from attnlm.config.settings import resolve_new, with_own_code
from attnlm.config.variants import named_codes, split_variant, variant
from attnlm.data.dataset import Dataset
from attnlm.data.prepare import prepare
from attnlm.model.architecture import MODELS
from attnlm.model.own_arguments import infer_kind
from attnlm.runs.exam_plan import STANDARD, SUITE, ExamPlan, trainings
from attnlm.runs.run import Run
from attnlm.see.exam_card import Exam, TaskResult, judged
from attnlm.workflows.answers import answer_pairs, select_pairs
from attnlm.workflows.check_own_code import check_required
from attnlm.workflows.match_compute import with_mlp_width
from attnlm.workflows.train_all import noting_failures, train_all

_TEXT_CONTEXT = 64  # tokens
_VOCAB_SIZE = 65  # in which a candidate is checked


def exam(
    candidate: str | Callable[..., Any] | None = None,
    *,
    part: str | None = None,
    tasks: str | Sequence[str] | None = None,
    seeds: int | None = None,
    seed: int | None = None,
    steps: int | None = None,
    name: str | None = None,
    resume: str | Path | None = None,
    checkpoint_dir: str | Path = CHECKPOINT_DIR,
    on_event: OnEvent | None = None,
) -> Exam:
    """Train a candidate and the standard model on each task of a fixed suite, and compare them.

        card = attnlm.exam("alibi", tasks=["copy", "sort"], seeds=1)
        print(card.verdict)

    `candidate` is a class, its name as in `mine.py:Temperature`, a head of the library, or a
    variant such as `transformer:positions=none`. `part` says what code is: attention, mlp, scores
    or model; by default, its arguments tell. `tasks` are some of the suite's; default: all. Both
    models are trained on the same batches with the same `seeds` (default: 3), from `seed` (1) on,
    for `steps` (those of the suite). If the candidate has an MLP of ours, its width makes up for
    what the candidate adds: half of it at most, and twice. The runs are in the folder `name`
    (exam-001, …); those of the standard model are kept for later exams. `resume` names an exam that
    was stopped. `on_event` receives all events of `train`.

    A task in which the candidate's training diverges or its code raises an error is `failed`; the
    others are trained and compared. Raises AttnlmError (UsageError for invalid arguments), and
    NotCausalError for a candidate that depends on later tokens.
    """
    root, on_event = Path(checkpoint_dir), on_event or ignore
    listed = tasks.split(",") if isinstance(tasks, str) else tasks
    numbers = {"tasks": listed and tuple(listed), "seeds": seeds, "seed": seed, "steps": steps}
    given: dict[str, Any] = {name: value for name, value in numbers.items() if value is not None}
    if resume is not None:
        path = find_folder(resume, root, kind="exam")
        plan = ExamPlan.read(path)
        named = {"candidate": candidate, "part": part, "name": name}
        given |= {name: value for name, value in named.items() if value is not None}
        for key in differing_names(given, vars(plan)):
            raise UsageError(
                f"`{key}` cannot be changed in an exam that is resumed",
                "leave it out, or start a new exam",
            )
    elif candidate is None:
        raise UsageError("no candidate", "name a file, a head of the library, or a variant")
    else:
        plan = replace(_plan(candidate, part), **given)
        plan.check()
        text = resolve_new({}, {**plan.model(plan.tasks[0]), "block_size": _TEXT_CONTEXT})
        check_required(text.config, _VOCAB_SIZE)
        path = plan.create_folder(root, name)
    with plan.training(path, on_event):
        return Exam(plan, path, judged(_results(plan, path, on_event)))


def _plan(candidate: str | Callable[..., Any], part: str | None) -> ExamPlan:
    """Return the plan for a candidate. Raises UsageError if it is none."""
    if isinstance(candidate, str) and not is_code_name(split_variant(candidate)[0]):
        if (model := split_variant(candidate)[0]) not in MODELS:
            known = [*head_names(), *MODELS]
            hint = suggestion(model, known, "name FILE.py:NAME, or take one of `attnlm list heads`")
            raise UsageError(f"no model or head is called {model!r}", hint)
        codes = named_codes([candidate])
        variant(candidate, codes)
        if part is not None:
            raise UsageError("`part` is for code, and a variant names its parts", "leave it out")
        return ExamPlan(candidate=candidate, codes=codes)
    code: Any = with_own_code({"model": candidate})["model"]
    kind = part or infer_kind(code)
    if kind not in ("attention", "mlp", "scores", "model"):
        hint = "use attention, mlp, scores or model"
        raise UsageError(f"invalid value for `part`: {kind!r}", hint)
    name, positions = str(code), "learned"
    for head in list_heads():
        if str(candidate).replace("_", "-") == head.name:
            name = head.name
            if "--positions none" in head.command:  # it has its own
                positions = "none"
    return ExamPlan(candidate=name, part=kind, codes={name: code}, positions=positions)


def _results(plan: ExamPlan, path: Path, on_event: OnEvent) -> list[TaskResult]:
    """Train both models on each task, or take the runs that are there."""
    kept = path.parent / f"exam-standard-{attnlm.__version__}"
    with contextlib.suppress(AttnlmError):  # it exists, perhaps since now
        STANDARD.create_folder(path.parent, kept.name)
    results = []
    for number, task in enumerate(plan.tasks, 1):
        dataset = prepared(task, kept)
        seeds = range(plan.seed, plan.seed + plan.seeds)
        train = functools.partial(trained, task, dataset, seeds, plan.steps, on_event=on_event)
        title = f"task {number} of {len(plan.tasks)}: {task}"
        standard = train(STANDARD.model(task), kept, title=f"{title}, standard")
        model = plan.model(task)
        candidate: list[Run] = []
        sample: dict[str, str] = {}
        with noting_failures(task, model, on_event) as reasons:
            around = {**model, "block_size": standard[0].config.spec.block_size}
            wanted = standard[0].parameters
            width = with_mlp_width(around, wanted, dataset.vocab_size)
            done = train(width, path, title=f"{title}, {plan.candidate}")
            sample = _sample(dataset, done[0], standard[0])
            candidate = done
        failed = next(iter(reasons), None)
        results.append(TaskResult(task, dataset, candidate, standard, failed, sample=sample))
    return results


def _sample(dataset: Dataset, candidate: Run, standard: Run) -> dict[str, str]:
    """Return a question, its right answer, and those of two runs; {} for a text."""
    said: dict[str, str] = {}
    if pairs := select_pairs(dataset, 1):
        for side, run in (("candidate", candidate), ("standard", standard)):
            (answered,) = answer_pairs(run, pairs, checkpoint="last")
            said |= {"question": answered.prompt, "right": answered.answer, side: answered.said}
    return said


def prepared(task: str, folder: Path) -> Dataset:
    """Return the data set of a task, which stands beside the standard model's runs."""
    exercise = SUITE[task]
    dataset = prepare(exercise.source, name=task, data_dir=folder / "data", **exercise.sizes)
    if exercise.longer and (found := dataset.longer_examples()) is not None:
        ids, examples = found
        dataset = replace(dataset, val=ids, val_tokens=len(ids), val_examples=examples)
    return dataset


def trained(
    task: str,
    dataset: Dataset,
    seeds: Iterable[int],
    steps: int | None,
    model: Settings,
    folder: Path,
    *,
    title: str,
    on_event: OnEvent,
) -> list[Run]:
    """Return the runs of a model on a task, one for each seed."""
    splits = [s for s in (dataset.train_examples, dataset.val_examples) if s is not None]
    context = max((split.longest - 1 for split in splits), default=_TEXT_CONTEXT)
    of_seeds = trainings(task, context, seeds, steps)
    models = {name: {**model, **settings} for name, settings in of_seeds.items()}
    return [*train_all(models, dataset, folder, on_event, title).values()]
