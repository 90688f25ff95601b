"""Arguments and options that several commands share, and the decoding of typed texts."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from attnlm.base.files import utf8
from attnlm.base.settings import fields_of, type_of
from attnlm.cli import completion
from attnlm.cli.help import help_with_default
from attnlm.config.settings import check_setting, help_of, seconds
from attnlm.config.training import TrainingConfig
from attnlm.model.architecture import Architecture
from attnlm.model.sizes import MAP_NAMES


def _record_of(name: str) -> type:
    return Architecture if name in fields_of(Architecture) else TrainingConfig


def _check_device(device: str) -> str:
    check_setting("device", device)  # before torch is loaded
    return device


def option(help: str, complete: completion.Completer | None = None, **more: Any) -> Any:
    """Return an option that is named after its parameter."""
    return typer.Option(help=help, autocompletion=complete, **more)


def switch(help: str, *names: str) -> Any:
    """Return an option without a value and without a negative form: --json, but no --no-json."""
    return typer.Option(*names, help=help)


def setting_option(name: str) -> Any:
    """Return an option for the setting `name`, with the setting's help and completion."""
    words = fields_of(_record_of(name))[name].metadata["choices"]
    completed = completion.choices(*words) if words else None
    if name == "lora_on":
        completed = completion.several(*MAP_NAMES, "all")
    return option(help_with_default(name), completed)


RunArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        help="name or path of a run; default: the run trained last",
        autocompletion=completion.runs,
    ),
]
DatasetArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="DATASET",
        help="name or path of a data set; default: the data set prepared last",
        autocompletion=completion.datasets,
    ),
]
TextArgument = Annotated[str, typer.Argument(metavar="TEXT", help="text that the model reads")]
Recipe = Annotated[
    str | None,
    option(
        "settings from a recipe: its name, a TOML file, or a run's config.json; "
        "options override the recipe",
        completion.recipes,
    ),
]
StartFrom = Annotated[
    str | None,
    typer.Option(
        "--from",
        help="name or path of a run: the new run starts from its model and weights",
        autocompletion=completion.runs,
    ),
]
JsonOption = Annotated[bool, switch("print one JSON object on stdout", "--json")]
QuietOption = Annotated[bool, switch("print warnings and results only", "--quiet", "-q")]
DataDir = Annotated[Path, option("folder of the data sets")]
CheckpointDir = Annotated[Path, option("folder of the runs")]
Checkpoint = Annotated[
    str,
    option(
        "which weights: auto|best|last; auto takes best, or last if only step 0 was evaluated",
        completion.choices("auto", "best", "last"),
    ),
]
Verify = Annotated[
    bool, switch("check the hashes of whole files, also of splits larger than 1 GiB", "--verify")
]
_DEVICES = fields_of(TrainingConfig)["device"].metadata["choices"]
DeviceOption = Annotated[
    str, option(help_of("device"), completion.choices(*_DEVICES), callback=_check_device)
]
Ablate = Annotated[bool, switch("also measure the loss with each head silenced", "--ablate")]

_Command = TypeVar("_Command", bound=Callable[..., None])


def with_settings(*names: str) -> Callable[[_Command], _Command]:
    """Return a decorator that replaces a command's `**settings` by an option for each name."""
    annotated: Any = Annotated

    def option_of(name: str) -> inspect.Parameter:
        option = setting_option(name)
        if name == "budget":
            option = budget_option(
                "time for the whole command, such as 90s, 5m or 1h30m, instead of --steps; "
                "default: no limit"
            )
        kind = annotated[type_of(_record_of(name), name) | None, option]
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind
        )

    def given(command: _Command) -> _Command:
        signature = inspect.signature(command, eval_str=True)
        first, *others, _ = signature.parameters.values()
        parameters = [first, *map(option_of, names), *others]
        command.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=parameters
        )
        return command

    return given


def budget_option(help: str) -> Any:
    """Return an option that takes a time such as 90s or 5min, and has its value in seconds."""
    return option(help, parser=seconds, metavar="<time>")


def typed(argument: str, name: str) -> str:
    """Return a typed argument decoded as UTF-8. Python decoded it by the locale, which may differ.

    Raises AttnlmError if the argument is not UTF-8. The message calls the argument `name`.
    """
    try:
        return utf8(os.fsencode(argument), name)
    except UnicodeEncodeError:  # passed by a program, not typed
        return utf8(argument.encode(errors="surrogatepass"), name)
