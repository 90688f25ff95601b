"""The forward pass of every model in plain textbook form: a function of the weights alone.

The code is slow and shares nothing with the torch modules of the models. Tests compare those
modules with this code. `attnlm trace` follows it without the branches that a model does not take,
and `--as-code` prints it: each tensor whose name ends with its axes is a step of the trace.

Axes: T tokens, C features, H heads, K key and value heads, D head size, F width of an MLP,
V vocabulary, X = H·D, the heads side by side.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from attnlm.model.architecture import Architecture

Weights = Mapping[str, Tensor]


def forward(a: Architecture, weights: Weights, ids: Tensor) -> Tensor:
    """Return logits, (T,) → (T, V), without dropout; `weights` holds the weights by name."""
    if a.embed_dim is None:
        logits_TV = weights["table.weight"][ids]  # each token's row of the table
        return logits_TV  # noqa: RET504 - a step of the trace
    x_TC = weights["token_embedding.weight"][ids]
    if a.positions == "learned":
        x_TC = x_TC + weights["position_embedding.weight"][: len(ids)]
    for layer in range(a.layers):
        block = with_prefix(weights, f"blocks.{layer}.")
        if a.attention != "none":
            read_TC = (
                norm(a, with_prefix(block, "attention_norm."), x_TC) if a.norm != "none" else x_TC
            )
            attended_TC = attend(a, with_prefix(block, "attention."), read_TC)
            x_TC = x_TC + attended_TC if a.residual else attended_TC
        if a.mlp != "none":
            read_TC = norm(a, with_prefix(block, "mlp_norm."), x_TC) if a.norm != "none" else x_TC
            mlp_TC = mlp(a, with_prefix(block, "mlp."), read_TC)
            x_TC = x_TC + mlp_TC if a.residual else mlp_TC
    last_TC = norm(a, with_prefix(weights, "norm."), x_TC) if a.norm != "none" else x_TC
    logits_TV = last_TC @ weights["token_embedding.weight" if a.tie_embeddings else "head.weight"].T
    if a.head_bias:
        logits_TV = logits_TV + weights["head.bias"]
    return logits_TV


def with_prefix(weights: Weights, prefix: str) -> dict[str, Tensor]:
    """Return the weights whose names begin with `prefix`, by their names without the prefix."""
    return {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    """Return x Wᵀ, plus a bias if there is one."""
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def norm(a: Architecture, weights: Weights, x: Tensor) -> Tensor:
    """Return the RMS norm or layer norm of x over the last axis."""
    if a.norm == "rms":
        return rms(a, x) * weights["gain"]
    x = rms(a, x - x.mean(-1, keepdim=True)) * weights["gain"]
    return x + weights["bias"] if a.bias else x


def rms(a: Architecture, x: Tensor) -> Tensor:
    """Return x divided by the root of its mean square over the last axis."""
    return x / (x.square().mean(-1, keepdim=True) + a.norm_epsilon).sqrt()


def attend(a: Architecture, weights: Weights, x_TC: Tensor) -> Tensor:
    """Return causal attention, (T, C) → (T, C), or (T, H·D) if its heads have no projection."""
    T = len(x_TC)
    if a.attention == "softmax":
        H, K, D = a.heads, a.num_kv_heads, a.head_dim  # heads, key and value heads, their width
        q_HTD = linear(weights, "query", x_TC).view(T, H, D).transpose(0, 1)
        k_KTD = linear(weights, "key", x_TC).view(T, K, D).transpose(0, 1)
        v_KTD = linear(weights, "value", x_TC).view(T, K, D).transpose(0, 1)
        if a.query_key_norm:
            q_HTD = rms(a, q_HTD) * weights["query_norm.gain"]
            k_KTD = rms(a, k_KTD) * weights["key_norm.gain"]
        if a.positions == "rotary":
            q_HTD = rotate(a, q_HTD)
            k_KTD = rotate(a, k_KTD)
        if a.num_kv_heads == a.heads:
            k_HTD, v_HTD = k_KTD, v_KTD
        else:  # each serves H/K queries
            k_HTD = k_KTD.repeat_interleave(H // K, dim=0)
            v_HTD = v_KTD.repeat_interleave(H // K, dim=0)
    else:
        v_HTD = x_TC[None]  # one head without parameters: queries, keys and values are x itself
        q_HTD = k_HTD = v_HTD
    if a.attention == "uniform":
        scores_HTT = torch.zeros(1, T, T, dtype=x_TC.dtype)
    else:
        scores_HTT = q_HTD @ k_HTD.mT / q_HTD.size(-1) ** 0.5
    # No query sees a later key.
    masked_HTT = scores_HTT.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
    softmax_HTT = torch.softmax(masked_HTT, dim=-1)
    mixed_HTD = softmax_HTT @ v_HTD
    joined_TX = mixed_HTD.transpose(0, 1).flatten(1)
    return linear(weights, "projection", joined_TX) if a.projection else joined_TX


def rotate(a: Architecture, x: Tensor) -> Tensor:
    """Apply rotary positions: rotate each pair of a head's elements by its angle."""
    T, D = x.shape[-2:]
    frequencies = a.rotary_base ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    if a.rotary_factor is not None:
        divided = frequencies / a.rotary_factor
        if a.rotary_context is not None:  # the faster ones stay as they are
            turns = frequencies * a.rotary_context / (2 * torch.pi)
            divided = divided.lerp(frequencies, ((turns - 1) / 3).clamp(0, 1))
        frequencies = divided
    angles = torch.outer(torch.arange(T), frequencies).repeat(1, 2)
    first, second = x.chunk(2, dim=-1)
    cosines, sines = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return x * cosines + torch.cat((-second, first), dim=-1) * sines


def mlp(a: Architecture, weights: Weights, x: Tensor) -> Tensor:
    """Return the output of the MLP, which processes each token separately."""
    if a.mlp == "swiglu":
        hidden_TF = F.silu(linear(weights, "gate", x)) * linear(weights, "up", x)
    elif a.mlp == "gelu":
        hidden_TF = F.gelu(linear(weights, "up", x), approximate="tanh")
    else:
        hidden_TF = F.relu(linear(weights, "up", x)) ** 2
    return linear(weights, "down", hidden_TF)
