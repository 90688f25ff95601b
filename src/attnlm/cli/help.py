"""Make the text of `--help`: options in groups, each with its default."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import typer
from typer.core import TyperCommand

from attnlm.base.errors import UsageError
from attnlm.base.own_code import accept_code
from attnlm.base.setting_fields import Setting, Settings, fields_of, help_of
from attnlm.cli.console import print_result, with_flags
from attnlm.config.settings import RECORD_OF, resolve
from attnlm.model.architecture import MODELS, Architecture

_USUAL_MODEL = str(fields_of(Architecture)["model"].default)
SHOWS_ALL = "attnlm.cli.help.shows_all"
"""A key of a context's `meta`: its value is True if the help shows all options."""
_TYPERS_DEFAULT = re.compile(r"  \[default: (.*)\]$")


class Command(TyperCommand):
    """A command whose help groups its options, and which refuses repeated options.

    If it has an argument RUN, the hidden option --run sets the argument too.
    """

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.groups: Mapping[str, Iterable[str]] = {}
        """The options in each section of the help; all other options come last."""
        self.common: Iterable[str] = ()
        """The options in `groups` that --help shows. If this is empty, --help shows all."""
        if any(parameter.name == "run" for parameter in self.params):
            self.params += _made_by_typer(_run_option)
        if self.name in _MAY_RUN_CODE:
            self.params += _made_by_typer(_code_option)

    def arrange(self, groups: Mapping[str, Iterable[str]], common: Iterable[str]) -> None:
        """Set `groups` and `common`. If `common` is not empty, add the option --help-all."""
        self.groups, self.common = groups, common
        if common:
            self.params += _made_by_typer(_help_all_option)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; the value of --run takes the place of RUN."""
        typed = list(args)
        unparsed = super().parse_args(ctx, args)
        ctx.params.pop("help_all", None)
        if self.name in _MAY_RUN_CODE:
            for path in ctx.params.pop("code", None) or ():
                accept_code(path)
        if not ctx.resilient_parsing:
            for parameter, count in Counter(self.make_parser(ctx).parse_args(typed)[2]).items():
                if count > 1 and parameter.param_type_name == "option" and not parameter.multiple:
                    spellings = (*parameter.opts, *parameter.secondary_opts)
                    names = " or ".join(name for name in spellings if name[2:])
                    raise UsageError(f"{names} was given {count} times", "use it only once")
        if "run" in ctx.params and (named := ctx.params.pop("run_option")) is not None:
            if ctx.params["run"] is not None:
                raise UsageError("RUN and --run cannot be combined", "use only one")
            ctx.params["run"] = named
        return unparsed

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the pieces of the usage line: `[OPTIONS]`, `TEXT`, `[RUN]`."""
        parameters: list[Any] = self.get_params(ctx)
        pieces = ["[OPTIONS]"]
        for p in parameters:
            if p.param_type_name == "argument":
                is_bare = p.required or p.metavar.startswith("[")
                pieces.append(p.metavar if is_bare else f"[{p.metavar}]")
        return pieces

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the sections of the help."""
        group_of = {name: group for group, names in self.groups.items() for name in names}
        rows: dict[str, list[tuple[str, str]]] = {
            group: [] for group in ("Arguments", *self.groups, "Options")
        }
        shows_all = not self.common or ctx.meta.get(SHOWS_ALL, False)
        parameters: list[Any] = self.get_params(ctx)
        for parameter in parameters:
            record = parameter.get_help_record(ctx)
            is_shown = shows_all or parameter.name in self.common or parameter.name not in group_of
            if record is not None and is_shown:
                text = _TYPERS_DEFAULT.sub(r"; default: \1", record[1])
                if parameter.param_type_name == "argument":
                    rows["Arguments"].append((parameter.metavar, text))
                else:
                    rows[group_of.get(parameter.name, "Options")].append((record[0], text))
        for group in filter(rows.get, rows):
            with formatter.section(group):
                formatter.write_dl(rows[group])


def _run_option(run_option: str | None = typer.Option(None, "--run", hidden=True)) -> None:
    """Declare the hidden option --run."""


# Commands that load the model of a run, and so may run its own code.
_MAY_RUN_CODE = (
    "train", "sample", "eval", "ladder", "attend", "trace", "heads", "patch", "report", "export",
)  # fmt: skip
_CODE = "accept the code of its own that a run has: code/FILE.py in its folder, once you read it"


def _code_option(
    code: list[str] | None = typer.Option(None, "--code", help=_CODE, metavar="<path>"),
) -> None:
    """Declare the option --code."""


def _show_all(ctx: typer.Context, is_set: bool) -> None:
    if is_set:
        ctx.meta[SHOWS_ALL] = True
        print_result(ctx.get_help())
        raise typer.Exit


_HELP_ALL = "Show all options and exit; --help shows the common ones."


def _help_all_option(
    help_all: bool = typer.Option(
        False, "--help-all", help=_HELP_ALL, callback=_show_all, is_eager=True
    ),
) -> None:
    """Declare the option --help-all."""


@functools.cache
def _made_by_typer(declaration: Callable[..., None]) -> list[Any]:
    """Return the options that Typer makes of a function's parameters."""
    app = typer.Typer(add_completion=False)
    app.command()(declaration)
    made: Any = typer.main.get_command(app)
    return list(made.params)


def help_with_default(name: str) -> str:
    """Return a setting's line of help, with its defaults if the line does not state them.

    Each model's default is followed by the defaults that adamw changes.
    """
    text = with_flags(help_of(RECORD_OF[name], name))
    if "default:" in text:
        return text
    if name == "model":
        return f"{text}; default: {_USUAL_MODEL}"
    usual = _defaults()
    by_adamw = _defaults(optimizer="adamw")
    defaults = _of_models(name, usual)
    changed = {model: d for model, d in by_adamw.items() if d.get(name) != usual[model].get(name)}
    if changed and name != "optimizer":
        defaults += f"; but with adamw: {_of_models(name, changed)}"
    return f"{text}; default: {defaults}" if defaults else text


def _of_models(name: str, defaults: Mapping[str, Settings]) -> str:
    """Return a setting's values: `0.03; 0.1 (bigram)`. The value of the default model is first."""
    models: dict[str, list[str]] = {}
    for model, settings in defaults.items():
        if name in settings:
            models.setdefault(setting_text(settings[name]), []).append(model)
    named = (
        value if _USUAL_MODEL in having else f"{value} ({', '.join(having)})"
        for value, having in models.items()
    )
    return "; ".join(sorted(named, key=lambda words: words not in models))


@functools.cache
def _defaults(**settings: Setting) -> Mapping[str, Settings]:
    """Return each model's settings: those given, and the defaults known before a run begins."""
    return {model: resolve({"model": model, **settings}).settings() for model in MODELS}


def setting_text(value: Setting) -> str:
    """Return a setting's value for a reader: `yes`, `0.03`, `1000000`."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() else f"{value:g}"
    return str(value)
