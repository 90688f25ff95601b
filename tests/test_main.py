"""How the process begins: what is set before torch is loaded."""

from __future__ import annotations

import os

import pytest

from attnlm.__main__ import main
from attnlm.base import clock


@pytest.mark.parametrize(
    ("given", "count"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_threads_that_wait_soon_sleep_unless_the_user_said_how(
    given: dict[str, str], count: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that what main sets is taken back
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(clock, "command_began", None)  # or later budgets would count from here
    found = []
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(
        "attnlm.cli.exits.run_and_exit", lambda _: found.append(os.environ.get("GOMP_SPINCOUNT"))
    )
    main()
    assert found == [count]
