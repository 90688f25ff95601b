"""Models written in one word: a preset, or a preset with some of its parts changed.

transformer    transformer:positions=none    gpt2:norm=rms:tie_embeddings=false
"""

from __future__ import annotations

from attnlm.base.errors import UsageError
from attnlm.base.settings import Setting, Settings, fields_of, number, type_of
from attnlm.base.suggestions import same, suggestion
from attnlm.config.settings import check_setting
from attnlm.model.architecture import MODELS, Architecture, architecture, settings_of

_BOOLEANS = {"true": True, "yes": True, "false": False, "no": False}


def variant(name: str) -> Settings:
    """The settings that a variant's name stands for, `model` among them.

    Raises UsageError for a model, a part or a value that does not exist.
    """
    model, *changes = str(name).split(":")
    if model not in MODELS:
        hint = suggestion(model, MODELS, f"choose from {', '.join(MODELS)}")
        raise UsageError(f"there is no model {model!r}", hint)
    settings: Settings = {}
    for change in changes:
        part, equals, value = (word.strip() for word in change.partition("="))
        if not equals:
            raise UsageError(
                f"{change!r} has no value", f"write {model}:PART=VALUE; `:` joins several parts"
            )
        part = same(part, settings_of(model)) or part.replace("-", "_")
        if part == "model" or part not in fields_of(Architecture):
            hint = suggestion(part, settings_of(model), f"write {model}:positions=none")
            raise UsageError(f"{part!r} is not a part of {model}", hint)
        settings[part] = _value(part, value)
        check_setting(part, settings[part])
    architecture(model, settings)
    return {"model": model, **settings}


def _value(part: str, text: str) -> Setting:
    kind = type_of(Architecture, part)
    try:
        value: Setting = _BOOLEANS.get(text.lower(), text) if kind is bool else text
        return number(kind, text) if kind in (int, float) else value
    except ValueError:
        return text  # refused for its type


def folder_name(name: str) -> str:
    """A variant's name as a part of a folder's: `transformer-positions-none`."""
    return name.replace(":", "-").replace("=", "-")
