"""Downloads: what arrives is whole and as expected, and nothing else is left behind."""

from __future__ import annotations

import gzip
import hashlib
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from attnlm.base.errors import AttnlmError
from attnlm.base.events import Note, Progress, ignore
from attnlm.text import download
from attnlm.text.download import cached, fetch, without_password
from tests.web_server import Answer, WebServer, body

CONTENT = b"To be, or not to be.\n" * 5000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
PORTAL = b"<!DOCTYPE html>\n<html><body>Log in to the network</body></html>"


@pytest.fixture
def destination(tmp_path: Path) -> Iterator[Path]:
    """A file that exists already; whatever happens, no other file may be left beside it."""
    folder = tmp_path / "downloads"
    folder.mkdir()
    path = folder / "text"
    path.write_bytes(b"older")
    yield path
    assert list(folder.iterdir()) == [path]


def refused(url: str, destination: Path, **options: object) -> AttnlmError:
    """The error that `fetch` raises, after a check that it is one line and changed nothing."""
    with pytest.raises(AttnlmError) as caught:
        fetch(url, destination, **options)  # type: ignore[arg-type]
    assert destination.read_bytes() == b"older"
    assert "\n" not in caught.value.message
    assert caught.value.hint
    return caught.value


def test_the_whole_file_replaces_the_older_one_and_progress_is_reported(
    web: WebServer, destination: Path
) -> None:
    events: list[object] = []
    url = web.answer("/play.txt", body(CONTENT))
    fetch(url, destination, sha256=SHA256, max_bytes=len(CONTENT), on_event=events.append)
    assert destination.read_bytes() == CONTENT
    assert len(events) > 1
    assert events[-1] == Progress("downloading play.txt", len(CONTENT), len(CONTENT), "B")


def test_events_are_reported_by_the_thread_that_asked(web: WebServer, destination: Path) -> None:
    threads: set[threading.Thread] = set()
    url = web.answer("/a", body(CONTENT))
    fetch(url, destination, on_event=lambda _: threads.add(threading.current_thread()))
    assert threads == {threading.current_thread()}


def test_a_wrong_hash_is_refused(web: WebServer, destination: Path) -> None:
    error = refused(web.answer("/a", body(CONTENT + b"!")), destination, sha256=SHA256)
    assert f"not the file expected (SHA-256 {SHA256[:12]}" in error.message
    assert "web page" not in error.message
    assert web.asked == ["/a"]


def test_more_than_the_expected_bytes_are_refused(web: WebServer, destination: Path) -> None:
    def endless(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while True:
            handler.wfile.write(CONTENT)

    error = refused(web.answer("/a", endless), destination, sha256=SHA256, max_bytes=123456)
    assert "more than the 123,456 bytes expected" in error.message


@pytest.mark.parametrize("declared", ["text/html", "text/plain"])
def test_a_login_page_in_the_way_is_named(web: WebServer, destination: Path, declared: str) -> None:
    url = web.answer("/a.txt", body(PORTAL, Content_Type=declared))
    error = refused(url, destination, sha256=SHA256)
    assert "but a web page" in error.message
    assert "login page" in (error.hint or "")


def test_a_web_page_is_refused_where_a_text_file_was_asked_for(
    web: WebServer, destination: Path
) -> None:
    url = web.answer("/a.TXT?raw=1", body(PORTAL, Content_Type="text/html; charset=utf-8"))
    assert "a web page (text/html), not a text file" in refused(url, destination).message


def test_a_web_page_is_accepted_with_a_note(web: WebServer, destination: Path) -> None:
    events: list[object] = []
    url = web.answer("/a", body(PORTAL, Content_Type="text/html"))
    fetch(url, destination, on_event=events.append)
    assert destination.read_bytes() == PORTAL
    assert [event for event in events if isinstance(event, Note)] == [
        Note(f"{url} is a web page: its markup will be part of the text")
    ]


@pytest.mark.parametrize("status", [204, 304, 403, 404])
def test_a_refusal_is_final(web: WebServer, destination: Path, status: int) -> None:
    url = web.answer("/a", body(b"", status))
    assert f"can't download {url}: HTTP {status}" in refused(url, destination).message
    assert len(web.asked) == 1


def test_a_broken_server_is_asked_again(web: WebServer, destination: Path) -> None:
    fetch(web.answer("/a", body(b"oops", 500), body(CONTENT)), destination, sha256=SHA256)
    assert destination.read_bytes() == CONTENT
    assert len(web.asked) == 2


def test_a_server_that_stays_broken_is_given_up_before_the_deadline(
    web: WebServer, destination: Path
) -> None:
    started = time.monotonic()
    error = refused(web.answer("/a", body(b"", 503)), destination, deadline=1.0)
    assert "HTTP 503 Service Unavailable" in error.message
    assert len(web.asked) == 2  # a third would have been at 0.5 + 1.0 s
    assert time.monotonic() - started < 1.0


def test_retry_after_is_honoured(web: WebServer, destination: Path) -> None:
    started = time.monotonic()
    url = web.answer("/a", body(b"", 429, Retry_After="1"), body(CONTENT))
    fetch(url, destination)
    assert time.monotonic() - started >= 1.0


@pytest.mark.parametrize(
    "wish",
    ["3600", formatdate(time.time() + 3600, usegmt=True)],
    ids=["seconds", "date"],  # the same in each process that runs tests
)
def test_retry_after_an_hour_is_not_waited_for(
    web: WebServer, destination: Path, wish: str
) -> None:
    url = web.answer("/a", body(b"", 429, Retry_After=wish))
    assert "HTTP 429" in refused(url, destination).message
    assert len(web.asked) == 1


def test_a_silent_server_is_given_up(web: WebServer, destination: Path) -> None:
    url = web.answer("/a", web.stay_silent)
    error = refused(url, destination, timeout=0.2, deadline=0.6)
    assert "no answer for 0.2 s" in error.message


def test_a_server_that_falls_silent_is_given_up(web: WebServer, destination: Path) -> None:
    def half(handler: BaseHTTPRequestHandler) -> None:
        body(CONTENT[:1000], Content_Length="2000")(handler)
        web.stay_silent(handler)

    error = refused(web.answer("/a", half), destination, timeout=0.2, deadline=0.6)
    assert "no answer for 0.2 s" in error.message


@pytest.mark.parametrize("in_header", [False, True])
def test_a_dripping_server_does_not_outlast_the_deadline(
    web: WebServer, destination: Path, in_header: bool
) -> None:
    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.0 200 OK\r\n" + (b"" if in_header else b"\r\n"))
        while not web.closing.wait(0.05):
            handler.wfile.write(b"x")

    started = time.monotonic()
    error = refused(web.answer("/a", drip), destination, timeout=5.0, deadline=0.5)
    assert "takes longer than 0.5 s" in error.message
    assert time.monotonic() - started < 1.5


def test_a_short_body_is_not_taken_for_the_whole(web: WebServer, destination: Path) -> None:
    url = web.answer("/a", body(CONTENT[:-1], Content_Length=str(len(CONTENT))))
    assert "the connection was lost" in refused(url, destination, deadline=0.3).message


def test_a_broken_connection_is_tried_again(web: WebServer, destination: Path) -> None:
    short = body(CONTENT[:-1], Content_Length=str(len(CONTENT)))
    fetch(web.answer("/a", short, body(CONTENT)), destination)
    assert destination.read_bytes() == CONTENT


def test_a_body_of_unknown_length_is_read_to_its_end(web: WebServer, destination: Path) -> None:
    events: list[object] = []
    url = web.answer("/", body(CONTENT, Content_Length=""))
    fetch(url, destination, on_event=events.append)
    assert destination.read_bytes() == CONTENT
    assert events[-1] == Progress(f"downloading {url}", len(CONTENT), None, "B")


def test_a_server_that_says_a_lot_is_quoted_in_part(web: WebServer, destination: Path) -> None:
    url = web.answer("/a", body(b"", Content_Encoding="gzip, " * 1000))
    assert len(refused(url, destination).message) < 400


@pytest.mark.parametrize("encoding", ["gzip", "gzip, gzip", "x-unheard-of", "GZIP"])
def test_a_body_compressed_all_the_same_is_refused(
    web: WebServer, destination: Path, encoding: str
) -> None:
    packed = gzip.compress(gzip.compress(bytes(2**20)))
    error = refused(web.answer("/a", body(packed, Content_Encoding=encoding)), destination)
    assert f"it is compressed ({encoding}), which was not requested" in error.message
    assert len(web.asked) == 1


def test_a_body_that_is_said_to_be_as_it_is_is_taken(web: WebServer, destination: Path) -> None:
    fetch(web.answer("/a", body(CONTENT, Content_Encoding="Identity")), destination)
    assert destination.read_bytes() == CONTENT


def _endless(web: WebServer, head: str, pulse: bytes) -> Answer:
    """An answer that sends `head`, then a pulse every few milliseconds until the end."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(head.encode())
        while not web.closing.wait(0.005):
            handler.wfile.write(pulse)

    return answer


@pytest.mark.parametrize(
    ("head", "pulse"),
    [
        ("HTTP/1.1 200 OK\r\n\r\n", b"x"),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1;" + b"x" * 99),
        ("HTTP/1.1 200 OK\r\n\r\n" + "x" * 2**17, b"x"),  # what came before earns no time
        ("HTTP/1.1 200 OK\r\nA: ", b"x"),
        ("", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
    ids=["drips", "one chunk's header", "drips after a while", "a header", "100 Continue"],
)
def test_a_server_that_never_ends_is_given_up_without_a_deadline(
    web: WebServer, destination: Path, head: str, pulse: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "PERIOD", 0.3)
    error = refused(web.answer("/a", _endless(web, head, pulse)), destination)
    assert "it sends less than 32 KiB in 0.3 s" in error.message
    assert len(web.asked) == 1


def test_a_slow_server_is_waited_for_while_it_makes_progress(
    web: WebServer, destination: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each period brings enough, and all of it takes longer than many of them."""
    monkeypatch.setattr(download, "PERIOD", 0.5)
    monkeypatch.setattr(download, "PERIOD_BYTES", 2**10)
    monkeypatch.setattr(download, "CHUNK_BYTES", 2**10)

    def slowly(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n")
        for start in range(0, len(CONTENT), 2**12):
            handler.wfile.write(CONTENT[start : start + 2**12])
            web.closing.wait(0.05)

    fetch(web.answer("/a", slowly), destination, sha256=SHA256)
    assert destination.read_bytes() == CONTENT


@pytest.mark.parametrize(
    "head", ["", "Content-Encoding: gzip\r\n"], ids=["without an end", "that can't be unpacked"]
)
def test_the_body_of_a_redirect_is_not_read(web: WebServer, destination: Path, head: str) -> None:
    web.answer("/new", body(CONTENT))
    start = f"HTTP/1.1 302 Found\r\nLocation: /new\r\n{head}\r\n"
    fetch(web.answer("/old", _endless(web, start, b"x" * 99)), destination, deadline=2.0)
    assert destination.read_bytes() == CONTENT


def test_redirects_are_followed(web: WebServer, destination: Path) -> None:
    web.answer("/new%20place", body(CONTENT))
    fetch(web.answer("/old", body(b"", 302, Location="/new%20place")), destination)
    assert destination.read_bytes() == CONTENT


def test_a_redirect_to_nowhere_is_what_it_is(web: WebServer, destination: Path) -> None:
    url = web.answer("/a", body(b"", 302, Location=" "))
    assert "HTTP 302" in refused(url, destination).message


def test_a_redirect_loop_is_refused(web: WebServer, destination: Path) -> None:
    web.answer("/b", body(b"", 301, Location="/a"))
    url = web.answer("/a", body(b"", 301, Location="/b"))
    assert "redirects more than 10 times" in refused(url, destination).message


@pytest.mark.parametrize("target", ["ftp://127.0.0.1/a", "file:///etc/passwd"])
def test_a_redirect_out_of_the_web_is_refused(
    web: WebServer, destination: Path, target: str
) -> None:
    url = web.answer("/a", body(b"", 302, Location=target))
    assert f"{target} is not an http or https address" in refused(url, destination).message


@pytest.mark.parametrize("url", ["ftp://example.com/a", "file:///etc/passwd", "http://", "a.txt"])
def test_other_addresses_are_refused(destination: Path, url: str) -> None:
    assert f"{url} is not an http or https address" in refused(url, destination).message


@pytest.mark.parametrize("url", ["http://[::1/a", "http://127.0.0.1:no/a", "http://a..b/"])
def test_an_address_that_makes_no_sense_is_one_line(destination: Path, url: str) -> None:
    assert url in refused(url, destination, deadline=0.3).message


def test_nobody_listening(destination: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://me:secret@127.0.0.1:{taken.getsockname()[1]}/a"
        error = refused(url, destination, deadline=0.3)
    assert "refused" in error.message
    assert "secret" not in error.message
    assert "attnlm prepare tales" in (error.hint or "")


def test_a_folder_that_is_not_there(web: WebServer, tmp_path: Path) -> None:
    with pytest.raises(AttnlmError, match=r"can't write .*: No such file or directory"):
        fetch(web.answer("/a", body(CONTENT)), tmp_path / "none" / "a")


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate for 127.0.0.1 that nobody trusts yet, and its key, in one file."""
    if not shutil.which("openssl"):
        pytest.skip("needs the openssl command")
    path = tmp_path / "certificate.pem"
    options = (
        "-x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=a "
        "-addext subjectAltName=IP:127.0.0.1"
    )
    subprocess.run(
        ["openssl", "req", *options.split(), "-keyout", path, "-out", tmp_path / "public.pem"],
        check=True,
        capture_output=True,
    )
    path.write_bytes(path.read_bytes() + (tmp_path / "public.pem").read_bytes())
    return path


@pytest.mark.parametrize("trusted", [False, True])
def test_https_is_checked_and_never_left_for_http(
    web: WebServer,
    destination: Path,
    certificate: Path,
    trusted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    web.socket = context.wrap_socket(web.socket, server_side=True)
    if trusted:
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
    plain = web.answer("/plain", body(CONTENT))
    web.answer("/a", body(b"", 302, Location=plain))
    error = refused(plain.replace("http:", "https:").replace("/plain", "/a"), destination)
    wanted = f"it redirects to {plain}, not https" if trusted else "certificate verify failed"
    assert wanted in error.message


def test_what_is_shown_of_an_address() -> None:
    assert without_password("https://me:a@b@host:80/x@y") == "https://host:80/x@y"
    assert without_password("https://host/x?mail=a@b") == "https://host/x?mail=a@b"


def from_cache(
    url: str, spool: Path, events: list[object] | None = None, *, offline: bool = False
) -> Path:
    return cached(
        url,
        "play.txt",
        sha256=SHA256,
        max_bytes=len(CONTENT),
        spool=spool,
        offline=offline,
        on_event=ignore if events is None else events.append,
    )


def test_a_second_time_nothing_is_downloaded(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNLM_CACHE_DIR", str(tmp_path / "new" / "cache"))
    url = web.answer("/a", body(CONTENT))
    path = from_cache(url, tmp_path)
    assert path == tmp_path / "new" / "cache" / "play.txt"
    assert path.read_bytes() == CONTENT
    assert from_cache(url, tmp_path, offline=True) == path
    assert len(web.asked) == 1


def test_a_damaged_copy_in_the_cache_is_fetched_again(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setenv("ATTNLM_CACHE_DIR", str(cache))
    (cache / "play.txt").write_bytes(CONTENT[:-1])
    url = web.answer("/a", body(CONTENT))
    with pytest.raises(AttnlmError, match=r"not in the cache .* `offline`"):
        from_cache(url, tmp_path, offline=True)
    assert from_cache(url, tmp_path).read_bytes() == CONTENT
    assert [path.name for path in cache.iterdir()] == ["play.txt"]


def test_without_a_cache_the_file_stays_in_the_spool(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "a file"
    blocked.touch()
    monkeypatch.setenv("ATTNLM_CACHE_DIR", str(blocked / "cache"))
    events: list[object] = []
    path = from_cache(web.answer("/a", body(CONTENT)), tmp_path, events)
    assert path == tmp_path / "play.txt"
    assert path.read_bytes() == CONTENT
    assert "can't keep play.txt" in getattr(events[-1], "text", "")


@pytest.mark.skipif(sys.platform != "linux", reason="home folders are found differently elsewhere")
def test_without_a_home_no_folder_is_made_in_the_current_one(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ATTNLM_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # a user unknown to the system
    monkeypatch.chdir(tmp_path)
    events: list[object] = []
    path = from_cache(web.answer("/a", body(CONTENT)), tmp_path, events)
    assert [path] == list(tmp_path.iterdir())
    assert "no home folder" in getattr(events[-1], "text", "")
