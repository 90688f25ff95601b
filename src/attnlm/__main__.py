"""The entry point of `attnlm` and `python -m attnlm`."""

from __future__ import annotations

import os
import signal
import time
from typing import NoReturn

from attnlm.base import clock
from attnlm.base.signals import leave, signals


def main() -> NoReturn:
    """Runs the command line; ends the process with the exit code that the design promises."""
    clock.command_began = time.perf_counter()
    # During imports there is nothing to save, so a signal ends the process immediately.
    for signum in signals():
        signal.signal(signum, leave)
    # OpenMP's threads spin while they wait, for billions of rounds, and take the processor from
    # each other where other processes are busy too. Read when torch is loaded.
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "10000"

    from attnlm.cli.app import run_command
    from attnlm.cli.exits import run_and_exit

    run_and_exit(run_command)


if __name__ == "__main__":
    main()
