"""Shell completion: what may follow on a command line. Nothing here loads torch or numpy.

Typer's scripts for bash, zsh and fish call the command at each keypress, with the words so far in
environment variables.
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

# A shell may take other names apart, or run what is in them: these are typed by hand.
_PLAIN = re.compile(r"[\w.@%+,=-]+")

# zsh reads the script at the first keypress, when Typer's only declares what is called at the next.
_AT_FIRST_KEYPRESS = '[[ $zsh_eval_context[-1] == loadautofunc ]] && _attnlm_completion "$@"'

Completer = Callable[[typer.Context, str], list[str]]


def choices(*words: str) -> Completer:
    """Completes to one of these."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        return _beginning(incomplete, words)

    return complete


def _folders(kind: str) -> Completer:
    """Complete to the names of such folders, newest first, where the command looks for them."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        _, usual, option, _ = KINDS[kind]
        parent = ctx.params.get(option.strip("-").replace("-", "_")) or usual
        return _beginning(incomplete, folder_names(Path(parent), kind))

    return complete


runs, ladders, datasets = _folders("run"), _folders("ladder"), _folders("data set")


def removables(ctx: typer.Context, incomplete: str) -> list[str]:
    """Runs and ladders that are not named yet."""
    named = ctx.params.get("runs") or ()
    found = [*runs(ctx, incomplete), *ladders(ctx, incomplete)]
    return [name for name in found if name not in named]


def recipes(ctx: typer.Context, incomplete: str) -> list[str]:
    """The recipes of the package."""
    return _beginning(incomplete, recipe_names())


def several(*words: str) -> Completer:
    """Words separated by commas: completes the last, to one that is not there yet."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        left = [word for word in words if word not in before.split(",")]
        return [f"{before}{comma}{word}" for word in _beginning(last, left)]

    return complete


def tokenizers(ctx: typer.Context, incomplete: str) -> list[str]:
    """Kinds of tokenizers, then data sets and runs, which have one."""
    kinds = _beginning(incomplete, ("char", "byte", *PUBLISHED))
    return [*kinds, *datasets(ctx, incomplete), *runs(ctx, incomplete)]


def _beginning(incomplete: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith(incomplete) and _PLAIN.fullmatch(word)]


def complete(root: Any, instruction: str) -> int:
    """Answers a shell's question, and returns the exit code that it waits for.

    Whatever is wrong with the words so far, nothing but an answer is written.
    """
    from typer import completion as typers

    # As if rich were not installed: Typer would draw each line of help with it, which takes longer
    # to load than all the rest.
    sys.modules["rich"] = None  # type: ignore[assignment]
    typers.completion_init()  # type: ignore[attr-defined]
    try:
        return int(typers.shell_complete(root, {}, "attnlm", VARIABLE, instruction))
    except SystemExit as end:  # fish asks by exit codes
        return int(end.code or 0)
    except Exception:  # noqa: BLE001 - a message would land in the middle of what is being typed
        return 1


def install(wanted: bool) -> None:
    """The option --install-completion."""
    if wanted:
        from typer import completion as typers

        shell, path = typers.install(_shell(), "attnlm", VARIABLE)  # type: ignore[attr-defined]
        if shell == "zsh":
            path.write_text(f"{path.read_text('utf-8')}\n{_AT_FIRST_KEYPRESS}\n", "utf-8")
        console.say(f"completion for {shell} is in {path}; it works in the next terminal")
        raise typer.Exit


def show(ctx: typer.Context, wanted: bool) -> None:
    """The option --show-completion."""
    if wanted:
        raise typer.Exit(complete(ctx.command, f"source_{_shell()}"))


def _shell() -> str:
    """The shell that called this command. Raises UsageError where it is none of ours."""
    import shellingham

    try:
        name: str = shellingham.detect_shell()[0]
    except (shellingham.ShellDetectionFailure, OSError):
        name = Path(os.environ.get("SHELL", "")).name
    if name not in SHELLS:
        raise UsageError(
            f"completion is for {', '.join(SHELLS)}, and this shell is {name or 'unknown'}",
            "call it from one of these",
        )
    return name
