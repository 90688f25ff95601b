"""Jobs that clearly exceed memory are refused before anything is made, with what to lower."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import attnlm
from attnlm.base.errors import AttnlmError
from attnlm.base.events import Note
from attnlm.base.setting_fields import Settings
from attnlm.compute.device import Device
from attnlm.config.settings import resolve
from attnlm.config.variants import variant
from attnlm.data.dataset import Dataset
from attnlm.model.inspection import parameter_count
from attnlm.training import memory
from attnlm.training.batch_split import windows_at_once
from attnlm.training.memory import FACTOR, affordable_micro_batch, check_memory, estimate_memory
from attnlm.training.step import Replica
from attnlm.workflows import autotune as autotuning
from tests.kit import QUICK

CPU = Device("cpu", "float32", "requested")


@pytest.mark.parametrize(
    ("settings", "vocab_size", "needs_model", "hint"),
    [
        ({"model": "transformer", "batch_size": 4096}, 65, False, "`batch_size` or `block_"),
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
        for compile in ("on", "off")
    )
    assert compiled - eager > 2 * 4 * 64 * 1024 * 50_257


def test_the_micro_batch_fits_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve({"model": "transformer", "batch_size": 64, "threads": 1})

    def of(size: int | None) -> int:
        return estimate_memory(config.with_training(micro_batch_size=size), 65, "cpu").total

    for there, expected in (
        (of(None) / 0.69, None),
        (of(None) / 0.71, 32),
        (of(8) / 0.69, 8),
        (of(1) / 0.69, 1),
        (of(1) / 0.71, 1),  # the least there is
        (None, None),
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


@pytest.mark.parametrize("micro", [None, 4])
def test_the_precision_compilation_and_micro_batch_of_an_old_gpu(
    micro: int | None, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU without bfloat16 computes in float32, and a long training run there is compiled."""
    monkeypatch.setattr(autotuning, "_is_long", lambda config, dataset: True)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "somewhere")
    given: Settings = {} if micro is None else {"micro_batch_size": micro}
    config = resolve({"model": "transformer", "steps": 5, **given})
    old = Device("cuda", "float32", "a GPU of 2018")
    found = autotuning.autotune(config, old, dataset).training
    assert (found.dtype, found.compile, found.micro_batch_size) == ("float32", "on", micro)


SMALL = "transformer:heads=2:embed_dim=16:dropout=0.1"


def run_out_of_memory(patch: pytest.MonkeyPatch, when: Callable[[Replica, int], bool]) -> None:
    """Let a backward pass run out of a GPU's memory when `when(replica, step)` is true."""
    backward = Replica.backward

    def limited(self: Replica, step: int, *batch: Any) -> torch.Tensor:
        loss = backward(self, step, *batch)
        if when(self, step):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss

    patch.setattr(Replica, "backward", limited)


def test_the_micro_batch_is_halved_until_the_first_step_fits(
    train: Any, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_out_of_memory(monkeypatch, lambda replica, step: replica._windows > 2)
    events: list[object] = []
    run = train(SMALL, batch_size=24, on_event=events.append)
    notes = [event.text for event in events if isinstance(event, Note)]
    assert notes == ["memory ran out: `micro_batch_size` 1 is used from now on"]
    assert run.config.training.micro_batch_size == 1
    assert attnlm.open_run(run.path).config.training.micro_batch_size == 1
    told = train(SMALL, batch_size=24, micro_batch_size=1)
    assert run.last.read_bytes() == told.last.read_bytes()
    assert attnlm.train(resume=run, steps=5).config.training.micro_batch_size == 1
    about: Settings = {**QUICK, **variant(SMALL), "batch_size": 24, "device": "cpu"}
    assert attnlm.estimate(dataset, **about).config.training.micro_batch_size == 1


def test_a_window_that_exceeds_the_memory_of_a_gpu_is_an_error(
    train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_out_of_memory(monkeypatch, lambda replica, step: True)
    with pytest.raises(AttnlmError, match="one window of `block_size` 12 does not fit") as caught:
        train(SMALL)
    assert "lower `block_size`" in caught.value.hint


def test_memory_that_runs_out_later_is_an_error(
    train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_out_of_memory(monkeypatch, lambda replica, step: step > 0)
    with pytest.raises(torch.OutOfMemoryError):
        train(SMALL)
