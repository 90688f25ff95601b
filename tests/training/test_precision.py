"""Memory and precision of GPUs, simulated on a CPU: bfloat16, autocast, and large vocabularies."""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import attnlm
from attnlm.base.errors import UsageError
from attnlm.base.setting_fields import Settings
from attnlm.compute.device import Device
from attnlm.compute.native import native_library
from attnlm.config.settings import resolve
from attnlm.config.variants import variant
from attnlm.data.dataset import Dataset
from attnlm.generation import sampling
from attnlm.generation.decoders import ModuleDecoder, fastest_decoding, is_fastest_on_cpu
from attnlm.model.ops.loss import LOGITS_AT_ONCE, cross_entropy, linear_cross_entropy
from attnlm.training.cuda_graph import can_record_gradients, can_record_updates
from attnlm.workflows import autotune as launch
from attnlm.workflows.autotune import autotune
from tests.models import V, prepared, small_model, some_ids

CPU = Device("cpu", "float32", "tests")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("data")
    return prepared(folder, "the cat sat on the mat.\n" * 99, "text")


class Operations(TorchDispatchMode):
    """Note the name, the size and the precision of what each operation returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[tuple[str, int, torch.dtype]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.made.append((func.overloadpacket.__name__, out.numel(), out.dtype))
        return out


@pytest.mark.parametrize("name", ["bigram", "multi-head", "transformer", "gpt2"])
def test_a_prompt_has_the_logits_of_its_last_token_alone(name: str) -> None:
    """Logits at other positions would take most of the memory if the vocabulary is large."""
    model = small_model(name)
    ids_BT = some_ids(3, model.architecture.block_size)
    with Operations() as seen:
        found = ModuleDecoder(model, CPU).logits(ids_BT.numpy(), 0)
    np.testing.assert_allclose(found, model(ids_BT)[:, -1].detach(), rtol=1e-9, atol=1e-12)
    matmuls = [n for name, n, _ in seen.made if name in ("linear", "addmm", "mm", "embedding")]
    assert matmuls[-1] == 3 * V


def test_gradients_of_a_bfloat16_head_are_summed_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Accumulating 128 pieces in bfloat16 had an error of more than 1%."""
    tokens, width, ids = 1024, 16, 32
    monkeypatch.setitem(LOGITS_AT_ONCE, "cpu", tokens * ids // 128)
    torch.manual_seed(1)
    x_MC, head_VC = torch.randn(tokens, width).bfloat16(), torch.randn(ids, width).bfloat16()
    bias_V, targets_M = torch.randn(ids).bfloat16(), torch.randint(ids, (tokens,))
    leaves = [t.clone().requires_grad_() for t in (x_MC, head_VC, bias_V)]
    exact = [t.double().requires_grad_() for t in (x_MC, head_VC, bias_V)]
    loss = linear_cross_entropy(leaves[0], leaves[1], leaves[2], targets_M)
    expected = cross_entropy(exact[0] @ exact[1].T + exact[2], targets_M)
    found = torch.autograd.grad(loss, leaves)
    for one, other in zip(found[1:], torch.autograd.grad(expected, exact)[1:], strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.double() - other).norm() < 0.006 * other.norm()


@pytest.mark.parametrize("name", ["transformer", "gpt2", "llama:kv_heads=2:tie_embeddings=true"])
def test_weights_are_cast_once_for_all_tokens(name: str) -> None:
    """Compare with autocast, bit for bit."""
    model, device = small_model(name).float(), Device("cpu", "bfloat16", "tests")
    ids_BT = some_ids(2, 6).numpy()
    plain = ModuleDecoder(model, device)
    decoder = fastest_decoding(model, device).new_decoder(2)
    assert np.array_equal(decoder.logits(ids_BT[:, :5], 0), plain.logits(ids_BT[:, :5], 0))
    with Operations() as seen:
        found = decoder.logits(ids_BT, 5)
    assert np.allclose(found, plain.logits(ids_BT, 0), rtol=0.05, atol=0.05)
    width = model.architecture.width
    casts = [n for name, n, dtype in seen.made if name in ("_to_copy", "to") and n > 2 * 4 * width]
    assert not casts
    assert all(p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize(
    ("compiler", "settings", "expected"),
    [
        ("cc", {"steps": 10**9}, "on"),
        ("cc", {"steps": 10}, "off"),
        ("cc", {"budget": 3600.0}, "on"),
        ("cc", {"budget": 60.0}, "off"),
        ("", {"steps": 10**9}, "off"),
        ("", {"budget": 3600.0}, "off"),
    ],
)
def test_long_training_on_a_gpu_is_compiled_if_a_compiler_exists(
    compiler: str, settings: Settings, expected: str, monkeypatch: pytest.MonkeyPatch, data: Dataset
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(shutil, "which", lambda name: name == compiler)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    cuda = Device("cuda", "bfloat16", "tests")
    changes: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", changes.append)
    settled = autotune(resolve({"model": "transformer", **settings}), cuda, data)
    assert settled.training.compile == expected
    assert not changes and "TORCHINDUCTOR_CACHE_DIR" not in os.environ  # it changes no state


@pytest.mark.parametrize(
    ("settings", "device"),
    [
        ({"model": "bigram"}, "cpu"),
        ({"model": "bigram", "device": "cuda"}, "cuda"),
        ({"model": "bigram", "dtype": "bfloat16"}, "cuda"),
        ({"model": "single-head"}, "cuda"),
        ({"model": "gpt2", "embed_dim": 512, "batch_size": 64}, "cuda"),
    ],
)
def test_a_small_model_is_trained_on_the_cpu(
    settings: Settings, device: str, monkeypatch: pytest.MonkeyPatch, data: Dataset
) -> None:
    cuda = Device("cuda", "bfloat16", "a GPU")
    monkeypatch.setattr(
        launch, "choose_device", lambda name, dtype="auto": CPU if name == "cpu" else cuda
    )
    found = launch.choose_training_device(resolve({"threads": 1, **settings}), data)
    assert found.name == device
    assert device == "cuda" or found.reason == "a step is too small for cuda"


def test_a_run_is_resumed_on_another_device(
    monkeypatch: pytest.MonkeyPatch, data: Dataset, tmp_path: Path
) -> None:
    """Settings that depend on the device are chosen again; the others are kept."""
    settings: dict[str, Any] = {
        "embed_dim": 16,
        "heads": 2,
        "layers": 1,
        "block_size": 8,
        "seed": 1,
    }
    run = attnlm.train(
        data, model="transformer", steps=2, device="cpu", checkpoint_dir=tmp_path, **settings
    )
    recorded = replace(
        run.config.training,
        **dict[str, Any](device="mps", compile="off", matmul="onednn", threads=3),
    )
    replace(run, config=replace(run.config, training=recorded)).save_config()
    told: list[str] = []
    resumed = attnlm.train(
        resume=run.path, device="cpu", steps=4, on_event=lambda event: told.append(str(event))
    )
    found = resumed.config.training
    kept = {name: getattr(found, name) for name in ("compile", "matmul", "threads")}
    assert found == replace(recorded, device="cpu", steps=4, **kept)
    assert (found.matmul, found.threads) != ("onednn", 3) and resumed.metrics()[-1]["step"] == 4
    assert any("`threads` are chosen again" in text for text in told)


@pytest.mark.parametrize(
    ("settings", "gradients", "updates"),
    [
        ({}, True, True),
        ({"dropout": 0.1, "compile": "on"}, True, True),
        ({"recompute": True}, False, True),
        ({"processes": 2}, False, False),
    ],
)
def test_cuda_graphs_hold_only_steps_that_repeat_themselves(
    settings: Settings, gradients: bool, updates: bool
) -> None:
    config = resolve({"model": "gpt2", **settings})
    assert can_record_gradients(config, "cuda") == gradients
    assert can_record_updates(config.training, "cuda") == updates
    assert not can_record_updates(config.training, "cpu")


def test_small_models_generate_text_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, data: Dataset, tmp_path: Path
) -> None:
    run = attnlm.train(data, model="bigram", steps=1, checkpoint_dir=tmp_path)
    devices: list[str] = []

    def load(run: Any, *, device: str, **_: Any) -> Any:
        devices.append(device)
        return None, None

    monkeypatch.setattr(sampling, "load_model", load)
    sampling.load_sampler(run)
    monkeypatch.setattr(sampling, "is_fastest_on_cpu", lambda *_: False)
    sampling.load_sampler(run)
    assert devices == ["cpu", "auto"]


@pytest.mark.parametrize(
    ("name", "vocab_size", "expected"),
    [
        ("bigram", 65, True),
        ("transformer:embed_dim=384:layers=6", 65, native_library() is not None),
        ("gpt2:embed_dim=768:layers=12:heads=12", 50257, False),
    ],
)
def test_a_gpu_generates_text_of_large_models(name: str, vocab_size: int, expected: bool) -> None:
    assert is_fastest_on_cpu(resolve(variant(name)).spec, vocab_size) == expected


@pytest.mark.parametrize("setting", [{"matmul": "onednn"}, {"attention_kernel": "native"}], ids=str)
def test_kernels_of_a_cpu_are_refused_in_bfloat16(
    setting: dict[str, Any], data: Dataset, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=f"`{next(iter(setting))}`"):
        attnlm.train(data, model="gpt2", dtype="bfloat16", checkpoint_dir=tmp_path, **setting)
    assert not list(tmp_path.iterdir())
