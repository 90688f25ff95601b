"""Jobs for several processes, which are forked with all modules loaded."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import attnlm
import attnlm.see.curves
from attnlm.__main__ import main
from attnlm.base.process import Interrupted
from attnlm.compute import processes as compute_processes
from attnlm.compute.device import choose_device
from attnlm.compute.processes import Processes, join_processes
from attnlm.config.settings import Config, resolve
from attnlm.config.variants import variant
from attnlm.data.dataset import Dataset, open_dataset
from attnlm.training.state import initial_state
from attnlm.training.step import StepNotFiniteError, Stepper
from attnlm.training.validation import Split, validation_loss
from tests.kit import ATTNLM, forked
from tests.models import timeless

NAMES = ("bigram", "average", "single-head", "multi-head:dropout=0.2", "transformer:dropout=0.2")
STEPS = 6
SENT = {"a": [1, None, "ü"]}


def config_of(name: str, processes: int) -> Config:
    settings: dict[str, Any] = {"batch_size": 12, "block_size": 12, "seed": 3, "steps": 20}
    if name != "bigram":
        settings["micro_batch_size"] = 4
    settings["processes"] = processes
    return resolve({**variant(name), **settings, "threads": 1})


@dataclass(frozen=True)
class ModelNumbers:
    """What a process found of one model; all processes must have the same bytes."""

    gradients: dict[str, torch.Tensor]
    """of the first step"""
    losses: list[float]
    validation_loss: float
    weights: bytes


@dataclass(frozen=True)
class RankResult:
    """What one of several processes found."""

    models: dict[str, ModelNumbers]
    error: str
    """of a loss of the last rank that is NaN in the second step"""
    received: object
    """that rank 0 has sent"""
    subnormal_sum: list[float]
    signals: list[int]
    """that ended an evaluation and a step although only the last rank got one"""


def compute_numbers(name: str, dataset: Dataset, processes: Processes) -> ModelNumbers:
    config, device = config_of(name, processes.count), choose_device("cpu")
    state = initial_state(config, dataset.vocab_size, device)
    stepper, update = Stepper(state, config, dataset, processes), state.optimizer.update
    gradients: list[dict[str, torch.Tensor]] = []

    def recording(*arguments: Any, **options: Any) -> None:
        named = state.model.named_parameters()
        gradients.append({n: p.grad.clone() for n, p in named if p.grad is not None})
        update(*arguments, **options)

    state.optimizer.update = recording  # type: ignore[method-assign]
    losses = [stepper.step().item() for _ in range(STEPS)]
    few = Split(dataset.val[:100])  # fewer windows than processes
    training = replace(config.training, device="cpu", threads=2)
    evaluation = validation_loss(state.model, few, training, None, stepper)
    weights = torch.cat([p.detach().flatten() for p in state.model.parameters()])
    return ModelNumbers(gradients[0], losses, evaluation.loss, weights.numpy().tobytes())


def _bigram_stepper(dataset: Dataset, processes: Processes) -> Stepper:
    config = config_of("bigram", processes.count)
    state = initial_state(config, dataset.vocab_size, choose_device("cpu"))
    return Stepper(state, config, dataset, processes)


def _error_of_a_loss(dataset: Dataset, processes: Processes) -> str:
    stepper = _bigram_stepper(dataset, processes)
    backward = torch.Tensor.backward

    def wrong(loss: torch.Tensor, *arguments: Any) -> None:
        is_last = processes.rank == processes.count - 1
        if stepper.state.step == 1 and is_last:
            loss.detach().fill_(float("nan"))
        backward(loss, *arguments)  # type: ignore[no-untyped-call]

    with (
        mock.patch.object(torch.Tensor, "backward", wrong),
        pytest.raises(StepNotFiniteError) as caught,
    ):
        for _ in range(STEPS):
            stepper.step()
    return str(caught.value)


def _signals_that_end(dataset: Dataset, processes: Processes) -> Iterator[int]:
    for is_evaluation in (True, False):
        stepper = _bigram_stepper(dataset, processes)
        stepper.stop.defer()
        if processes.rank == processes.count - 1:
            stepper.stop.signum = signal.SIGHUP
        stepper.stop.check()  # the others do not know it yet
        with pytest.raises(Interrupted) as caught:
            if is_evaluation:
                training = replace(stepper.config.training, device="cpu")
                validation_loss(stepper.state.model, Split(dataset.val), training, None, stepper)
            else:
                stepper.step()
                stepper.stop.check()
        yield caught.value.signum


def compute(data: Path, out: Path) -> None:
    """Write what this process found into `out`."""
    dataset = open_dataset(data)
    with join_processes() as processes:
        models = {name: compute_numbers(name, dataset, processes) for name in NAMES}
    with join_processes() as processes:  # as in a program that trains twice
        subnormal = torch.full((8,), torch.finfo(torch.float32).tiny / 8)
        processes.all_reduce(subnormal)
        result = RankResult(
            models,
            _error_of_a_loss(dataset, processes),
            processes.broadcast_object(SENT if processes.is_main else None),
            subnormal.tolist(),
            list(_signals_that_end(dataset, processes)),
        )
        (out / f"{processes.rank}.pickle").write_bytes(pickle.dumps(result))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def in_processes(count: int, work: Callable[..., None], *arguments: object, code: int = 0) -> None:
    """Call `work(*arguments)` in `count` processes; check their exit code.

    Nobody ends the others when one fails, so an error does not wait for that.
    """
    port, context = free_port(), forked()
    running = [
        context.Process(target=_as_rank, args=(rank, count, port, work, arguments), daemon=True)
        for rank in range(count)
    ]
    for process in running:
        process.start()
    try:
        for process in running:
            process.join(120)
            assert process.exitcode == code
    finally:
        for process in running:
            process.kill()


def _as_rank(
    rank: int, count: int, port: int, work: Callable[..., None], arguments: Sequence[object]
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    attnlm.see.curves.draw_run = lambda run, path: path.touch()
    compute_processes._SECONDS_TO_BE_STOPPED = 0.0
    work(*arguments)


def run_ranks(
    project: Path, out: Path, code: int, *ranks: Sequence[str], signum: int | None = None
) -> list[tuple[str, str]]:
    """Run `attnlm` with these arguments for each rank; return what each wrote.

    The last rank gets the signal `signum`, if any, before its 71st step.
    """
    in_processes(len(ranks), _command, project, out, ranks, signum, code=code)
    return [
        ((out / f"{rank}-1").read_text(), (out / f"{rank}-2").read_text())
        for rank in range(len(ranks))
    ]


def _command(project: Path, out: Path, ranks: Sequence[Sequence[str]], signum: int | None) -> None:
    rank, step = int(os.environ["RANK"]), Stepper.step

    def stopped(stepper: Stepper) -> torch.Tensor:
        if stepper.state.step == 70 and signum is not None and rank == len(ranks) - 1:
            signal.raise_signal(signum)
        return step(stepper)

    Stepper.step = stopped  # type: ignore[method-assign, assignment]
    for stream in (1, 2):
        os.dup2(os.open(out / f"{rank}-{stream}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    os.chdir(project)
    sys.argv = ["attnlm", *ranks[rank]]
    main()


@contextlib.contextmanager
def started(*arguments: object, cwd: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Start a program, and kill it at the end of this context."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    words, env = [*map(str, arguments)], {**os.environ, **variables}
    with subprocess.Popen(words, cwd=cwd, env=env, encoding="utf-8", **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def finish(process: subprocess.Popen[str], code: int) -> str:
    """Wait for a process, which must end with this code; return what it wrote to stderr."""
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == code, stderr
    assert "Traceback" not in stderr
    return stderr


def wait_until(is_so: Callable[[], object], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.005)


def processes_of_ranks(torchrun: int) -> dict[int, int]:
    """Return the process id of each rank."""
    found = {}
    children = Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text()
    for child in map(int, children.split()):
        variables = Path(f"/proc/{child}/environ").read_bytes()
        if rank := re.search(rb"(?:^|\0)RANK=(\d+)\0", variables):
            found[int(rank[1])] = child
    return found


@dataclass(frozen=True)
class Training:
    """A training of two processes that a test may disturb, and the folder of its run."""

    process: subprocess.Popen[str]
    path: Path


@contextlib.contextmanager
def training_some_way_on(project: Path, arguments: Sequence[str]) -> Iterator[Training]:
    """Train with these arguments, some way before the end; torchrun ends with its ranks."""
    if not Path("/proc/self/task").exists():
        pytest.skip("the ranks of processes are read from /proc")
    path = project / "checkpoints" / f"long-{time.monotonic_ns()}"
    with started(*ATTNLM, *arguments, "--name", path.name, cwd=project) as process:
        try:
            wait_until(lambda: (path / "metrics.jsonl").exists() and len(timeless(path)) >= 3)
            yield Training(process, path)
        finally:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                for rank in processes_of_ranks(process.pid).values():
                    os.kill(rank, signal.SIGKILL)


def train_by_the_clock(data: Path, runs: Path) -> None:
    """Train for 1.5 seconds."""
    settings: dict[str, Any] = {"block_size": 8, "batch_size": 4, "device": "cpu", "budget": 1.5}
    attnlm.train(data, checkpoint_dir=runs, name="run", **settings)
