"""`keep_every`: weights of steps on the way, which every command takes by their step."""

from __future__ import annotations

import contextlib
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

import attnlm
from attnlm.base.errors import UsageError
from attnlm.base.process import Interrupted
from attnlm.runs.run import Run
from tests.kit import quick_run, try_command

KEPT: dict[str, Any] = {"steps": 5, "eval_every": 1, "keep_every": 2, "device": "cpu"}


@pytest.fixture(scope="module")
def kept(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of five steps that kept the weights of three."""
    runs = tmp_path_factory.mktemp("kept")
    return quick_run(trained / "data" / "foxes", checkpoint_dir=runs, name="kept", **KEPT)


def test_weights_of_steps_are_kept_and_evaluated_as_in_training(kept: Run) -> None:
    files = sorted(path.name for path in kept.path.glob("step-*"))
    assert files == [f"step-00000{step}.safetensors" for step in (0, 2, 4)]
    losses = {record["step"]: record["val_loss"] for record in kept.metrics()}
    for step in (0, 2, 4):
        assert attnlm.evaluate(kept, checkpoint=f"{step}").loss == losses[step]
        said = f"kept checkpoint (step {step}, validation loss {losses[step]:.4f})"
        assert str(kept.checkpoint(step)) == said


def test_a_step_that_was_not_kept_is_refused_with_those_that_were(kept: Run) -> None:
    with pytest.raises(UsageError, match="invalid value for `checkpoint`: '3'") as caught:
        attnlm.load_model(kept, checkpoint="3")
    assert caught.value.hint == "of kept, choose from 0, 2, 4, best, last, auto"


@pytest.mark.parametrize(
    "words",
    [
        ("sample", "kept", "--tokens", "5"),
        ("eval", "kept"),
        ("attend", "the dog", "kept"),
        ("heads", "kept", "--windows", "2"),
        ("trace", "the dog", "kept"),
        ("report", "kept"),
        ("export", "kept", "page.html", "--to", "html"),
        ("train", "data/foxes", "--from", "kept", "--steps", "1"),
    ],
    ids=lambda words: words[0],
)
def test_commands_take_a_kept_step(
    words: tuple[str, ...], kept: Run, trained: Path, tmp_path: Path
) -> None:
    shutil.copytree(kept.path, tmp_path / "checkpoints" / "kept")
    shutil.copytree(trained / "data", tmp_path / "data")
    for step, code in (("5", 2), ("4", 0)):
        with contextlib.chdir(tmp_path):
            done = try_command([*words, "--checkpoint", step])
        assert done.code == code, done.stderr
        assert ("invalid value for --checkpoint: '5'" in done.stderr) == (step == "5")


def test_a_run_starts_from_kept_weights(kept: Run, trained: Path, tmp_path: Path) -> None:
    data = trained / "data" / "foxes"
    run = attnlm.train(data, start_from=kept, checkpoint="4", steps=9, checkpoint_dir=tmp_path)
    loss = attnlm.evaluate(kept, checkpoint="4").loss
    assert run.metrics()[0]["val_loss"] == pytest.approx(loss)
    assert run.started_from == "kept, kept checkpoint (step 4)"


def test_a_stopped_run_keeps_the_same_weights(kept: Run, trained: Path, tmp_path: Path) -> None:
    def stop(made: int, loss: object) -> None:
        if made == 3:
            signal.raise_signal(signal.SIGINT)

    data, given = trained / "data" / "foxes", {**KEPT, "name": "kept", "checkpoint_dir": tmp_path}
    with pytest.raises(Interrupted):
        quick_run(data, on_step=stop, **given)
    later = tmp_path / "kept" / "step-000004.safetensors"
    later.write_bytes(b"of a killed process")  # which had made a step more, but not saved it
    run = attnlm.train(resume=tmp_path / "kept", steps=4)
    assert run.kept_steps() == [0, 2, 4] and later.read_bytes() != b"of a killed process"
    run = attnlm.train(resume=run, steps=5)
    for step in (0, 2):
        assert run.kept(step).read_bytes() == kept.kept(step).read_bytes()
