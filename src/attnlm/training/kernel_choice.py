"""Choice of the kernels of a training step on a CPU, by rules, so that no timing decides a result.

docs/speed.md lists the rules.
"""

from __future__ import annotations

import torch

from attnlm.compute.native import native_library
from attnlm.config.training import TrainingConfig
from attnlm.model.ops import Kernels
from attnlm.model.ops.linear import onednn_linear
from attnlm.model.ops.loss import LOGITS_AT_ONCE
from attnlm.model.spec import ModelSpec, Use
from attnlm.training.one_layer import is_one_layer

_NARROW = 192
"""The largest width for which blocks in C are faster than PyTorch's operations."""
_SHORT = 64
"""The longest context for which PyTorch's attention is faster."""


def configured_kernels(training: TrainingConfig) -> Kernels:
    """Return the kernels that a configuration selects, by default PyTorch's."""
    return Kernels(
        native_ops=training.compile == "parts",
        matmul="blas" if training.matmul == "auto" else training.matmul,
        attention="native" if training.attention_kernel == "native" else "torch",
    )


def has_native_ops(spec: ModelSpec, vocab_size: int, tokens: int) -> bool:
    """Return True if some of this model's operations exist in C for batches of `tokens` tokens."""
    has_blocks = spec.costs(vocab_size).width > 0
    return (
        is_one_layer(spec, vocab_size, tokens)
        or spec.reason_against(Use.NATIVE_OPS) is None
        or (has_blocks and vocab_size * tokens > LOGITS_AT_ONCE["cpu"])
    )


def choose_matmul(spec: ModelSpec, training: TrainingConfig) -> str:
    """Return what computes a step's large matmuls: native, onednn or blas.

    Blocks in C are faster than single operations as long as their matmuls are small. The library is
    faster for large ones. Blocks in C need all weights of a block.
    """
    library = faster_matmul()
    by_blocks = (
        training.compile == "parts"
        and training.attention_kernel != "torch"
        and spec.reason_against(Use.NATIVE_BLOCKS) is None
        and spec.costs(vocab_size=0).width <= _NARROW
    )
    return "native" if by_blocks and library == "blas" else library


def faster_matmul() -> str:
    """Return the library for a step's large matmuls: onednn or blas.

    PyTorch's BLAS on x86 is MKL. On processors that are not Intel's, MKL does not use AVX-512, and
    oneDNN is faster.
    """
    native = native_library()
    capability = torch.backends.cpu.get_cpu_capability()
    if native is None or capability != "AVX512" or onednn_linear() is None:
        return "blas"
    return "blas" if native.is_intel() else "onednn"


def faster_attention(spec: ModelSpec, matmul: str) -> str:
    """Return the kernel for causal attention: native for contexts above 64 tokens, else torch.

    The kernel in C computes blocks of 64 queries. It can't compute every model. Blocks in C use it
    for any context.
    """
    if matmul == "native":
        return "native"
    is_possible = spec.reason_against(Use.NATIVE_ATTENTION) is None and native_library() is not None
    return "native" if is_possible and spec.block_size > _SHORT else "torch"
