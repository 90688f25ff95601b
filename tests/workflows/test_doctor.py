"""`attnlm doctor`, on machines that lack something."""

from __future__ import annotations

import builtins
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import attnlm
from attnlm.compute import native
from attnlm.compute.device import Device
from attnlm.model.ops import kernels_in_use
from attnlm.workflows import doctor as examination
from attnlm.workflows import speed_check
from attnlm.workflows.doctor import Finding
from tests.command import attnlm as command
from tests.fake_clock import Clock
from tests.models import needs_kernels

COMPARE = speed_check.compare_kernels  # takes most of an examination's time


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Measure as on an idle machine, with a cache of its own."""
    speed_is(monkeypatch)
    monkeypatch.setattr(speed_check, "compare_kernels", lambda: iter(()))
    monkeypatch.setenv("ATTNLM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def speed_is(
    monkeypatch: pytest.MonkeyPatch, flops: float = 6e10, given: float = 1.0, device: str = "cpu"
) -> None:
    planned = SimpleNamespace(tokens_per_second=3e4, flops_per_second=flops)
    monkeypatch.setattr(speed_check, "plan", lambda **_: planned)
    monkeypatch.setattr(speed_check, "peak_matmul_speed", lambda threads: 1e11)
    monkeypatch.setattr(speed_check, "_processor_share", lambda threads: given)
    monkeypatch.setattr(speed_check, "choose_device", lambda: Device(device, "float32", ""))


def findings(offline: bool = True) -> dict[str, Finding]:
    return {finding.name: finding for finding in attnlm.doctor(offline=offline)}


def test_a_sound_machine_has_nothing_to_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(speed_check, "compare_kernels", COMPARE)
        done = command("doctor", "--offline", "--json", cwd=tmp_path)
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert found.keys() >= {
        *("attnlm", "Python", "packages", "PyTorch", "device", "cpu", "cuda", "mps", "threads"),
        *("kernels", "cache", "disk here", "locale", "speed", "terminal", "matmul"),
    }
    assert "network" not in found and found["device"]["text"].startswith("cpu, float32")
    assert "60% of" in found["speed"]["text"]
    shown = command("doctor", "--offline", cwd=tmp_path)
    assert "cuda" in shown.stdout and "not available" in shown.stdout


def test_ten_steps_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the text alone: speeds differ."""
    monkeypatch.undo()
    text, _ = speed_check.check_speed()
    assert re.fullmatch(
        r".+ tokens/s, .+FLOP/s: \d+% of the .+FLOP/s of matrix .+ is usual\)", text
    )
    assert 0 < speed_check._processor_share(1) < 1.5


def test_a_busy_machine_is_distinguished_from_slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert findings()["speed"].remedy == ""
    speed_is(monkeypatch, given=0.5)
    assert "other programs use the processor" in findings()["speed"].remedy
    speed_is(monkeypatch, flops=1e10)
    assert "`threads`" in findings()["speed"].remedy
    speed_is(monkeypatch, device="cuda")
    assert findings()["speed"] == Finding("speed", "30 k tokens/s, 60 GFLOP/s on cuda")


def test_faults_of_a_broken_machine_are_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file in place of the cache")
    monkeypatch.setattr("attnlm.compute.native.native_library", lambda: None)
    monkeypatch.setattr("locale.getpreferredencoding", lambda _: "ANSI_X3.4-1968")
    monkeypatch.setattr(
        "attnlm.compute.device._reason_against", lambda name: "a small trial failed (no)"
    )

    def broken() -> Any:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("attnlm.workflows.speed_check.check_speed", broken)
    found = findings()
    assert "install attnlm again" in found["kernels"].remedy
    assert "ATTNLM_CACHE_DIR" in found["cache"].remedy
    assert "LC_ALL" in found["locale"].remedy
    assert "a small trial failed (no)" in found["cuda"].text and found["cuda"].remedy
    assert found["speed"].text == "check failed: RuntimeError: two"
    done = command("doctor", "--offline", cwd=tmp_path, TERM="dumb", HOME="/nonexistent")
    assert "→ " in done.stdout and "attnlm still works" in done.stderr
    monkeypatch.setattr(examination, "cache_folder", lambda: None)
    assert findings()["cache"].text == "no home folder"


def test_doctor_reports_a_missing_pytorch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def refusing(name: str, *arguments: Any) -> Any:
        if name == "torch":
            raise OSError("libc10.so: not found")
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", refusing)
    found = findings()
    assert "libc10.so" in found["PyTorch"].text and "install it again" in found["PyTorch"].remedy
    assert "speed" not in found and "locale" in found
    done = command("doctor", "--offline", cwd=tmp_path, code=1)
    assert "attnlm cannot train" in done.stderr and "Traceback" not in done.stdout


def test_doctor_does_not_wait_for_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "_PATIENCE", 0.2)
    monkeypatch.setenv("ATTNLM_TINYSHAKESPEARE_URL", "http://127.0.0.1:9/")  # where nobody listens
    found = findings(offline=False)
    assert "127.0.0.1 is not reachable" in found["network"].text and found["network"].remedy


@needs_kernels
def test_the_kernels_of_this_processor_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert findings()["kernels"].text.startswith(native.instruction_set())
    monkeypatch.setattr("attnlm.compute.native.instruction_set", lambda: "none")
    assert "unset ATTNLM_KERNELS" in findings()["kernels"].remedy


@pytest.mark.parametrize(
    ("slow", "remedy"), [("onednn", ""), ("blas", "`matmul` onednn is faster here")]
)
def test_a_setting_that_is_faster_than_the_rules_is_named(
    slow: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr(speed_check, "faster_matmul", lambda: "blas")
    monkeypatch.setattr(speed_check, "native_library", lambda: None)

    def matmul(*_: object) -> None:
        clock.advance(0.004 if kernels_in_use().matmul == slow else 0.001)

    monkeypatch.setattr(speed_check, "matmul", matmul)
    ((name, text, found),) = COMPARE()
    assert name == "matmul" and text.startswith("blas (blas ")
    assert found.startswith(remedy) and bool(found) == bool(remedy)
