"""Tools that follow a training: what they get, where it goes on, and that none stops a run."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import attnlm
from attnlm import Dataset, Note, Run
from attnlm.base import files
from attnlm.cli.event_printer import Display
from attnlm.see import loggers
from attnlm.training import loop
from attnlm.training.schedule import learning_rate
from tests.kit import command, fails, quick_run

train = partial(quick_run, model="single-head", steps=6, eval_every=3)


@pytest.fixture(autouse=True)
def _reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train with reports at every step."""
    monkeypatch.setattr(loop, "_SECONDS_BETWEEN_REPORTS", 0.0)


class Kept:
    """A tool that keeps what it gets."""

    made: list[Kept]

    def __init__(self, run: Run, id: str, first_step: int) -> None:
        self.id, self.first_step = id, first_step
        self.got: list[tuple[int, str, Any]] = []
        self.ended: bool | None = None
        self.made.append(self)
        sys.stdout.write("a word from a tool\n")

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self.got += [(step, *item) for item in values.items()]

    def close(self, is_finished: bool) -> None:
        self.ended = is_finished

    def series(self, name: str) -> dict[int, Any]:
        return {step: value for step, got, value in self.got if got == name}


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> type[Kept]:
    """Replace the tool `json`, a package that is always installed."""
    monkeypatch.setitem(loggers.TOOLS, "json", Kept)
    Kept.made = []
    return Kept


def test_a_tool_gets_numbers_and_samples(
    dataset: Dataset, kept: type[Kept], capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(dataset, log="json")
    (tool,) = kept.made
    records = {r["step"]: r for r in run.metrics()}
    assert tool.series("loss/validation") == {step: r["val_loss"] for step, r in records.items()}
    assert tool.series("loss/train") == {step: records[step]["train_loss"] for step in (3, 6)}
    rates = {step: learning_rate(step, run.config.training) for step in range(1, 7)}
    assert tool.series("learning_rate") == rates
    told = [(step, name) for step, name, _ in tool.got]
    assert len(told) == len(set(told))
    for name in ("loss/batch", "gradient_norm", "tokens_per_second"):
        assert list(tool.series(name)) == [1, 2, 3, 4, 5, 6]
        assert all(value > 0 for value in tool.series(name).values())
    texts = {snapshot.step: snapshot.text for snapshot in run.ticker() if snapshot.step != 1}
    assert tool.series("sample") == texts
    assert (tool.first_step, tool.ended) == (0, True)
    assert capsys.readouterr().out == ""


def test_a_resumed_run_continues_the_log_of_the_tools_that_are_named_again(
    dataset: Dataset, kept: type[Kept]
) -> None:
    run = train(dataset, log=["json"])
    attnlm.train(resume=run, steps=7)
    assert len(kept.made) == 1
    attnlm.train(resume=run, steps=9, log="json")
    first, second = kept.made
    assert (second.id, second.first_step) == (first.id, 7)
    assert list(second.series("loss/batch")) == [8, 9]
    assert not (train(dataset).path / "logs.json").exists()


@pytest.mark.parametrize("name", ["json", ".json", "json/inner", "json/inner/file"])
def test_a_logger_writes_nothing_through_a_link_out_of_its_folder(
    name: str, dataset: Dataset, tmp_path: Path, kept: type[Kept]
) -> None:
    run = train(dataset)
    link = run.path / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(tmp_path)
    notes: list[object] = []
    attnlm.train(resume=run, steps=7, log="json", on_event=notes.append)
    assert not kept.made and any(str(link) in n.text for n in notes if isinstance(n, Note))
    link.unlink()
    (run.path / "json").mkdir(exist_ok=True)
    (run.path / "json" / "latest").symlink_to("run-1")  # as tools make them
    attnlm.train(resume=run, steps=8, log="json")
    assert kept.made


@pytest.mark.parametrize("failing", ["__init__", "log", "close"])
def test_a_tool_that_fails_stops_nothing(
    failing: str, dataset: Dataset, kept: type[Kept], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no such server\nat all")

    monkeypatch.setitem(loggers.TOOLS, "os", type("Broken", (Kept,), {failing: fail}))
    events: list[object] = []
    run = train(dataset, log=["os", "json"], on_event=events.append)
    (note,) = (event for event in events if isinstance(event, Note))
    assert note.text == "os failed and no longer logs this run: no such server"
    assert run.last.read_bytes() == train(dataset).last.read_bytes()
    other = kept.made[-1]
    assert list(other.series("loss/validation")) == [0, 3, 6] and other.ended


def test_interrupted_training_closes_tools_and_long_training_logs_few_points(
    dataset: Dataset, kept: type[Kept], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(event: object) -> None:
        if isinstance(event, attnlm.Evaluated) and event.step == 9:
            raise KeyboardInterrupt

    monkeypatch.setattr(loggers, "_MOST_POINTS", 3)
    with pytest.raises(KeyboardInterrupt):
        train(dataset, log=["json"], steps=12, on_event=stop)
    assert kept.made[0].ended is False
    assert list(kept.made[0].series("loss/batch")) == [1, 5, 9]


def test_a_damaged_record_stops_nothing(dataset: Dataset, kept: type[Kept]) -> None:
    run = train(dataset)
    files.write_json(run.path / "logs.json", {"id": "x"})
    notes: list[object] = []
    attnlm.train(resume=run, steps=7, log="json", on_event=notes.append)
    assert any(isinstance(n, Note) and "logs.json is not valid: its '" in n.text for n in notes)
    assert not kept.made


def test_a_missing_tool_is_reported_before_the_run_is_created(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    missing = {"says": "wandb, which is", "hints": "pip install wandb"}
    fails("train", dataset.path, "--log", "wandb", cwd=tmp_path, code=1, **missing)
    assert not (tmp_path / "checkpoints").exists()


def test_several_tools_can_be_named(
    dataset: Dataset, tmp_path: Path, kept: type[Kept], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(loggers.TOOLS, "os", Kept)
    sizes = ("--steps", 2, "--block-size", 8, "--batch-size", 2, "--model", "bigram")
    done = command("train", dataset.path, "--log", "json, os", *sizes, cwd=tmp_path)
    assert "a word from a tool" in done.stderr
    assert done.stdout.splitlines() == ["checkpoints/bigram-001"]
    command("train", "--resume", "bigram-001", "--steps", 3, cwd=tmp_path)
    assert len(kept.made) == 2


def test_tensorboard_reads_what_was_written(
    dataset: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train(dataset, log="tensorboard")
    killed = loggers.tensorboard(run, "", 0)  # a process that was killed before it saved
    killed.log(8, {"loss/batch": 99.0})
    killed.close(False)
    attnlm.train(resume=run, steps=9, log="tensorboard", on_event=Display())
    assert f"tensorboard --logdir {run.path.parent}" in capsys.readouterr().err
    read = EventAccumulator(str(run.path / "tensorboard"))
    read.Reload()
    found = {point.step: point.value for point in read.Scalars("loss/validation")}
    assert found == pytest.approx({r["step"]: r["val_loss"] for r in run.metrics()})
    assert [p.step for p in read.Scalars("loss/batch")] == [*range(1, 10)]
    assert 99.0 not in [p.value for p in read.Scalars("loss/batch")]
    sample = read.Tensors("sample/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert sample == "".join(f"    {line}\n" for line in run.ticker()[-1].text.split("\n"))


def test_wandb_offline_continues_with_a_resumed_run(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    notes: list[object] = []
    run = train(dataset, log="wandb", on_event=notes.append)
    id = files.read_json(run.path / "logs.json")["id"]
    assert len(list(run.path.glob(f"wandb/offline-run-*-{id}/run-{id}.wandb"))) == 1
    attnlm.train(resume=run, steps=7, log="wandb", on_event=notes.append)
    assert not [n for n in notes if isinstance(n, Note)]


def test_trackio_on_this_machine(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("trackio", reason="trackio is not installed")
    run = train(dataset, log="trackio")
    id = files.read_json(run.path / "logs.json")["id"]
    assert (tmp_path / "trackio" / "attnlm.db").exists()
    media = tmp_path / "trackio" / "media" / "attnlm" / f"{run.name}-{id}"
    assert {"0", "3", "6"} <= {path.name for path in media.iterdir()}
