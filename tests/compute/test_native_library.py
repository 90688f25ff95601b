"""The kernels in C: how they are compiled, chosen for a processor, and loaded."""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.compute import native
from attnlm.compute.native import structs
from hatch_build import FLAGS, KernelsHook
from tests.kit import command
from tests.models import needs_kernels
from tools import on_processors
from tools.compile_kernels import SOURCES
from tools.on_processors import ENVIRONMENTS, outcome, skipped


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    """The choice of the instruction set, and the libraries, are remembered in a process."""
    native.instruction_set.cache_clear()
    native.load.cache_clear()
    yield
    native.instruction_set.cache_clear()
    native.load.cache_clear()


@pytest.mark.compilers
@pytest.mark.parametrize("compiler", ["gcc", "clang", "aarch64-linux-gnu-gcc"])
def test_no_compiler_warns(compiler: str, tmp_path: Path) -> None:
    """For each width of vectors; all passes of the compiler run for the widest alone. -O3 takes
    twice as long, and finds nothing more."""
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}")
    widths: list[list[str]] = [[]]
    if "aarch64" not in compiler and platform.machine() == "x86_64":
        widths += [[f"-march={name}"] for name in ("x86-64-v3", "x86-64-v4")]
    flags = [*FLAGS, "-O2", "-Wall", "-Wextra", "-Werror", "-c", "-o", str(tmp_path / "a.o")]
    flags.remove("-shared")
    for path, width in itertools.product(SOURCES, widths):
        partly = ["-fsyntax-only"] * (width is not widths[-1])
        words = [compiler, *flags, *partly, *width, str(path)]
        done = subprocess.run(words, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("machine", "bits", "limit", "expected"),
    [
        ("AMD64", 128, "", "sse4.2"),
        ("AMD64", 256, "", "avx2"),
        ("AMD64", 512, "", "avx512"),
        ("AMD64", 512, "avx2", "avx2"),
        ("AMD64", 256, "default", "sse4.2"),
        ("arm64", 128, "", "neon"),
        ("riscv64", 128, "", "none"),
    ],
)
def test_the_instruction_set_follows_the_processor(
    machine: str, bits: int, limit: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(native.VARIABLE, raising=False)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", limit)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(native, "load", lambda name: SimpleNamespace(vector_bits=lambda: bits))
    assert native.instruction_set() == expected


def test_the_instruction_sets_are_those_that_pytorch_finds() -> None:
    if (library := native.native_library()) is None or platform.machine() not in (
        "x86_64",
        "AMD64",
    ):
        pytest.skip("there are no kernels for several instruction sets here")
    found = {256: "AVX2", 512: "AVX512"}.get(library.vector_bits(), "DEFAULT")
    if not os.environ.get("ATEN_CPU_CAPABILITY"):
        assert found == torch.backends.cpu.get_cpu_capability()


def test_a_variable_overrides_the_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for named in (*native.instruction_sets(), "none"):
        monkeypatch.setenv(native.VARIABLE, named)
        native.instruction_set.cache_clear()
        assert native.instruction_set() == named
    assert native.native_library() is None
    monkeypatch.setenv(native.VARIABLE, "avx1024")
    native.instruction_set.cache_clear()
    with pytest.raises(UsageError, match="avx1024, which is not an instruction set of this"):
        native.instruction_set()


@needs_kernels
def test_every_instruction_set_of_this_processor_has_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(native.VARIABLE, raising=False)
    assert all(native.load(name) is not None for name in native.instruction_sets())


@pytest.mark.parametrize("content", [None, b"", b"no library"])
def test_missing_and_damaged_kernels_are_none(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_FOLDER", tmp_path)
    if content is not None:
        (tmp_path / f"kernels-odd{native._SUFFIX}").write_bytes(content)
    assert native.load("odd") is None


FIELDS: list[Any] = list(structs.CLinear._fields_)


@needs_kernels
@pytest.mark.parametrize(
    "fields",
    [
        [*FIELDS, ("more", ctypes.c_int64)],
        FIELDS[:-1],
        FIELDS[::-1],
        [*FIELDS[:-1], ("bias", ctypes.c_int32)],
    ],
    ids=["a field more", "a field fewer", "another order", "a narrower field"],
)
def test_a_struct_that_differs_in_c_is_an_error(
    fields: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = type("CLinear", (structs.Struct,), {"_fields_": fields})
    monkeypatch.setitem(structs._STRUCTS, "decoding_layouts", (changed,))
    with pytest.raises(AttnlmError, match="the kernels in C belong to another version of attnlm"):
        native.load(native.instruction_sets()[0])


@needs_kernels
def test_kernels_that_lack_a_function_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(native._SIGNATURES, "no_such_function", ([], None))
    with pytest.raises(AttnlmError, match="belong to another version"):
        native.load(native.instruction_sets()[0])


def test_training_and_sampling_work_without_kernels(project: Path) -> None:
    """The package may have been built without a compiler."""
    without: dict[str, Any] = {"cwd": project, native.VARIABLE: "none"}
    train = ("train", "--steps=2", "--seed=1", "--model=transformer", "--embed-dim=8", "--heads=2")
    command(*train, "--block-size=8", **without)
    assert command("sample", "--tokens", "20", **without).stdout
    done = command(*train, "--block-size=8", "--compile", "native", code=1, **without)
    assert "--compile native needs attnlm's kernels in C" in done.stderr


class Hook(KernelsHook):
    """The build hook in a folder, without hatchling's own objects."""

    app: Any = mock.Mock()
    root = ""


def test_the_package_builds_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build says so; zig is one of its requirements."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "ATTNLM_WHEEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("hatch_build.ZIG", [sys.executable, "-c", "raise SystemExit(1)"])
    monkeypatch.setattr(Hook, "root", str(tmp_path))
    hook, build_data = Hook.__new__(Hook), {"force_include": dict[str, str]()}
    assert hook.dependencies() == ["ziglang>=0.15"]
    hook.initialize("standard", build_data)
    hook.finalize("standard", build_data, "")
    assert build_data == {"force_include": {}}
    hook.app.display_warning.assert_called_once_with("attnlm is installed without its kernels in C")


# --- make processors ------------------------------------------------------------------------------


def test_an_environment_fails_if_its_limit_has_no_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = ENVIRONMENTS["SSE"]._replace(kernels="none")
    monkeypatch.setitem(on_processors.ENVIRONMENTS, "SSE", limited)
    assert outcome("SSE", tmp_path) == (False, "the kernels are those for none, not sse4.2")


def test_environments_without_tools_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert skipped("zig") == "zig is not installed; `make package` installs it"
    assert skipped("Windows") == skipped("zig")
    assert skipped("ARM64") == "there is no aarch64-linux-gnu-gcc and no qemu-aarch64"
    assert skipped("no kernels") is None


def test_failures_are_named_and_a_short_run_leaves_variants_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_wrong.py").write_text(
        "import pytest\n@pytest.mark.variants\ndef test_right(): pass\n"
        "def test_wrong(): assert False\n"
    )
    monkeypatch.setattr(on_processors, "_FOUND", "print('none', None)")  # without torch
    monkeypatch.setattr(on_processors, "_TESTS", [str(tmp_path / "test_wrong.py")])
    monkeypatch.setattr(on_processors, "_WORKERS", "0")
    for short, count in ((False, "1 failed, 1 passed"), (True, "1 failed, 1 deselected")):
        passes, lines = outcome("no kernels", tmp_path, short=short)
        total, failed = lines.splitlines()
        assert not passes and total.startswith(count)
        assert "test_wrong.py::test_wrong" in failed
