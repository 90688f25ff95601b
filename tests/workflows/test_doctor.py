"""`attnlm doctor`, on machines that lack something."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest

import attnlm
from attnlm.compute import native
from attnlm.workflows import doctor as examination
from attnlm.workflows.doctor import Finding
from tests.kit import command
from tests.models import needs_kernels


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATTNLM_CACHE_DIR", str(tmp_path / "cache"))


def findings() -> dict[str, Finding]:
    return {finding.name: finding for finding in attnlm.doctor()}


def test_a_sound_machine_has_nothing_to_mend(tmp_path: Path) -> None:
    done = command("doctor", "--json", cwd=tmp_path)
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert list(found) == [
        *("attnlm", "Python", "packages", "folder", "temporary", "cache"),
        *("PyTorch", "device", "cpu", "cuda", "mps", "memory", "kernels"),
    ]
    assert found["device"]["text"].startswith("cpu") and "GB" in found["memory"]["text"]
    assert str(tmp_path / "cache") in found["cache"]["text"]
    shown = command("doctor", cwd=tmp_path)
    assert "cuda" in shown.stdout and "not available" in shown.stdout


def test_faults_of_a_broken_machine_are_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file in place of the cache")
    monkeypatch.setattr("attnlm.compute.native.native_library", lambda: None)
    monkeypatch.setattr("attnlm.compute.native.instruction_sets", lambda: ("sse4.2", "avx2"))
    monkeypatch.setattr(
        "attnlm.compute.device._reason_against", lambda name: "a small trial failed (no)"
    )
    monkeypatch.setattr("os.access", lambda path, mode: False)
    monkeypatch.setattr(examination, "_FREE", float("inf"))
    found = findings()
    assert "install attnlm again" in found["kernels"].remedy
    assert "a small trial failed (no)" in found["cuda"].text and found["cuda"].remedy
    assert "free some space" in found["temporary"].remedy
    all_found = [*attnlm.doctor()]
    assert (
        Finding("folder", f"{Path.cwd()} is not writable", "change to another folder") in all_found
    )
    (cache,) = (finding for finding in all_found if finding.name == "cache")
    assert "ATTNLM_CACHE_DIR" in cache.remedy
    done = command("doctor", cwd=tmp_path, TERM="dumb", HOME="/nonexistent")
    assert "→ " in done.stdout and "to look at: see the → lines" in done.stderr
    monkeypatch.setenv("ATTNLM_KERNELS", "mmx")
    native.instruction_set.cache_clear()
    assert "mmx" in findings()["PyTorch"].text and findings()["PyTorch"].remedy
    native.instruction_set.cache_clear()


def test_a_missing_pytorch_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def refusing(name: str, *arguments: Any) -> Any:
        if name == "torch":
            raise OSError("libc10.so: not found\nat all")
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", refusing)
    found = findings()
    assert found["PyTorch"].text == "check failed: OSError: libc10.so: not found"
    assert "install torch again" in found["PyTorch"].remedy and "folder" in found
    done = command("doctor", cwd=tmp_path, code=1)
    assert "1 to look at" in done.stderr and "Traceback" not in done.stdout


@needs_kernels
def test_the_kernels_of_this_processor_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert findings()["kernels"].text.startswith(native.instruction_set())
    monkeypatch.setattr("attnlm.compute.native.instruction_set", lambda: "none")
    monkeypatch.setattr("attnlm.compute.native.native_library", lambda: None)
    assert "unset ATTNLM_KERNELS" in findings()["kernels"].remedy
