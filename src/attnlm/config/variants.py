"""Model variants written as one word: a model, or a model with some of its settings changed.

transformer    transformer:positions=none    gpt2:norm=rms:tie_embeddings=false
transformer:learning_rate=0.005    multi-head:attention=mine.py:Temperature:start=2
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from attnlm.base.errors import UsageError
from attnlm.base.own_code import OwnCode, is_code_name, named_code
from attnlm.base.setting_fields import Setting, Settings, fields_of, type_of
from attnlm.base.suggestions import equivalent_name, suggestion
from attnlm.config.settings import RECORD_OF, check_setting, resolve
from attnlm.config.training import TrainingConfig
from attnlm.model.architecture import MODELS, PRESETS
from attnlm.model.own_arguments import PREFIX

_BOOLEANS = {"true": True, "yes": True, "false": False, "no": False}
_CODE = r"(?:[A-Za-z]:)?[^:=]*\.py:\w+"
# A word is the name of own code, perhaps behind `=`, or has no colon.
_WORD = re.compile(rf"((?:[\w-]+\s*=\s*)?{_CODE}|[^:]*)(?::|$)")
SHARED = ("seed", "steps", "budget", "eval_every", "eval_tokens", "processes")
"""Training settings that all rungs of a ladder share."""


def named_codes(variants: Iterable[str]) -> dict[str, OwnCode]:
    """Return the own code that a user has named in variants, by its name there."""
    words = (word for name in variants for word in split_variant(name))
    names = (word.partition("=")[2].strip() or word for word in words)
    return {name: named_code(name) for name in names if is_code_name(name)}


def variant(name: str, codes: Mapping[str, OwnCode] | None = None) -> Settings:
    """Return the settings that a variant's name stands for, including `model`.

    `codes` has the own code that the name names; without it, the settings have only the names.
    Raises UsageError for a model, a setting or a value that does not exist.
    """
    model, *changes = split_variant(name) or [""]
    if model not in MODELS and not is_code_name(model):
        hint = suggestion(model, MODELS, f"choose from {', '.join(MODELS)}")
        raise UsageError(f"unknown model: {model!r}", hint)
    parts = PRESETS[model].settings if model in MODELS else ("block_size",)
    trained = [name for name in fields_of(TrainingConfig) if name not in SHARED]
    is_own = any(map(is_code_name, (model, *(change.partition("=")[2] for change in changes))))
    settings: Settings = {}
    for change in changes:
        key, equals, value = (word.strip() for word in change.partition("="))
        if not equals:
            raise UsageError(
                f"{change!r} has no value",
                f"write {model}:SETTING=VALUE, with `:` between several settings",
            )
        key = equivalent_name(key, [*parts, *trained]) or key.replace("-", "_")
        if key in SHARED:
            raise UsageError(f"`{key}` cannot differ between models", f"set `{key}` for all")
        is_known = key in ((*parts, *trained) if is_code_name(model) else RECORD_OF)
        if is_own and not is_known:
            settings[PREFIX + key] = value
            continue
        if key == "model" or key not in RECORD_OF:
            otherwise = "write MODEL:SETTING=VALUE, as in transformer:positions=none"
            hint = suggestion(key, [*parts, *trained], otherwise)
            raise UsageError(f"{key!r} is not a setting of {model}", hint)
        if key in settings:
            raise UsageError(f"`{key}` is set twice in {name}", "set it only once")
        settings[key] = _parse_value(key, value)
        if not is_code_name(settings[key]):
            check_setting(key, settings[key])
    settings = {"model": model, **settings}
    settings = {key: (codes or {}).get(str(value), value) for key, value in settings.items()}
    if not is_own or codes is not None:
        resolve({k: v for k, v in settings.items() if RECORD_OF.get(k) is not TrainingConfig})
    return settings


def split_variant(name: str) -> list[str]:
    """Return the model and the changes in a variant's name."""
    return [match[1].strip() for match in _WORD.finditer(str(name)) if match[0]]


def _parse_value(key: str, text: str) -> Setting:
    kind = type_of(RECORD_OF[key], key)
    if kind is bool:
        return _BOOLEANS.get(text.lower(), text)
    try:
        return kind(text) if kind in (int, float) else text
    except ValueError:
        return text  # `check_setting` refuses its type
