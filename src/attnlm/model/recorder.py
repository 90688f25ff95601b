"""A record of one forward pass: the attention maps and the activations of each block.

The model is observed from outside. A TorchFunctionMode sees each call of softmax and of
`scaled_dot_product_attention` in the model's own code, and forward hooks see the inputs and outputs
of the modules of each block. A class from outside needs no code for it. Calls inside of functions
of PyTorch, as in nn.MultiheadAttention, are not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from attnlm.base.errors import AttnlmError
from attnlm.compute.threads import flush_subnormals
from attnlm.model.attention import shared_heads
from attnlm.model.language_model import Block, LanguageModel, Transformer, without_gradients
from attnlm.model.spec import is_ours

Head = tuple[int, int]
"""The position of a head: its layer and its number in the layer, both from 0."""


class Site(NamedTuple):
    """The place of an activation in a model."""

    kind: str
    """stream, attended, mlp or mixed"""
    layer: int
    """from 0; −1 for the embedding"""
    first_head: int | None = None
    """for mixed: the number of the first head in the tensor"""


@dataclass(frozen=True)
class Heads:
    """The heads of one layer. Queries are (B, H, T, D); keys and values are repeated to H heads."""

    query: Tensor
    key: Tensor
    value: Tensor
    scores: Tensor
    """before the mask, (B, H, T, S)"""
    mixed: Tensor
    """maps · v, (B, H, T, E)"""


@dataclass
class Layer:
    """The inputs and outputs of one block, (B, T, C); None for parts that the block lacks."""

    read: Tensor | None = None
    """the input of the attention, after the norm"""
    softmaxes: list[Tensor] = field(default_factory=list)
    """attention weights, (B, H, T, S), one tensor for each call of softmax or of fused attention"""
    heads: Heads | None = None
    """None if the block computes its attention otherwise than by `scaled_dot_product_attention`"""
    attended: Tensor | None = None
    """the heads' outputs, concatenated, after the projection if the model has one"""
    mlp: Tensor | None = None
    """the output of the MLP"""
    stream: Tensor | None = None
    """the output of the block"""
    head_count: int = 0

    @property
    def maps(self) -> Tensor:
        """Return the attention weights of all heads, (B, H, T, S)."""
        return self.softmaxes[0] if len(self.softmaxes) == 1 else torch.cat(self.softmaxes, 1)


@dataclass
class Recorder:
    """The record of one forward pass. The output of the head `silenced`, if any, is set to zero.

    If `watch` is set, maps and heads are not recorded. Instead, `watch` receives each layer's
    attention weights, (B, H, T, S), in the order of the layers. For many heads and a long text, a
    record of all maps and scores takes gigabytes.
    """

    silenced: Head | None = None
    watch: Callable[[Tensor], None] | None = None
    edit: Callable[[Site, Tensor], Tensor] | None = None
    """receives each activation of a Site, and returns what the model uses in its place: (B, T, C),
    or (B, H, T, E) for the heads' mixed outputs, before the projection. Mixed outputs are observed
    in `scaled_dot_product_attention`, and where a softmax is multiplied by values."""
    embedded: Tensor | None = None
    """token embeddings plus position embeddings, if any, (B, T, C); None for a bigram"""
    layers: list[Layer] = field(default_factory=list)
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    """the output of the model, (B, T, V)"""
    has_blocks: bool = False
    """True if the layers are the model's blocks; otherwise, the heads that read the same tensor are
    a layer"""
    texts: int = 1
    """the number of texts, B"""
    reading: list[Any] = field(default_factory=list)
    """the inputs of the modules that are running, the innermost last"""
    _softmax: tuple[Tensor, Site, torch.Size] | None = None
    """the last map of a softmax, as the model has it, its heads' Site, and its shape by heads"""

    def record_attention(
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
        """Compute what `scaled_dot_product_attention` does, without dropout, and record it.

        Arguments are (B, H, T, D), or (B, T, D) of a single head.
        """
        if query.dim() == 3:
            mask = attn_mask if attn_mask is None or attn_mask.dim() < 3 else attn_mask[:, None]
            heads = query[:, None], key[:, None], value[:, None]
            return self.record_attention(*heads, mask, 0.0, is_causal, scale).squeeze(1)
        key, value = shared_heads(query.size(-3), key, value)
        scores = query @ key.mT * (query.size(-1) ** -0.5 if scale is None else scale)
        masked = scores
        if is_causal:
            attn_mask = torch.ones_like(scores[0, 0], dtype=torch.bool).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            masked = scores.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            masked = scores + attn_mask
        layer, place, map_BHTS = self._add_map(torch.softmax(masked, -1))
        mixed = self.edit_activation(place, map_BHTS @ value)
        if self.watch is None:
            layer.heads = Heads(query, key, value, scores, mixed)
        return mixed

    def record_softmax(self, softmax: Tensor) -> Tensor:
        """Record the result of a softmax if it is an attention map.

        A map is (B, H, T, T), (B, T, T) of a single head, (B·H, T, T), or, if it does not depend on
        the text, (H, T, T). If B divides the H of the latter, only a single text tells which it is:
        see `texts_at_once`.
        """
        is_square = softmax.dim() in (3, 4) and softmax.size(-1) == softmax.size(-2)
        if not is_square or softmax.triu(1).any():
            return softmax
        map_BHTT = softmax
        if softmax.dim() == 3 and softmax.size(0) % self.texts == 0:
            map_BHTT = softmax.unflatten(0, (self.texts, -1))
        elif softmax.dim() == 3:
            map_BHTT = softmax.expand(self.texts, *softmax.shape)
        _, place, map_BHTT = self._add_map(map_BHTT)
        is_shared = map_BHTT.numel() != softmax.numel()
        result = map_BHTT[0] if is_shared else map_BHTT.view_as(softmax)
        self._softmax = result, place, map_BHTT.shape[:3]
        return result

    def edit_product(self, left: object, mixed: Tensor) -> Tensor:
        """Edit a product of `left` and values, if `left` is the last map of a softmax."""
        if self._softmax is None or left is not self._softmax[0]:
            return mixed
        _, place, shape = self._softmax
        shape = mixed.shape[:3] if mixed.dim() == 4 else shape
        return self.edit_activation(place, mixed.reshape(*shape, -1)).view_as(mixed)

    def edit_activation(self, place: Site, values: Tensor) -> Tensor:
        """Return what the model uses as the activation of a place."""
        return values if self.edit is None else self.edit(place, values)

    def _add_map(self, map_BHTT: Tensor) -> tuple[Layer, Site, Tensor]:
        """Record a map; return its layer, its heads' Site, and the map that the model uses."""
        read = self.reading[-1] if self.reading else None
        if not self.has_blocks and not (self.layers and self.layers[-1].read is read is not None):
            self.layers.append(Layer(read=read))
        layer = self.layers[-1]
        first = layer.head_count
        layer.head_count += map_BHTT.size(1)
        if self.watch is None:
            layer.softmaxes.append(map_BHTT)
        else:
            self.watch(map_BHTT)
        number = len(self.layers) - 1
        if self.silenced is not None and self.silenced[0] == number:
            head = self.silenced[1]
            if first <= head < layer.head_count:
                map_BHTT = map_BHTT.clone()
                map_BHTT[:, head - first] = 0
        return layer, Site("mixed", number, first), map_BHTT

    @property
    def has_equal_layers(self) -> bool:
        """Return True if all layers have the same number of attention maps, and at least one."""
        counts = {layer.head_count for layer in self.layers}
        return len(counts) == 1 and 0 not in counts

    @property
    def maps(self) -> Tensor:
        """Return every head's attention weights, (L, B, H, T, S).

        Raises NotRecordedError if no maps were observed, or not in every layer.
        """
        if not self.has_equal_layers:
            raise NotRecordedError
        return torch.stack([layer.maps for layer in self.layers])


class NotRecordedError(AttnlmError):
    """Raised when no attention maps were observed in a model, or not in every layer."""

    def __init__(self) -> None:
        super().__init__(
            "no attention weights were found in this model, so there are no maps",
            "compute them by softmax or scaled_dot_product_attention over all tokens of the text",
        )


def no_attention_error() -> AttnlmError:
    """Return the error for a model without attention."""
    return AttnlmError(
        "this model has no attention, so there are no maps",
        "use another model, such as single-head",
    )


class _Observer(TorchFunctionMode):
    """A mode that records each call of softmax and of `scaled_dot_product_attention`."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._recorder.record_attention(*args, **kwargs)
        result = func(*args, **kwargs)
        if func in SOFTMAX:
            return self._recorder.record_softmax(result)
        return self._recorder.edit_product(args[0], result) if func in PRODUCTS else result


SOFTMAX = {torch.softmax, F.softmax, Tensor.softmax}
PRODUCTS = {torch.matmul, Tensor.matmul, torch.bmm, Tensor.bmm}


def texts_at_once(model: LanguageModel, length: int, most_tokens: int) -> int:
    """Return how many texts of `length` tokens can be recorded together.

    Own code may have the same attention maps for all texts, which only a single text shows.
    """
    return max(1, most_tokens // length) if is_ours(model.spec) else 1


def record(
    model: Callable[[Tensor], Tensor],
    tokens_BT: Tensor,
    silenced: Head | None = None,
    watch: Callable[[Tensor], None] | None = None,
) -> Recorder:
    """Record one forward pass over at most block_size tokens, (B, T)."""
    recorder = Recorder(silenced, watch, texts=tokens_BT.size(0))
    with without_gradients(model), observed(model, recorder):
        recorder.logits = model(tokens_BT)
    return recorder


@contextmanager
def observed(model: Callable[[Tensor], Tensor], recorder: Recorder) -> Iterator[None]:
    """Let a recorder observe the model in a `with` block, in which the model is called once."""
    flush_subnormals()
    with ExitStack() as hooks:
        if isinstance(model, Transformer):
            _record_modules(model, recorder, hooks)
        elif isinstance(model, nn.Module):
            _record_inputs(model, recorder, hooks)
        with _Observer(recorder):
            yield


def _record_inputs(model: nn.Module, recorder: Recorder, hooks: ExitStack) -> None:
    """Register hooks that record the input of each module while the module runs."""

    def enter(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        read = inputs[0] if inputs and isinstance(inputs[0], Tensor) else None
        # A module that reads ids is the whole model, whose maps follow each other.
        recorder.reading.append(read if read is not None and read.is_floating_point() else None)

    def leave(module: nn.Module, inputs: object, output: object) -> None:
        recorder.reading.pop()

    for module in model.modules():
        hooks.callback(module.register_forward_pre_hook(enter).remove)
        hooks.callback(module.register_forward_hook(leave).remove)


def _record_modules(model: Transformer, recorder: Recorder, hooks: ExitStack) -> None:
    """Register hooks that record the inputs and outputs of the modules of each block."""
    recorder.has_blocks = True

    def before(module: nn.Module | None, keep: Callable[[Tensor], None]) -> None:
        if module is not None:
            hook = module.register_forward_pre_hook(lambda _, inputs: keep(inputs[0]))
            hooks.callback(hook.remove)

    def after(module: nn.Module | None, name: str) -> None:
        def leave(_: nn.Module, inputs: object, output: Tensor) -> Tensor:
            output = recorder.edit_activation(Site(name, len(recorder.layers) - 1), output)
            if recorder.layers:
                setattr(recorder.layers[-1], name, output)
            else:
                recorder.embedded = output
            return output

        if module is not None:
            hooks.callback(module.register_forward_hook(leave).remove)

    after(model.dropout, "stream")
    for block in model.blocks:
        assert isinstance(block, Block)
        before(block, lambda _: recorder.layers.append(Layer()))
        before(block.attention, lambda read: setattr(recorder.layers[-1], "read", read))
        after(block.attention, "attended")
        after(block.mlp, "mlp")
        after(block, "stream")
