"""`make processors`: an environment is as it says, or its tests are not run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tools import on_processors
from tools.on_processors import ENVIRONMENTS, outcome, skipped


def test_a_limit_without_effect_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests would otherwise use the reference implementation, not kernels."""
    limited = ENVIRONMENTS["SSE"]._replace(kernels="none")
    monkeypatch.setitem(on_processors.ENVIRONMENTS, "SSE", limited)
    assert outcome("SSE", tmp_path) == (False, "the kernels have 0 lanes, not 4")


def test_environments_without_tools_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert skipped("zig") == "zig is not installed; `make package` installs it"
    assert skipped("Windows") == skipped("zig")
    assert skipped("ARM64") == "there is no aarch64-linux-gnu-gcc and no qemu-aarch64"
    assert skipped("no kernels") is None


def test_failures_are_named_and_a_short_run_has_four_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_wrong.py").write_text(
        "import pytest\n@pytest.mark.parametrize('n', range(9))\ndef test_right(n): pass\n"
        "def test_wrong(): assert False\n"
    )
    monkeypatch.setattr(on_processors, "_FOUND", "print(0, None)")  # without torch
    monkeypatch.setattr(on_processors, "_ALL_TESTS", [str(tmp_path / "test_wrong.py")])
    monkeypatch.setattr(on_processors, "_WORKERS", "0")
    for short, count in ((False, 9), (True, 4)):
        passes, line = outcome("no kernels", tmp_path, short=short)
        first, failed = line.splitlines()
        assert not passes and first == f"{count} passed, 1 failed, 0 skipped"
        assert failed.strip().endswith("test_wrong::test_wrong")
