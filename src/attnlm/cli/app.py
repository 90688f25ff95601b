"""The command `attnlm`: its subcommands, and how they are run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any

import typer

import attnlm
from attnlm.cli import completion, console
from attnlm.cli.diff import diff
from attnlm.cli.doctor import doctor
from attnlm.cli.evaluate import evaluate
from attnlm.cli.export import ExportCommand, export
from attnlm.cli.help import Command, Commands
from attnlm.cli.import_ import import_
from attnlm.cli.ladder import ladder
from attnlm.cli.list_ import list_
from attnlm.cli.plan import PlanCommand, plan
from attnlm.cli.prepare import prepare
from attnlm.cli.rm import rm
from attnlm.cli.sample import sample
from attnlm.cli.see import attend, heads, report, trace
from attnlm.cli.train import TrainCommand, train

_COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    "Start here": {"prepare": prepare, "train": train, "sample": sample},
    "Look inside": {
        "eval": evaluate,
        "ladder": ladder,
        "attend": attend,
        "trace": trace,
        "heads": heads,
        "report": report,
    },
    "Manage": {"list": list_, "diff": diff, "rm": rm, "plan": plan, "doctor": doctor},
    "Other tools": {"export": export, "import": import_},
}


class _Root(Commands):
    """`attnlm`, whose help has the commands in groups."""

    groups = _COMMANDS


_app = typer.Typer(
    name="attnlm",
    cls=_Root,
    help="Prepare a text, train small attention language models on it, and read what they learned.",
    epilog="Start with: attnlm prepare",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_CLASSES = {"train": TrainCommand, "plan": PlanCommand, "export": ExportCommand}
for _commands in _COMMANDS.values():
    for _name, _command in _commands.items():
        _app.command(_name, cls=_CLASSES.get(_name, Command))(_command)


def _show_version(wanted: bool) -> None:
    if wanted:
        console.result(f"attnlm {attnlm.__version__}")
        raise typer.Exit


@_app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
    install_completion: Annotated[
        bool,
        typer.Option(
            "--install-completion",
            callback=completion.install,
            is_eager=True,
            help="Install completion for this shell: bash, zsh or fish. A line is added to its "
            "~/.bashrc or ~/.zshrc.",
        ),
    ] = False,
    show_completion: Annotated[
        bool,
        typer.Option(
            "--show-completion",
            callback=completion.show,
            is_eager=True,
            help="Show what that installs, and exit.",
        ),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        console.result(context.get_help())


@cache
def root_command() -> Any:
    """The command that has all others."""
    return typer.main.get_command(_app)


def run_command() -> None:
    """The command that the arguments name. Every failure is an exception."""
    if instruction := os.environ.get(completion.VARIABLE):
        raise typer.Exit(completion.complete(root_command(), instruction))
    # Not through Typer's own main: it treats errors, signals and closed pipes differently.
    with root_command().make_context("attnlm", sys.argv[1:]) as context:
        root_command().invoke(context)
