"""Memory and precision of GPUs, simulated on a CPU: bfloat16, autocast, and large vocabularies."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import attnlm
from attnlm.base.setting_fields import Settings
from attnlm.compute.device import Device
from attnlm.compute.native import native_library
from attnlm.config.settings import resolve
from attnlm.config.variants import variant
from attnlm.data.dataset import Dataset
from attnlm.generation import sampling
from attnlm.generation.decoders import ModuleDecoder, fastest_decoding, is_fastest_on_cpu
from attnlm.model.ops.loss import LOGITS_AT_ONCE, cross_entropy, linear_cross_entropy
from attnlm.training.cuda_graph import (
    FIRST_CALLS,
    CudaGraph,
    can_record_gradients,
    can_record_updates,
)
from attnlm.workflows import autotune as launch
from attnlm.workflows.autotune import autotune
from tests.models import V, small_model, some_ids

CPU = Device("cpu", "float32", "tests")


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
    compiler: str,
    settings: Settings,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    dataset: Dataset,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(shutil, "which", lambda name: name == compiler)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    cuda = Device("cuda", "bfloat16", "tests")
    changes: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", changes.append)
    settled = autotune(resolve({"model": "transformer", **settings}), cuda, dataset)
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
    settings: Settings, device: str, monkeypatch: pytest.MonkeyPatch, dataset: Dataset
) -> None:
    cuda = Device("cuda", "bfloat16", "a GPU")
    monkeypatch.setattr(
        launch, "choose_device", lambda name, dtype="auto": CPU if name == "cpu" else cuda
    )
    found = launch.choose_training_device(resolve({"threads": 1, **settings}), dataset)
    assert found.name == device
    assert device == "cuda" or found.reason == "a step is too small for cuda"


def test_a_run_is_resumed_on_another_device(train: Any) -> None:
    """Settings that depend on the device are chosen again; the others are kept."""
    run = train("transformer:heads=2:embed_dim=16", steps=2)
    made: dict[str, Any] = {"device": "mps", "compile": "off", "matmul": "onednn", "threads": 3}
    recorded = replace(run.config.training, **made)
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


def test_small_models_generate_text_on_the_cpu(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run, devices = train("bigram", steps=1), list[str]()

    def load(run: Any, *, device: str, **_: Any) -> Any:
        devices.append(device)
        return None, None

    monkeypatch.setattr(sampling, "load_model", load)
    for is_fastest in (True, False):
        monkeypatch.setattr(sampling, "is_fastest_on_cpu", lambda *_, is_so=is_fastest: is_so)
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


# --- CUDA graphs ----------------------------------------------------------------------------------


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


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """A stand-in for a recorded graph, which is replayed without a GPU."""
    graph = mock.Mock()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "stream")
    monkeypatch.setattr(torch.cuda, "set_stream", graph.set_stream)
    return graph


def test_a_replay_reads_its_inputs_where_the_recorded_function_read_them(
    recording: mock.Mock,
) -> None:
    seen: list[torch.Tensor] = []

    def double(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return 2 * x

    graph: CudaGraph[torch.Tensor] = CudaGraph()
    for i in range(FIRST_CALLS + 2):
        assert graph.call(double, torch.full((2,), float(i))) is not None
    assert recording.replay.call_count == FIRST_CALLS + 2 - (len(seen) - 1)
    assert seen[-1].tolist() == [FIRST_CALLS + 1.0] * 2
    with pytest.raises(ValueError, match="recorded for"):
        graph.call(double, torch.zeros(1))


def test_a_function_that_cannot_be_recorded_is_called_as_before(recording: mock.Mock) -> None:
    results = iter([1, 2, 3, torch.OutOfMemoryError(), 4, 5, 6])

    def give() -> int:
        result = next(results)
        if isinstance(result, Exception):
            raise result
        return int(result)

    graph: CudaGraph[int] = CudaGraph()
    assert [graph.call(give) for _ in range(6)] == [1, 2, 3, 4, 5, 6]
    recording.replay.assert_not_called()
    recording.set_stream.assert_called_with("stream")
