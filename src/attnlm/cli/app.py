"""The command `attnlm` and its subcommands."""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import Any

import typer

import attnlm
from attnlm.base.suggestions import our_name
from attnlm.cli import console
from attnlm.cli.compare import compare
from attnlm.cli.exam import exam
from attnlm.cli.import_export import export, import_
from attnlm.cli.ladder import ladder
from attnlm.cli.manage import check, doctor, list_
from attnlm.cli.options import Command, Group, option
from attnlm.cli.prepare import prepare
from attnlm.cli.sample import eval_, sample
from attnlm.cli.see import attend, heads, patch, report, trace
from attnlm.cli.train import train

_COMMANDS: dict[str, tuple[Any, ...]] = {
    "Start here": (prepare, train, sample),
    "Look inside": (check, eval_, exam, ladder, compare, attend, trace, heads, patch, report),
    "Manage": (list_, doctor),
    "Other tools": (export, import_),
}
"""The commands by section of `--help`. A command's module imports torch only when it runs."""


def _our_word(typed: str) -> str:
    """Return our option for another tool's: `n_layer` → `layers`; hyphens for underscores."""
    return our_name(typed.replace("-", "_")).replace("_", "-")


_app = typer.Typer(
    name="attnlm",
    cls=Group,
    help="Prepare a text, train small attention language models on it, and read what they learned.",
    epilog="Start with: attnlm prepare",
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": _our_word,
    },
    rich_markup_mode=None,  # rich's own panels would take 0.2 s longer
)
for _section, _commands in _COMMANDS.items():
    for _command in _commands:
        _name = _command.__name__.rstrip("_")
        _app.command(_name, cls=Command, rich_help_panel=_section)(_command)


def _show_version(is_set: bool) -> None:
    if is_set:
        console.print_result(f"attnlm {attnlm.__version__}")
        raise typer.Exit


@_app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: bool = option(
        False, "Show the version and exit.", "--version", callback=_show_version, is_eager=True
    ),
) -> None:
    if context.invoked_subcommand is None:
        console.print_result(context.get_help())


@cache
def root_command() -> Any:
    """Return the command `attnlm`, which holds all subcommands."""
    root: Any = typer.main.get_command(_app)
    for command in root.commands.values():
        for p in command.params:
            if p.param_type_name == "option":
                option = next(o for o in p.opts if o.startswith("--"))
                console.OPTION_OF[p.name.rstrip("_")] = option
    return root


def run_command() -> None:
    """Run the command that the arguments name. Every failure is raised as an exception."""
    root = root_command()
    if "_ATTNLM_COMPLETE" in os.environ:
        root.main(prog_name="attnlm")  # Typer answers the shell, and exits
    # Typer's own main isn't used: it handles errors, signals and closed pipes differently.
    with root.make_context("attnlm", sys.argv[1:]) as context:
        root.invoke(context)
