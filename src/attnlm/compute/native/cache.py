"""Compiled libraries, kept in a folder that nobody else may write to.

A file is named by all that its library depends on, and begins with the library's SHA-256.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import stat
import tempfile
from pathlib import Path

from attnlm.base.caches import code_folder, is_ours_alone
from attnlm.base.errors import AttnlmError

_MOST_KEPT = 4 * 2**20  # bytes
_DIGEST = 32  # bytes
# What `-march=native` can depend on, by its name in /proc/cpuinfo.
_OF_A_PROCESSOR = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU ")


def key(command: list[str], source: Path) -> str:
    """What a library is kept by: its sources, the command, the compiler and the processor.

    The compiler is known by its file, so that it need not be run.
    """
    compiler = Path(command[0]).resolve()
    about = compiler.stat()
    texts = [
        path.read_text(encoding="utf-8") for path in (source, *sorted(source.parent.glob("*.h")))
    ]
    described = [command, str(compiler), about.st_size, about.st_mtime_ns, processor(), texts]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def processor() -> list[str]:
    """The machine and its processor, as far as the system tells."""
    described = [*platform.uname()[::4], platform.processor()]
    with contextlib.suppress(OSError):
        first, _, _ = Path("/proc/cpuinfo").read_text("utf-8", "replace").partition("\n\n")
        described += [line for line in first.splitlines() if line.startswith(_OF_A_PROCESSOR)]
    return described


def read(name: str) -> bytes | None:
    """The library that was kept under a name; None where there is none, or it is not as written."""
    try:
        path = code_folder("native") / name
        # Neither a link is followed nor a pipe waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode) or not is_ours_alone(about):
                return None
            content = file.read(_MOST_KEPT)
    except (OSError, AttnlmError):
        return None
    library = content[_DIGEST:]
    return library if hashlib.sha256(library).digest() == content[:_DIGEST] else None


def write(name: str, library: bytes) -> None:
    """Keeps a library, whole or not at all, where that can be done; the oldest ones make room."""
    content = hashlib.sha256(library).digest() + library
    if len(content) > _MOST_KEPT:
        return
    with contextlib.suppress(OSError, AttnlmError):
        folder = code_folder("native")
        descriptor, beside = tempfile.mkstemp(dir=folder)  # readable for us alone
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(descriptor)
            Path(beside).replace(folder / name)
        finally:
            Path(beside).unlink(missing_ok=True)
        _remove_oldest(folder)


def _remove_oldest(folder: Path) -> None:
    kept = 0
    found = [(path, path.lstat()) for path in folder.iterdir()]
    for path, about in sorted(found, key=lambda entry: entry[1].st_mtime_ns, reverse=True):
        kept += about.st_size
        if kept > _MOST_KEPT:
            path.unlink()
