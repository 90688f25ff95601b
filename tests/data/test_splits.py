"""The validation split: the tail of a text, or documents of all its sources."""

from __future__ import annotations

import itertools
import json
import random
import shlex
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import attnlm
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import Note
from attnlm.data import bin_files
from attnlm.data.dataset import Dataset, open_dataset
from attnlm.data.prepare import prepare
from attnlm.data.splits import Divider, chosen_documents, join_pieces
from attnlm.see.reproduce import prepare_command
from attnlm.text import record_files, text_files
from attnlm.text.text_files import Piece
from attnlm.tokens.tokenizer import END_OF_TEXT
from tests.kit import command, fails
from tests.texts import GPT2_END, json_lines, needs_gpt2

CATS = [f"Cat {i} sat." for i in range(200)]
DOGS = [f"DOG {i}\nRAN: 猫" for i in range(150)]


@pytest.fixture
def pets(here: Path) -> list[str]:
    """Two files of records, which have no character in common but digits and spaces."""
    (here / "cats.jsonl").write_bytes(json_lines(CATS))
    (here / "dogs.jsonl").write_bytes(json_lines(DOGS))
    return ["cats.jsonl", "dogs.jsonl"]


def texts_of(dataset: Dataset) -> tuple[str, str]:
    return dataset.tokenizer.decode(dataset.train), dataset.tokenizer.decode(dataset.val)


def chosen(count: int, fraction: str = "0.1") -> list[int]:
    """Return the indices of the documents for validation among `count` documents."""
    indices = chosen_documents(Fraction(fraction))
    return list(itertools.takewhile(lambda index: index < count, indices))


def joined(documents: Sequence[str], of: Sequence[int]) -> str:
    return "".join(documents[i] + END_OF_TEXT for i in of)


# --- Which documents ------------------------------------------------------------------------------


@pytest.mark.parametrize(("fraction", "row"), [("0.1", 10), ("0.25", 4), ("0.5", 2), ("0.01", 100)])
def test_one_document_of_each_row_is_chosen(fraction: str, row: int) -> None:
    found = chosen(1000, fraction)
    assert [index // row for index in found] == list(range(1000 // row))
    assert len({index % row for index in found}) == row if row < 100 else len(found) == 10
    assert found[:5] == chosen(found[5], fraction)  # later documents change no earlier choice


def test_the_choice_of_documents_is_fixed() -> None:
    assert chosen(100) == [4, 18, 25, 39, 42, 55, 63, 74, 88, 95]


@pytest.mark.parametrize("fraction", ["0.3", "0.15", "0.75", "0.999", "0.07"])
def test_the_share_of_documents_is_exact(fraction: str) -> None:
    for count in (1000, 1001, 1013):
        assert abs(len(chosen(count, fraction)) - float(fraction) * count) <= 1


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=40),
    st.sampled_from(["0.1", "0.3", "0.5", "0.8"]),
    st.randoms(use_true_random=False),
)
def test_pieces_of_any_size_are_divided_alike(
    lengths: list[int], fraction: str, chance: random.Random
) -> None:
    texts = [chr(ord("a") + i) * length for i, length in enumerate(lengths)]
    whole, ends = "".join(texts), np.cumsum(lengths).tolist()
    cuts = sorted({0, len(whole), *chance.choices(range(len(whole) + 1), k=5)})
    divider = Divider(Fraction(fraction))
    found: dict[str, list[Piece]] = {"train": [], "val": []}
    for a, b in itertools.pairwise(cuts):
        piece = Piece(whole[a:b], tuple(end - a for end in ends if a < end <= b))
        parts = divider.divide(piece)
        assert join_pieces([part for _, part in parts]) == piece
        for key, part in parts:
            found[key].append(part)
    for_val = set(chosen(len(texts), fraction))
    for key in ("train", "val"):
        expected = [text for i, text in enumerate(texts) if (i in for_val) == (key == "val")]
        text, places = join_pieces(found[key])
        assert text == "".join(expected)
        assert list(places) == np.cumsum([len(text) for text in expected], dtype=int).tolist()


def test_each_source_is_in_both_splits(pets: list[str]) -> None:
    dataset = prepare(pets)
    for_val = chosen(350)
    documents = [*CATS, *DOGS]
    train, val = texts_of(dataset)
    assert val == joined(documents, for_val)
    assert train == joined(documents, sorted(set(range(350)) - set(for_val)))
    assert (dataset.split, dataset.documents) == ("documents", 350)
    characters = [len(text.replace(END_OF_TEXT, "")) for text in (train, val)]
    assert characters == [dataset.train_characters, dataset.val_characters]


@needs_gpt2
@pytest.mark.parametrize("spec", ["char", "byte", "bpe:300", "gpt2"])
def test_chunks_of_any_size_make_the_same_splits(
    spec: str, pets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"tokenizer": spec, "offline": True, "val_fraction": 0.2}
    whole = prepare(pets, **options)
    for module in (record_files, text_files, bin_files):
        monkeypatch.setattr(module, "PIECE", 37)
    monkeypatch.setattr(bin_files, "cores", lambda: 3)
    again = prepare(pets, data_dir="chunks", **options)
    for name in ("train.bin", "val.bin", "tokenizer.json"):
        assert (again.path / name).read_bytes() == (whole.path / name).read_bytes()
    assert (again.bigram_loss, again.val_bytes) == (whole.bigram_loss, whole.val_bytes)


@needs_gpt2
def test_chosen_documents_keep_their_ends(pets: list[str]) -> None:
    dataset = prepare(pets, tokenizer="gpt2", offline=True)
    documents = [*CATS, *DOGS]
    expected = {"train": set(range(350)) - set(chosen(350)), "val": set(chosen(350))}
    for key, ids in (("train", dataset.train), ("val", dataset.val)):
        found = np.split(ids, np.flatnonzero(ids == GPT2_END) + 1)
        assert found.pop().size == 0
        texts = [dataset.tokenizer.decode(part[:-1]) for part in found]
        assert texts == [documents[i] for i in sorted(expected[key])]


@pytest.mark.parametrize("spec", ["char", "byte", "bpe:300"])
def test_the_tail_of_several_sources_is_divided_exactly(spec: str, here: Path) -> None:
    texts = {"a": "aaa bbb\n" * 30, "b": "ccc ddd\n" * 10, "c": "猫 fff\n" * 10}
    for name, content in texts.items():
        (here / name).write_text(content, encoding="utf-8")
    dataset = prepare(["a", "b", "c"], tokenizer=spec, val_fraction=0.5)
    text = "".join(texts.values())
    assert texts_of(dataset) == (text[: len(text) // 2], text[len(text) // 2 :])
    assert dataset.split == "tail"


# --- Which kind of split --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "fraction", "split"),
    [
        (99, 0.1, "tail"),
        (100, 0.1, "documents"),
        (100, 0.09, "tail"),
        (20, 0.5, "documents"),
        (99, 0.9, "tail"),
    ],
)
def test_many_documents_are_split_by_default(
    count: int, fraction: float, split: str, here: Path
) -> None:
    (here / "cats.jsonl").write_bytes(json_lines(CATS[:count]))
    assert prepare("cats.jsonl", val_fraction=fraction).split == split
    (here / "cats").mkdir()
    for i in range(count):
        (here / "cats" / f"{i:03}.txt").write_text(CATS[i] + "\n")
    folder = prepare("cats", val_fraction=fraction, name="folder")
    assert folder.split == split
    of_records = texts_of(open_dataset("cats-char"))
    assert texts_of(folder) == tuple(text.replace(END_OF_TEXT, "\n") for text in of_records)
    (here / "cats.txt").write_text("\n".join(CATS[:count]))
    assert prepare("cats.txt", val_fraction=fraction, name="text").split == "tail"
    asked = prepare("cats.jsonl", val_fraction=fraction, split="tail", name="asked")
    assert asked.val_characters == -int(-len("".join(CATS[:count])) * fraction // 1)


def test_recorded_options_reproduce_the_data_set(
    pets: list[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for options in ({"split": "tail"}, {"split": "documents", "val_fraction": 0.2}, {}):
        dataset = prepare(pets, name="pets", force=True, **options)
        words = shlex.split(prepare_command(dataset))
        expected = {path.name: path.read_bytes() for path in dataset.path.iterdir()}
        command(*words[1:], "--data-dir", "again", "--force", cwd=here)
        again = {path.name: path.read_bytes() for path in Path("again/pets").iterdir()}
        assert again == expected, words
    assert [entry.split for entry in attnlm.list_datasets()] == ["documents"]
    assert "documents" in command("list", "datasets", cwd=here).stdout


def test_another_choice_of_documents_is_other_content(pets: list[str]) -> None:
    events: list[object] = []
    prepare(pets, name="pets")
    prepare(pets, name="pets", split="documents", on_event=events.append)
    assert any(isinstance(event, Note) and "the same text" in event.text for event in events)
    with pytest.raises(AttnlmError, match="exists with other content"):
        prepare(pets, name="pets", val_fraction=0.2)
    (Path("cats.jsonl")).write_bytes(json_lines([*CATS[1:], CATS[0]]))
    with pytest.raises(AttnlmError, match="exists with other content"):
        prepare(pets, name="pets")


def test_byte_pairs_are_trained_on_the_documents_for_training(here: Path) -> None:
    for_val = set(chosen(100))
    texts = ["xyxyxyxy" if i in for_val else "abababab" for i in range(100)]
    (here / "t.jsonl").write_bytes(json_lines(texts))
    dataset = prepare("t.jsonl", tokenizer="bpe:290")
    learned = [dataset.tokenizer.decode([token]) for token in range(256, dataset.vocab_size - 1)]
    assert dataset.tokenizer.end_of_text == dataset.vocab_size - 1
    assert any("ab" in token for token in learned)
    assert not any("x" in token for token in learned)


def test_documents_of_very_different_lengths_are_reported(here: Path) -> None:
    texts = [text * (100 if i in chosen(200) else 1) for i, text in enumerate(CATS)]
    (here / "cats.jsonl").write_bytes(json_lines(texts))
    events: list[object] = []
    prepare("cats.jsonl", on_event=events.append)
    (note,) = [event.text for event in events if isinstance(event, Note) and "of the" in event.text]
    assert "the documents for validation have 9" in note and "`split` tail" in note


# --- Messages -------------------------------------------------------------------------------------


def test_prepare_says_what_the_validation_split_is_made_of(pets: list[str], here: Path) -> None:
    (here / "a.txt").write_text("fortunes\n" * 50)
    (here / "b.txt").write_text("jargon\n" * 50)

    def said(*arguments: str) -> str:
        shown = command("prepare", *arguments, "--force", cwd=here).stderr
        (line,) = [line for line in shown.splitlines() if line.startswith("validation ")]
        return line.removeprefix("validation").strip()

    assert said("a.txt") == "the last 10%"
    assert said("a.txt", "b.txt", "--val-fraction", "0.75") == "the last 75%"
    assert said("a.txt", "--val-file", "b.txt") == "b.txt"
    assert said(*pets) == "10% of the documents, chosen at random"
    done = command("prepare", *pets, "--force", "--json", cwd=here)
    assert json.loads(done.stdout)["split"] == "documents"


def test_indivisible_texts_are_refused(here: Path) -> None:
    (here / "a.txt").write_text("fortunes\n" * 50)
    (here / "b.txt").write_text("jargon\n" * 50)
    by_documents = ("--split", "documents")
    for arguments, code, says, hints in (
        (("a.txt", *by_documents), 1, "a.txt is a single document", "--split tail"),
        (("a.txt", "b.txt", *by_documents), 1, "0.1 of 2 documents", "--val-fraction 0.5 or"),
        (("a.txt", "--val-file", "b.txt", *by_documents), 2, "combined with --split", "only one"),
        (("a.txt", "--split", "tial"), 2, "--split", "tail"),
    ):
        fails("prepare", *arguments, cwd=here, code=code, says=says, hints=hints)
        assert not list((here / "data").glob("*"))
    dataset = prepare(["a.txt", "b.txt"], split="documents", val_fraction=0.5)
    assert "".join(sorted(texts_of(dataset), key=len)) == "jargon\n" * 50 + "fortunes\n" * 50
    with pytest.raises(UsageError, match="`split`"):
        prepare("missing.txt", split="")


def test_a_chosen_document_of_one_token_is_too_short(here: Path) -> None:
    (here / "t").mkdir()
    (short,) = chosen(20, "0.05")
    for i in range(20):  # files, which no end-of-text id follows
        (here / "t" / f"{i:02}.txt").write_text("\n" if i == short else "abc")
    with pytest.raises(AttnlmError, match="validation split of t has fewer than two"):
        prepare("t", split="documents", val_fraction=0.05)
