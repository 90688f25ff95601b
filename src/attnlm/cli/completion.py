"""Shell completion for bash, zsh and fish. Nothing here loads torch or numpy.

Typer's scripts for these shells call `attnlm` at each completion request, with the words typed so
far in environment variables.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import typer

from attnlm.base.errors import UsageError
from attnlm.base.folders import KINDS, folder_names
from attnlm.cli import console
from attnlm.config.recipes import recipe_names
from attnlm.tokens.specs import PUBLISHED

VARIABLE = "_ATTNLM_COMPLETE"
SHELLS = ("bash", "zsh", "fish")

# Other names are not completed: a shell might split them, or execute a part.
_PLAIN = re.compile(r"[\w.@%+,=-]+")

# zsh loads Typer's script at the first keypress, but the script only registers the function that
# later keypresses call. This line calls the function immediately.
_AT_FIRST_KEYPRESS = '[[ $zsh_eval_context[-1] == loadautofunc ]] && _attnlm_completion "$@"'

Completer = Callable[[typer.Context, str], list[str]]


def choice_completer(*words: str) -> Completer:
    """Return a completer that offers `words`."""
    return lambda ctx, incomplete: _beginning(incomplete, words)


def _folder_completer(kind: str) -> Completer:
    """Return a completer for folders of a kind, newest first, in the folder that the user set."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        _, usual, option, _ = KINDS[kind]
        parent = ctx.params.get(option.strip("-").replace("-", "_")) or usual
        return _beginning(incomplete, folder_names(Path(parent), kind))

    return complete


runs, ladders, datasets = (
    _folder_completer("run"),
    _folder_completer("ladder"),
    _folder_completer("data set"),
)
recipes = choice_completer(*recipe_names())


def list_completer(*words: str) -> Completer:
    """Return a completer for a comma-separated list, which offers `words` that the list lacks."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        left = [word for word in words if word not in before.split(",")]
        return [f"{before}{comma}{word}" for word in _beginning(last, left)]

    return complete


def complete_tokenizer(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return matching kinds of tokenizers, then data sets and runs, which all have a tokenizer."""
    kinds = _beginning(incomplete, ("char", "byte", *PUBLISHED))
    return [*kinds, *datasets(ctx, incomplete), *runs(ctx, incomplete)]


def _beginning(incomplete: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith(incomplete) and _PLAIN.fullmatch(word)]


def complete(root: Any, instruction: str) -> int:
    """Print the answer to a shell's completion request, and nothing else; return the exit code."""
    # Make rich look uninstalled: Typer would render each line of help with it, and importing rich
    # takes longer than everything else.
    sys.modules["rich"] = None  # type: ignore[assignment]
    from typer import completion as typers

    typers.completion_init()  # type: ignore[attr-defined]
    try:
        return int(typers.shell_complete(root, {}, "attnlm", VARIABLE, instruction))
    except SystemExit as end:  # fish also reads exit codes
        return int(end.code or 0)
    except Exception:  # noqa: BLE001 - a message would appear within the line being typed
        return 1


def install(is_set: bool) -> None:
    """Handle the option --install-completion."""
    if is_set:
        from typer import completion as typers

        shell, path = typers.install(_shell(), "attnlm", VARIABLE)  # type: ignore[attr-defined]
        if shell == "zsh":
            path.write_text(f"{path.read_text('utf-8')}\n{_AT_FIRST_KEYPRESS}\n", "utf-8")
        console.say(f"completion for {shell} is in {path}; it works in the next terminal")
        raise typer.Exit


def show(ctx: typer.Context, is_set: bool) -> None:
    """Handle the option --show-completion."""
    if is_set:
        raise typer.Exit(complete(ctx.command, f"source_{_shell()}"))


def _shell() -> str:
    """Return the shell that called this command. Raises UsageError if it is not in `SHELLS`."""
    import shellingham

    try:
        name: str = shellingham.detect_shell()[0]
    except (shellingham.ShellDetectionFailure, OSError):
        name = Path(os.environ.get("SHELL", "")).name
    if name not in SHELLS:
        raise UsageError(
            f"no completion for this shell ({name or 'unknown'})",
            f"call it from one of {', '.join(SHELLS)}",
        )
    return name
