"""Functions to declare arguments and options, the declarations that commands share, and `--help`.

The declaration is the parameter's default, as in `tokens: int = option(500, "tokens to generate")`.
Typer puts the default of the option in its place. A parameter without one is declared in `USUAL`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

import attnlm
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.files import decode_utf8
from attnlm.base.folders import CHECKPOINT_DIR, DATA_DIR, KINDS, flag, folder_names
from attnlm.base.own_code import accept_code
from attnlm.base.setting_fields import Settings, fields_of, help_of, type_of
from attnlm.cli.console import print_result, with_flags
from attnlm.cli.event_printer import Display, setting_text
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
    default: Any,
    help: str,
    *names: str,
    type: Any = None,
    complete: Completer | None = None,
    **more: Any,
) -> Any:
    """Declare an option, named after its parameter unless `names` has others, such as --output.

    If its default is False, it has no value and no negative form: --json, but no --no-json. `type`
    is for options that `with_options` adds; the usual one is that of the default, or str.
    """
    declared = typer.Option(default, *names, help=help, autocompletion=complete, **more)
    declared.kind = type or (str if default is None else default.__class__)
    return declared


def argument(
    default: Any, metavar: str, help: str, complete: Completer | None = None, **more: Any
) -> Any:
    """Declare an argument, which `--help` calls `metavar`."""
    return typer.Argument(default, metavar=metavar, help=help, autocompletion=complete, **more)


def utf8(parameter: typer.CallbackParam, typed: Any) -> Any:
    """Return typed texts decoded as UTF-8. Python decoded them by the locale, which may differ.

    This is a callback of options and arguments. Raises AttnlmError if a text is not UTF-8.
    """
    if isinstance(typed, str):
        return decode_utf8(os.fsencode(typed), parameter.opts[0])
    return typed and [utf8(parameter, text) for text in typed]


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


def _check_device(device: str) -> str:
    check_setting("device", device)  # before torch is loaded
    return device


_COMPLETERS = {
    "tokenizer": names("data set", "run", also=("char", "byte", *PUBLISHED)),
    "val_file": words("tales"),
}
CHECKPOINTS = words("auto", "best", "last")
_MORE: dict[str, dict[str, Any]] = {
    "budget": {"parser": parse_seconds, "metavar": "<time>"},
    "prompt": {"callback": utf8},
}
_SECTIONS: dict[Any, str] = {Architecture: "Model", TrainingConfig: "Training"}


def _setting_option(record: type, name: str, help: str | None = None) -> Any:
    """Declare an option for a setting. If it is one of a run, its default is resolved later."""
    described = fields_of(record)[name]
    choices = described.metadata["choices"]
    is_resolved = RECORD_OF.get(name) is record
    text = help or (help_with_default(name) if is_resolved else help_of(record, name))
    return option(
        None if is_resolved or "default:" in text else described.default,
        text,
        type=type_of(record, name),
        complete=words(*choices) if choices else _COMPLETERS.get(name),
        rich_help_panel=_SECTIONS.get(record),
        **_MORE.get(name, {}),
    )


def with_options(
    *usual: str,
    settings: Mapping[str, type] = MappingProxyType({}),
    helps: Mapping[str, str] = MappingProxyType({}),
    common: Sequence[str] = (),
    **options: Any,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that declares a command's options.

    `settings` has the record that declares each setting; `helps` replaces some lines of help. The
    command gets them, the `usual` options by their names in USUAL, and the `options` declared here
    as `**settings`, unless it names them. Parameters of a usual name are usual options, too.
    `common` are the parameters that `--help` shows (default: all). A command with the parameter
    `on_event` gets a Display, which is closed when the command ends.
    """

    def with_settings(command: Callable[..., None]) -> Callable[..., None]:
        named = dict(inspect.signature(command, eval_str=True).parameters)
        listens = "on_event" in named
        handled = ["help_all"] if common else []
        if {"checkpoint", "rungs"} & {*usual, *named, *options}:  # may run a run's own code
            handled.append("code")
        declared = {n: _setting_option(record, n, helps.get(n)) for n, record in settings.items()}
        declared |= options
        declared |= {n: p.default for n, p in named.items() if p.default is not p.empty}
        for name in (*named, *usual, *handled):
            if name in USUAL:
                declared.setdefault(name, USUAL[name])
        parameters = []
        for name, info in declared.items():
            if info.default is False and not info.param_decls:
                info.param_decls = (flag(name),)
            if name in named:
                parameters.append(named[name].replace(default=info))
            else:
                kind = inspect.Parameter.KEYWORD_ONLY
                hint = info.kind | None
                parameters.append(inspect.Parameter(name, kind, default=info, annotation=hint))

        @functools.wraps(command)
        def run(**arguments: Any) -> None:
            passed = {k: v for k, v in arguments.items() if k not in handled}
            with contextlib.closing(Display(passed.get("quiet", False))) as display:
                command(**passed, **({"on_event": display} if listens else {}))

        parameters.sort(key=lambda parameter: parameter.kind)  # arguments first
        shown = {*common, "help", "help_all"} if common else ()
        vars(run).update(__signature__=inspect.Signature(parameters), common=shown)
        return run

    return with_settings


def opened_run(name: str | None, settings: Settings) -> attnlm.Run:
    """Return the run that a command names, and take the folders it is opened with from `settings`.

    Raises as `open_run` does.
    """
    folders: Any = {k: settings.pop(k) for k in ("checkpoint_dir", "data_dir") if k in settings}
    return attnlm.open_run(name, **folders)


def given(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the user typed, with the values given by --set as `set`."""
    values = {name: value for name, value in settings.items() if value is not None}
    return values | ({"set": dict(values["set"])} if "set" in values else {})


def _argument(typed: str) -> tuple[str, str]:
    """Return the name and the value in NAME=VALUE. Raises UsageError for a text without `=`."""
    name, equals, value = (word.strip() for word in typed.partition("="))
    if not (name and equals):
        raise UsageError(f"--set {typed!r} has no value", "write --set NAME=VALUE")
    return name, value


def _accept_code(paths: Sequence[str] | None) -> None:
    for path in paths or ():
        accept_code(path)


_USUAL_MODEL = str(fields_of(Architecture)["model"].default)
SHOWS_ALL = "attnlm.cli.options.shows_all"
"""A key of a context's `meta`: its value is True if the help shows all options."""


class Command(TyperCommand):
    """A command whose help has the options in sections: their help panels.

    If its function has names in `common`, --help shows only these, and --help-all shows all.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the sections of the help."""
        callback: Any = self.callback
        parameters: list[Any] = self.get_params(ctx)
        rows = []
        for parameter in parameters:
            is_common = not callback.common or parameter.name in callback.common
            record = parameter.get_help_record(ctx)
            if record and (is_common or ctx.meta.get(SHOWS_ALL)):
                section = parameter.rich_help_panel or f"{parameter.param_type_name.title()}s"
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
    "text": argument(REQUIRED, "TEXT", "text that the model reads", callback=utf8),
    "name": option(None, "name of the run; default: <model>-001, <model>-002, …"),
    "part": option(
        None,
        "what own code is: attention|mlp|scores|model; default: as its arguments tell",
        complete=words("attention", "mlp", "scores", "model"),
    ),
    "set": option(
        None,
        "value of an argument of your own code, NAME=VALUE; may be repeated",
        type=list[str],
        parser=_argument,
        metavar="<str>",
    ),
    "checkpoint": option(
        "auto",
        "which weights: auto|best|last, or a step that --keep-every kept; auto takes best, or last "
        "if only step 0 was evaluated",
        complete=CHECKPOINTS,
    ),
    "device": option(
        "auto",
        help_of(TrainingConfig, "device"),
        complete=words(*fields_of(TrainingConfig)["device"].metadata["choices"]),
        callback=_check_device,
    ),
    "checkpoint_dir": option(CHECKPOINT_DIR, "folder of the runs"),
    "data_dir": option(DATA_DIR, "folder of the data sets"),
    "verify": option(False, "check the hashes of whole files, also of splits larger than 1 GiB"),
    "json": option(False, "print one JSON object on stdout"),
    "quiet": option(False, "print warnings and results only", "--quiet", "-q"),
    "code": option(
        None,
        "accept the code of its own that a run has: code/FILE.py in its folder, once you read it",
        type=list[str],
        callback=_accept_code,
    ),
    "help_all": option(
        False,
        "Show all options and exit; --help shows the common ones.",
        callback=_show_all,
        is_eager=True,
    ),
}
"""The declarations of parameters that are declared by their name alone."""
