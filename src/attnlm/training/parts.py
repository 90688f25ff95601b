"""Which parts of a training can be compiled in C, and whether they are."""

from __future__ import annotations

from attnlm.model.architecture import Architecture
from attnlm.model.ops import pointwise
from attnlm.model.ops.causal import attention_in_blocks
from attnlm.model.ops.loss import LOGITS_AT_ONCE
from attnlm.training.one_layer import LARGEST_NATIVE_HEAD, is_one_layer, native_parts


def has_parts(a: Architecture, vocab_size: int, tokens: int) -> bool:
    """Whether there are such parts, in batches of so many tokens."""
    if is_one_layer(a, vocab_size, tokens):
        return a.head_dim <= LARGEST_NATIVE_HEAD
    return a.embed_dim is not None and (
        vocab_size * tokens > LOGITS_AT_ONCE["cpu"]
        or a.mlp in ("gelu", "swiglu")
        or a.norm == "rms"
        or (a.attention == "softmax" and (a.query_key_norm or a.positions == "rotary"))
    )


def parts_compile(a: Architecture, vocab_size: int, tokens: int) -> bool:
    """Compiles them, or finds them compiled; False where there is no compiler that works."""
    if is_one_layer(a, vocab_size, tokens):
        return native_parts(a) is not None
    return pointwise() is not None and attention_in_blocks() is not None
