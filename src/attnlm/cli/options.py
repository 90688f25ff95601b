"""Functions to declare arguments and options, and the declarations that several commands share.

The declaration is the parameter's default, as in `tokens: int = option(500, "tokens to generate")`.
Typer puts the default of the option in its place.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from attnlm.base.errors import UsageError
from attnlm.base.files import decode_utf8
from attnlm.base.folders import flag
from attnlm.base.setting_fields import fields_of, help_of, type_of
from attnlm.cli import completion
from attnlm.cli.help import help_with_default
from attnlm.config.settings import RECORD_OF, check_setting, parse_seconds
from attnlm.generation.sampling_config import SamplingConfig

REQUIRED = ...


def option(
    default: Any,
    help: str,
    complete: completion.Completer | None = None,
    names: Sequence[str] = (),
    **more: Any,
) -> Any:
    """Declare an option, named after its parameter unless `names` has others, such as --output."""
    return typer.Option(default, *names, help=help, autocompletion=complete, **more)


def switch(help: str, *names: str) -> Any:
    """Declare an option without a value and without a negative form: --json, but no --no-json."""
    return option(False, help, names=names)


def argument(
    default: Any, metavar: str, help: str, complete: completion.Completer | None = None, **more: Any
) -> Any:
    """Declare an argument, which `--help` calls `metavar`."""
    return typer.Argument(default, metavar=metavar, help=help, autocompletion=complete, **more)


def setting_option(name: str, help: str | None = None, default: Any = None, **more: Any) -> Any:
    """Declare an option for a training setting, with its completion, and its help by default."""
    words = fields_of(RECORD_OF[name])[name].metadata["choices"]
    completed = completion.choice_completer(*words) if words else None
    if name != "budget":
        return option(default, help or help_with_default(name), completed, **more)
    usual = "time for the whole command, such as 90s, 5m or 1h30m, instead of --steps; "
    return option(None, help or f"{usual}default: no limit", parser=parse_seconds, metavar="<time>")


def sampling_option(name: str) -> Any:
    """Declare an option for a setting of sampling."""
    help = help_of(SamplingConfig, name)
    described = fields_of(SamplingConfig)[name]
    if described.default is False:
        return switch(help, flag(name))
    return option(None if "default:" in help else described.default, help)


def with_options(
    records: Mapping[str, type], declare: Callable[[str], Any] = setting_option
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that replaces `**settings` by an option for each setting in `records`."""

    def with_settings(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        first, *others, _ = signature.parameters.values()
        options = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=declare(name),
                annotation=type_of(record, name) | None,
            )
            for name, record in records.items()
        ]
        signature = signature.replace(parameters=[first, *options, *others])
        command.__signature__ = signature  # type: ignore[attr-defined]
        return command

    return with_settings


def _number_reader(kind: type[int] | type[float], words: str) -> Callable[[Any], Any]:
    """Return a function that reads a typed number, and returns a default as it is."""

    def read(value: Any) -> Any:
        try:
            return kind(value) if isinstance(value, str) else value
        except ValueError:
            raise typer.BadParameter(f"{value!r} is not {words}") from None

    return read


def _path(value: Any) -> Path:
    if not str(value):
        raise typer.BadParameter("a path cannot be empty")
    return Path(value)


_VALUES: Mapping[Any, tuple[str, Callable[[Any], Any] | None]] = {
    **dict.fromkeys((int, int | None), ("<int>", _number_reader(int, "a whole number"))),
    **dict.fromkeys((float, float | None), ("<float>", _number_reader(float, "a number"))),
    **dict.fromkeys((str, str | None, list[str] | None), ("<str>", None)),
    **dict.fromkeys((Path, Path | None), ("<path>", _path)),
}
"""The values of options by type: what `--help` calls them, and the function that reads them."""


def with_value_parsers(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command`, whose options read and describe their values as `_VALUES` says.

    Versions of Typer differ: some read 5.0 as a whole number, and some call a text TEXT.
    """
    signature = inspect.signature(command, eval_str=True)
    parameters = []
    for parameter in signature.parameters.values():
        declared = parameter.default
        if parameter.annotation in _VALUES:
            name, parser = _VALUES[parameter.annotation]
            declared = copy.copy(declared)
            declared.metavar = declared.metavar or name
            declared.parser = declared.parser or parser
        parameters.append(parameter.replace(default=declared))
    signature = signature.replace(parameters=parameters)
    command.__signature__ = signature  # type: ignore[attr-defined]
    return command


def decode_argument(argument: str, name: str) -> str:
    """Return a typed argument decoded as UTF-8. Python decoded it by the locale, which may differ.

    Raises AttnlmError if the argument is not UTF-8. The message calls the argument `name`.
    """
    return decode_utf8(os.fsencode(argument), name)


def parse_arguments(typed: Sequence[str] | None) -> dict[str, str]:
    """Return the values given by --set. Raises UsageError for a text without `=`."""
    values: dict[str, str] = {}
    for text in typed or ():
        name, equals, value = (word.strip() for word in text.partition("="))
        if not (name and equals):
            raise UsageError(f"--set {text!r} has no value", "write --set NAME=VALUE")
        if name in values:
            raise UsageError(f"{name} is set twice", "set it only once")
        values[name] = value
    return values


def typed_settings(settings: Mapping[str, Any], set_: Sequence[str] | None) -> dict[str, Any]:
    """Return the settings that the user typed, with the values given by --set as `set`."""
    values = {name: value for name, value in settings.items() if value is not None}
    return values | ({"set": parse_arguments(set_)} if set_ else {})


def _check_device(device: str) -> str:
    check_setting("device", device)  # before torch is loaded
    return device


RUN = argument(None, "RUN", "name or path of a run; default: the run trained last", completion.runs)
DATASET = argument(
    None,
    "DATASET",
    "name or path of a data set; default: the data set prepared last",
    completion.datasets,
)
TEXT = argument(REQUIRED, "TEXT", "text that the model reads")
RECIPE = option(
    None,
    "settings from a recipe: its name, a TOML file, or a run's config.json; "
    "options override the recipe",
    completion.recipes,
)
START_FROM = option(
    None,
    "name or path of a run: the new run starts from its model and weights",
    completion.runs,
    names=["--from"],
)
NAME = option(None, "name of the run; default: <model>-001, <model>-002, …")
SET = option(
    None,
    "value of an argument of your own code, NAME=VALUE; may be repeated",
    names=["--set"],
)
JSON = switch("print one JSON object on stdout", "--json")
QUIET = switch("print warnings and results only", "--quiet", "-q")
OFFLINE = switch("never use the network", "--offline")
DATA_DIR = option(Path("data"), "folder of the data sets")
CHECKPOINT_DIR = option(Path("checkpoints"), "folder of the runs")
CHECKPOINT = option(
    "auto",
    "which weights: auto|best|last; auto takes best, or last if only step 0 was evaluated",
    completion.choice_completer("auto", "best", "last"),
)
VERIFY = switch("check the hashes of whole files, also of splits larger than 1 GiB", "--verify")
DEVICE = setting_option(
    "device", help_of(RECORD_OF["device"], "device"), "auto", callback=_check_device
)
ABLATE = switch("also measure the loss with each head silenced", "--ablate")
