"""Processes that train one model by torch.distributed, started by torchrun or `run_processes`."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import json
import logging
import os
import re
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from attnlm.base.errors import AlreadyReportedError, AttnlmError, UsageError
from attnlm.base.signals import Interrupted
from attnlm.compute.threads import FlushingHere, cores

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import Store

_Result = TypeVar("_Result")

# How long a collective waits for the other processes, in seconds. After the first work of a kind
# (a step, an evaluation), and in broadcasts, it waits _AT_FIRST: processes may compile, and rank 0
# plans, writes and draws samples. After later work of this kind, it waits _TIMES the longest time
# that such work took in any process, plus _MORE.
_AT_FIRST, _TIMES, _MORE = 1800.0, 10.0, 20.0
_ON_GPU = 300.0  # seconds: a GPU's collectives are started long before the GPU runs them
_STORE_ANSWERS = 5.0  # seconds to wait for the store's answer
_LOOK = 0.5  # seconds between a waiting process's checks for signals
_TO_SAVE = 120  # seconds to save after a signal; then `run_processes` kills the processes
_SILENT = re.compile(r"tim(ed|ing) out|timeout (caused|after)|socket timeout", re.IGNORECASE)
_ENDED = re.compile(
    r"connection (was )?(closed|reset|refused|abort)|broken pipe|failed to (recv|send)"
    r"|no route to host|unreachable|remote process|ncclRemoteError|communicator was aborted",
    re.IGNORECASE,
)
_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
_trainings = itertools.count()

# Variables that a launcher such as torchrun sets.
_COUNT, _RANK, _RESTARTS = "WORLD_SIZE", "RANK", "TORCHELASTIC_RESTART_COUNT"
_HOST, _PORT, _MOST = "MASTER_ADDR", "MASTER_PORT", 10**6
_MACHINE, _LOCAL_RANK, _LOCAL_COUNT = "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
_WATCHED = "ATTNLM_WATCHED"
"""The variable that `run_processes`, our launcher, sets to the launcher's process id."""
_LEFT_TO_LAUNCHER = 75
"""The exit code of a process whose error our launcher reports."""


class LostProcessError(Exception):
    """Raised when another process has ended or, if `is_silent`, does not answer."""

    def __init__(self, *, is_silent: bool) -> None:
        super().__init__()
        self.is_silent = is_silent


class Processes:
    """This process, rank `rank` of `count`, and its communication with the other processes.

    If `count` is 1, no method waits.
    """

    def __init__(self, rank: int = 0, count: int = 1, store: Store | None = None) -> None:
        self.rank, self.count, self._store = rank, count, store
        self._met = time.monotonic()  # when the last collective ended
        self._longest: dict[str, float] = {}  # between two collectives, in seconds, by kind of work
        self._meshes: dict[str, DeviceMesh] = {}  # by device

    @property
    def is_main(self) -> bool:
        """Return True if this process is rank 0, which writes and reports."""
        return self.rank == 0

    def all_reduce(self, tensor: Tensor, after: str) -> None:
        """Replace the tensor by its sum over all processes, by an all-reduce.

        The sum has the same bytes in all processes. The string `after` names the work that the
        processes do before this call, such as "a step". Raises LostProcessError if another process
        has ended, or takes far longer for work of this name than any process did before.
        """
        if self.count > 1:
            import torch.distributed as dist

            self._wait(lambda: dist.all_reduce(tensor, async_op=True), after)

    def broadcast(self, tensor: Tensor) -> None:
        """Broadcast rank 0's tensor to all processes. Raises LostProcessError."""
        if self.count > 1:
            import torch.distributed as dist

            self._wait(lambda: dist.broadcast(tensor, 0, async_op=True))

    def broadcast_object(self, values: Any) -> Any:
        """Broadcast rank 0's JSON values, and return them. Raises LostProcessError."""
        if self.count == 1:
            return values
        import torch

        text = json.dumps(values).encode() if self.is_main else b""
        size = torch.tensor(len(text))
        self.broadcast(size)
        content = torch.tensor(list(text.ljust(int(size))), dtype=torch.uint8)
        self.broadcast(content)
        return json.loads(bytes(content.tolist()))

    def mesh(self, device: str) -> DeviceMesh:
        """Return a 1-D mesh of all processes, for sharding. Each process must call this."""
        from torch.distributed.device_mesh import DeviceMesh

        if device not in self._meshes:
            group = self.new_group(_MORE if device == "cpu" else _ON_GPU)
            self._meshes[device] = DeviceMesh.from_group(group, device)
        return self._meshes[device]

    def new_group(self, patience: float = _AT_FIRST, backend: str | None = None) -> ProcessGroup:
        """Return a group whose collectives time out after `patience` seconds.

        Each process must call this.
        """
        import torch.distributed as dist

        group: ProcessGroup = dist.new_group(timeout=timedelta(seconds=patience), backend=backend)
        return group

    def is_first_to_say(self) -> bool:
        """Return True in one process per machine, so that each machine reports an error once."""
        if (store := self._store) is None:
            return True
        key = f"said/{restarts()}/{os.environ.get(_MACHINE, '')}"
        try:  # with a broken connection, `add` blocks forever
            return _in_thread(lambda: store.add(key, 1), _STORE_ANSWERS) == 1
        except (RuntimeError, TimeoutError):  # the process that kept the store has ended
            local = _variable(_LOCAL_RANK)
            return self.rank == 1 or (self.rank if local is None else local) == 0

    def remember(self, key: str, text: str) -> None:
        """Store a text that `recalled` returns after the launcher has restarted the processes."""
        if self._store is not None:
            self._store.set(key, json.dumps(text))  # in ASCII, since a path may have any characters

    def recalled(self, key: str) -> str | None:
        """Return the text that `remember` kept before the processes were restarted, or None."""
        if self._store is None or not restarts() or not self._store.check([key]):
            return None
        return str(json.loads(self._store.get(key)))

    def _wait(self, start: Callable[[], Any], after: str | None = None) -> None:
        """Start a collective and wait until it is done. `all_reduce` explains `after`."""
        ours = time.monotonic() - self._met
        theirs = self._longest.get(after or "")
        patience = _AT_FIRST if theirs is None else _MORE + _TIMES * max(ours, theirs)
        try:
            work, timeout = start(), timedelta(seconds=patience)
            if theirs is None:  # the wait may take minutes, in which signals must be handled
                _in_thread(lambda: work.wait(timeout))
            else:
                work.wait(timeout)
        except RuntimeError as error:
            raise _meaning(error) from error
        before, self._met = self._met, time.monotonic()
        if after is not None:
            self._longest[after] = max(theirs or 0.0, self._met - before)


ALONE = Processes()


def rows_of(rows: int, rank: int, count: int) -> slice:
    """Return the slice of process `rank` if `count` processes divide a tensor of `rows` rows. As in
    torch.chunk, slices have equal size, except that the last processes have fewer rows or none."""
    size = -(-rows // count)
    return slice(min(rows, rank * size), min(rows, (rank + 1) * size))


def _in_thread(work: Callable[[], _Result], timeout: float | None = None) -> _Result:
    """Compute a result in a new thread: the main thread can't handle signals while it runs C++
    code. Raises TimeoutError after `timeout` seconds."""
    future = Future[_Result]()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    # A signal that comes just before a wait does not interrupt that wait: it is handled afterwards.
    while timeout is None and not wait([future], timeout=_LOOK).done:
        pass
    return future.result(timeout)


@contextlib.contextmanager
def noticing_lost() -> Iterator[None]:
    """Within the context, convert errors of collectives to the errors that `_meaning` returns.

    This is for collectives that PyTorch itself starts, such as for sharding.
    """
    try:
        yield
    except RuntimeError as error:
        import torch.distributed as dist

        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise _meaning(error) from error


def _meaning(error: RuntimeError) -> Exception:
    """Return LostProcessError or AttnlmError, depending on what gloo, NCCL or the store reports."""
    if _SILENT.search(str(error)):
        return LostProcessError(is_silent=True)
    if _ENDED.search(str(error)):
        return LostProcessError(is_silent=False)
    lines = [line for line in str(error).splitlines() if line.strip()]
    return AttnlmError(
        f"communication of the processes failed: {lines[0] if lines else type(error).__name__}",
        "resume the run from its last checkpoint; if it fails again, try another `device`",
    )


def is_launched() -> bool:
    """Return True if a launcher such as torchrun has started this process."""
    return bool(os.environ.get(_COUNT) and os.environ.get(_RANK))


def _checked(name: str, first: int, last: int) -> int:
    """Return the number in a launcher's variable. Raise UsageError if missing or out of range."""
    value = _variable(name)
    if value is None or not first <= value <= last:
        is_what = f"is {os.environ[name]!r}" if name in os.environ else "is not set"
        raise UsageError(
            f"the variable {name} {is_what}: it must be a whole number from {first} to {last:,}",
            f"start the processes with torchrun, or unset {_COUNT} and {_RANK} to train with one",
        )
    return value


def _variable(name: str) -> int | None:
    """Return the number in a launcher's variable, or None."""
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def local_count() -> int:
    """Return the number of processes on this machine if the launcher reports it, else 1."""
    return (_variable(_LOCAL_COUNT) or 1) if is_launched() else 1


def is_main() -> bool:
    """Return True if this process reports: it is rank 0 or the only one. Does not import torch."""
    return not is_launched() or _variable(_RANK) == 0


def restarts() -> int:
    """Return how often the launcher has restarted these processes."""
    return (_variable(_RESTARTS) or 0) if is_launched() else 0


@contextlib.contextmanager
def joined() -> Iterator[Processes]:
    """Connect to the other processes that a launcher has started, and yield `Processes`.

    Yield ALONE if there are no other processes. If the processes end with an error, one process on
    each machine raises the error, and the other processes raise AlreadyReportedError. If the error
    is that another process has ended, and `run_processes`, our launcher, reports this, then all
    processes raise AlreadyReportedError.
    """
    count = _checked(_COUNT, 1, _MOST) if is_launched() else 1
    rank = _checked(_RANK, 0, count - 1) if is_launched() else 0
    if count == 1:
        yield ALONE
        return
    if _WATCHED in os.environ and sys.platform == "linux":
        # Make this process end when our launcher is killed, even if it was killed before this line.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(os.environ[_WATCHED]):
            raise AlreadyReportedError(_LEFT_TO_LAUNCHER)
    import torch.distributed as dist

    processes = _join(rank, count)
    try:
        yield processes
    except LostProcessError as lost:
        if _WATCHED in os.environ and not lost.is_silent:
            raise AlreadyReportedError(_LEFT_TO_LAUNCHER) from None
        if not processes.is_first_to_say():
            raise AlreadyReportedError from None
        what = "stopped responding" if lost.is_silent else "has ended"
        hint = "resume the run from its last checkpoint"
        if local_count() < count:
            hint = f"check the messages of the other machines, and the network between them; {hint}"
        raise AttnlmError(f"another process of this training {what}", hint) from None
    except Exception as error:
        if not processes.is_first_to_say():
            raise AlreadyReportedError(getattr(error, "exit_code", 1)) from None
        raise
    dist.destroy_process_group()  # after an error this would wait for the others


def _join(rank: int, count: int) -> Processes:
    """Connect to the other processes. Raises AttnlmError if they can't be reached."""
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    if dist.is_initialized():
        raise AttnlmError(
            "this program already has a torch.distributed process group",
            "train before you create the group, or after you destroy it",
        )
    _checked(_PORT, 1, 2**16 - 1)
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device((_variable(_LOCAL_RANK) or 0) % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"

    def meet() -> Store:
        # Each training of a program needs its own keys in the store. So does each restart, since
        # the store still has what the earlier processes wrote.
        lasting = PrefixStore(f"attnlm/{next(_trainings)}", _store(rank, count))
        ours = PrefixStore(str(restarts()), lasting)
        patience = timedelta(seconds=_AT_FIRST)
        with FlushingHere():  # the threads that sum gradients start here
            dist.init_process_group(
                backend, store=ours, rank=rank, world_size=count, timeout=patience
            )
        return lasting

    try:
        return Processes(rank, count, _in_thread(meet))
    except (KeyError, RuntimeError, ValueError) as error:
        why = f"{_HOST} is not set" if isinstance(error, KeyError) else str(error)
        raise AttnlmError(
            f"the processes cannot reach each other: {why.splitlines()[0]}",
            f"check {_HOST}, {_PORT} and the network between the machines; "
            "GLOO_SOCKET_IFNAME (on GPUs also NCCL_SOCKET_IFNAME) selects the network interface",
        ) from None


@functools.cache
def _store(rank: int, count: int) -> Store:
    """Return a key-value store: the launcher's, which outlives the processes, or else rank 0's."""
    from torch._C._distributed_c10d import TCPStore

    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    where = os.environ[_HOST], int(os.environ[_PORT])
    return TCPStore(*where, count, is_master=rank == 0 and not kept)


def run_processes(count: int, arguments: Sequence[str]) -> None:
    """Run `attnlm` with these arguments in `count` processes of this machine, until all end.

    The processors are divided among the processes. A signal is passed on to the processes, and
    Interrupted is raised after they have ended. Raises AttnlmError if a process was killed, and
    AlreadyReportedError if a process has reported the error.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // count)))
    os.environ[_WATCHED] = str(os.getpid())
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):  # `_failure` reports failures
            logging.getLogger(name).setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="attnlm-", ignore_cleanup_errors=True) as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            shutdown_timeout=_TO_SAVE,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(config, sys.executable)("-m", "attnlm", *arguments)
        except SignalException as stopped:
            raise Interrupted(int(stopped.sigval)) from None
        except ChildFailedError as failed:
            raise _failure({rank: f.exitcode for rank, f in failed.failures.items()}) from None


def _failure(codes: Mapping[int, int]) -> BaseException:
    """Return the exception to raise, given each rank's exit code."""
    # If one process has failed, the others were ended by signals, or left the report to us.
    if said := [code for code in codes.values() if 0 <= code < 128 and code != _LEFT_TO_LAUNCHER]:
        return AlreadyReportedError(said[0])
    if stopped := [code for code in codes.values() if code > 128]:  # by a signal, after saving
        return Interrupted(min(stopped) - 128)
    rank, code = min(codes.items(), key=lambda found: found[1])
    if code >= 0:  # all lost their connections, and left the report to us
        return AttnlmError(
            "the connection between the processes of this training broke",
            "resume the run from its last checkpoint",
        )
    return AttnlmError(
        f"process {rank} of the training was killed ({signal.Signals(-code).name})",
        "resume the run from its last checkpoint; "
        "if memory ran out, lower `processes` or `micro_batch_size`",
    )
