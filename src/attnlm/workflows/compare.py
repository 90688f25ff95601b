"""Compare groups of runs: find them, refuse unfair ones, and judge their losses."""

from __future__ import annotations

import fnmatch
import math
import statistics
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.folders import folder_names
from attnlm.base.setting_fields import Setting, quoted
from attnlm.base.suggestions import suggestion
from attnlm.data.dataset import read_meta
from attnlm.runs.ladder_plan import RECORD, read_plan
from attnlm.runs.records import NOT_COMPARABLE
from attnlm.runs.run import Run, open_run
from attnlm.see.comparison import BITS, Comparison, Group, Target
from attnlm.see.verdicts import Pair, compare_pairs, t_tails

MEASURES = ("loss", "accuracy")
_MAGIC = "*?["
_BATCHES = ("batch_size", "block_size", "sampling", "stride", "loss_on", "examples_per_window")
"""settings that decide, with the seed and the data, which windows a step trains on"""


def compare(
    *groups: str | Path | Run | Sequence[str | Path | Run],
    by: str | None = None,
    baseline: str | None = None,
    measure: str = "loss",
    target: float | None = None,
    checkpoint_dir: str | Path = "checkpoints",
) -> Comparison:
    """Compare groups of runs, and say whether one is better than another, or whether it was chance.

        attnlm.compare("multi-head-001", "transformer-001").settings

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
    named: dict[str, tuple[Run, ...]] = {}
    for group in groups:
        for name, runs in _members(group, root, is_alone=len(groups) == 1):
            if name in named:
                raise UsageError(f"the group {name} is named twice", "name each group once")
            named[name] = runs
    if by is not None:
        named = _by_setting(named, by)
    if baseline is not None and baseline not in named:
        hint = suggestion(baseline, named, f"the groups are {', '.join(named)}")
        raise UsageError(f"`baseline` {quoted(baseline)} is no group", hint)
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
    everything = [run for runs in named.values() for run in runs]
    if target is None and len(everything) == len(named):
        if measure != "loss" or baseline is not None:
            raise UsageError(
                "one run in each group gives no verdict",
                "name runs of several seeds, or leave out `measure` and `baseline`",
            )
        return _compare_single(named)
    for name, runs in named.items():
        _check_group(name, runs, needs_seeds=len(everything) > len(named) > 1)
    notes: list[str] = []
    key = "accuracy" if measure == "accuracy" else _loss_key(everything, notes)
    if target is not None and key != "val_loss":
        raise UsageError(f"`target` is a loss, not {key}", "leave out `target` or `measure`")
    compared = []
    for name, runs in named.items():
        values = tuple(_value(run, key) for run in runs)
        reached = None if target is None else _target(runs, values, target)
        compared.append(Group(name, runs, values, _common_settings(runs), reached))
    losses = {g.name: _keyed(g, -1 if key == "accuracy" else 1) for g in compared}
    pairs = compare_pairs(losses, baseline, are_shares=key == "accuracy")
    notes += _notes_on_pairs(pairs, losses)
    differing = _differing([group.settings for group in compared])
    return Comparison(tuple(compared), tuple(pairs), key, differing, {}, {}, tuple(notes))


def _compare_single(named: Mapping[str, tuple[Run, ...]]) -> Comparison:
    """Return the comparison of one run with each other one, which gives no verdict."""
    runs = [run for (run,) in named.values()]
    results = [run.result() for run in runs]
    notes = []
    if len({run.dataset.val_sha256 for run in runs}) > 1:
        notes.append("the losses were measured on different validation splits")
        if len({str(run.tokenizer.to_json()) for run in runs}) > 1:
            notes.append("the tokenizers differ: compare bits per byte, not losses per token")
    for run, result in zip(runs, results, strict=True):
        if result is not None and result.part:
            notes.append(f"the loss of {run.name} was measured on {result.part}")
        if run.leaks:
            notes.append(f"the loss of {run.name} is {NOT_COMPARABLE}")
    groups = tuple(
        Group(
            name, (run,), () if result is None else (result.final.val_loss,), run.config.settings()
        )
        for (name, (run,)), result in zip(named.items(), results, strict=True)
    )
    values = [{"parameters": run.parameters} for run in runs]
    for value, result in zip(values, results, strict=True):
        value |= {} if result is None else result.facts()
    return Comparison(
        groups,
        (),
        "val_loss",
        _differing([group.settings for group in groups]),
        _differing([_data_of(run) for run in runs]),
        _side_by_side(values),
        tuple(notes),
    )


# --- Groups ---------------------------------------------------------------------------------------


def _members(
    group: str | Path | Run | Sequence[str | Path | Run], root: Path, *, is_alone: bool
) -> Iterator[tuple[str, tuple[Run, ...]]]:
    """Yield the name and the runs of a group; of a ladder, of each rung.

    The name of a rung begins with that of its ladder if there are other groups.
    """

    def opened(name: str | Path | Run) -> Run:
        return open_run(name, checkpoint_dir=root)

    if isinstance(group, Run):
        yield group.name, (group,)
    elif not isinstance(group, str | Path):
        runs = tuple(map(opened, group))
        if not runs:
            raise UsageError("a group has no runs", "name its runs")
        yield ", ".join(run.name for run in runs), runs
    elif (folder := _ladder_folder(group, root)) is not None:
        plan = read_plan(folder)
        paths = plan.runs(folder)
        for rung in plan.rungs:
            if rung not in plan.failed:
                places = [path.absolute() for (name, _), path in paths.items() if name == rung]
                label = rung if is_alone else f"{folder.name}:{rung}"
                yield label, tuple(map(opened, places))
    elif any(character in str(group) for character in _MAGIC):
        names = sorted(n for n in folder_names(root, "run") if fnmatch.fnmatchcase(n, str(group)))
        if not names:
            raise AttnlmError(f"no run in {root} matches {str(group)!r}", "attnlm list names them")
        yield str(group), tuple(map(opened, names))
    else:
        yield str(group), tuple(opened(name.strip()) for name in str(group).split(","))


def _ladder_folder(name: str | Path, root: Path) -> Path | None:
    places = (root / name, Path(name))
    return next((place for place in places if (place / RECORD).is_file()), None)


def _by_setting(named: Mapping[str, tuple[Run, ...]], by: str) -> dict[str, tuple[Run, ...]]:
    """Return groups of the runs with equal values of a setting."""
    by = by.removeprefix("--").replace("-", "_")
    divided: dict[str, tuple[Run, ...]] = {}
    known: set[str] = set()
    for run in dict.fromkeys(run for runs in named.values() for run in runs):
        settings = run.config.settings()
        known |= settings.keys()
        value = settings.get(by)
        name = f"{by}={'default' if value is None else value}"
        divided[name] = (*divided.get(name, ()), run)
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
        if run.leaks:
            raise UsageError(f"the loss of {run.name} is {NOT_COMPARABLE}", "leave it out")
        if not run.is_finished:
            raise UsageError(f"{run.name} is not finished", f"attnlm train --resume {run.name}")
        settings = run.config.settings()
        same = tuple(sorted((key, str(value)) for key, value in settings.items()))
        if (other := seen.setdefault(same, run)) is not run:
            raise UsageError(
                f"{other.name} and {run.name} have the same seed and settings",
                f"leave one out of {name}",
            )
    if needs_seeds and len(runs) < 2:
        raise UsageError(f"{name} has one run, and so no spread", "train it with more seeds")


# --- What is compared -----------------------------------------------------------------------------


def _loss_key(runs: Sequence[Run], notes: list[str]) -> str:
    """Return the measure for losses. Raises UsageError if they are of different data."""
    first = runs[0]
    for run in runs:
        if _measured_on(run) != _measured_on(first):
            raise UsageError(
                f"{run.name} and {first.name} were measured on different validation splits, parts "
                "of it or tokens in it",
                "compare runs of one data set that are measured alike",
            )
    if all(run.dataset.val_sha256 == first.dataset.val_sha256 for run in runs):
        return "val_loss"
    for run in runs:
        if _text_of(run) != _text_of(first):
            raise UsageError(
                f"{run.name} and {first.name} were measured on different validation splits",
                "compare runs of one data set, or of the same text",
            )
    notes.append("the tokenizers differ, so losses are compared in bits per byte of the same text")
    return BITS


def _measured_on(run: Run) -> object:
    """Return what two runs must share so that their losses can be compared."""
    result = run.result()
    part = "" if result is None else result.part
    return run.dataset.val_bytes, run.dataset.question_end, run.config.training.loss_on, part


def _text_of(run: Run) -> object:
    """Return what says which text a run was trained and measured on. Raises AttnlmError."""
    meta = read_meta(Path(run.dataset.path))
    if meta.val_sha256 != run.dataset.val_sha256:
        raise AttnlmError(
            f"the data set of {run.name} has changed since", "prepare it again, or compare others"
        )
    return meta.source_sha256, meta.val_source_sha256, meta.train_characters, meta.split


def _value(run: Run, key: str) -> float:
    result = run.result()
    value: float | None = None if result is None else getattr(result.final, key)
    if value is None:
        raise UsageError(
            f"{run.name} has no {key}", "compare the loss, or train on questions with answers"
        )
    return value


def _keyed(group: Group, sign: int) -> dict[Hashable, float]:
    """Return the measure of each run by its seed and batches; runs of one key are a pair."""
    keyed: dict[Hashable, float] = {}
    for run, value in zip(group.runs, group.values, strict=True):
        settings = run.config.settings()
        batches = (run.dataset.train_sha256, *(str(settings.get(name)) for name in _BATCHES))
        key = (run.config.training.seed, *batches)
        if key in keyed:  # other settings differ: it has no partner
            key = (*key, run.name)
        keyed[key] = sign * value
    return keyed


def _notes_on_pairs(
    pairs: Sequence[Pair], losses: Mapping[str, Mapping[Hashable, float]]
) -> Iterator[str]:
    for pair in pairs:
        if pair.paired:
            continue
        seeds = [{key[0] for key in losses[name]} for name in (pair.rung, pair.rival)]  # type: ignore[index]
        reason = "the batches differ" if seeds[0] == seeds[1] else "the seeds differ"
        yield f"{pair.rung} and {pair.rival} are compared by Welch's test: {reason}"


def _settings_of(run: Run) -> dict[str, Setting]:
    return {name: value for name, value in run.config.settings().items() if name != "seed"}


def _common_settings(runs: Sequence[Run]) -> dict[str, Setting]:
    first, *others = map(_settings_of, runs)
    return {
        name: value
        for name, value in first.items()
        if all(settings.get(name) == value for settings in others)
    }


def _data_of(run: Run) -> dict[str, Any]:
    dataset = run.dataset
    return {
        "dataset": None if run.imported_from else dataset.name,
        "train_sha256": dataset.train_sha256 or None,
        "val_sha256": dataset.val_sha256 or None,
        "tokenizer": run.tokenizer.name,
        "vocab_size": run.vocab_size,
        "parent": run.started_from or None,
        "imported_from": run.imported_from or None,
    }


def _side_by_side(values: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    names = dict.fromkeys(name for mapping in values for name in mapping)
    return {name: tuple(mapping.get(name) for mapping in values) for name in names}


def _differing(values: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    every = _side_by_side(values)
    return {name: each for name, each in every.items() if any(one != each[0] for one in each)}


def _target(runs: Sequence[Run], values: Sequence[float], target: float) -> Target:
    p = None
    if len(values) > 1:
        mean, spread = statistics.fmean(values), statistics.stdev(values)
        if spread:
            t = (mean - target) / (spread / math.sqrt(len(values)))
            tails = t_tails(t, len(values) - 1) / 2
            p = tails if t < 0 else 1 - tails
        else:
            p = float(mean > target)
    return Target(p, tuple(_step_at(run, target) for run in runs))


def _step_at(run: Run, target: float) -> float | None:
    """Return the step at which a run's loss was first at most `target`, between evaluations."""
    before: tuple[int, float] | None = None
    for record in run.evaluations():
        if record.val_loss <= target:
            if before is None:
                return float(record.step)
            share = (before[1] - target) / (before[1] - record.val_loss)
            return before[0] + share * (record.step - before[0])
        before = (record.step, record.val_loss)
    return None
