"""Model variants written as one word: a preset, or a preset with some of its settings changed.

transformer    transformer:positions=none    gpt2:norm=rms:tie_embeddings=false
transformer:learning_rate=0.005
"""

from __future__ import annotations

from attnlm.base.errors import UsageError
from attnlm.base.settings import Setting, Settings, fields_of, number, type_of
from attnlm.base.suggestions import same, suggestion
from attnlm.config.settings import RECORD_OF, check_setting
from attnlm.config.training import TrainingConfig
from attnlm.model.architecture import MODELS, PRESETS, Architecture, architecture

_BOOLEANS = {"true": True, "yes": True, "false": False, "no": False}
# Training settings that all rungs of a ladder share.
_SHARED = ("seed", "steps", "budget", "eval_every", "eval_tokens", "processes", "shard")


def variant(name: str) -> Settings:
    """Return the settings that a variant's name stands for, including `model`.

    Raises UsageError for a model, a setting or a value that does not exist.
    """
    model, *changes = str(name).split(":")
    if model not in MODELS:
        hint = suggestion(model, MODELS, f"choose from {', '.join(MODELS)}")
        raise UsageError(f"unknown model: {model!r}", hint)
    parts = PRESETS[model].settings
    trained = [name for name in fields_of(TrainingConfig) if name not in _SHARED]
    settings: Settings = {}
    for change in changes:
        key, equals, value = (word.strip() for word in change.partition("="))
        if not equals:
            raise UsageError(
                f"{change!r} has no value",
                f"write {model}:SETTING=VALUE, with `:` between several settings",
            )
        key = same(key, [*parts, *trained]) or key.replace("-", "_")
        if key in _SHARED:
            raise UsageError(f"`{key}` cannot differ between models", f"set `{key}` for all")
        if key == "model" or key not in RECORD_OF:
            otherwise = "write MODEL:SETTING=VALUE, as in transformer:positions=none"
            hint = suggestion(key, [*parts, *trained], otherwise)
            raise UsageError(f"{key!r} is not a setting of {model}", hint)
        if key in settings:
            raise UsageError(f"`{key}` is set twice in {name}", "set it only once")
        settings[key] = _value(key, value)
        check_setting(key, settings[key])
    architecture(model, {k: v for k, v in settings.items() if RECORD_OF[k] is Architecture})
    return {"model": model, **settings}


def _value(key: str, text: str) -> Setting:
    kind = type_of(RECORD_OF[key], key)
    if kind is bool:
        return _BOOLEANS.get(text.lower(), text)
    try:
        return number(kind, text) if kind in (int, float) else text
    except ValueError:
        return text  # `check_setting` refuses its type
