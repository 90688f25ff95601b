"""The attention maps and activations of one forward pass.

The model is observed from outside. A TorchFunctionMode sees each call of softmax and of
`scaled_dot_product_attention` in the model's own code, and forward hooks see the inputs and outputs
of the modules of each block. A class from outside needs no code for it. Calls inside of functions
of PyTorch, as in nn.MultiheadAttention, are not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from attnlm.base.errors import AttnlmError
from attnlm.compute.threads import flush_subnormals
from attnlm.model.language_model import Block, LanguageModel, Transformer, without_gradients
from attnlm.model.layers import shared_heads
from attnlm.model.spec import ModelSpec, is_ours

Head = tuple[int, int]
"""The position of a head: its layer and its number in the layer, both from 0."""


class Site(NamedTuple):
    """The place of an activation in a model."""

    kind: str
    """Of a block, (B, T, C): attention, mlp, and stream (the output of the block). Of heads: maps,
    (B, H, T, T), and heads (maps · values), (B, H, T, E)."""
    layer: int
    """from 0; −1 for the embedding, whose kind is stream"""
    first_head: int = 0
    """the number of the first head in the tensor"""


See = Callable[[Site, Tensor], Tensor]
"""Receives each activation, and returns what the model uses in its place."""


def silence(silenced: Head | None) -> See:
    """Return a See that sets the output of a head to zero; None changes nothing."""

    def see(site: Site, x: Tensor) -> Tensor:
        if silenced is not None and site.kind == "maps":
            layer, head = silenced[0], silenced[1] - site.first_head
            if layer == site.layer and 0 <= head < x.size(1):
                x = x.clone()
                x[:, head] = 0
        return x

    return see


def record(
    model: nn.Module,
    tokens_BT: Tensor,
    see: See | None = None,
    compute: Callable[[Tensor], Tensor] | None = None,
) -> Recorder:
    """Record one forward pass over at most block_size tokens, (B, T).

    `see` receives the activations; by default, the maps are kept, which takes gigabytes for many
    heads and a long text. `compute` is a method of the model that returns the logits (default: the
    model itself).
    """
    recorder = Recorder(model, len(tokens_BT), see)
    flush_subnormals()
    with without_gradients(model), ExitStack() as hooks, recorder:
        for module in model.modules():
            hooks.callback(module.register_forward_pre_hook(recorder.enter).remove)
            hooks.callback(module.register_forward_hook(recorder.leave).remove)
        recorder.logits = (compute or model)(tokens_BT)
    return recorder


class Recorder(TorchFunctionMode):
    """The record of one forward pass of a model over some texts; `record` makes it."""

    logits: Tensor
    """the output of the model, (B, T, V), or of its method"""

    def __init__(self, model: nn.Module, texts: int, see: See | None) -> None:
        super().__init__()
        self._maps: list[Tensor] = []
        self.heads: list[int] = []
        """the number of attention maps in each layer: in each block or, in a whole model of the
        user's, of maps that are computed from the same tensor"""
        self._see = see or self._keep
        self._texts = texts
        self._kinds: dict[nn.Module | None, str] = {}  # of the outputs of blocks and their modules
        if isinstance(model, Transformer):
            self._kinds[model.dropout] = "stream"
            for block in model.blocks:
                assert isinstance(block, Block)
                self._kinds |= {block: "stream", block.attention: "attention", block.mlp: "mlp"}
        self._running: list[Tensor | None] = []  # inputs of the running modules, innermost last
        self._read: Tensor | None = None  # by the last map
        self._map: tuple[Tensor, Site, torch.Size] | None = None
        """the last map, as the model has it, its Site, and its shape by heads"""

    def _keep(self, site: Site, x: Tensor) -> Tensor:
        if site.kind == "maps":
            self._maps.append(x)
        return x

    def enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Keep the input of a module while the module runs."""
        x = inputs[0] if inputs and isinstance(inputs[0], Tensor) else None
        # A module that reads ids is the whole model, whose maps follow each other.
        self._running.append(x if x is not None and x.is_floating_point() else None)
        if isinstance(module, Block):
            self.heads.append(0)

    def leave(self, module: nn.Module, inputs: object, output: Tensor) -> Tensor | None:
        """Return what the model uses as the output of a module; None for the output."""
        self._running.pop()
        kind = self._kinds.get(module)
        return None if kind is None else self._see(Site(kind, len(self.heads) - 1), output)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        left = args[0] if args else kwargs.get("input", kwargs.get("query"))
        if func is F.scaled_dot_product_attention and left.dim() in (3, 4):
            return self._attention(*args, **kwargs)
        result = func(*args, **kwargs)
        if func in _SOFTMAX:
            return self._used_map(result)
        return self._used_product(left, result) if func in _PRODUCTS else result

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Compute what `scaled_dot_product_attention` does, without dropout."""
        key, value = shared_heads(query.size(-3), key, value)
        scores = query @ key.mT * (query.size(-1) ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
        if attn_mask is not None:
            is_bool = attn_mask.dtype == torch.bool
            scores = scores.where(attn_mask, -torch.inf) if is_bool else scores + attn_mask
        map_BHTT = self._used_map(torch.softmax(scores, -1))
        return self._used_product(map_BHTT, map_BHTT @ value)

    def _used_map(self, softmax: Tensor) -> Tensor:
        """Return what the model uses as the result of a softmax, which may be an attention map.

        A map is (B, H, T, T), (B, T, T) of a single head, (B·H, T, T), or, if it does not depend on
        the text, (H, T, T). If B divides the H of the latter, only a single text tells which it is:
        see `texts_at_once`.
        """
        is_square = softmax.dim() in (3, 4) and softmax.size(-1) == softmax.size(-2)
        if not is_square or softmax.triu(1).any():
            return softmax
        map_BHTT = softmax
        if softmax.dim() == 3:
            is_own = softmax.size(0) % self._texts == 0
            shape = (self._texts, -1) if is_own else (1, len(softmax))
            map_BHTT = softmax.unflatten(0, shape).expand(self._texts, -1, -1, -1)
        read = self._running[-1] if self._running else None
        if not self._kinds and not (self.heads and self._read is read is not None):
            self.heads.append(0)
            self._read = read
        site = Site("maps", len(self.heads) - 1, self.heads[-1])
        self.heads[-1] += map_BHTT.size(1)
        map_BHTT = self._see(site, map_BHTT)
        is_shared = map_BHTT.numel() != softmax.numel()
        result = map_BHTT[0] if is_shared else map_BHTT.view_as(softmax)
        self._map = result, site, map_BHTT.shape[:3]
        return result

    def _used_product(self, left: object, mixed: Tensor) -> Tensor:
        """Return what the model uses as a product of `left`, which may be the last map.

        The first product of a map is the mixture of the values.
        """
        if self._map is None or left is not self._map[0]:
            return mixed
        (_, site, shape), self._map = self._map, None
        shape = mixed.shape[:3] if mixed.dim() == 4 else shape
        seen = self._see(site._replace(kind="heads"), mixed.reshape(*shape, -1))
        return seen.view_as(mixed)

    def check_maps(self) -> None:
        """Raise NotRecordedError unless all layers have equally many attention maps, and some."""
        if len({*self.heads}) != 1 or 0 in self.heads:
            raise NotRecordedError

    @property
    def maps(self) -> Tensor:
        """Return every head's attention weights, (L, B, H, T, T). Raises as `check_maps` does."""
        self.check_maps()
        maps_BLHTT: Tensor = torch.cat(self._maps, 1).unflatten(1, (len(self.heads), -1))
        return maps_BLHTT.transpose(0, 1)


_SOFTMAX = {torch.softmax, F.softmax, Tensor.softmax}
_PRODUCTS = {torch.matmul, Tensor.matmul, torch.bmm, Tensor.bmm}


class NotRecordedError(AttnlmError):
    """Raised when no attention maps were observed in a model, or not in every layer."""

    def __init__(self) -> None:
        super().__init__(
            "no attention weights were found in this model, so there are no maps",
            "compute them by softmax or scaled_dot_product_attention over all tokens of the text",
        )


def require_attention(spec: ModelSpec) -> None:
    """Raise AttnlmError for a model without attention."""
    if not spec.has_attention:
        raise AttnlmError(
            "this model has no attention, so there are no maps",
            "use another model, such as single-head",
        )


def texts_at_once(model: LanguageModel, length: int, most_tokens: int) -> int:
    """Return how many texts of `length` tokens can be recorded together.

    Own code may have the same attention maps for all texts, which only a single text shows.
    """
    return max(1, most_tokens // length) if is_ours(model.spec) else 1
