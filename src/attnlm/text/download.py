"""Downloads: complete files with the expected content, or an error with the server's answer.

`requests` downloads, and `urllib3` retries after a lost connection, HTTP 429 and server errors
(5xx).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import os
import re
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from attnlm.base.caches import cache_folder
from attnlm.base.errors import AttnlmError
from attnlm.base.events import Note, OnEvent, Progress, ignore
from attnlm.base.files import explaining, file_hash, replacing

if TYPE_CHECKING:
    import requests  # imported late below: it takes longer than the rest of a command's start

RETRIES = 3
BACKOFF = 0.5  # seconds before the second retry, doubled for each later one; none before the first
_TIMEOUT = 10.0  # seconds: the longest silence of a server
HINT = "check the address and the network, or use a file; `attnlm prepare tales` needs no network"
_CERTIFICATES = (
    "behind a company's proxy, set REQUESTS_CA_BUNDLE to its certificates, or use a file"
)
_LOGIN = "a login page of the network may be in the way: open any site in a browser first"
_MAX_REDIRECTS = 10
_CHUNK_BYTES = 2**14


def fetch(
    url: str,
    destination: Path,
    *,
    sha256: str | None = None,
    max_bytes: int | None = None,
    deadline: float | None = None,
    on_event: OnEvent = ignore,
) -> None:
    """Download `url` to the file `destination`, completely or not at all.

    If given, `sha256` is the hash that the content must have, and `max_bytes` is its maximum size.
    After `deadline` seconds, the download fails as soon as the current chunk or the current wait
    for an answer ends. Reports Progress in bytes. Raises AttnlmError if the download fails.
    """
    import requests

    if not re.match(r"https?://[^/]", url, re.IGNORECASE):
        raise _failure(url, f"{without_password(url)} is not an http or https address")
    deadline = math.inf if deadline is None else deadline
    ends = time.monotonic() + deadline
    timeout = min(_TIMEOUT, deadline / (RETRIES + 1))
    with explaining(destination.parent), replacing(destination) as file:
        try:
            with (
                _session(url) as session,
                session.get(url, stream=True, timeout=timeout) as response,
            ):
                _receive(url, response, file, sha256, max_bytes, ends, on_event)
        except (requests.RequestException, ValueError) as error:
            is_ssl = isinstance(error, requests.exceptions.SSLError)
            hint = _CERTIFICATES if is_ssl else HINT
            raise _failure(url, _cause(error, timeout), hint) from error


class Pinned(NamedTuple):
    """A file on the web with a known hash and a maximum size. `name` is its name in the cache."""

    url: str
    name: str
    sha256: str
    max_bytes: int


def cached(
    file: Pinned, spool: Path, offline: bool, deadline: float | None, on_event: OnEvent
) -> Path:
    """Return the path of a pinned file in the user's cache; download the file if it is not there.

    If the cache can't be written, a Note says why, and the file is downloaded to the folder
    `spool`. Raises AttnlmError as `fetch` does, and if the file is not cached and `offline` is set.
    """
    url, name, sha256, max_bytes = file
    folder = cache_folder()
    place = spool
    with contextlib.suppress(OSError):
        if folder and file_hash(folder / name) == sha256:
            return folder / name
    if offline:
        raise AttnlmError(
            f"{name} is not in the cache ({folder}), and `offline` is set",
            "use a file, or `attnlm prepare tales`, which needs no network",
        )
    try:
        if folder is None:
            raise FileNotFoundError(errno.ENOENT, "this system has no home folder")
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        place = folder
    except OSError as error:
        on_event(Note(f"cannot keep {name} in the cache ({folder}): {error.strerror}"))
    path = place / name
    fetch(url, path, sha256=sha256, max_bytes=max_bytes, deadline=deadline, on_event=on_event)
    return path


def without_password(text: str) -> str:
    """Return an address, or a text with an address, without its user name and password."""
    return re.sub(r"//[^/?#\s]*@", "//", text, count=1)


def _session(url: str) -> requests.Session:
    """Return a session that retries, and that never follows a redirect from https to http."""
    import requests
    from requests.adapters import HTTPAdapter
    from urllib3.util import Retry

    # Retry-After is ignored: a server could request a long pause.
    retry = Retry(
        RETRIES,
        redirect=False,
        backoff_factor=BACKOFF,
        status_forcelist=(429, 500, 502, 503, 504),
        respect_retry_after_header=False,
        raise_on_status=False,
    )
    session = requests.Session()
    session.max_redirects = _MAX_REDIRECTS
    session.headers["Accept-Encoding"] = "identity"
    session.adapters.clear()
    for scheme in ("https://",) if url.lower().startswith("https:") else ("https://", "http://"):
        session.mount(scheme, HTTPAdapter(max_retries=retry))
    return session


def _receive(
    url: str,
    response: requests.Response,
    file: IO[bytes],
    sha256: str | None,
    max_bytes: int | None,
    ends: float,
    on_event: OnEvent,
) -> None:
    """Write the body of an answer to `file`.

    Raises AttnlmError if the status is not 200, if the body is compressed, is a web page instead of
    a text file, has another hash or more than `max_bytes`, or if it arrives after the time `ends`.
    """
    if response.status_code != 200:
        raise _failure(url, f"HTTP {response.status_code} {response.reason or ''}".rstrip())
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":  # a few compressed bytes could unpack to gigabytes
        raise _failure(url, f"it is compressed ({encoding}), which was not requested")
    shown = without_password(url)
    is_page = "text/html" in response.headers.get("Content-Type", "").lower()
    if is_page and sha256 is None:
        if urlsplit(url).path.lower().endswith((".txt", ".md")):
            raise AttnlmError(
                f"{shown} sent a web page (text/html) instead of a text file",
                "use the address of the file itself (its raw link), or download the file",
            )
        on_event(Note(f"{shown} is a web page: its HTML tags become part of the text"))
    length = response.headers.get("Content-Length", "")
    total = int(length) if length.isdecimal() else None
    task = f"downloading {Path(urlsplit(url).path).name or shown}"
    digest = hashlib.sha256()
    received = 0
    wrong = ""
    for chunk in response.iter_content(_CHUNK_BYTES):
        is_page = is_page or (received == 0 and b"<html" in chunk[:1024].lower())
        received += len(chunk)
        if max_bytes is not None and received > max_bytes:
            wrong = f"it has more than {max_bytes:,} bytes"
            break
        if time.monotonic() > ends:
            raise _failure(url, f"it is too slow: {received:,} bytes until the deadline")
        file.write(chunk)
        digest.update(chunk)
        on_event(Progress(task, received, total, "B"))
    else:
        if sha256 not in (None, digest.hexdigest()):
            wrong = f"its SHA-256 is not {str(sha256)[:12]}…"
    if wrong:
        raise AttnlmError(
            f"{shown} sent {'a web page' if is_page else 'another file'}: {wrong}",
            _LOGIN if is_page else HINT,
        )


def _cause(error: BaseException, timeout: float) -> str:
    """Return the reason of `error`: the first timeout or message of the operating system in `error`
    or in the exceptions that led to it. If there is none, return `error` as text."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, TimeoutError):
            return f"no answer for {timeout:g} s"
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return without_password(" ".join(str(error).split()))


def _failure(url: str, reason: str, hint: str = HINT) -> AttnlmError:
    shown = reason if len(reason) <= 300 else f"{reason[:299]}…"  # a server's answer may be long
    return AttnlmError(f"cannot download {without_password(url)}: {shown}", hint)
