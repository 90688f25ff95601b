"""The ids, vocabulary and split of every kind of source stay what they were, bit for bit."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from attnlm import prepare
from attnlm.base.errors import import_optional
from attnlm.text.text_files import ZSTD
from tests.texts import json_lines, needs_gpt2

zstd = import_optional(ZSTD, "the tests")
_PROSE = "the a cat dog naïve 猫 sat, ran. And\n so  on\n\n  (x) 12 3456 it's é <|endoftext|>"
_WORDS = _PROSE.split(" ")


def _text(seed: int, words: int) -> str:
    draw = Random(seed)
    return " ".join(draw.choice(_WORDS) for _ in range(words))


@pytest.fixture(autouse=True)
def sources(here: Path) -> None:
    """Files of every kind in the current folder."""
    texts = [_text(seed, seed % 23) for seed in range(400)]
    whole = _text(1, 30_000) * 3
    Path("folder/inner").mkdir(parents=True)
    for name, content in {
        "text.txt": whole.encode(),
        "windows.txt": b"\xef\xbb\xbf" + whole.replace("\n", "\r\n").encode(),
        "utf16.txt": _text(2, 500).encode("utf-16"),
        "latin.txt": _text(3, 500).replace("猫", "ß").encode("latin-1"),
        "text.txt.gz": gzip.compress(whole.encode()),
        "parts.txt.zst": zstd.compress(whole[:999].encode()) + zstd.compress(whole[999:].encode()),
        "records.jsonl": json_lines(texts),
        "records.jsonl.gz": gzip.compress(json_lines(texts[:90])),
        "folder/a.txt": texts[20].encode(),
        "folder/b.jsonl": json_lines(texts[:50]),
        "folder/inner/c.md": _text(4, 3000).encode(),
        "folder/picture.png": b"\x89PNG\0\xff",
        "folder/empty.txt": b"",
    }.items():
        Path(name).write_bytes(content)
    for number in range(150):
        Path("many").mkdir(exist_ok=True)
        Path(f"many/{number:03}.txt").write_text(_text(number, number + 2), encoding="utf-8")
    pq.write_table(pa.table({"text": texts}), "records.parquet", row_group_size=7)
    for suffix in ("json", "csv"):
        with Path(f"records.{suffix}").open("w", encoding="utf-8", newline="") as file:
            if suffix == "json":
                json.dump([{"text": text} for text in texts], file, indent=1)
            else:
                csv.writer(file).writerows([["id", "text"], *enumerate(texts)])
    Path("questions.jsonl").write_text(
        "".join(json.dumps({"q": f"{i} + {i % 7}", "a": str(i + i % 7)}) + "\n" for i in range(300))
    )
    chats = [
        [{"role": "user", "content": texts[i]}, {"role": "assistant", "content": f"é {i}"}]
        for i in range(1, 120)
        if texts[i] and "<|" not in texts[i]
    ]
    Path("chats.jsonl").write_text("".join(json.dumps({"m": chat}) + "\n" for chat in chats))


_ROWS: list[Any] = [
    ("tales", {}, "515ac9c2051d89e7"),
    ("copy", {"examples": 300}, "44c4d5d42f5a570d"),
    ("reverse", {"examples": 300}, "ea654b12ff35b205"),
    ("sort", {"examples": 300}, "b89a648c88bff1f5"),
    ("addition", {"examples": 300}, "c0433da4197871d5"),
    ("modular-addition", {"examples": 300}, "39a5135b5e91ae73"),
    ("parity", {"examples": 300}, "c1c0e6a482c6f361"),
    ("brackets", {"examples": 300}, "638c3bd25fcaa2d2"),
    ("recall", {"examples": 300}, "cac1f27c4c6ae1f4"),
    ("induction", {"examples": 300}, "dc367e53fac53475"),
    ("selective-copy", {"examples": 300}, "111440dbc030fb6f"),
    ("running-parity", {"examples": 300}, "fdec1d3f659a373c"),
    ("closing", {"examples": 300}, "151c8645d32efca8"),
    ("facts", {"examples": 300}, "b699091d23527c50"),
    ("addition", {"examples": 100, "digits": 2, "tokenizer": "bpe:300"}, "b88af0276f2214a9"),
    *((name, {}, "c1e0a155fc311796") for name in ("text.txt", "text.txt.gz", "parts.txt.zst")),
    ("text.txt", {"tokenizer": "byte", "val_fraction": 0.29}, "cf047141bc95b75f"),
    ("text.txt", {"tokenizer": "bpe:400"}, "c92e0456b67ddd7b"),
    pytest.param("text.txt", {"tokenizer": "gpt2"}, "de42e719cfe86d0a", marks=needs_gpt2),
    ("windows.txt", {"val_fraction": 0.9}, "f49efa9c6cb9d224"),
    ("utf16.txt", {"encoding": "utf-16"}, "81e2a58b0e9421bf"),
    ("latin.txt", {"encoding": "latin-1"}, "e11c00ea4a3475cc"),
    ("text.txt.gz", {"tokenizer": "bpe:300"}, "88ce2b233d9fba4e"),
    ("text.txt", {"val_file": "folder/a.txt"}, "507e3755347d8a57"),
    ("records.jsonl", {}, "7384c3fe244f1544"),
    ("records.jsonl", {"split": "tail", "tokenizer": "bpe:300"}, "3b21989ef265ca5a"),
    pytest.param("records.jsonl", {"tokenizer": "gpt2"}, "70f5f93adb1f5283", marks=needs_gpt2),
    ("records.jsonl", {"val_file": "records.jsonl.gz", "tokenizer": "byte"}, "6295e6cd3b9fec1d"),
    *(
        (f"records.{suffix}", {"tokenizer": "byte"}, "d2db9f738c2d75ef")
        for suffix in ("parquet", "json", "csv")
    ),
    ("folder", {}, "26a2a1cc7f6699b6"),
    pytest.param(
        "folder", {"tokenizer": "gpt2", "val_fraction": 0.3}, "7aa97d69879b37ff", marks=needs_gpt2
    ),
    ("many", {}, "9e421a9d92a92d4e"),
    ("many/*1*.txt", {"tokenizer": "bpe:300", "split": "documents"}, "126bc7bcf0f80106"),
    (["text.txt", "many", "records.jsonl"], {"val_fraction": 0.2}, "a4df61878d297c6c"),
    (["text.txt", "many"], {"split": "documents", "tokenizer": "byte"}, "f1630a79bd752b32"),
    ("questions.jsonl", {"prompt_column": "q", "answer_column": "a"}, "9214a2083ece3e56"),
    (
        "questions.jsonl",
        {"prompt_column": "q", "answer_column": "a", "val_fraction": 0.4},
        "3715e6b23f9ad31c",
    ),
    ("chats.jsonl", {"prompt_column": "m", "tokenizer": "bpe:300"}, "3b9da230cc6e9385"),
]


@pytest.mark.parametrize(("source", "settings", "expected"), _ROWS)
def test_a_source_has_the_same_ids_as_ever(
    source: Any, settings: dict[str, Any], expected: str
) -> None:
    dataset = prepare(source, name="it", **settings)
    names = ("train.bin", "val.bin", "tokenizer.json", "train.marks", "val.marks", "longer.jsonl")
    hashed = "".join(dataset.files.get(name, "") for name in names)
    facts: tuple[object, ...] = (
        dataset.documents,
        dataset.val_bytes,
        dataset.characters,
        dataset.split,
    )
    if dataset.examples is None:
        facts += dataset.source_sha256, dataset.val_source_sha256
    losses = [f"{loss or 0:.6g}" for loss in (dataset.bigram_loss, dataset.floor)]
    hashed += str((facts, losses, dataset.examples))
    assert hashlib.sha256(hashed.encode()).hexdigest()[:16] == expected
