"""Attribute the logit of a token to the embedding, the heads and the MLPs that add to it."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from attnlm.model.attention import SelfAttention
from attnlm.model.inspection import agree
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

    def keep(place: Site, x: Tensor) -> Tensor:
        if place[0] == "mixed":
            mixed[place[1]].append(x[0, :, -1])
        return x

    seen = Recorder(watch=lambda _: None, edit=keep)
    with observed(model, seen):
        model.next_logits(torch.tensor([ids]))
    assert seen.embedded is not None
    parts = {"embedding": seen.embedded[0, -1]}
    for layer, (block, of) in enumerate(zip(model.blocks, seen.layers, strict=True)):
        assert isinstance(block, Block)
        if of.attended is not None:
            found = _of_heads(block, of.attended[0, -1], mixed[layer])
            parts |= {f"layer {layer + 1} {name}": added_C for name, added_C in found.items()}
        if of.mlp is not None:
            parts[f"layer {layer + 1} MLP"] = of.mlp[0, -1]
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
    shown = [
        *zip([*names, "biases"], [*(added_NC @ weight_C).tolist(), float(constant)], strict=True)
    ]
    return shown if shown[-1][1] else shown[:-1]


def _of_heads(block: Block, attended_C: Tensor, mixed: list[Tensor]) -> dict[str, Tensor]:
    """Return what each head adds to the residual stream at the last token, and the bias, if any.

    If the heads of an attention are not known, it is one part.
    """
    attention = block.attention
    if isinstance(attention, SelfAttention) and mixed:
        alone_HN = torch.block_diag(*torch.cat(mixed))  # N: all heads side by side
        projection, bias_C = attention.projection, torch.zeros_like(attended_C)
        if projection is not None and projection.weight.size(1) == alone_HN.size(1):
            bias_C = projection(torch.zeros_like(alone_HN))[0]
            alone_HN = projection(alone_HN) - bias_C
        found = {f"head {head}": added_C for head, added_C in enumerate(alone_HN, 1)}
        found |= {"attention bias": bias_C} if bias_C.any() else {}
        summed = sum(found.values())
        if summed.shape == attended_C.shape and agree(summed, attended_C):
            return found
    return {"attention": attended_C}
