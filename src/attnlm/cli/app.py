"""The command `attnlm`, and how its subcommands are found and run."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import typer
from typer.core import TyperGroup

import attnlm
from attnlm.cli import completion, console
from attnlm.cli.help import Command
from attnlm.cli.options import option, with_value_parsers

_COMMANDS = {
    "Start here": {
        "prepare": "prepare:prepare",
        "train": "train:train",
        "sample": "sample:sample",
    },
    "Look inside": {
        "check": "check:check",
        "eval": "evaluate:evaluate",
        "ladder": "ladder:ladder",
        "attend": "see:attend",
        "trace": "see:trace",
        "heads": "see:heads",
        "patch": "see:patch",
        "report": "see:report",
    },
    "Manage": {
        "list": "manage:list_",
        "diff": "manage:diff",
        "doctor": "manage:doctor",
    },
    "Other tools": {"export": "import_export:export", "import": "import_export:import_"},
}
"""The commands by section of `--help`. Each value names the command's module and function."""
_PLACES = {name: place for group in _COMMANDS.values() for name, place in group.items()}

_HABITS: Any = {
    "add_completion": False,
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
}


class _Root(TyperGroup):
    """Command `attnlm`, whose help lists the subcommands in groups.

    A command is loaded only when it is needed: loading all commands would slow completion down.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands, without loading them."""
        return list(_PLACES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, or None for an unknown name."""
        if cmd_name in _PLACES and cmd_name not in self.commands:
            module, function = _PLACES[cmd_name].split(":")
            home: Any = importlib.import_module(f"attnlm.cli.{module}")
            app = typer.Typer(**_HABITS)
            app.command(cmd_name, cls=Command)(with_value_parsers(getattr(home, function)))
            command: Any = typer.main.get_command(app)
            self.commands[cmd_name] = command
            command.arrange(getattr(home, "GROUPS", {}), getattr(home, "COMMON", ()))
        return self.commands.get(cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the sections of `--help`, with columns aligned across them."""
        widest = max(map(len, self.list_commands(ctx)))
        limit = formatter.width - 6 - widest
        for group, names in _COMMANDS.items():
            helps = (self.get_command(ctx, name).get_short_help_str(limit) for name in names)
            shown = [(f"{name:<{widest}}", help) for name, help in zip(names, helps, strict=True)]
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


def _eager(name: str, help: str, callback: Callable[..., None]) -> Any:
    """Declare an option that is handled before all other options and ends the command."""
    return option(False, help, names=[name], callback=callback, is_eager=True)


def _show_version(is_set: bool) -> None:
    if is_set:
        console.print_result(f"attnlm {attnlm.__version__}")
        raise typer.Exit


_INSTALL = (
    "Install completion for this shell: bash, zsh or fish. For bash and zsh, a line is added to "
    "~/.bashrc or ~/.zshrc."
)
_SHOW = "Print the completion script, and exit."


@_app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: bool = _eager("--version", "Show the version and exit.", _show_version),
    install_completion: bool = _eager("--install-completion", _INSTALL, completion.install),
    show_completion: bool = _eager("--show-completion", _SHOW, completion.show),
) -> None:
    if context.invoked_subcommand is None:
        console.print_result(context.get_help())


@cache
def root_command() -> Any:
    """Return the command `attnlm`, which holds all subcommands."""
    return typer.main.get_command(_app)


@cache
def option_of_each() -> dict[str, str]:
    """Return the option of each parameter of all commands, as {"start_from": "--from"}."""
    root = root_command()
    commands = [root.get_command(None, name) for name in root.list_commands(None)]
    options = [p for command in commands for p in command.params if p.param_type_name == "option"]
    return {p.name.rstrip("_"): next(o for o in p.opts if o.startswith("--")) for p in options}


def run_command() -> None:
    """Run the command that the arguments name. Every failure is raised as an exception."""
    if instruction := os.environ.get(completion.VARIABLE):
        raise typer.Exit(completion.complete(root_command(), instruction))
    # Typer's own main isn't used: it handles errors, signals and closed pipes differently.
    with root_command().make_context("attnlm", sys.argv[1:]) as context:
        root_command().invoke(context)
