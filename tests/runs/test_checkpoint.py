"""The files of a run: checkpoints, and a config.json that another version wrote or a user."""

from __future__ import annotations

import errno
import hashlib
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import attnlm
from attnlm.base.errors import AttnlmError, NotFiniteError
from attnlm.base.files import read_json, write_json
from attnlm.config.settings import RECORD_OF, resolve
from attnlm.model.building import build_with_weights
from attnlm.model.loss import cross_entropy
from attnlm.runs import checkpoint
from attnlm.runs.checkpoint import load_checkpoint, save_checkpoint
from attnlm.training.optimizer import Optimizer
from tests.models import parts_of

V = 11


@pytest.mark.parametrize("rung", ["bigram", "single-head", "transformer"])
def test_checkpoints_round_trip_exactly(rung: str, tmp_path: Path) -> None:
    muon = {} if rung == "bigram" else {"optimizer": "muon"}
    config = resolve({"model": rung, "block_size": 6, **muon})
    model = parts_of(config).build(V)
    optimizer = Optimizer(model, config.training)
    tokens_BT = torch.randint(V, (2, 6))
    for step in range(2):
        cross_entropy(model(tokens_BT), tokens_BT.roll(1, 1)).backward()
        optimizer.update(step, 0.1)
    path = tmp_path / "last.safetensors"
    save_checkpoint(
        path, dict(model.named_parameters()), {"step": 2, "loss": 0.1}, optimizer.state()
    )

    again = tmp_path / "again.safetensors"  # the same content, the same bytes
    reordered = dict(reversed([*model.named_parameters()]))
    save_checkpoint(again, reordered, {"loss": 0.1, "step": 2}, optimizer.state())
    assert path.read_bytes() == again.read_bytes()
    (tmp_path / "like").touch()  # as readable as other files
    assert path.stat().st_mode == (tmp_path / "like").stat().st_mode
    assert {p.name for p in tmp_path.iterdir()} == {path.name, again.name, "like"}
    facts, weights, tensors = load_checkpoint(path, config.spec, V)
    loaded = build_with_weights(config.spec, V, weights)
    assert facts == {"step": 2, "loss": 0.1, "sha256": facts["sha256"]}
    there = load_file(path)
    for (name, ours), theirs in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(ours, theirs) and torch.equal(ours, there[f"model.{name}"])
    assert any(tensor.any() for tensor in optimizer.state().values())
    for name, tensor in optimizer.state().items():
        assert np.array_equal(tensor, tensors[name]), name


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
    header = 8 + int.from_bytes(whole[:8], "little")
    for place in (*range(header), *range(header, len(whole), 7), len(whole) - 1):
        changed = bytearray(whole)
        changed[place] ^= 1 << (place % 8)
        for damaged in (changed, whole[:place]):
            saved.write_bytes(damaged)
            with pytest.raises(AttnlmError, match=r"best\.safetensors"):
                load_checkpoint(saved, BIGRAM, 5)


def test_a_checkpoint_that_training_replaces_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = resolve({"model": "bigram"})
    model = parts_of(config).build(V)
    path = tmp_path / "last.safetensors"
    save_checkpoint(path, dict(model.named_parameters()), {"step": 1})
    hash_of, saved = checkpoint._hash, [2, 3]

    def after_a_save(path: Path, written: str) -> str:
        if saved and path.name == "last.safetensors":
            save_checkpoint(path, dict(model.named_parameters()), {"step": saved.pop(0)})
        return hash_of(path, written)

    monkeypatch.setattr(checkpoint, "_hash", after_a_save)
    assert load_checkpoint(path, config.spec, V)[0]["step"] == 3


def test_another_model_is_refused(saved: Path) -> None:
    with pytest.raises(AttnlmError, match="does not contain the model") as caught:
        load_checkpoint(saved, BIGRAM, 6)
    assert caught.value.message.endswith(": table.weight is float32 (5, 5), not float32 (6, 6)")
    assert "config.json" in caught.value.hint
    with pytest.raises(AttnlmError, match="checkpoint not found"):
        load_checkpoint(saved.with_name("none.safetensors"), BIGRAM, 5)
    # Somebody else's safetensors, without a digest, and a pickle, which is never loaded.
    save_file({"model.table.weight": torch.zeros(5, 5)}, str(saved))
    with pytest.raises(AttnlmError, match=r"damaged.*\nhint: .*other checkpoint"):
        load_checkpoint(saved, BIGRAM, 5)
    torch.save({"model.table.weight": torch.zeros(5, 5)}, saved)
    with pytest.raises(AttnlmError, match="damaged"):
        load_checkpoint(saved, BIGRAM, 5)


@pytest.mark.parametrize(
    ("told", "code"), [("I/O error: full (os error 28)", errno.ENOSPC), ("lost", errno.EIO)]
)
def test_a_checkpoint_that_cannot_be_written_leaves_the_older_one(
    told: str, code: int, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise SafetensorError(told)

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    whole = saved.read_bytes()
    with pytest.raises(OSError, match=os.strerror(code)) as caught:
        save_checkpoint(saved, dict(BIGRAM.build(5).named_parameters()), {"step": 2})
    assert (caught.value.errno, caught.value.filename) == (code, str(saved))
    assert saved.read_bytes() == whole and [*saved.parent.iterdir()] == [saved]


def sealed(path: Path, tensors: dict[str, torch.Tensor], described: str = '{"step": 1}') -> None:
    """Write a checkpoint of any content with a valid digest."""
    zeros = "0" * 64
    whole = described.replace("}", f', "sha256": "{zeros}"}}')
    save_file(tensors, str(path), {"facts": whole})
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    path.write_bytes(content.replace(zeros.encode(), digest.encode()))


def test_files_with_a_valid_digest_are_still_checked(tmp_path: Path) -> None:
    config, path = BIGRAM, tmp_path / "last.safetensors"
    table = torch.zeros(5, 5)
    whole = {"model.table.weight": table, "optimizer.table.weight/mean": table.clone()}
    sealed(path, whole)
    assert load_checkpoint(path, config, 5)[0]["step"] == 1
    mean, many = "optimizer.table.weight/mean", {f"more{i}": table.clone() for i in range(9)}
    for wrong, says in (
        (
            {"model.table.weight": table.double()},
            "table.weight is float64 (5, 5), not float32 (5, 5)",
        ),
        ({mean: table.clone()}, ": table.weight is missing"),
        (
            {**whole, mean: torch.zeros(5, 6)},
            f"{mean} is float32 (5, 6), not float32 (5, 5)",
        ),
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


# --- Configurations -------------------------------------------------------------------------------


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """The folder of a run with one layer of two heads."""
    return Path(shutil.copytree(trained / "checkpoints" / "multi-head", tmp_path / "run"))


def change(run: Path, settings: dict[str, Any], **about: Any) -> None:
    """Change settings as a program does that also recomputes the hash."""
    content = read_json(run / "config.json")
    write_json(
        run / "config.json", {**content, "config": {**content["config"], **settings}, **about}
    )


@pytest.mark.parametrize(
    ("settings", "says", "advice"),
    [
        ({"slope": 2}, "unknown key 'slope'", f"the keys are {', '.join(RECORD_OF)}; or "),
        (
            {"positions": "slope"},
            "invalid value for positions: 'slope'",
            "choose from learned, rotary, none; or ",
        ),
        (
            {"embed_dim": -1},
            "invalid value for embed_dim: -1",
            "it must be at least 1 and at most 1048576; or ",
        ),
        (
            {"sampling": "random", "stride": 3},
            "stride cannot be combined with sampling random",
            "leave one out; or ",
        ),
    ],
)
def test_settings_that_are_not_ours_are_named(
    settings: dict[str, Any], says: str, advice: str, run: Path
) -> None:
    change(run, settings)
    with pytest.raises(AttnlmError) as caught:
        attnlm.open_run(run)
    assert caught.value.message == f"{run / 'config.json'} is not valid: {says}"
    assert caught.value.hint == f"{advice}copy the run's folder again from its source"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"head_size": 4},
            "blocks.0.attention.query.weight is float32 (16, 16), not float32 (8, 16)",
        ),
        (
            {"embed_dim": 8},
            ": blocks.0.attention.key.weight is float32 (16, 16), not float32 (8, 8)",
        ),
        ({"embed_dim": 1024}, " and 3 more"),
        ({"projection": True}, ": blocks.0.attention.projection.weight is missing"),
    ],
)
def test_tensors_that_do_not_fit_the_configuration_are_named(
    settings: dict[str, Any], says: str, run: Path
) -> None:
    change(run, settings)
    with pytest.raises(AttnlmError) as caught:
        attnlm.load_model(run, device="cpu")
    assert says in caught.value.message and caught.value.hint.startswith("undo changes to config")


def test_an_edited_configuration_is_read_or_its_mistake_named(run: Path) -> None:
    text = (run / "config.json").read_text()
    (run / "config.json").write_text(text.replace('"seed": 1', '"seed": 2'))
    assert attnlm.open_run(run).config.training.seed == 2
    (run / "config.json").write_text(text.replace('"seed": 1', '"seed": "lucky"'))
    with pytest.raises(AttnlmError, match=r"config\.json.*seed.*'lucky'"):
        attnlm.open_run(run)
    (run / "config.json").write_text(text.replace('"heads": 2,', '"heads": 4'))
    line = text[: text.index('"heads": 2,')].count("\n") + 2
    with pytest.raises(AttnlmError, match=rf"is not valid JSON: .* line {line} column \d+"):
        attnlm.open_run(run)
    (run / "config.json").write_text(text)
    change(run, {}, vocab_size=99)
    with pytest.raises(AttnlmError, match=r"tokenizer\.json has 29 ids, but config.json has 99"):
        attnlm.open_run(run).tokenizer.encode("a")
