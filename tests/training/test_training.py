"""Training in process: what it learns, what it records, and that stopping changes nothing."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import re
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attnlm
from attnlm.base import files
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import Note
from attnlm.base.setting_fields import Setting
from attnlm.base.signals import Interrupted
from attnlm.compute.device import choose_device
from attnlm.compute.threads import threads_of_torch
from attnlm.data.dataset import Dataset, sampled_hash
from attnlm.runs.checkpoint import load_checkpoint, save_checkpoint
from attnlm.runs.run import Run
from attnlm.training import reporter
from attnlm.training.events import Evaluated, Finished, Started, Stepped
from attnlm.training.optimizer import Optimizer
from attnlm.training.state import load_or_init_state
from tests.kit import command
from tests.models import FRUITS, assert_same_run, prepared, timeless

SMALL: dict[str, Setting] = {"block_size": 8, "batch_size": 4, "steps": 12, "eval_every": 5}
SMALL |= {"seed": 1, "device": "cpu"}
FEW_LAYERS: dict[str, Setting] = {"layers": 2, "heads": 2, "embed_dim": 16}


@pytest.fixture
def trained(dataset: Dataset, tmp_path: Path) -> Any:
    """Return a function that trains with SMALL and the given settings."""

    def train(**settings: Any) -> Run:
        sizes = FEW_LAYERS if settings.get("model") == "transformer" else {}
        folder, given = tmp_path / "checkpoints", SMALL | sizes | settings
        return attnlm.train(dataset.path, checkpoint_dir=folder, **given)

    return train


def test_a_run_records_and_reports_its_losses_and_steps(
    trained: Any, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter, "_SECONDS_BETWEEN_REPORTS", 0.0)
    monkeypatch.setattr(reporter, "_REPORT_FRACTION", math.inf)
    losses: dict[int, float] = {}
    events: list[object] = []
    run = trained(
        on_step=lambda step, loss: losses.update({step: loss.item()}), on_event=events.append
    )
    records = run.metrics()
    assert [record["step"] for record in records] == [0, 5, 10, 12]
    assert list(losses) == list(range(1, 13)) and records[0]["train_loss"] is None
    for before, record in itertools.pairwise(records):
        assert record.keys() == {
            *("step", "tokens", "seconds", "train_loss", "val_loss", "evaluated_tokens"),
            *("bits_per_byte", "accuracy", "learning_rate", "tokens_per_second"),
        }
        bits = record["val_loss"] / math.log(2) * dataset.val_tokens / dataset.val_bytes
        assert record["bits_per_byte"] == pytest.approx(bits)
        made = [losses[step] for step in range(before["step"] + 1, record["step"] + 1)]
        assert record["train_loss"] == pytest.approx(sum(made) / len(made), rel=1e-5)
        assert record["evaluated_tokens"] == dataset.val_tokens - 1
    # A linear schedule over 12 steps takes its last step with a twelfth of the rate.
    assert records[-1]["learning_rate"] == pytest.approx(run.config.training.learning_rate / 12)
    assert run.config.training.eval_tokens is None and run.evaluated_part == ""
    assert run.whole() == {} and not (run.path / "whole.json").exists()

    assert isinstance(events[0], Started) and events[0].run == run
    assert isinstance(events[-1], Finished) and not events[-1].out_of_patience
    evaluated = [event for event in events if isinstance(event, Evaluated)]
    assert [{name: getattr(e, name) for name in records[0]} for e in evaluated] == records
    stepped = [event for event in events if isinstance(event, Stepped)]
    assert {event.step: event.loss for event in stepped} == losses
    assert [event.step for event in stepped if event.seconds_left <= 0] == [12]


def test_the_same_configuration_gives_the_same_bytes(trained: Any) -> None:
    """And the caller's random state stays as it was."""
    settings = {"model": "transformer", "dropout": 0.2}
    before = torch.get_rng_state()
    one, other = trained(**settings), trained(**settings)
    assert torch.equal(torch.get_rng_state(), before)
    assert one.last.name == other.last.name and one.path != other.path
    assert_same_run(one, other)
    assert timeless(trained(**settings, seed=2).path) != timeless(one.path)


def test_recomputed_gradients_are_the_same(trained: Any) -> None:
    settings = {"model": "transformer", "dropout": 0.3, "threads": 2}
    first, second = (
        dict(trained(**settings, recompute=recompute).model(checkpoint="last").named_parameters())
        for recompute in (False, True)
    )
    for name, values in first.items():
        assert torch.equal(values, second[name])
    with pytest.raises(UsageError, match="bigram does not support `recompute`"):
        trained(model="bigram", recompute=True)


class StopAt:
    """A listener that sends us a signal once an evaluation at or after `step` is reported."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, event: object) -> None:
        if isinstance(event, Evaluated) and event.step >= self.step:
            self.step = 10**9
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    "settings",
    [
        {"model": "multi-head", "optimizer": "adamw", "dropout": 0.3},
        {"model": "wide-head", "optimizer": "muon", "dropout": 0.3},
        {"model": "transformer", "optimizer": "muon", "dropout": 0.3},
        {"model": "bigram", "dtype": "bfloat16"},
        *(
            {"model": model, "dtype": "bfloat16", "embed_dim": 16}
            for model in ("multi-head", "transformer", "gpt2")
        ),
    ],
    ids=str,
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    settings: dict[str, Any], trained: Any, tmp_path: Path
) -> None:
    """Evaluation and sampling agree, too."""
    whole = trained(**settings)
    with pytest.raises(Interrupted):
        trained(**settings, name="stopped", on_event=StopAt(5))
    resumed = attnlm.train(resume=tmp_path / "checkpoints" / "stopped")
    assert_same_run(whole, resumed)
    losses = [record["val_loss"] for record in whole.metrics()]
    assert losses[-1] < losses[0]
    assert resumed.config.training.dtype == settings.get("dtype", "float32")
    assert attnlm.evaluate(resumed, checkpoint="last").loss == losses[-1]
    (text,) = attnlm.samples(resumed, num_samples=1, tokens=20, seed=1)
    assert text == attnlm.samples(whole, num_samples=2, tokens=20, seed=1)[0] and len(text) == 20


def test_stopping_between_evaluations_keeps_the_last_complete_step(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"model": "single-head", "dropout": 0.3, "weight_decay": 0.1}
    whole = trained(**settings)
    original: Any = torch.Tensor.backward
    calls = 0

    def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        nonlocal calls
        original(self, *args, **kwargs)
        calls += 1
        if calls == 8:  # within the eighth step, before its update
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    with pytest.raises(Interrupted) as caught:
        trained(**settings, name="stopped")
    monkeypatch.undo()
    assert caught.value.signum == signal.SIGTERM
    stopped = attnlm.open_run(tmp_path / "checkpoints" / "stopped")
    assert [record["step"] for record in stopped.metrics()] == [0, 5]
    facts, _, _ = load_checkpoint(stopped.last, stopped.config.spec, stopped.vocab_size)
    assert 5 < facts["step"] < 10  # beyond the last evaluation
    # The count of seconds goes on from where it was stopped, though no checkpoint holds it.
    assert stopped.stopped_after >= stopped.metrics()[-1]["seconds"]
    replace(stopped, stopped_after=1000.0).save_config()
    resumed = attnlm.train(resume=stopped.path)
    assert resumed.metrics()[1]["seconds"] < 1000 < resumed.metrics()[2]["seconds"]
    assert_same_run(whole, resumed)


@pytest.mark.parametrize(
    ("settings", "stop", "which", "read"),
    [
        ({}, 3, "auto", "step 3, no evaluation recorded (last)"),
        ({}, 3, "best", "step 0, validation loss {:.4f} (best)"),
        ({}, 7, "auto", "step 5, validation loss {:.4f} (best)"),
        ({}, 7, "last", "step 7, no evaluation recorded (last)"),
        ({"eval_every": 100}, 3, "auto", "step 3, no evaluation recorded (last)"),
    ],
)
def test_auto_selects_last_until_a_trained_checkpoint_is_evaluated(
    settings: dict[str, Any],
    stop: int,
    which: str,
    read: str,
    trained: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The best of a training that was stopped early may be of step 0, or not be there."""
    original = Optimizer.update

    def update(self: Optimizer, number: int, **options: Any) -> None:
        original(self, number, **options)
        if number == stop - 1:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Optimizer, "update", update)
    with pytest.raises(Interrupted):
        trained(model="bigram", name="stopped", **settings)
    run = attnlm.open_run(tmp_path / "checkpoints" / "stopped")
    losses = {record["step"]: record["val_loss"] for record in run.metrics()}
    chosen = run.checkpoint(which)
    assert str(chosen) == read.format(losses.get(chosen.step))
    texts = [
        "".join(attnlm.sample(run, tokens=20, seed=1, device="cpu", checkpoint=asked))
        for asked in (which, chosen.which)
    ]
    assert texts[0] == texts[1]


def test_a_second_signal_within_a_step_saves_nothing(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trained()
    original = Optimizer.update

    def update(self: Optimizer, number: int, **options: Any) -> None:
        if number == 7:
            signal.raise_signal(signal.SIGINT)
        original(self, number, **options)
        if number == 7:  # the weights are new, and the step is not counted yet
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Optimizer, "update", update)
    with pytest.raises(KeyboardInterrupt) as caught:
        trained(name="stopped")
    monkeypatch.undo()
    assert not isinstance(caught.value, Interrupted)
    assert_same_run(whole, attnlm.train(resume=tmp_path / "checkpoints" / "stopped"))


def test_a_full_disk_is_reported_with_the_file_and_the_last_step(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # it does not say where

    def fill(event: object) -> None:
        if isinstance(event, Evaluated) and event.step == 5:
            monkeypatch.setattr(os, "fsync", full)

    with pytest.raises(AttnlmError) as caught:
        trained(name="full", on_event=fill)
    path = tmp_path / "checkpoints" / "full"
    # What is written next.
    assert caught.value.message == f"cannot write {path / 'metrics.jsonl'}: No space left on device"
    assert "attnlm train --resume full" in caught.value.hint
    assert f"{path / 'last.safetensors'} has step 5" in caught.value.hint


@pytest.mark.parametrize("listener", ["on_event", "on_step"])
def test_an_error_of_a_listener_is_not_reported_as_ours(listener: str, trained: Any) -> None:
    def fail(*arguments: object) -> None:
        raise ConnectionResetError(errno.ECONNRESET, "the server has gone")

    with pytest.raises(ConnectionResetError, match="the server has gone"):
        trained(**{listener: fail})


@pytest.mark.skipif(sys.platform == "win32", reason="Windows moves no folder with open files")
def test_a_run_whose_folder_was_moved_stops_with_one_line(trained: Any, tmp_path: Path) -> None:
    path, moved = tmp_path / "checkpoints" / "z", tmp_path / "moved"

    def lose(event: object) -> None:
        if isinstance(event, Evaluated):
            path.rename(moved)

    with pytest.raises(AttnlmError, match=r"cannot write .*: No such file") as caught:
        trained(name="z", on_event=lose)
    assert "check that the path still exists" in caught.value.hint
    assert not path.exists()
    assert attnlm.open_run(moved).metrics()[-1]["step"] == 0
    attnlm.train(resume=moved)


@pytest.mark.parametrize("then", ["prepared again", "removed"])
def test_a_training_goes_on_with_data_that_were_replaced(
    then: str, dataset: Dataset, tmp_path: Path
) -> None:
    folder = shutil.copytree(dataset.path, tmp_path / "data")

    def replace(event: object) -> None:
        if isinstance(event, Evaluated) and event.step == 5:
            shutil.rmtree(folder)
            if then == "prepared again":
                folder.mkdir()
                (folder / "train.bin").write_bytes(b"")

    settings: dict[str, Any] = {**SMALL, "checkpoint_dir": tmp_path / "checkpoints"}
    run = attnlm.train(folder, on_event=replace, **settings)
    assert run.metrics()[-1]["step"] == 12


def test_folders_that_the_user_keeps_elsewhere_work_through_links(
    trained: Any, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "checkpoints").symlink_to("disk")
    run = trained(name="mine")
    run.path.resolve().rename(tmp_path / "elsewhere")
    run.path.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    (tmp_path / "elsewhere" / "tokenizer.json").symlink_to(tmp_path / "tokenizer.json")
    attnlm.train(resume="mine", checkpoint_dir=tmp_path / "checkpoints", steps=14)
    assert attnlm.open_run(tmp_path / "elsewhere").metrics()[-1]["step"] == 14
    opened = attnlm.open_run("mine", checkpoint_dir=tmp_path / "checkpoints")
    assert len("".join(attnlm.sample(opened, tokens=5, seed=1, device="cpu"))) == 5


def test_the_settings_of_a_run_are_a_recipe(trained: Any) -> None:
    run = trained(name="first", model="transformer", dropout=0.1)
    again = trained(name="again", recipe=run.config.settings())
    assert again.config == run.config
    assert timeless(again.path) == timeless(run.path)


def test_exist_ok_accepts_a_finished_run(trained: Any, dataset: Dataset, tmp_path: Path) -> None:
    run = trained(name="mine")
    content = run.last.read_bytes()
    with pytest.raises(AttnlmError, match="exists") as caught:
        trained(name="mine")
    assert "`exist_ok`" in caught.value.hint
    told: list[str] = []
    again = trained(name="mine", exist_ok=True, on_event=lambda event: told.append(str(event)))
    assert again.path == run.path and run.last.read_bytes() == content
    assert told == ["mine exists, is finished, and has this configuration: nothing to train"]
    with pytest.raises(AttnlmError, match="`learning_rate` differs"):
        trained(name="mine", exist_ok=True, learning_rate=0.5)
    trained(name="new", exist_ok=True)
    with pytest.raises(Interrupted):
        trained(name="part", on_event=StopAt(7))
    with pytest.raises(AttnlmError, match="is not finished"):
        trained(name="part", exist_ok=True)
    options = [f"--{key.replace('_', '-')}={value}" for key, value in SMALL.items()]
    names = ["--name", "mine", "--checkpoint-dir", tmp_path / "checkpoints"]
    command("train", dataset.path, *options, *names, cwd=tmp_path, code=1)
    done = command("train", dataset.path, *options, *names, "--exist-ok", cwd=tmp_path)
    assert done.stdout.strip() == str(run.path)
    (run.path / "metrics.jsonl").unlink()
    done = command("train", dataset.path, *options, *names, "--exist-ok", cwd=tmp_path, code=1)
    assert "metrics.jsonl has no evaluations" in done.stderr and "attnlm eval" in done.stderr


def test_resume_refuses_settings_that_would_change_the_run(trained: Any, dataset: Dataset) -> None:
    events: list[object] = []
    run = trained()
    before = run.last.read_bytes()
    attnlm.train(resume=run.path, on_event=events.append)
    notes = [event.text for event in events if isinstance(event, Note)]
    assert notes == [f"{run.name} is finished; to extend it, use `steps` 24, or any total above 12"]
    assert run.last.read_bytes() == before
    attnlm.train(resume=run.path, device="auto", on_event=events.append)
    reasons = [event.device.reason for event in events if isinstance(event, Started)]
    assert [reason == "recorded in the run" for reason in reasons] == [True, False]
    events.clear()
    attnlm.train(resume=run.path, dtype="auto", on_event=events.append)  # as recorded: float32
    assert not any(isinstance(note, Note) and "precision" in note.text for note in events)
    for wrong in ({"learning_rate": 0.1}, {"model": "bigram"}, {"budget": 5.0}, {"seed": 2}):
        with pytest.raises(UsageError, match="cannot be changed"):
            attnlm.train(resume=run.path, **wrong)
    of_new_runs: dict[str, Any] = {"recipe": "r2-bigram", "name": "x", "checkpoint": "best"}
    of_new_runs |= {"dataset": dataset.path, "exist_ok": True, "force": True}
    for wrong_too in ({name: value} for name, value in of_new_runs.items()):
        argument = "a data set" if "dataset" in wrong_too else f"`{next(iter(wrong_too))}`"
        with pytest.raises(UsageError, match=f"`resume` cannot be combined with {argument}"):
            attnlm.train(resume=run.path, **wrong_too)
    with pytest.raises(UsageError, match="`resume` cannot be combined with `name`"):
        attnlm.train(resume=run.path, name="auto")  # only a checkpoint may be called auto
    longer = attnlm.train(resume=run.path, steps=14, threads=2, on_event=events.append)
    assert [record["step"] for record in longer.metrics()] == [0, 5, 10, 12, 14]
    assert any(isinstance(note, Note) and "`threads`" in note.text for note in events)
    assert attnlm.open_run(run.path).config.training.steps == 14


def test_resume_names_facts_that_cannot_be(trained: Any) -> None:
    run = trained(steps=2, eval_every=2)
    state = load_or_init_state(run, choose_device("cpu"), fresh=False)
    values = {"step": -1, "evaluated_step": -2, "best_loss": math.nan, "loss_sum": -math.inf}
    for name, value in values.items():
        facts = {**state.content(), name: value}
        save_checkpoint(run.last, state.optimizer.weights(), facts, state.optimizer.state())
        with pytest.raises(AttnlmError, match=f"is not valid: its '{name}' cannot be {value}"):
            attnlm.train(resume=run.path, steps=4)


def test_resume_and_evaluate_refuse_other_data(trained: Any, tmp_path: Path) -> None:
    run = trained()
    other = prepared(tmp_path, FRUITS + "What else? Yes, QUINCES! " * 20)
    assert other.vocab_size > run.vocab_size
    elsewhere = replace(run.dataset, path=str(other.path))
    hashes = {name: getattr(other, name) for name in ("train_sha256", "val_sha256")}
    # Another vocabulary may claim to have the same ids.
    for recorded in (elsewhere, replace(elsewhere, **hashes)):
        replace(run, dataset=recorded).save_config()
        for read in (
            lambda: attnlm.train(resume=run.path, steps=20),
            lambda: attnlm.evaluate(run.path),
        ):
            with pytest.raises(AttnlmError, match="is not the data set"):
                read()


def test_best_keeps_the_lowest_loss_and_patience_ends_a_run_without_a_lower_one(
    trained: Any,
) -> None:
    run = trained(steps=100, eval_every=2, learning_rate=3.0, schedule="constant", patience=3)
    losses = [record["val_loss"] for record in run.metrics()]
    assert len(losses) == losses.index(min(losses)) + 4 < 50
    for which, expected in (("best", min(losses)), ("last", losses[-1])):
        measured = attnlm.evaluate(run, checkpoint=which).loss
        assert measured == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"model": "wide-head", "embed_dim": 16, "heads": 2, "block_size": 32, "threads": 1},
        {"model": "wide-head", "embed_dim": 16, "heads": 2, "block_size": 32, "threads": 2},
        {"model": "dot-product", "dtype": "bfloat16"},
        # Parameters of odd sizes, one behind another in memory.
        {"model": "multi-head", "heads": 1, "embed_dim": 7, "block_size": 2, "threads": 1},
    ],
    ids=str,
)
def test_evaluation_gives_the_number_that_training_logged(
    settings: dict[str, Any], trained: Any
) -> None:
    run = trained(**settings)
    logged = [record["val_loss"] for record in run.metrics()]
    for others in (1, 2, 3):
        with threads_of_torch(others):
            assert attnlm.evaluate(run, checkpoint="best").loss == min(logged)
            assert attnlm.evaluate(run, checkpoint="last").loss == logged[-1]
            assert torch.get_num_threads() == others


@pytest.mark.parametrize(("model", "threads"), [("bigram", 1), ("transformer", 2)])
def test_a_small_step_uses_one_thread(model: str, threads: int, trained: Any) -> None:
    sizes = {} if model == "bigram" else {"embed_dim": 64, "block_size": 64, "batch_size": 32}
    with threads_of_torch(2):
        assert trained(model=model, steps=1, **sizes).config.training.threads == threads
        assert torch.get_num_threads() == 2


@pytest.mark.slow  # half a minute in the C++ compiler
# torch's own imports warn of each other.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_steps_equal_eager_ones(trained: Any) -> None:
    from attnlm.workflows.autotune import _has_compiler

    if not _has_compiler():
        pytest.skip("no C++ compiler here")
    eager = trained(model="transformer", layers=1, steps=6, threads=1)
    compiled = trained(model="transformer", layers=1, steps=6, threads=1, compile="on")
    assert compiled.config.training.compile == "on"
    for one, other in zip(eager.metrics(), compiled.metrics(), strict=True):
        assert one["val_loss"] == pytest.approx(other["val_loss"], rel=1e-4)


def test_evaluation_is_over_the_whole_split_token_by_token(trained: Any, dataset: Dataset) -> None:
    """The plain way: every window by itself, every target by itself."""
    run = trained(model="transformer")
    model, _ = attnlm.load_model(run, checkpoint="last", device="cpu")
    val = torch.from_numpy(np.asarray(dataset.val).astype("int64"))
    total, count = 0.0, 0
    for start in range(0, len(val) - 1, 8):
        inputs, targets = val[start : start + 8], val[start + 1 : start + 9]
        inputs = inputs[: len(targets)]
        with torch.no_grad():
            log_p = model(inputs[None])[0].double().log_softmax(-1)
        total -= sum(float(log_p[t, target]) for t, target in enumerate(targets))
        count += len(targets)
    assert count == dataset.val_tokens - 1
    evaluation = attnlm.evaluate(run, checkpoint="last", device="cpu")
    assert evaluation.tokens == count
    assert evaluation.loss == pytest.approx(total / count, rel=1e-5)


def test_damaged_metrics_are_refused(trained: Any) -> None:
    run = trained(model="bigram")
    path = run.path / "metrics.jsonl"
    whole = path.read_text()
    for damaged in (
        *("", '{"step": 1}\n', '{"step": 1, "val_loss": null}\n'),
        *("".join(whole.splitlines(keepends=True)[:-1]), whole + whole),
    ):
        path.write_text(damaged)
        with pytest.raises(AttnlmError, match=r"metrics\.jsonl"):
            attnlm.train(resume=run.path, steps=20)
    path.write_text(whole)
    *before, last = whole.splitlines()
    for key in ("step", "seconds", "val_loss", "train_loss", "learning_rate"):
        too_large = [] if key == "step" else [10**400]
        for value in (math.nan, math.inf, True, "1", *too_large):
            line = json.dumps({**json.loads(last), key: value})
            path.write_text("\n".join([*before, line, ""]))
            with pytest.raises(AttnlmError, match=r"metrics\.jsonl is (damaged|not valid: its )"):
                run.metrics()
    path.write_text(whole)
    assert attnlm.train(resume=run.path, steps=20).metrics()[-1]["step"] == 20


def test_verify_reads_large_files_completely(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, runs = tmp_path / "copy", tmp_path / "checkpoints"
    shutil.copytree(dataset.path, data)
    monkeypatch.setattr("attnlm.data.dataset._LARGE", 100)
    monkeypatch.setattr("attnlm.data.dataset._SAMPLES", 2)
    monkeypatch.setattr("attnlm.data.dataset._SAMPLE", 10)
    sampled = {f"{s}_sampled_sha256": sampled_hash(data / f"{s}.bin") for s in ("train", "val")}
    files.write_json(data / "meta.json", {**files.read_json(data / "meta.json"), **sampled})
    settings: dict[str, Any] = {"model": "bigram", "steps": 2, "block_size": 4, "threads": 1}
    run = attnlm.train(data, checkpoint_dir=runs, device="cpu", **settings)
    whole = (data / "val.bin").read_bytes()
    (data / "val.bin").write_bytes(whole[:20] + whole[40:60] + whole[20:40] + whole[60:])
    attnlm.evaluate(run)
    for read in (
        lambda: attnlm.evaluate(run, verify=True),
        lambda: attnlm.train(data, checkpoint_dir=runs, device="cpu", verify=True, **settings),
        lambda: attnlm.train(resume=run.path, steps=3, verify=True),
    ):
        with pytest.raises(AttnlmError, match=r"val\.bin is damaged"):
            read()


@pytest.mark.parametrize(
    ("size", "fraction"), [(4, 0.5), (20, 0.1), (300, 0.1), (300, 0.9), (1000, 0.05)]
)
def test_the_hint_for_data_that_are_too_small_works(
    size: int, fraction: float, tmp_path: Path
) -> None:
    """Whichever split is the smaller one; and no larger context would do."""
    small = prepared(tmp_path, FRUITS[:size], val_fraction=fraction)

    def train(block_size: int) -> None:
        about: dict[str, Any] = {**SMALL, "model": "bigram", "steps": 2, "block_size": block_size}
        attnlm.train(small, checkpoint_dir=tmp_path / "checkpoints", **about, threads=1)

    with pytest.raises(AttnlmError, match="split has") as caught:
        train(2000)
    hint = re.fullmatch(r"use `block_size` (\d+) or less, or prepare .*", caught.value.hint)
    assert hint
    train(int(hint[1]))
    with pytest.raises(AttnlmError, match="split has"):
        train(int(hint[1]) + 1)
