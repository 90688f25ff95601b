"""The compilers of a machine, and a run of one."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
_LONGEST_COMPILATION, _BETWEEN_LOOKS = 30.0, 0.02  # seconds
_stuck: set[str] = set()  # compilers that took longer, and aren't waited for again


def commands() -> Iterator[list[str]]:
    """Compilers with their flags, the best first: what CC names, cc, gcc and clang."""
    named = (os.environ.get("CC"), "cc", "gcc", "clang")
    for compiler in dict.fromkeys(filter(None, (shutil.which(name) for name in named if name))):
        # Not every compiler knows the processor by itself.
        for more in (["-march=native"], []):
            if compiler not in _stuck:
                yield [compiler, *FLAGS, *more]


def compiled(command: list[str], folder: str, signals: list[int]) -> None:
    """Runs a compiler, which keeps its temporary files in `folder`.

    Raises OSError where it fails, takes far too long, or a signal comes.
    """
    if _would_ask_the_user(command[0]):
        raise OSError
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": folder},  # for what it would leave when it is ended
        start_new_session=True,  # so that all that it started can be ended with it
    )
    try:
        _wait_for(process, signals)
    finally:
        if process.poll() is None:
            if not signals:
                _stuck.add(command[0])
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode != 0:
        raise OSError  # what there is of the library may be cut short: to load it could kill us


def _would_ask_the_user(compiler: str) -> bool:
    """Whether it is macOS's placeholder, which opens a window and offers to install a compiler."""
    if sys.platform != "darwin" or not compiler.startswith("/usr/bin/"):
        return False
    return subprocess.run(["xcode-select", "-p"], capture_output=True).returncode != 0


def _wait_for(process: subprocess.Popen[bytes], signals: list[int]) -> None:
    """Until it ends, it has taken far too long, or a signal has come."""
    latest = time.monotonic() + _LONGEST_COMPILATION
    while not signals and time.monotonic() < latest:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_BETWEEN_LOOKS)
            return
