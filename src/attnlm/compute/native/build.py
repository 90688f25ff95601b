"""The compilers of a machine, and the cached libraries that they made.

A library is cached in a folder to which only the user may write. The name of the cached file is a
hash of all that the library depends on. The file contains the library's SHA-256, then the library.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from attnlm.base import files
from attnlm.base.caches import code_folder, is_ours_alone
from attnlm.base.errors import AttnlmError

FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
_LONGEST_COMPILATION = 30.0  # seconds
_MOST_KEPT = 4 * 2**20  # bytes
_DIGEST = 32  # bytes
# The fields of /proc/cpuinfo on which `-march=native` can depend.
_OF_A_PROCESSOR = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU ")


def commands() -> Iterator[list[str]]:
    """Yield compilers with flags, the preferred first: the one that CC names, cc, gcc, clang."""
    named = (os.environ.get("CC"), "cc", "gcc", "clang")
    for compiler in dict.fromkeys(filter(None, (shutil.which(name) for name in named if name))):
        # Not every compiler can detect the processor.
        yield from ([compiler, *FLAGS, *more] for more in (["-march=native"], []))


def run_compiler(command: list[str], folder: str) -> None:
    """Run a compiler, which keeps its temporary files in `folder`.

    Raises OSError if the compiler fails or exceeds `_LONGEST_COMPILATION`. After that time, or on a
    signal, the compiler and the processes that it started are killed.
    """
    if _would_ask_the_user(command[0]):
        raise OSError
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": folder},
        start_new_session=True,
    )
    try:
        status = process.wait(_LONGEST_COMPILATION)
    except subprocess.TimeoutExpired:
        raise OSError from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status != 0:
        raise OSError  # the library may be truncated: loading it could kill this process


def _would_ask_the_user(compiler: str) -> bool:
    """Return True if the compiler is a placeholder of macOS that offers to install a compiler."""
    if sys.platform != "darwin" or not compiler.startswith("/usr/bin/"):
        return False
    return subprocess.run(["xcode-select", "-p"], capture_output=True).returncode != 0


def key(command: list[str], source: Path) -> str:
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


def kept(name: str) -> bytes | None:
    """Return the library that was cached under a name, or None if the file is lost or changed."""
    with contextlib.suppress(OSError, AttnlmError):
        with files.open_regular(code_folder("native") / name) as file:
            is_ours = is_ours_alone(os.fstat(file.fileno()))
            content = file.read(_MOST_KEPT)
        library = content[_DIGEST:]
        if is_ours and hashlib.sha256(library).digest() == content[:_DIGEST]:
            return library
    return None


def keep(name: str, library: bytes) -> None:
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
