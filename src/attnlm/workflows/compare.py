"""Compare groups of runs: find them, refuse unfair ones, and judge their losses."""

from __future__ import annotations

import fnmatch
import shlex
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.folders import CHECKPOINT_DIR, flag, folder_names
from attnlm.base.setting_fields import quoted
from attnlm.base.suggestions import suggestion
from attnlm.data.dataset import read_meta
from attnlm.runs.ladder_plan import RECORD, read_plan
from attnlm.runs.records import NOT_COMPARABLE
from attnlm.runs.run import Result, Run, open_run
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
    root = Path(checkpoint_dir)
    if measure not in MEASURES:
        hint = suggestion(measure, MEASURES, f"choose from {', '.join(MEASURES)}")
        raise UsageError(f"invalid value for `measure`: {quoted(measure)}", hint)
    if not groups:
        raise UsageError("no group of runs", "name runs, such as 'warm-*' 'cold-*', or a ladder")
    words = []
    named: dict[str, list[Run]] = {}
    for group in groups:
        members = _members(group, root, is_alone=len(groups) == 1)
        words.append(str(group) if isinstance(group, str | Path) else next(iter(members)))
        if twice := named.keys() & members.keys():
            raise UsageError(f"the group {min(twice)} is named twice", "name each group once")
        named |= members
    if by is not None:
        named = _by_setting(named, by)
    check_baseline(baseline, named)
    if len(named) < 2 and target is None:
        raise UsageError(
            f"there is only one group: {next(iter(named))}",
            "name another, divide it with `by` SETTING, or compare it with a `target`",
        )
    seen: dict[Path, str] = {}
    for name, runs in named.items():
        for run in runs:
            if (other := seen.setdefault(run.path.resolve(), name)) != name:
                raise UsageError(
                    f"{run.name} is in two groups: {other} and {name}", "name each run once"
                )
    found = groups_of(named)
    are_single = len(seen) == len(named)
    if are_single and target is None and baseline is None and measure == "loss":
        compared = Comparison(tuple(found), (), "val_loss")
    else:
        for one in found:
            _check_group(
                one, needs_seeds=len(found) > 1 and not (are_single and target is not None)
            )
        key = "accuracy" if measure == "accuracy" else _loss_key(found)
        if target is not None and key != "val_loss":
            raise UsageError(f"`target` is a loss, not {key}", "leave out `target` or `measure`")
        compared = judged(found, key, baseline, target)
    given = {"by": by, "baseline": baseline, "target": target, "measure": measure}
    for name, value in given.items():
        if value not in (None, "loss"):
            words += [flag(name), str(value)]
    return replace(compared, command=shlex.join(["attnlm", "compare", *words]))


def check_baseline(baseline: str | None, groups: Sequence[str] | Mapping[str, object]) -> None:
    """Raise UsageError if `baseline` is given, and is not the name of a group."""
    if baseline is not None and baseline not in groups:
        hint = suggestion(baseline, groups, f"the groups are {', '.join(groups)}")
        raise UsageError(f"`baseline` {quoted(baseline)} is no group", hint)


def groups_of(named: Mapping[str, Sequence[Run]]) -> list[Group]:
    """Return groups with the results of their runs, on the whole validation split or, if a run was
    not measured on it, of the evaluations during training."""
    results = {name: [run.result() for run in runs] for name, runs in named.items()}
    is_whole = not any(result and result.part for of in results.values() for result in of)
    groups = []
    for name, runs in named.items():
        known = [result for result in results[name] if result is not None]
        if not is_whole:
            known = [replace(result, whole={}) for result in known]
        groups.append(Group(name, tuple(runs), tuple(known) if len(known) == len(runs) else ()))
    return groups


def judged(
    groups: Sequence[Group],
    key: str = "val_loss",
    baseline: str | None = None,
    target: float | None = None,
) -> Comparison:
    """Return the comparison of groups by the measure `key`, without asking whether it is fair.

    Raises UsageError for a run without the measure.
    """
    sign = -1 if key == "accuracy" else 1
    measured = []
    keyed: dict[str, dict[tuple[Hashable, ...], float]] = {}
    for group in groups:
        group = replace(group, measure=key, target=target)
        if None in group.values:
            hint = "compare the loss, or train on questions with answers"
            raise UsageError(f"{group.name} has no {key}", hint)
        if group.failed is None:
            keyed[group.name] = losses = {}
            for run, value in zip(group.runs, group.values, strict=True):
                settings = run.config.settings()
                batches = (run.dataset.train_sha256, *(settings.get(name) for name in _BATCHES))
                pairs_with = (run.config.training.seed, *batches)
                if pairs_with in losses:  # other settings differ: it has no partner
                    pairs_with = (*pairs_with, run.name)
                losses[pairs_with] = sign * value
        measured.append(group)
    pairs = compare_pairs(keyed, baseline, are_shares=key == "accuracy")
    return Comparison(tuple(measured), tuple(pairs), key)


# --- Groups ---------------------------------------------------------------------------------------


def _members(
    group: str | Path | Run | Sequence[str | Path | Run], root: Path, *, is_alone: bool
) -> dict[str, list[Run]]:
    """Return the runs of a group by its name; of a ladder, those of each rung.

    The name of a rung begins with that of its ladder if there are other groups.
    """
    if isinstance(group, Run):
        return {group.name: [group]}
    name = str(group)
    if isinstance(group, str | Path):
        places = (root / name, Path(name))
        if folder := next((place for place in places if (place / RECORD).is_file()), None):
            plan = read_plan(folder)
            return {
                rung if is_alone else f"{folder.name}:{rung}": [
                    open_run(p.absolute()) for p in paths
                ]
                for rung, paths in plan.runs(folder).items()
                if rung not in plan.failed
            }
        if any(character in name for character in "*?["):
            group = sorted(n for n in folder_names(root, "run") if fnmatch.fnmatchcase(n, name))
            if not group:
                raise AttnlmError(f"no run in {root} matches {name!r}", "attnlm list names them")
        else:
            group = [word.strip() for word in name.split(",")]
    else:
        name = ",".join(run.name if isinstance(run, Run) else str(run) for run in group)
    if not group:
        raise UsageError("a group has no runs", "name its runs")
    return {name: [open_run(run, checkpoint_dir=root) for run in group]}


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


def _check_group(group: Group, *, needs_seeds: bool) -> None:
    """Raise UsageError for a run that gives no fair loss, or a group without a spread."""
    seen: dict[object, Run] = {}
    for run in group.runs:
        if not run.evaluations() and not run.imported_from:
            raise AttnlmError(f"{run.name} has no evaluations", f"restore {run.path}/metrics.jsonl")
        if run.imported_from:
            raise UsageError(f"{run.name} was imported: it has no seed", "compare trained runs")
        if run.leaks:
            raise UsageError(f"the loss of {run.name} is {NOT_COMPARABLE}", "leave it out")
        if not run.is_finished:
            raise UsageError(f"{run.name} is not finished", f"attnlm train --resume {run.name}")
        settings = tuple(sorted((key, str(v)) for key, v in run.config.settings().items()))
        if (other := seen.setdefault(settings, run)) is not run:
            raise UsageError(
                f"{other.name} and {run.name} have the same seed and settings",
                f"leave one out of {group.name}",
            )
    if needs_seeds and len(group.runs) < 2:
        raise UsageError(f"{group.name} has one run, and so no spread", "train it with more seeds")


def _loss_key(groups: Sequence[Group]) -> str:
    """Return the measure for losses. Raises UsageError if they are of different data."""
    runs = [
        (run, result)
        for group in groups
        for run, result in zip(group.runs, group.results, strict=False)
    ]

    def unlike(of: Callable[[Run, Result], object]) -> Run | None:
        """Return a run that differs from the first."""
        first = of(*runs[0])
        return next((run for run, result in runs if of(run, result) != first), None)

    has_other_ids = unlike(lambda run, _: run.dataset.val_sha256)
    if run := unlike(_measured_on) or (has_other_ids and unlike(_text_of)):
        raise UsageError(
            f"{run.name} and {runs[0][0].name} were measured on different validation splits, parts "
            "of it or tokens in it",
            "compare runs of one data set, or of the same text, that are measured alike",
        )
    return BITS if has_other_ids else "val_loss"


def _measured_on(run: Run, result: Result) -> object:
    dataset = run.dataset
    return dataset.val_bytes, dataset.question_end, run.config.training.loss_on, result.part


def _text_of(run: Run, _: Result) -> object:
    """Return what says which text a run was trained and measured on. Raises AttnlmError."""
    meta = read_meta(Path(run.dataset.path))
    if meta.val_sha256 != run.dataset.val_sha256:
        raise AttnlmError(
            f"the data set of {run.name} has changed since", "prepare it again, or compare others"
        )
    return meta.source_sha256, meta.val_source_sha256, meta.train_characters, meta.split
