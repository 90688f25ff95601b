"""The parts and sizes of a model, and presets: named sets of them."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attnlm.base.errors import UsageError
from attnlm.base.own_code import OwnCode
from attnlm.base.setting_fields import Setting, Settings, fields_of, setting, settings_of
from attnlm.model.costs import Costs, compute_costs, parameter_shapes
from attnlm.model.own_arguments import PREFIX
from attnlm.model.spec import Shapes

if TYPE_CHECKING:
    from attnlm.model.language_model import Bigram, Transformer

MODELS = (
    "bigram", "average", "dot-product", "single-head", "multi-head", "wide-head", "transformer",
    "gpt2", "llama", "qwen3",
)  # fmt: skip
RUNGS = MODELS[:7]
"""The rungs of the ladder: each adds one idea to the rung before. The other MODELS are small
versions of models that others published."""

# With these limits, the sizes of all tensors in bytes fit 64 bits.
_LARGEST = 2**20
_MOST_HEADS = 2**12
_WIDEST_HEAD = 2**16


_ANY = "any"
"""In `needs`: any value except none"""
_SOFTMAX = ("attention", "softmax")
_OWN = "own"
"""In `needs`: code of the user's"""
_ROTARY = ("positions", "rotary")


def _part(
    help: str,
    *,
    needs: tuple[tuple[str, Any], ...] = (),
    **limits: Any,
) -> Any:
    """Return a setting for a part.

    The part has an effect only beside one of the settings that `needs` names, each with a value.
    """
    described = setting(help, **limits)
    metadata = {**described.metadata, "needs": needs}
    return field(default=described.default, metadata=metadata)


_size = functools.partial(_part, at_least=1, at_most=_LARGEST)
"""Settings for numbers of features, heads or tokens."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The parts of one model. The defaults of its fields make a one-layer rung.

    Raises UsageError if parts or sizes do not fit each other.
    """

    model: str = _part(
        "a model of the ladder, a small version of a published model, or your own, FILE.py:NAME",
        default="multi-head",
        choices=MODELS,
    )
    embed_dim: int | None = _size("width of the embeddings")
    layers: int = _part("number of blocks", default=1, at_least=1, at_most=4096)
    block_size: int = _size("context: the number of tokens that the model sees", default=64)
    attention: str = _part(
        "attention weights: softmax (of queries and keys), uniform (over the past), parameter-free "
        "(softmax of the embeddings), none, or your own module, FILE.py:NAME",
        default="softmax",
        choices=("softmax", "uniform", "parameter-free", "none"),
    )
    scores: str = _part(
        "attention scores: scaled products of queries and keys, or your own module, FILE.py:NAME",
        default="products",
        choices=("products",),
        needs=(_SOFTMAX,),
    )
    heads: int = _size(
        "attention heads per layer",
        default=1,
        at_most=_MOST_HEADS,
        needs=(_SOFTMAX, ("attention", _OWN)),
    )
    kv_heads: int | None = _size(
        "key/value heads, each shared by a group of query heads; default: as many as `heads`",
        needs=(_SOFTMAX,),
    )
    head_size: int | None = _size(
        "width of one head; default: `embed_dim` / `heads`",
        at_most=_WIDEST_HEAD,
        needs=(_SOFTMAX,),
    )
    wide_heads: bool = False
    """heads as wide as the embeddings; not a setting"""
    query_key_norm: bool = _part(
        "RMS norm of each head's queries and keys",
        default=False,
        needs=(_SOFTMAX,),
    )
    qkv_bias: bool = _part(
        "biases in the query, key and value projections",
        default=False,
        needs=(_SOFTMAX,),
    )
    projection: bool = _part(
        "a projection of the concatenated heads",
        default=False,
        needs=(_SOFTMAX,),
    )
    positions: str = _part(
        "how the model encodes positions: learned embeddings, rotary, or not at all",
        default="learned",
        choices=("learned", "rotary", "none"),
    )
    rotary_base: float = _part(
        "base of the rotary frequencies",
        default=10_000.0,
        above=1,
        at_most=1e12,
        needs=(_ROTARY,),
    )
    rotary_factor: float | None = _part(
        "stretch rotary positions to a longer context: divide their frequencies by this number; "
        "default: 1",
        at_least=1,
        at_most=1e6,
        needs=(_ROTARY,),
    )
    rotary_context: int | None = _size(
        "original context, as in Llama 3.1: frequencies that rotate 4 times or more within it are "
        "not divided by `rotary_factor`; default: all are divided",
        needs=(("rotary_factor", _ANY),),
    )
    norm: str = _part(
        "norm before each part of a block: RMS norm, layer norm, or none",
        default="none",
        choices=("rms", "layer", "none"),
    )
    norm_epsilon: float = _part(
        "ε of the norms",
        default=1e-6,
        above=0,
        at_most=1,
        needs=(("norm", _ANY), ("query_key_norm", True)),
    )
    mlp: str = _part(
        "MLP after the attention of each block, also your own module, FILE.py:NAME",
        default="none",
        choices=("swiglu", "gelu", "relu2", "none"),
    )
    mlp_width: int | None = _size(
        "hidden units of the MLP; default: 8/3 of `embed_dim` for swiglu, else 4 times `embed_dim`",
        needs=(("mlp", _ANY),),
    )
    residual: bool = _part(
        "residual connections: each part adds its output to its input",
        default=False,
    )
    bias: bool = _part(
        "biases in projection, MLP and layer norm",
        default=False,
        needs=(("projection", True), ("mlp", _ANY), ("norm", "layer")),
    )
    head_bias: bool = _part("a bias in the LM head", default=False)
    tie_embeddings: bool = _part("use one matrix as token embedding and as LM head", default=False)
    dropout: float = _part(
        "dropout probability; it applies to the outputs of attention and MLP, or to the attention "
        "weights in models without residual connections",
        default=0.0,
        at_least=0,
        below=1,
        needs=(("residual", True), _SOFTMAX),
    )
    arguments: Settings = field(default_factory=dict, hash=False)
    """the values of own code's arguments, by name; attention, scores and mlp may be an OwnCode"""

    def __post_init__(self) -> None:
        if self.embed_dim is None:
            return
        if self.attention == "none" and self.mlp == "none":
            raise UsageError(
                "a block with `attention` none and `mlp` none does nothing",
                "use `attention` softmax, or an `mlp`",
            )
        if self.attention == "softmax":
            _check_heads(self, self.embed_dim)
        if self.positions == "rotary":
            _check_rotary(self)

    @property
    def name(self) -> str:
        """Return the names of the preset and of own parts, such as multi-head-Temperature."""
        return "-".join([self.model, *(code.name for code in self.codes.values())])

    @property
    def preset(self) -> str:
        return self.model

    @property
    def width(self) -> int:
        """Return embed_dim, C, or 0 for a bigram."""
        return self.embed_dim or 0

    @property
    def head_dim(self) -> int:
        """Return the width of one head, D: `head_size`, if set; else embed_dim for wide heads, and
        embed_dim / heads for others."""
        return self.head_size or self.width // (1 if self.wide_heads else self.heads)

    @property
    def num_kv_heads(self) -> int:
        """Return the number of key and value heads, K."""
        return self.kv_heads or self.heads

    @property
    def mlp_dim(self) -> int:
        """Return the number of hidden units of the MLP, F."""
        if self.mlp_width is not None or self.mlp == "none":
            return self.mlp_width or 0
        # SwiGLU has three matrices. With width 8/3 C, they are as large as two of width 4C.
        return -(-8 * self.width // 3 // 8) * 8 if self.mlp == "swiglu" else 4 * self.width

    @property
    def lm_head_inputs(self) -> int:
        """Return the width of the blocks' output, which the LM head reads."""
        joins = self.attention == "softmax" and not self.projection
        return self.heads * self.head_dim if joins else self.width

    @property
    def maps_per_layer(self) -> int:
        """Return the number of attention maps in one layer: 0 without attention."""
        return {"none": 0, "softmax": self.heads}.get(self.attention, 1)

    @property
    def codes(self) -> Mapping[str, OwnCode]:
        return {name: value for name, value in vars(self).items() if isinstance(value, OwnCode)}

    @property
    def has_attention(self) -> bool:
        return self.maps_per_layer > 0 or bool(self.codes)

    @property
    def has_matrices(self) -> bool:
        return bool(self.codes) or self.attention == "softmax" or self.mlp != "none"

    @property
    def slides(self) -> bool:
        is_rung = self.layers == 1 and self.positions != "rotary" and self.mlp == "none"
        return is_rung or bool(self.codes)

    @property
    def materializes_attention(self) -> bool:
        """Return True if training keeps all attention weights in memory, to apply dropout to them.

        Attention kernels do not keep them, but can't apply dropout.
        """
        return bool(self.dropout) and self.attention == "softmax" and not self.residual

    def settings(self) -> Settings:
        """Return the preset and the settings in effect, which together define this model."""
        values = {name: getattr(self, name) for name in fields_of(Architecture)}
        names = dict.fromkeys(
            ("model", *PRESETS[self.model].settings, *_settings_beside(self.codes))
        )
        used = {
            n: values[n]
            for n in names
            if values[n] is not None and missing_requirement(n, values) is None
        }
        return used | {PREFIX + name: value for name, value in self.arguments.items()}

    def build(self, vocab_size: int) -> Bigram | Transformer:
        from attnlm.model.language_model import Bigram, Transformer

        if self.embed_dim is None:
            return Bigram(self, vocab_size)
        return Transformer(self, vocab_size)

    def costs(self, vocab_size: int) -> Costs:
        if not self.codes:
            return compute_costs(self, vocab_size)
        from attnlm.model.own_modules import measured_costs

        return measured_costs(self, vocab_size)

    def parameter_shapes(self, vocab_size: int) -> Shapes:
        """Return the shape of each parameter by its name."""
        if not self.codes:
            return parameter_shapes(self, vocab_size)
        from attnlm.model.own_modules import built_shapes

        return built_shapes(self, vocab_size)


def _check_heads(a: Architecture, width: int) -> None:
    if a.head_size is None and not a.wide_heads and width % a.heads:
        narrowest = 2 if a.positions == "rotary" else 1
        step = narrowest * a.heads
        heads = _nearest(a.heads, [n for n in range(1, width + 1) if width % (n * narrowest) == 0])
        raise UsageError(
            f"`embed_dim` {width} is not divisible by `heads` {a.heads}",
            (f"use `heads` {heads}, or `embed_dim` " if heads else "use `embed_dim` ")
            + _nearest(width, range(step, width + step + 1, step)),
        )
    if a.heads % a.num_kv_heads:
        raise UsageError(
            f"`heads` {a.heads} is not divisible by `kv_heads` {a.kv_heads}",
            "use `kv_heads` "
            + _nearest(a.num_kv_heads, [n for n in range(1, a.heads + 1) if a.heads % n == 0]),
        )
    parts = {
        "a residual stream": a.residual,
        "an MLP": a.mlp != "none",
        "a second layer": a.layers > 1,
        "a shared embedding matrix": a.tie_embeddings,
        "a norm": a.norm != "none",
    }
    if a.lm_head_inputs != width and (part := next((p for p in parts if parts[p]), None)):
        raise UsageError(
            f"without a `projection`, {part} needs `heads` × `head_size` = `embed_dim`",
            "add a `projection`",
        )


def _nearest(number: int, possible: Sequence[int]) -> str:
    """Return the numbers just below and above `number` in the ascending `possible`: `4 or 8`."""
    above = bisect.bisect(possible, number)
    return " or ".join(map(str, possible[max(0, above - 1) : above + 1]))


def _check_rotary(a: Architecture) -> None:
    if a.attention != "softmax":
        raise UsageError(
            f"`positions` rotary needs queries and keys, and `attention` {a.attention} has none",
            "use `positions` learned or none",
        )
    if a.head_dim % 2:
        raise UsageError(
            f"`positions` rotary needs an even `head_size`, not {a.head_dim}",
            f"use `head_size` {a.head_dim + 1}",
        )


def missing_requirement(name: str, settings: Mapping[str, Any]) -> str | None:
    """Return what the setting `name` needs to have an effect, or None if it has an effect.

    A setting that has no effect itself does not serve another one.
    """
    described = fields_of(Architecture)
    needs = described[name].metadata.get("needs")

    def is_met(other: str, needed: Any) -> bool:
        value = settings.get(other, described[other].default)
        fits = value not in ("none", None) if needed is _ANY else value == needed
        fits |= needed is _OWN and isinstance(value, OwnCode)
        return fits and missing_requirement(other, settings) is None

    if not needs or any(is_met(other, value) for other, value in needs):
        return None
    return " or ".join(_needed_setting(other, value) for other, value in needs if value != _OWN)


def _needed_setting(name: str, value: Any) -> str:
    if value is _ANY:
        return f"{'an' if name == 'mlp' else 'a'} `{name}`"
    return f"`{name}`" if value is True else f"`{name}` {value}"


# --- Presets --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Preset:
    """A named set of parts, and the settings that a user may change in it, in the order of the
    fields of Architecture."""

    parts: Settings
    settings: tuple[str, ...]


_ALL_PARTS = tuple(name for name in settings_of(Architecture) if name not in ("model", "scores"))
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
    settings: Mapping[str, Setting], chosen: Container[str], arguments: Settings
) -> Architecture:
    """Return the architecture of a preset with some of its settings changed.

    Some may be own code, which has `arguments`. Those settings must apply that the user has
    `chosen`; others, a recipe's, are left out if they don't. Raises UsageError if the preset lacks
    a setting or a part to replace, if a setting has no effect, or if parts or sizes do not fit each
    other.
    """
    model = str(settings.get("model", fields_of(Architecture)["model"].default))
    preset = PRESETS[model]
    codes = {name: value for name, value in settings.items() if isinstance(value, OwnCode)}
    known = (*preset.settings, *_settings_beside(codes))
    must = [n for n in settings if n != "model" and (n in chosen or n in codes)]
    merged = preset.parts | {n: v for n, v in settings.items() if n in known or n in must}
    for kind in codes:
        if preset.parts.get(kind, fields_of(Architecture)[kind].default) == "none":
            raise UsageError(
                f"{model} has no {kind} that your own could replace", "use `model` transformer"
            )
    if "attention" in codes and merged.get("positions") == "rotary" and "positions" not in chosen:
        merged["positions"] = "learned"  # it has its own queries, which nothing rotates
    for name in must:
        if name not in known:
            users = [m for m in PRESETS if name in PRESETS[m].settings]
            raise UsageError(
                f"`{name}` does not apply to {model}", f"use `model` {' or '.join(users)}"
            )
        if needs := missing_requirement(name, merged):
            raise UsageError(f"`{name}` has no effect without {needs}", f"leave `{name}` out")
    used = {
        name: value for name, value in merged.items() if missing_requirement(name, merged) is None
    }
    return Architecture(model=model, arguments=arguments, **used)  # type: ignore[arg-type]


def _settings_beside(codes: Mapping[str, OwnCode]) -> tuple[str, ...]:
    """Return the settings that every preset has with these parts of the user's."""
    return (*codes, "positions") if codes else ()
