"""The rungs of the ladder: tokens (B, T) in, logits (B, T, V) out.

Axes as in attention.py; V is the size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from attnlm import kernels
from attnlm.attention import (
    DotProductAttention,
    LayerCache,
    RMSNorm,
    SelfAttention,
    UniformAttention,
    rotary_angles,
)
from attnlm.config import ModelConfig
from attnlm.errors import AttnlmError, NotFiniteError


class Bigram(nn.Module):
    """A table: its row for a token holds the logits of the next one."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.config, self.vocab_size = config, vocab_size
        self.table = nn.Embedding(
            vocab_size, vocab_size, _weight=torch.zeros(vocab_size, vocab_size)
        )

    def forward(self, tokens_BT: Tensor, caches: list[LayerCache] | None = None) -> Tensor:
        """(B, T) → (B, T, V)."""
        logits: Tensor = self.table(tokens_BT)
        return logits

    def new_caches(self) -> list[LayerCache]:
        """None: nothing but the last token counts."""
        return []


def _end(tokens_BT: Tensor, start: int, block_size: int) -> int:
    """The position after the last of these tokens, the first of which has position `start`.

    Raises AttnlmError where they are not of shape (B, T), or reach beyond the context.
    """
    if tokens_BT.dim() != 2:
        raise AttnlmError(
            f"the model takes tokens of shape (B, T), and these have {tuple(tokens_BT.shape)}",
            "for a single text, give tokens[None]",
        )
    end = start + tokens_BT.size(1)
    if end > block_size:
        raise AttnlmError(
            f"the text has {end} tokens, and the model sees {block_size} at a time (block_size)",
            f"give at most {block_size}, or train with a larger block_size",
        )
    return end


class AttentionModel(nn.Module):
    """Token embedding + learned positions → one attention layer → LM head."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        assert config.embed_dim is not None
        self.config, self.vocab_size = config, vocab_size
        self.token_embedding = nn.Embedding(vocab_size, config.embed_dim)
        self.position_embedding = nn.Embedding(config.block_size, config.embed_dim)
        self.body, width = _ATTENTION_BODIES[config.model](config)
        self.head = nn.Linear(width, vocab_size)
        # Equal logits to begin with: the first loss is ln V.
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens_BT: Tensor, caches: list[LayerCache] | None = None) -> Tensor:
        """(B, T) → (B, T, V). With caches, T counts the tokens that they do not hold yet."""
        cache = caches[0] if caches else None
        start = cache.length if cache else 0
        end = _end(tokens_BT, start, self.config.block_size)
        positions_TC = self.position_embedding.weight[start:end]
        x_BTC = self.token_embedding(tokens_BT) + positions_TC
        logits: Tensor = self.head(self.body(x_BTC, cache=cache))
        return logits

    def new_caches(self) -> list[LayerCache]:
        """Empty caches, for sampling."""
        return [LayerCache(self.config.block_size)]


def _multi_head(config: ModelConfig) -> tuple[nn.Module, int]:
    assert config.embed_dim is not None
    wide = config.model == "wide-head"
    projection = wide or bool(config.projection)
    body = SelfAttention(
        config.embed_dim,
        config.num_heads,
        config.head_dim,
        qkv_bias=bool(config.qkv_bias),
        projection=projection,
        dropout=config.dropout or 0.0,
    )
    return body, config.embed_dim if projection else config.num_heads * config.head_dim


_ATTENTION_BODIES: dict[str, Callable[[ModelConfig], tuple[nn.Module, int]]] = {
    "average": lambda config: (UniformAttention(), config.embed_dim or 0),
    "dot-product": lambda config: (DotProductAttention(), config.embed_dim or 0),
    "single-head": _multi_head,
    "multi-head": _multi_head,
    "wide-head": _multi_head,
}


class Transformer(nn.Module):
    """Pre-norm residual blocks with rotary positions; in its parts and equations, Qwen3.

    RMSNorm (Zhang and Sennrich, 2019), rotary positions (Su et al., 2021), normalised queries and
    keys, SwiGLU (Shazeer, 2020), no biases. Dropout falls on the embeddings and on what each block
    adds, not on attention weights: that leaves the fast attention kernels usable.
    """

    cosines: Tensor
    sines: Tensor

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        assert config.embed_dim is not None and config.layers is not None
        self.config, self.vocab_size = config, vocab_size
        self.token_embedding = nn.Embedding(vocab_size, config.embed_dim)
        # Small beside what the blocks add: measured, it learns faster so.
        nn.init.normal_(self.token_embedding.weight, std=0.3)
        self.dropout = nn.Dropout(config.dropout or 0.0)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.embed_dim)
        self.head = nn.Linear(config.embed_dim, vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.token_embedding.weight
            nn.init.normal_(self.head.weight, std=0.02)
        else:
            nn.init.zeros_(self.head.weight)
        cosines, sines = rotary_angles(config.block_size, config.head_dim)
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)

    def forward(self, tokens_BT: Tensor, caches: list[LayerCache] | None = None) -> Tensor:
        """(B, T) → (B, T, V). With caches, T counts the tokens that they do not hold yet."""
        start = caches[0].length if caches else 0
        end = _end(tokens_BT, start, self.config.block_size)
        rotation = self.cosines[start:end], self.sines[start:end]
        x_BTC = self.dropout(self.token_embedding(tokens_BT))
        for layer, block in enumerate(self.blocks):
            x_BTC = block(x_BTC, rotation, caches[layer] if caches else None)
        logits: Tensor = self.head(self.norm(x_BTC))
        return logits

    def new_caches(self) -> list[LayerCache]:
        """Empty caches, one per block, for sampling."""
        return [LayerCache(self.config.block_size) for _ in self.blocks]


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.embed_dim is not None
        self.attention_norm = RMSNorm(config.embed_dim)
        self.attention = SelfAttention(
            config.embed_dim,
            config.num_heads,
            config.head_dim,
            projection=True,
            projection_bias=False,
            rotary=True,
        )
        self.mlp_norm = RMSNorm(config.embed_dim)
        self.mlp = SwiGLU(config.embed_dim)
        self.dropout = nn.Dropout(config.dropout or 0.0)
        assert self.attention.projection is not None
        # A block adds nothing to begin with (Zhang et al., 2019, "Fixup").
        nn.init.zeros_(self.attention.projection.weight)

    def forward(
        self, x_BTC: Tensor, rotation: tuple[Tensor, Tensor], cache: LayerCache | None = None
    ) -> Tensor:
        """(B, T, C) → (B, T, C)."""
        x_BTC = x_BTC + self.dropout(self.attention(self.attention_norm(x_BTC), rotation, cache))
        mixed: Tensor = x_BTC + self.dropout(self.mlp(self.mlp_norm(x_BTC)))
        return mixed


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)) (Shazeer, 2020), 8C² parameters like a plain MLP of width 4C."""

    def __init__(self, embed_dim: int) -> None:
        super().__init__()
        hidden = -(-8 * embed_dim // 3 // 8) * 8
        self.gate_up = nn.Parameter(torch.empty(2, hidden, embed_dim))
        self.down = nn.Linear(hidden, embed_dim, bias=False)
        nn.init.normal_(self.gate_up, std=embed_dim**-0.5)
        nn.init.zeros_(self.down.weight)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """(B, T, C) → (B, T, C)."""
        gate_up = F.linear(x_BTC, self.gate_up.flatten(0, 1))
        down: Tensor = self.down(swiglu(gate_up))
        return down


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) · up, with both in one tensor, (..., 2F) → (..., F)."""
    if kernels.suits(gate_up):
        return kernels.swiglu(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


LanguageModel = Bigram | AttentionModel | Transformer

_MODELS: dict[str, Callable[[ModelConfig, int], LanguageModel]] = {
    "bigram": Bigram,
    "average": AttentionModel,
    "dot-product": AttentionModel,
    "single-head": AttentionModel,
    "multi-head": AttentionModel,
    "wide-head": AttentionModel,
    "transformer": Transformer,
}


def build_model(config: ModelConfig, vocab_size: int) -> LanguageModel:
    """The rung that `config.model` names, initialised from torch's global random state."""
    return _MODELS[config.model](config, vocab_size)


def model_skeleton(config: ModelConfig, vocab_size: int) -> LanguageModel:
    """The model without memory and numbers: names and shapes, on torch's meta device."""
    with torch.device("meta"), _WithoutInitialisation():
        return build_model(config, vocab_size)


class _WithoutInitialisation(TorchFunctionMode):
    """Skips torch.nn.init: for a meta tensor it would import torch's compiler, 1.5 seconds long."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def cross_entropy(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean loss in nats per token, computed in float32 at least."""
    if logits_BTV.dtype in (torch.bfloat16, torch.float16):
        logits_BTV = logits_BTV.float()
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def check_finite(*tensors: Tensor) -> None:
    """Raises NotFiniteError where a model's weights, or what they compute, are NaN or infinite."""
    if not all(bool(tensor.isfinite().all()) for tensor in tensors):
        raise NotFiniteError


def count_parameters(model: nn.Module) -> int:
    """Trained numbers; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())
