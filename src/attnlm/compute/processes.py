"""The processes that train one model together: torch.distributed, as torchrun starts it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from attnlm.base.errors import AttnlmError, SaidElsewhereError, UsageError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import Store

_Result = TypeVar("_Result")

# A process that is stuck is given up after so many seconds, and so many times as long as such work
# has taken at most, here or there. The first time compilers and caches may differ between machines;
# the main process also plans, draws samples and writes, on which the others wait.
_PATIENCE, _AT_FIRST, _FOR_MAIN, _TIMES = 20.0, 300.0, 1800.0, 10.0  # seconds, seconds, seconds, –
_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
_ANSWER = 5.0  # seconds, from the one who keeps the store
_LOOK = 0.5  # seconds, after which a waiting process looks for signals
# Between two blocks of a sharded model all take about as long. A GPU's collectives are begun long
# before the GPU comes to them, so that the time of a whole step counts.
_WITHIN_A_STEP = {"cpu": 20.0}
_SILENT = re.compile(r"tim(ed|ing) out|timeout (caused|after)|socket timeout", re.IGNORECASE)
_ENDED = re.compile(
    r"connection (was )?(closed|reset|refused|abort)|broken pipe|failed to (recv|send)"
    r"|no route to host|unreachable|remote process|ncclRemoteError|communicator was aborted",
    re.IGNORECASE,
)
_trainings = itertools.count()
_COUNT, _RANK, _RESTARTS = "WORLD_SIZE", "RANK", "TORCHELASTIC_RESTART_COUNT"
_PORT, _MOST = "MASTER_PORT", 10**6
_MACHINE, _LOCAL_RANK = "GROUP_RANK", "LOCAL_RANK"


WATCHED = "ATTNLM_WATCHED"
"""Set where our own launcher watches, which says when a process is killed."""
LEFT_TO_LAUNCHER = 75
"""The exit code of those who say nothing, since it does."""


class LostProcessError(Exception):
    """Another of the processes has ended, or doesn't answer."""

    def __init__(self, *, is_silent: bool) -> None:
        super().__init__()
        self.is_silent = is_silent
        """It is there, but doesn't answer."""


class Processes:
    """This process, number `rank` of `count`. Alone it has nobody to wait for."""

    def __init__(self, rank: int = 0, count: int = 1, store: Store | None = None) -> None:
        self.rank, self.count, self._store = rank, count, store
        self._longest: dict[str, float] = {}
        self._since = time.monotonic()
        self._meshes: dict[str, DeviceMesh] = {}

    @property
    def is_main(self) -> bool:
        """Whether this process writes and reports."""
        return self.rank == 0

    def add_up(self, tensor: Tensor, after: str) -> None:
        """Puts the sum of all processes' tensors in place of each: the same bytes everywhere.

        Raises LostProcessError when another process has ended, or takes far longer than ever before
        `after` such work as this.
        """
        if self.count > 1:
            import torch.distributed as dist

            self._wait(lambda: dist.all_reduce(tensor, async_op=True), after)

    def copy_from_main(self, tensor: Tensor) -> None:
        """Puts the main process' numbers in place. Raises LostProcessError."""
        if self.count > 1:
            import torch.distributed as dist

            self._wait(lambda: dist.broadcast(tensor, 0, async_op=True))

    def from_main(self, values: Any) -> Any:
        """The JSON values that the main process gives here. Raises LostProcessError."""
        if self.count == 1:
            return values
        import torch

        text = json.dumps(values).encode() if self.is_main else b""
        size = torch.tensor(len(text))
        self.copy_from_main(size)
        content = torch.zeros(int(size), dtype=torch.uint8)
        if self.is_main:
            content.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        self.copy_from_main(content)
        return json.loads(bytes(content.tolist()))

    def mesh(self, device: str) -> DeviceMesh:
        """All processes in a row, as sharding takes them; all have to ask for it."""
        from torch.distributed.device_mesh import DeviceMesh

        if device not in self._meshes:
            patience = _WITHIN_A_STEP.get(device, _AT_FIRST)
            self._meshes[device] = DeviceMesh.from_group(self.new_group(patience), device)
        return self._meshes[device]

    def new_group(self, patience: float = _FOR_MAIN, backend: str | None = None) -> ProcessGroup:
        """For collectives that others start, and that wait so many seconds; all have to ask."""
        import torch.distributed as dist

        group: ProcessGroup = dist.new_group(timeout=timedelta(seconds=patience), backend=backend)
        return group

    def is_first_to_say(self) -> bool:
        """Whether no other process of this machine has said yet why all end. True only once."""
        if (store := self._store) is None:
            return True
        key = f"said/{restarts()}/{os.environ.get(_MACHINE, '')}"
        try:  # over a link that is broken `add` waits without end
            return _in_thread(lambda: store.add(key, 1)).result(_ANSWER) == 1
        except (RuntimeError, TimeoutError):  # whoever kept the store has ended
            local = _told(_LOCAL_RANK)
            return self.rank == 1 or (self.rank if local is None else local) == 0

    def remember(self, key: str, text: str) -> None:
        """Keeps a text until the launcher ends, however often it starts its processes again."""
        if self._store is not None:
            self._store.set(key, json.dumps(text))  # in ASCII: a path may be anything

    def recalled(self, key: str) -> str | None:
        """What was remembered before these processes were started again."""
        if self._store is None or not restarts() or not self._store.check([key]):
            return None
        return str(json.loads(self._store.get(key)))

    def _wait(self, begin: Callable[[], Any], after: str | None = None) -> None:
        longest = time.monotonic() - self._since  # our own share, such as the others'
        if after in self._longest:
            seconds, longest = _PATIENCE, max(longest, self._longest[after])
        else:
            seconds = _AT_FIRST if self.is_main else _FOR_MAIN
        seconds += _TIMES * longest
        try:
            work, patience = begin(), timedelta(seconds=seconds)
            if after in self._longest:
                work.wait(patience)
            else:  # it may take minutes
                _result(_in_thread(lambda: work.wait(patience)))
        except RuntimeError as error:
            raise _meaning(error) from error
        before, self._since = self._since, time.monotonic()
        if after is not None:
            self._longest[after] = max(self._longest.get(after, 0.0), self._since - before)

    def wait_for_main(self) -> None:
        """Until the main process has ended: the launcher stops all when the first one ends."""
        with contextlib.suppress(LostProcessError):
            self.from_main(None)


ALONE = Processes()


def _in_thread(work: Callable[[], _Result]) -> Future[_Result]:
    """Run `work` in a thread, so that the main one answers signals: inside C++ it does not."""
    future = Future[_Result]()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _result(future: Future[_Result]) -> _Result:
    """Wait for a result, and answer signals: one that arrives just before a wait doesn't end it."""
    while not wait([future], timeout=_LOOK).done:
        pass
    return future.result()


@contextlib.contextmanager
def noticing_lost() -> Iterator[None]:
    """Raises LostProcessError where PyTorch's own collectives fail: its sharding has many."""
    try:
        yield
    except RuntimeError as error:
        import torch.distributed as dist

        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise _meaning(error) from error


def _meaning(error: RuntimeError) -> Exception:
    """Return what a collective's failure means, by the texts of gloo, NCCL and PyTorch's store."""
    if _SILENT.search(str(error)):
        return LostProcessError(is_silent=True)
    if _ENDED.search(str(error)):
        return LostProcessError(is_silent=False)
    lines = [line for line in str(error).splitlines() if line.strip()]
    return AttnlmError(
        f"the processes can't compute together: {lines[0] if lines else type(error).__name__}",
        "resume the run from its last checkpoint; if it fails again, try another `device`",
    )


def is_launched() -> bool:
    """Return True if a launcher such as torchrun has started this process."""
    return bool(os.environ.get(_COUNT) and os.environ.get(_RANK))


def _checked(name: str, first: int, last: int) -> int:
    """Return the number that a launcher has put there. Raise UsageError if it is none of these."""
    value = _told(name)
    if value is None or not first <= value <= last:
        is_what = f"is {os.environ[name]!r}" if name in os.environ else "is not set"
        raise UsageError(
            f"the variable {name} {is_what}: it must be a whole number from {first} to {last:,}",
            f"start the processes with torchrun, or unset {_COUNT} and {_RANK} to train with one",
        )
    return value


def _told(name: str) -> int | None:
    """A number that a launcher has put there."""
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def launched_count() -> int:
    """How many processes the launcher has started; 1 without one."""
    return (_told(_COUNT) or 1) if is_launched() else 1


def local_count() -> int:
    """How many of them are on this machine, where the launcher tells."""
    return (_told("LOCAL_WORLD_SIZE") or 1) if is_launched() else 1


def is_main() -> bool:
    """Whether this process is the one that reports; before torch is loaded."""
    return not is_launched() or _told(_RANK) == 0


def restarts() -> int:
    """How often the launcher has started these processes again."""
    return (_told(_RESTARTS) or 0) if is_launched() else 0


@contextlib.contextmanager
def joined() -> Iterator[Processes]:
    """The processes that a launcher has started, or this one alone.

    Of all that end with an error, one says it on each machine: in the others SaidElsewhereError is
    raised.
    """
    count = _checked(_COUNT, 1, _MOST) if is_launched() else 1
    rank = _checked(_RANK, 0, count - 1) if is_launched() else 0
    if count == 1:
        yield ALONE
        return
    if WATCHED in os.environ:
        _end_with_launcher()
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    from attnlm.compute.subnormals import FlushingHere

    if dist.is_initialized():
        raise AttnlmError(
            "this program has a torch.distributed process group already",
            "train before `init_process_group`, or after `destroy_process_group`",
        )
    _checked(_PORT, 1, 2**16 - 1)
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device((_told(_LOCAL_RANK) or 0) % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"

    def meet() -> Store:
        # A program may train several times; where processes are started again, what the earlier
        # ones wrote is still there.
        lasting = PrefixStore(f"attnlm/{next(_trainings)}", _store(rank, count))
        ours = PrefixStore(str(restarts()), lasting)
        patience = timedelta(seconds=_FOR_MAIN)
        with FlushingHere():  # the threads that add gradients up start here
            dist.init_process_group(
                backend, store=ours, rank=rank, world_size=count, timeout=patience
            )
        return lasting

    try:
        lasting = _result(_in_thread(meet))
    except (KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        why = f"{error.args[0]} is not set" if isinstance(error, KeyError) else str(error)
        raise AttnlmError(
            f"the processes can't reach each other: {why.splitlines()[0]}",
            "check MASTER_ADDR, MASTER_PORT and the network between the machines; "
            "GLOO_SOCKET_IFNAME, and on GPUs NCCL_SOCKET_IFNAME, name its interface",
        ) from None
    processes = Processes(rank, count, lasting)
    try:
        yield processes
    except LostProcessError as lost:
        if WATCHED in os.environ and not lost.is_silent:
            raise SaidElsewhereError(LEFT_TO_LAUNCHER) from None
        if not processes.is_first_to_say():
            raise SaidElsewhereError from None
        what = "stopped responding" if lost.is_silent else "has ended"
        hint = "resume the run from its last checkpoint"
        if local_count() < count:
            hint = f"see what the other machines report, and the network between them; {hint}"
        raise AttnlmError(f"another process of this training {what}", hint) from None
    except Exception as error:
        if not processes.is_first_to_say():
            raise SaidElsewhereError(getattr(error, "exit_code", 1)) from None
        raise
    dist.destroy_process_group()  # not where one failed: to end orderly, all have to


def _end_with_launcher() -> None:
    """Has Linux send SIGTERM here when the launcher is killed: nobody would end us any more."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@functools.cache
def _store(rank: int, count: int) -> Store:
    """The launcher's, which outlives the processes; else one that the main process keeps."""
    from torch._C._distributed_c10d import TCPStore

    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    where = os.environ["MASTER_ADDR"], int(os.environ[_PORT])
    return TCPStore(*where, count, is_master=rank == 0 and not kept)
