"""Several processes train as one does: the same numbers, one that writes, and one end."""

from __future__ import annotations

import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import attnlm
from attnlm.base.files import read_json, write_json
from attnlm.base.process import Interrupted
from attnlm.compute.launcher import run_processes
from attnlm.compute.processes import (
    ALONE,
    LostProcessError,
    Processes,
    _reporting_lost_processes,
    join_processes,
)
from attnlm.data.dataset import Dataset
from attnlm.runs.run import open_run
from attnlm.training.forms import prepare_compiler
from tests import processes
from tests.kit import ATTNLM, command, fails, quick_run, with_options
from tests.models import contents, timeless
from tests.processes import RankResult, Training
from tests.tolerances import assert_near

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="gloo and signals of Unix")
TRAIN = (
    *("train", "fruits-char", "--model", "single-head", "--batch-size", "6", "--block-size", "8"),
    *("--optimizer", "adamw", "--learning-rate", "0.003", "--seed", "1", "--processes", "2"),
    *("--steps", "300", "--eval-every", "30"),
)


@pytest.fixture(scope="module")
def ranks(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> list[RankResult]:
    """What each of three processes found."""
    out = tmp_path_factory.mktemp("ranks")
    processes.in_processes(3, processes.compute, dataset.path, out)
    return [pickle.loads((out / f"{rank}.pickle").read_bytes()) for rank in range(3)]


@pytest.mark.parametrize("name", processes.NAMES)
def test_several_processes_compute_the_same_as_one(
    name: str, ranks: list[RankResult], dataset: Dataset
) -> None:
    first, *others = (rank.models[name] for rank in ranks)
    for other in others:
        assert (other.losses, other.weights) == (first.losses, first.weights)
        assert other.validation_loss == first.validation_loss
    alone = processes.compute_numbers(name, dataset, ALONE)
    assert_near(first.gradients, alone.gradients)
    assert first.losses == pytest.approx(alone.losses, rel=1e-5)
    assert first.validation_loss == pytest.approx(alone.validation_loss, rel=1e-5)


def test_all_processes_name_the_step_with_a_loss_that_is_not_finite(
    ranks: list[RankResult],
) -> None:
    (error,) = {rank.error for rank in ranks}
    assert "finite numbers (between steps 1 and 2)" in error


def test_all_processes_get_the_object_of_rank_0(ranks: list[RankResult]) -> None:
    assert [rank.received for rank in ranks] == [processes.SENT] * 3


@pytest.mark.skipif(sys.platform != "linux", reason="threads inherit modes on Linux")
def test_sums_of_processes_are_flushed(ranks: list[RankResult]) -> None:
    assert [rank.subnormal_sum for rank in ranks] == [[0.0] * 8] * 3


def test_a_signal_to_the_last_process_ends_the_work_of_all(ranks: list[RankResult]) -> None:
    """The others, which got none, end as by SIGTERM."""
    expected = [signal.SIGTERM, signal.SIGTERM, signal.SIGHUP]
    assert [rank.signals for rank in ranks] == [[signum] * 2 for signum in expected]


@pytest.fixture(scope="module")
def whole(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes without interruption."""
    arguments = (*TRAIN, "--name", "whole")
    main, other = processes.run_ranks(
        project, tmp_path_factory.mktemp("out"), 0, arguments, arguments
    )
    assert main[0] == "checkpoints/whole\n" and main[1].count("best loss") == 1
    assert other == ("", "")
    return project / "checkpoints" / "whole"


def test_two_processes_write_the_same_run_as_one(whole: Path, project: Path) -> None:
    run = open_run(whole)
    assert run.config.training.processes == 2
    settings: dict[str, Any] = {**run.config.settings(), "processes": 1}
    alone = attnlm.train(project / "data/fruits-char", checkpoint_dir=project / "alone", **settings)
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
    with processes.training_some_way_on(project, TRAIN) as training:
        yield training


def test_a_signal_to_one_process_saves_once_and_ends_all(
    whole: Path, project: Path, tmp_path: Path
) -> None:
    """Resuming gives the bytes of the uninterrupted run."""
    words = [(*TRAIN, "--name", "stopped")] * 2
    said = processes.run_ranks(project, tmp_path, 143, *words, signum=signal.SIGTERM)
    stderr = "".join(one for _, one in said)
    assert stderr.count("stopped; the last complete step, ") == 1
    assert "error: " not in stderr
    path = whole.with_name("stopped")
    assert attnlm.open_run(path).checkpoint("last").step == 71
    processes.run_ranks(project, tmp_path, 0, *[("train", "--resume", "stopped")] * 2)
    assert (path / "last.safetensors").read_bytes() == (whole / "last.safetensors").read_bytes()
    assert timeless(path) == timeless(whole)


def test_a_signal_to_the_command_saves_once(training: Training) -> None:
    training.process.send_signal(signal.SIGINT)
    stderr = processes.finish(training.process, 128 + signal.SIGINT)
    assert stderr.count("stopped; the last complete step, ") == 1
    assert "error: " not in stderr
    assert attnlm.open_run(training.path).checkpoint("last").step % 30


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_all_processes_end_when_one_is_killed(rank: int, training: Training) -> None:
    os.kill(processes.processes_of_ranks(training.process.pid)[rank], signal.SIGKILL)
    stderr = processes.finish(training.process, 1)
    assert stderr.count("error: ") == 1
    assert f"error: process {rank} of the training was killed (SIGKILL)" in stderr
    step = attnlm.open_run(training.path).checkpoint("last").step
    assert step > 0
    data_dir = training.path.parents[1] / "data"
    run = attnlm.train(resume=training.path, processes=1, steps=step + 1, data_dir=data_dir)
    assert run.metrics()[-1]["step"] == step + 1


@pytest.mark.parametrize("has_begun", [False, True])
def test_no_process_outlives_a_launcher_that_was_killed(has_begun: bool, project: Path) -> None:
    """Before the first evaluation, the processes have not yet looked for each other."""
    if not Path("/proc/self/task").exists():
        pytest.skip("the ranks of processes are read from /proc")
    name = f"killed-{has_begun}"
    metrics = project / "checkpoints" / name / "metrics.jsonl"
    ranks: dict[int, int] = {}

    def may_be_killed() -> bool:
        ranks.update(processes.processes_of_ranks(process.pid))
        return len(ranks) == 2 and has_begun <= metrics.exists()

    def all_have_ended() -> bool:
        return not any(Path(f"/proc/{rank}").exists() for rank in ranks.values())

    with processes.started(*ATTNLM, *TRAIN, "--name", name, cwd=project) as process:
        processes.wait_until(may_be_killed)
        process.kill()
        processes.wait_until(all_have_ended, 30)


@pytest.mark.parametrize("way", ["option", "recipe", "resume"])
def test_nothing_in_the_current_folder_is_imported_and_the_error_is_one_line(
    way: str, project: Path, whole: Path, tmp_path: Path
) -> None:
    """`python -m`, by which torchrun starts the processes, would import it."""
    (tmp_path / "torch").mkdir()
    for name in ("torch/__init__.py", "typer.py"):
        (tmp_path / name).write_text("raise SystemExit('imported')")
    (tmp_path / "two.toml").write_text("processes = 2\nbatch_size = 6\nblock_size = 9999")
    ways: dict[str, Sequence[object]] = {
        "option": with_options(TRAIN, "--block-size", "9999"),
        "recipe": ["train", "fruits-char", "--recipe", "two.toml"],
        "resume": ["train", "--resume", whole, "--steps", "1"],
    }
    attnlm = sys.executable, "-m", "attnlm"
    folders = "--data-dir", project / "data", "--checkpoint-dir", tmp_path
    with processes.started(*attnlm, *ways[way], *folders, cwd=tmp_path) as process:
        stderr = processes.finish(process, 1)
    error, hint = stderr.splitlines()
    said = "whole has already made 300 steps" if way == "resume" else "the validation split has "
    assert error.startswith(f"error: {said}") and hint.startswith("hint: ")


def test_a_resumed_run_keeps_its_processes_if_the_machine_has_cores_for_them(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = quick_run(dataset, "bigram", checkpoint_dir=tmp_path, batch_size=9999).path
    started: list[str] = []
    monkeypatch.setattr("attnlm.compute.launcher.cores", lambda: 2)
    monkeypatch.setattr("torch.distributed.run.main", lambda words: started.append(words[3]))
    words: list[object] = ["train", "--resume", path, "--steps", "8"]
    for recorded, typed, refused in (
        (3, [], ""),
        (9999, ["--processes", "3"], ""),
        (9999, [], "9,999"),
        (3, ["--processes", "9"], "9"),
    ):
        content = read_json(path / "config.json")
        config = {**content["config"], "processes": recorded}
        write_json(path / "config.json", {**content, "config": config})
        if refused:
            says = f"--processes {refused} are too many for this machine, which has 2 cores"
            fails(*words, *typed, cwd=tmp_path, code=2, says=says, hints="--processes 8 or less")
        else:
            command(*words, *typed, cwd=tmp_path)
    assert started == ["--nproc-per-node=3"] * 2


def test_the_compiler_imports_nothing_from_the_current_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("PYTHONSAFEPATH", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("ATTNLM_CACHE_DIR", str(tmp_path))
    prepare_compiler()
    (tmp_path / "ctypes.py").write_text("raise SystemExit('imported')")
    subprocess.run([sys.executable, "-c", "import ctypes"], cwd=tmp_path, check=True)


def test_a_signal_ends_a_process_that_waits_for_the_others(project: Path) -> None:
    """In C++ code, which listens to them already."""
    address = "127.0.0.1", processes.free_port()
    names = {"MASTER_ADDR": address[0], "MASTER_PORT": str(address[1])}
    words = (*ATTNLM, "train", "fruits-char", "--name", "alone")

    def listens() -> bool:
        with socket.socket() as client:
            return client.connect_ex(address) == 0

    with processes.started(*words, cwd=project, WORLD_SIZE="2", RANK="0", **names) as process:
        processes.wait_until(listens)
        process.send_signal(signal.SIGTERM)
        assert processes.finish(process, -signal.SIGTERM) == ""


@pytest.mark.parametrize(
    ("rank", "error", "seconds"),
    [
        ("0", RuntimeError("of ours"), 0.0),
        ("0", LostProcessError("another has ended", "see there"), 5.0),
        ("1", RuntimeError("of ours"), 5.0),
        ("1", LostProcessError("another has ended", "see there"), 10.0),
    ],
)
def test_an_error_is_raised_first_where_it_should_be_reported(
    rank: str, error: Exception, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.setattr("attnlm.compute.processes._connect", lambda: Processes(int(rank), 2))
    for name, value in {"WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(type(error)), join_processes():
        raise error
    assert waited == [seconds]


def test_an_error_of_a_collective_is_a_lost_process() -> None:
    from torch.distributed import DistBackendError

    gloo = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"
    nccl = "NCCL error: unhandled cuda error\nOther line"
    for error, message in {
        RuntimeError(gloo): "another process of this training has ended or does not answer",
        DistBackendError(nccl): "communication of the processes failed: "
        "NCCL error: unhandled cuda error",
    }.items():
        with pytest.raises(LostProcessError) as caught, _reporting_lost_processes():
            raise error
        assert caught.value.message == message


@pytest.mark.parametrize(
    ("code", "said"),
    [(-9, "process 1 of the training was killed (SIGKILL)"), (130, "stopped by SIGINT"), (2, None)],
)
def test_the_command_ends_as_the_process_that_failed_first(
    code: int, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    given = ["train", "--log", "tensorboard", "--max-restarts", "--", "-m"]

    def fail(arguments: list[str]) -> None:
        assert run.parse_args(arguments).training_script_args == given
        raise ChildFailedError("attnlm", {1: ProcessFailure(1, 1234, code, "no.json")})

    monkeypatch.setattr(run, "main", fail)
    for name in ("OMP_NUM_THREADS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
        monkeypatch.setenv(name, "1")
    if said is None:
        assert run_processes(2, given) == code
    else:
        with pytest.raises((attnlm.AttnlmError, Interrupted), match=re.escape(said)):
            run_processes(2, given)


def test_processes_accept_a_finished_run(whole: Path, project: Path, tmp_path: Path) -> None:
    content, words = contents(whole), (*TRAIN, "--name", "whole", "--exist-ok")
    main, other = processes.run_ranks(project, tmp_path, 0, words, words)
    assert other == ("", "") and main[0] == "checkpoints/whole\n"
    assert main[1].startswith("whole is finished, and has this configuration")
    assert contents(whole) == content


def test_an_error_of_rank_0_ends_all_and_each_says_why(
    whole: Path, project: Path, tmp_path: Path
) -> None:
    words = with_options(TRAIN, "--learning-rate", "0.004", "--name", "whole", "--exist-ok")
    said = processes.run_ranks(project, tmp_path, 1, words, words)
    assert [stderr.splitlines()[0] for _, stderr in said] == [
        "error: a run called whole exists, but its --learning-rate differs",
        "error: another process of this training has ended or does not answer",
    ]
