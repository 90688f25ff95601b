"""Several processes train as one does: the same numbers, one that writes, and one end."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import attnlm
from attnlm.base.errors import AlreadyReportedError
from attnlm.base.signals import Interrupted
from attnlm.compute import launcher
from attnlm.compute.device import choose_device
from attnlm.compute.launcher import run_processes
from attnlm.compute.processes import ALONE, LostProcessError, Processes, reporting_lost_processes
from attnlm.runs.run import open_run
from attnlm.training.state import initial_state
from attnlm.training.step import Stepper
from tests.command import changed
from tests.models import contents, timeless
from tests.processes import (
    NAMES,
    Training,
    commands,
    compute,
    config_of,
    ended,
    free_port,
    numbers,
    ranks,
    some_way_on,
    started,
    together,
    until_evaluated,
)
from tests.tolerances import assert_near

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="gloo and signals of Unix")
TRAIN = (
    *("train", "fruits-char", "--model", "single-head", "--batch-size", "6", "--block-size", "8"),
    *("--optimizer", "adamw", "--learning-rate", "0.003", "--seed", "1", "--processes", "2"),
    *("--steps", "300", "--eval-every", "30"),
)


def test_several_processes_compute_the_same_as_one(project: Path, tmp_path: Path) -> None:
    opened = attnlm.open_dataset("fruits-char", data_dir=project / "data")
    together(3, compute, opened.path, tmp_path)
    (first, failure, told, flushed, stopped), *others = (
        pickle.loads((tmp_path / f"{rank}.pickle").read_bytes()) for rank in range(3)
    )
    assert "finite numbers (between steps 1 and 2)" in failure
    assert told == {"a": [1, None, "ü"]}
    assert flushed == [0.0] * 8 or sys.platform != "linux"
    assert stopped == [signal.SIGTERM] * 2 and others[-1][-1] == [signal.SIGHUP] * 2
    for name in NAMES:
        for other, *rest, _ in others:
            assert rest == [failure, told, flushed]
            assert other[name]["losses"] == first[name]["losses"]
            assert other[name]["validation"] == first[name]["validation"]
            assert np.array_equal(other[name]["values"], first[name]["values"])
        alone = numbers(name, opened, ALONE)
        assert_near(first[name]["gradients"][0], alone["gradients"][0])
        np.testing.assert_allclose(first[name]["losses"], alone["losses"], 1e-5)
        assert first[name]["validation"] == pytest.approx(alone["validation"], rel=1e-5)


@pytest.fixture(scope="module")
def whole(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes without interruption."""
    arguments = (*TRAIN, "--name", "whole")
    main, other = commands(project, tmp_path_factory.mktemp("out"), 0, arguments, arguments)
    assert main[0] == "checkpoints/whole\n" and main[1].count("validation  ") == 1
    assert other == ("", "")
    return project / "checkpoints" / "whole"


def test_two_processes_write_the_same_run_as_one(whole: Path, project: Path) -> None:
    run = open_run(whole)
    assert run.config.training.processes == 2
    settings: dict[str, Any] = {**run.config.settings(), "processes": 1}
    alone = attnlm.train(
        project / "data" / "fruits-char", checkpoint_dir=project / "alone", **settings
    )
    assert len(timeless(alone.path)) == len(timeless(whole)) == 11
    for one, other in zip(timeless(alone.path)[:2], timeless(whole), strict=False):
        assert one["step"] == other["step"] and one["tokens"] == other["tokens"]
        for loss in ("train_loss", "val_loss"):
            found = other[loss]
            assert one[loss] == (found if found is None else pytest.approx(found, rel=1e-4))
    assert sorted(p.name for p in whole.iterdir()) == sorted(p.name for p in alone.path.iterdir())
    content = contents(whole)
    with pytest.raises(attnlm.UsageError, match="`processes` is 2, but 1 were started"):
        attnlm.train(resume=whole, steps=600, data_dir=project / "data")
    assert contents(whole) == content


@pytest.fixture
def training(project: Path) -> Iterator[Training]:
    with some_way_on(project, TRAIN) as training:
        yield training


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for a signal")
def test_processes_save_and_end_when_their_launcher_is_killed(training: Training) -> None:
    children = list(ranks(training.process.pid).values())
    training.process.kill()
    training.process.communicate(timeout=60)
    for _ in range(3000):
        if not any(map(runs, children)):
            break
        time.sleep(0.01)
    assert not any(map(runs, children))
    run = attnlm.open_run(training.path)
    assert 0 < run.checkpoint("last").step < 300
    attnlm.load_model(run, checkpoint="last")


def runs(process: int) -> bool:
    """Return True if the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_signal_to_one_process_saves_once_and_ends_all(
    whole: Path, project: Path, tmp_path: Path
) -> None:
    """Resuming gives the bytes of the uninterrupted run."""
    words = [(*TRAIN, "--name", "stopped")] * 2
    said = commands(project, tmp_path, 143, *words, signum=signal.SIGTERM)
    stderr = "".join(one for _, one in said)
    assert stderr.count("stopped; the last complete step, ") == 1
    assert "error: " not in stderr
    path = whole.with_name("stopped")
    assert attnlm.open_run(path).checkpoint("last").step == 71
    commands(project, tmp_path, 0, *[("train", "--resume", "stopped")] * 2)
    assert (path / "last.safetensors").read_bytes() == (whole / "last.safetensors").read_bytes()
    assert timeless(path) == timeless(whole)


def test_all_processes_end_when_one_is_killed(training: Training) -> None:
    os.kill(ranks(training.process.pid)[0], signal.SIGKILL)
    _, stderr = ended(training.process, 1)
    assert stderr.count("error: ") == 1
    assert "error: process 0 of the training was killed (SIGKILL)" in stderr
    assert attnlm.open_run(training.path).checkpoint("last").step > 0


@pytest.mark.slow
def test_a_restarting_launcher_resumes(whole: Path, project: Path) -> None:
    path = project / "checkpoints" / "again"
    launcher = sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"
    two = ("--nproc-per-node", "2", "-m", "attnlm")
    process = started(*launcher, *two, *TRAIN, "--name", path.name, cwd=project)
    until_evaluated(path, 3)
    os.kill(ranks(process.pid)[1], signal.SIGKILL)
    ended(process, 0)
    assert (path / "last.safetensors").read_bytes() == (whole / "last.safetensors").read_bytes()
    assert timeless(path) == timeless(whole)


def test_a_signal_ends_a_process_that_waits_for_the_others(project: Path) -> None:
    variables = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    # The library tells when it begins to wait.
    program = (
        "import attnlm.__main__ as a, attnlm.compute.processes as p; begin = p._run_in_thread\n"
        "p._run_in_thread = lambda work: begin(lambda: (print(1, flush=True), work())[1])\n"
        "a.main()"
    )
    process = started(
        *(sys.executable, "-c", program, "train", "fruits-char", "--name", "alone"),
        cwd=project,
        MASTER_PORT=str(free_port()),
        **variables,
    )
    assert process.stdout is not None and process.stdout.readline() == "1\n"
    time.sleep(0.5)  # until C++ code waits
    process.send_signal(signal.SIGTERM)
    _, stderr = ended(process, 143)
    assert stderr == "stopped before the first step; nothing was saved\n"


def test_a_gpus_training_looks_for_signals_after_each_step(project: Path) -> None:
    """NCCL's wait with a timeout waits for the GPU: a later look would only be too late."""

    class Two(Processes):
        def all_reduce(self, tensor: torch.Tensor) -> None:
            tensor.mul_(2)

    opened = attnlm.open_dataset("fruits-char", data_dir=project / "data")
    config, device = config_of("bigram", 2), choose_device("cpu")
    state = initial_state(config, opened.vocab_size, device)
    stepper = Stepper(state, config, opened, Two(0, 2))
    state.device = replace(device, name="cuda")
    stepper.step()
    stepper.stop.signum = signal.SIGINT
    stepper.stop.check()  # the other process does not know it yet
    stepper.step()
    with pytest.raises(Interrupted):
        stepper.stop.check()


def test_each_machine_prints_the_error_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._C._distributed_c10d import HashStore

    store, said = HashStore(), []
    for rank, machine in enumerate("0011"):
        monkeypatch.setenv("WORLD_SIZE", "4")
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("GROUP_RANK", machine)
        said.append(Processes(rank, 4, store).is_first_to_report())
    assert said == [True, False, True, False]


def test_an_error_of_a_collective_is_a_lost_process_or_nccls_own() -> None:
    from torch.distributed import DistBackendError, DistNetworkError

    gloo = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"
    for lost in (RuntimeError(gloo), RuntimeError("Operation timed out!"), DistNetworkError("x")):
        with pytest.raises(LostProcessError), reporting_lost_processes():
            raise lost
    with pytest.raises(attnlm.AttnlmError) as caught, reporting_lost_processes():
        raise DistBackendError("NCCL error: unhandled cuda error\nOther line")
    said = "communication of the processes failed: NCCL error: unhandled cuda error"
    assert caught.value.message == said
    with pytest.raises(RuntimeError, match="of ours"), reporting_lost_processes():
        raise RuntimeError("of ours")


@pytest.mark.parametrize(
    ("codes", "message", "code"),
    [
        ({0: 75, 1: 75}, "the connection between the processes of this training broke", 1),
        ({0: 75, 1: -9}, "process 1 of the training was killed (SIGKILL)", 1),
        ({0: 75, 1: 2}, None, 2),
        ({0: 75, 1: 70}, None, 70),
        ({0: 75, 1: 130}, "stopped by SIGINT", 130),
    ],
)
def test_the_launcher_prints_errors_that_processes_leave_to_it(
    codes: dict[int, int], message: str | None, code: int
) -> None:
    meant = launcher._make_exception(codes)
    if isinstance(meant, Interrupted):
        assert (str(meant), 128 + meant.signum) == (message, code)
        return
    assert isinstance(meant, attnlm.AttnlmError) and meant.exit_code == code
    assert isinstance(meant, AlreadyReportedError) == (message is None)
    assert message is None or meant.message == message


@pytest.mark.parametrize("rate", ["0.003", "0.004"])
def test_processes_accept_a_finished_run_or_end_with_one_error(
    rate: str, whole: Path, project: Path, tmp_path: Path
) -> None:
    content = contents(whole)
    arguments = tuple(changed(TRAIN, "--learning-rate", rate, "--name", "whole", "--exist-ok"))
    main, other = commands(project, tmp_path, int(rate != "0.003"), arguments, arguments)
    if rate == "0.003":
        assert other == ("", "") and main[0] == "checkpoints/whole\n"
        assert main[1].startswith(
            "whole exists, is finished, and has this configuration: nothing to train\n"
        )
    else:
        told = [line for line in (main[1] + other[1]).splitlines() if line.startswith("error: ")]
        assert told == ["error: a run called whole exists, but its --learning-rate differs"]
    assert contents(whole) == content


def test_a_launcher_of_older_pytorch_has_no_time_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch before 2.13 has no `shutdown_timeout`."""
    from torch.distributed.launcher import api

    launched = []

    class OlderConfig(SimpleNamespace):
        def __init__(self, **options: Any) -> None:
            assert "shutdown_timeout" not in options
            super().__init__(**options)

    monkeypatch.setattr(api, "LaunchConfig", OlderConfig)
    monkeypatch.setattr(api, "elastic_launch", lambda config, _: lambda *_: launched.append(config))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("ATTNLM_LAUNCHER", "")
    run_processes(2, ["train"])
    assert [config.nproc_per_node for config in launched] == [2]
