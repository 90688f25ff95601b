"""Functions to declare arguments and options, the declarations that commands share, and `--help`.

The declaration is the parameter's default, as in `tokens: int = option(500, "tokens to generate")`.
Typer puts the default of the option in its place. A parameter without one is declared in `USUAL`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

import attnlm
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.files import decode_utf8
from attnlm.base.folders import CHECKPOINT_DIR, DATA_DIR, KINDS, flag, folder_names
from attnlm.base.own_code import accept_code
from attnlm.base.setting_fields import Setting, Settings, fields_of, help_of, setting, type_of
from attnlm.cli.console import print_result, with_flags
from attnlm.config.settings import RECORD_OF, check_setting, parse_seconds, resolve
from attnlm.config.training import TrainingConfig
from attnlm.model.architecture import MODELS, Architecture
from attnlm.tokens.specs import PUBLISHED

Completer = Callable[[typer.Context, str], list[str]]
REQUIRED = ...

# Other names are not completed: a shell might split them, or execute a part.
_PLAIN = re.compile(r"[\w.@%+,=:-]+")


def words(*choices: str) -> Completer:
    """Return a completer that offers `choices`, also for each item of a list with commas."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        before, comma, _ = incomplete.rpartition(",")
        return [f"{before}{comma}{word}" for word in choices if word not in before.split(",")]

    return complete


def names(*kinds: str, also: Sequence[str] = ()) -> Completer:
    """Return a completer for folders of these kinds, newest first, in the folder that is set."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        found = list(also)
        for kind in kinds:
            _, usual, option, _ = KINDS[kind]
            parent = ctx.params.get(option.strip("-").replace("-", "_")) or usual
            found += filter(_PLAIN.fullmatch, folder_names(Path(parent), kind))
        return found

    return complete


def option(
    default: Any, help: str, *names: str, complete: Completer | None = None, **more: Any
) -> Any:
    """Declare an option, named after its parameter unless `names` has others, such as --output."""
    return typer.Option(default, *names, help=help, autocompletion=complete, **more)


def switch(help: str, *names: str, **more: Any) -> Any:
    """Declare an option without a value and without a negative form: --json, but no --no-json."""
    return option(False, help, *names, **more)


def argument(default: Any, metavar: str, help: str, complete: Completer | None = None) -> Any:
    """Declare an argument, which `--help` calls `metavar`."""
    return typer.Argument(default, metavar=metavar, help=help, autocompletion=complete)


def output(help: str, *endings: str, default: str = "") -> Any:
    """Declare the option --output, for files that end in one of `endings`."""

    def checked(output: Path | None) -> Path | None:
        if output is None:
            return None
        if output.suffix.lower() not in endings:
            hint = f"use a name that ends in {' or '.join(endings)}"
            raise UsageError(f"invalid value for --output: {str(output)!r}", hint)
        if not output.parent.is_dir():
            hint = "create it, or choose another one"
            raise AttnlmError(f"folder not found: {output.parent}", hint)
        if output.is_dir():
            raise AttnlmError(f"{output} is a folder", "choose another name")
        return output

    return option(None, f"{help} to write or replace{default}", "--output", "-o", callback=checked)


_COMPLETERS = {
    "tokenizer": names("data set", "run", also=("char", "byte", *PUBLISHED)),
    "val_file": words("tales"),
    "checkpoint": words("auto", "best", "last"),
}


def _setting_option(record: type, name: str, help: str | None = None) -> Any:
    """Declare an option for a setting. If it is one of a run, its default is resolved later."""
    described = fields_of(record)[name]
    choices = described.metadata["choices"]
    complete = words(*choices) if choices else _COMPLETERS.get(name)
    if name == "budget":
        more: dict[str, Any] = {"parser": parse_seconds, "metavar": "<time>"}
        text = "time for the whole command, such as 90s, 5m or 1h30m, instead of `steps`; "
        return option(None, help or f"{text}default: no limit", complete=complete, **more)
    if name in RECORD_OF and RECORD_OF[name] is record:
        return option(None, help or help_with_default(name), complete=complete)
    text = help or help_of(record, name)
    if described.default is False:
        return switch(text, flag(name))
    callback = _check_device if name == "device" else None
    default = None if "default:" in text else described.default
    return option(default, text, complete=complete, callback=callback)


def with_options(
    records: Mapping[str, type],
    *,
    helps: Mapping[str, str] | None = None,
    common: Sequence[str] = (),
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that declares a command's options; `**settings` are those of `records`.

    `records` has the record that declares each setting; `helps` replaces some lines of help, and
    `common` are the options that `--help` shows (default: all).
    """

    def with_settings(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        kind = inspect.Parameter.KEYWORD_ONLY
        made = []
        for name, record in records.items():
            declared = _setting_option(record, name, (helps or {}).get(name))
            hint = type_of(record, name) | None
            made.append(inspect.Parameter(name, kind, default=declared, annotation=hint))
        handled: dict[str, Any] = {"help_all": bool} if common else {}
        if {"checkpoint", "rungs"} & {*records, *signature.parameters}:  # may run a run's own code
            handled["code"] = list[str]
        made += [inspect.Parameter(name, kind, annotation=hint) for name, hint in handled.items()]
        given = [p for p in signature.parameters.values() if p.kind != p.VAR_KEYWORD]
        place = sum(p.kind != kind for p in given)
        parameters = []
        for parameter in (*given[:place], *made, *given[place:]):
            is_usual = parameter.default is parameter.empty
            declared = copy.copy(USUAL[parameter.name] if is_usual else parameter.default)
            declared.rich_help_panel = _SECTIONS.get(records.get(parameter.name))
            parameters.append(parameter.replace(default=declared))

        @functools.wraps(command)
        def run(**arguments: Any) -> None:
            command(**{k: v for k, v in arguments.items() if k not in handled})

        signature = signature.replace(parameters=parameters)
        vars(run).update(__signature__=signature, common=common)
        return run

    return with_settings


def every(record: type) -> dict[str, type]:
    """Return the settings of a record that have a line of help."""
    return {name: record for name, field in fields_of(record).items() if field.metadata}


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Options of several commands: where runs and data sets are, and how to read them."""

    checkpoint: str = setting(
        "which weights: auto|best|last, or a step that --keep-every kept; auto takes best, or last "
        "if only step 0 was evaluated",
        default="auto",
    )
    device: str = setting(help_of(RECORD_OF["device"], "device"), default="auto")
    checkpoint_dir: str = setting("folder of the runs", default=CHECKPOINT_DIR)
    data_dir: str = setting("folder of the data sets", default=DATA_DIR)
    verify: bool = setting(
        "check the hashes of whole files, also of splits larger than 1 GiB", default=False
    )


def shared(*names: str) -> dict[str, type]:
    """Return the record of these shared options, for `with_options`."""
    return dict.fromkeys(names, Shared)


def opened_run(name: str | None, settings: Settings) -> attnlm.Run:
    """Return the run that a command names, and take the folders it is opened with from `settings`.

    Raises as `open_run` does.
    """
    folders: Any = {k: settings.pop(k) for k in ("checkpoint_dir", "data_dir") if k in settings}
    return attnlm.open_run(name, **folders)


def decode_argument(argument: str, name: str) -> str:
    """Return a typed argument decoded as UTF-8. Python decoded it by the locale, which may differ.

    Raises AttnlmError if the argument is not UTF-8. The message calls the argument `name`.
    """
    return decode_utf8(os.fsencode(argument), name)


def typed_settings(settings: Mapping[str, Any], set_: Sequence[str] | None) -> dict[str, Any]:
    """Return the settings that the user typed, with the values given by --set as `set`.

    Raises UsageError for a text without `=` after --set.
    """
    arguments: dict[str, str] = {}
    for text in set_ or ():
        name, equals, value = (word.strip() for word in text.partition("="))
        if not (name and equals):
            raise UsageError(f"--set {text!r} has no value", "write --set NAME=VALUE")
        arguments[name] = value
    values = {name: value for name, value in settings.items() if value is not None}
    return values | ({"set": arguments} if arguments else {})


def _check_device(device: str) -> str:
    check_setting("device", device)  # before torch is loaded
    return device


def _accept_code(paths: Sequence[str] | None) -> None:
    for path in paths or ():
        accept_code(path)


_SECTIONS: dict[Any, str] = {Architecture: "Model", TrainingConfig: "Training"}
_USUAL_MODEL = str(fields_of(Architecture)["model"].default)
SHOWS_ALL = "attnlm.cli.options.shows_all"
"""A key of a context's `meta`: its value is True if the help shows all options."""


class Command(TyperCommand):
    """A command whose help has the options in sections: their help panels.

    If its function has the attribute `common`, --help shows only the options named there, and
    --help-all shows all.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the sections of the help."""
        common = () if ctx.meta.get(SHOWS_ALL) else getattr(self.callback, "common", ())
        shown = {*common, "help", "help_all"}
        rows = []
        parameters: list[Any] = self.get_params(ctx)
        for parameter in parameters:
            record = parameter.get_help_record(ctx)
            kind = parameter.param_type_name
            if record and (not common or kind == "argument" or parameter.name in shown):
                section = parameter.rich_help_panel or f"{kind.title()}s"
                rows.append((section, (record[0], with_flags(record[1]))))
        _write_sections(formatter, rows)


class Group(TyperGroup):
    """A command whose help has the subcommands in sections: their help panels."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the sections of the help, with columns aligned across them."""
        commands: Any = self.commands
        width = max(map(len, commands))
        rows = [
            (c.rich_help_panel, (f"{name:<{width}}", c.get_short_help_str(formatter.width - width)))
            for name, c in commands.items()
        ]
        _write_sections(formatter, rows)


def _write_sections(formatter: Any, rows: list[tuple[str, tuple[str, str]]]) -> None:
    for section in dict.fromkeys(section for section, _ in rows):
        with formatter.section(section):
            formatter.write_dl([row for of, row in rows if of == section])


def _show_all(ctx: typer.Context, is_set: bool) -> None:
    """Handle the option --help-all."""
    if is_set:
        ctx.meta[SHOWS_ALL] = True
        print_result(ctx.get_help())
        raise typer.Exit


def help_with_default(name: str) -> str:
    """Return a setting's line of help, with each model's default if the line does not state it."""
    text = help_of(RECORD_OF[name], name)
    if "default:" in text:
        return text
    if name == "model":
        return f"{text}; default: {_USUAL_MODEL}"
    models: dict[str, list[str]] = {}
    for model, settings in _defaults().items():
        if name in settings:
            models.setdefault(setting_text(settings[name]), []).append(model)
    named = (
        value if _USUAL_MODEL in having else f"{value} ({', '.join(having)})"
        for value, having in models.items()
    )
    defaults = "; ".join(sorted(named, key=lambda words: words not in models))
    return f"{text}; default: {defaults}" if defaults else text


@functools.cache
def _defaults() -> Mapping[str, Settings]:
    """Return each model's default settings, as far as they are known before a run begins."""
    return {model: resolve({"model": model}).settings() for model in MODELS}


def setting_text(value: Setting) -> str:
    """Return a setting's value for a reader: `yes`, `0.03`, `1000000`."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() else f"{value:g}"
    return str(value)


USUAL: dict[str, Any] = {
    "run": argument(
        None, "RUN", "name or path of a run; default: the run trained last", names("run")
    ),
    "dataset": argument(
        None,
        "DATASET",
        "name or path of a data set; default: the data set prepared last",
        names("data set"),
    ),
    "text": argument(REQUIRED, "TEXT", "text that the model reads"),
    "name": option(None, "name of the run; default: <model>-001, <model>-002, …"),
    "set_": option(
        None, "value of an argument of your own code, NAME=VALUE; may be repeated", "--set"
    ),
    "json": switch("print one JSON object on stdout", "--json"),
    "quiet": switch("print warnings and results only", "--quiet", "-q"),
    "code": option(
        None,
        "accept the code of its own that a run has: code/FILE.py in its folder, once you read it",
        callback=_accept_code,
    ),
    "help_all": switch(
        "Show all options and exit; --help shows the common ones.",
        "--help-all",
        callback=_show_all,
        is_eager=True,
    ),
}
USUAL |= {name: _setting_option(record, name) for name, record in every(Shared).items()}
"""The declarations of parameters that are declared by their name alone."""
