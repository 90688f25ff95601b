"""A real web server on this machine, for tests of what is downloaded."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[[BaseHTTPRequestHandler], None]


class WebServer(ThreadingHTTPServer):
    """Serve lists of answers by path, in order; the last one repeats."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: dict[str, list[Answer]] = {}
        self.asked: list[str] = []
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, path: str, *answers: Answer) -> str:
        """Sets what a path answers; returns its URL."""
        self.answers[path] = list(answers)
        return self.url + path

    def stay_silent(self, handler: BaseHTTPRequestHandler) -> None:
        """An answer that keeps the connection open, and says nothing more, until the end."""
        self.closing.wait()

    def handle_error(self, request: object, client_address: object) -> None:
        """Says nothing: clients that give up halfway are what many of the tests are about."""


@contextlib.contextmanager
def serving() -> Iterator[WebServer]:
    """A server in a thread of this process."""
    with WebServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.closing.set()
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: WebServer

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        answers = self.server.answers[self.path]
        (answers.pop(0) if len(answers) > 1 else answers[0])(self)

    def log_message(self, format: str, *args: object) -> None:
        pass


def body(content: bytes, status: int = 200, **headers: str) -> Answer:
    """An answer with its length in the headers, unless they say otherwise ("" leaves one out)."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in {"Content_Length": str(len(content)), **headers}.items():
            if value:
                handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(content)

    return answer
