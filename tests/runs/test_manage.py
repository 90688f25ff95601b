"""`list`, and `compare` of two runs, in folders with any other files."""

from __future__ import annotations

import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import attnlm
from attnlm.base.folders import locked_for_training
from attnlm.base.heads import head_names
from attnlm.cli.console import print_table
from attnlm.config.recipes import list_recipes, load_sizes, recipe_names
from attnlm.runs.ladder_plan import LadderPlan
from attnlm.runs.records import DatasetFacts
from tests.kit import QUICK, command, on_a_terminal, quick_run
from tests.models import FRUITS, places, prepared


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data set fruits-char and the runs `first` and `second`, its child."""
    folder = tmp_path_factory.mktemp("project")
    data = prepared(folder)
    first = quick_run(data, "bigram", block_size=8, name="first")
    attnlm.train(
        data,
        start_from=first,
        **{**QUICK, "block_size": 8, "seed": 2},
        name="second",
        **places(folder),
    )
    return folder


@pytest.fixture
def project(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "project")
    return tmp_path / "project"


def listed(project: Path, *arguments: str) -> Any:
    return json.loads(command("list", *arguments, "--json", cwd=project).stdout)


def test_runs_data_sets_recipes_and_heads_are_listed(project: Path) -> None:
    facts = listed(project)
    assert list(facts) == ["runs", "datasets", "recipes", "heads"]
    second, first = facts["runs"]
    assert (second["name"], second["parent"]) == ("second", "first")
    assert second["is_latest"] and not first["is_latest"] and first["parent"] is None
    metrics = attnlm.open_run(project / "checkpoints" / "first").metrics()
    assert first["val_loss"] == min(record["val_loss"] for record in metrics)
    folder = project / "checkpoints" / "first"
    assert first["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    assert (first["step"], first["steps"], first["model"]) == (4, 4, "bigram")
    (dataset,) = facts["datasets"]
    assert dataset["train_tokens"] == attnlm.open_dataset(project / dataset["path"]).train_tokens
    recipes = listed(project, "recipes")["recipes"]
    assert facts["recipes"] == recipes
    assert [entry["name"] for entry in recipes] == recipe_names()
    done = command("list", cwd=project)
    for text in ("second*", "fruits-char", " ago"):
        assert text in done.stdout, text
    assert "shakespeare-best" not in done.stdout  # which would scroll the runs away
    assert [entry["name"] for entry in facts["heads"]] == head_names()
    for kind in facts:
        assert list(listed(project, kind)) == [kind]


def test_files_in_folders_count_and_imported_runs_have_no_result(project: Path) -> None:
    first = project / "checkpoints" / "first"
    before = listed(project, "runs")["runs"][1]["bytes"]
    (first / "tensorboard").mkdir()
    (first / "tensorboard" / "events").write_bytes(bytes(1000))
    assert listed(project, "runs")["runs"][1]["bytes"] == before + 1000
    run = attnlm.open_run(first)
    replace(run, imported_from="elsewhere").save_config()
    (first / "metrics.jsonl").unlink()
    imported = next(e for e in listed(project, "runs")["runs"] if e["name"] == "first")
    assert imported["imported_from"] == "elsewhere" and imported["problem"] is None
    assert imported["val_loss"] is None and imported["steps"] is None
    assert "from elsewhere" in command("list", "runs", cwd=project).stdout
    done = command("compare", "first", "second", cwd=project)
    assert "elsewhere" in done.stdout


def test_empty_lists_are_not_an_error(tmp_path: Path) -> None:
    done = command("list", "runs", cwd=tmp_path)
    assert done.stdout == "" and "train one: attnlm train" in done.stderr
    assert listed(tmp_path, "datasets") == {"datasets": []}


def test_other_files_do_not_stop_a_list(project: Path) -> None:
    runs, data = project / "checkpoints", project / "data"
    (runs / "notes").mkdir()
    (runs / ".unfinished-x").mkdir()
    (runs / "broken").mkdir()
    (runs / "broken" / "config.json").write_text("{")
    shutil.copytree(runs / "first", runs / "cut")
    (runs / "cut" / "metrics.jsonl").write_bytes(b"\xff\n")
    shutil.copytree(runs / "first", runs / "bare")
    (runs / "bare" / "config.json").unlink()
    (runs / "nowhere").symlink_to("/nonexistent/run")
    (runs / "linked").symlink_to(runs / "first")
    (runs / "latest").write_text("gone\n")
    (data / "odd\x1b[2J").mkdir()
    (data / "odd\x1b[2J" / "meta.json").write_text("[]")
    shutil.copytree(data / "fruits-char", data / "short")
    (data / "short" / "val.bin").write_bytes(b"1")

    facts = listed(project)
    runs_found = {entry["name"]: entry for entry in facts["runs"]}
    problems = {name for name, entry in runs_found.items() if entry["problem"]}
    assert problems == {"broken", "cut", "bare"}
    assert runs_found.keys() - problems == {"first", "second", "linked"}
    assert "config.json" in runs_found["broken"]["problem"]
    assert runs_found["linked"]["val_loss"] == runs_found["first"]["val_loss"]
    assert runs_found["linked"]["link"] == str(runs / "first") and not runs_found["linked"]["bytes"]
    assert {e["name"]: bool(e["problem"]) for e in facts["datasets"]} == {
        "fruits-char": False,
        "short": True,
        "odd\x1b[2J": True,
    }
    done = command("list", cwd=project)
    assert "skipped (not a run): notes, nowhere" in done.stderr
    assert "unreadable  broken: " in done.stderr and "\x1b" not in done.stdout + done.stderr


def test_lists_mark_ladders_and_running_jobs(project: Path) -> None:
    runs = project / "checkpoints"
    (runs / "ladder-001").mkdir()
    sizes: dict[str, Any] = {"seed": 1, "steps": 4, "eval_every": 4, "block_size": 8}
    data = DatasetFacts(name="fruits-char")
    plan = LadderPlan(dataset=data, rungs=("bigram", "average"), **sizes)
    plan.write(runs / "ladder-001")
    for rung in ("bigram", "average"):
        shutil.copytree(runs / "first", runs / f"ladder-001-{rung}")
    with locked_for_training(project / "checkpoints" / "second", "wait"):
        found = {entry["name"]: entry for entry in listed(project, "runs")["runs"]}
        assert "second is being trained now" in command("list", "runs", cwd=project).stderr
    assert found["ladder-001"]["kind"] == "ladder"
    assert found["ladder-001"]["rungs"] == ["ladder-001-bigram", "ladder-001-average"]
    assert [name for name, entry in found.items() if entry["is_training"]] == ["second"]


def test_two_runs_are_compared(project: Path) -> None:
    facts = json.loads(command("compare", "first", "second", "--json", cwd=project).stdout)
    parent = {"first": None, "second": "first, best checkpoint (step 4)"}
    assert facts["differences"] == {"seed": {"first": 1, "second": 2}, "parent": parent}
    runs = {name: attnlm.open_run(project / "checkpoints" / name) for name in ("first", "second")}
    losses = {n: min(r["val_loss"] for r in run.metrics()) for n, run in runs.items()}
    found = {group["name"]: group["runs"][group["name"]] for group in facts["groups"]}
    assert {name: run["val_loss"] for name, run in found.items()} == losses
    assert {run["step"] for run in found.values()} == {4} and not facts["notes"]
    shown = command("compare", "first", "second", cwd=project).stdout.splitlines()
    assert shown[0].split() == ["difference", "first", "second"]
    assert shown[1].split() == ["seed", "1", "2"]
    (project / "other.txt").write_text(FRUITS.upper()[::-1])
    command("prepare", "other.txt", cwd=project)
    command("train", "--steps", "2", "--block-size", "8", "--name", "other", cwd=project)
    told = command("compare", "first", "other", cwd=project).stderr
    assert "bits per byte" in told and "different validation splits" in told


def test_a_table_leaves_out_empty_columns_and_wraps_on_a_terminal(project: Path) -> None:
    header, texts = ("run", "loss", "data", "size"), ("run", "data")
    print_table(header, [("a", "", "b", "20 MB")], texts, written := io.StringIO())
    assert written.getvalue() == "run  data   size\na    b     20 MB\n"
    shown = re.sub(r"\x1b\[[\d;]*m", "", on_a_terminal("list", "runs", cwd=project, COLUMNS="55"))
    table = shown.partition("* what")[0]
    assert "second*" in table and max(map(len, table.splitlines())) <= 55


def test_every_recipe_has_a_purpose_and_only_figures_of_the_documents() -> None:
    documented = (Path(__file__).parents[2] / "docs" / "train.md").read_text()
    for entry in list_recipes():
        assert 10 < len(entry.purpose) <= 40 and "about" not in load_sizes(entry.name)[0]
        row = next(line for line in documented.splitlines() if line.startswith(f"| `{entry.name}`"))
        if entry.val_loss is not None:
            assert f"{entry.val_loss:.3f}" in row
        if entry.val_loss_range is not None:
            assert "({:.3f}–{:.3f}".format(*entry.val_loss_range) in row
        if entry.seconds_range is not None:
            assert all(f"{seconds:,}" in row for seconds in entry.seconds_range)


def test_only_a_table_about_a_recipe_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('steps = 5\n[about]\npurpose = "mine"\n')
    assert load_sizes(str(tmp_path / "mine.toml"))[0] == {"steps": 5}
