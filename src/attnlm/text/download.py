"""Downloads: complete files with the expected content, or an error with the server's answer.

`requests` downloads, and `urllib3` retries after a lost connection, HTTP 429 and server errors
(5xx).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from attnlm.base.errors import AttnlmError
from attnlm.base.events import Note, OnEvent, Progress, ignore
from attnlm.base.files import explaining_os_errors, file_hash, open_replacement
from attnlm.base.folders import cache_folder, writable_cache
from attnlm.text.text_files import check_size

if TYPE_CHECKING:
    import requests  # imported late below: it takes longer than the rest of a command's start

RETRIES = 3
BACKOFF = 0.5  # seconds before the second retry, doubled for each later one; none before the first
TIMEOUT = 10.0  # seconds: the longest silence of a server
HINT = "check the address and the network, or use a file; `attnlm prepare tales` needs no network"
_CERTIFICATES = (
    "behind a company's proxy, set REQUESTS_CA_BUNDLE to its certificates, or use a file"
)
_CHUNK_BYTES = 2**14


def fetch(
    url: str,
    destination: Path,
    *,
    sha256: str | None = None,
    max_bytes: int | None = None,
    timeout: float = TIMEOUT,
    on_event: OnEvent = ignore,
) -> None:
    """Download `url` to the file `destination`, completely or not at all.

    If given, `sha256` is the hash that the content must have, and `max_bytes` its largest size. The
    download fails if the server is silent for `timeout` seconds. Reports Progress in bytes.
    """
    import requests

    if not re.match(r"https?://[^/]", url, re.IGNORECASE):
        raise _download_error(url, f"{without_password(url)} is not an http or https address")
    with explaining_os_errors(destination.parent), open_replacement(destination) as file:
        try:
            with (
                _open_session(url) as session,
                session.get(url, stream=True, timeout=timeout) as response,
            ):
                body = _body(url, response, sha256, on_event)
                for received, chunk in body:
                    check_size(received, max_bytes, destination.parent, without_password(url))
                    file.write(chunk)
        except (requests.RequestException, ValueError) as error:
            is_ssl = isinstance(error, requests.exceptions.SSLError)
            hint = _CERTIFICATES if is_ssl else HINT
            raise _download_error(url, _failure_reason(error, timeout), hint) from error


def is_hub_offline() -> bool:
    """Return True if the variable HF_HUB_OFFLINE forbids the network, as Hugging Face reads it."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def fetch_cached(
    url: str,
    name: str,
    sha256: str,
    spool: Path,
    *,
    offline: bool = False,
    timeout: float = TIMEOUT,
    on_event: OnEvent = ignore,
) -> Path:
    """Return the path of a file with a known hash, in the user's cache under `name`.

    The file is downloaded if it is not there. If the cache can't be written, a Note says so, and
    the file is downloaded to the folder `spool`.
    """
    folder = cache_folder()
    shown = folder or "no home folder"
    with contextlib.suppress(OSError):
        if folder and file_hash(folder / name) == sha256:
            return folder / name
    if offline:
        raise AttnlmError(
            f"{name} is not in the cache ({shown}), and `offline` is set",
            "use a file, or `attnlm prepare tales`, which needs no network",
        )
    target_folder = writable_cache()
    if target_folder is None:
        on_event(Note(f"{name} is not kept: the cache ({shown}) cannot be written"))
        target_folder = spool
    fetch(url, target_folder / name, sha256=sha256, timeout=timeout, on_event=on_event)
    return target_folder / name


def without_password(text: str) -> str:
    """Return an address, or a text with an address, without its user name and password."""
    return re.sub(r"//[^/?#\s]*@", "//", text, count=1)


def _open_session(url: str) -> requests.Session:
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
    session.headers["Accept-Encoding"] = "identity"
    session.adapters.clear()
    for scheme in ("https://",) if url.lower().startswith("https:") else ("https://", "http://"):
        session.mount(scheme, HTTPAdapter(max_retries=retry))
    return session


def _body(
    url: str, response: requests.Response, sha256: str | None, on_event: OnEvent
) -> Iterator[tuple[int, bytes]]:
    """Yield the body of an answer in chunks, if it is the requested file, with the bytes so far."""
    if response.status_code != 200:
        raise _download_error(url, f"HTTP {response.status_code} {response.reason or ''}".rstrip())
    shown = without_password(url)
    if sha256 is None and "text/html" in response.headers.get("Content-Type", "").lower():
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
    for chunk in response.iter_content(_CHUNK_BYTES):
        digest.update(chunk)
        received += len(chunk)
        yield received, chunk
        on_event(Progress(task, received, total, "B"))
    if sha256 not in (None, digest.hexdigest()):
        message = f"{shown} sent another file: its SHA-256 is not {str(sha256)[:12]}…"
        raise AttnlmError(message, HINT)


def _failure_reason(error: BaseException, timeout: float) -> str:
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


def _download_error(url: str, reason: str, hint: str = HINT) -> AttnlmError:
    return AttnlmError(f"cannot download {without_password(url)}: {reason}", hint)
