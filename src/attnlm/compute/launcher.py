"""Start several processes on this machine that train one model, by torchrun."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
from collections.abc import Sequence

from attnlm.base import process
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.process import Interrupted
from attnlm.compute.processes import LAUNCHER, SECONDS_TO_SAVE
from attnlm.compute.threads import cores

_MOST_FOR_EACH_CORE = 4  # a recipe or a run, which may be a stranger's, chooses the number


def run_processes(count: int, arguments: Sequence[str]) -> int:
    """Run `attnlm` with these arguments in `count` processes of this machine, until all end.

    Return the exit code of the process that failed first, which has reported its error, or 0. The
    processors are divided among the processes. A signal is passed on to the processes, and
    Interrupted is raised after they have ended. Raises AttnlmError if a process was killed, and
    UsageError if there are too many for this machine.
    """
    most = _MOST_FOR_EACH_CORE * cores()
    if count > most:
        raise UsageError(
            f"`processes` {count:,} are too many for this machine, which has {cores()} cores",
            f"use `processes` {most} or less, or start them with torchrun",
        )
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    if process.came is not None:  # PyTorch's import swallowed Interrupted
        raise Interrupted(process.came)
    process.ends_process = False  # torchrun ends its processes first
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // count)))
    os.environ[LAUNCHER] = str(os.getpid())
    # PyTorch before 2.13 waits 30 seconds.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SECONDS_TO_SAVE))
    logging.disable()  # torchrun would explain each end in many lines
    with tempfile.TemporaryDirectory(prefix="attnlm-", ignore_cleanup_errors=True) as folder:
        options = ["--standalone", "--local-addr=localhost", f"--log-dir={folder}"]
        try:
            # Without `--`, torchrun takes `--log` for an option of its own.
            torchrun([*options, f"--nproc-per-node={count}", "-m", "--", "attnlm", *arguments])
            return 0
        except SignalException as stopped:
            raise Interrupted(int(stopped.sigval)) from None
        except ChildFailedError as failed:
            rank, failure = failed.get_first_failure()
    if failure.exitcode > 128:  # one process was stopped by a signal, and all have saved
        raise Interrupted(failure.exitcode - 128)
    if failure.exitcode < 0:
        raise AttnlmError(
            f"process {rank} of the training was killed ({signal.Signals(-failure.exitcode).name})",
            "resume the run from its last checkpoint; "
            "if memory ran out, lower `processes` or `micro_batch_size`",
        )
    return int(failure.exitcode)
