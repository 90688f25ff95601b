"""Attribute the logit of a token to the embedding, the heads and the MLPs that add to it."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlm.model.attention import SelfAttention
from attnlm.model.language_model import Block, LanguageModel, Transformer
from attnlm.model.layers import LayerNorm, RMSNorm
from attnlm.model.recorder import Heads, Recorder


@torch.inference_mode()
def attribution(model: LanguageModel, seen: Recorder, token: int) -> list[tuple[str, float]]:
    """Return what each part adds to the logit of `token` after the last one, in the pass `seen`.

    The parts are the embedding, each head, each MLP, and biases. The final norm divides by the root
    mean square (or standard deviation) of the whole residual stream. Each part is divided by the
    same number, so the sum of all parts is the logit. The result is empty for a model without a
    residual stream.
    """
    if not isinstance(model, Transformer) or seen.embedded is None:
        return []
    if not model.architecture.residual:
        return []
    parts = {"embedding": seen.embedded[0, -1]}
    for number, (block, layer) in enumerate(zip(model.blocks, seen.layers, strict=True), 1):
        assert isinstance(block, Block)
        if layer.attended is not None:
            found = _of_heads(block, layer.attended[0, -1], layer.heads)
            parts |= {f"layer {number} {name}": added_C for name, added_C in found.items()}
        if layer.mlp is not None:
            parts[f"layer {number} MLP"] = layer.mlp[0, -1]
    names, added_NC = [*parts], torch.stack([*parts.values()])
    weight_C, constant = model.head.weight[token], torch.zeros(())
    if model.head.bias is not None:
        constant = constant + model.head.bias[token]
    norm = model.norm
    if isinstance(norm, LayerNorm | RMSNorm):
        if isinstance(norm, LayerNorm):
            added_NC = added_NC - added_NC.mean(-1, keepdim=True)
            constant = constant if norm.bias is None else constant + norm.bias @ weight_C
        size = (added_NC.sum(0).square().mean() + norm.epsilon).sqrt()
        added_NC = added_NC * norm.gain / size
    logits = [*(added_NC @ weight_C).tolist(), float(constant)]
    shown = [*zip([*names, "biases"], logits, strict=True)]
    return shown if shown[-1][1] else shown[:-1]


def _of_heads(block: Block, attended_C: Tensor, seen: Heads | None) -> dict[str, Tensor]:
    """Return what each head adds to the residual stream at the last token, and the bias, if any."""
    attention = block.attention
    if not isinstance(attention, SelfAttention) or seen is None:
        return {"attention": attended_C}
    mixed_HTE = seen.mixed[0]
    heads, size = mixed_HTE.size(0), mixed_HTE.size(2)
    alone_HN = torch.zeros(heads + 1, heads * size, dtype=mixed_HTE.dtype)
    for head in range(heads):
        alone_HN[head, head * size : (head + 1) * size] = mixed_HTE[head, -1]
    if attention.projection is None:
        return {f"head {head + 1}": alone_HN[head] for head in range(heads)}
    *added, bias_C = attention.projection(alone_HN)
    found = {f"head {head}": added_C - bias_C for head, added_C in enumerate(added, 1)}
    return found | ({"attention bias": bias_C} if bias_C.any() else {})
