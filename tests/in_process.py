"""Commands that fail, without a process for each: starting one takes seconds."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest
import typer

from attnlm.base.errors import AttnlmError
from attnlm.cli.commands import app


def refused(*arguments: str, cwd: Path, code: int, says: str, hints: str) -> None:
    """The command raises an error that says `says` and hints at `hints`, and prints nothing."""
    command = typer.main.get_command(app)
    printed = io.StringIO()
    with (
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(printed),
        pytest.raises((AttnlmError, OSError)) as raised,
        command.make_context("attnlm", list(arguments)) as context,
    ):
        command.invoke(context)
    error = raised.value
    assert printed.getvalue() == ""
    if isinstance(error, AttnlmError):
        assert (error.exit_code, says in error.message, hints in error.hint) == (code, True, True)
    else:  # the process says these in its own words
        assert says in str(error)
