"""Servers that stall, lie or break off: a download is whole and right, or refused in time."""

from __future__ import annotations

import functools
import gzip
import hashlib
import random
import socket
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from attnlm.text import download
from tests.trials import small
from tests.trials.trial import Tally, Trial, place
from tests.web_server import Answer, WebServer, body, serving

_MARGIN = 3.0  # seconds that a busy machine may take beside the deadline
_STALL_DEADLINE, _DEADLINE = 0.5, 20.0
_PORTAL = b"<!DOCTYPE html>\n<html><body>Log in to the network</body></html>"


@Trial("network", short=60, full=1500)
def _network(tally: Tally, folder: Path) -> None:
    """A download is whole and right, or refused in time; the cache never holds anything else.

    A machine that is silent; and so many servers, each of which answers in up to three drawn ways,
    one request after another. What may be over in a moment is asked for again, so that the first
    other answer decides: a good one ends with that content in the cache, any other with an error
    that says what it was. At no time may anything else be in the cache, nor half of anything.
    """
    with pytest.MonkeyPatch.context() as patch, serving() as web:
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setattr(download, "BACKOFF", 0.01)
        for name, _ in tally.chosen(["nobody accepts"], 1):
            tally.count(_nobody_accepts(folder), name)
        for case, generator in tally.drawn(tally.wanted, 1):
            # A server of which only the first half of a file came may have another one by then.
            size = generator.choice((0, 1, 999, 70_000))
            content, other = generator.randbytes(size), generator.randbytes(size)
            kinds = generator.choices(list(_TRANSIENT), k=generator.choice((0, 0, 1, 2)))
            said = [generator.choice((content, other)) for _ in kinds]
            kinds.append(_LASTING[case % len(_LASTING)])
            sent = zip(kinds, [*said, content], strict=True)
            answers = [_KINDS[kind](web, generator, part) for kind, part in sent]
            url = web.answer(f"/{case}/text.txt", *answers)
            with place(folder) as here:
                patch.setenv("ATTNLM_CACHE_DIR", str(here / "cache"))
                fault = _downloaded(url, content, here, kinds[-1])
            tally.count(fault, f"{', '.join(kinds)} ({len(content)} bytes)")


def _downloaded(url: str, content: bytes, place: Path, decides: str) -> str | None:
    """Return what goes wrong when this file is fetched and kept in the cache."""
    deadline = _STALL_DEADLINE if decides in _STALLS else _DEADLINE
    found: list[Path] = []
    file = download.Pinned(url, "text.txt", hashlib.sha256(content).hexdigest(), len(content))
    began = time.monotonic()
    refused, fault = small.refusal(
        lambda: found.append(download.cached(file, place, False, deadline, lambda event: None))
    )
    if time.monotonic() - began > deadline + _MARGIN:
        return f"it took {time.monotonic() - began:.1f} s"
    if fault is not None:
        return fault
    kept = place / "cache" / "text.txt"
    left = {path for path in place.rglob("*") if path.is_file()}
    if decides in _GOOD:
        if refused is not None or found != [kept] or kept.read_bytes() != content:
            return f"a good answer was not kept: {refused}"
        return None if left == {kept} else f"left over: {left}"
    if refused is None or _SAYS[decides] not in refused:
        return f"it says {refused!r}, not {_SAYS[decides]!r}"
    return f"left over: {left}" if left else None


def _nobody_accepts(folder: Path) -> str | None:
    """A machine that takes connections and never looks at them."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/a"
        began = time.monotonic()
        refused, fault = small.refusal(lambda: download.fetch(url, folder / "a", deadline=0.4))
    if time.monotonic() - began > _MARGIN:
        return "a silent machine was waited for"
    return fault or (None if refused and "no answer for 0.1 s" in refused else str(refused))


# --- Answers --------------------------------------------------------------------------------------

_Kind = Callable[[WebServer, random.Random, bytes], Answer]


def _pieces(generator: random.Random, content: bytes) -> list[bytes]:
    """The content, cut at random places."""
    count = generator.randrange(1, 12)
    cuts = sorted(generator.randrange(len(content) + 1) for _ in range(count))
    return [content[a:b] for a, b in zip([0, *cuts], [*cuts, len(content)], strict=True)]


def _raw(head: str, pieces: list[bytes]) -> Answer:
    """An answer as it is on the wire."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(head.replace("\n", "\r\n").encode() + b"\r\n")
        for piece in pieces:
            handler.wfile.write(piece)
            handler.wfile.flush()

    return answer


def _whole(web: WebServer, generator: random.Random, content: bytes) -> Answer:
    head = f"HTTP/1.1 200 OK\nConnection: close\nContent-Length: {len(content)}\n"
    return _raw(head, _pieces(generator, content))


def _chunks(generator: random.Random, content: bytes) -> list[bytes]:
    pieces = _pieces(generator, content)
    return [f"{len(p):x}\r\n".encode() + p + b"\r\n" for p in pieces if p]


_CHUNKED = "HTTP/1.1 200 OK\nConnection: close\nTransfer-Encoding: chunked\n"


def _redirected(web: WebServer, generator: random.Random, content: bytes) -> Answer:
    place = web.answer(f"/{generator.randrange(2**60)}", _whole(web, generator, content))
    return body(b"", generator.choice((301, 302, 303, 307, 308)), Location=place)


def _redirected_at_length(web: WebServer, generator: random.Random, content: bytes) -> Answer:
    """Another place, and a body without an end that says so, perhaps compressed."""
    place = web.answer(f"/{generator.randrange(2**60)}", _whole(web, generator, content))
    encoding = generator.choice(("", "Content-Encoding: gzip\n"))

    def answer(handler: BaseHTTPRequestHandler) -> None:
        _raw(f"HTTP/1.1 302 Found\nLocation: {place}\n{encoding}", [])(handler)
        while not web.closing.wait(0.005):
            handler.wfile.write(b"moved " * 99)

    return answer


def _short(web: WebServer, generator: random.Random, content: bytes) -> Answer:
    missing = generator.randrange(1, 99)
    return body(content, Content_Length=str(len(content) + missing))


def _longer(web: WebServer, generator: random.Random, content: bytes) -> Answer:
    length = generator.choice(("", str(len(content) + 1)))
    return body(content + b"x", Content_Length=length)


def _changed(web: WebServer, generator: random.Random, content: bytes) -> Answer:
    changed = bytearray(content)
    if not changed:
        return body(b"x")
    changed[generator.randrange(len(changed))] ^= 1 << generator.randrange(8)
    return body(bytes(changed))


def _loop(web: WebServer, generator: random.Random, content: bytes) -> Answer:
    places = [f"/{generator.randrange(2**60)}" for _ in range(generator.randrange(1, 4))]
    for here, following in zip(places, [*places[1:], places[0]], strict=True):
        web.answer(here, body(b"", 302, Location=following))
    return body(b"", 301, Location=places[0])


def _silent_halfway(web: WebServer, generator: random.Random, content: bytes) -> Answer:
    short = _short(web, generator, content)

    def answer(handler: BaseHTTPRequestHandler) -> None:
        short(handler)
        web.stay_silent(handler)

    return answer


_OUTSIDE = ("file:///etc/passwd", "ftp://127.0.0.1/a", "data:text/plain,a")
_BROKEN, _TEXT = (500, 502, 503, 504), ("html", "plain")
_REFUSALS = (204, 206, 304, 400, 401, 403, 404, 410, 416)


@functools.cache
def _bomb() -> bytes:
    return gzip.compress(gzip.compress(bytes(2**27)))


_KINDS: dict[str, _Kind] = {
    "whole": _whole,
    "of unknown length": lambda _, g, content: _raw("HTTP/1.0 200 OK\n", _pieces(g, content)),
    "chunked": lambda _, g, content: _raw(_CHUNKED, [*_chunks(g, content), b"0\r\n\r\n"]),
    "redirected": _redirected,
    "redirected at length": _redirected_at_length,
    "broken": lambda _, g, content: body(content[: len(content) // 2], g.choice(_BROKEN)),
    "busy": lambda *_: body(b"", 429, Retry_After="0"),
    "hung up": lambda *_: lambda handler: None,
    "refused": lambda _, g, content: body(content, g.choice(_REFUSALS)),
    "busy for an hour": lambda *_: body(b"", 429, Retry_After="3600"),
    "changed": _changed,
    "longer": _longer,
    "short": _short,
    "short chunks": lambda _, g, content: _raw(_CHUNKED, _chunks(g, content)),
    "portal": lambda _, g, content: body(_PORTAL, Content_Type=f"text/{g.choice(_TEXT)}"),
    "loop": _loop,
    "out of the web": lambda _, g, content: body(b"", 302, Location=g.choice(_OUTSIDE)),
    "compressed": lambda _, g, content: body(gzip.compress(content), Content_Encoding="gzip"),
    "a bomb": lambda *_: body(_bomb(), Content_Encoding="gzip, gzip"),
    "no gzip": lambda _, g, content: body(content + b"no gzip", Content_Encoding="gzip"),
    "silent": lambda web, *_: web.stay_silent,
    "silent halfway": _silent_halfway,
}
_GOOD = ("whole", "of unknown length", "chunked", "redirected", "redirected at length")
_TRANSIENT = ("broken", "busy", "hung up")
_LASTING = tuple(kind for kind in _KINDS if kind not in _TRANSIENT)
_STALLS = ("silent", "silent halfway")
_SAYS = {
    "refused": "HTTP ",
    "busy for an hour": "HTTP 429",
    "changed": "another file",
    "longer": "more than",
    "short": "more expected",
    "short chunks": "cannot download",
    "portal": "a web page",
    "loop": "Exceeded 10 redirects",
    "out of the web": "No connection adapters",
    **dict.fromkeys(("compressed", "a bomb", "no gzip"), "it is compressed"),
    **dict.fromkeys(_STALLS, "no answer for"),
}
