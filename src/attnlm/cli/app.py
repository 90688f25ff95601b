"""The command `attnlm`, and how its subcommands are found and run."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import attnlm
from attnlm.cli import completion, console
from attnlm.cli.help import Command

_COMMANDS = {
    "Start here": {
        "prepare": "prepare:prepare",
        "train": "train:train:TrainCommand",
        "sample": "sample:sample",
    },
    "Look inside": {
        "eval": "evaluate:evaluate",
        "ladder": "ladder:ladder",
        "attend": "see:attend",
        "trace": "see:trace",
        "heads": "see:heads",
        "report": "see:report",
    },
    "Manage": {
        "list": "manage:list_",
        "diff": "manage:diff",
        "rm": "manage:rm",
        "plan": "plan:plan:PlanCommand",
        "doctor": "manage:doctor",
    },
    "Other tools": {"export": "export:export", "import": "import_:import_"},
}
"""The module and function of each command, and its class if it has its own."""

_HABITS: Any = {
    "add_completion": False,
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
}


class _LazyCommands(Mapping[str, Any]):
    """Commands by name, each loaded on first access: completion would be slow if it loaded all."""

    def __init__(self) -> None:
        self._places = {
            name: place for group in _COMMANDS.values() for name, place in group.items()
        }
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            module, *names = self._places[name].split(":")
            home = importlib.import_module(f"attnlm.cli.{module}")
            function, *own = (getattr(home, one) for one in names)
            app = typer.Typer(**_HABITS)
            app.command(name, cls=own[0] if own else Command)(function)
            self._loaded[name] = typer.main.get_command(app)
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class _Root(TyperGroup):
    """Command `attnlm`, whose help lists the subcommands in groups."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**{**attributes, "commands": _LazyCommands()})

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands, without loading them."""
        return list(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the sections of `--help`, with columns aligned across them."""
        widest = max(map(len, self.commands))
        limit = formatter.width - 6 - widest
        for group, names in _COMMANDS.items():
            shown = [(f"{n:<{widest}}", self.commands[n].get_short_help_str(limit)) for n in names]
            with formatter.section(group):
                formatter.write_dl(shown)


_app = typer.Typer(
    name="attnlm",
    cls=_Root,
    help="Prepare a text, train small attention language models on it, and read what they learned.",
    epilog="Start with: attnlm prepare",
    context_settings={"help_option_names": ["-h", "--help"]},
    **_HABITS,
)


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
            help="Print the completion script, and exit.",
        ),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        console.result(context.get_help())


@cache
def root_command() -> Any:
    """Return the command `attnlm`, which holds all subcommands."""
    return typer.main.get_command(_app)


def run_command() -> None:
    """Run the command that the arguments name. Every failure is raised as an exception."""
    if instruction := os.environ.get(completion.VARIABLE):
        raise typer.Exit(completion.complete(root_command(), instruction))
    Path.cwd()  # fails if it was deleted: PyTorch can't be imported then
    # Typer's own main isn't used: it handles errors, signals and closed pipes differently.
    with root_command().make_context("attnlm", sys.argv[1:]) as context:
        root_command().invoke(context)
