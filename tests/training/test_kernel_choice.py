"""The rules that choose the kernels of a training step: the same for the same configuration."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attnlm.base.setting_fields import Settings
from attnlm.compute.native import native_library
from attnlm.config.settings import resolve
from attnlm.model.ops import linear
from attnlm.model.presets import architecture
from attnlm.training import kernel_choice
from attnlm.training.kernel_choice import choose_matmul, faster_attention, faster_matmul
from tests.models import needs_kernels


@pytest.mark.parametrize(
    ("capability", "intel", "library"),
    [("AVX512", 0, "onednn"), ("AVX512", 1, "blas"), ("AVX2", 0, "blas"), ("DEFAULT", 0, "blas")],
)
def test_the_library_for_matmuls_follows_the_processor(
    capability: str, intel: int, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if linear.onednn_linear() is None:
        pytest.skip("PyTorch has no oneDNN here")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(
        kernel_choice, "native_library", lambda: SimpleNamespace(is_intel=lambda: intel)
    )
    assert faster_matmul() == library
    monkeypatch.setattr(kernel_choice, "onednn_linear", lambda: None)
    assert faster_matmul() == "blas"


@needs_kernels
def test_the_maker_of_the_processor_is_what_the_system_reports() -> None:
    about = Path("/proc/cpuinfo")
    if not about.exists():
        pytest.skip("the system does not describe its processor")
    native = native_library()
    assert native is not None and native.is_intel() == ("GenuineIntel" in about.read_text())


@needs_kernels
@pytest.mark.parametrize(
    ("model", "sizes", "matmul", "kernel"),
    [
        ("llama", {"block_size": 65}, "blas", "native"),
        ("llama", {"block_size": 64}, "blas", "torch"),
        ("llama", {"block_size": 8}, "native", "native"),
        ("single-head", {"dropout": 0.1, "block_size": 65}, "blas", "torch"),
        ("bigram", {}, "blas", "torch"),
    ],
)
def test_attention_in_c_is_used_for_long_contexts_if_it_can_compute_the_model(
    model: str, sizes: Settings, matmul: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert faster_attention(architecture(model, sizes), matmul) == kernel
    monkeypatch.setattr(kernel_choice, "native_library", lambda: None)
    assert faster_attention(architecture(model, sizes), "blas") == "torch"


@pytest.mark.parametrize(
    ("library", "settings", "chosen"),
    [
        ("blas", {}, "native"),
        ("onednn", {}, "onednn"),
        ("blas", {"embed_dim": 192}, "native"),
        ("blas", {"embed_dim": 256}, "blas"),
        ("blas", {"attention_kernel": "torch"}, "blas"),
        ("blas", {"projection": False}, "blas"),
        ("blas", {"compile": "off"}, "blas"),
        ("blas", {"model": "multi-head"}, "blas"),
    ],
)
def test_blocks_in_c_are_used_for_narrow_models_that_they_can_compute(
    library: str, settings: Settings, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_choice, "faster_matmul", lambda: library)
    given: Settings = {"model": "transformer", "compile": "parts", "embed_dim": 128}
    config = resolve({**given, "heads": 4, "head_size": 32, **settings})
    assert choose_matmul(config.spec, config.training) == chosen
