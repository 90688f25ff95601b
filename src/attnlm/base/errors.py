"""Errors that the user can solve: each has a one-line message, and a hint on what to do."""

from __future__ import annotations

import importlib
from types import ModuleType


class AttnlmError(Exception):
    """Raised for a problem that users can solve: bad input, a missing or damaged file, no network.

    `message` is one line that says what is wrong, `hint` one line that says what to do.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.add_note(f"hint: {hint}")  # tracebacks show notes


class NotFiniteError(AttnlmError):
    """Raised when a checkpoint's weights, or the outputs of its model, are NaN or infinite."""

    def __init__(self) -> None:
        super().__init__(
            "the model computes NaN or infinite values: its weights are damaged or far too large",
            "try the run's other checkpoint: `checkpoint` best or last",
        )


class UsageError(AttnlmError):
    """Raised for arguments that are invalid no matter which files exist and what they contain."""

    exit_code = 2


def import_optional(name: str, what: str) -> ModuleType:
    """Import a module of an optional dependency. Raises AttnlmError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        package = error.name if error.name != "backports" else name
        raise AttnlmError(
            f"{what} needs the Python package {package}, which is not installed",
            f"install it: pip install {package}",
        ) from None
