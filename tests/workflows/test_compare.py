"""A comparison of runs: groups are what was meant, unfair ones are refused, verdicts are exact."""

from __future__ import annotations

import csv
import json
import re
import shutil
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import attnlm
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.runs.run import Run
from attnlm.see.comparison import Comparison
from attnlm.see.curves import picture
from attnlm.see.verdicts import compare_pairs
from attnlm.workflows.compare import compare
from tests.browser import check_fits, elements, opened
from tests.kit import QUICK, command, quick_run
from tests.models import FRUITS, prepared

GROUPS = {"narrow": {"embed_dim": 4}, "wide": {"embed_dim": 16}, "small": {"batch_size": 2}}
SEEDS = (1, 2, 3)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with three runs of each group, of one data set."""
    folder = tmp_path_factory.mktemp("compared")
    dataset = prepared(folder, FRUITS)
    for name, settings in GROUPS.items():
        for seed in SEEDS:
            given: dict[str, Any] = {
                "steps": 8,
                "eval_every": 2,
                **settings,
                "seed": seed,
                "name": f"{name}-{seed}",
            }
            quick_run(dataset, **given)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder / "checkpoints"


def of(*groups: Any, root: Path, **options: Any) -> Comparison:
    return compare(*groups, checkpoint_dir=root, **options)


def moved(run: Run, root: Path) -> Run:
    """Return a run whose data are no longer where they were, but among the data sets."""
    data = replace(run.dataset, path=str(root / "gone"))
    return replace(run, dataset=data, data_dir=root.parent / "data")


def loss(name: str, root: Path) -> float:
    result = attnlm.open_run(root / name).result()
    assert result is not None
    return result.final.val_loss


def test_patterns_names_and_open_runs_are_the_same_groups(root: Path) -> None:
    pattern = of("narrow-*", "wide-*", root=root)
    names = of("narrow-1,narrow-2, narrow-3", "wide-1,wide-2,wide-3", root=root)
    runs = [[attnlm.open_run(root / f"{name}-{seed}") for seed in SEEDS] for name in GROUPS]
    opened = of(*runs[:2], root=root)
    losses = [[loss(f"{name}-{seed}", root) for seed in SEEDS] for name in ("narrow", "wide")]
    for found in (pattern, names, opened):
        assert [group.values for group in found.groups] == losses
        assert found.pairs[0].p == pattern.pairs[0].p
    assert [group.name for group in pattern.groups] == ["narrow-*", "wide-*"]
    assert pattern.groups[0].mean == pytest.approx(statistics.fmean(losses[0]))


def test_the_verdict_is_that_of_paired_losses(root: Path) -> None:
    found = of("narrow-*", "wide-*", root=root)
    losses = {
        f"{name}-*": {seed: loss(f"{name}-{seed}", root) for seed in SEEDS}
        for name in ("narrow", "wide")
    }
    assert found.pairs == tuple(compare_pairs(losses))
    assert found.pairs[0].paired and "Welch" not in "\n".join(found.notes)
    assert found.differences == {"embed_dim": {"narrow-*": 4, "wide-*": 16}}


def test_runs_on_other_batches_or_seeds_are_no_pairs_and_it_says_why(root: Path) -> None:
    batches, _ = of("narrow-*", "small-*", root=root).notes
    assert "Welch's test: the batches differ" in batches
    found = of("narrow-1,narrow-2", "wide-2,wide-3", root=root)
    assert not found.pairs[0].paired and "the seeds differ" in found.notes[0]


def test_one_setting_divides_the_runs_of_a_group(root: Path) -> None:
    runs = [attnlm.open_run(root / f"{name}-{seed}") for name in GROUPS for seed in SEEDS]
    found = of(runs, by="embed-dim", root=root)
    assert {group.name: len(group.runs) for group in found.groups} == {
        "embed_dim=4": 3,
        "embed_dim=16": 3,
        "embed_dim=64": 3,
    }
    with pytest.raises(UsageError, match="no run has the setting 'embed_dims'") as raised:
        of(runs, by="embed_dims", root=root)
    assert "embed_dim" in raised.value.hint


def test_a_baseline_is_compared_with_each_other_group(root: Path) -> None:
    found = of("narrow-*", "wide-*", "small-*", baseline="wide-*", root=root)
    assert [pair.groups for pair in found.pairs] == [
        ("narrow-*", "wide-*"),
        ("small-*", "wide-*"),
    ]


def test_single_runs_show_where_they_differ_without_a_verdict(root: Path) -> None:
    found = of("narrow-1", "small-2", root=root)
    assert not found.pairs
    differences = {key: [*row.values()] for key, row in found.differences.items()}
    assert differences["batch_size"] == [4, 2] and differences["seed"] == [1, 2]
    assert "with one run of each, a difference may be chance" in found.verdict
    assert [group.mean for group in found.groups] == [loss("narrow-1", root), loss("small-2", root)]


def test_a_ladder_is_a_group_for_each_rung(root: Path, tmp_path: Path) -> None:
    climbed = attnlm.ladder(
        "fruits-char",
        rungs=["bigram", "average"], steps=4, seeds=2, seed=1, tokens=1, checkpoint_dir=tmp_path,
        data_dir=root.parent / "data",
    )  # fmt: skip
    assert climbed.path is not None
    found = of(climbed.path.name, root=tmp_path)
    assert [group.name for group in found.groups] == ["bigram", "average"]
    assert found.pairs == climbed.pairs


def test_losses_of_other_tokenizers_are_compared_in_bits_per_byte(root: Path) -> None:
    dataset = prepared(root.parent, FRUITS, tokenizer="byte")
    for seed in SEEDS[:2]:
        given: dict[str, Any] = {"steps": 8, "eval_every": 2, "seed": seed}
        given["name"] = f"bytes-{seed}"
        quick_run(dataset, **given)
    found = of("wide-1,wide-2", "bytes-*", root=root)
    assert found.measure == "bits_per_byte" and "bits per byte" in found.notes[0]
    result = attnlm.open_run(root / "bytes-1").result()
    assert result is not None and found.groups[1].values[0] == result.final.bits_per_byte
    runs = [
        [moved(attnlm.open_run(root / f"{name}-{seed}"), root) for seed in SEEDS[:2]]
        for name in ("wide", "bytes")
    ]
    assert of(*runs, root=root).groups[1].values == found.groups[1].values


def test_a_target_has_its_chance_and_the_steps_to_it(root: Path) -> None:
    losses = [loss(f"wide-{seed}", root) for seed in SEEDS]
    easy = of("wide-*", target=max(losses) + 0.5, root=root).groups[0]
    hard = of("wide-*", target=min(losses) - 0.5, root=root).groups[0]
    assert easy.p is not None and hard.p is not None
    assert easy.p < 0.05 and hard.p > 0.95
    assert hard.reached == [None, None, None] and not hard.steps_to_target
    run = attnlm.open_run(root / "wide-1")
    records = run.evaluations()
    between = (records[1].val_loss + records[2].val_loss) / 2
    found = of("wide-1", "wide-2", target=between, root=root).groups[0]
    if records[0].val_loss > between:
        assert found.reached == [pytest.approx(3.0)] and found.p is None


def test_the_facts_and_the_tables_hold_every_loss_by_seed(root: Path, tmp_path: Path) -> None:
    found = of("narrow-*", "wide-*", root=root)
    facts = json.loads(json.dumps(found.facts()))
    first = facts["groups"][0]
    about = {"seed": 2, "val_loss": loss("narrow-2", root), "step": 8, "accuracy": None}
    assert about.items() <= first["runs"]["narrow-2"].items()
    assert (first["failed"], first["text"], first["p_of_target"], facts["ladder"]) == (None,) * 4
    assert facts["differences"] == {"embed_dim": {"narrow-*": 4, "wide-*": 16}}
    (pair,) = facts["comparisons"]
    assert pair["groups"] == ["wide-*", "narrow-*"]
    assert {"difference", "interval", "p", "verdict", "seeds_needed", "paired"} <= pair.keys()
    found.save(tmp_path / "losses.csv")
    rows = list(csv.DictReader((tmp_path / "losses.csv").read_text().splitlines()))
    assert [(row["run"], float(row["val_loss"])) for row in rows[:3]] == [
        (f"narrow-{seed}", loss(f"narrow-{seed}", root)) for seed in SEEDS
    ]
    header, (row,) = found.pair_table()
    assert len(header) == len(row) and row[0] == "wide-*"
    latex = found.save(tmp_path / "verdicts.tex").read_text()
    assert latex.startswith(rf"\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}")
    assert "narrow-*" in latex and latex.count(r" \\") == 2
    assert not re.search(r"(^|[ (\[])-\d", latex)  # a minus, not a hyphen


def test_curves_are_drawn_for_a_paper(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnlm.see.comparison.picture", picture)
    found = of("narrow-*", "wide-*", root=root)
    for kind, start in {"svg": b"<?xml", "pdf": b"%PDF", "png": b"\x89PNG"}.items():
        assert found.save(tmp_path / f"curves.{kind}").read_bytes().startswith(start)


@pytest.mark.parametrize(
    ("groups", "options", "message"),
    [
        ((), {}, "no group of runs"),
        (("narrow-*",), {}, "there is only one group"),
        (("narrow-*", "narrow-*"), {}, "there is only one group"),
        (("narrow-*", "narrow-1,wide-1"), {}, "narrow-1 is in two groups"),
        (("narrow-*", "wide-1"), {}, "wide-1 has one run"),
        (("narrow-*", "wide-*"), {"measure": "los"}, "invalid value for `measure`"),
        (("narrow-*", "wide-*"), {"measure": "accuracy"}, "has no accuracy"),
        (("narrow-*", "wide-*"), {"baseline": "wide"}, "'wide' is no group"),
        (("narrow-*", "wide-*"), {"target": float("nan")}, "invalid value for `target`: nan"),
        (("narrow-1", "wide-1"), {"measure": "accuracy"}, "has one run, and so no spread"),
        (("narrow-1", "wide-1"), {"baseline": "wide-1"}, "has one run, and so no spread"),
    ],
)
def test_what_cannot_be_compared_is_a_usage_error(
    groups: tuple[str, ...], options: dict[str, Any], message: str, root: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        of(*groups, root=root, **options)


def test_missing_copied_and_unfinished_runs_are_refused_by_name(root: Path, tmp_path: Path) -> None:
    with pytest.raises(AttnlmError, match=r"no run in .* matches 'none-\*'"):
        of("none-*", "wide-*", root=root)
    with pytest.raises(AttnlmError, match="not found"):
        of("wide-9", "wide-1", root=root)
    for name in ("narrow-1", "narrow-2", "wide-1", "wide-2"):
        shutil.copytree(root / name, tmp_path / name)
    shutil.copytree(root / "wide-2", tmp_path / "wide-copy")
    with pytest.raises(UsageError, match="wide-2 and wide-copy have the same seed and settings"):
        of("narrow-*", "wide-*", root=tmp_path)
    shutil.rmtree(tmp_path / "wide-copy")
    shutil.copytree(root / "wide-3", tmp_path / "lost")
    (tmp_path / "lost" / "metrics.jsonl").unlink()
    for options in ({}, {"target": 2.0}):
        with pytest.raises(AttnlmError, match="lost"):
            of("narrow-*", "lost", root=tmp_path, **options)
    shutil.rmtree(tmp_path / "lost")
    dataset = attnlm.open_run(root / "wide-1").dataset.path
    attnlm.train(
        dataset,
        **{**QUICK, "steps": 5, "name": "wide-3"},
        model="multi-head",
        checkpoint_dir=tmp_path,
    )
    (tmp_path / "wide-3" / "last.safetensors").unlink()
    with pytest.raises(UsageError, match="wide-3 is not finished"):
        of("narrow-*", "wide-*", root=tmp_path)


def test_losses_of_a_part_of_the_split_are_not_compared_with_those_of_the_whole(
    root: Path, tmp_path: Path
) -> None:
    dataset = attnlm.open_run(root / "wide-1").dataset.path
    for seed in SEEDS[:2]:
        given = {**QUICK, "seed": seed, "name": f"part-{seed}", "eval_tokens": 24}
        run = attnlm.train(dataset, checkpoint_dir=tmp_path, model="multi-head", **given)
        (run.path / "metrics.jsonl").write_text(
            "".join(f"{json.dumps(m)}\n" for m in run.metrics() if not m.get("checkpoint"))
        )
    parts = [attnlm.open_run(tmp_path / f"part-{seed}") for seed in SEEDS[:2]]
    result = parts[0].result()
    assert result is not None and result.part
    with pytest.raises(UsageError, match="different validation splits, parts of it"):
        of("wide-1,wide-2", parts, root=root)


def test_a_target_alone_and_a_rung_of_two_ladders_have_names_of_their_own(
    root: Path, tmp_path: Path
) -> None:
    found = of("wide-*", target=9.0, root=root)
    assert found.verdict.startswith("wide-*: the probability of such a mean at the target is")
    for name in ("one", "two"):
        attnlm.ladder(
            "fruits-char", rungs=["bigram"], steps=2, seeds=2, seed=len(name), tokens=1, name=name,
            checkpoint_dir=tmp_path, data_dir=root.parent / "data",
        )  # fmt: skip
    assert [group.name for group in of("one", "two", root=tmp_path).groups] == [
        "one:bigram",
        "two:bigram",
    ]


def test_other_training_data_are_a_warning(root: Path) -> None:
    runs = [attnlm.open_run(root / f"wide-{seed}") for seed in SEEDS]
    other = [replace(run, dataset=replace(run.dataset, train_sha256="0" * 64)) for run in runs]
    found = of("narrow-*", other, root=root)
    assert "trained on other data than narrow-*: wide-1,wide-2,wide-3" in found.warnings
    assert not found.pairs[0].paired
    assert not any("other data" in said for said in of("narrow-*", "wide-*", root=root).warnings)


@pytest.mark.parametrize("measure", ["loss", "accuracy"])
def test_other_data_are_refused(measure: str, root: Path, tmp_path: Path) -> None:
    dataset = prepared(tmp_path, FRUITS[::-1])
    for seed in SEEDS[:2]:
        quick_run(dataset, seed=seed, name=f"other-{seed}")
    others = [attnlm.open_run(tmp_path / "checkpoints" / f"other-{seed}") for seed in SEEDS[:2]]
    with pytest.raises(UsageError, match="measured on different validation splits"):
        of("wide-1,wide-2", others, measure=measure, root=root)


def test_the_command_prints_verdicts_and_writes_a_page(root: Path, tmp_path: Path) -> None:
    words = ["compare", "narrow-*", "wide-*", "--checkpoint-dir", str(root)]
    done = command(*words, "-o", "page.html", cwd=tmp_path)
    (pair,) = of("narrow-*", "wide-*", root=root).pairs
    assert re.search(rf"wide-\* +narrow-\* +{pair.verdict}", done.stdout)
    assert done.stdout.endswith("page.html\n")
    page = elements((tmp_path / "page.html").read_bytes()).text
    assert "narrow-*, wide-* compared" in page and pair.verdict in page
    assert "In what they differ" in page and "embed_dim" in page
    assert "attnlm compare 'narrow-*' 'wide-*'" in page
    facts = json.loads(command(*words, "--json", "--target", "9", cwd=tmp_path).stdout)
    assert facts["groups"][0]["p_of_target"] < 0.05
    assert facts["groups"][0]["reached_mean"] == 0.0


def test_a_browser_draws_the_curves_of_the_groups(root: Path, tmp_path: Path, browser: Any) -> None:
    path = tmp_path / "page.html"
    of("narrow-*", "wide-*", root=root).save(path)
    check_fits(browser, path, "compare")
    with opened(browser, path) as view:
        assert view.locator("svg.chart path").count() >= 2
        assert view.evaluate("attnlm.models.map((model) => model.name)") == ["narrow-*", "wide-*"]
