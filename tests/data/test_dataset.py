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
from attnlm import AttnlmError, Dataset, open_dataset, prepare
from attnlm.base import files
from attnlm.data import dataset
from attnlm.runs.load_model import load_model
from attnlm.workflows.evaluate import take_snapshot
from tests.kit import quick_run

FOLDER = Path("data/cats-char")


@pytest.fixture(autouse=True)
def cats(here: Path) -> Dataset:
    (here / "cats.txt").write_text("The cat sat on the mat.\n" * 60)
    return prepare("cats.txt")


def changed(path: Path, **values: Any) -> None:
    """Replaces values in a JSON file, with the right hash."""
    files.write_json(path, {**files.read_json(path), **values})


def flipped(content: bytes, at: int) -> bytes:
    """The same bytes, but for one bit of the one at this place."""
    return content[:at] + bytes([content[at] ^ 1]) + content[at:][1:]


def test_data_sets_open_by_name_by_path_or_as_the_latest() -> None:
    for opened in map(open_dataset, (None, "cats-char", FOLDER, str(FOLDER))):
        assert opened.path == FOLDER
        assert opened.tokenizer.decode(opened.val).endswith("on the mat.\n")
        assert isinstance(opened.train, np.memmap)
        with pytest.raises(ValueError, match="read-only"):
            opened.train[0] = 1
    shutil.copytree(FOLDER, "copy")
    assert open_dataset("copy").name == "cats-char"
    assert open_dataset("cats-char", data_dir=Path("data").absolute()).path.is_absolute()
    Path("data/latest").write_text("../data/cats-char")  # it stays in its folder
    assert open_dataset().path == FOLDER


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "tokenizer.json", "meta.json"])
def test_a_file_that_is_changed_cut_short_or_missing_is_refused(name: str) -> None:
    path = FOLDER / name
    whole = path.read_bytes()
    changes = [flipped(whole, at) for at in (0, len(whole) // 2, len(whole) - 3)]
    for content in (*changes, whole[:-2], None):  # a newline less is still the same JSON
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(AttnlmError, match=name.replace(".", r"\.")):
            open_dataset(FOLDER)


def test_the_tokenizer_of_another_data_set_is_refused() -> None:
    Path("other.txt").write_text("THE CAT SAT ON THE MAT,\n" * 30)
    other = prepare("other.txt")
    path = FOLDER / "tokenizer.json"
    changed(path, characters=files.read_json(path)["characters"][::-1])
    for _ in range(2):  # one of the same name and size, and one that is quite different
        with pytest.raises(AttnlmError, match=r"tokenizer\.json is not the tokenizer"):
            open_dataset(FOLDER)
        shutil.copy(other.path / "tokenizer.json", FOLDER)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 3},
        {"sources": 8},
        {"split": "head"},
        {"train_tokens": 10**30},
        {"train_tokens": 2**47},
        {"val_tokens": 0},
        {"files": {}},
        {"dtype": "object"},
        {"vocab_size": 2**62},
        {"tokenizer_name": "byte"},
        {"floor": -1.0},
    ],
    ids=str,
)
def test_a_hostile_meta_is_refused(changes: dict[str, Any]) -> None:
    changed(FOLDER / "meta.json", **changes)
    with pytest.raises(AttnlmError, match=r"(meta|tokenizer)\.json|train\.bin"):
        open_dataset(FOLDER)


def with_unknown_id(split: str, place: int) -> None:
    """Writes an id that the vocabulary lacks, with the right hashes."""
    path, meta = FOLDER / f"{split}.bin", FOLDER / "meta.json"
    ids = np.fromfile(path, "<u2")
    ids[place] = files.read_json(meta)["vocab_size"]
    path.write_bytes(ids.tobytes())
    changed(meta, files={**files.read_json(meta)["files"], path.name: files.file_hash(path)})


@pytest.mark.parametrize("place", [0, 100])
def test_every_reader_refuses_ids_that_the_vocabulary_lacks(
    place: int, cats: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only part of a large file is checked when it is opened."""
    run = quick_run(cats, block_size=8)
    before = {path: path.read_bytes() for path in FOLDER.iterdir()}
    with_unknown_id("train", -3)
    with pytest.raises(AttnlmError, match=r"train\.bin is damaged: it has ids"):
        open_dataset(FOLDER)
    for path, content in before.items():
        path.write_bytes(content)
    monkeypatch.setattr(dataset, "_LARGE", 10)
    with_unknown_id("val", place)
    val_hash = files.file_hash(FOLDER / "val.bin")
    run = replace(run, dataset=replace(run.dataset, val_sha256=val_hash))
    run.save_config()
    model, device = load_model(run, checkpoint="last", device="cpu")
    opened = open_dataset(FOLDER)
    readers: list[Callable[[], object]] = [
        lambda: attnlm.evaluate(run),
        lambda: attnlm.heads(run),
        lambda: attnlm.report(run),
        lambda: attnlm.train(resume=run.path, steps=40),
        lambda: attnlm.train(FOLDER, checkpoint_dir="new", block_size=8, steps=1),
    ]
    if place == 0:
        readers.append(lambda: take_snapshot(opened, 1, model, device))
    for read in readers:
        with pytest.raises(AttnlmError, match="is damaged: it has ids outside of its vocabulary"):
            read()


def test_another_format_is_refused_and_replaced_with_force() -> None:
    changed(FOLDER / "meta.json", format=99)
    for reader, source in ((open_dataset, FOLDER), (prepare, "cats.txt")):
        with pytest.raises(AttnlmError, match="written by another version") as caught:
            reader(source)
        assert "`force`" in caught.value.hint
    (entry,) = attnlm.list_datasets()
    assert "another version" in (entry.problem or "")
    assert prepare("cats.txt", force=True).train_tokens == 1296


def test_large_bins_are_not_read_unless_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "_LARGE", 1000)
    path = FOLDER / "train.bin"
    whole = path.read_bytes()
    path.write_bytes(flipped(whole, 200))
    open_dataset(FOLDER)
    with pytest.raises(AttnlmError, match=r"train\.bin"):
        open_dataset(FOLDER, verify=True)
    path.write_bytes(whole[:-2])
    with pytest.raises(AttnlmError, match=r"train\.bin"):
        open_dataset(FOLDER)
