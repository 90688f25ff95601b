"""Signals: raised before the first step, noted in training, second ones, closed terminals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import attnlm
from attnlm.__main__ import main
from attnlm.base.process import Interrupted, StopSignal, stop_signals
from attnlm.data.dataset import Dataset
from attnlm.model.language_model import Bigram
from attnlm.training import validation
from tests.kit import ATTNLM, quick_run

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has other signals")
PROGRAM = Path(__file__).parents[1] / "programs" / "signals.py"


def test_a_signal_before_the_first_step_is_raised_immediately(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first step may compile for minutes; there is nothing to save, and nothing is left."""

    def backward(*_: object) -> None:
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("it went on")

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    given: dict[str, Any] = {"compile": "modules", "eval_every": 4}
    with pytest.raises(Interrupted) as caught:
        quick_run(dataset, "transformer", checkpoint_dir=tmp_path, name="run", **given)
    assert caught.value.signum == signal.SIGTERM
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("step", [0, 5])
def test_a_signal_ends_an_evaluation_between_windows(
    step: int, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "windows_at_once", lambda *_: 1)
    original, evaluated, losses = Bigram.loss, [0], []

    def loss(model: Bigram, *ids: torch.Tensor) -> torch.Tensor:
        if evaluated[-1] == step and not model.training:
            losses.append(original(model, *ids))
            signal.raise_signal(signal.SIGTERM)
        return original(model, *ids)

    def listen(event: object) -> None:
        if isinstance(event, attnlm.Evaluated):
            evaluated.append(event.step + 5)

    monkeypatch.setattr(Bigram, "loss", loss)
    given: dict[str, Any] = {"steps": 10, "eval_every": 5, "on_event": listen}
    with pytest.raises(Interrupted):
        quick_run(dataset, "bigram", checkpoint_dir=tmp_path, name="run", **given)
    assert len(losses) == 1
    path = tmp_path / "run"
    assert attnlm.open_run(path).checkpoint("last").step == 5 if step else not path.exists()


def test_a_signal_during_imports_says_that_nothing_was_written(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    handlers: dict[int, Any] = {}
    codes: list[int] = []
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr("attnlm.cli.exits.run_and_exit", lambda command: None)
    monkeypatch.setattr(os, "_exit", codes.append)
    main()
    handlers[signal.SIGINT](signal.SIGINT, None)
    assert codes == [130] and capfd.readouterr().err == "stopped; nothing was written\n"


@pytest.mark.parametrize("way", ["kept", "twice", "afterwards"])
def test_a_signal_always_ends_the_process_with_its_code(way: str) -> None:
    """The exception may be kept or delayed, or come when the work is almost done."""
    done = subprocess.run(
        [sys.executable, PROGRAM, way], capture_output=True, text=True, timeout=50
    )
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGTERM, "", "")


@pytest.mark.parametrize(
    ("came", "answered"),
    [("HUP HUP", "HUP"), ("TERM HUP", "TERM"), ("HUP TERM", "TERM"), ("INT HUP HUP", "INT")],
)
def test_a_hangup_is_never_a_second_signal(came: str, answered: str) -> None:
    """A closed terminal sends several, and the end of a session SIGTERM and SIGHUP together."""
    stop = StopSignal()
    stop.defer()
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    try:
        with pytest.raises(Interrupted) as caught, stop.listening():
            for name in came.split():
                signal.raise_signal(getattr(signal, f"SIG{name}"))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert caught.value.signum == getattr(signal, f"SIG{answered}")


def test_an_ignored_sighup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal().listening():
            assert stop_signals() == (signal.SIGINT, signal.SIGTERM)
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_training_continues_when_its_terminal_closes(project: Path) -> None:
    arguments = ["train", f"--steps={10**8}", "--eval-every=100", "--model=bigram", "--name=run"]
    ours, terminal = os.openpty()
    process = subprocess.Popen(
        [*ATTNLM, *arguments],
        cwd=project,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    try:
        os.close(terminal)
        last, deadline = project / "checkpoints/run/last.safetensors", time.monotonic() + 60
        while not last.exists() and time.monotonic() < deadline:
            os.read(ours, 2**12)
        os.close(ours)
        for _ in range(2):
            process.send_signal(signal.SIGHUP)
        assert process.wait(50) == 128 + signal.SIGHUP
    finally:
        process.kill()
    assert attnlm.open_run(last.parent).last.exists()
