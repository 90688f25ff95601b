"""Corpora: every kind of source gives exactly its text; other files are refused.

Each test is in an empty folder. What is not found is in errors.toml.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import hashlib
import io
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlm import AttnlmError, Note, UsageError, prepare
from attnlm.base.events import OnEvent, ignore
from attnlm.base.folders import is_safe_name
from attnlm.data import spool
from attnlm.data.spool import _write_spool
from attnlm.text import corpus, record_files, text_files
from attnlm.text.corpus import Corpus, get_corpus, safe_name
from attnlm.text.text_files import BLOCK, END
from tests.web_server import WebServer, body

SPOOL = Path("../spool")
PLAY = b"First Citizen:\nBefore we proceed any further, hear me speak.\n"


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("here", "spool"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")


def corpus_of(
    source: Any, column: str | None = None, stdin: io.BytesIO | None = None, **options: Any
) -> Corpus:
    sources = source if isinstance(source, list) else [source]
    with pytest.MonkeyPatch.context() as patch:
        if stdin is not None:
            patch.setattr("sys.stdin", SimpleNamespace(buffer=stdin))
        return get_corpus(sources, columns=[column] if column else [], spool=SPOOL, **options)


@pytest.fixture
def short_tales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `tales` one line: the real ones take a while."""
    stand_in = SimpleNamespace(generate_tales=lambda: ("Once upon a time.\n", {0: 1.5}))
    monkeypatch.setattr("attnlm.text.corpus_tales", stand_in, raising=False)


def write_all(contents: dict[str, bytes]) -> None:
    for name, content in contents.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content)


def text_of(found: Corpus, on_event: OnEvent = ignore) -> str:
    """The text as it is copied to the spool, with a | behind each document."""
    (path := SPOOL / "copy").unlink(missing_ok=True)
    _write_spool(found, path, on_event)
    return path.read_bytes().decode(errors="surrogateescape").replace(END, "|")


def notes(events: list[object]) -> list[str]:
    return [event.text for event in events if isinstance(event, Note)]


UTF8, UTF16 = codecs.BOM_UTF8, "né".encode("utf-16")
TALES = "Once upon a time.\n"
JSON, CSV = b'{\n "name": 1\n}', b"word,size\ncat,3\n"


@pytest.mark.parametrize(
    ("files", "source", "options", "text"),
    [
        *(
            ({"a": content}, "a", {"encoding": encoding}, text)
            for content, encoding, text in [
                (b"a\r\nb\rc\n", "utf-8", "a\r\nb\rc\n"),
                (UTF8 + "é".encode(), "utf-8", "é"),
                ("a\ufeffb".encode(), "utf-8", "a\ufeffb"),
                *((codecs.lookup(f"utf-{end}").encode("\ufeffné")[0], encoding, "né")
                  for end in ("16-le", "16-be", "32-le", "32-be")
                  for encoding in ("utf-8", f"utf-{end[:2]}")),
                (codecs.BOM_UTF16_LE, "latin-1", "ÿþ"),
                (b"n\xe9", "latin-1", "né"),
                ("日本".encode("shift_jis"), "shift_jis", "日本"),
                (b"abc\0d", "utf-8", "abc\0d"),
                (UTF8, "utf-8", ""),
                (b"", "utf-8", ""),
            ]
        ),  # Files are decoded one by one.
        ({"f/a": UTF16, "f/b": UTF16}, "f", {"encoding": "UTF16"}, "né|né|"),
        ({"f/a": UTF16, "f/b": UTF8 + b"x", "f/c": b"x"}, "f", {}, "né|x|x|"),
        ({"f/a": b"a\r", "f/b": b"\nb"}, "f", {}, "a\r|\nb|"),
        # Files do not shadow named corpora, which are UTF-8 whatever `encoding` names.
        ({"tales": PLAY}, "tales", {}, TALES),
        ({"tales": PLAY}, "./tales", {}, PLAY.decode()),
        ({"tales": PLAY}, Path("tales"), {}, PLAY.decode()),
        ({"a": b"\xe9"}, ["a", "tales"], {"encoding": "latin-1"}, f"é|{TALES}|"),
        # Tables of a folder are texts, unless a column is named.
        ({"f/a.json": JSON, "f/b.csv": CSV}, "f", {}, f"{JSON.decode()}|{CSV.decode()}|"),
        ({"f/b.csv": CSV}, "f/*.csv", {"column": "word"}, "cat|"),
        ({"a.csv": b'n,text\r1,a\r2,"b\r\nc\rd"\r\n'}, "a.csv", {}, "a|b\r\nc\rd|"),
    ],
)  # fmt: skip
def test_a_source_is_its_text(
    files: dict[str, bytes], source: Any, options: Any, text: str, short_tales: None
) -> None:
    write_all(files)
    assert text_of(corpus_of(source, **options)) == text


def test_errors_of_one_of_several_sources_name_it(short_tales: None) -> None:
    write_all({"a": b"x\xe2\x82", "b": b"\xac", "c": b"c" * 8192 + b"\xff", "d": PLAY})
    cases = ((["a", "b"], "a", 1), (["c", "a"], "c", 8192), (["d", "c"], "c", 8192))
    for sources, name, place in (*cases, (["tales", "a"], "a", 1)):
        with pytest.raises(AttnlmError, match=f"^{name} is not valid utf-8 at byte {place}\n"):
            text_of(corpus_of(sources))


@pytest.mark.parametrize("name", ["utf-9", "base64", "rot13", "zip", "hex", "", "a\0b", "\udc80"])
def test_an_unknown_encoding_is_a_usage_error(name: str) -> None:
    with pytest.raises(UsageError, match="unknown text encoding"):
        corpus_of("-", encoding=name, stdin=io.BytesIO(b""))


def test_stdin_and_pipes_are_text_or_records_if_a_column_is_given() -> None:
    """A pipe named like a file of records contains records anyhow."""
    lines = b'{"a": "x", "b": "y"}\n' * 3

    def text(source: str, content: bytes, column: str | None) -> str:
        if source == "-":
            stdin = io.BytesIO(content)
            return text_of(corpus_of(source, column=column, stdin=stdin))
        os.mkfifo(source)
        writer = threading.Thread(target=Path(source).write_bytes, args=[content])
        writer.start()
        text = text_of(corpus_of(source, column=column))
        writer.join()
        return text

    stream = io.BytesIO(PLAY)
    found = corpus_of("-", stdin=stream)
    assert (found.name, found.sources) == ("stdin", ("-",))
    assert text_of(found) == PLAY.decode() and not stream.closed
    with pytest.raises(AttnlmError, match="stdin is not valid utf-8 at byte 0"):
        text("-", b"\xff", None)
    assert text("-", lines, None) == lines.decode()
    assert text("-", lines, "a") == "x|x|x|"
    assert text("-", b"a,b\nx,y\nx,z\n", "b") == "y|z|"
    assert text("pipe", lines, "b") == text("b.jsonl", lines, "b") == "y|y|y|"
    assert text("c.jsonl.gz", gzip.compress(lines), "b") == "y|y|y|"
    assert text("text", b"abc", None) == "abc"
    with pytest.raises(AttnlmError, match="line 1 of stdin has no column 'c'"):
        text("-", lines, "c")


RECORD = '{"text": "x", "b": [1, "], ["]}'
ARRAYS = [
    *((f"[{start}{RECORD}{mark}{RECORD}{end}]", 2, "") for start in ("", "\n ")
      for mark in (",", " ,\n") for end in ("", "\n ")),
    ("\n\n[ ]\n", 0, ""),
    (f"[{RECORD} {RECORD}]", 1, "record 2 of stdin is not valid JSON: Expecting ','"),
    (f"[{RECORD},]", 1, "record 2 of stdin is not valid JSON: Expecting value"),
    (f"[{RECORD}, {RECORD[:-1]}", 1, "record 2 of stdin is not valid JSON: Expecting ','"),
    (f"[{RECORD}] {{}}", 1, "record 2 of stdin is not valid JSON"),
    ("[" * 10**5, 0, "record 1 of stdin is not valid JSON"),
    ('["x"]', 0, "record 1 of stdin is of type str"),
    (f"[{RECORD}, {{\"text\": \"\\ud800\"}}]", 1, "record 2 of stdin: .* half a surrogate pair"),
    # Surrogates stand for bytes that are not UTF-8. Another fault before them comes first.
    *((f"[{RECORD}{rest}", 1, "record 2 of stdin is not valid JSON: 'utf-8' codec .* 0xe9: invalid")
      for rest in (', {"text": "a\udce9b"}]', ', {"text": "a", "x": "\udce9"}]', ",\udce9 {}]",
                   ', {"text"\udce9: ', ' \udce9, {"text": "a"}]', "]\udce9 ")),
    (f"[{RECORD}]\udce2\udc82", 1, "record 2 of stdin .* 0xe2: unexpected end of data"),
    (f'[{RECORD}, {{"text" "\udce9"}}]', 1, "record 2 of stdin is not valid JSON: Expecting ':'"),
    (f"[{RECORD} {RECORD}, \udce9", 1, "record 2 of stdin is not valid JSON: Expecting ','"),
]  # fmt: skip


@pytest.mark.parametrize("block", [4, 7, 999])
@pytest.mark.parametrize(("array", "count", "says"), ARRAYS, ids=range(len(ARRAYS)))
def test_an_array_is_read_record_by_record(
    array: str, count: int, says: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_files, "BLOCK", block)
    stdin = io.BytesIO(codecs.BOM_UTF8 + array.encode(errors="surrogateescape"))
    texts = corpus_of("-", column="text", stdin=stdin)
    found: list[str] = []
    with pytest.raises(AttnlmError, match=says) if says else contextlib.nullcontext():
        found += texts.texts(texts.files[0])
    assert found == ["x" + END] * count


class Endless(io.RawIOBase):
    """A stream that repeats bytes behind its first ones, and counts what was read."""

    def __init__(self, first: bytes, more: bytes) -> None:
        self._left, self._more, self.size = first, more, 0

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        while len(self._left) < len(into):
            self._left += self._more * 999
        size = len(into)
        into[:], self._left = self._left[:size], self._left[size:]
        self.size += size
        return size


MOST = "stdin has more than 9,000 bytes"


@pytest.mark.parametrize(
    ("column", "first", "more", "says"),
    [
        (None, b"", b"\0", MOST),
        ("text", b"[\n", b'{"text": "abcd"},\n', MOST),
        ("text", b"[", b'{"text": "abcd"},', MOST),
        ("text", b"", b'{"text": "abcd"}\n', MOST),
        ("text", b"text\n", b"abcd\n", MOST),
        ("text", b'[{"text": "', b"abcd", "record 1 of stdin is longer than 20,000 bytes, or"),
        ("text", b'{"text": "', b"abcd", "line 1 of stdin is longer than 20,000 bytes"),
        ("text", b"", b"\0", "line 1 of stdin is longer than 20,000 bytes"),
        ("text", b'text\n"', b"abcd\n", "stdin is not valid CSV: field larger than field limit"),
    ],
)
def test_a_stream_without_an_end_is_refused_at_a_limit(
    column: str | None, first: bytes, more: bytes, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_files, "_LONGEST", 20_000)
    for module in (record_files, spool, text_files):
        monkeypatch.setattr(module, "BLOCK", 1000)
    raw = Endless(first, more)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BufferedReader(raw, 1000)))
    with pytest.raises(AttnlmError, match=says):
        prepare("-", column=column, max_bytes=9000)
    assert raw.size < 100_000 and not list(Path("data").iterdir())


# --- Folders and several sources ------------------------------------------------------------------


def test_a_folder_is_its_texts_in_the_order_of_their_paths() -> None:
    # As strings "a-b" and "a.txt" come before "a/z"; as parts of paths "a" comes before both.
    names = ["B.txt", "a/z", "a-b/c", "a.txt", "b/1", "ß"]
    write_all({f"books/{name}": name.encode() for name in names})
    events: list[object] = []
    found = corpus_of("books")
    assert text_of(found, events.append) == "".join(f"{name}|" for name in names)
    assert (found.name, found.sources) == ("books", ("books",))
    assert not notes(events)
    assert corpus_of(".").name == corpus_of("books/..").name == "here"
    assert corpus_of("./books/").name == "books"


def test_other_files_of_a_folder_are_left_out_with_a_note() -> None:
    texts = {"an edge.txt": b"a" * (BLOCK - 1) + "é".encode(), "plain.txt": PLAY}
    others = {"1.png": b"\x89PNG\r\n", "2.bin": b"a\0b", "4.cut": b"a\xe2\x82", "5.bin": b"\0"}
    others |= {"7.gz": gzip.compress(os.urandom(999).hex().encode())[:-9], "8.gz": b"no"}
    others |= {"9.parquet": b"PAR1"}
    empty = {"3.empty": b"", "6.mark": codecs.BOM_UTF8}
    write_all({**texts, **others, **empty, ".git/config": PLAY, ".hidden": PLAY})
    events: list[object] = []
    kept = [texts[name].decode() + "|" for name in sorted(texts)]
    assert text_of(corpus_of("."), events.append) == "".join(kept)
    assert notes(events) == [
        "left out 9 of 11 files, empty or no utf-8 text: 1.png (byte 0), 2.bin (NUL), "
        "3.empty (empty), 4.cut (byte 1), 5.bin (NUL), 6.mark (empty), 7.gz (it ends too early), "
        "8.gz (Not a gzipped file (b'no')), 9.parquet (not complete)",
    ]


def test_what_attnlm_made_is_left_out_of_a_folder_that_contains_it() -> None:
    made = {"latest": b"x\n", "x/config.json": b"{}", "x/metrics.jsonl": b'{"text": "no"}\n'}
    write_all(
        {f"in/{root}/{name}": content for root in ("runs", "b/r") for name, content in made.items()}
    )
    write_all({"in/data/latest": b"t", "in/data/t/meta.json": b"{}", "in/data/t/train.bin": b"ids"})
    write_all({"in/own/latest": b"news", "in/own/config.json": b"{}", "in/text": PLAY})
    mine = ["own/config.json", "own/latest", "text"]
    for source in ("in", "./in/", str(Path("in").absolute()), "in/**", "in/**/*"):
        events: list[object] = []
        found = corpus_of(source, on_event=events.append)
        shown = [
            str(Path(file.shown).absolute().relative_to(Path("in").absolute()))
            for file in found.files
        ]
        assert sorted(shown) == mine, source
        (note,) = notes(events)
        assert [Path(name).name for name in note[9:-19].split(", ")] == ["r", "data", "runs"]
        assert note.startswith("left out ") and note.endswith(", which attnlm made")
    # A folder that the user names is read.
    assert len(corpus_of("in/runs").files) == 3


@pytest.mark.skipif(sys.platform == "win32", reason="symlinks need a privilege")
def test_links_are_followed_but_not_in_circles() -> None:
    write_all({"top/a/text": b"1", "top/b/text": b"2", "outside/text": b"3"})
    targets = {"a/to b": "top/b", "b/to a": "top/a", "up": "top", "c": "outside"}
    for link, target in targets.items():
        (Path("top") / link).symlink_to(Path(target).absolute())
    Path("top/broken").symlink_to("nothing")
    events: list[object] = []
    assert text_of(corpus_of("top"), events.append) == "1|2|2|1|3|"
    (note,) = notes(events)
    assert note == "left out 1 of 6 files, empty or no utf-8 text: top/broken (no file)"
    Path("loop").symlink_to("loop")
    with pytest.raises(AttnlmError, match="cannot read loop: Too many levels of symbolic links"):
        corpus_of("loop")


@pytest.mark.parametrize("offset", [0, BLOCK - 2, BLOCK - 1, BLOCK, 3 * BLOCK + 5])
@pytest.mark.parametrize("bad", [b"\xffa", b"\xe2\x82za", b"\xe2\x82", b"\0a"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_file_that_is_not_text_is_left_out_of_a_folder_wherever_its_bad_byte_is(
    offset: int, bad: bytes, suffix: str
) -> None:
    """A file that is named by itself is an error then, unless it only has a NUL."""
    content = b"a" * offset + bad
    bad_name = f"books/b{suffix}"
    write_all({bad_name: gzip.compress(content, 1) if suffix else content})
    write_all({"books/a": "é".encode(), "books/c": PLAY})
    place = "NUL" if bad == b"\0a" else f"byte {offset}"
    for source in ("books", "books/*"):
        events: list[object] = []
        assert text_of(corpus_of(source), events.append) == f"é|{PLAY.decode()}|"
        left_out = "left out 1 of 3 files, empty or no utf-8 text: "
        assert notes(events) == [f"{left_out}{bad_name} ({place})"]
    if bad != b"\0a":
        says = f"^{bad_name} is not valid utf-8 at byte {offset}\n"
        for named in (bad_name, ["books/a", bad_name]):
            with pytest.raises(AttnlmError, match=says):
                text_of(corpus_of(named))


def test_several_sources_are_one_text_in_their_order(web: WebServer, short_tales: None) -> None:
    write_all({"b.txt": b"b", "notes/2": b"2", "notes/1": UTF8 + b"1", "c": b"", "d": UTF8})
    url = web.answer("/u", body(b"u"))
    sources = ["b.txt", "-", Path("notes"), "c", "tales", url, "d", "b.txt"]
    found, events = corpus_of(sources, stdin=io.BytesIO(b"s")), list[object]()
    assert text_of(found, events.append) == f"b|s|1|2|{TALES}|u|b|"
    assert (found.name, found.shown) == ("b-and-7-more", "b.txt and 7 more")
    assert found.sources == ("b.txt", "-", "notes", "c", "tales", url, "d", "b.txt")
    (note,) = notes(events)
    assert note == "left out 2 of 9 files, empty or no utf-8 text: c (empty), d (empty)"
    with pytest.raises(UsageError, match="no source"):
        prepare([])


# --- The web and the named corpora ----------------------------------------------------------------


@pytest.fixture
def play(web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a mirror of Tiny Shakespeare, which here is shorter than the real one."""
    monkeypatch.setenv("ATTNLM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(corpus, "TINY_SHAKESPEARE_SHA256", hashlib.sha256(PLAY).hexdigest())
    url = web.answer("/play", body(PLAY))
    monkeypatch.setenv("ATTNLM_TINYSHAKESPEARE_URL", url)
    return url


@pytest.mark.parametrize("source", [None, "tinyshakespeare"])
def test_tiny_shakespeare_is_downloaded_once(source: str | None, play: str, web: WebServer) -> None:
    for offline in (False, True):
        found = corpus_of(source, offline=offline, encoding="utf-16")
        assert (found.name, found.sources) == ("tinyshakespeare", ("tinyshakespeare",))
        assert text_of(found) == PLAY.decode()
    assert web.asked == ["/play"]


def test_tales_replace_a_default_that_is_unavailable_but_no_corpus_that_was_named(
    play: str, web: WebServer, short_tales: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    web.answer("/play", body(b"", 404))
    events: list[object] = []
    found = corpus_of(None, on_event=events.append)
    assert (found.name, found.sources, found.floor_nats) == ("tales", ("tales",), {0: 1.5})
    problem = f"cannot download {play}: HTTP 404 Not Found"
    assert events == [Note(f"{problem}; using tales instead, which needs no network")]
    with pytest.raises(AttnlmError, match="HTTP 404"):
        corpus_of("tinyshakespeare")
    with pytest.raises(AttnlmError, match=r"tinyshakespeare.txt is not in the cache .*`offline`"):
        corpus_of("tinyshakespeare", offline=True)
    monkeypatch.setattr(corpus, "DEFAULT_TIMEOUT", 0.05)
    monkeypatch.setattr("attnlm.text.download.BACKOFF", 0.01)
    web.answer("/play", web.stay_silent)
    assert corpus_of(None).name == "tales"


@pytest.mark.parametrize(
    ("path", "name"),
    [("/a%20b/The%20Book.txt?raw=1#top", "The-Book"), ("/", "127.0.0.1")],
)
def test_a_url_is_downloaded_to_the_spool(path: str, name: str, web: WebServer) -> None:
    url = web.answer(path.partition("#")[0], body(PLAY)).replace("//", "//me:secret@") + "#top"
    found = corpus_of(url)
    assert found.name == name
    assert "secret" not in found.shown
    assert text_of(found) == PLAY.decode()
    assert SPOOL.resolve() in found.files[0].path.resolve().parents


# --- Names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Алиса в стране", "Алиса-в-стране"),
        ("cafe\u0301", "café"),
        ('a<b>:c"d/e\\f|g?h*i', "a-b--c-d-e-f-g-h-i"),
        ("tab\there\x00\x7f", "tab-here"),
        ("\udcff", "text"),
        ("", "text"),
        ("Latest", "text-Latest"),
        ("日" * 100, "日" * 33),
    ],
)
def test_names_are_made_safe(text: str, name: str) -> None:
    assert safe_name(text) == name
    assert safe_name(name) == name


# Any character there is, half surrogate pairs too, and more often those that some system refuses.
_CHARACTERS = st.characters(exclude_categories=()) | st.sampled_from('latesLATES. -<>:"/\\|?*')


@settings(max_examples=150)
@given(st.text(_CHARACTERS, max_size=150))
def test_any_text_becomes_a_name_on_every_system(text: str) -> None:
    for made in (safe_name(text), f"{safe_name(text)}-char"):
        made.encode()
        assert is_safe_name(made)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems allow no such name")
def test_a_file_name_that_is_not_unicode_is_read_and_shown() -> None:
    source = os.fsdecode(b"caf\xe9.txt")
    write_all({source: PLAY})
    found = corpus_of(source)
    assert (found.name, found.sources) == ("caf", ("caf\ufffd.txt",))
    assert text_of(found) == PLAY.decode()
