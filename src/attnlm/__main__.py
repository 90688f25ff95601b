"""The entry point of `attnlm` and `python -m attnlm`."""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # the current folder, by `python -m`: nothing is imported from there

import contextlib
import os
import signal
import time
from types import FrameType
from typing import NoReturn

from attnlm.base import process
from attnlm.base.process import exit_now, stop_signals


def main() -> NoReturn:
    """Run the command line, and end the process with the exit code of the command."""
    process.command_began = time.perf_counter()
    # During imports there is nothing to save, so a signal ends the process immediately.
    for signum in stop_signals():
        signal.signal(signum, _say_and_exit)
    # OpenMP's threads spin for billions of rounds while they wait. On a busy machine, they take
    # the processor from each other. OpenMP reads the limit when torch is loaded.
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "10000"
    os.environ["PYTHONSAFEPATH"] = "1"  # no child process imports from the current folder

    from attnlm.compute.processes import end_with_launcher

    end_with_launcher()
    from attnlm.cli.app import run_command
    from attnlm.cli.exits import run_and_exit

    run_and_exit(run_command)


def _say_and_exit(signum: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):  # nobody may read it
        os.write(2, b"stopped; nothing was written\n")
    exit_now(signum)


if __name__ == "__main__":
    main()
