"""The parts and sizes of a model, and presets, which are named sets of parts."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from attnlm.base.errors import UsageError
from attnlm.base.settings import Setting, Settings, setting

MODELS = (
    *("bigram", "average", "dot-product", "single-head", "multi-head", "wide-head", "transformer"),
    *("gpt2", "llama", "qwen3"),
)
RUNGS = MODELS[:7]
"""The rungs of the ladder: each adds one idea to the rung before. The other MODELS are small
versions of models that others published."""

_LARGEST = 2**20
_LARGEST_ROTARY_TABLE = 2**24  # numbers
_WIDEST_HEADS = 2**24  # features of all heads of a layer: a matrix's size in bytes fits 64 bits


def _size(help: str, default: int | None = None) -> Any:
    """Return a setting for a number of features, heads or tokens."""
    return setting(help, default=default, at_least=1, at_most=_LARGEST)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The parts of one model. The defaults of its fields make a one-layer rung.

    Raises UsageError if parts or sizes do not fit each other.
    """

    model: str = setting(
        "a rung of the ladder, or a small version of a published model",
        default="multi-head",
        choices=MODELS,
    )
    embed_dim: int | None = _size("width of the embeddings")
    layers: int = setting("number of blocks", default=1, at_least=1, at_most=4096)
    block_size: int = _size("context: the number of tokens that the model sees", default=64)
    attention: str = setting(
        "attention weights: softmax (of queries and keys), uniform (over the past), parameter-free "
        "(softmax of the embeddings), or none",
        default="softmax",
        choices=("softmax", "uniform", "parameter-free", "none"),
    )
    heads: int = _size("attention heads per layer", default=1)
    kv_heads: int | None = _size(
        "key/value heads, each shared by a group of query heads; default: as many as `heads`"
    )
    head_size: int | None = _size("width of one head; default: `embed_dim` / `heads`")
    wide_heads: bool = setting("heads as wide as the embeddings", default=False)
    query_key_norm: bool = setting("RMS norm of each head's queries and keys", default=False)
    qkv_bias: bool = setting("biases in the query, key and value projections", default=False)
    projection: bool = setting("a projection of the concatenated heads", default=False)
    positions: str = setting(
        "how the model encodes positions: learned embeddings, rotary, or not at all",
        default="learned",
        choices=("learned", "rotary", "none"),
    )
    rotary_base: float = setting(
        "base of the rotary frequencies", default=10_000.0, above=1, at_most=1e12
    )
    rotary_factor: float | None = setting(
        "stretch rotary positions to a longer context: divide their frequencies by this number; "
        "default: 1",
        at_least=1,
        at_most=1e6,
    )
    rotary_context: int | None = _size(
        "original context, as in Llama 3.1: frequencies that rotate 4 times or more within it are "
        "not divided by `rotary_factor`; default: all are divided"
    )
    norm: str = setting(
        "norm before each part of a block: RMS norm, layer norm, or none",
        default="none",
        choices=("rms", "layer", "none"),
    )
    norm_epsilon: float = setting("ε of the norms", default=1e-6, above=0, at_most=1)
    mlp: str = setting(
        "MLP after the attention of each block",
        default="none",
        choices=("swiglu", "gelu", "relu2", "none"),
    )
    mlp_width: int | None = _size(
        "hidden units of the MLP; default: 8/3 of `embed_dim` for swiglu, else 4 times `embed_dim`"
    )
    residual: bool = setting(
        "residual connections: each part adds its output to its input", default=False
    )
    bias: bool = setting("biases in projection, MLP and layer norm", default=False)
    head_bias: bool = setting("a bias in the LM head", default=False)
    tie_embeddings: bool = setting(
        "use one matrix as token embedding and as LM head", default=False
    )
    dropout: float = setting(
        "dropout probability; it applies to the outputs of attention and MLP, or to the attention "
        "weights in models without residual connections",
        default=0.0,
        at_least=0,
        below=1,
    )

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
        """Return the name of the preset."""
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
    def body_dim(self) -> int:
        """Return the width of the blocks' output, which the LM head reads."""
        joins = self.attention == "softmax" and not self.projection
        return self.heads * self.head_dim if joins else self.width

    @property
    def maps_per_layer(self) -> int:
        """Return the number of attention maps in one layer: 0 without attention."""
        return {"none": 0, "softmax": self.heads}.get(self.attention, 1)

    @property
    def slides(self) -> bool:
        """Return True if a full context slides by one token when a token is added.

        Sliding is exact for one layer only. With several layers, rotary positions or an MLP, the
        model keeps the newer half of a full context and computes it again.
        """
        return self.layers == 1 and self.positions != "rotary" and self.mlp == "none"

    @property
    def materializes_attention(self) -> bool:
        """Return True if training keeps all attention weights in memory, for dropout of weights.

        Attention kernels do not keep the weights, but can't apply dropout.
        """
        return bool(self.dropout) and self.attention == "softmax" and not self.residual

    def settings(self) -> Settings:
        """Return the preset and the settings in effect, which together define this model."""
        values = {name: getattr(self, name) for name in ("model", *PRESETS[self.model].settings)}
        return {k: v for k, v in values.items() if v is not None and unused(k, values) is None}


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
    if a.heads * a.head_dim > _WIDEST_HEADS:
        raise UsageError(
            f"{a.heads} `heads` of width {a.head_dim} are too wide together",
            f"use `heads` {max(1, _WIDEST_HEADS // a.head_dim)} or fewer",
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
    if a.body_dim != width and (part := next((p for p in parts if parts[p]), None)):
        raise UsageError(
            f"without a `projection`, {part} needs `heads` × `head_size` = `embed_dim`",
            "add a `projection`",
        )


def _nearest(wanted: int, possible: Sequence[int]) -> str:
    """Return the numbers just below and above `wanted` in the ascending `possible`: `4 or 8`."""
    above = bisect.bisect(possible, wanted)
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
    if a.block_size * a.head_dim > _LARGEST_ROTARY_TABLE:
        raise UsageError(
            f"the table of rotary positions for `block_size` {a.block_size} and heads of width "
            f"{a.head_dim} is too large",
            f"use `block_size` {max(1, _LARGEST_ROTARY_TABLE // a.head_dim)} or less",
        )


def unused(name: str, settings: Mapping[str, Any]) -> str | None:
    """Return what the setting `name` needs to have an effect, or None if it has an effect."""
    s = {f.name: settings.get(f.name, f.default) for f in fields(Architecture)}
    softmax, rotary = s["attention"] == "softmax", s["positions"] == "rotary"
    norm, mlp = s["norm"] != "none", s["mlp"] != "none"
    of_heads = ("heads", "kv_heads", "head_size", "query_key_norm", "qkv_bias", "projection")
    needs = {
        **dict.fromkeys(of_heads, ("`attention` softmax", softmax)),
        **dict.fromkeys(("rotary_base", "rotary_factor"), ("`positions` rotary", rotary)),
        "rotary_context": ("a `rotary_factor`", rotary and s["rotary_factor"] is not None),
        "norm_epsilon": ("a `norm`", norm or (softmax and s["query_key_norm"])),
        "mlp_width": ("an `mlp`", mlp),
        "bias": (
            "a `projection`, an `mlp` or `norm` layer",
            mlp or s["norm"] == "layer" or (softmax and s["projection"]),
        ),
        "dropout": ("`residual`, or `attention` softmax", s["residual"] or softmax),
    }
    needed, is_there = needs.get(name, ("", True))
    return None if is_there else needed


@dataclass(frozen=True)
class Preset:
    """A named set of parts, and the settings that a user may change in it, in the order of the
    fields of Architecture."""

    parts: Settings
    settings: tuple[str, ...]


_ALL_PARTS = tuple(f.name for f in fields(Architecture) if f.name not in ("model", "wide_heads"))
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


def architecture(model: str, settings: Mapping[str, Setting]) -> Architecture:
    """Return the architecture of a preset with some of its settings changed.

    Raises UsageError if the preset lacks a setting, if a setting has no effect, or if parts or
    sizes do not fit each other.
    """
    preset = PRESETS[model]
    for name in settings:
        if name not in preset.settings:
            users = [m for m in PRESETS if name in PRESETS[m].settings]
            raise UsageError(
                f"`{name}` does not apply to {model}", f"use `model` {' or '.join(users)}"
            )
    merged = {**preset.parts, **settings}
    for name in settings:
        if needs := unused(name, merged):
            raise UsageError(f"`{name}` has no effect without {needs}", f"leave `{name}` out")
    used = {name: value for name, value in merged.items() if unused(name, merged) is None}
    return Architecture(model=model, **used)  # type: ignore[arg-type]
