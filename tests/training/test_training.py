"""Training in process: what it learns, what it records, and that stopping changes nothing."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attnlm
from attnlm.base.errors import AttnlmError
from attnlm.base.events import Note
from attnlm.base.process import Interrupted
from attnlm.compute.device import choose_device
from attnlm.compute.threads import threads_of_torch
from attnlm.data.dataset import Dataset
from attnlm.runs.checkpoint import save_checkpoint
from attnlm.training import loop
from attnlm.training.events import Evaluated, Finished, Started, Stepped
from attnlm.training.optimizer import Optimizer
from attnlm.training.state import load_or_init_state
from tests import own_code
from tests.kit import QUICK, fails, quick_run
from tests.models import FRUITS, assert_same_run, prepared, timeless
from tests.training.conftest import signal_after_evaluation, signal_after_step

LONGER: dict[str, Any] = {"steps": 12, "eval_every": 5}
BLOCKS = "transformer:layers=2:heads=2:embed_dim=16:dropout=0.3"


def test_a_run_records_and_reports_its_losses_and_steps(
    train: Any, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_SECONDS_BETWEEN_REPORTS", 0.0)
    losses: dict[int, float] = {}
    events: list[object] = []
    run = train(
        **LONGER,
        on_step=lambda step, loss: losses.update({step: loss.item()}),
        on_event=events.append,
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
    assert run.whole() == {} and "checkpoint" not in (run.path / "metrics.jsonl").read_text()
    uniform, bigram = math.log(dataset.vocab_size), dataset.bigram_loss
    assert run.references() == {"uniform (ln V)": uniform, "counted bigram": bigram}

    assert isinstance(events[0], Started) and events[0].run == run
    assert isinstance(events[-1], Finished) and not events[-1].out_of_patience
    evaluated = [event for event in events if isinstance(event, Evaluated)]
    assert [{name: getattr(e, name) for name in records[0]} for e in evaluated] == records
    stepped = [event for event in events if isinstance(event, Stepped)]
    assert {event.step: event.loss for event in stepped} == losses
    assert [event.step for event in stepped if event.seconds_left <= 0] == [12]


def test_the_same_configuration_gives_the_same_bytes(train: Any) -> None:
    """And the caller's random state stays as it was. The settings of a run are a recipe."""
    before = torch.get_rng_state()
    run = train(BLOCKS)
    assert torch.equal(torch.get_rng_state(), before)
    again = attnlm.train(
        run.dataset.path, recipe=run.config.settings(), checkpoint_dir=run.path.parent
    )
    assert again.path != run.path and again.config == run.config
    assert_same_run(run, again)
    assert timeless(train(BLOCKS, seed=2).path) != timeless(run.path)


# --- Stopping and resuming ------------------------------------------------------------------------

HEAD = "multi-head:embed_dim=8:heads=2:attention=CODE/parts.py:Head"
RESUMED: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("multi-head:dropout=0.3", {"optimizer": "adamw"}),
    "Muon": ("wide-head:dropout=0.3", {"optimizer": "muon"}),
    "blocks on two threads": (BLOCKS, {"optimizer": "muon", "threads": 2}),
    "bigram in bfloat16": ("bigram", {"dtype": "bfloat16"}),
    "bfloat16": ("transformer:layers=1:heads=2:embed_dim=16", {"dtype": "bfloat16"}),
    "own part": (HEAD, {"set": {"dropout": 0.3}}),
    "own part on two threads": (HEAD, {"set": {"dropout": 0.3}, "threads": 2}),
    "own parts in blocks": (
        f"{BLOCKS}:attention=CODE/parts.py:Head:mlp=CODE/parts.py:Gate",
        {"set": {"dropout": 0.3}},
    ),
    "own recurrent model": ("CODE/models.py:Recurrent", {"micro_batch_size": 2}),
    "function that makes a model": ("CODE/models.py:lecture", {"optimizer": "adamw"}),
    "own buffers on two threads": (HEAD.replace("parts.py:Head", "parts.py:Kept"), {"threads": 2}),
    "own loss": ("bigram:loss=CODE/parts.py:soft", {}),
    # Parameters of odd sizes, one behind another in memory.
    "odd sizes": ("multi-head:heads=1:embed_dim=7:block_size=2", {}),
}


@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_equals_an_uninterrupted_one(
    case: str, train: Any, code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops after an evaluation, then between two. Evaluation and sampling agree,
    too, with any number of threads."""
    name, settings = RESUMED[case]
    model = name.replace("CODE", str(code))
    whole = train(model, **settings, steps=6)
    with pytest.raises(Interrupted):
        train(model, **settings, steps=6, name="stopped", **signal_after_evaluation(2))
    path = tmp_path / "checkpoints" / "stopped"
    own_code.become_a_new_process(monkeypatch)
    torch.manual_seed(7)  # a new process may have drawn other numbers
    with pytest.raises(Interrupted):
        attnlm.train(resume=path, **signal_after_step(5))
    own_code.become_a_new_process(monkeypatch)
    torch.manual_seed(7)  # a new process may have drawn other numbers
    resumed = attnlm.train(resume=path)
    assert_same_run(whole, resumed)
    losses = [record["val_loss"] for record in whole.metrics()]
    assert losses[-1] != losses[0]
    assert resumed.config.training.dtype == settings.get("dtype", "float32")
    with threads_of_torch(3):
        assert attnlm.evaluate(resumed, checkpoint="last").loss == losses[-1]
        assert attnlm.evaluate(resumed, checkpoint="best").loss == min(losses)
        assert torch.get_num_threads() == 3
    (text,) = attnlm.samples(resumed, num_samples=1, tokens=20, seed=1)
    assert text == attnlm.samples(whole, num_samples=2, tokens=20, seed=1)[0] and len(text) == 20


def signal_within_step(
    patch: pytest.MonkeyPatch, step: int, signum: signal.Signals, *, twice: bool = False
) -> None:
    """Let trainings get a signal before a step's update, and perhaps another one after it."""
    original = Optimizer.update

    def update(self: Optimizer, number: int, *options: Any) -> None:
        if number == step - 1:
            signal.raise_signal(signum)
        original(self, number, *options)
        if number == step - 1 and twice:  # the weights are new, and the step is not counted yet
            signal.raise_signal(signum)

    patch.setattr(Optimizer, "update", update)


def test_stopping_between_evaluations_keeps_the_last_complete_step(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signal_within_step(monkeypatch, 8, signal.SIGTERM)
    with pytest.raises(Interrupted) as caught:
        train("bigram", **LONGER, name="stopped")
    monkeypatch.undo()
    assert caught.value.signum == signal.SIGTERM
    stopped = attnlm.open_run(tmp_path / "checkpoints" / "stopped")
    assert [record["step"] for record in stopped.metrics()] == [0, 5]
    assert stopped.checkpoint("last").step == 8
    # The count of seconds goes on from where it was stopped, though no checkpoint holds it.
    assert stopped.stopped_after >= stopped.metrics()[-1]["seconds"]
    replace(stopped, stopped_after=1000.0).save_config()
    resumed = attnlm.train(resume=stopped.path)
    assert resumed.metrics()[1]["seconds"] < 1000 < resumed.metrics()[2]["seconds"]


def test_a_second_signal_within_a_step_saves_nothing(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(**LONGER)
    signal_within_step(monkeypatch, 8, signal.SIGINT, twice=True)
    with pytest.raises(KeyboardInterrupt) as caught:
        train(**LONGER, name="stopped")
    monkeypatch.undo()
    assert not isinstance(caught.value, Interrupted)
    stopped = attnlm.open_run(tmp_path / "checkpoints" / "stopped")
    assert stopped.checkpoint("last").step == 5
    assert_same_run(whole, attnlm.train(resume=stopped))


@pytest.mark.parametrize(
    ("stop", "which", "read"),
    [
        (3, "auto", "last checkpoint (step 3, no evaluation recorded)"),
        (3, "best", "best checkpoint (step 0, validation loss {:.4f})"),
        (7, "auto", "best checkpoint (step 5, validation loss {:.4f})"),
        (7, "last", "last checkpoint (step 7, no evaluation recorded)"),
    ],
)
def test_auto_selects_last_until_a_trained_checkpoint_is_evaluated(
    stop: int, which: str, read: str, train: Any, tmp_path: Path
) -> None:
    """The best of a training that was stopped early is of step 0."""
    with pytest.raises(Interrupted):
        train("bigram", **LONGER, name="stopped", **signal_after_step(stop))
    run = attnlm.open_run(tmp_path / "checkpoints" / "stopped")
    losses = {record["step"]: record["val_loss"] for record in run.metrics()}
    chosen = run.checkpoint(which)
    assert str(chosen) == read.format(losses.get(chosen.step))
    how: dict[str, Any] = {"tokens": 20, "seed": 1, "device": "cpu"}
    asked, named = (attnlm.sample(run, checkpoint=one, **how) for one in (which, chosen.which))
    assert "".join(asked) == "".join(named)  # how often text is shown depends on time


def test_resume_extends_a_run_and_says_what_it_changes(train: Any) -> None:
    notes: list[str] = []
    reasons: list[str] = []

    def listen(event: object) -> None:
        if isinstance(event, Note):
            notes.append(event.text)
        if isinstance(event, Started):
            reasons.append(event.device.reason)

    run = train(on_event=listen)
    before = run.last.read_bytes()
    reasons.clear()
    attnlm.train(resume=run.path, on_event=listen)
    assert notes == [f"{run.name} is finished; to extend it, use `steps` 8, or any total above 4"]
    assert run.last.read_bytes() == before
    attnlm.train(resume=run.path, device="auto", on_event=listen)
    assert [reason == "recorded in the run" for reason in reasons] == [True, False]
    attnlm.train(resume=run.path, dtype="auto", on_event=listen)  # as recorded: float32
    assert not any("precision" in note for note in notes)
    longer = attnlm.train(resume=run.path, steps=6, threads=2, on_event=listen)
    assert [record["step"] for record in longer.metrics()] == [0, 2, 4, 6]
    assert "`threads`" in notes[-1]
    assert attnlm.open_run(run.path).config.training.steps == 6


def test_resume_names_facts_that_cannot_be(train: Any) -> None:
    run = train("bigram", steps=2)
    state = load_or_init_state(run, choose_device("cpu"), fresh=False)
    values = {"step": -1, "evaluated_step": -2, "best_loss": math.nan, "loss_sum": -math.inf}
    for name, value in values.items():
        facts = {**state.content(), name: value}
        save_checkpoint(run.last, state.optimizer.weights(), facts, state.optimizer.state())
        with pytest.raises(AttnlmError, match=f"is not valid: its '{name}' cannot be {value}"):
            attnlm.train(resume=run.path, steps=4)


def test_resume_and_evaluate_refuse_other_data(train: Any, tmp_path: Path) -> None:
    run = train("bigram")
    other = prepared(tmp_path, FRUITS + "What else? Yes, QUINCES! " * 20)
    assert other.vocab_size > run.vocab_size
    elsewhere = replace(run.dataset, path=str(other.path))
    hashes = {name: getattr(other, name) for name in ("train_sha256", "val_sha256")}
    # Another vocabulary may claim to have the same ids.
    for recorded in (elsewhere, replace(elsewhere, **hashes)):
        replace(run, dataset=recorded).save_config()
        with pytest.raises(AttnlmError, match="is not the data set"):
            attnlm.train(resume=run.path, steps=20)
        with pytest.raises(AttnlmError, match="is not the data set"):
            attnlm.evaluate(run.path)


def test_damaged_metrics_are_refused(train: Any) -> None:
    run = train("bigram")
    path = run.path / "metrics.jsonl"
    whole = path.read_text()
    lines = whole.splitlines()
    cut = "\n".join([*lines[:-1], ""])
    for damaged in ("", '{"step": 1}\n', '{"step": 1, "val_loss": null}\n', cut, whole + whole):
        path.write_text(damaged)
        with pytest.raises(AttnlmError, match=r"metrics\.jsonl"):
            attnlm.train(resume=run.path, steps=20)
    keys = ("step", "seconds", "val_loss", "train_loss", "learning_rate")
    for key, value in itertools.product(keys, (math.nan, math.inf, True, "1", 10**400)):
        if (key, value) != ("step", 10**400):
            path.write_text(cut + json.dumps({**json.loads(lines[-1]), key: value}) + "\n")
            with pytest.raises(AttnlmError, match=r"metrics\.jsonl is (damaged|not valid: its )"):
                run.metrics()
    path.write_text(whole)
    assert attnlm.train(resume=run.path, steps=20).metrics()[-1]["step"] == 20


def test_metrics_that_the_last_checkpoint_contradicts_are_refused(
    trained: Path, tmp_path: Path
) -> None:
    for name in ("bigram", "average"):
        shutil.copytree(trained / "checkpoints" / name, tmp_path / "checkpoints" / name)
    path = tmp_path / "checkpoints" / "average" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    better = json.dumps(json.loads(lines[0]) | {"val_loss": 0.8838}) + "\n"
    worse = json.dumps(json.loads(lines[-1]) | {"val_loss": 9.8838}) + "\n"
    for damaged in ([better, *lines[1:]], [*lines[:-1], worse], lines[:-1], []):
        path.write_text("".join(damaged))
        with pytest.raises(AttnlmError, match=r"metrics\.jsonl is damaged: by last\.safetensors"):
            attnlm.open_run(path.parent).result()
        entries = {entry.name: entry for entry in attnlm.list_runs(tmp_path / "checkpoints")}
        assert "last.safetensors" in str(entries["average"].problem)
        assert entries["bigram"].val_loss is not None
    path.write_text("".join(lines))
    path.with_name("last.safetensors").unlink()  # nothing to compare with
    assert len(attnlm.open_run(path.parent).metrics()) == len(lines)


def test_losses_on_the_whole_split_are_the_last_lines_and_a_changed_one_is_refused(
    trained: Path, tmp_path: Path
) -> None:
    run = attnlm.open_run(shutil.copytree(trained / "checkpoints" / "bigram", tmp_path / "run"))
    record, path = run.evaluations()[-1], run.path / "metrics.jsonl"
    loss, bits = record.val_loss / 2, (record.bits_per_byte or 0) / 2
    run.append_evaluations(
        *(
            replace(record, val_loss=loss, bits_per_byte=bits, checkpoint=which)
            for which in ("best", "last")
        )
    )
    assert run.whole()["best"].val_loss == loss and run.evaluations()[-1] == record
    path.write_text(path.read_text().replace(f"{loss}", f"{loss - 1}", 1))
    with pytest.raises(AttnlmError, match=r"metrics\.jsonl is damaged"):
        run.result()


def test_a_run_in_the_current_folder_is_not_looked_up_elsewhere(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    other = {**QUICK, "model": "bigram", "name": "mine", "seed": 2}
    attnlm.train(dataset, checkpoint_dir="checkpoints", **other)
    given = {**QUICK, "model": "bigram", "name": "mine", "checkpoint_dir": "."}
    run = attnlm.train(dataset, **given)
    assert attnlm.train(dataset, exist_ok=True, **given).config.training.seed == 1
    assert run.path == Path("mine")


def test_exist_ok_takes_a_run_with_the_same_configuration(train: Any) -> None:
    run = train("bigram", name="mine")
    content = run.last.read_bytes()
    with pytest.raises(AttnlmError, match="exists") as caught:
        train("bigram", name="mine")
    assert "`exist_ok`" in caught.value.hint
    told: list[str] = []
    again = train("bigram", name="mine", exist_ok=True, on_event=lambda e: told.append(str(e)))
    assert again.path == run.path and run.last.read_bytes() == content
    assert told == ["mine is finished, and has this configuration: nothing to train"]
    with pytest.raises(AttnlmError, match="`learning_rate` differs"):
        train("bigram", name="mine", exist_ok=True, learning_rate=0.5)
    with pytest.raises(Interrupted):
        train("bigram", name="new", exist_ok=True, **signal_after_step(3))
    assert_same_run(train("bigram", name="new", exist_ok=True), run)
    (run.path / "metrics.jsonl").unlink()
    with pytest.raises(AttnlmError, match=r"metrics\.jsonl is damaged"):
        train("bigram", name="mine", exist_ok=True)
    run.last.unlink()  # what it learned is in the best checkpoint
    with pytest.raises(AttnlmError, match="cannot be resumed"):
        train("bigram", name="mine", exist_ok=True)
    assert run.best.exists()


# --- Listeners, disks and folders -----------------------------------------------------------------


@pytest.mark.parametrize("listener", ["on_event", "on_step"])
def test_an_error_of_a_listener_is_not_reported_as_ours(listener: str, train: Any) -> None:
    def fail(*arguments: object) -> None:
        raise ConnectionResetError(errno.ECONNRESET, "the server has gone")

    with pytest.raises(ConnectionResetError, match="the server has gone"):
        train("bigram", **{listener: fail})


def after_evaluation(step: int, act: Callable[[], object]) -> Any:
    """Return a listener that acts when the evaluation at a step is reported."""

    def listen(event: object) -> None:
        if isinstance(event, Evaluated) and event.step == step:
            act()

    return listen


def test_a_full_disk_is_reported_with_the_file_and_the_last_step(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # it does not say where

    fill = after_evaluation(5, lambda: monkeypatch.setattr(os, "fsync", full))
    with pytest.raises(AttnlmError) as caught:
        train("bigram", **LONGER, name="full", on_event=fill)
    path = tmp_path / "checkpoints" / "full"
    # What is written next.
    assert caught.value.message == f"cannot write {path / 'metrics.jsonl'}: No space left on device"
    assert "attnlm train --resume full" in caught.value.hint
    assert f"{path / 'last.safetensors'} has step 5" in caught.value.hint


@pytest.mark.skipif(sys.platform == "win32", reason="Windows moves no folder with open files")
def test_a_run_whose_folder_was_moved_stops_with_one_line(train: Any, tmp_path: Path) -> None:
    path, moved = tmp_path / "checkpoints" / "z", tmp_path / "moved"
    with pytest.raises(AttnlmError, match=r"cannot write .*: No such file") as caught:
        train("bigram", name="z", on_event=after_evaluation(0, lambda: path.rename(moved)))
    assert "check that the path still exists" in caught.value.hint
    assert not path.exists()
    assert attnlm.open_run(moved).metrics()[-1]["step"] == 0
    attnlm.train(resume=moved)


@pytest.mark.parametrize("then", ["prepared again", "removed"])
def test_a_training_goes_on_with_data_that_were_replaced(
    then: str, dataset: Dataset, tmp_path: Path
) -> None:
    folder = shutil.copytree(dataset.path, tmp_path / "data" / "copy")

    def replace() -> None:
        shutil.rmtree(folder)
        if then == "prepared again":
            folder.mkdir()
            (folder / "train.bin").write_bytes(b"")

    assert quick_run(folder, on_event=after_evaluation(0, replace)).metrics()[-1]["step"] == 4


def test_folders_that_the_user_keeps_elsewhere_work_through_links(
    train: Any, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "checkpoints").symlink_to("disk")
    run, elsewhere = train("bigram", name="mine"), tmp_path / "elsewhere"
    run.path.resolve().rename(elsewhere)
    run.path.symlink_to(elsewhere)
    (elsewhere / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    (elsewhere / "tokenizer.json").symlink_to(tmp_path / "tokenizer.json")
    attnlm.train(resume="mine", checkpoint_dir=tmp_path / "checkpoints", steps=6)
    assert attnlm.open_run(elsewhere).metrics()[-1]["step"] == 6
    opened = attnlm.open_run("mine", checkpoint_dir=tmp_path / "checkpoints")
    assert len("".join(attnlm.sample(opened, tokens=5, seed=1, device="cpu"))) == 5


# --- Evaluation -----------------------------------------------------------------------------------


def test_best_keeps_the_lowest_loss_and_patience_ends_a_run_without_a_lower_one(train: Any) -> None:
    events: list[Any] = []
    settings = {"learning_rate": 3.0, "schedule": "constant", "patience": 3}
    run = train(steps=100, eval_every=2, **settings, on_event=events.append)
    assert events[-1].out_of_patience
    losses = [record["val_loss"] for record in run.metrics()]
    assert len(losses) == losses.index(min(losses)) + 4 < 50
    for which, expected in (("best", min(losses)), ("last", losses[-1])):
        measured = attnlm.evaluate(run, checkpoint=which).loss
        assert measured == pytest.approx(expected, rel=1e-5)


def test_evaluation_is_over_the_whole_split_token_by_token(train: Any, dataset: Dataset) -> None:
    """The plain way: every window by itself, every target by itself."""
    run = train(BLOCKS, block_size=8)
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


def test_verify_reads_large_files_completely(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """test_dataset.py has the same for data sets that are opened."""
    data = shutil.copytree(dataset.path, tmp_path / "data" / "copy")
    monkeypatch.setattr("attnlm.data.dataset._LARGE", 100)
    run = quick_run(data, "bigram", block_size=4)
    whole = (data / "val.bin").read_bytes()
    (data / "val.bin").write_bytes(whole[:20] + whole[40:60] + whole[20:40] + whole[60:])
    attnlm.evaluate(run)
    for words in (("eval", run.path), ("train", data), ("train", "--resume", run.path)):
        says = "val.bin is damaged"
        fails(*words, "--verify", cwd=tmp_path, code=1, says=says, hints="prepare it again")


# --- Sizes and threads ----------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "threads"), [("bigram", 1), ("transformer", 2)])
def test_a_small_step_uses_one_thread(
    model: str, threads: int, dataset: Dataset, tmp_path: Path
) -> None:
    large: dict[str, Any] = {"embed_dim": 64, "block_size": 64, "batch_size": 32}
    with threads_of_torch(2):
        sizes = {} if model == "bigram" else large
        run = attnlm.train(dataset, model=model, steps=1, checkpoint_dir=tmp_path, **sizes)
        assert run.config.training.threads == threads
        assert torch.get_num_threads() == 2


@pytest.mark.slow  # half a minute in the C++ compiler
# torch's own imports warn of each other.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_steps_equal_eager_ones(train: Any) -> None:
    from attnlm.workflows.autotune import has_compiler

    if not has_compiler():
        pytest.skip("no C++ compiler here")
    model = "transformer:layers=1:heads=2:embed_dim=16"
    eager, compiled = (train(model, compile=compile) for compile in ("auto", "torch"))
    assert compiled.config.training.compile == "torch"
    for one, other in zip(eager.metrics(), compiled.metrics(), strict=True):
        assert one["val_loss"] == pytest.approx(other["val_loss"], rel=1e-4)
