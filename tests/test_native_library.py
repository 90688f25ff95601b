"""Compiled code: what compilers do wrong, and what is kept of what they make."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest

from attnlm.base import caches
from attnlm.compute import native
from attnlm.compute.native import library

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows compiles nothing")


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of compiled code in a cache of its own."""
    monkeypatch.setenv("ATTNLM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "native"


COMPILERS = ("gcc", "clang", "aarch64-linux-gnu-gcc")
SOURCES = {"one_layer.c": ("-DSIZE=1", "-DSIZE=13", "-DSIZE=32", "-DSIZE=64")}
"""Constants that a C file wants."""


@pytest.mark.parametrize("compiler", COMPILERS)
def test_no_compiler_warns(compiler: str, tmp_path: Path) -> None:
    """For each width of vectors, with every flag that the library gets."""
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}")
    widths: list[list[str]] = [[]]
    if "aarch64" not in compiler and platform.machine() == "x86_64":
        widths += [["-fsyntax-only", f"-march={name}"] for name in ("haswell", "skylake-avx512")]
    warnings = ("-Wall", "-Wextra", "-Werror", "-fopenmp")
    flags = [*native.FLAGS, *warnings, "-c", "-o", str(tmp_path / "a.o")]
    flags.remove("-shared")
    with resources.as_file(resources.files(native)) as sources:
        for path in sorted(sources.glob("*.c")):
            for constant in SOURCES.get(path.name, ("-DNOTHING",)):
                for width in widths:
                    command = [compiler, *flags, *width, constant, str(path)]
                    done = subprocess.run(command, capture_output=True, text=True)
                    assert (done.returncode, done.stderr) == (0, "")


def anew(source: str, *flags: str, **constants: int) -> object:
    """`library`, as a new process would call it."""
    return library.__wrapped__(source, *flags, **constants)


def compiled_by(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """What `library` finds where CC names a compiler made of this shell script, and PATH none."""
    compiler = folder / "compiler"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    tools = folder / "tools"
    tools.mkdir()
    for name in ("sh", "sleep", "as", "ld"):
        if (found := shutil.which(name)) is not None:
            (tools / name).symlink_to(found)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("GCC", f"{shutil.which('gcc')} -B{Path(shutil.which('as') or '').parent}")
    monkeypatch.setenv("PATH", str(tools))
    return anew("words.c")


WITH_OUTPUT = 'while [ "$1" != -o ]; do shift; done; '


@pytest.mark.parametrize(
    ("script", "is_found"),
    [
        *(("exit 1", False), ("exit 0", False), ("sleep 30 & wait", False)),
        (WITH_OUTPUT + 'echo no > "$2"', False),
        (WITH_OUTPUT + 'echo "int x;" | $GCC -shared -fPIC -x c - -o "$2"', False),
        ('$GCC "$@"; exit 0', True),
        ('$GCC "$@"; exit 1', False),  # the library may be cut short: to load it ends the process
    ],
)
def test_a_compiler_that_makes_nothing_of_use_is_none(
    script: str, is_found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "GCC" in script and shutil.which("gcc") is None:
        pytest.skip("there is no gcc")
    if "sleep" in script:
        monkeypatch.setattr(native, "_LONGEST_COMPILATION", 0.5)
    assert (compiled_by(script, tmp_path, monkeypatch) is not None) == is_found


def test_a_signal_kills_the_compiler_before_it_waits_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    def interrupted(seconds: float) -> None:
        waited.append(seconds)
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compiled_by("sleep 30 & wait", tmp_path, monkeypatch)
    assert len(waited) == 1  # a second signal, which ends the process, would come while it waits


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often the only compiler there is was called."""
    found = shutil.which("gcc") or shutil.which("clang")
    if found is None:
        pytest.skip("there is no C compiler")
    compiler, called = tmp_path / "counting", tmp_path / "called"
    called.touch()
    compiler.write_text(f'#!/bin/sh\necho >> {called}\nexec {found} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return lambda: len(called.read_text())


OTHERS = """
from attnlm.compute.native import library
assert library("words.c") is not None
"""


def test_other_processes_load_what_one_has_compiled(
    calls: Callable[[], int], empty_cache: Path
) -> None:
    both = [subprocess.Popen([sys.executable, "-c", OTHERS]) for _ in range(2)]
    assert [process.wait(100) for process in both] == [0, 0]
    compiled = calls()
    assert 1 <= compiled <= 2 and len(list(empty_cache.iterdir())) == 1
    subprocess.run([sys.executable, "-c", OTHERS], check=True, timeout=100)
    assert calls() == compiled
    assert anew("words.c", "-O1") is not None and calls() == compiled + 1
    assert anew("words.c", A=1) is not None and calls() == compiled + 2


SPOILED: dict[str, Callable[[Path], object]] = {
    "other bytes": lambda kept: kept.write_bytes(kept.read_bytes()[::-1]),
    "truncated": lambda kept: os.truncate(kept, kept.stat().st_size - 100),
    "empty": lambda kept: os.truncate(kept, 0),
    "a pipe": lambda kept: subprocess.run(f"rm '{kept}'; mkfifo '{kept}'", shell=True, check=True),
    "others may write": lambda kept: kept.chmod(0o666),
}


@pytest.mark.parametrize("how", SPOILED)
def test_what_is_not_as_it_was_written_is_compiled_again(
    how: str, calls: Callable[[], int], empty_cache: Path
) -> None:
    assert anew("words.c") is not None
    (kept,) = empty_cache.iterdir()
    SPOILED[how](kept)
    assert anew("words.c") is not None and calls() == 2
    assert kept.is_file() and not kept.is_symlink() and kept.stat().st_mode & 0o777 == 0o600
    assert anew("words.c") is not None and calls() == 2
    assert list(empty_cache.iterdir()) == [kept]


def test_a_folder_that_others_may_write_to_is_not_used(
    calls: Callable[[], int], empty_cache: Path, tmp_path: Path
) -> None:
    assert anew("words.c") is not None
    empty_cache.chmod(0o777)
    assert anew("words.c") is not None and calls() == 2  # kept in the temporary folder
    (tmp_path / f"attnlm-native-{os.getuid()}").chmod(0o777)
    for expected in (3, 4):
        assert anew("words.c") is not None and calls() == expected
    assert not list(tmp_path.glob("attnlm-*/*.so"))


def test_the_oldest_make_room(
    calls: Callable[[], int], empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert anew("words.c", A=1) is not None
    (oldest,) = empty_cache.iterdir()
    os.utime(oldest, (0, 0))
    monkeypatch.setattr(native, "_MOST_KEPT", int(2.5 * oldest.stat().st_size))
    for number in (2, 3):
        assert anew("words.c", A=number) is not None
    assert len(list(empty_cache.iterdir())) == 2 and not oldest.exists()
    assert anew("words.c", A=3) is not None and calls() == 3


def test_a_library_is_kept_by_all_that_it_depends_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, header, compiler = (tmp_path / name for name in ("a.c", "a.h", "compiler"))
    for path in (source, header, compiler):
        path.write_text("1")
    keys = {native._name([str(compiler)], source)}
    assert keys == {native._name([str(compiler)], source)}
    keys.add(native._name([str(compiler), "-O2"], source))
    for path in (source, header, compiler):
        path.write_text("10")
        keys.add(native._name([str(compiler)], source))
    monkeypatch.setattr(native, "processor", lambda: ["another"])
    keys.add(native._name([str(compiler)], source))
    assert len(keys) == 6


def test_where_programs_may_be_loaded_from(
    calls: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "may_load_from", lambda folder: False)
    assert anew("words.c") is not None  # from the cache
    monkeypatch.setattr(caches, "may_load_from", lambda folder: False)
    assert anew("words.c") is None and calls() == 1
