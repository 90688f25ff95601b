"""Jobs for several processes, which are forked with all modules loaded."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import attnlm
import attnlm.see.curves
from attnlm.__main__ import main
from attnlm.base.signals import Interrupted
from attnlm.compute import processes as compute_processes
from attnlm.compute.device import choose_device
from attnlm.compute.processes import Processes, join_processes
from attnlm.config.settings import Config, resolve
from attnlm.config.variants import variant
from attnlm.data.dataset import Dataset, open_dataset
from attnlm.training.state import initial_state
from attnlm.training.step import Replica, StepNotFiniteError, Stepper
from attnlm.training.validation_loss import validation_loss
from tests.kit import ATTNLM, forked
from tests.models import timeless

NAMES = ("bigram", "average", "single-head", "multi-head:dropout=0.2", "transformer:dropout=0.2")
STEPS = 6


def config_of(name: str, processes: int) -> Config:
    settings: dict[str, Any] = {"batch_size": 12, "block_size": 12, "seed": 3, "steps": 20}
    if name != "bigram":
        settings["micro_batch_size"] = 4
    settings["processes"] = processes
    return resolve({**variant(name), **settings, "threads": 1})


def numbers(name: str, dataset: Dataset, processes: Processes) -> dict[str, Any]:
    """Return the gradients of a step, the losses of some, the loss over the validation split, and
    all weights. Every process returns what it found: all must have the same bytes."""
    config, device = config_of(name, processes.count), choose_device("cpu")
    state = initial_state(config, dataset.vocab_size, device)
    stepper, optimizer = Stepper(state, config, dataset, processes), state.optimizer
    update = optimizer.update
    gradients = []

    def recording(*arguments: Any, **options: Any) -> None:
        named = state.model.named_parameters()
        gradients.append({n: p.grad.clone() for n, p in named if p.grad is not None})
        update(*arguments, **options)

    optimizer.update = recording  # type: ignore[method-assign]
    losses = [stepper.step().item() for _ in range(STEPS)]
    evaluation = validation_loss(
        state.model,
        dataset.val[:100],  # fewer windows than processes
        device,
        bytes_per_token=1.0,
        threads=2,
        processes=processes,
    )
    return {
        "gradients": gradients[:1],
        "losses": losses,
        "validation": evaluation.loss,
        "values": torch.cat([p.detach().flatten() for p in state.model.parameters()]).numpy(),
    }


def failure(dataset: Dataset, processes: Processes) -> str:
    """Return the errors of all ranks if the last rank's loss is NaN in the second step."""
    config = config_of("bigram", processes.count)
    state = initial_state(config, dataset.vocab_size, choose_device("cpu"))
    stepper = Stepper(state, config, dataset, processes)
    computed = Replica.backward

    def wrong(replica: Replica, step: int, *arguments: Any) -> torch.Tensor:
        loss = computed(replica, step, *arguments)
        is_last = processes.rank == processes.count - 1
        return loss * float("nan") if step == 1 and is_last else loss

    Replica.backward = wrong  # type: ignore[method-assign, assignment]
    try:
        for _ in range(STEPS):
            stepper.step()
    except StepNotFiniteError as error:
        return str(error)
    finally:
        Replica.backward = computed  # type: ignore[method-assign]
    return "nothing"


def stopped(dataset: Dataset, processes: Processes) -> list[int]:
    """Return the signals that end an evaluation and a step when only the last process gets one."""
    config, device = config_of("bigram", processes.count), choose_device("cpu")
    state = initial_state(config, dataset.vocab_size, device)
    found = []
    for is_evaluation in (True, False):
        stepper = Stepper(state, config, dataset, processes)
        stepper.stop.defer()
        if processes.rank == processes.count - 1:
            stepper.stop.signum = signal.SIGHUP
        try:
            stepper.stop.check()  # the others do not know it yet
            if is_evaluation:
                about: dict[str, Any] = {"bytes_per_token": 1.0, "processes": processes}
                validation_loss(state.model, dataset.val, device, stop=stepper.stop, **about)
            else:
                stepper.step()
                stepper.stop.check()
        except Interrupted as stop:
            found.append(stop.signum)
    return found


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
    for process in running:
        process.join(60)
        assert process.exitcode == code


def _as_rank(
    rank: int, count: int, port: int, work: Callable[..., None], arguments: Sequence[object]
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    attnlm.see.curves.draw_run = lambda run, path: path.touch()
    compute_processes._SECONDS_TO_BE_STOPPED = 0.0
    work(*arguments)


def commands(
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


def start(*arguments: object, cwd: Path, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


def finish(process: subprocess.Popen[str], code: int) -> tuple[str, str]:
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    assert "Traceback" not in stderr
    return stdout, stderr


def until_evaluated(path: Path, times: int) -> None:
    for _ in range(6000):
        if (path / "metrics.jsonl").exists() and len(timeless(path)) >= times:
            return
        time.sleep(0.005)
    raise AssertionError("it does not train")


def processes_of_ranks(torchrun: int) -> dict[int, int]:
    """Return the process id of each rank."""
    children = Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split()
    found = {}
    for child in map(int, children):
        variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        found[next(int(v[5:]) for v in variables if v.startswith(b"RANK="))] = child
    return found


class Training(NamedTuple):
    """A training of two processes that a test may disturb, and the folder of its run."""

    process: subprocess.Popen[str]
    path: Path


@contextlib.contextmanager
def training_some_way_on(project: Path, arguments: Sequence[str]) -> Iterator[Training]:
    """Train with these arguments, some way before the end."""
    if not Path("/proc/self/task").exists():
        pytest.skip("the ranks of processes are read from /proc")
    path = project / "checkpoints" / f"long-{time.monotonic_ns()}"
    process = start(*ATTNLM, *arguments, "--name", path.name, cwd=project)
    until_evaluated(path, 3)
    yield Training(process, path)
    process.kill()


def train_by_the_clock(data: Path, runs: Path) -> None:
    """Train for 1.5 seconds."""
    settings: dict[str, Any] = {"block_size": 8, "batch_size": 4, "device": "cpu", "budget": 1.5}
    attnlm.train(data, checkpoint_dir=runs, name="run", **settings)


def compute(data: Path, out: Path) -> None:
    """Write what this process found into `out`."""
    dataset = open_dataset(data)
    with join_processes() as processes:
        found = {name: numbers(name, dataset, processes) for name in NAMES}
    with join_processes() as processes:  # as in a program that trains twice
        subnormal = torch.full((8,), torch.finfo(torch.float32).tiny / 8)
        processes.all_reduce(subnormal)
        told = processes.broadcast_object({"a": [1, None, "ü"]} if processes.is_main else None)
        failed = failure(dataset, processes)
        content = found, failed, told, subnormal.tolist(), stopped(dataset, processes)
        (out / f"{processes.rank}.pickle").write_bytes(pickle.dumps(content))
