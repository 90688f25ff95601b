"""Jobs that clearly exceed memory are refused before anything is made, with what to lower."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import attnlm
from attnlm.base.errors import AttnlmError
from attnlm.base.setting_fields import Settings
from attnlm.compute.device import Device
from attnlm.config.settings import resolve
from attnlm.model.inspection import parameter_count
from attnlm.training import memory
from attnlm.training.batch_split import windows_at_once
from attnlm.training.memory import (
    FACTOR,
    affordable_micro_batch,
    check_memory,
    estimate_memory,
)
from attnlm.workflows import autotune as autotuning
from tests.models import prepared

CPU = Device("cpu", "float32", "requested")


@pytest.mark.parametrize(
    ("settings", "vocab_size", "parameters", "bytes_each", "hint"),
    [
        ({"model": "transformer", "batch_size": 4096}, 65, 10_000, 0, "`batch_size` or `block_"),
        ({"model": "transformer", "batch_size": 1}, 65, 10**9, 16, "`heads`, `head_size` or"),
        ({"heads": 1, "head_size": 2**15, "batch_size": 1}, 65, 10**4, 0, "`head_size`"),
        ({"model": "bigram", "batch_size": 32}, 50_000, 50_000**2, 16, "tokenizer bpe:1024"),
    ],
)
def test_jobs_that_exceed_memory_are_refused(
    settings: dict[str, str | int],
    vocab_size: int,
    parameters: int,
    bytes_each: int,
    hint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The estimate may be off by a factor, but not weights, gradients and the optimizer's state."""
    config = resolve(settings)
    sizes = config, vocab_size, parameters, 10**4
    certain = bytes_each * parameters
    there = max(int(estimate_memory(*sizes, "cpu").total / FACTOR), certain)
    monkeypatch.setattr(memory, "_available_memory", lambda device: there * 101 // 100)
    check_memory(*sizes, CPU)
    monkeypatch.setattr(memory, "_available_memory", lambda device: there * 99 // 100)
    with pytest.raises(AttnlmError, match="but cpu has") as caught:
        check_memory(*sizes, CPU)
    assert hint in caught.value.hint
    monkeypatch.setattr(memory, "_available_memory", lambda device: None)  # unknown
    check_memory(*sizes, CPU)


def test_the_micro_batch_fits_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve({"model": "transformer", "batch_size": 64, "threads": 1})
    sizes = 65, 10_000, 10**4

    def of(size: int | None) -> int:
        training = replace(config.training, micro_batch_size=size)
        return estimate_memory(replace(config, training=training), *sizes, "cpu").total

    for there, expected in (
        (of(None) / 0.69, None),
        (of(None) / 0.71, 32),
        (of(8) / 0.69, 8),
        (of(1) / 0.69, 1),
        (of(1) / 0.71, 1),  # the least there is
        (None, None),
    ):
        monkeypatch.setattr(memory, "_available_memory", lambda device, there=there: there)
        assert affordable_micro_batch(config, *sizes, CPU) == expected


def test_a_refused_run_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = prepared(tmp_path, "the cat sat on the mat.\n" * 99, "text")
    monkeypatch.setattr(memory, "_available_memory", lambda device: 1000)
    with pytest.raises(AttnlmError, match="of memory, but cpu has"):
        attnlm.train(dataset.path, device="cpu", checkpoint_dir=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


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
    if windows > 1 and settings.get("model") != "bigram":
        assert estimate_memory(config, vocab_size, 0, 10**6, "cpu").evaluation <= 2**28


def test_a_compiled_step_holds_all_logits() -> None:
    gpt2: Settings = {"model": "gpt2", "layers": 12, "embed_dim": 768, "heads": 12}
    gpt2 |= {"block_size": 1024, "batch_size": 64}
    compiled, eager = (
        estimate_memory(resolve({**gpt2, "compile": compile}), 50_257, 124 * 10**6, 10**6, "cuda")
        for compile in ("on", "off")
    )
    assert compiled.logits >= 4 * 64 * 1024 * 50_257 > 10 * eager.logits


@pytest.mark.parametrize("micro", [None, 4])
def test_precision_and_compilation_are_resolved_before_memory_is_estimated(
    micro: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU without bfloat16 computes in float32, and a long training run there is compiled."""
    dataset = prepared(tmp_path, "the cat sat on the mat.\n" * 99, "text")
    monkeypatch.setattr(autotuning, "_is_long", lambda config, dataset: True)
    monkeypatch.setattr(memory, "_available_memory", lambda device: None)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "somewhere")
    given: Settings = {} if micro is None else {"micro_batch_size": micro}
    config = resolve({"model": "transformer", "steps": 5, **given})
    old = Device("cuda", "float32", "a GPU of 2018")
    found = autotuning.autotune(config, old, dataset).training
    assert (found.dtype, found.compile, found.micro_batch_size) == ("float32", "on", micro)


@pytest.mark.parametrize(
    ("model", "width", "measured"), [("gpt2", 256, 688), ("transformer", 128, 405)]
)
def test_large_vocabularies_are_estimated_from_above(model: str, width: int, measured: int) -> None:
    """The peaks of one thread's training steps with GPT-2's vocabulary, in MB."""
    sizes: Settings = {"layers": 4, "embed_dim": width, "heads": 4, "block_size": 256}
    more: Settings = {"batch_size": 4, "tie_embeddings": True, "optimizer": "adamw", "threads": 1}
    config = resolve({"model": model, **sizes, **more})
    parameters = parameter_count(config.spec, 50_257)
    estimate = estimate_memory(config, 50_257, parameters, 1024, "cpu").total / 1e6
    assert measured < estimate < 1.25 * measured
