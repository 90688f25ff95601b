"""Processes that train one model by torch.distributed, started by torchrun."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from attnlm.base.errors import AttnlmError
from attnlm.base.process import stop_signals
from attnlm.compute.threads import flush_subnormals

if TYPE_CHECKING:
    from torch import Tensor

_TIMEOUT = timedelta(minutes=30)
"""How long a collective waits for the other processes: they may compile and write first."""
_TIME_TO_JOIN = timedelta(minutes=2)
"""How long a process waits at the start for the others, which torchrun starts at the same time."""
SECONDS_TO_SAVE = 120
"""How long a process may take to end after a signal."""
_SECONDS_TO_BE_STOPPED = 5.0
"""How long an error waits for torchrun to end this process because another one failed first."""

# Variables that torchrun sets.
_COUNT = "WORLD_SIZE"
_RANK = "RANK"
_LOCAL_RANK = "LOCAL_RANK"
_LOCAL_COUNT = "LOCAL_WORLD_SIZE"
_RUN_ID = "TORCHELASTIC_RUN_ID"
LAUNCHER = "ATTNLM_LAUNCHER"
"""The process id of torchrun, if attnlm started it: it may end before this process asks for it."""


class LostProcessError(AttnlmError):
    """Raised when another process has ended or does not answer."""


@dataclass(frozen=True)
class Processes:
    """This process, rank `rank` of `count`, and its communication with the other processes.

    If `count` is 1, no method waits.
    """

    rank: int = 0
    count: int = 1

    @property
    def is_main(self) -> bool:
        """Return True if this process is rank 0, which writes and reports."""
        return self.rank == 0

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace the tensor by its sum over all processes, which has the same bytes in all.

        Raises LostProcessError.
        """
        if self.count > 1:
            import torch.distributed as dist

            with _reporting_lost_processes():
                # With a timeout, NCCL raises an error in this thread if a process is lost.
                dist.all_reduce(tensor, async_op=True).wait(_TIMEOUT)

    def broadcast(self, tensor: Tensor) -> None:
        """Broadcast rank 0's tensor to all processes. Raises LostProcessError."""
        if self.count > 1:
            import torch.distributed as dist

            with _reporting_lost_processes():
                dist.broadcast(tensor, 0, async_op=True).wait(_TIMEOUT)

    def broadcast_object(self, value: Any) -> Any:
        """Broadcast rank 0's value to all processes, and return it. Raises LostProcessError."""
        if self.count == 1:
            return value
        import torch.distributed as dist

        values = [value]
        with _reporting_lost_processes():
            dist.broadcast_object_list(values, 0)
        return values[0]


ALONE = Processes()


@contextlib.contextmanager
def _reporting_lost_processes() -> Iterator[None]:
    """Convert an error of a collective to LostProcessError."""
    try:
        yield
    except RuntimeError as error:
        import torch.distributed as dist

        message = "another process of this training has ended or does not answer"
        if isinstance(error, dist.DistBackendError):  # NCCL's
            message = f"communication of the processes failed: {str(error).splitlines()[0]}"
        raise LostProcessError(
            message,
            "see the messages of all processes, then resume the run from its last checkpoint",
        ) from error


def is_launched() -> bool:
    """Return True if torchrun has started this process."""
    return bool(os.environ.get(_COUNT) and os.environ.get(_RANK))


def local_count() -> int:
    """Return the number of processes on this machine if torchrun reports it, else 1."""
    return int(os.environ.get(_LOCAL_COUNT) or 1) if is_launched() else 1


def is_main() -> bool:
    """Return True if this process reports: it is rank 0 or the only one. Does not import torch."""
    return not is_launched() or os.environ[_RANK] == "0"


@functools.cache
def end_with_launcher() -> None:
    """Stop this process, as SIGTERM does, as soon as the torchrun that started it is gone."""
    launcher = int(os.environ.pop(LAUNCHER, 0)) or os.getppid()  # not for what this one starts

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(SECONDS_TO_SAVE)
        os._exit(1)

    if os.environ.get(_RUN_ID):
        threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def join_processes() -> Iterator[Processes]:
    """Connect to the other processes that torchrun has started, and yield `Processes`.

    Yield ALONE without other processes. An error is raised first in the process that should report
    it: one that did not lose another process, of these the first of its machine. torchrun then ends
    the other processes of the machine, which wait for this before they raise theirs.
    """
    if not is_launched() or os.environ[_COUNT] == "1":
        yield ALONE
        return
    processes = _connect()
    try:
        yield processes
    except Exception as error:
        is_first = os.environ.get(_LOCAL_RANK, "0") == "0"
        waits = isinstance(error, LostProcessError) + (not is_first)
        time.sleep(waits * _SECONDS_TO_BE_STOPPED)
        raise


@functools.cache
def _connect() -> Processes:
    """Connect to the other processes, for all trainings of this process.

    Raises AttnlmError if they can't be reached.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    end_with_launcher()
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get(_LOCAL_RANK, 0)) % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    flush_subnormals()  # the threads that sum gradients start here
    try:
        with _ended_by_signals():
            store, rank, count = next(rendezvous("env://", timeout=_TIME_TO_JOIN))
            store.set(f"attnlm/{rank}", b"")
            store.wait([f"attnlm/{other}" for other in range(count)], _TIME_TO_JOIN)
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=count, timeout=_TIMEOUT
            )
    except (RuntimeError, ValueError) as error:
        raise AttnlmError(
            f"the processes cannot reach each other: {str(error).splitlines()[0]}",
            "check MASTER_ADDR, MASTER_PORT and the network between the machines; "
            "GLOO_SOCKET_IFNAME (on GPUs also NCCL_SOCKET_IFNAME) selects the network interface",
        ) from None
    return Processes(dist.get_rank(), dist.get_world_size())


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let signals end the process in this context: in C++ code, Python does not handle them."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {signum: signal.signal(signum, signal.SIG_DFL) for signum in stop_signals()}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
