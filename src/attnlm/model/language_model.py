"""The models: tokens (B, T) in, logits (B, T, V) out.

An Architecture says which parts a model has. This file puts the parts together and can be read
from top to bottom. Axes are as in layers.py; V is the vocabulary size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from attnlm.base.errors import AttnlmError
from attnlm.model.layers import (
    MLP,
    Dropout,
    LayerCache,
    ParameterFreeAttention,
    Rotation,
    SelfAttention,
    build_norm,
    rotation_of,
)
from attnlm.model.loss import cross_entropy, linear_cross_entropy
from attnlm.model.own_parts import own_part

if TYPE_CHECKING:
    from attnlm.model.architecture import Architecture
    from attnlm.model.spec import ModelSpec

Caches = list[LayerCache] | None
"""One cache for each block; an empty list is filled by the first forward pass."""


class LanguageModel(nn.Module):
    """A model of the next token. `spec` describes it; ids are smaller than `vocab_size`.

    A call returns logits, (B, T) → (B, T, V). With caches, it takes only tokens that they lack.
    """

    spec: ModelSpec
    vocab_size: int

    @property
    def block_size(self) -> int:
        """Return the context: the most tokens that the model sees."""
        return self.spec.block_size

    def is_matrix(self, name: str, parameter: Tensor) -> bool:
        """Return True for a matrix inside the blocks, which Muon may update."""
        return parameter.ndim == 2 and name.startswith("blocks.")

    def next_logits(self, tokens_BT: Tensor, caches: Caches = None) -> Tensor:
        """Return the logits of the token after the last one, (B, T) → (B, V)."""
        logits: Tensor = self(tokens_BT, caches)
        return logits[:, -1]

    def loss(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the mean loss in nats per token; targets below 0 are ignored."""
        return cross_entropy(self(inputs_BT), targets_BT)


class Bigram(LanguageModel):
    """A table: the row of a token holds the logits of the next token."""

    def __init__(self, architecture: Architecture, vocab_size: int) -> None:
        super().__init__()
        self.spec = self.architecture = architecture
        self.vocab_size = vocab_size
        self.table = nn.Embedding(
            vocab_size, vocab_size, _weight=torch.zeros(vocab_size, vocab_size)
        )

    def forward(self, tokens_BT: Tensor, caches: Caches = None) -> Tensor:
        logits: Tensor = self.table(tokens_BT)
        return logits

    def next_logits(self, tokens_BT: Tensor, caches: Caches = None) -> Tensor:
        return super().next_logits(tokens_BT[:, -1:])


class Transformer(LanguageModel):
    """Embeddings → blocks of attention and MLP → LM head, with the parts of an Architecture.

    One block without norm, residual stream and MLP makes a one-layer rung of the ladder.
    """

    cosines: Tensor
    sines: Tensor

    def __init__(self, architecture: Architecture, vocab_size: int) -> None:
        super().__init__()
        self.spec = self.architecture = a = architecture
        self.vocab_size = vocab_size
        self.token_embedding = nn.Embedding(vocab_size, a.width)
        # In measurements, models learned faster with embeddings smaller than the blocks' outputs.
        std = (0.02 if a.tie_embeddings else 0.3) if a.residual else 1.0
        if std != 1:
            nn.init.normal_(self.token_embedding.weight, std=std)
        self.position_embedding = None
        if a.positions == "learned":
            self.position_embedding = nn.Embedding(a.block_size, a.width)
            nn.init.normal_(self.position_embedding.weight, std=std if a.residual else 0.5)
        self.dropout = Dropout(a.dropout if a.residual else 0.0)
        self.blocks = nn.ModuleList(Block(a, layer) for layer in range(a.layers))
        self.norm = build_norm(a, a.lm_head_inputs)
        self.head = nn.Linear(a.lm_head_inputs, vocab_size, bias=a.head_bias)
        # An LM head of zeros makes equal logits: the initial loss is ln V.
        if a.tie_embeddings:
            self.head.weight = self.token_embedding.weight
        else:
            nn.init.zeros_(self.head.weight)
        if a.head_bias:
            nn.init.zeros_(self.head.bias)
        if a.positions == "rotary":
            cosines, sines = rotation_of(a)
            self.register_buffer("cosines", cosines, persistent=False)
            self.register_buffer("sines", sines, persistent=False)

    def forward(self, tokens_BT: Tensor, caches: Caches = None) -> Tensor:
        """Return logits, (B, T) → (B, T, V). With caches, pass only tokens that they lack."""
        return self.read_out(self._body(tokens_BT, caches))

    def next_logits(self, tokens_BT: Tensor, caches: Caches = None) -> Tensor:
        """Return only the logits of the token after the last one, (B, T) → (B, V)."""
        return self.read_out(self._body(tokens_BT, caches)[:, -1])

    def read_out(self, x_BTC: Tensor) -> Tensor:
        """Apply the last norm and the LM head to the blocks' output: (B, T, C) → (B, T, V)."""
        logits: Tensor = self.head(x_BTC if self.norm is None else self.norm(x_BTC))
        return logits

    def loss(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x_BTC = self._body(inputs_BT)
        x_BTC = x_BTC if self.norm is None else self.norm(x_BTC)
        return linear_cross_entropy(x_BTC, self.head.weight, self.head.bias, targets_BT)

    def _body(self, tokens_BT: Tensor, caches: Caches = None) -> Tensor:
        if tokens_BT.dim() != 2:
            raise AttnlmError(
                f"the tokens must have the shape (B, T), not {tuple(tokens_BT.shape)}",
                "for a single text, pass tokens[None]",
            )
        block_size = self.architecture.block_size
        if caches is not None and not caches:
            caches += [LayerCache(block_size) for _ in self.blocks]
        start = caches[0].length if caches else 0
        end = start + tokens_BT.size(1)
        if end > block_size:
            raise AttnlmError(
                f"the text has {end} tokens, more than the context of the model, {block_size}",
                f"pass at most {block_size} tokens, or train with a larger `block_size`",
            )
        x_BTC: Tensor = self.token_embedding(tokens_BT)
        if self.position_embedding is not None:
            places_T = torch.arange(start, end, device=tokens_BT.device)
            x_BTC = x_BTC + self.position_embedding(places_T)
        x_BTC = self.dropout(x_BTC)
        rotation = None
        if self.architecture.positions == "rotary":
            rotation = self.cosines[start:end], self.sines[start:end]
        for layer, block in enumerate(self.blocks):
            x_BTC = block(x_BTC, rotation, caches[layer] if caches else None)
        return x_BTC


class Block(nn.Module):
    """One block: x + attention(norm(x)), then x + mlp(norm(x)).

    The residual connections (`x +`), the norms, attention and MLP are optional.
    """

    def __init__(self, a: Architecture, layer: int = 0) -> None:
        super().__init__()
        self.residual = a.residual
        self.attention: nn.Module | None = None
        made = {kind: own_part(a, kind, layer) for kind in a.codes}
        if "attention" in made:
            self.attention = made["attention"]
        elif a.attention == "softmax":
            self.attention = SelfAttention(a)
            self.attention.scores = made.get("scores")
        elif a.attention != "none":
            self.attention = ParameterFreeAttention(uniform=a.attention == "uniform")
        self.attention_norm = build_norm(a, a.width) if self.attention is not None else None
        self.mlp = made.get("mlp") or (MLP(a) if a.mlp != "none" else None)
        self.mlp_norm = build_norm(a, a.width) if self.mlp is not None else None
        self.dropout = Dropout(a.dropout if a.residual else 0.0)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Map (B, T, C) → (B, T, C), or (B, T, H·D) in a one-layer rung without a projection."""
        if self.attention is not None:
            read = self.attention_norm(x) if self.attention_norm is not None else x
            attended = self.attention(read, rotation, cache)
            x = x + self.dropout(attended) if self.residual else attended
        elif cache is not None:
            cache.length += x.size(1)  # no keys are kept, but positions count
        if self.mlp is not None:
            read = self.mlp_norm(x) if self.mlp_norm is not None else x
            hidden = self.mlp(read)
            x = x + self.dropout(hidden) if self.residual else hidden
        return x


def without_gradients(model: object) -> contextlib.AbstractContextManager[object]:
    """Return a context in which a model is called and not trained.

    Own code may keep a tensor that it makes there, such as a mask, and use it in training, which
    PyTorch refuses for tensors of its inference mode.
    """
    spec: ModelSpec | None = getattr(model, "spec", None)
    is_ours = spec is not None and not spec.codes
    return torch.inference_mode() if is_ours else torch.no_grad()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode. On exit, restore the mode of each module."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(before[0][1])  # own code may do more in `train` than set the mode
        for module, was_training in before:
            module.training = was_training
