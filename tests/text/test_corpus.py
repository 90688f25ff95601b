"""Corpora: every kind of source gives exactly its text; other files are refused."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlm import AttnlmError, Note, Progress, UsageError
from attnlm.base.folders import is_safe_name
from attnlm.text import corpus
from attnlm.text.corpus import Corpus, Source, TextFile, get_corpus, safe_name
from attnlm.text.text_files import PIECE
from tests.web_server import WebServer, body

PLAY = b"First Citizen:\nBefore we proceed any further, hear me speak.\n"


@pytest.fixture
def spool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spool")


@pytest.fixture
def short_tales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `tales` one line: the real ones take a while."""
    stand_in = SimpleNamespace(generate_tales=lambda: ("Once upon a time.\n", {0: 1.5}))
    monkeypatch.setattr("attnlm.text.corpus_tales", stand_in, raising=False)


def write_all(folder: Path, contents: dict[str, bytes]) -> None:
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def texts(found: Corpus) -> list[str]:
    return [piece.text for piece in found.pieces()]


# --- Bytes to characters --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "encoding", "text"),
    [
        (b"a\r\nb\rc\n", "utf-8", "a\r\nb\rc\n"),
        (codecs.BOM_UTF8 + "é".encode(), "utf-8", "é"),
        (codecs.BOM_UTF8 + "é".encode(), "utf-8-sig", "é"),
        ("a\ufeffb".encode(), "utf-8", "a\ufeffb"),
        ("né".encode("utf-16"), "utf-16", "né"),
        (codecs.BOM_UTF16_BE + "né".encode("utf-16-be"), "utf-16", "né"),
        (codecs.BOM_UTF16_LE + "né".encode("utf-16-le"), "utf-16-le", "né"),
        (b"n\xe9", "latin-1", "né"),
        ("日本".encode("shift_jis"), "shift_jis", "日本"),
        (b"a\0bc", "latin-1", "a\0bc"),
        (b"abc\0d", "utf-8", "abc\0d"),
        (codecs.BOM_UTF8, "utf-8", ""),
        (b"", "utf-8", ""),
    ],
)
def test_text_is_what_was_encoded(content: bytes, encoding: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(content)
    found = get_corpus(tmp_path / "a", encoding=encoding, spool=tmp_path)
    assert texts(found) == ([text] if text else [])


@pytest.mark.parametrize("offset", [0, 7, PIECE - 2, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE])
@pytest.mark.parametrize("after", [b"", b"z" + b"a" * 10])
def test_bad_bytes_are_found_where_they_are(offset: int, after: bytes, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a" * offset + b"\xe2\x82" + after)
    says = rf"a is not valid utf-8 at byte {offset}\nhint: convert it, or name its `encoding`"
    with pytest.raises(AttnlmError, match=says):
        list(get_corpus(tmp_path / "a", spool=tmp_path).pieces())


def test_files_are_decoded_one_by_one(here: Path, spool: Path) -> None:
    wide = {"wide/a": "one".encode("utf-16"), "wide/b": "two".encode("utf-16")}
    write_all(here, wide)
    assert "".join(texts(get_corpus("wide", encoding="UTF16", spool=spool))) == "onetwo"
    write_all(here, {"ends/a": b"a\r", "ends/b": b"\nb"})
    assert texts(get_corpus("ends", spool=spool)) == ["a\r", "\nb"]
    write_all(here, {"marks/a": codecs.BOM_UTF8 + b"x", "marks/b": codecs.BOM_UTF8 + b"x"})
    assert texts(get_corpus("marks", spool=spool)) == ["x", "x"]
    write_all(here, {"half/a": b"x\xe2\x82", "half/b": b"\xac"})
    halves = tuple(TextFile(Path(name), name) for name in ("half/a", "half/b"))
    with pytest.raises(AttnlmError, match=r"half/a is not valid utf-8 at byte 1\nhint"):
        list(Corpus("half", ("half",), halves).pieces())


@pytest.mark.parametrize("name", ["utf-9", "base64", "rot13", "zip", "hex", "", "a\0b", "\udc80"])
def test_an_unknown_encoding_is_a_usage_error(name: str, spool: Path) -> None:
    with pytest.raises(UsageError, match="unknown text encoding"):
        get_corpus("-", encoding=name, spool=spool, stdin=io.BytesIO(b""))


# --- Files, pipes and stdin -----------------------------------------------------------------------


def test_a_local_file_is_read_in_place(here: Path, spool: Path, short_tales: None) -> None:
    (here / "my book.txt").write_bytes(PLAY)
    found = get_corpus("./my book.txt", spool=spool)
    assert (found.name, found.source) == ("my-book", "./my book.txt")
    assert [file.path for file in found.files] == [Path("my book.txt")]
    assert "".join(texts(found)) == PLAY.decode()
    assert found.floor_nats is None
    assert not list(spool.iterdir())
    # Names of corpora are not shadowed, and paths are not taken for names.
    (here / "tales").write_bytes(PLAY)
    assert "".join(texts(get_corpus("tales", spool=spool))) == "Once upon a time.\n"
    assert "".join(texts(get_corpus("./tales", spool=spool))) == PLAY.decode()
    assert "".join(texts(get_corpus(Path("tales"), spool=spool))) == PLAY.decode()


def test_stdin_is_read_once_and_can_be_read_twice(spool: Path) -> None:
    stream = io.BytesIO(PLAY)
    found = get_corpus("-", spool=spool, stdin=stream)
    assert (found.name, found.source) == ("stdin", "-")
    assert ["".join(texts(found)) for _ in range(2)] == [PLAY.decode()] * 2
    assert found.files[0].path.parent == spool
    assert not stream.closed
    with pytest.raises(AttnlmError, match="stdin is not valid utf-8 at byte 0"):
        texts(get_corpus("-", spool=spool, stdin=io.BytesIO(b"\xff")))


def test_stdin_and_pipes_contain_records_if_a_column_is_given(here: Path, spool: Path) -> None:
    """A pipe named like a file of records contains records anyhow."""
    lines = b'{"a": "x", "b": "y"}\n' * 3

    def text(source: str, content: bytes, column: str | None) -> str:
        if source == "-":
            stdin = io.BytesIO(content)
            found = get_corpus(source, column=column, marks_ends=False, spool=spool, stdin=stdin)
            return "".join(texts(found))
        os.mkfifo(source)
        writer = threading.Thread(target=Path(source).write_bytes, args=[content])
        writer.start()
        found = get_corpus(source, column=column, marks_ends=False, spool=spool)
        writer.join()
        return "".join(texts(found))

    assert text("-", lines, None) == lines.decode()
    assert text("-", lines, "a") == "x\nx\nx\n"
    assert text("pipe", lines, "b") == "y\ny\ny\n"
    assert text("b.jsonl", lines, "b") == "y\ny\ny\n"
    assert text("c.jsonl.gz", gzip.compress(lines), "b") == "y\ny\ny\n"
    assert text("text", b"abc", None) == "abc"
    with pytest.raises(AttnlmError, match="line 1 of stdin has no column 'c'"):
        text("-", lines, "c")


# --- Folders --------------------------------------------------------------------------------------


def test_a_folder_is_its_texts_in_the_order_of_their_paths(here: Path, spool: Path) -> None:
    # As strings "a-b" and "a.txt" come before "a/z"; as parts of paths "a" comes before both.
    names = ["B.txt", "a/z", "a-b/c", "a.txt", "b/1", "ß"]
    write_all(here / "books", {name: name.encode() for name in names})
    events: list[object] = []
    found = get_corpus("books", spool=spool, on_event=events.append)
    assert texts(found) == ["B.txt", "a/z", "a-b/c", "a.txt", "b/1", "ß"]
    assert (found.name, found.source) == ("books", "books")
    assert not notes(events)
    assert get_corpus(".", spool=spool).name == here.name
    assert get_corpus("books/..", spool=spool).name == here.name
    assert get_corpus("./books/", spool=spool).name == "books"


def notes(events: list[object]) -> list[str]:
    return [event.text for event in events if isinstance(event, Note)]


def test_other_files_of_a_folder_are_left_out_with_a_note(here: Path, spool: Path) -> None:
    texts = {"an edge.txt": b"a" * (PIECE - 1) + "é".encode(), "plain.txt": PLAY}
    others = {"1.png": b"\x89PNG\r\n", "2.bin": b"a\0b", "4.cut": b"a\xe2\x82", "5.bin": b"\0"}
    others |= {"3.empty": b"", "6.mark": codecs.BOM_UTF8}
    hidden = {".git/config": PLAY, ".hidden": PLAY}
    write_all(here, texts | others | hidden)
    events: list[object] = []
    found = get_corpus(".", spool=spool, on_event=events.append)
    assert [file.shown for file in found.files] == sorted(texts)
    assert notes(events) == [
        "left out 4 of 8 files because they are not utf-8 text: "
        "1.png (byte 0), 2.bin, 4.cut (byte 1), 5.bin",
        "left out 2 of 8 files because they are empty: 3.empty, 6.mark",
    ]
    assert events[1] == Progress("check", 1, 8, "files")


@pytest.mark.skipif(sys.platform == "win32", reason="symlinks need a privilege")
def test_links_are_followed_but_not_in_circles(here: Path, spool: Path) -> None:
    (here / "loop").symlink_to("loop")
    with pytest.raises(AttnlmError, match="cannot read loop: Too many levels of symbolic links"):
        get_corpus("loop", spool=spool)
    write_all(here, {"top/a/text": b"a", "top/b/text": b"b", "outside/text": b"o"})
    (here / "top/a/to b").symlink_to(here / "top/b")
    (here / "top/b/to a").symlink_to(here / "top/a")
    (here / "top/up").symlink_to(here / "top")
    (here / "top/c").symlink_to(here / "outside")
    (here / "top/broken").symlink_to("nothing")
    events: list[object] = []
    found = get_corpus("top", spool=spool, on_event=events.append)
    assert [file.shown for file in found.files] == [
        "top/a/text",
        "top/a/to b/text",
        "top/b/text",
        "top/b/to a/text",
        "top/c/text",
    ]
    assert notes(events) == ["left out 1 of 6 files because they are not utf-8 text: broken"]


@pytest.mark.parametrize("offset", [0, 2000, 60_003, PIECE - 1, 3 * PIECE + 5])
@pytest.mark.parametrize("bad", [b"\xff", b"\xe2\x82", b"\0"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_file_that_is_not_text_is_left_out_of_a_folder_wherever_its_bad_byte_is(
    offset: int, bad: bytes, suffix: str, here: Path, spool: Path
) -> None:
    """A file that is named by itself is an error then, unless it only has a NUL."""
    content = b"a" * offset + bad + b"a"
    bad_name = f"books/b{suffix}"
    write_all(here, {bad_name: gzip.compress(content) if suffix else content})
    write_all(here, {"books/a": "é".encode(), "books/c": PLAY})
    place = "" if bad == b"\0" else f" (byte {offset})"
    for source, shown in (("books", f"b{suffix}"), ("books/*", bad_name)):
        events: list[object] = []
        found = get_corpus(source, spool=spool, on_event=events.append)
        assert [file.shown for file in found.files] == ["books/a", "books/c"]
        left_out = "left out 1 of 3 files because they are not utf-8 text: "
        assert notes(events) == [f"{left_out}{shown}{place}"]
    if bad != b"\0":
        says = f"{bad_name} is not valid utf-8 at byte {offset}\n"
        for named in (bad_name, ["books/a", bad_name]):
            with pytest.raises(AttnlmError, match=says):
                texts(get_corpus(named, spool=spool))


# --- Several sources ------------------------------------------------------------------------------


def test_several_sources_are_one_text_in_their_order(
    here: Path, spool: Path, web: WebServer, short_tales: None
) -> None:
    write_all(here, {"b.txt": b"b", "notes/2": b"2", "notes/1": codecs.BOM_UTF8 + b"1"})
    url = web.answer("/u", body(b"u"))
    sources: list[Source] = ["b.txt", "-", Path("notes"), "tales", url, "b.txt"]
    found = get_corpus(iter(sources), spool=spool, stdin=io.BytesIO(b"s"))
    for _ in range(2):
        assert "".join(texts(found)) == "bs12Once upon a time.\nub"
    assert (found.name, found.source) == ("b-and-5-more", "b.txt and 5 more")
    assert found.sources == ("b.txt", "-", "notes", "tales", url, "b.txt")


def test_each_source_has_its_encoding_and_its_name_in_errors(
    here: Path, spool: Path, short_tales: None
) -> None:
    """The named corpora are UTF-8, also if `encoding` names another."""
    write_all(here, {"a": "é".encode("latin-1"), "b/c": b"c" * 8192 + b"\xff"})
    found = get_corpus(["a", "tales"], encoding="latin-1", spool=spool)
    assert "".join(texts(found)) == "éOnce upon a time.\n"
    for sources, name in ((["b/c", "a"], "b/c"), (["a", "b/c"], "a"), (["tales", "a"], "a")):
        with pytest.raises(AttnlmError, match=f"^{name} is not valid utf-8 at byte"):
            list(get_corpus(sources, spool=spool).pieces())


def test_an_empty_one_of_several_is_named(here: Path, spool: Path) -> None:
    write_all(here, {"a": PLAY, "b": b"", "c": codecs.BOM_UTF8})
    events: list[object] = []
    found = get_corpus(
        ["a", "b", "c", "-"], spool=spool, stdin=io.BytesIO(), on_event=events.append
    )
    assert "".join(texts(found)) == PLAY.decode()
    assert events == [Note("b is empty"), Note("c is empty"), Note("stdin is empty")]
    with pytest.raises(UsageError, match="no source"):
        get_corpus([], spool=spool)


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
def test_tiny_shakespeare_is_downloaded_once(
    source: str | None, play: str, web: WebServer, spool: Path
) -> None:
    for offline in (False, True):
        found = get_corpus(source, offline=offline, encoding="utf-16", spool=spool)
        assert (found.name, found.source) == ("tinyshakespeare", "tinyshakespeare")
        assert "".join(texts(found)) == PLAY.decode()
    assert web.asked == ["/play"]


def test_tales_replace_a_default_whose_server_is_silent(
    play: str, web: WebServer, spool: Path, short_tales: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "DEFAULT_TIMEOUT", 0.05)
    monkeypatch.setattr("attnlm.text.download.BACKOFF", 0.01)
    web.answer("/play", web.stay_silent)
    assert get_corpus(None, spool=spool).name == "tales"


def test_tales_replace_a_default_that_is_unavailable_but_no_corpus_that_was_named(
    play: str, web: WebServer, spool: Path, short_tales: None
) -> None:
    web.answer("/play", body(b"", 404))
    events: list[object] = []
    found = get_corpus(None, spool=spool, on_event=events.append)
    assert (found.name, found.source) == ("tales", "tales")
    assert "".join(texts(found)) == "Once upon a time.\n"
    assert found.floor_nats == {0: 1.5}
    problem = f"cannot download {play}: HTTP 404 Not Found"
    assert events == [Note(f"{problem}; using tales instead, which needs no network")]
    with pytest.raises(AttnlmError, match="HTTP 404"):
        get_corpus("tinyshakespeare", spool=spool)
    with pytest.raises(AttnlmError, match=r"tinyshakespeare.txt is not in the cache .*`offline`"):
        get_corpus("tinyshakespeare", offline=True, spool=spool)


@pytest.mark.parametrize(
    ("path", "name"),
    [("/a%20b/The%20Book.txt?raw=1#top", "The-Book"), ("/", "127.0.0.1")],
)
def test_a_url_is_downloaded_to_the_spool(
    path: str, name: str, web: WebServer, spool: Path
) -> None:
    url = web.answer(path.partition("#")[0], body(PLAY)).replace("//", "//me:secret@") + "#top"
    found = get_corpus(url, spool=spool)
    assert found.name == name
    assert "secret" not in found.source
    assert "".join(texts(found)) == PLAY.decode()
    assert spool in found.files[0].path.parents


# --- Names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Алиса в стране", "Алиса-в-стране"),
        ("हिन्दी", "हिन्दी"),
        ("cafe\u0301", "café"),
        ('a<b>:c"d/e\\f|g?h*i', "a-b--c-d-e-f-g-h-i"),
        ("tab\there\x00\x7f", "tab-here"),
        ("dots...", "dots"),
        (".hidden", "hidden"),
        ("--force", "force"),
        (" spaces ", "spaces"),
        ("\udcff", "text"),
        ("..", "text"),
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


@settings(max_examples=300)
@given(st.text(_CHARACTERS, max_size=150))
def test_any_text_becomes_a_name_on_every_system(text: str) -> None:
    for made in (safe_name(text), f"{safe_name(text)}-char"):
        made.encode()
        assert is_safe_name(made)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems allow no such name")
def test_a_file_name_that_is_not_unicode_is_read_and_shown(here: Path, spool: Path) -> None:
    source = os.fsdecode(b"caf\xe9.txt")
    (here / source).write_bytes(PLAY)
    found = get_corpus(source, spool=spool)
    assert (found.name, found.source) == ("caf", "caf\ufffd.txt")
    assert "".join(texts(found)) == PLAY.decode()
