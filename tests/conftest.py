"""Fixtures that several test files share."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from tests.web_server import WebServer

# The models of the tests are so small that a second thread only waits for the first.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with WebServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.closing.set()
        server.shutdown()
        thread.join()
