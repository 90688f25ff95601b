"""Records, several files and compressed files become documents, each with its end."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from attnlm import AttnlmError, Dataset, UsageError, open_dataset, prepare
from attnlm.base.errors import import_optional
from attnlm.see.reproduce import prepare_command
from attnlm.text import text_files
from attnlm.text.record_files import hub_parts
from attnlm.tokens.tokenizer import END_OF_TEXT
from tests.kit import command, fails
from tests.texts import json_lines, needs_gpt2

zstd = import_optional(text_files.ZSTD, "the tests")
TEXTS = ["The cat sat.", "A dog,\nnaïve: 猫!", " and so on\n", "The end", "  ", "\n\n", "a  "] * 40
CUT_MARKS = ["<|endof", "text|>", END_OF_TEXT[:-1]]
FORGED = [f"a{END_OF_TEXT}b", END_OF_TEXT, *CUT_MARKS, f"x{END_OF_TEXT} y"]


def write_table(path: Path, texts: list[str]) -> None:
    table = pa.table({"id": [1] * len(texts), "text": texts})
    pq.write_table(table, path, row_group_size=7)


def text_of(dataset: Dataset) -> str:
    return dataset.tokenizer.decode([*dataset.train, *dataset.val])


def documents_of(dataset: Dataset) -> list[str]:
    """Return the documents of a text, which must end with an end mark."""
    ids = np.concatenate([np.asarray(dataset.train), np.asarray(dataset.val)])
    ends = np.flatnonzero(ids == dataset.tokenizer.end_of_text) + 1
    assert ends[-1] == len(ids)
    parts = np.split(ids, ends[:-1])
    return [dataset.tokenizer.decode(part[:-1]) for part in parts]


def write_kind(kind: str, path: Path, texts: list[str]) -> Path:
    """A file of that kind; its column is called text. Compressed files have two members."""
    path = path.with_name(path.name + kind)
    if kind == ".parquet":
        write_table(path, texts)
        return path
    parts = (texts[:9], texts[9:])
    contents = [json_lines(part) if "jsonl" in kind else "".join(part).encode() for part in parts]
    compress = {".gz": gzip.compress, ".zst": zstd.compress}.get(path.suffix, bytes)
    path.write_bytes(b"".join(map(compress, contents)))
    return path


@pytest.mark.parametrize("kind", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_records_end_with_a_newline_where_no_id_ends_them(kind: str, here: Path) -> None:
    (here / "plain.txt").write_text("".join(TEXTS), encoding="utf-8")
    plain = prepare("plain.txt")
    path = write_kind(kind, here / "cats", ["", *TEXTS])
    dataset = prepare(path, split="tail", tokenizer=plain.name, name="cats-char")
    assert text_of(dataset) == "".join(text.removesuffix("\n") + "\n" for text in TEXTS)
    assert (dataset.name, dataset.documents) == ("cats-char", 0)


@pytest.mark.parametrize(
    ("kind", "tokenizer"),
    [
        (".jsonl", "char"),
        (".jsonl.gz", "byte"),
        (".jsonl.zst", "bpe:270"),
        (".parquet", "bpe:270"),
        pytest.param(".jsonl", "gpt2", marks=needs_gpt2),
    ],
)
def test_records_are_ended_by_the_end_of_text_which_no_record_can_forge(
    kind: str, tokenizer: str, here: Path
) -> None:
    """Each document has the ids that it has alone; a plain text is encoded whole."""
    texts = [*TEXTS, *FORGED]
    (here / "val.txt").write_text(f"The end.{END_OF_TEXT}")
    options: dict[str, Any] = {"tokenizer": tokenizer, "val_file": "val.txt", "offline": True}
    dataset = prepare(write_kind(kind, here / "cats", [*texts, ""]), **options)
    alone = [dataset.tokenizer.encode_ordinary(text).tolist() for text in texts]
    ended = [[*ids, dataset.tokenizer.end_of_text] for ids in alone]
    assert dataset.train.tolist() == list(itertools.chain.from_iterable(ended))
    assert dataset.val.tolist() == dataset.tokenizer.encode(f"The end.{END_OF_TEXT}")
    assert (dataset.documents, dataset.train_characters) == (len(texts), sum(map(len, texts)))
    first, second, *others = texts  # only the end of the first document moves
    write_kind(kind, here / "cats", [first + second[0], second[1:], *others])
    with pytest.raises(AttnlmError, match="other content"):
        prepare(f"cats{kind}", **options)


def test_a_folder_or_pattern_is_of_documents_of_all_kinds(here: Path) -> None:
    (here / "books").mkdir()
    for kind, texts in (
        (".jsonl.gz", TEXTS[:20]),
        (".parquet", TEXTS[20:40]),
        (".txt.zst", FORGED),
    ):
        write_kind(kind, here / "books" / kind[1:2], texts)
    (here / "books" / "q.png").write_bytes(b"\x89PNG\0")
    expected = [*TEXTS[:20], *TEXTS[20:40], "".join(FORGED)]
    sources: tuple[Any, ...] = ("books", "boo*/[j-t]*", sorted((here / "books").glob("[!q]*")))
    for name, source in enumerate(sources):
        assert documents_of(prepare(source, tokenizer="byte", name=f"{name}")) == expected
    assert open_dataset("0").source_sha256 == open_dataset("1").source_sha256


def test_one_plain_text_stays_as_it_is(here: Path) -> None:
    (here / "records.jsonl").write_bytes(json_lines(["The cat sat. A dog."] * 20))
    (here / "cats.txt").write_text(f"The cat sat.{END_OF_TEXT}A dog." * 50)
    with_end = prepare("records.jsonl", tokenizer="byte")
    dataset = prepare("cats.txt", tokenizer=with_end.name)
    whole = dataset.tokenizer.encode((here / "cats.txt").read_text())
    assert [*dataset.train, *dataset.val] == whole
    assert (whole.count(256), dataset.documents) == (50, 0)
    (here / "many").mkdir()
    (here / "many" / "cats.txt").symlink_to(here / "cats.txt")
    assert prepare("many", tokenizer=with_end.name).documents == 1


def test_records_may_have_crlf_blank_lines_and_a_byte_order_mark(here: Path) -> None:
    texts = json_lines(["a\r\nb\r", "c"] * 30).replace(b"\n", b"\r\n\n")
    (here / "cats.jsonl").write_bytes(b"\xef\xbb\xbf" + texts)
    assert text_of(prepare("cats.jsonl")) == f"a\r\nb\r{END_OF_TEXT}c{END_OF_TEXT}" * 30
    for kind in (pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())):
        pq.write_table(pa.table({"text": pa.array(["ab", "c"] * 30, kind)}), here / "x.parquet")
        assert text_of(prepare("x.parquet", force=True)) == f"ab{END_OF_TEXT}c{END_OF_TEXT}" * 30


def test_records_on_stdin_are_prepared_again_alike(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = json_lines(["a b c d e f"] * 30, "story")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    dataset = prepare("-", column="story")
    words = prepare_command(open_dataset(dataset.path)).removesuffix(" < TEXT").split()[1:]
    again = command(*words, "--force", cwd=here, stdin=content.decode())
    assert open_dataset(here / again.stdout.strip()).source_sha256 == dataset.source_sha256


def test_a_column_may_be_in_any_source(here: Path) -> None:
    (here / "cats.jsonl").write_bytes(json_lines(["a b c d e f"] * 30, "story"))
    (here / "dogs.txt").write_bytes(b"g h\xe9 " * 60)
    train = prepare(["dogs.txt", "cats.jsonl"], column="story", encoding="latin-1")
    assert "g hé" in text_of(train)
    assert "--column story" in prepare_command(open_dataset(train.path))
    validation = prepare("cats.jsonl", column="story", val_file="dogs.txt", encoding="latin-1")
    assert "g hé" in text_of(validation)


# --- What is refused (more in errors.toml) --------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "says", "hints"),
    [
        ("cut.parquet", "cut.parquet is not a complete parquet file", "again"),
        ("damaged.parquet", "damaged.parquet is not a complete parquet file", "again"),
        ("twice.parquet.gz", "is not a complete parquet file", "not be compressed"),
        ("null.parquet", "row 71 of null.parquet: column 'text' is null", "leave out such"),
        ("number.parquet", "row 1 of number.parquet: column 'text' is not text: int", "another"),
        ("txt.parquet", "txt.parquet has no column 'text'", "did you mean txt?"),
        ("bytes.parquet", "row 2 of bytes.parquet is not UTF-8", "leave out such"),
    ],
)
def test_damaged_tables_are_named(name: str, says: str, hints: str, here: Path) -> None:
    column: Any = pa.array(
        {"null": ["a"] * 70 + [None], "number": [1, 2]}.get(name[:-8], ["a b"] * 50)
    )
    if name == "bytes.parquet":
        column = pa.array([b"a", b"\xff"], pa.binary()).view(pa.string())
    path = here / "a table"
    pq.write_table(pa.table({"txt" if name == "txt.parquet" else "text": column}), path)
    whole = path.read_bytes()
    footer = 8 + int.from_bytes(whole[-8:-4], "little")
    changed = {
        "cut.parquet": whole[:-20],
        "damaged.parquet": b"PAR1" + bytes(len(whole) - 4 - footer) + whole[-footer:],
        "twice.parquet.gz": gzip.compress(whole),
    }
    (here / name).write_bytes(changed.get(name, whole))
    fails("prepare", name, cwd=here, code=1, says=says, hints=hints)
    assert not list((here / "data").iterdir())


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
    says = f"needs the Python package {package}, which is not installed"
    hints = f"install it: pip install {package}"
    fails("prepare", source, cwd=here, code=1, says=says, hints=hints)


# --- Hugging Face data sets (what is refused: errors.toml) ----------------------------------------


@pytest.fixture
def hub(here: Path) -> Path:
    folder = here / "stories"
    folder.mkdir()
    (folder / "train-1.jsonl").write_bytes(json_lines(TEXTS[:30], "story"))
    (folder / "train-2.jsonl").write_bytes(json_lines(TEXTS[30:], "story"))
    (folder / "test.jsonl").write_bytes(json_lines(["Dogs."] * 40, "story"))
    return folder


def test_a_data_set_of_the_hub_is_streamed(hub: Path, here: Path) -> None:
    options = ("--tokenizer", "bpe:300", "--column", "story", "--split=tail", "--json")
    done = command("prepare", "hf:./stories", *options, cwd=here)
    assert json.loads(done.stdout)["documents"] == len(TEXTS)
    dataset = open_dataset()
    assert documents_of(dataset) == TEXTS
    assert (dataset.name, dataset.source) == ("stories-bpe300", "hf:./stories")
    command("prepare", "hf:./stories:test", *options, "--name", "test", cwd=here)
    assert documents_of(open_dataset()) == ["Dogs."] * 40
    (here / "tables").mkdir()
    write_table(here / "tables" / "x.parquet", TEXTS)
    assert text_of(prepare("hf:./tables")).startswith(f"The cat sat.{END_OF_TEXT}A dog,")


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


def test_names_of_the_hub_are_parsed(here: Path) -> None:
    with pytest.raises(AttnlmError, match="needs the network"):  # a README may name an address
        prepare("hf:./stories", offline=True, column="story")
    for source in ("hf:", "hf::train", "hf:a:", "hf:a/b@", "hf:@1", "hf:a/b/", "hf:a/b@1/"):
        with pytest.raises(UsageError, match="is not the name of a data set"):
            hub_parts(source)
    for source, *parts in (
        ("squad", "squad", None, None, "train"),
        ("a/b", "a/b", None, None, "train"),
        ("a/b/en/x:test", "a/b", None, "en/x", "test"),
        ("a/b@1f54/en:test", "a/b", "1f54", "en", "test"),
        (".a/b/c", ".a/b", None, "c", "train"),
        *(
            (f"{path}:test", path, None, None, "test")
            for path in ("./a/b", "../a", "/a/c@1", "~/a")
        ),
    ):
        names = ("path", "revision", "config", "split")
        assert hub_parts(f"hf:{source}") == dict(zip(names, parts, strict=True))
