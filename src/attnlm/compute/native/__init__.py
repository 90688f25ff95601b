"""Kernels in C, compiled once for this machine and cached.

Tests compare each C file with a reference implementation in Python. A library is cached in a folder
to which only the user may write. The name of the cached file is a hash of all that the library
depends on. The file contains the library's SHA-256, then the library.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from attnlm.base import files
from attnlm.base.caches import code_folder, is_ours_alone, may_load_from
from attnlm.base.errors import AttnlmError

FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
_LONGEST_COMPILATION, _BETWEEN_LOOKS = 30.0, 0.01  # seconds
_MOST_KEPT = 4 * 2**20  # bytes
_DIGEST = 32  # bytes
# The fields of /proc/cpuinfo on which `-march=native` can depend.
_OF_A_PROCESSOR = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU ")

_PLACE, _NUMBER, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, dict[str, tuple[list[Any], Any]]] = {
    "attention.c": {
        "attention_lanes": ([], _NUMBER),
        "attention_scratch": ([_NUMBER] * 2, _NUMBER),
        "attend": ([*[_NUMBER] * 6, _REAL, *[_PLACE] * 6], None),
        "attend_backward": ([*[_NUMBER] * 6, _REAL, *[_PLACE] * 10], None),
    },
    "one_layer.c": {
        "attention_kept": ([_NUMBER], _NUMBER),
        "attention_scratch": ([_NUMBER], _NUMBER),
        "attend": ([*[_NUMBER] * 3, _REAL, *[_PLACE] * 4], None),
        "attend_backward": ([*[_NUMBER] * 3, _REAL, *[_PLACE] * 6], None),
    },
    "pointwise.c": {
        "gelu": ([*[_NUMBER] * 2, *[_PLACE] * 2], None),
        "gelu_backward": ([*[_NUMBER] * 2, *[_PLACE] * 3], None),
        "swiglu": ([*[_NUMBER] * 2, *[_PLACE] * 2], None),
        "swiglu_backward": ([*[_NUMBER] * 2, *[_PLACE] * 3], None),
        "rms_norm": ([*[_NUMBER] * 2, _REAL, *[_PLACE] * 4], None),
        "rms_norm_backward": ([*[_NUMBER] * 2, *[_PLACE] * 6], None),
        "cross_entropy": ([*[_NUMBER] * 3, _REAL, *[_PLACE] * 5], None),
        "place_heads": ([*[_NUMBER] * 5, _REAL, *[_PLACE] * 6], None),
        "place_heads_backward": ([*[_NUMBER] * 5, *[_PLACE] * 8], None),
    },
    "decoding.c": {
        "next_logits": (
            [*[_PLACE] * 2, *[_NUMBER] * 4, ctypes.c_char_p, _PLACE],
            ctypes.c_int,
        ),
        "generate": ([*[_PLACE] * 2, *[_NUMBER] * 2, _PLACE, _NUMBER, *[_PLACE] * 2], _NUMBER),
    },
    "words.c": {
        "find_words": ([_PLACE, ctypes.c_char_p, _NUMBER, _PLACE, _PLACE], _NUMBER),
        "gather_ids": ([_PLACE, _NUMBER, _PLACE, _PLACE], _NUMBER),
    },
}


@functools.cache
def library(source: str, *flags: str, **constants: int) -> ctypes.CDLL | None:
    """Return the functions of a C file in this folder, compiled with these flags and constants.

    The compilers that are tried are the one that CC names, cc, gcc and clang. Return None if none
    of them works, if the user has no folder from which code may be loaded, or on Windows, where a
    loaded library can't be removed.
    """
    if sys.platform == "win32" or (place := _loadable_place()) is None:
        return None
    more = [*flags, *(f"-D{name}={value}" for name, value in constants.items())]
    for command in commands():
        with contextlib.suppress(OSError, AttributeError):
            return _loaded([*command, *more], source, place)
    return None


def _loadable_place() -> str | None:
    """Return a folder that temporary folders can be made in and code loaded from, or None."""
    with contextlib.suppress(OSError):  # the system has no temporary folder
        if may_load_from(tempfile.gettempdir()):
            return tempfile.gettempdir()
    with contextlib.suppress(AttnlmError):
        return str(code_folder("native"))
    return None


def _loaded(command: list[str], source: str, place: str) -> ctypes.CDLL:
    """Load a cached library, or compile and cache it.

    Cached bytes are checked, and copied to a temporary folder before they are loaded. Raises
    OSError or AttributeError if compiling fails or the result lacks a function of `source`.
    """
    with (
        resources.as_file(resources.files(__name__)) as sources,
        tempfile.TemporaryDirectory(
            prefix="attnlm-", dir=place, ignore_cleanup_errors=True
        ) as folder,
    ):
        name, made = _name(command, sources / source), Path(folder, "made.so")
        with contextlib.suppress(OSError, AttributeError, AttnlmError):
            Path(folder, "kept.so").write_bytes(_kept(name))
            return _declared(ctypes.CDLL(f"{folder}/kept.so"), source)
        _run_compiler([*command, str(sources / source), "-o", str(made), "-lm"], folder)
        found = _declared(ctypes.CDLL(str(made)), source)
        _keep(name, made.read_bytes())
        return found


def _declared(found: ctypes.CDLL, source: str) -> ctypes.CDLL:
    for name, (arguments, result) in _SIGNATURES[source].items():
        function = getattr(found, name)
        function.argtypes, function.restype = arguments, result
    return found


def commands() -> Iterator[list[str]]:
    """Yield compilers with flags, the preferred first: the one that CC names, cc, gcc, clang."""
    named = (os.environ.get("CC"), "cc", "gcc", "clang")
    for compiler in dict.fromkeys(filter(None, (shutil.which(name) for name in named if name))):
        # Not every compiler can detect the processor.
        yield from ([compiler, *FLAGS, *more] for more in (["-march=native"], []))


def _run_compiler(command: list[str], folder: str) -> None:
    """Run a compiler, which keeps its temporary files in `folder`.

    Raises OSError if the compiler fails or exceeds `_LONGEST_COMPILATION`. After that time, or on a
    signal, the compiler and the processes that it started are killed.
    """
    if sys.platform == "darwin" and command[0].startswith("/usr/bin/"):
        # The compiler may be a placeholder of macOS that offers to install a compiler.
        if subprocess.run(["xcode-select", "-p"], capture_output=True).returncode != 0:
            raise OSError
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": folder},
        start_new_session=True,
    )
    ends = time.monotonic() + _LONGEST_COMPILATION
    try:
        # After a SIGINT, `wait` would give the compiler more time, and a second signal would end
        # this process before the compiler is killed.
        while (status := process.poll()) is None and time.monotonic() < ends:
            time.sleep(_BETWEEN_LOOKS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status != 0:
        raise OSError  # the library may be truncated: loading it could kill this process


def _name(command: list[str], source: Path) -> str:
    """Return a hash of all that a library depends on: sources, command, compiler and processor.

    The compiler is identified by its file's path, size and time, so that it does not have to run.
    """
    compiler = Path(command[0]).resolve()
    about = compiler.stat()
    texts = [
        path.read_text(encoding="utf-8") for path in (source, *sorted(source.parent.glob("*.h")))
    ]
    described = [command, str(compiler), about.st_size, about.st_mtime_ns, processor(), texts]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def processor() -> list[str]:
    """Return a description of the machine and its processor, from what the system reports."""
    described = [*platform.uname()[::4], platform.processor()]
    with contextlib.suppress(OSError):
        first, _, _ = Path("/proc/cpuinfo").read_text("utf-8", "replace").partition("\n\n")
        described += [line for line in first.splitlines() if line.startswith(_OF_A_PROCESSOR)]
    return described


def _kept(name: str) -> bytes:
    """Return the library cached under a name. Raises OSError if the file is lost or changed, and
    AttnlmError without a suitable folder."""
    with files.open_regular(code_folder("native") / name) as file:
        is_ours = is_ours_alone(os.fstat(file.fileno()))
        content = file.read(_MOST_KEPT)
    library = content[_DIGEST:]
    if not is_ours or hashlib.sha256(library).digest() != content[:_DIGEST]:
        raise OSError
    return library


def _keep(name: str, library: bytes) -> None:
    """Cache a library if possible. If the cache is then too large, delete the oldest libraries."""
    content = hashlib.sha256(library).digest() + library
    if len(content) > _MOST_KEPT:
        return
    with contextlib.suppress(OSError, AttnlmError):
        folder, size = code_folder("native"), 0
        files.write_bytes(folder / name, content)
        (folder / name).chmod(0o600)
        found = [(path.lstat(), path) for path in folder.iterdir()]
        for about, path in sorted(found, key=lambda one: one[0].st_mtime_ns, reverse=True):
            size += about.st_size
            if size > _MOST_KEPT:
                path.unlink()
