"""The rules that choose the kernels of a training step: the same for the same configuration."""

from __future__ import annotations

import pytest
import torch

from attnlm.model.architecture import architecture
from attnlm.model.ops import linear
from attnlm.training import kernels
from attnlm.training.kernels import faster_attention, faster_matmul
from tests.models import needs_kernels


@pytest.mark.parametrize(
    ("capability", "library"), [("AVX512", "onednn"), ("AVX2", "blas"), ("DEFAULT", "blas")]
)
def test_the_library_for_matmuls_follows_the_instruction_set(
    capability: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if linear.onednn_linear() is None:
        pytest.skip("PyTorch has no oneDNN here")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert faster_matmul() == library
    monkeypatch.setattr(kernels, "onednn_linear", lambda: None)
    assert faster_matmul() == "blas"


@needs_kernels
def test_attention_in_c_is_used_for_every_model_that_it_can_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert faster_attention(architecture("llama", {})) == "native"
    assert faster_attention(architecture("single-head", {"dropout": 0.1})) == "torch"
    assert faster_attention(architecture("bigram", {})) == "torch"
    monkeypatch.setattr(kernels, "native_kernels", lambda: None)
    assert faster_attention(architecture("llama", {})) == "torch"
