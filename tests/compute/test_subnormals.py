"""Subnormal numbers are flushed to zero in every thread that computes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import attnlm
from attnlm.compute.device import Device
from attnlm.compute.native import native_library
from attnlm.compute.threads import flush_subnormals, new_pool, threads_of_torch
from attnlm.config.settings import resolve
from attnlm.data.dataset import Dataset
from attnlm.generation.module_decoder import ModuleDecoder
from attnlm.generation.native_decoder import NativeDecoder, NativeModel
from attnlm.model.language_model import LanguageModel, Transformer
from attnlm.model.native_block import with_native_blocks
from attnlm.model.recorder import record
from attnlm.training import forms
from attnlm.training.validation import validation_loss
from attnlm.workflows import evaluate as evaluation
from tests.kit import quick_run
from tests.models import needs_kernels, small_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads inherit modes on Linux")
CPU = Device("cpu", "float32", "tests")
SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
SUBNORMAL = SMALLEST_NORMAL / 4


@pytest.fixture(autouse=True)
def _mode() -> Iterator[None]:
    """Each test begins and ends in the usual mode."""
    torch.set_flush_denormal(False)
    yield
    torch.set_flush_denormal(False)


class Modes:
    """The threads in which a function was called, and whether each one flushed."""

    def __init__(self) -> None:
        self.found: dict[str, bool] = {}

    def look(self) -> None:
        name = threading.current_thread().name
        by_numpy = bool((np.full(8, SMALLEST_NORMAL, np.float32) * np.float32(0.25) == 0).all())
        by_python = sys.float_info.min / 2 == 0.0
        self.found[name] = by_python and by_numpy and self.found.get(name, True)

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def looked(*arguments: Any, **named: Any) -> Any:
            self.look()
            return function(*arguments, **named)

        return looked


@pytest.fixture
def modes() -> Modes:
    return Modes()


@pytest.mark.parametrize(
    ("model", "compile"), [("single-head", "modules"), ("transformer", "auto")]
)
def test_training_flushes_in_all_threads(
    model: str, compile: str, modes: Modes, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward, choose, loss_of_batch = Modes(), forms.choose_form, forms.batch_loss
    both = threading.Barrier(2)

    def chosen(*given: Any) -> forms.Form:
        form = choose(*given)

        def together(*batch: Tensor) -> Tensor:
            both.wait(20)
            modes.look()
            return form(*batch)

        return together

    def watched(*given: Any) -> Any:
        loss = loss_of_batch(*given)

        def loss_of(*given: Any) -> Tensor:
            found = loss(*given)
            found.register_hook(lambda gradient: backward.look())
            return found

        return loss_of

    monkeypatch.setattr(forms, "batch_loss", watched)
    monkeypatch.setattr("attnlm.training.step.choose_form", chosen)
    quick_run(dataset, model, compile=compile, threads=2, steps=3)
    assert modes.found == {"MainThread": True, "attnlm_0": True}
    assert backward.found == modes.found


def test_threads_of_a_pool_flush_though_the_thread_that_starts_them_does_not(modes: Modes) -> None:
    with new_pool(2) as pool:
        pool.submit(modes.look).result()
    assert modes.found == {"attnlm_0": True}


def test_evaluation_flushes(modes: Modes, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = attnlm.open_run(
        "transformer", checkpoint_dir=trained / "checkpoints", data_dir=trained / "data"
    )
    monkeypatch.setattr(evaluation, "validation_loss", modes.before(validation_loss))
    attnlm.evaluate(run)
    assert modes.found == {"MainThread": True}


def test_a_model_that_decodes_by_itself_flushes(
    modes: Modes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LanguageModel, "next_logits", modes.before(LanguageModel.next_logits))
    ModuleDecoder(small_model("bigram"), CPU).logits(np.array([[1]]), 0)
    assert modes.found == {"MainThread": True}


def test_recorded_activations_are_flushed(modes: Modes, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("transformer")
    monkeypatch.setattr(model, "forward", modes.before(model.forward))
    record(model, torch.tensor([[1, 2, 3]]))
    assert modes.found == {"MainThread": True}


def test_threads_in_c_flush(modes: Modes) -> None:
    """Each of the decoder's threads computes some of the logits, which are subnormal."""
    if (native := native_library()) is None:
        pytest.skip("there are no kernels here")
    parts = {"embed_dim": 16, "heads": 2, "layers": 1, "block_size": 8}
    model = resolve({"model": "llama", **parts}).spec.build(320)
    assert isinstance(model, Transformer)
    torch.nn.init.constant_(model.token_embedding.weight, 1.0)
    torch.nn.init.constant_(model.head.weight, SUBNORMAL)
    weights = {name: weight.detach().numpy() for name, weight in model.named_parameters()}
    for samples in (1, 6):
        c_model = NativeModel(model.architecture, 320, weights, native)
        decoder = NativeDecoder(c_model, samples, threads=3)
        assert (decoder.logits(np.array([[1, 2, 3]] * samples), 0) == 0).all()
        modes.look()
        assert modes.found == {"MainThread": False}  # as it was


@needs_kernels
def test_threads_of_a_block_in_c_flush() -> None:
    name = "gpt2:norm=none:mlp=none:bias=false:qkv_bias=false"
    model, native = small_model(name, block_size=70).float(), native_library()
    assert isinstance(model, Transformer) and native is not None
    block = with_native_blocks(model, native).blocks[0]
    x = torch.full((3, 70, model.architecture.width), SUBNORMAL)
    with threads_of_torch(3):
        assert (block(x) != 0).all()
        flush_subnormals()
        assert (block(x) == 0).all()
