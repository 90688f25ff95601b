from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from attnlm.base.errors import AttnlmError, NotFiniteError
from attnlm.config.settings import resolve
from attnlm.model.architecture import RUNGS
from attnlm.model.inspection import build_with_weights
from attnlm.model.ops.loss import cross_entropy
from attnlm.runs.checkpoint import load_checkpoint, save_checkpoint
from attnlm.training.optimizer import Optimizer
from tests.models import parts_of

V = 11


@pytest.mark.parametrize("rung", RUNGS)
def test_checkpoints_round_trip_exactly(rung: str, tmp_path: Path) -> None:
    muon = {} if rung in ("bigram", "average", "dot-product") else {"optimizer": "muon"}
    config = resolve({"model": rung, "block_size": 6, **muon})
    model = parts_of(config).build(V)
    optimizer = Optimizer(model, config.training)
    tokens_BT = torch.randint(V, (2, 6))
    for step in range(2):
        cross_entropy(model(tokens_BT), tokens_BT.roll(1, 1)).backward()
        optimizer.update(step)
    path = tmp_path / "last.safetensors"
    save_checkpoint(
        path, dict(model.named_parameters()), {"step": 2, "loss": 0.1}, optimizer.state()
    )

    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + size].decode()
    canonical = json.dumps(json.loads(header), sort_keys=True, separators=(",", ":"))
    assert header == canonical.ljust(size) and size % 8 == 0  # the same content, the same bytes
    facts, weights, tensors = load_checkpoint(path, config.spec, V)
    loaded = build_with_weights(config.spec, V, weights)
    assert facts == {"step": 2, "loss": 0.1}
    there = load_file(path)
    for (name, ours), theirs in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(ours, theirs) and torch.equal(ours, there[f"model.{name}"])
    assert any(tensor.any() for tensor in optimizer.state().values())
    for name, tensor in optimizer.state().items():
        assert torch.equal(tensor, tensors[name]), name


BIGRAM = parts_of(resolve({"model": "bigram"}))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of a bigram with five ids."""
    path = tmp_path / "best.safetensors"
    save_checkpoint(path, dict(BIGRAM.build(5).named_parameters()), {"step": 1})
    return path


def test_weights_that_are_not_finite_are_refused(saved: Path) -> None:
    for number in (math.nan, math.inf, -math.inf):
        table = torch.zeros(5, 5)
        table[2, 3] = number
        save_checkpoint(saved, {"table.weight": table}, {"step": 1})
        with pytest.raises(NotFiniteError):
            load_checkpoint(saved, BIGRAM, 5)


def test_every_changed_byte_and_every_truncation_is_noticed(saved: Path) -> None:
    whole = saved.read_bytes()
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << (place % 8)
        for damaged in (changed, whole[:place]):
            saved.write_bytes(damaged)
            with pytest.raises(AttnlmError, match=r"best\.safetensors"):
                load_checkpoint(saved, BIGRAM, 5)


def test_another_model_is_refused_before_its_tensors_are_read(saved: Path) -> None:
    with pytest.raises(AttnlmError, match="does not contain the model") as caught:
        load_checkpoint(saved, BIGRAM, 6)
    assert caught.value.message.endswith(": table.weight has the shape (5, 5), not (6, 6)")
    assert "config.json" in caught.value.hint
    with pytest.raises(AttnlmError, match="checkpoint not found"):
        load_checkpoint(saved.with_name("none.safetensors"), BIGRAM, 5)
    # Somebody else's safetensors, without a digest, and a pickle, which is never loaded.
    save_file({"model.table.weight": torch.zeros(5, 5)}, str(saved))
    with pytest.raises(AttnlmError, match="damaged"):
        load_checkpoint(saved, BIGRAM, 5)
    torch.save({"model.table.weight": torch.zeros(5, 5)}, saved)
    with pytest.raises(AttnlmError, match="damaged"):
        load_checkpoint(saved, BIGRAM, 5)


def sealed(path: Path, tensors: dict[str, torch.Tensor], described: str = '{"step": 1}') -> None:
    """Write a checkpoint of any content with a valid digest."""
    digest = hashlib.sha256(described.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.numpy().tobytes())
    save_file(tensors, str(path), {"facts": described, "digest": digest.hexdigest()})


def test_files_with_a_valid_digest_are_still_checked(tmp_path: Path) -> None:
    config, path = BIGRAM, tmp_path / "last.safetensors"
    table = torch.zeros(5, 5)
    whole = {"model.table.weight": table, "optimizer.table.weight/mean": table.clone()}
    sealed(path, whole)
    assert load_checkpoint(path, config, 5)[0] == {"step": 1}
    mean, many = "optimizer.table.weight/mean", {f"more{i}": table.clone() for i in range(9)}
    for wrong, says in (
        ({"model.table.weight": table.double()}, "table.weight has the type F64, not F32"),
        ({mean: table.clone()}, ": table.weight is missing"),
        ({**whole, mean: torch.zeros(5, 6)}, f"{mean} has the shape (5, 6), not (5, 5)"),
        (
            {**whole, "optimizer.tabel.weight/mean": table.clone()},
            ": optimizer.tabel.weight/mean is not a tensor of this model",
        ),
        ({**whole, "more": table.clone()}, ": more is not a tensor of this model"),
        ({**whole, **many}, "more2 is not a tensor of this model and 6 more"),
    ):
        sealed(path, wrong)
        with pytest.raises(AttnlmError, match="does not contain the model") as caught:
            load_checkpoint(path, config, 5)
        assert str(caught.value.message).endswith(says)
    for described in ("[" * 10_000, "", "NaNs"):
        sealed(path, whole, described)
        with pytest.raises(AttnlmError, match=r"last\.safetensors"):
            load_checkpoint(path, config, 5)
