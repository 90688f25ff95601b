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
from tests.texts import json_lines, needs_gpt2

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
    ("tales", {}, "5686950257530e00"),
    ("copy", {"examples": 300}, "6f2384e44c16f72e"),
    ("reverse", {"examples": 300}, "b1161bd01c6f7894"),
    ("sort", {"examples": 300}, "50ea07e69ede1ac8"),
    ("addition", {"examples": 300}, "34ff9f80be2dd24b"),
    ("modular-addition", {"examples": 300}, "828becac970db7c8"),
    ("parity", {"examples": 300}, "bdf7085ac61097e0"),
    ("brackets", {"examples": 300}, "22d2c0b3a0380270"),
    ("recall", {"examples": 300}, "c7a537fad74d0d5f"),
    ("addition", {"examples": 100, "digits": 2, "tokenizer": "bpe:300"}, "8f281397d38108bb"),
    ("text.txt", {}, "9a7cb340f1afa8ff"),
    ("text.txt", {"tokenizer": "byte", "val_fraction": 0.29}, "127b300128823587"),
    ("text.txt", {"tokenizer": "bpe:400"}, "ff6c7758b3fee849"),
    pytest.param("text.txt", {"tokenizer": "gpt2"}, "12cb2ad5985a9cee", marks=needs_gpt2),
    ("windows.txt", {"val_fraction": 0.9}, "6b2745373d7627ff"),
    ("utf16.txt", {"encoding": "utf-16"}, "d7882c413c210572"),
    ("latin.txt", {"encoding": "latin-1"}, "ab8da6560294a1e0"),
    ("text.txt.gz", {"tokenizer": "bpe:300"}, "ef00fa34dff5d42f"),
    ("text.txt", {"val_file": "folder/a.txt"}, "60096dce58aac1fa"),
    ("records.jsonl", {}, "fd0d59652b48d08f"),
    ("records.jsonl", {"split": "tail", "tokenizer": "bpe:300"}, "2d5d287db624b737"),
    pytest.param("records.jsonl", {"tokenizer": "gpt2"}, "65c1fd9d207034b1", marks=needs_gpt2),
    ("records.jsonl", {"val_file": "records.jsonl.gz", "tokenizer": "byte"}, "c3e17e73430562b3"),
    *(
        (f"records.{suffix}", {"tokenizer": "byte"}, "390391efaf3ebec6")
        for suffix in ("parquet", "json", "csv")
    ),
    ("folder", {}, "d36e4149c8804659"),
    pytest.param(
        "folder", {"tokenizer": "gpt2", "val_fraction": 0.3}, "4f986735dd605b3a", marks=needs_gpt2
    ),
    ("many", {}, "939bb63ac894073c"),
    ("many/*1*.txt", {"tokenizer": "bpe:300", "split": "documents"}, "fc57baa348103cee"),
    (["text.txt", "many", "records.jsonl"], {"val_fraction": 0.2}, "7c6391e296294c64"),
    (["text.txt", "many"], {"split": "documents", "tokenizer": "byte"}, "e4f64efaa29e217a"),
    ("questions.jsonl", {"prompt_column": "q", "answer_column": "a"}, "9bbb142331e3c7e7"),
    (
        "questions.jsonl",
        {"prompt_column": "q", "answer_column": "a", "val_fraction": 0.4},
        "5a43d33953a8388b",
    ),
    ("chats.jsonl", {"prompt_column": "m", "tokenizer": "bpe:300"}, "41ee33a1de824c67"),
]


@pytest.mark.parametrize(("source", "settings", "expected"), _ROWS)
def test_a_source_has_the_same_ids_as_ever(
    source: Any, settings: dict[str, Any], expected: str
) -> None:
    dataset = prepare(source, name="it", **settings)
    hashed = "".join(
        hashlib.sha256((dataset.path / name).read_bytes()).hexdigest()
        for name in ("train.bin", "val.bin", "tokenizer.json")
    )
    facts = dataset.source_sha256, dataset.val_source_sha256, dataset.documents, dataset.val_bytes
    losses = [f"{loss or 0:.6g}" for loss in (dataset.bigram_loss, dataset.floor)]
    hashed += str((facts, losses, dataset.characters, dataset.split))
    assert hashlib.sha256(hashed.encode()).hexdigest()[:16] == expected
