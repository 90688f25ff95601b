"""A data set opens by name or path, and only when it is what was prepared."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnlm
from attnlm.base import files
from attnlm.base.errors import AttnlmError
from attnlm.base.files import read_json, write_json
from attnlm.data import dataset
from attnlm.data.dataset import list_datasets, open_dataset, sampled_hash
from attnlm.data.prepare import prepare
from attnlm.runs.load_model import load_model
from attnlm.runs.run import open_run
from attnlm.see.heads import heads as study_heads
from attnlm.see.report import report
from attnlm.workflows.evaluate import evaluate, take_snapshot


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "cats.txt").write_text("The cat sat on the mat.\n" * 30)
    prepare(tmp_path / "cats.txt", data_dir=tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture
def folder(data: Path) -> Path:
    return data / "cats-char"


def test_data_sets_open_by_name_by_path_or_as_the_latest(
    data: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for opened in (
        open_dataset(data_dir=data),
        open_dataset("cats-char", data_dir=data),
        open_dataset(folder),
        open_dataset(str(folder)),
    ):
        assert opened.path == folder
        assert opened.tokenizer.decode(opened.val).endswith("on the mat.\n")
        assert isinstance(opened.train, np.memmap)
        with pytest.raises(ValueError, match="read-only"):
            opened.train[0] = 1
    monkeypatch.chdir(data.parent)
    assert open_dataset().path == Path("data/cats-char")
    shutil.copytree(folder, data.parent / "copy")
    assert open_dataset("copy").name == "cats-char"


def test_missing_data_sets_have_a_hint(data: Path, tmp_path: Path) -> None:
    with pytest.raises(AttnlmError, match="cats-chr") as caught:
        open_dataset("cats-chr", data_dir=data)
    assert "cats-char" in (caught.value.hint or "")
    for missing in (None, "dogs"):
        with pytest.raises(AttnlmError) as caught:
            open_dataset(missing, data_dir=tmp_path / "nowhere")
        assert "attnlm prepare" in (caught.value.hint or "")
    with pytest.raises(AttnlmError, match=r"has no meta\.json"):
        open_dataset(tmp_path)
    (data / "latest").write_text("../data/cats-char")
    assert open_dataset(data_dir=data).path == data / "cats-char"


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "tokenizer.json", "meta.json"])
def test_a_file_that_is_changed_cut_short_or_missing_is_refused(name: str, folder: Path) -> None:
    path = folder / name
    whole = path.read_bytes()
    places = (0, len(whole) // 2, len(whole) - 3)
    flipped = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in places]
    for content in (*flipped, whole[:-2], None):  # a newline less is still the same JSON
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(AttnlmError, match=name.replace(".", r"\.")):
            open_dataset(folder)


def test_the_tokenizer_of_another_data_set_is_refused(data: Path, folder: Path) -> None:
    (data.parent / "other.txt").write_text("THE CAT SAT ON THE MAT,\n" * 30)
    other = prepare(data.parent / "other.txt", data_dir=data)
    path = folder / "tokenizer.json"
    characters = files.read_json(path)["characters"][::-1]
    files.write_json(path, {**files.read_json(path), "characters": characters})
    for _ in range(2):  # one of the same name and size, and one that is quite different
        with pytest.raises(AttnlmError, match=r"tokenizer\.json is not the tokenizer"):
            open_dataset(folder)
        shutil.copy(other.path / "tokenizer.json", folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 3},
        {"encoding": 8},
        {"split": "head"},
        {"train_tokens": 10**30},
        {"train_tokens": 2**47},
        {"val_tokens": 0},
        {"train_sha256": "x"},
        {"dtype": "object"},
        {"vocab_size": 2**62},
        {"tokenizer": "byte"},
        {"floor": -1.0},
    ],
    ids=str,
)
def test_a_hostile_meta_is_refused(changes: dict[str, Any], folder: Path) -> None:
    path = folder / "meta.json"
    files.write_json(path, {**files.read_json(path), **changes})
    with pytest.raises(AttnlmError, match=r"(meta|tokenizer)\.json|train\.bin"):
        open_dataset(folder)


def with_unknown_id(folder: Path, split: str, place: int) -> list[int]:
    """Writes an id that the vocabulary lacks, with the right hashes; returns the ids."""
    path, meta = folder / f"{split}.bin", files.read_json(folder / "meta.json")
    ids = np.fromfile(path, "<u2")
    ids[place] = meta["vocab_size"]
    path.write_bytes(ids.tobytes())
    meta |= {
        f"{split}_sha256": files.file_hash(path),
        f"{split}_sampled_sha256": sampled_hash(path),
    }
    files.write_json(folder / "meta.json", meta)
    found: list[int] = ids.tolist()
    return found


def test_an_id_that_the_vocabulary_lacks_is_refused(folder: Path) -> None:
    with_unknown_id(folder, "train", -3)
    with pytest.raises(AttnlmError, match=r"train\.bin is damaged: it has ids"):
        open_dataset(folder)


@pytest.mark.parametrize("place", [0, 100])
def test_every_reader_refuses_ids_that_the_vocabulary_lacks(
    place: int, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only part of a large file is checked when it is opened."""
    monkeypatch.setattr(dataset, "_LARGE", 10)
    folder = tmp_path / "foxes"
    shutil.copytree(trained / "data" / "foxes", folder)
    ids = with_unknown_id(folder, "val", place)
    shutil.copytree(trained / "checkpoints" / "multi-head", tmp_path / "run")
    run = open_run(tmp_path / "run")
    val_hash = files.file_hash(folder / "val.bin")
    run = replace(run, dataset=replace(run.dataset, val_sha256=val_hash, path=str(folder)))
    run.save_config()
    model, device = load_model(run, checkpoint="last", device="cpu")
    opened = open_dataset(folder)
    readers: list[Callable[[], object]] = [
        lambda: evaluate(run),
        lambda: study_heads(run),
        lambda: study_heads(run, text=ids),
        lambda: report(run),
        lambda: attnlm.train(resume=run.path, steps=40),
        lambda: attnlm.train(folder, checkpoint_dir=tmp_path / "new", block_size=8, steps=1),
    ]
    if place == 0:
        readers.append(lambda: take_snapshot(opened, 80, 1, model, device))
    for read in readers:
        with pytest.raises(AttnlmError, match="is damaged: it has ids outside of its vocabulary"):
            read()


def test_another_format_is_refused_and_replaced_with_force(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog.\n" * 20)
    arguments: dict[str, Any] = {"name": "foxes", "data_dir": tmp_path}
    folder = prepare(tmp_path / "text.txt", **arguments).path
    write_json(folder / "meta.json", {**read_json(folder / "meta.json"), "format": 99})
    readers: list[Callable[[], object]] = [
        lambda: open_dataset(folder),
        lambda: prepare(tmp_path / "text.txt", **arguments),
    ]
    for read in readers:
        with pytest.raises(AttnlmError, match="written by another version") as caught:
            read()
        assert "`force`" in caught.value.hint
    (entry,) = list_datasets(tmp_path)
    assert "another version" in (entry.problem or "")
    assert prepare(tmp_path / "text.txt", force=True, **arguments).train_tokens == 810


def test_large_bins_are_sampled_unless_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset, "_LARGE", 1000)
    monkeypatch.setattr(dataset, "_SAMPLES", 3)
    monkeypatch.setattr(dataset, "_SAMPLE", 100)
    (tmp_path / "cats.txt").write_text("The cat sat on the mat.\n" * 300)
    path = prepare(tmp_path / "cats.txt", data_dir=tmp_path / "data").path / "train.bin"
    whole = path.read_bytes()

    def damage(at: int) -> None:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])

    for at in (0, len(whole) // 2, len(whole) - 1):
        damage(at)
        with pytest.raises(AttnlmError, match=r"train\.bin"):
            open_dataset(path.parent)
    damage(200)  # between the samples
    open_dataset(path.parent)
    with pytest.raises(AttnlmError, match=r"train\.bin"):
        open_dataset(path.parent, verify=True)
