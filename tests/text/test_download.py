"""Downloads: what arrives is whole and as expected, and nothing else is left behind.

Addresses that can't be read are in errors.toml.
"""

from __future__ import annotations

import hashlib
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attnlm import AttnlmError, Note, Progress
from attnlm.base.events import OnEvent, ignore
from attnlm.text import download
from attnlm.text.download import fetch, fetch_cached, without_password
from tests.web_server import WebServer, body

CONTENT = b"To be, or not to be.\n" * 5000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
PORTAL = b"<!DOCTYPE html>\n<html><body>Log in to the network</body></html>"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "BACKOFF", 0.01)


@pytest.fixture
def destination(tmp_path: Path) -> Iterator[Path]:
    """Make a file that exists already; no other file may be left in its folder."""
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


@pytest.mark.parametrize(
    ("name", "length", "total"),
    [("play.txt", str(len(CONTENT)), len(CONTENT)), ("", "", None)],
)
def test_the_whole_file_replaces_the_older_one_and_progress_is_reported(
    name: str, length: str, total: int | None, web: WebServer, destination: Path
) -> None:
    events: list[object] = []
    url = web.answer(f"/{name}", body(CONTENT, Content_Length=length))
    fetch(url, destination, sha256=SHA256, on_event=events.append)
    assert destination.read_bytes() == CONTENT
    assert len(events) > 1
    assert events[-1] == Progress(f"downloading {name or url}", len(CONTENT), total, "B")


def test_a_web_page_is_accepted_with_a_note_but_not_in_place_of_a_text_file(
    web: WebServer, destination: Path
) -> None:
    events: list[object] = []
    url = web.answer("/a.TXT?raw=1", body(PORTAL, Content_Type="text/html; charset=utf-8"))
    assert "a web page (text/html) instead of a text file" in refused(url, destination).message
    url = web.answer("/a", body(PORTAL, Content_Type="text/html"))
    fetch(url, destination, on_event=events.append)
    assert destination.read_bytes() == PORTAL
    assert [event for event in events if isinstance(event, Note)] == [
        Note(f"{url} is a web page: its HTML tags become part of the text")
    ]


@pytest.mark.parametrize(
    ("answer", "says", "asked"),
    [
        (body(CONTENT + b"!"), f"sent another file: its SHA-256 is not {SHA256[:12]}", 1),
        (body(CONTENT[:-1], Content_Length=str(len(CONTENT))), "cannot download http", 1),
        *(
            (body(b"", status, Retry_After="3600"), f"cannot download URL: HTTP {status}", asked)
            for status, asked in ((204, 1), (304, 1), (404, 1), (429, 4), (503, 4))
        ),
    ],
    ids=["wrong hash", "breaks off", "204", "304", "404", "429", "503"],
)
def test_another_answer_is_refused_and_a_temporary_one_retried(
    answer: Any, says: str, asked: int, web: WebServer, destination: Path
) -> None:
    url = web.answer("/a", answer)
    message = refused(url, destination, sha256=SHA256).message
    assert says.replace("URL", url) in message and len(web.asked) == asked


def test_a_silent_server_is_given_up(web: WebServer, destination: Path) -> None:
    error = refused(web.answer("/a", web.stay_silent), destination, timeout=0.05)
    assert "no answer for 0.05 s" in error.message


def test_a_refused_connection_is_reported(
    destination: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://me:secret@127.0.0.1:{taken.getsockname()[1]}/a"
        error = refused(url, destination)
    assert "refused" in error.message
    assert "secret" not in error.message
    assert "attnlm prepare tales" in (error.hint or "")


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
def test_https_is_verified_and_never_redirected_to_http(
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
    wanted = f"No connection adapters were found for {plain!r}" if trusted else "verify failed"
    assert wanted in error.message


def test_addresses_are_shown_without_passwords() -> None:
    assert without_password("https://me:a@b@host:80/x@y") == "https://host:80/x@y"
    assert without_password("https://host/x?mail=a@b") == "https://host/x?mail=a@b"


def from_cache(url: str, spool: Path, *, offline: bool = False, on_event: OnEvent = ignore) -> Path:
    return fetch_cached(url, "play.txt", SHA256, spool, offline=offline, on_event=on_event)


def test_damaged_cache_entries_are_downloaded_again(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "new" / "cache"
    monkeypatch.setenv("ATTNLM_CACHE_DIR", str(cache))
    url = web.answer("/a", body(CONTENT))
    for asked in (1, 2):
        with pytest.raises(AttnlmError, match=r"not in the cache .* `offline`"):
            from_cache(url, tmp_path, offline=True)
        assert from_cache(url, tmp_path) == cache / "play.txt"
        assert from_cache(url, tmp_path, offline=True).read_bytes() == CONTENT
        assert [path.name for path in cache.iterdir()] == ["play.txt"]
        assert len(web.asked) == asked
        (cache / "play.txt").write_bytes(CONTENT[:-1])


@pytest.mark.skipif(sys.platform != "linux", reason="home folders are found differently elsewhere")
@pytest.mark.parametrize("has_home", [True, False])
def test_a_cache_that_cannot_be_made_stops_no_download(
    has_home: bool, web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is used where it was downloaded, with a note that it is not kept."""
    if has_home:
        (tmp_path / "a file").touch()
        monkeypatch.setenv("ATTNLM_CACHE_DIR", str(tmp_path / "a file" / "cache"))
    else:
        for name in ("ATTNLM_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # a user unknown to the system
    monkeypatch.chdir(tmp_path)
    notes: list[object] = []
    path = from_cache(web.answer("/a", body(CONTENT)), tmp_path, on_event=notes.append)
    assert path == tmp_path / "play.txt" and path.read_bytes() == CONTENT
    assert "play.txt is not kept" in str(notes[0])
    assert ("cache) cannot be written" if has_home else "the cache (no home folder)") in str(
        notes[0]
    )
    assert len(list(tmp_path.iterdir())) == 1 + has_home  # no folder is made in the current one
