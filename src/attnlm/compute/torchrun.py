"""Starts this program several times side by side, by PyTorch's own launcher."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

from attnlm.base.errors import AttnlmError, SaidElsewhereError
from attnlm.base.signals import Interrupted
from attnlm.compute.processes import LEFT_TO_LAUNCHER, WATCHED

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


# After a signal; then they are killed.
_SECONDS_TO_SAVE = 120


def run_processes(count: int, arguments: Sequence[str]) -> None:
    """Runs `attnlm` with these arguments in `count` processes of this machine, until all end.

    Processors are shared out among them. A signal is passed on, and Interrupted raised when they
    have answered it. Raises AttnlmError where one of them was killed, and SaidElsewhereError where
    one has reported what is wrong.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(_processors()) // count)))
    os.environ[WATCHED] = "1"
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):  # what they say is said below
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
            shutdown_timeout=_SECONDS_TO_SAVE,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(config, sys.executable)("-m", "attnlm", *arguments)
        except SignalException as stopped:
            raise Interrupted(int(stopped.sigval)) from None
        except ChildFailedError as failed:
            raise _meaning(failed) from None


def _meaning(failed: ChildFailedError) -> BaseException:
    codes = [one.exitcode for one in failed.failures.values()]
    # When one has failed the others are ended, by signals, or saw it and left it to us to say.
    if said := [code for code in codes if 0 <= code < 128 and code != LEFT_TO_LAUNCHER]:
        return SaidElsewhereError(said[0])
    if stopped := [code for code in codes if code > 128]:  # by a signal, having saved
        return Interrupted(min(stopped) - 128)
    rank, failure = min(failed.failures.items(), key=lambda found: int(found[1].exitcode))
    if failure.exitcode >= 0:  # all ended because they lost each other, and left it to us
        return AttnlmError(
            "the connection between the processes of this training broke",
            "resume the run from its last checkpoint",
        )
    name = signal.Signals(-failure.exitcode).name
    return AttnlmError(
        f"process {rank} of the training was killed ({name})",
        "resume the run from its last checkpoint; "
        "if memory ran out, lower `processes` or `micro_batch_size`",
    )


def _processors() -> Sequence[int]:
    try:
        return sorted(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return range(os.cpu_count() or 1)
