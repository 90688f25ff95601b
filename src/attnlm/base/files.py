"""Files that are complete or absent: atomic replacement, and JSON that knows its own hash."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

from attnlm.base.errors import AttnlmError
from attnlm.base.locks import clear, locked_new

_Read = TypeVar("_Read")

_DISK_FAILS = (errno.EIO, errno.ENOSPC, errno.EDQUOT)

_LARGEST_JSON = 2**20  # bytes


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Opens a temporary file beside `path` and puts it there, flushed to disk, on success only."""
    with naming(path), _temporary_beside(path) as temporary:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files private; ours are as readable as any other the user creates.
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
        _flush_folder(path.parent)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """What the system says of a full disk does not say where: it is `path`."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def _temporary_beside(path: Path) -> Iterator[Path]:
    """An empty file that is gone afterwards; those of killed processes go first."""

    def make() -> Path:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        os.close(descriptor)
        return Path(name)

    remove_leftovers(path.parent, path.name)
    with locked_new(make) as temporary:
        try:
            yield temporary
        finally:
            with contextlib.suppress(OSError):  # what went wrong before says more
                temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def explaining(folder: Path, hint: str) -> Iterator[None]:
    """Turns what the system says about our files into AttnlmError: one line, and `hint`."""
    try:
        yield
    except BrokenPipeError:
        raise  # of whoever listens to us
    except OSError as error:
        raise AttnlmError(
            f"can't write {error.filename or folder}: {error.strerror}", hint
        ) from error


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Removes what killed processes left in `folder` as they replaced `name`, or any file."""
    clear(folder.glob(f".{glob.escape(name) if name else '*'}.*.tmp"), Path.unlink)


def unless_replaced(path: Path, read: Callable[[], _Read]) -> _Read:
    """`read()`, again where the file or folder at `path` was replaced meanwhile: both would mix.

    Raises what `read` raises, and OSError when there is nothing at `path`.
    """
    while True:
        before = path.stat().st_ino
        try:
            result = read()
        except AttnlmError:
            if path.stat().st_ino == before:
                raise
            continue
        if path.stat().st_ino == before:
            return result


def write_bytes(path: Path, content: bytes) -> None:
    """Replaces the file at `path` by `content`, or leaves it as it was."""
    with replacing(path) as file:
        file.write(content)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes `content` with its own SHA-256 as the key `sha256`, which `read_json` checks."""
    sealed = {**content, "sha256": _json_hash(content)}
    write_bytes(path, (json.dumps(sealed, indent=2) + "\n").encode())


def read_bytes(path: Path, at_most: int) -> bytes:
    """The content of a small file.

    Raises AttnlmError when it can't be read, is a pipe or a device, or has more bytes than that.
    """
    try:
        status = path.stat()
        if stat.S_ISREG(status.st_mode) and status.st_size <= at_most:
            with path.open("rb") as file:
                return file.read(status.st_size)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise AttnlmError(
            f"can't read {path}: {reason}", "check that it is there and may be read"
        ) from None
    if not stat.S_ISREG(status.st_mode):
        raise _damaged(path, "it is not a regular file")
    raise _damaged(path, f"it has {status.st_size:,} bytes, more than it ever needs")


def read_json(path: Path, at_most: int = _LARGEST_JSON) -> dict[str, Any]:
    """What `write_json` wrote there, less the hash.

    Raises AttnlmError when the file is missing, is no JSON object of at most so many bytes, or was
    changed since.
    """
    try:
        content = json.loads(read_bytes(path, at_most).decode())
    except (ValueError, RecursionError):
        raise _damaged(path, "it is not valid JSON") from None
    if not isinstance(content, dict):
        raise _damaged(path, "it is not a JSON object")
    if content.pop("sha256", None) != _json_hash(content):
        raise _damaged(path, "it does not match its own hash")
    return content


def file_hash(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _damaged(path: Path, reason: str) -> AttnlmError:
    return AttnlmError(
        f"{path} is damaged: {reason}", "copy it again from where it came, or make it anew"
    )


def _json_hash(content: dict[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def _flush_folder(folder: Path) -> None:
    """Makes a rename durable, where the system lets a folder be flushed (Windows does not)."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in _DISK_FAILS:
            raise
