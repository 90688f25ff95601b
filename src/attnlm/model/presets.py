"""Presets: named sets of the parts of an Architecture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from attnlm.base.errors import UsageError
from attnlm.base.setting_fields import Setting, Settings
from attnlm.model.architecture import OWN, Architecture, missing_requirement


@dataclass(frozen=True)
class Preset:
    """A named set of parts, and the settings that a user may change in it, in the order of the
    fields of Architecture."""

    parts: Settings
    settings: tuple[str, ...]


_NOT_PARTS = ("model", "wide_heads", "scores")
_ALL_PARTS = tuple(f.name for f in fields(Architecture) if f.name not in _NOT_PARTS)
_TRANSFORMER: Settings = {
    "embed_dim": 128,
    "heads": 4,
    "layers": 2,
    "block_size": 128,
    "projection": True,
    "positions": "rotary",
    "norm": "rms",
    "mlp": "swiglu",
    "residual": True,
}
_QWEN3: Settings = {**_TRANSFORMER, "query_key_norm": True}
_BIASES: Settings = {"bias": True, "head_bias": True}
_ONE_LAYER: Settings = {"embed_dim": 64, **_BIASES}

PRESETS: dict[str, Preset] = {
    "bigram": Preset({"attention": "none", "positions": "none"}, ("block_size",)),
    "average": Preset({**_ONE_LAYER, "attention": "uniform"}, ("embed_dim", "block_size")),
    "dot-product": Preset(
        {**_ONE_LAYER, "attention": "parameter-free"}, ("embed_dim", "block_size")
    ),
    "single-head": Preset(_ONE_LAYER, ("embed_dim", "block_size", "head_size", "dropout")),
    "multi-head": Preset(
        {**_ONE_LAYER, "heads": 4},
        ("embed_dim", "block_size", "heads", "head_size", "qkv_bias", "projection", "dropout"),
    ),
    "wide-head": Preset(
        {**_ONE_LAYER, "heads": 4, "wide_heads": True, "projection": True},
        ("embed_dim", "block_size", "heads", "dropout"),
    ),
    # Qwen3, but with another rotary base and an untied LM head.
    "transformer": Preset(_QWEN3, _ALL_PARTS),
    "gpt2": Preset(
        {
            **_TRANSFORMER,
            "qkv_bias": True,
            "bias": True,
            "positions": "learned",
            "norm": "layer",
            "norm_epsilon": 1e-5,
            "mlp": "gelu",
            "tie_embeddings": True,
        },
        _ALL_PARTS,
    ),
    "llama": Preset({**_TRANSFORMER, "norm_epsilon": 1e-5}, _ALL_PARTS),
    "qwen3": Preset({**_QWEN3, "rotary_base": 1e6, "tie_embeddings": True}, _ALL_PARTS),
}


def architecture(
    model: str, settings: Mapping[str, Setting], replaced: Iterable[str] = ()
) -> Architecture:
    """Return the architecture of a preset with some of its settings changed.

    Own code computes the parts in `replaced`, which makes `positions` a setting of every preset.
    Raises UsageError if the preset lacks a setting, if a setting has no effect, or if parts or
    sizes do not fit each other.
    """
    preset = PRESETS[model]
    merged = {**preset.parts, **settings, **dict.fromkeys(replaced, OWN)}
    for name in settings:
        if name not in preset.settings and not (replaced and name == "positions"):
            users = [m for m in PRESETS if name in PRESETS[m].settings]
            raise UsageError(
                f"`{name}` does not apply to {model}", f"use `model` {' or '.join(users)}"
            )
        if needs := missing_requirement(name, merged):
            raise UsageError(f"`{name}` has no effect without {needs}", f"leave `{name}` out")
    used = {
        name: value for name, value in merged.items() if missing_requirement(name, merged) is None
    }
    return Architecture(model=model, **used)  # type: ignore[arg-type]
