"""Commands run as users run them, in this process or in one of their own, and what they may say."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from tests.trials.internals import exits, run_command


@dataclass(frozen=True)
class Done:
    """How a command ended, and what it wrote."""

    code: int
    stdout: str
    stderr: str

    def fault(self) -> str | None:
        """None for success, or for an error in two lines with exit code 1 or 2."""
        lines = self.stderr.splitlines()
        errors = sum(line.startswith("error: ") for line in lines)
        if "Traceback" in self.stderr or "panicked" in self.stderr:
            return f"it shows a traceback: {lines[-1]}"
        if self.code == 0:
            return "it succeeds with an error" if errors else None
        if self.code not in (1, 2):
            return f"exit code {self.code}: {' / '.join(lines[-2:])}"
        if errors != 1 or not lines[-2].startswith("error: ") or not lines[-1].startswith("hint: "):
            return f"exit code {self.code}, but no error and hint: {' / '.join(lines[-3:])}"
        return None


def here(arguments: Sequence[str], stdin: bytes = b"") -> Done:
    """Runs a command in this process."""
    streams = sys.argv, sys.stdin
    stdout, stderr = (io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace") for _ in "ab")
    try:
        sys.argv = ["attnlm", *arguments]
        sys.stdin = io.TextIOWrapper(io.BytesIO(stdin), "utf-8", "replace")
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            code = exits._run(run_command)
    finally:
        sys.argv, sys.stdin = streams
    return Done(code, _written(stdout), _written(stderr))


def _written(stream: io.TextIOWrapper) -> str:
    stream.flush()
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode()


def alone(
    arguments: Sequence[str],
    cwd: Path,
    stdin: bytes = b"",
    env: Mapping[str, str | None] = MappingProxyType({}),
    through: Sequence[str] = (),
) -> Done:
    """Runs a command in a process of its own; a variable that is None is taken away.

    `through` is a command that runs it.
    """
    variables = {**os.environ, "PYTHONWARNINGS": "error", **env}
    done = subprocess.run(
        [*through, sys.executable, "-m", "attnlm", *arguments],
        cwd=cwd,
        input=stdin,
        capture_output=True,
        timeout=120,
        env={name: value for name, value in variables.items() if value is not None},
    )
    return Done(
        done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    )
