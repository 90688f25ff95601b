"""Make the text of `--help`: options in groups, each with its default."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import typer
from typer.core import TyperCommand

from attnlm.base.errors import UsageError
from attnlm.base.settings import Setting, Settings, fields_of
from attnlm.cli.console import with_flags
from attnlm.config.settings import help_of, resolve
from attnlm.model.architecture import MODELS, Architecture

_USUAL_MODEL = str(fields_of(Architecture)["model"].default)
_TYPERS_DEFAULT = re.compile(r"  \[default: (.*)\]$")


class Command(TyperCommand):
    """A command whose help groups its options. A hidden option `--run` also sets argument RUN."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.groups: Mapping[str, Iterable[str]] = {}
        """The options in each section of `--help`; all other options come last."""
        if any(parameter.name == "run" for parameter in self.params):
            self.params += _made_by_typer(_run_option)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; the value of `--run` takes the place of RUN."""
        rest = super().parse_args(ctx, args)
        if "run" in ctx.params and (named := ctx.params.pop("run_option")) is not None:
            if ctx.params["run"] is not None:
                raise UsageError("RUN and --run cannot be combined", "use only one of them")
            ctx.params["run"] = named
        return rest

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the pieces of the usage line: `[OPTIONS]`, `TEXT`, `[RUN]`."""
        arguments = [p for p in self.get_params(ctx) if p.param_type_name == "argument"]
        return ["[OPTIONS]", *(_in_usage(one.metavar, one.required) for one in arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the sections of `--help`."""
        group_of = {name: group for group, names in self.groups.items() for name in names}
        rows: dict[str, list[tuple[str, str]]] = {
            group: [] for group in ("Arguments", *self.groups, "Options")
        }
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                name, text = record[0], _TYPERS_DEFAULT.sub(r"; default: \1", record[1])
                group = group_of.get(parameter.name, "Options")
                if parameter.param_type_name == "argument":
                    name, group = parameter.metavar, "Arguments"
                rows[group].append((name, text))
        for group in filter(rows.get, rows):
            with formatter.section(group):
                formatter.write_dl(rows[group])


def _in_usage(metavar: str, is_required: bool) -> str:
    """Return an argument as the usage line shows it, in brackets if it may be left out."""
    return metavar if is_required or metavar.startswith("[") else f"[{metavar}]"


def _run_option(run_option: str | None = typer.Option(None, "--run", hidden=True)) -> None:
    """Declare the hidden option --run."""


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
    text = with_flags(help_of(name))
    if "default:" in text:
        return text
    if name == "model":
        return f"{text}; default: {_USUAL_MODEL}"
    usual, by_adamw = _defaults(), _defaults(optimizer="adamw")
    told = _of_models(name, usual)
    changed = {m: given for m, given in by_adamw.items() if given.get(name) != usual[m].get(name)}
    if changed and name != "optimizer":
        told += f"; but with adamw: {_of_models(name, changed)}"
    return f"{text}; default: {told}" if told else text


def _of_models(name: str, defaults: Mapping[str, Settings]) -> str:
    """Return a setting's values: `0.03; 0.1 (bigram)`. The value of the default model is first."""
    models: dict[str, list[str]] = {}
    for model, settings in defaults.items():
        if name in settings:
            models.setdefault(in_words(settings[name]), []).append(model)
    named = (
        value if _USUAL_MODEL in having else f"{value} ({', '.join(having)})"
        for value, having in models.items()
    )
    return "; ".join(sorted(named, key=lambda words: words not in models))


@functools.cache
def _defaults(**settings: Setting) -> Mapping[str, Settings]:
    """Return each model's settings: those given, and the defaults known before a run begins."""
    return {model: resolve({"model": model, **settings}).settings() for model in MODELS}


def in_words(value: Setting) -> str:
    """Return a setting's value for a reader: `yes`, `0.03`, `1000000`."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() else f"{value:g}"
    return str(value)
