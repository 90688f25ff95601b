"""Start several processes on this machine that train one model, and report how they end."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence

from attnlm.base.errors import AlreadyReportedError, AttnlmError
from attnlm.base.signals import Interrupted
from attnlm.compute.processes import LEFT_TO_LAUNCHER, OUR_LAUNCHER
from attnlm.compute.threads import cores

_SECONDS_TO_SAVE = 120  # after a signal; then the launcher kills the processes


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
    os.environ[OUR_LAUNCHER] = "1"
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):  # `_make_exception` reports failures
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
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        if hasattr(config, "shutdown_timeout"):  # PyTorch before 2.13 waits 30 seconds
            config.shutdown_timeout = _SECONDS_TO_SAVE
        try:
            elastic_launch(config, sys.executable)("-m", "attnlm", *arguments)
        except SignalException as stopped:
            raise Interrupted(int(stopped.sigval)) from None
        except ChildFailedError as failed:
            codes = {rank: f.exitcode for rank, f in failed.failures.items()}
            raise _make_exception(codes) from None


def _make_exception(codes: Mapping[int, int]) -> BaseException:
    """Return the exception to raise, given each rank's exit code."""
    # If one process has failed, the others were ended by signals, or left the report to us.
    exits = [code for code in codes.values() if 0 <= code < 128]
    if reported := [code for code in exits if code != LEFT_TO_LAUNCHER]:
        return AlreadyReportedError(reported[0])
    if stopped := [code for code in codes.values() if code > 128]:  # by a signal, after saving
        return Interrupted(min(stopped) - 128)
    rank, code = min(codes.items(), key=lambda item: item[1])
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
