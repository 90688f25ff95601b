"""Records, several files and compressed files become documents, each with its end."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlm.base.errors import AttnlmError, UsageError, import_optional
from attnlm.data.bin_files import encode_documents
from attnlm.data.dataset import Dataset, open_dataset
from attnlm.data.prepare import prepare
from attnlm.see.reproduce import prepare_command
from attnlm.text import record_files, text_files
from attnlm.text.hub_datasets import HubName, parsed
from attnlm.text.text_files import Piece
from attnlm.tokens.tokenizer import END_OF_TEXT, BpeTokenizer, safe_pieces
from tests.kit import command, fails
from tests.texts import GPT2_END, json_lines, needs_gpt2

zstd = import_optional(text_files.ZSTD, "the tests")
TEXTS = ["The cat sat.", "A dog,\nnaïve: 猫!", " and so on\n", "The end"] * 40


def write_table(path: Path, texts: Iterable[Any], column: str = "text", **options: Any) -> None:
    table = pa.table({"id": [1] * len(list(texts)), column: list(texts)})
    pq.write_table(table, path, row_group_size=7, **options)


def text_of(dataset: Dataset) -> str:
    return dataset.tokenizer.decode([*dataset.train, *dataset.val])


def documents_of(dataset: Dataset) -> list[str]:
    """Return the documents of a text, which must end with an end mark."""
    ids = np.concatenate([np.asarray(dataset.train), np.asarray(dataset.val)])
    ends = np.flatnonzero(ids == dataset.tokenizer.end_of_text) + 1
    assert ends[-1] == len(ids)
    parts = np.split(ids, ends[:-1])
    return [dataset.tokenizer.decode(part[:-1]) for part in parts]


# --- Where texts come from ------------------------------------------------------------------------


def write_kind(kind: str, path: Path, texts: list[str]) -> Path:
    """A file of that kind; its column is called text."""
    path = path.with_name(path.name + kind)
    match kind:
        case ".parquet":
            write_table(path, texts)
        case ".jsonl":
            path.write_bytes(json_lines(texts))
        case ".jsonl.gz":
            path.write_bytes(
                gzip.compress(json_lines(texts[:9])) + gzip.compress(json_lines(texts[9:]))
            )
        case ".jsonl.zst":
            path.write_bytes(
                zstd.compress(json_lines(texts[:9])) + zstd.compress(json_lines(texts[9:]))
            )
        case ".txt.gz":
            path.write_bytes(gzip.compress("".join(texts).encode()))
        case ".txt.zst":
            path.write_bytes(zstd.compress("".join(texts).encode()))
    return path


KINDS = pytest.mark.parametrize("kind", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"])


@KINDS
def test_records_end_with_a_newline_where_no_id_ends_them(kind: str, here: Path) -> None:
    (here / "plain.txt").write_text("".join(TEXTS), encoding="utf-8")
    plain = prepare("plain.txt")
    dataset = prepare(
        write_kind(kind, here / "cats", TEXTS), split="tail", tokenizer=plain.name, name="cats-char"
    )
    assert text_of(dataset) == "".join(text.removesuffix("\n") + "\n" for text in TEXTS)
    assert (dataset.name, dataset.documents, dataset.column) == ("cats-char", 0, "text")


@pytest.mark.parametrize(
    "tokenizer", ["char", "byte", "bpe:270", pytest.param("gpt2", marks=needs_gpt2)]
)
@KINDS
def test_records_are_ended_by_the_end_of_text(kind: str, tokenizer: str, here: Path) -> None:
    options: dict[str, Any] = {"tokenizer": tokenizer, "split": "tail", "offline": True}
    dataset = prepare(write_kind(kind, here / "cats", TEXTS), **options)
    assert documents_of(dataset) == TEXTS
    assert (dataset.documents, dataset.characters) == (len(TEXTS), sum(map(len, TEXTS)))
    first, second, *others = TEXTS  # only the end of the first document moves
    write_kind(kind, here / "cats", [first + second[0], second[1:], *others])
    with pytest.raises(AttnlmError, match="other content"):
        prepare(f"cats{kind}", **options)


@pytest.mark.parametrize("kind", [".txt.gz", ".txt.zst"])
def test_a_compressed_text_is_the_text(kind: str, here: Path) -> None:
    (here / "cats.txt").write_text("".join(TEXTS), encoding="utf-8")
    plain = prepare("cats.txt", name="plain")
    packed = prepare(write_kind(kind, here / "cats", TEXTS))
    assert packed.name == "cats-char"
    assert (packed.train_sha256, packed.val_sha256) == (plain.train_sha256, plain.val_sha256)
    assert packed.source_sha256 == plain.source_sha256


@needs_gpt2
def test_a_folder_or_pattern_is_of_documents_of_all_kinds(here: Path) -> None:
    (here / "books").mkdir()
    write_kind(".jsonl.gz", here / "books" / "b", TEXTS[:20])
    write_kind(".parquet", here / "books" / "c", TEXTS[20:40])
    write_kind(".txt.zst", here / "books" / "a", TEXTS[:2])
    (here / "books" / "d.txt").write_text("Dogs.\n" * 50)
    (here / "books" / "e.txt").write_bytes(b"")
    (here / "books" / "f.png").write_bytes(b"\x89PNG\0")
    expected = ["".join(TEXTS[:2]), *TEXTS[:20], *TEXTS[20:40], "Dogs.\n" * 50]
    folder = prepare("books", tokenizer="gpt2", offline=True)
    assert documents_of(folder) == expected
    pattern = prepare("boo*/[a-f].*", tokenizer="gpt2", name="pattern", offline=True)
    assert documents_of(pattern) == expected
    assert pattern.source_sha256 == folder.source_sha256
    shell = prepare(sorted((here / "books").glob("[a-d].*")), tokenizer="gpt2", offline=True)
    assert documents_of(shell) == expected
    assert prepare("**/*.jsonl.gz").name.startswith(here.name[:5])
    fails(
        "prepare",
        "*.jsonl",
        cwd=here,
        code=1,
        says="no files found: *.jsonl",
        hints="pattern",
    )


@needs_gpt2
def test_each_document_has_the_ids_that_it_has_alone(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnlm.data.bin_files.PIECE", 150)
    monkeypatch.setattr(record_files, "PIECE", 70)
    texts = [*TEXTS, f"x{END_OF_TEXT} y", "  ", "\n\n", "a  ", "  b"]
    (here / "cats.jsonl").write_bytes(json_lines(texts))
    (here / "val.txt").write_text(f"The end.{END_OF_TEXT}")
    dataset = prepare("cats.jsonl", tokenizer="gpt2", val_file="val.txt", offline=True)
    tokenizer = dataset.tokenizer
    assert isinstance(tokenizer, BpeTokenizer)
    expected = [[*tokenizer.encode_ordinary(text).tolist(), GPT2_END] for text in texts]
    assert [*dataset.train] == [token for ids in expected for token in ids]
    assert [*dataset.val] == tokenizer.encode(f"The end.{END_OF_TEXT}")  # one plain text


@needs_gpt2
def test_one_plain_text_stays_as_it_is(here: Path) -> None:
    (here / "cats.txt").write_text(f"The cat sat.{END_OF_TEXT}A dog." * 50)
    dataset = prepare("cats.txt", tokenizer="gpt2", offline=True)
    whole = dataset.tokenizer.encode((here / "cats.txt").read_text())
    assert [*dataset.train, *dataset.val] == whole
    assert (whole.count(GPT2_END), dataset.documents) == (50, 0)
    (here / "many").mkdir()
    (here / "many" / "cats.txt").symlink_to(here / "cats.txt")
    assert prepare("many", tokenizer="gpt2", offline=True).documents == 1


@needs_gpt2
def test_no_document_can_forge_an_end(here: Path) -> None:
    texts = [f"a{END_OF_TEXT}b", END_OF_TEXT, "<|endof", "text|>", f"{END_OF_TEXT[:-1]}", "x"] * 30
    (here / "cats.jsonl").write_bytes(json_lines(texts))
    dataset = prepare("cats.jsonl", tokenizer="gpt2", split="tail", offline=True)
    assert documents_of(dataset) == texts
    (here / "many").mkdir()
    for name in "ab":
        (here / "many" / name).write_text("".join(texts))
    assert documents_of(prepare("many", tokenizer="gpt2", offline=True)) == ["".join(texts)] * 2


def test_another_column_line_ends_and_blank_lines_of_records(here: Path) -> None:
    texts = json_lines(["a\r\nb\r", "c"] * 30, "story").replace(b"\n", b"\r\n\n")
    (here / "cats.jsonl").write_bytes(b"\xef\xbb\xbf" + texts)
    dataset = prepare("cats.jsonl", column="story")
    assert text_of(dataset) == f"a\r\nb\r{END_OF_TEXT}c{END_OF_TEXT}" * 30
    assert open_dataset(dataset.path).column == "story"
    assert "--column story" in prepare_command(dataset)


@pytest.mark.parametrize("column", [None, "text", "story"])
def test_records_on_stdin_are_prepared_again_alike(
    column: str | None, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = json_lines(["a b c d e f"] * 30, column or "text")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    dataset = prepare("-", column=column)
    assert dataset.records_on_stdin == (column is not None)
    assert text_of(dataset) == (f"a b c d e f{END_OF_TEXT}" * 30 if column else content.decode())
    words = prepare_command(dataset).removesuffix(" < TEXT").split()[1:]
    again = command(*words, "--force", cwd=here, stdin=content.decode())
    assert open_dataset(here / again.stdout.strip()).source_sha256 == dataset.source_sha256


def test_a_column_may_be_in_any_source(here: Path) -> None:
    (here / "cats.jsonl").write_bytes(json_lines(["a b c d e f"] * 30, "story"))
    (here / "dogs.txt").write_bytes(b"g h\xe9 " * 60)
    train = prepare(["dogs.txt", "cats.jsonl"], column="story", encoding="latin-1")
    assert "g hé" in text_of(train) and train.column == "story"
    validation = prepare("cats.jsonl", column="story", val_file="dogs.txt", encoding="latin-1")
    assert "g hé" in text_of(validation)


# --- Pieces ---------------------------------------------------------------------------------------


def byte_pairs() -> BpeTokenizer:
    ranks = [*(bytes([byte]) for byte in range(256)), b"th", b" th", b"\n\n", b"|>", b"<|", b"ab"]
    return BpeTokenizer("gpt2", ranks, vocab_size=263, end_of_text=262)


@given(
    st.lists(st.text(alphabet="ath \n<|>é" + "e", max_size=30), max_size=12),
    st.integers(14, 40),
    st.randoms(use_true_random=False),
)
def test_pieces_of_any_size_have_the_text_of_each_document(
    texts: list[str], limit: int, chance: random.Random
) -> None:
    texts = [text for text in texts if text]
    tokenizer = byte_pairs()
    whole, ends = "".join(texts), list(np.cumsum([len(text) for text in texts], dtype=int))
    cuts = sorted({0, len(whole), *chance.choices(range(len(whole) + 1), k=5)})
    pieces = [
        Piece(whole[a:b], tuple(int(end) - a for end in ends if a < end <= b))
        for a, b in itertools.pairwise(cuts)
    ]
    safe = list(safe_pieces(pieces, limit))
    assert safe == list(safe_pieces([Piece(whole, tuple(map(int, ends)))], limit))
    assert "".join(piece.text for piece in safe) == whole
    assert all(len(piece.text) <= limit for piece in safe)
    ids = [encode_documents(tokenizer, piece).tolist() for piece in safe]
    by_document: list[list[int]] = [[]]
    for token in [token for piece in ids for token in piece]:
        if token == tokenizer.end_of_text:
            by_document.append([])
        else:
            by_document[-1].append(token)
    assert [tokenizer.decode(document) for document in by_document] == [*texts, ""]


def test_records_longer_than_a_piece_have_one_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_files, "PIECE", 10)
    found = [("row", text) for text in ("a" * 25, "", "bb", "c" * 10)]
    monkeypatch.setattr(record_files, "_parquet_values", lambda *_: iter(found))
    pieces = list(record_files.record_pieces(Path("x"), "text", "x", marks_ends=True))
    assert pieces == [
        Piece("a" * 10),
        Piece("a" * 10),
        Piece("aaaaabb", (5, 7)),
        Piece("c" * 10, (10,)),
    ]


# --- What is refused ------------------------------------------------------------------------------

GOOD = json_lines(["The cat sat."] * 5)


@pytest.mark.parametrize(
    ("content", "message", "hint"),
    [
        (GOOD + b"{bad}\n", "line 6 of x.jsonl is not valid JSON", "one record"),
        (GOOD + b'{"text": "a', "line 6 of x.jsonl is not valid JSON", "one record"),
        (GOOD + b"[" * 100_000, "line 6 of x.jsonl is not valid JSON", "one record"),
        (GOOD + b'["a"]', "line 6 of x.jsonl is not an object, but a list", "one record"),
        (GOOD + b'{"txt": "a", "id": 1}', "line 6 of x.jsonl has no column 'text'", "txt?"),
        (GOOD + b'{"b": "a"}', "line 6 of x.jsonl has no column 'text'", "from b"),
        (GOOD + b"{}", "line 6 of x.jsonl has no column 'text'", "no columns"),
        (GOOD + b'{"text": null}', "line 6 of x.jsonl: column 'text' is null", "leave out such"),
        (GOOD + b'{"text": 5}', "line 6 of x.jsonl: column 'text' is not text: int", "column"),
        (GOOD + b'{"text": "\xff"}', "line 6 .* 0xff in position 10", "UTF-8"),
        (GOOD + b'{"text": "\\ud800"}', "line 6 .*half a surrogate", "repair"),
        (b"", "x.jsonl is empty", "not empty"),
        (b"\n\n", "x.jsonl is empty", "not empty"),
    ],
    ids=range(13),
)
def test_bad_lines_are_named(content: bytes, message: str, hint: str, here: Path) -> None:
    (here / "x.jsonl").write_bytes(content)
    with pytest.raises(AttnlmError, match=message) as caught:
        prepare("x.jsonl")
    assert hint in caught.value.hint
    assert "\n" not in caught.value.message and not list((here / "data").iterdir())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt.gz", gzip.compress(os.urandom(9999).hex().encode())[:-9], "it ends too early"),
        ("x.txt.gz", b"not compressed", "Not a gzipped file"),
        ("x.txt.gz", gzip.compress(b"abc" * 99)[:-5] + b"12345", "CRC"),
        ("x.jsonl.gz", gzip.compress(GOOD)[:-4], "it ends too early"),
        ("x.txt.zst", zstd.compress(os.urandom(9999).hex().encode())[:-9], "it ends too early"),
        ("x.txt.zst", b"not compressed", "Zstandard"),
        ("x.jsonl.zst", zstd.compress(GOOD)[:-4], "it ends too early"),
    ],
    ids=range(7),
)
def test_damaged_archives_are_named(name: str, content: bytes, message: str, here: Path) -> None:
    (here / name).write_bytes(content)
    with pytest.raises(AttnlmError, match=f"cannot decompress {name}: .*{message}") as caught:
        prepare(name)
    assert "gzip -t" in caught.value.hint
    (here / "x.gz").write_bytes(gzip.compress(b"abc\xff"))
    with pytest.raises(AttnlmError, match=r"x\.gz is not valid utf-8 at byte 3"):
        prepare("x.gz")


def write_broken_tables(here: Path) -> None:
    write_table(here / "good.parquet", ["a b"] * 50)
    whole = (here / "good.parquet").read_bytes()
    (here / "cut.parquet").write_bytes(whole[:-20])
    (here / "damaged.parquet").write_bytes(b"PAR1" + bytes(len(whole) - 1000) + whole[-996:])
    (here / "empty.parquet").write_bytes(b"")
    (here / "none.parquet").write_bytes(b"nothing")
    write_table(here / "null.parquet", ["a"] * 70 + [None])
    write_table(here / "number.parquet", [1, 2])
    write_table(here / "txt.parquet", ["a"], "txt")
    (here / "twice.parquet.gz").write_bytes(gzip.compress(whole))
    bad = pa.array([b"a", b"\xff"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": bad}), here / "bytes.parquet")


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("cut.parquet", "cut.parquet is not a complete parquet file", "again"),
        ("damaged.parquet", "damaged.parquet is not a complete parquet file", "again"),
        ("empty.parquet", "empty.parquet is not a complete parquet file", "again"),
        ("none.parquet", "none.parquet is not a complete parquet file", "again"),
        ("null.parquet", "row 71 of null.parquet: column 'text' is null", "leave out such"),
        ("number.parquet", "column 'text' of number.parquet is not text: int64", "contains text"),
        ("txt.parquet", "txt.parquet has no column 'text'", "did you mean txt?"),
        ("bytes.parquet", "row 2 of bytes.parquet: column 'text' is not UTF-8", "leave out such"),
        ("twice.parquet.gz", "is not a complete parquet file", "not be compressed"),
    ],
)
def test_bad_tables_are_named(name: str, message: str, hint: str, here: Path) -> None:
    write_broken_tables(here)
    with pytest.raises(AttnlmError, match=message) as caught:
        prepare(name)
    assert hint in caught.value.hint
    assert not list((here / "data").iterdir())


def test_texts_of_a_table_may_be_stored_in_other_ways(here: Path) -> None:
    for kind in (pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())):
        pq.write_table(pa.table({"text": pa.array(["ab", "c"] * 30, kind)}), here / "x.parquet")
        assert text_of(prepare("x.parquet", force=True)) == f"ab{END_OF_TEXT}c{END_OF_TEXT}" * 30


def test_a_name_of_the_hub_is_never_a_folder(
    hub: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local folder with the data set's name is not used instead of the library's answer."""

    def load(path: str, config: str | None, revision: str | None) -> None:
        raise ValueError(f"asked for {path} at {revision}")

    monkeypatch.setattr("datasets.load_dataset_builder", load)
    for name, asked, hint in (
        ("stories", "hf://datasets/stories at None", "for the folder, use hf:./stories"),
        ("a/b@1f54:test", "a/b at 1f54", "the network"),
    ):
        with pytest.raises(AttnlmError, match=f"asked for {asked}\nhint") as caught:
            prepare(f"hf:{name}")
        assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("source", "package"),
    [("x.parquet", "pyarrow"), ("x.zst", "backports.zstd"), ("hf:a/b", "datasets")],
)
def test_missing_extras_are_named(
    source: str, package: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pyarrow", "backports.zstd", "compression", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    (here / source.replace("/", "")).write_bytes(b"x")
    fails(
        *("prepare", source),
        cwd=here,
        code=1,
        says=f"needs the Python package {package}, which is not installed",
        hints=f"install it: pip install {package}",
    )


# --- Hugging Face data sets -----------------------------------------------------------------------


@pytest.fixture
def hub(here: Path) -> Path:
    folder = here / "stories"
    folder.mkdir()
    (folder / "train-1.jsonl").write_bytes(json_lines(TEXTS[:30], "story"))
    (folder / "train-2.jsonl").write_bytes(json_lines(TEXTS[30:], "story"))
    (folder / "test.jsonl").write_bytes(json_lines(["Dogs."] * 40, "story"))
    return folder


@needs_gpt2
def test_a_data_set_of_the_hub_is_streamed(hub: Path, here: Path) -> None:
    options = ("--tokenizer", "gpt2", "--column", "story", "--offline", "--split=tail", "--json")
    done = command("prepare", "hf:./stories", *options, cwd=here)
    assert json.loads(done.stdout)["documents"] == len(TEXTS)
    dataset = open_dataset()
    assert documents_of(dataset) == TEXTS
    assert (dataset.name, dataset.source) == ("stories-gpt2", "hf:./stories")
    command("prepare", "hf:./stories:test", *options, "--name", "test", cwd=here)
    assert documents_of(open_dataset()) == ["Dogs."] * 40
    (here / "tables").mkdir()
    write_table(here / "tables" / "x.parquet", TEXTS)
    assert text_of(prepare("hf:./tables")).startswith(f"The cat sat.{END_OF_TEXT}A dog,")


@pytest.mark.parametrize(
    ("source", "says", "hints"),
    [
        ("hf:./stories:trian", "cannot read hf:./stories:trian: Bad split: trian", "hf:OWNER/NAME"),
        ("hf:./stories", "hf:./stories has no column 'text'", "from id, story"),
        ("hf:./pickled", "cannot read hf:./pickled: ", "hf:OWNER/NAME"),
        ("hf:./scripted", "cannot read hf:./scripted: ", "hf:OWNER/NAME"),
        ("hf:./archived", "has an unsupported format: webdataset", "json"),
        ("hf:./broken", "cannot read hf:./broken", "hf:OWNER/NAME"),
        ("hf:./null", "row 2 of hf:./null: column 'text' is null", "leave out such"),
        ("hf:stories", "hf:stories needs the network", "for the folder, use hf:./stories"),
        ("hf:nobody/nothing", "hf:nobody/nothing needs the network", "a folder"),
    ],
)
def test_missing_hub_data_sets_fail_with_one_error(
    source: str, says: str, hints: str, hub: Path, here: Path
) -> None:
    made: dict[str, bytes] = {
        "pickled/x.pkl": b"\x80\x04cos\nsystem\n",
        "scripted/scripted.py": b"open('ran', 'w')",
        "archived/x.tar": b"\0" * 10240,
        "broken/x.jsonl": b"{bad\n",
        "null/x.jsonl": json_lines(["a", None]),
    }
    for name, content in made.items():
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_bytes(content)
    fails("prepare", source, "--offline", cwd=here, code=1, says=says, hints=hints)
    assert not list((here / "data").iterdir())
    assert not (here / "ran").exists()


def test_names_of_the_hub_are_parsed(here: Path) -> None:
    for source in ("hf:", "hf::train", "hf:a:", "hf:a/b@", "hf:@1", "hf:a/b/", "hf:a/b@1/"):
        with pytest.raises(UsageError, match="is not the name of a data set"):
            prepare(source)
    assert parsed("hf:squad") == HubName("squad")
    assert parsed("hf:a/b") == HubName("a/b", None, "train", None)
    assert parsed("hf:a/b/en/x:test") == HubName("a/b", "en/x", "test")
    assert parsed("hf:a/b@1f54/en:test") == HubName("a/b", "en", "test", "1f54")
    for path in ("./a/b/c", "../a/b/c", "/a/b/c@1", "~/a/b/c"):
        assert parsed(f"hf:{path}:test") == HubName(path, split="test")
    assert parsed("hf:.a/b/c") == HubName(".a/b", "c")
