"""Files from the web: whole and as expected, or an error that says what the server answered."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import math
import queue
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import urljoin, urlsplit

from attnlm.base.caches import cache_folder
from attnlm.base.errors import AttnlmError
from attnlm.base.events import Note, OnEvent, Progress, ignore
from attnlm.base.files import file_hash, replacing

if TYPE_CHECKING:
    import requests  # imported late below: it takes longer than the rest of a command's start

PAUSES = (0.5, 1.0, 2.0)  # seconds before each retry
LONGEST_PAUSE = 30.0  # seconds; a server that asks for more is not waited for
MAX_REDIRECTS = 10
# What a period must bring, from the first attempt to connect on: 1 KiB/s. As a period's bytes are
# counted by whole chunks, these are smaller.
PERIOD = 30.0  # seconds
PERIOD_BYTES = 2**15
CHUNK_BYTES = 2**14
HINT = "check the address and the network, or pass a file; `attnlm prepare tales` needs no network"


class _TransientError(AttnlmError):
    """A failure that may be over in a moment; `retry_after` is the server's wish, in seconds."""

    def __init__(self, message: str, hint: str, retry_after: float) -> None:
        super().__init__(message, hint)
        self.retry_after = retry_after


def fetch(
    url: str,
    destination: Path,
    *,
    sha256: str | None = None,
    max_bytes: int | None = None,
    deadline: float | None = None,
    timeout: float = 10.0,
    on_event: OnEvent = ignore,
) -> None:
    """Puts what `url` answers at `destination`, complete, or leaves what is there as it was.

    `sha256` and `max_bytes` are what the content must match; `deadline` is in seconds from now,
    retries and all; `timeout` is the longest silence in seconds, of a connection or within it.
    A server that sends less than 1 KiB/s for half a minute is given up. Reports Progress in bytes.
    Raises AttnlmError with the server's answer in its message.
    """
    ends = math.inf if deadline is None else time.monotonic() + deadline
    for pause in (*PAUSES, math.inf):
        try:
            with replacing(destination) as file:
                receive = functools.partial(_receive, url, file, sha256, max_bytes, timeout)
                if not _run_until(ends, receive, on_event):
                    slow = f"it sends less than {PERIOD_BYTES // 2**10} KiB in {PERIOD:g} s"
                    is_late = time.monotonic() >= ends
                    raise _failure(url, f"it takes longer than {deadline:g} s" if is_late else slow)
            return
        except _TransientError as error:
            wait = max(pause, error.retry_after)
            if wait > LONGEST_PAUSE or time.monotonic() + wait >= ends:
                raise
            time.sleep(wait)
        except OSError as error:
            raise AttnlmError(
                f"can't write {destination}: {error.strerror}",
                "free some space, or name another folder",
            ) from error


def cached(
    url: str,
    name: str,
    *,
    sha256: str,
    max_bytes: int,
    spool: Path,
    offline: bool = False,
    deadline: float | None = None,
    on_event: OnEvent = ignore,
) -> Path:
    """A file with this content: the user's cached copy, or else fetched and kept there as `name`.

    Where the cache can't be written, a Note says why and the file stays in the folder `spool`.
    Raises AttnlmError as `fetch` does, or when the file is not cached and `offline` is set.
    """
    folder = cache_folder()
    if folder and _has_hash(folder / name, sha256):
        return folder / name
    if offline:
        raise AttnlmError(
            f"{name} is not in the cache ({folder}), and `offline` forbids a download",
            "pass a file, or use `attnlm prepare tales`, which needs no network",
        )
    fetched = spool / name
    fetch(url, fetched, sha256=sha256, max_bytes=max_bytes, deadline=deadline, on_event=on_event)
    try:
        if folder is None:
            raise FileNotFoundError(errno.ENOENT, "the system names no home folder")
        folder.mkdir(parents=True, exist_ok=True)
        with fetched.open("rb") as source, replacing(folder / name) as copy:
            shutil.copyfileobj(source, copy)
    except OSError as error:
        on_event(Note(f"can't keep {name} in the cache ({folder}): {error.strerror}"))
        return fetched
    return folder / name


def without_password(url: str) -> str:
    """`url` as it may be shown and stored: less the user name and password in it."""
    return re.sub(r"//[^/?#]*@", "//", url, count=1)


def _run_until(ends: float, task: Callable[[OnEvent], None], on_event: OnEvent) -> bool:
    """Runs `task` while it makes progress, at most to the time `ends`; says whether it ended.

    The task has a thread of its own, because no timeout of a socket bounds a name server that is
    silent, a server that drips, or one that sends headers for ever. A thread that is given up is
    left behind, and whatever the task writes to must be closed. Its events are reported, and its
    exceptions raised, from here.
    """
    happened: queue.SimpleQueue[object] = queue.SimpleQueue()

    def run() -> None:
        try:
            task(happened.put)
            happened.put(None)
        except Exception as error:  # noqa: BLE001 (raised below)
            happened.put(error)

    threading.Thread(target=run, daemon=True).start()
    period_ends, enough = time.monotonic() + PERIOD, PERIOD_BYTES
    try:
        while True:
            event = happened.get(timeout=max(0.0, min(ends, period_ends) - time.monotonic()))
            if event is None:
                return True
            if isinstance(event, Exception):
                raise event
            on_event(event)
            if isinstance(event, Progress) and event.done >= enough:
                period_ends, enough = time.monotonic() + PERIOD, event.done + PERIOD_BYTES
    except queue.Empty:
        return False


def _receive(
    url: str,
    file: IO[bytes],
    sha256: str | None,
    max_bytes: int | None,
    timeout: float,
    report: OnEvent,
) -> None:
    """Writes what `url` answers to `file`, once; raises _TransientError where a retry may help."""
    with _translating(url, timeout), _answer(url, timeout) as response:
        if response.status_code != 200:
            raise _refusal(url, response)
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":  # a little of it may unpack to no end
            raise _failure(url, f"it is compressed ({encoding}), which was not requested")
        is_page = "text/html" in response.headers.get("Content-Type", "").lower()
        if is_page and sha256 is None:
            _accept_page(url, report)
        task = f"downloading {Path(urlsplit(url).path).name or without_password(url)}"
        total = _total(response)
        digest = hashlib.sha256()
        received = 0
        for chunk in response.iter_content(CHUNK_BYTES):
            is_page = is_page or (received == 0 and b"<html" in chunk[:1024].lower())
            received += len(chunk)
            if max_bytes is not None and received > max_bytes:
                raise _unexpected(url, f"more than the {max_bytes:,} bytes expected", is_page)
            file.write(chunk)
            digest.update(chunk)
            report(Progress(task, received, total, "B"))
        if sha256 is not None and digest.hexdigest() != sha256:
            raise _unexpected(url, f"not the file expected (SHA-256 {sha256[:12]}…)", is_page)


@contextlib.contextmanager
def _answer(url: str, timeout: float) -> Iterator[requests.Response]:
    """The open response that `url` leads to, after redirects, none of them to a less safe place."""
    import requests

    _check_scheme(url, url)
    with requests.Session() as session:
        session.headers["Accept-Encoding"] = "identity"
        target_of = session.get_redirect_target
        # Where requests sees a redirect, it reads and unpacks all of the body that comes with it.
        session.get_redirect_target = lambda resp: None  # type: ignore[method-assign]
        place = url
        for _ in range(MAX_REDIRECTS + 1):
            with session.get(
                place, stream=True, allow_redirects=False, timeout=timeout
            ) as response:
                target = target_of(response)
                if not target:
                    yield response
                    return
                origin, place = place, urljoin(place, target)
                _check_scheme(url, place)
                if origin.startswith("https:") and not place.startswith("https:"):
                    raise _failure(url, f"it redirects to {without_password(place)}, not https")
    raise _failure(url, f"it redirects more than {MAX_REDIRECTS} times, in a circle perhaps")


@contextlib.contextmanager
def _translating(url: str, timeout: float) -> Iterator[None]:
    """Turns what `requests` raises into one line that says what happened."""
    import requests

    try:
        yield
    except requests.exceptions.SSLError as error:
        raise AttnlmError(
            f"can't download {without_password(url)}: no secure connection: "
            f"{_cause(error, timeout)}",
            "behind a company's proxy, set REQUESTS_CA_BUNDLE to its certificates; or pass a file",
        ) from error
    except (
        requests.ConnectionError,
        requests.Timeout,
        requests.exceptions.ChunkedEncodingError,
    ) as error:
        raise _failure(url, _cause(error, timeout), retry_after=0.0) from error
    except (requests.RequestException, ValueError) as error:
        raise _failure(url, " ".join(str(error).split())) from error


def _cause(error: BaseException, timeout: float) -> str:
    """The system's reason among the exceptions that led to `error`."""
    reason = "the connection was lost"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, TimeoutError):
            return f"no answer for {timeout:g} s"
        if isinstance(cause, OSError) and cause.strerror:
            reason = cause.strerror
        cause = cause.__cause__ or cause.__context__
    return reason


def _failure(url: str, reason: str, *, retry_after: float | None = None) -> AttnlmError:
    """One line on why the download failed; with `retry_after`, in seconds, a retry may help."""
    shown = reason if len(reason) <= 300 else f"{reason[:299]}…"  # a server may say a lot
    message = f"can't download {without_password(url)}: {shown}"
    if retry_after is None:
        return AttnlmError(message, HINT)
    return _TransientError(message, HINT, retry_after)


def _refusal(url: str, response: requests.Response) -> AttnlmError:
    """What to raise for a status other than 200: a retry may help after 429 and 5xx."""
    status = f"HTTP {response.status_code} {response.reason or ''}".rstrip()
    if response.status_code == 429 or response.status_code >= 500:
        return _failure(url, status, retry_after=_seconds(response.headers.get("Retry-After", "")))
    return _failure(url, status)


def _unexpected(url: str, what: str, is_page: bool) -> AttnlmError:
    hint = HINT
    if is_page:
        what += ", but a web page"
        hint = "a login page of the network may be in the way: open any site in a browser first"
    return AttnlmError(f"{without_password(url)} answers with {what}", hint)


def _accept_page(url: str, report: OnEvent) -> None:
    """Notes that a web page was asked for; raises AttnlmError where it was a text file."""
    if urlsplit(url).path.lower().endswith((".txt", ".md")):
        raise AttnlmError(
            f"{without_password(url)} answers with a web page (text/html), not a text file",
            "give the address of the file itself (its `raw` link), or pass a file",
        )
    report(Note(f"{without_password(url)} is a web page: its markup will be part of the text"))


def _check_scheme(url: str, place: str) -> None:
    if not re.match(r"https?://[^/]", place, re.IGNORECASE):
        raise _failure(url, f"{without_password(place)} is not an http or https address")


def _total(response: requests.Response) -> int | None:
    """The bytes to come, where the headers tell."""
    length = response.headers.get("Content-Length", "")
    return int(length) if length.isdecimal() else None


def _seconds(retry_after: str) -> float:
    """A `Retry-After` header, a number of seconds or a date, as seconds from now."""
    if retry_after.isdecimal():
        return float(retry_after)
    try:
        from email.utils import parsedate_to_datetime  # late: it is slow to import, rarely needed

        return parsedate_to_datetime(retry_after).timestamp() - time.time()
    except ValueError:
        return 0.0


def _has_hash(path: Path, sha256: str) -> bool:
    try:
        return file_hash(path) == sha256
    except OSError:
        return False
