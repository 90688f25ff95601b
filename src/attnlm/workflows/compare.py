"""Compare groups of runs: find them, refuse unfair ones, and judge their losses."""

from __future__ import annotations

import fnmatch
import functools
import math
import shlex
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.folders import CHECKPOINT_DIR, DATA_DIR, flag, folder_names
from attnlm.base.setting_fields import quoted
from attnlm.base.suggestions import suggestion
from attnlm.runs.ladder_plan import LadderPlan
from attnlm.runs.records import NOT_COMPARABLE
from attnlm.runs.run import Run, open_run
from attnlm.see.comparison import BITS, Comparison, Group
from attnlm.see.verdicts import compare_pairs

MEASURES = ("loss", "accuracy")
_BATCHES = ("batch_size", "block_size", "sampling", "stride", "loss_on", "examples_per_window")
"""settings that decide, with the seed and the data, which windows a step trains on"""


def compare(
    *groups: str | Path | Run | Sequence[str | Path | Run],
    by: str | None = None,
    baseline: str | None = None,
    measure: str = "loss",
    target: float | None = None,
    checkpoint_dir: str | Path = CHECKPOINT_DIR,
    data_dir: str | Path = DATA_DIR,
) -> Comparison:
    """Compare groups of runs, and say whether one is better than another, or whether it was chance.

        attnlm.compare("multi-head-001", "transformer-001").differences

    A group is a run, a pattern of names, names with commas between them, or a list of runs. A
    ladder is a group for each of its rungs. With `by`, runs with equal values of this setting are a
    group. Each group is compared with each earlier one, or if `baseline` names a group, with that.

    `measure` is the loss of the whole validation split, or the accuracy: the share of right
    answers. Losses of groups with different tokenizers of the same text are compared in bits per
    byte. Runs are compared seed by seed if two groups have the same seeds and the same batches,
    otherwise by Welch's test. With `target`, each group has the probability that its mean loss is
    above the target, and the steps at which its runs reached it. One run in each group gives no
    verdict, but the settings in which they differ.

    Raises UsageError for groups that cannot be compared: a run in two groups, one seed only, a run
    that is unfinished, imported or not causal, and losses of other data. Raises AttnlmError for
    runs that are missing or damaged.
    """
    if measure not in MEASURES:
        hint = suggestion(measure, MEASURES, f"choose from {', '.join(MEASURES)}")
        raise UsageError(f"invalid value for `measure`: {quoted(measure)}", hint)
    if target is not None and not 0 <= target < math.inf:
        raise UsageError(f"invalid value for `target`: {target}", "give a loss in nats per token")
    if not groups:
        raise UsageError("no group of runs", "name runs, such as 'warm-*' 'cold-*', or a ladder")
    root = Path(checkpoint_dir)
    open_it = functools.partial(open_run, checkpoint_dir=root, data_dir=data_dir)
    words = []
    named: dict[str, list[Run]] = {}
    for group in groups:
        members = _members(group, root, open_it, is_alone=len(groups) == 1)
        words.append(str(group) if isinstance(group, str | Path) else next(iter(members)))
        named |= members
    if by is not None:
        named = _by_setting(named, by)
    if len(named) < 2 and target is None:
        raise UsageError(
            f"there is only one group: {next(iter(named))}",
            "name another, divide it with `by` SETTING, or compare it with a `target`",
        )
    seen: dict[Path, str] = {}
    for name, runs in named.items():
        for run in runs:
            if (other := seen.setdefault(run.path.resolve(), name)) != name:
                twice_named = f"{run.name} is in two groups: {other} and {name}"
                raise UsageError(twice_named, "name each run once")
    are_single = len(seen) == len(named)
    if are_single and target is None and baseline is None and measure == "loss":
        compared = replace(compare_groups(named), pairs=())
    else:
        needs_seeds = len(named) > 1 and not (are_single and target is not None)
        for name, runs in named.items():
            _check_group(name, runs, needs_seeds=needs_seeds)
        key = _key_of([run for runs in named.values() for run in runs], measure)
        if target is not None and key != "val_loss":
            raise UsageError(f"`target` is a loss, not {key}", "leave out `target` or `measure`")
        compared = compare_groups(named, key, baseline, target)
    given = {"by": by, "baseline": baseline, "target": target, "measure": measure}
    for name, value in given.items():
        if value not in (None, "loss"):
            words += [flag(name), str(value)]
    return replace(compared, command=shlex.join(["attnlm", "compare", *words]))


def compare_groups(
    named: Mapping[str, Sequence[Run]],
    measure: str = "val_loss",
    baseline: str | None = None,
    target: float | None = None,
) -> Comparison:
    """Return the comparison of groups of opened runs, without asking whether it is fair.

    `measure` is val_loss, bits_per_byte or accuracy. Losses are of the whole validation split or,
    if a run was not measured on it, of the evaluations during training. Raises UsageError for a run
    without the measure, and if `baseline` is not the name of a group.
    """
    check_baseline(baseline, named)
    results = {name: [run.result() for run in runs] for name, runs in named.items()}
    is_whole = not any(result and result.part for of in results.values() for result in of)
    sign = -1 if measure == "accuracy" else 1
    groups = []
    keyed: dict[str, dict[Hashable, float]] = {}
    for name, runs in named.items():
        known = [r if is_whole else replace(r, whole={}) for r in results[name] if r is not None]
        every = tuple(known) if len(known) == len(runs) else ()
        groups.append(group := Group(name, tuple(runs), every, measure, target))
        if None in group.values:
            hint = "compare the loss, or train on questions with answers"
            raise UsageError(f"{name} has no {measure}", hint)
        losses: dict[Hashable, float] = {}
        for run, value in zip(runs, group.values, strict=False):
            settings = run.config.settings()
            batches = (run.dataset.train_sha256, *map(settings.get, _BATCHES))
            pairs_with = (run.config.training.seed, *batches)
            # If only other settings differ, it has no partner.
            losses[(*pairs_with, run.name) if pairs_with in losses else pairs_with] = sign * value
        if losses:
            keyed[name] = losses
    pairs = compare_pairs(keyed, baseline, are_shares=measure == "accuracy")
    return Comparison(tuple(groups), tuple(pairs), measure)


def check_baseline(baseline: str | None, groups: Iterable[str]) -> None:
    """Raise UsageError if `baseline` is given, and is not the name of a group."""
    if baseline is not None and baseline not in groups:
        hint = suggestion(baseline, groups, f"the groups are {', '.join(groups)}")
        raise UsageError(f"`baseline` {quoted(baseline)} is no group", hint)


# --- Groups ---------------------------------------------------------------------------------------


def _members(
    group: str | Path | Run | Sequence[str | Path | Run],
    root: Path,
    open_it: Callable[..., Run],
    *,
    is_alone: bool,
) -> dict[str, list[Run]]:
    """Return the runs of a group by its name; of a ladder, those of each rung.

    The name of a rung begins with that of its ladder if there are other groups.
    """
    if isinstance(group, Run):
        return {group.name: [group]}
    if not isinstance(group, str | Path):
        name = ",".join(run.name if isinstance(run, Run) else str(run) for run in group)
    else:
        name = str(group)
        places = (root / name, Path(name))
        if folder := next((place for place in places if (place / LadderPlan.FILE).is_file()), None):
            plan = LadderPlan.read(folder)
            prefix = "" if is_alone else f"{folder.name}:"
            rungs = plan.runs(folder).items()
            found = {rung: paths for rung, paths in rungs if rung not in plan.failed}
            return {f"{prefix}{r}": [open_it(p.absolute()) for p in found[r]] for r in found}
        group = [word.strip() for word in name.split(",")]
        if any(character in name for character in "*?["):
            group = sorted(n for n in folder_names(root, "run") if fnmatch.fnmatchcase(n, name))
            if not group:
                raise AttnlmError(f"no run in {root} matches {name!r}", "attnlm list names them")
    if not group:
        raise UsageError("a group has no runs", "name its runs")
    return {name: [open_it(run) for run in group]}


def _by_setting(named: Mapping[str, Sequence[Run]], by: str) -> dict[str, list[Run]]:
    """Return groups of the runs with equal values of a setting."""
    by = by.removeprefix("--").replace("-", "_")
    divided: dict[str, list[Run]] = {}
    known: set[str] = set()
    for run in dict.fromkeys(run for runs in named.values() for run in runs):
        settings = run.config.settings()
        known |= settings.keys()
        divided.setdefault(f"{by}={settings.get(by, 'default')}", []).append(run)
    if by not in known:
        hint = suggestion(by, known, "attnlm train --help lists the settings")
        raise UsageError(f"no run has the setting {quoted(by)}", hint)
    return divided


def _check_group(name: str, runs: Sequence[Run], *, needs_seeds: bool) -> None:
    """Raise UsageError for a run that gives no fair loss, or a group without a spread."""
    seen: dict[object, Run] = {}
    for run in runs:
        if run.imported_from:
            raise UsageError(f"{run.name} was imported: it has no seed", "compare trained runs")
        if not run.evaluations():
            raise AttnlmError(f"{run.name} has no evaluations", f"restore {run.path}/metrics.jsonl")
        if run.leaks:
            raise UsageError(f"the loss of {run.name} is {NOT_COMPARABLE}", "leave it out")
        if not run.is_finished:
            raise UsageError(f"{run.name} is not finished", f"attnlm train --resume {run.name}")
        settings = tuple(sorted((key, str(v)) for key, v in run.config.settings().items()))
        if (other := seen.setdefault(settings, run)) is not run:
            same = f"{other.name} and {run.name} have the same seed and settings"
            raise UsageError(same, f"leave one out of {name}")
    if needs_seeds and len(runs) < 2:
        raise UsageError(f"{name} has one run, and so no spread", "train it with more seeds")


def _key_of(runs: Sequence[Run], measure: str) -> str:
    """Return what to compare of runs. Raises UsageError if they were measured on other data."""
    first, *others = runs
    with_other_ids = [r for r in others if r.dataset.val_sha256 != first.dataset.val_sha256]
    for run in others:
        is_same = _measured_on(run, measure) == _measured_on(first, measure)
        if not is_same or (run in with_other_ids and _text_of(run) != _text_of(first)):
            raise UsageError(
                f"{run.name} and {first.name} were measured on different validation splits, parts "
                "of it or tokens in it",
                "compare runs of one data set, or of the same text, that are measured alike",
            )
    return measure if measure == "accuracy" else BITS if with_other_ids else "val_loss"


def _measured_on(run: Run, measure: str) -> tuple[object, ...]:
    data = (run.dataset.val_bytes, run.dataset.question_end)
    if measure == "accuracy":
        return data
    result = run.result()
    return *data, run.config.training.loss_on, result and result.part


def _text_of(run: Run) -> tuple[object, ...]:
    """Return what says which text a run was trained and measured on. Raises AttnlmError."""
    data = run.open_dataset()
    return data.source_sha256, data.val_source_sha256, data.train_characters, data.split
