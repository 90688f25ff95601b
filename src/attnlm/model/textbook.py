"""The forward pass of every model in plain textbook form: a function of the weights alone.

The code is slow and shares nothing with the torch modules of the models. Tests compare those
modules with this code, and `attnlm trace --as-code` prints it without the branches that a model
does not take.
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
        return weights["table.weight"][ids]  # each token's row of the table
    x = weights["token_embedding.weight"][ids]
    if a.positions == "learned":
        x = x + weights["position_embedding.weight"][: len(ids)]
    for layer in range(a.layers):
        block = with_prefix(weights, f"blocks.{layer}.")
        if a.attention != "none":
            y = norm(a, with_prefix(block, "attention_norm."), x) if a.norm != "none" else x
            y = attend(a, with_prefix(block, "attention."), y)
            x = x + y if a.residual else y
        if a.mlp != "none":
            y = norm(a, with_prefix(block, "mlp_norm."), x) if a.norm != "none" else x
            y = mlp(a, with_prefix(block, "mlp."), y)
            x = x + y if a.residual else y
    if a.norm != "none":
        x = norm(a, with_prefix(weights, "norm."), x)
    head = "token_embedding." if a.tie_embeddings else "head."
    logits = x @ weights[head + "weight"].T
    return logits + weights["head.bias"] if a.head_bias else logits


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
        return x / (x.square().mean(-1, keepdim=True) + a.norm_epsilon).sqrt() * weights["gain"]
    x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + a.norm_epsilon).sqrt() * weights["gain"]
    return x + weights["bias"] if a.bias else x


def attend(a: Architecture, weights: Weights, x: Tensor) -> Tensor:
    """Return causal attention, (T, C) → (T, C), or (T, H·D) if its heads have no projection."""
    T = len(x)
    later = torch.ones(T, T, dtype=torch.bool).triu(1)  # keys after the query
    if a.attention == "uniform":
        return torch.softmax(x.new_zeros(T, T).masked_fill(later, -torch.inf), dim=-1) @ x
    if a.attention == "parameter-free":
        scores = x @ x.T / x.size(-1) ** 0.5
        return torch.softmax(scores.masked_fill(later, -torch.inf), dim=-1) @ x
    H, K, D = a.heads, a.num_kv_heads, a.head_dim  # heads, key and value heads, their width
    q = linear(weights, "query", x).view(T, H, D).transpose(0, 1)  # (H, T, D)
    k = linear(weights, "key", x).view(T, K, D).transpose(0, 1)
    v = linear(weights, "value", x).view(T, K, D).transpose(0, 1)
    if a.query_key_norm:
        q = q / (q.square().mean(-1, keepdim=True) + a.norm_epsilon).sqrt()
        k = k / (k.square().mean(-1, keepdim=True) + a.norm_epsilon).sqrt()
        q, k = q * weights["query_norm.gain"], k * weights["key_norm.gain"]
    if a.positions == "rotary":
        q, k = rotate(a, q), rotate(a, k)
    if a.num_kv_heads != a.heads:
        k, v = (y.repeat_interleave(H // K, dim=0) for y in (k, v))  # each serves H/K queries
    scores = q @ k.mT / D**0.5  # (H, T, T)
    attention = torch.softmax(scores.masked_fill(later, -torch.inf), dim=-1)
    mixed = (attention @ v).transpose(0, 1).reshape(T, H * D)
    return linear(weights, "projection", mixed) if a.projection else mixed


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
    hidden = linear(weights, "up", x)
    if a.mlp == "swiglu":
        hidden = F.silu(linear(weights, "gate", x)) * hidden
    elif a.mlp == "gelu":
        hidden = F.gelu(hidden, approximate="tanh")
    else:
        hidden = F.relu(hidden) ** 2
    return linear(weights, "down", hidden)
