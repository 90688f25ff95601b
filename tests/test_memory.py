"""What clearly can't fit is refused, with what to lower, before anything is made."""

from __future__ import annotations

from pathlib import Path

import pytest

import attnlm
from attnlm.base.errors import AttnlmError
from attnlm.compute.device import Device
from attnlm.config.settings import resolve
from attnlm.training import memory
from attnlm.training.memory import FACTOR, check_memory, estimate_memory

CPU = Device("cpu", "float32", "as asked for")


@pytest.mark.parametrize(
    ("settings", "vocab_size", "parameters", "hint"),
    [
        ({"model": "transformer", "batch_size": 4096}, 65, 10_000, "--batch-size or --block-size"),
        ({"model": "transformer", "batch_size": 1}, 65, 10**9, "--embed-dim, --heads or --layers"),
        ({"model": "bigram", "batch_size": 1}, 50_000, 50_000**2, "--tokenizer bpe:1024"),
    ],
)
def test_what_takes_more_than_there_is_is_refused(
    settings: dict[str, str | int],
    vocab_size: int,
    parameters: int,
    hint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = resolve(settings)
    takes = estimate_memory(config, vocab_size, parameters).total
    monkeypatch.setattr(memory, "_memory_of", lambda device: int(takes / FACTOR) + 1)
    check_memory(config, vocab_size, parameters, CPU)  # it may fit, as the estimate may be off
    monkeypatch.setattr(memory, "_memory_of", lambda device: int(takes / FACTOR) - 1)
    with pytest.raises(AttnlmError, match="and cpu has") as caught:
        check_memory(config, vocab_size, parameters, CPU)
    assert hint in caught.value.hint
    monkeypatch.setattr(memory, "_memory_of", lambda device: None)  # a device that does not tell
    check_memory(config, vocab_size, parameters, CPU)


def test_nothing_is_made_of_a_run_that_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("the cat sat on the mat.\n" * 99)
    dataset = attnlm.prepare(tmp_path / "text.txt", data_dir=tmp_path / "data")
    monkeypatch.setattr(memory, "_memory_of", lambda device: 1000)
    with pytest.raises(AttnlmError, match="of memory, and cpu has"):
        attnlm.train(dataset.path, device="cpu", checkpoint_dir=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
