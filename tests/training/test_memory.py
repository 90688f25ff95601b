"""Memory and precision, of a CPU and of GPUs that are simulated on it.

Jobs that clearly exceed memory are refused before anything is made, with what to lower.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import attnlm
from attnlm.base.errors import AttnlmError
from attnlm.base.events import Note
from attnlm.base.own_code import named_code
from attnlm.base.setting_fields import Settings
from attnlm.cli import app, exits
from attnlm.compute.device import Device
from attnlm.compute.native import native_library
from attnlm.config.settings import resolve
from attnlm.config.variants import variant
from attnlm.data.dataset import Dataset
from attnlm.generation import sampling
from attnlm.generation.module_decoder import ModuleDecoder, decoders_of
from attnlm.generation.native_decoder import is_fastest_on_cpu
from attnlm.model.loss import LOGITS_AT_ONCE, cross_entropy, linear_cross_entropy
from attnlm.model.spec import parameter_count
from attnlm.training import forms, memory
from attnlm.training.cuda_graph import (
    FIRST_CALLS,
    CudaGraph,
    can_record_gradients,
    can_record_updates,
)
from attnlm.training.forms import Form
from attnlm.training.memory import FACTOR, affordable_micro_batch, check_memory, estimate_memory
from attnlm.training.validation import windows_at_once
from attnlm.workflows import autotune as autotuning
from tests.kit import QUICK
from tests.models import V, small_model, some_ids

CPU = Device("cpu", "float32", "requested")


@pytest.mark.parametrize(
    ("settings", "vocab_size", "needs_model", "hint"),
    [
        ({"model": "transformer", "batch_size": 4096}, 65, False, "lower `batch_size` or `block_"),
        *(
            ({"block_size": 2**20, "batch_size": 4, "threads": 1, **settings}, 65, False, hint)
            for settings, hint in (
                ({"micro_batch_size": 2}, "lower `micro_batch_size` or `block_size`"),
                ({"micro_batch_size": 1}, "lower `block_size`"),
                ({"batch_size": 1}, "lower `block_size`"),
                ({"processes": 4}, "lower `block_size`"),
            )
        ),
        ({"model": "llama", "layers": 99, "batch_size": 1}, 65, True, "`heads`, `head_size` or"),
        ({"head_size": 2**15, "block_size": 8, "batch_size": 1}, 65, True, "`head_size`"),
        ({"model": "bigram", "batch_size": 32}, 50_000, True, "tokenizer bpe:1024"),
    ],
)
def test_jobs_that_exceed_memory_are_refused(
    settings: Settings,
    vocab_size: int,
    needs_model: bool,
    hint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The estimate may be off by a factor, but not weights, gradients and the optimizer's state."""
    config = resolve(settings)
    estimate = estimate_memory(config, vocab_size, "cpu")
    certain = 16 * parameter_count(config.spec, vocab_size)
    there = max(int(estimate.total / FACTOR), certain)
    assert (there == certain) == needs_model
    monkeypatch.setattr(memory, "_available_memory", lambda *_: there * 101 // 100)
    check_memory(config, vocab_size, CPU)
    monkeypatch.setattr(memory, "_available_memory", lambda *_: there * 99 // 100)
    with pytest.raises(AttnlmError, match="but cpu has") as caught:
        check_memory(config, vocab_size, CPU)
    assert hint in caught.value.hint
    monkeypatch.setattr(memory, "_available_memory", lambda *_: None)  # unknown
    check_memory(config, vocab_size, CPU)


@pytest.mark.parametrize(
    ("model", "width", "measured"), [("gpt2", 256, 688), ("transformer", 128, 405)]
)
def test_large_vocabularies_are_estimated_from_above(model: str, width: int, measured: int) -> None:
    """The peaks of one thread's training steps with GPT-2's vocabulary, in MB."""
    sizes: Settings = {"layers": 4, "embed_dim": width, "heads": 4, "block_size": 256}
    more: Settings = {"batch_size": 4, "tie_embeddings": True, "optimizer": "adamw", "threads": 1}
    config = resolve({"model": model, **sizes, **more})
    assert measured < estimate_memory(config, 50_257, "cpu").total / 1e6 < 1.25 * measured


def test_a_compiled_step_holds_all_logits() -> None:
    gpt2: Settings = {"model": "gpt2", "layers": 12, "embed_dim": 768, "heads": 12}
    gpt2 |= {"block_size": 1024, "batch_size": 64}
    compiled, eager = (
        estimate_memory(resolve({**gpt2, "compile": compile}), 50_257, "cpu").batch
        for compile in ("torch", "modules")
    )
    assert compiled - eager > 2 * 4 * 64 * 1024 * 50_257


def test_the_micro_batch_fits_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve({"model": "transformer", "batch_size": 64, "threads": 1})

    def of(size: int | None) -> int:
        return estimate_memory(config.with_training(micro_batch_size=size), 65, "cpu").total

    least = of(1) / 0.71
    for there, expected in (
        *((of(None) / 0.69, None), (of(None) / 0.71, 32), (of(8) / 0.69, 8)),
        *((of(1) / 0.69, 1), (least, 1), (None, None)),
    ):
        monkeypatch.setattr(memory, "_available_memory", lambda *_, there=there: there)
        assert affordable_micro_batch(config, 65, CPU) == expected


def test_a_machine_is_shared_by_its_processes_and_a_gpu_is_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "machine_memory", lambda: 8 * 10**9)
    training = resolve({"processes": 4}).training
    assert memory._available_memory(training, CPU) == 2 * 10**9
    assert memory._available_memory(training, Device("cuda", "float32", "")) is None


def test_a_refused_run_leaves_no_files(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_available_memory", lambda *_: 1000)
    runs = train.keywords["checkpoint_dir"]
    with pytest.raises(AttnlmError, match="of memory, but cpu has"):
        train()
    assert not runs.exists()


@pytest.mark.parametrize(
    ("settings", "vocab_size", "windows"),
    [
        ({"model": "bigram", "block_size": 8}, 65, 256),  # 2,048 tokens
        ({"model": "transformer", "embed_dim": 384, "heads": 6, "block_size": 256}, 65, 8),
        ({"block_size": 8}, 2**16, 256),  # only part of the logits
        ({"model": "bigram", "block_size": 8}, 2**16, 32),
        ({"heads": 1, "head_size": 2**15, "block_size": 8}, 65, 31),  # 128 MB
        ({"heads": 2**7, "head_size": 1, "embed_dim": 64, "block_size": 256}, 65, 8),
        ({"heads": 1, "head_size": 2**16, "block_size": 64}, 65, 1),
    ],
)
def test_evaluation_batches_fit_into_memory(
    settings: dict[str, str | int], vocab_size: int, windows: int
) -> None:
    """Micro-batches have 2,048 tokens, fewer if the vocabulary or the activations are large."""
    config = resolve({**settings, "threads": 2})
    assert windows_at_once(config.spec, vocab_size, "cpu") == windows


SMALL = "transformer:heads=2:embed_dim=16:dropout=0.1"


def run_out_of_memory(patch: pytest.MonkeyPatch, when: Callable[[int, int], bool]) -> None:
    """Let a form run out of a GPU's memory when `when(windows, number of the call)` is true."""
    choose = forms.choose_form

    def chosen(*given: Any) -> Form:
        form: Form = choose(*given)
        calls = itertools.count()

        def limited(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            loss = form(inputs, targets)
            if when(len(inputs), next(calls)):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return loss

        return limited

    patch.setattr("attnlm.training.step.choose_form", chosen)


def test_the_micro_batch_is_halved_until_the_first_step_fits(
    train: Any, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_out_of_memory(monkeypatch, lambda windows, call: windows > 2)
    events: list[object] = []
    run = train(SMALL, batch_size=24, on_event=events.append)
    notes = [event.text for event in events if isinstance(event, Note)]
    assert notes == ["memory ran out: `micro_batch_size` 1 is used from now on"]
    assert run.config.training.micro_batch_size == 1
    assert attnlm.open_run(run.path).config.training.micro_batch_size == 1
    told = train(SMALL, batch_size=24, micro_batch_size=1)
    assert run.last.read_bytes() == told.last.read_bytes()
    assert attnlm.train(resume=run, steps=5).config.training.micro_batch_size == 1
    about: dict[str, Any] = {**QUICK, **variant(SMALL), "batch_size": 24, "device": "cpu"}
    assert attnlm.estimate(dataset, **about).config.training.micro_batch_size == 1


def test_a_window_that_exceeds_the_memory_and_memory_that_runs_out_later_are_errors(
    train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        run_out_of_memory(patch, lambda windows, call: call > 0)
        with pytest.raises(torch.OutOfMemoryError):
            train(SMALL)
    run_out_of_memory(monkeypatch, lambda windows, call: True)
    with pytest.raises(AttnlmError, match="one window of `block_size` 12 does not fit") as caught:
        train(SMALL)
    assert "lower `block_size`" in caught.value.hint


def test_a_command_that_finds_no_memory_says_what_to_lower(
    capsys: pytest.CaptureFixture[str],
) -> None:
    app.root_command()  # which names the options
    assert exits.run(lambda: torch.empty(2**60)) == 1
    said = capsys.readouterr().err
    assert "there is not enough memory" in said and "--batch-size" in said


# --- Precision and devices ------------------------------------------------------------------------


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
    decoder = decoders_of(model, device)(2)
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
        ("cc", {"steps": 10**9}, "torch"),
        ("cc", {"steps": 10}, "modules"),
        ("cc", {"budget": 3600.0}, "torch"),
        ("cc", {"budget": 60.0}, "modules"),
        ("cc", {"steps": 10**9, "micro_batch_size": 4}, "torch"),
        ("", {"steps": 10**9}, "modules"),
        ("", {"budget": 3600.0}, "modules"),
    ],
)
def test_long_training_on_a_gpu_is_compiled_if_a_compiler_exists(
    compiler: str, settings: Settings, expected: str, dataset: Dataset, monkeypatch: Any
) -> None:
    """A GPU of 2018 without bfloat16 computes in float32."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(shutil, "which", lambda name: name == compiler)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    changes: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", changes.append)
    config = resolve({"model": "transformer", **settings})
    for dtype in ("bfloat16", "float32"):
        cuda = Device("cuda", dtype, "tests")
        found = autotuning.autotune(config, cuda, dataset).training
        assert (found.compile, found.dtype) == (expected, dtype)
        assert found.micro_batch_size == settings.get("micro_batch_size")
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
    devices = {"cpu": CPU, "auto": (cuda := Device("cuda", "bfloat16", "a GPU")), "cuda": cuda}
    monkeypatch.setattr(autotuning, "choose_device", lambda name, *_: devices[name])
    found = autotuning.choose_training_device(resolve({"threads": 1, **settings}), dataset)
    assert found.name == device
    assert device == "cuda" or found.reason == "a step is too small for cuda"


def test_a_run_is_resumed_on_another_device(train: Any) -> None:
    """Settings that depend on the device are chosen again; the others are kept."""
    run = train("transformer:heads=2:embed_dim=16", steps=2)
    made: dict[str, Any] = {"device": "mps", "compile": "torch", "threads": 3}
    recorded = replace(run.config.training, **made)
    replace(run, config=replace(run.config, training=recorded)).save_config()
    told: list[object] = []
    resumed = attnlm.train(resume=run.path, device="cpu", steps=4, on_event=told.append)
    found = resumed.config.training
    kept = {name: getattr(found, name) for name in ("compile", "threads")}
    assert found == replace(recorded, device="cpu", steps=4, **kept)
    assert (found.compile, found.threads) != ("torch", 3) and resumed.metrics()[-1]["step"] == 4
    assert "`threads` are chosen again" in str(told)


def test_small_models_generate_text_on_the_cpu(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run, asked = train("transformer", steps=1), list[str]()

    def load(run: Any, *, device: str, **_: Any) -> Any:
        asked.append(device)
        raise InterruptedError

    monkeypatch.setattr(sampling, "load_model", load)
    monkeypatch.setattr(sampling, "decoders_from_weights", lambda *_: None)
    for is_fastest, has_gpu in ((True, True), (False, True), (False, False)):
        monkeypatch.setattr(sampling, "is_fastest_on_cpu", lambda *_, is_so=is_fastest: is_so)
        monkeypatch.setattr(sampling, "has_gpu_driver", lambda has_gpu=has_gpu: has_gpu)
        with pytest.raises(InterruptedError):
            sampling.load_sampler(run)
    assert asked == ["cpu", "auto", "cpu"]


@pytest.mark.parametrize(
    ("name", "vocab_size", "expected"),
    [
        ("bigram", 65, True),
        ("transformer:embed_dim=384:layers=6", 65, native_library() is not None),
        ("gpt2:embed_dim=768:layers=12:heads=12", 50257, False),
    ],
)
def test_text_of_large_models_is_not_generated_fastest_on_the_cpu(
    name: str, vocab_size: int, expected: bool
) -> None:
    assert is_fastest_on_cpu(resolve(variant(name)).spec, vocab_size) == expected


# --- CUDA graphs ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "gradients", "updates"),
    [
        ({}, True, True),
        ({"dropout": 0.1, "compile": "torch"}, True, True),
        ({"scores": named_code("alibi")}, False, True),
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
    results: Iterator[Any] = iter([1, 2, 3, torch.OutOfMemoryError(), 4, 5, 6])

    def give() -> int:
        result = next(results)
        if isinstance(result, Exception):
            raise result
        return int(result)

    graph: CudaGraph[int] = CudaGraph()
    assert [graph.call(give) for _ in range(6)] == [1, 2, 3, 4, 5, 6]
    recording.replay.assert_not_called()
    recording.set_stream.assert_called_with("stream")
