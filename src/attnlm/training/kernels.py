"""Choice of the kernels of a training step on a CPU: those that compile and are fastest on it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from attnlm.compute.choices import fastest
from attnlm.compute.threads import threads_of_torch
from attnlm.config.training import TrainingConfig
from attnlm.model.architecture import Architecture
from attnlm.model.ops import Kernels, operations_in_c, using
from attnlm.model.ops.attention import attention_in_c, fused_attention
from attnlm.model.ops.linear import FEWEST_BY_ONEDNN, onednn_linear, product
from attnlm.model.ops.loss import LOGITS_AT_ONCE
from attnlm.model.sizes import map_shapes
from attnlm.training.one_layer import compiled_parts, is_one_layer

# The largest sizes timed. The kernel that is faster at these sizes is also faster at larger ones.
_MOST_TOKENS, _MOST_OUTPUTS, _MOST_KV_HEADS = 512, 4096, 4


def kernels_of(training: TrainingConfig) -> Kernels:
    """Return the kernels that a configuration selects, by default PyTorch's."""
    return Kernels(
        compiled=training.compile == "parts",
        matmul="onednn" if training.matmul == "onednn" else "blas",
        attention="native" if training.attention_kernel == "native" else "torch",
    )


def has_parts(a: Architecture, vocab_size: int, tokens: int) -> bool:
    """Return True if some of this model's operations exist in C for batches of `tokens` tokens."""
    return a.embed_dim is not None and (
        is_one_layer(a, vocab_size, tokens)
        or vocab_size * tokens > LOGITS_AT_ONCE["cpu"]
        or a.mlp in ("gelu", "swiglu")
        or a.norm == "rms"
        or (a.attention == "softmax" and (a.query_key_norm or a.positions == "rotary"))
    )


def parts_compile(a: Architecture, vocab_size: int, tokens: int) -> bool:
    """Compile the operations written in C unless cached; return False if no compiler works."""
    if is_one_layer(a, vocab_size, tokens):
        return compiled_parts(a) is not None
    return operations_in_c() is not None and attention_in_c() is not None


def faster_matmul(a: Architecture, vocab_size: int, tokens: int) -> str:
    """Return the faster library for a step's matmuls, forward and backward: blas or onednn.

    Each thread computes `tokens` tokens. Small matmuls always use BLAS.
    """
    if onednn_linear() is None or a.embed_dim is None:
        return "blas"
    rows = _tokens_measured(tokens)
    large = {
        (min(outputs, _MOST_OUTPUTS), inputs)
        for outputs, inputs in (*map_shapes(a).values(), (vocab_size, a.body_dim))
        if rows * outputs * inputs >= FEWEST_BY_ONEDNN
    }
    if not large:
        return "blas"
    shapes = sorted(large)
    factors = [(torch.ones(rows, c), torch.ones(n, c), torch.ones(rows, n)) for n, c in shapes]

    def multiply() -> None:
        for x_MC, weight_NC, d_out_MN in factors:
            product(x_MC, weight_NC)
            product(d_out_MN, weight_NC.T)
            product(d_out_MN.T, x_MC.T)

    sizes = f"{rows} × {', '.join(f'{inputs} → {outputs}' for outputs, inputs in shapes)}"
    names = ("blas", "onednn")
    ways = {name: partial(_compute_with, Kernels(matmul=name), multiply) for name in names}
    return fastest("matmul", sizes, ways)


def _compute_with(kernels: Kernels, compute: Callable[[], object]) -> None:
    """Call `compute` with these kernels in one thread."""
    with using(kernels), threads_of_torch(1):
        compute()


def _tokens_measured(tokens: int) -> int:
    """Return `tokens` rounded down to a power of two, at most `_MOST_TOKENS`, for timing."""
    return min(_MOST_TOKENS, 1 << (max(1, tokens).bit_length() - 1))


def faster_attention(a: Architecture, tokens: int) -> str:
    """Return the faster kernel for causal attention, forward and backward: torch or native.

    Each thread computes `tokens` tokens.
    """
    if a.attention == "none" or a.holds_weights or attention_in_c() is None:
        return "torch"
    if a.attention == "softmax":
        kv_heads, size = min(a.num_kv_heads, _MOST_KV_HEADS), a.head_dim
        heads = kv_heads * (a.heads // a.num_kv_heads)
    else:
        kv_heads, heads, size = 1, 1, a.body_dim
    length = min(a.block_size, _MOST_TOKENS)
    windows = max(1, _tokens_measured(tokens) // length)

    query, key, value = (
        torch.ones(windows, count, length, size, requires_grad=True)
        for count in (heads, kv_heads, kv_heads)
    )
    d_out = torch.ones(windows, heads, length, size)

    def attend() -> None:
        # Passing d_out to `backward` would make PyTorch load sympy.
        (fused_attention(query, key, value) * d_out).sum().backward()

    sizes = f"{heads} heads of {size}, {kv_heads} of keys, {windows} × {length} tokens"
    kernels = {name: Kernels(compiled=True, attention=name) for name in ("torch", "native")}
    ways = {name: partial(_compute_with, used, attend) for name, used in kernels.items()}
    return fastest("attention", sizes, ways)
