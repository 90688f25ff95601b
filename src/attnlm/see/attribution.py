"""Attribute the logit of a token to the embedding, the heads and the MLPs that add to it."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from attnlm.model.attention import SelfAttention
from attnlm.model.inspection import are_close
from attnlm.model.language_model import Block, LanguageModel, Transformer
from attnlm.model.layers import LayerNorm, RMSNorm
from attnlm.model.recorder import Recorder, Site, observed


@torch.inference_mode()
def attribution(model: LanguageModel, ids: list[int], token: int) -> list[tuple[str, float]]:
    """Return what each part adds to the logit of `token` after a text.

    The parts are the embedding, each head, each MLP, and biases. The final norm divides by the root
    mean square (or standard deviation) of the whole residual stream. Each part is divided by the
    same number, so the sum of all parts is the logit. The result is empty for a model without a
    residual stream.
    """
    if not isinstance(model, Transformer) or not model.architecture.residual:
        return []
    mixed: defaultdict[int, list[Tensor]] = defaultdict(list)

    def keep(site: Site, x: Tensor) -> Tensor:
        if site.kind == "mixed":
            mixed[site.layer].append(x[0, :, -1])
        return x

    recorder = Recorder(watch=lambda _: None, edit=keep)
    with observed(model, recorder):
        model.next_logits(torch.tensor([ids]))
    assert recorder.embedded is not None
    addends = {"embedding": recorder.embedded[0, -1]}
    for number, (block, layer) in enumerate(zip(model.blocks, recorder.layers, strict=True)):
        assert isinstance(block, Block)
        if layer.attended is not None:
            added_by_heads = _added_by_heads(block, layer.attended[0, -1], mixed[number])
            addends |= {
                f"layer {number + 1} {name}": added_C for name, added_C in added_by_heads.items()
            }
        if layer.mlp is not None:
            addends[f"layer {number + 1} MLP"] = layer.mlp[0, -1]
    added_NC = torch.stack([*addends.values()])
    weight_C = model.head.weight[token]
    constant = torch.zeros(())
    if model.head.bias is not None:
        constant = constant + model.head.bias[token]
    norm = model.norm
    if isinstance(norm, LayerNorm | RMSNorm):
        if isinstance(norm, LayerNorm):
            added_NC = added_NC - added_NC.mean(-1, keepdim=True)
            constant = constant if norm.bias is None else constant + norm.bias @ weight_C
        norm_scale = (added_NC.sum(0).square().mean() + norm.epsilon).sqrt()
        added_NC = added_NC * norm.gain / norm_scale
    logits = [*zip(addends, (added_NC @ weight_C).tolist(), strict=True)]
    return [*logits, ("biases", float(constant))] if constant else logits


def _added_by_heads(block: Block, attended_C: Tensor, mixed: list[Tensor]) -> dict[str, Tensor]:
    """Return what each head adds to the residual stream at the last token, and the bias, if any.

    If the heads of an attention are not known, it is one part.
    """
    attention = block.attention
    if isinstance(attention, SelfAttention) and mixed:
        alone_HN = torch.block_diag(*torch.cat(mixed))  # N: all heads side by side
        projection = attention.projection
        bias_C = torch.zeros_like(attended_C)
        if projection is not None and projection.weight.size(1) == alone_HN.size(1):
            bias_C = projection(torch.zeros_like(alone_HN))[0]
            alone_HN = projection(alone_HN) - bias_C
        parts = {f"head {head}": added_C for head, added_C in enumerate(alone_HN, 1)}
        parts |= {"attention bias": bias_C} if bias_C.any() else {}
        summed = sum(parts.values())
        if summed.shape == attended_C.shape and are_close(summed, attended_C):
            return parts
    return {"attention": attended_C}
