"""The validation split: the tail of a text, or documents of all its sources."""

from __future__ import annotations

import functools
import math
import shlex
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnlm import Dataset, open_dataset, prepare
from attnlm.data import contents as kinds
from attnlm.data import spool
from attnlm.data.spool import chosen_documents
from attnlm.see.reproduce import prepare_command
from attnlm.text import text_files
from attnlm.tokens.tokenizer import END_OF_TEXT, safe_blocks
from tests.kit import command
from tests.models import contents
from tests.texts import json_lines

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
    return chosen_documents(Fraction(fraction), count)


def joined(documents: Sequence[str], of: Sequence[int]) -> str:
    return "".join(documents[i] + END_OF_TEXT for i in of)


@pytest.mark.parametrize("fraction", ["0.1", "0.01", "0.3", "0.15", "0.75", "0.999", "0.07"])
def test_one_document_of_each_row_is_chosen(fraction: str) -> None:
    """A row has 1/fraction documents, or the whole number of them next to that."""
    found = chosen(1013, fraction)
    rows = [math.floor(index * Fraction(fraction)) for index in found]
    assert rows == list(range(len(rows))) and abs(len(rows) - 1013 * float(fraction)) <= 1
    assert found[:5] == chosen(found[5], fraction)  # later documents change no earlier choice


def test_the_choice_of_documents_is_fixed() -> None:
    assert chosen(100) == [4, 18, 25, 39, 42, 55, 63, 74, 88, 95]


@pytest.mark.parametrize("spec", ["char", "bpe:300"])
def test_each_source_is_in_both_splits(spec: str, pets: list[str]) -> None:
    dataset = prepare(pets, tokenizer=spec)
    for_val = chosen(350)
    documents = [*CATS, *DOGS]
    train, val = texts_of(dataset)
    assert val == joined(documents, for_val)
    assert train == joined(documents, sorted(set(range(350)) - set(for_val)))
    assert (dataset.split, dataset.documents) == ("documents", 350)
    characters = [len(text.replace(END_OF_TEXT, "")) for text in (train, val)]
    assert characters == [dataset.train_characters, dataset.val_characters]


MIXED = (
    "\ufeffA cat.\r\nna\u0131\u0308ve \u65e5\u672c, \U0001d11e!\x7f\x80\xff ab\u732b"
    "\ra\r\nb\rc\n\r\n\r\r\n\n\n\r \r\né\x85\x0b\r\r"
) * 2
FORGED = ["<|endof", "text|>", END_OF_TEXT, f"x{END_OF_TEXT} y", "", "\n\n", "  "] * 5


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("text", {"encoding": "utf-8"}),
        ("text", {"encoding": "utf-16", "tokenizer": "byte"}),
        ("text", {"encoding": "utf-7", "tokenizer": "bpe:270"}),
        ("text", {"encoding": "gb18030"}),
        ("few.jsonl", {"val_fraction": 0.2}),
        ("few.jsonl", {"tokenizer": "byte", "split": "tail"}),
        ("few.jsonl", {"tokenizer": "bpe:300", "val_fraction": 0.8}),
        ("qa.jsonl", {"prompt_column": "q", "answer_column": "a"}),
        ("recall", {"examples": 20}),
    ],
    ids=str,
)
def test_pieces_of_any_size_make_the_same_data_set(
    source: str, options: Any, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However reads and pieces divide characters, line ends, end marks and documents.

    Byte pairs are encoded in pieces that have room for a word.
    """
    (here / "text").write_bytes(MIXED.encode(options.get("encoding", "utf-8")))
    (here / "few.jsonl").write_bytes(json_lines([*DOGS[:30], *FORGED]))
    (here / "qa.jsonl").write_text("".join(f'{{"q": "{i} Ω?", "a": "é"}}\n' for i in range(60)))
    whole = prepare(source, **options)
    monkeypatch.setattr(kinds, "cores", lambda: 3)
    room = 37 if "bpe" in options.get("tokenizer", "") else 1
    for size in (1, 2, 3, 8, 37):
        monkeypatch.setattr(text_files, "BLOCK", size + 3)  # at least a byte order mark
        monkeypatch.setattr(spool, "BLOCK", size)
        pieces = functools.partial(safe_blocks, limit=max(size, room))
        monkeypatch.setattr(spool, "safe_blocks", pieces)
        again = prepare(source, data_dir=f"pieces-{size}", **options)
        assert contents(again.path) == contents(whole.path), size


@pytest.mark.parametrize(
    ("count", "fraction", "split"),
    [(99, 0.1, "tail"), (100, 0.1, "documents"), (100, 0.91, "tail")],
)
def test_many_documents_are_split_by_default(
    count: int, fraction: float, split: str, here: Path
) -> None:
    (here / "cats.jsonl").write_bytes(json_lines(CATS[:count]))
    records = prepare("cats.jsonl", val_fraction=fraction)
    (here / "cats").mkdir()
    for i in range(count):
        (here / "cats" / f"{i:03}.txt").write_text(CATS[i] + "\n")
    folder = prepare("cats", val_fraction=fraction, name="folder")
    assert folder.split == records.split == split
    assert texts_of(folder) == tuple(t.replace(END_OF_TEXT, "\n") for t in texts_of(records))
    (here / "cats.txt").write_text("\n".join(CATS[:count]))
    assert prepare("cats.txt", val_fraction=fraction, name="text").split == "tail"
    asked = prepare("cats.jsonl", val_fraction=fraction, split="tail", name="asked")
    assert asked.val_characters == -int(-len("".join(CATS[:count])) * fraction // 1)


QUESTIONS = {"prompt_column": "q", "answer_column": "a"}
REPEATED: list[Any] = [
    (["cats.jsonl", "dogs.jsonl"], {}),
    (["cats.jsonl", "dogs.jsonl"], {"split": "tail", "tokenizer": "bpe:300"}),
    (["cats.jsonl", "dogs.jsonl"], {"split": "documents", "val_fraction": 0.2}),
    ("cats.jsonl", {"val_file": Path("dogs.jsonl"), "tokenizer": "first"}),
    ("latin.txt", {"encoding": "latin-1", "max_bytes": 10**6}),
    ("questions.csv", QUESTIONS),
    ("questions.csv", {"column": "q"}),
    ("questions.csv", {**QUESTIONS, "val_file": "questions.csv", "tokenizer": "byte"}),
    ("addition", {"digits": 2, "examples": 50}),
    ("copy", {"length": 3, "examples": 20, "tokenizer": "byte"}),
    ("ids.npy", {"vocab_size": 9, "val_fraction": 0.3}),
    ("ids.bin", {"vocab_size": 9, "dtype": "uint32", "val_file": "ids.bin"}),
]


@pytest.mark.parametrize(("source", "options"), REPEATED, ids=str)
def test_the_recorded_command_prepares_the_same_again(
    source: Any, options: Any, pets: list[str], here: Path
) -> None:
    """From a source of each kind, with options of each kind."""
    prepare(pets, name="first", tokenizer="byte")
    Path("questions.csv").write_text("q,a\n" + "".join(f"{i},{i + 1}\n" for i in range(120)))
    Path("latin.txt").write_bytes("Maß\n".encode("latin-1") * 30)
    np.save("ids.npy", np.arange(90) % 9)
    (np.arange(90) % 9).astype("<u4").tofile("ids.bin")
    dataset = prepare(source, name="pets", **options)
    words = shlex.split(prepare_command(open_dataset(dataset.path)))
    command(*words[1:], "--data-dir", "again", cwd=here)
    assert contents(Path("again/pets")) == contents(dataset.path)


def test_byte_pairs_are_trained_on_the_documents_for_training(here: Path) -> None:
    for_val = set(chosen(100))
    texts = ["xyxyxyxy" if i in for_val else "abababab" for i in range(100)]
    (here / "t.jsonl").write_bytes(json_lines(texts))
    dataset = prepare("t.jsonl", tokenizer="bpe:290")
    learned = [dataset.tokenizer.decode([token]) for token in range(256, dataset.vocab_size - 1)]
    assert dataset.tokenizer.end_of_text == dataset.vocab_size - 1
    assert any("ab" in token for token in learned)
    assert not any("x" in token for token in learned)


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
