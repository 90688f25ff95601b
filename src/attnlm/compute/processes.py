"""Processes that train one model by torch.distributed, started by torchrun or launcher.py."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from attnlm.base.errors import AlreadyReportedError, AttnlmError
from attnlm.compute.threads import flush_subnormals

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import Store

_Result = TypeVar("_Result")

_TIMEOUT = timedelta(minutes=30)
"""How long a collective waits for the other processes: they may compile, plan and write first."""
_SIGNAL_CHECK_SECONDS = 0.5  # seconds between a waiting process's checks for signals
_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
_trainings = itertools.count()

# Variables that a launcher such as torchrun sets.
_COUNT = "WORLD_SIZE"
_RANK = "RANK"
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
_MACHINE = "GROUP_RANK"
_LOCAL_RANK = "LOCAL_RANK"
_LOCAL_COUNT = "LOCAL_WORLD_SIZE"
OUR_LAUNCHER = "ATTNLM_LAUNCHER"
"""The variable that our launcher sets."""
LEFT_TO_LAUNCHER = 75
"""The exit code of a process whose error our launcher reports."""


class LostProcessError(Exception):
    """Raised when another process has ended or does not answer."""


class Processes:
    """This process, rank `rank` of `count`, and its communication with the other processes.

    If `count` is 1, no method waits.
    """

    def __init__(self, rank: int = 0, count: int = 1, store: Store | None = None) -> None:
        self.rank, self.count, self._store = rank, count, store
        self._meshes: dict[str, DeviceMesh] = {}  # by device

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

            with reporting_lost_processes():
                # With a timeout, NCCL raises an error in this thread if a process is lost.
                dist.all_reduce(tensor, async_op=True).wait(_TIMEOUT)

    def broadcast(self, tensor: Tensor) -> None:
        """Broadcast rank 0's tensor to all processes. Raises LostProcessError."""
        if self.count > 1:
            import torch.distributed as dist

            with reporting_lost_processes():
                dist.broadcast(tensor, 0, async_op=True).wait(_TIMEOUT)

    def broadcast_object(self, value: Any) -> Any:
        """Broadcast rank 0's value to all processes, and return it. Raises LostProcessError."""
        if self.count == 1:
            return value
        import torch.distributed as dist

        values = [value]
        with reporting_lost_processes():
            dist.broadcast_object_list(values, 0)
        return values[0]

    def mesh(self, device: str) -> DeviceMesh:
        """Return a 1-D mesh of all processes, for sharding. Each process must call this."""
        from torch.distributed.device_mesh import init_device_mesh

        if device not in self._meshes:
            self._meshes[device] = init_device_mesh(device, (self.count,))
        return self._meshes[device]

    def is_first_to_report(self) -> bool:
        """Return True in one process per machine, so that each machine reports an error once."""
        if self._store is None:
            return True
        try:
            return self._store.add(f"reported/{os.environ.get(_MACHINE, '')}", 1) == 1
        except RuntimeError:  # the process that kept the store has ended
            return _is_first_of_machine()


ALONE = Processes()


def rows_of_rank(rows: int, rank: int, count: int) -> slice:
    """Return the slice of process `rank` if `count` processes divide a tensor of `rows` rows. As in
    torch.chunk, slices have equal size, except that the last processes have fewer rows or none."""
    size = -(-rows // count)
    return slice(min(rows, rank * size), min(rows, (rank + 1) * size))


def _run_in_thread(work: Callable[[], _Result]) -> _Result:
    """Compute a result in a new thread: the main thread can't handle signals in C++ code."""
    future = Future[_Result]()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    # A signal that comes just before a wait does not interrupt that wait: it is handled afterwards.
    while not wait([future], timeout=_SIGNAL_CHECK_SECONDS).done:
        pass
    return future.result()


@contextlib.contextmanager
def reporting_lost_processes() -> Iterator[None]:
    """Convert an error of a collective to LostProcessError, or to AttnlmError if it is NCCL's own.

    Gloo raises a plain RuntimeError, which names its source file, if a process does not answer.
    """
    try:
        yield
    except RuntimeError as error:
        import torch.distributed as dist

        if isinstance(error, dist.DistBackendError):
            raise AttnlmError(
                f"communication of the processes failed: {str(error).splitlines()[0]}",
                "resume the run from its last checkpoint; if it fails again, try another `device`",
            ) from error
        if isinstance(error, dist.DistError) or "gloo" in str(error) or "timed out" in str(error):
            raise LostProcessError from error
        raise


def is_launched() -> bool:
    """Return True if a launcher such as torchrun has started this process."""
    return bool(os.environ.get(_COUNT) and os.environ.get(_RANK))


def local_count() -> int:
    """Return the number of processes on this machine if the launcher reports it, else 1."""
    return int(os.environ.get(_LOCAL_COUNT) or 1) if is_launched() else 1


def is_main() -> bool:
    """Return True if this process reports: it is rank 0 or the only one. Does not import torch."""
    return not is_launched() or os.environ[_RANK] == "0"


def restart_count() -> int:
    """Return how often the launcher has restarted these processes."""
    return int(os.environ.get(_RESTARTS) or 0) if is_launched() else 0


def _is_first_of_machine() -> bool:
    return os.environ.get(_LOCAL_RANK, "0") == "0"


@contextlib.contextmanager
def join_processes() -> Iterator[Processes]:
    """Connect to the other processes that a launcher has started, and yield `Processes`.

    Yield ALONE without other processes. If the processes end with an error, one process on
    each machine raises the error, and the other processes raise AlreadyReportedError. If the error
    is that another process has ended, and our launcher reports this, then all processes raise
    AlreadyReportedError.
    """
    if not is_launched() or os.environ[_COUNT] == "1":
        yield ALONE
        return
    if OUR_LAUNCHER in os.environ and sys.platform == "linux":
        # Make this process end when our launcher is killed.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    import torch.distributed as dist

    processes = _connect(int(os.environ[_RANK]), int(os.environ[_COUNT]))
    try:
        yield processes
    except LostProcessError:
        if OUR_LAUNCHER in os.environ:
            raise AlreadyReportedError(LEFT_TO_LAUNCHER) from None
        if not _is_first_of_machine():
            raise AlreadyReportedError from None
        raise AttnlmError(
            "another process of this training has ended or does not answer",
            "see the messages of all processes, then resume the run from its last checkpoint",
        ) from None
    except Exception as error:
        if not processes.is_first_to_report():
            raise AlreadyReportedError(getattr(error, "exit_code", 1)) from None
        raise
    dist.destroy_process_group()  # after an error this would wait for the others


def _connect(rank: int, count: int) -> Processes:
    """Connect to the other processes. Raises AttnlmError if they can't be reached."""
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get(_LOCAL_RANK, 0)) % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"

    def meet() -> Store:
        # Each training of a program needs its own keys in the store. So does each restart, since
        # the store still has what the earlier processes wrote.
        store = PrefixStore(f"attnlm/{restart_count()}/{next(_trainings)}", _shared_store())
        flush_subnormals()  # the threads that sum gradients start here
        dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=_TIMEOUT)
        return store

    try:
        return Processes(rank, count, _run_in_thread(meet))
    except (RuntimeError, ValueError) as error:
        raise AttnlmError(
            f"the processes cannot reach each other: {str(error).splitlines()[0]}",
            "check MASTER_ADDR, MASTER_PORT and the network between the machines; "
            "GLOO_SOCKET_IFNAME (on GPUs also NCCL_SOCKET_IFNAME) selects the network interface",
        ) from None


@functools.cache
def _shared_store() -> Store:
    """Return a key-value store: the launcher's, which outlives the processes, or else rank 0's."""
    import torch.distributed as dist

    store: Store = next(dist.rendezvous("env://", timeout=_TIMEOUT))[0]  # type: ignore[attr-defined]
    return store
