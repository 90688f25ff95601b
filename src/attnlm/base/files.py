"""Files that are complete or absent: atomic replacement, and JSON files with their own hash."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

from attnlm.base.errors import AttnlmError
from attnlm.base.workspaces import check_held, clear, locked_new

_Read = TypeVar("_Read")

_DISK_FAILS = (errno.EIO, errno.ENOSPC, errno.EDQUOT)
_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "check the permissions"),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), "check that the path still exists"),
}

_COPY_OR_MAKE = "copy it again from its source, or make it again"
_LARGEST_JSON = 2**20  # bytes


def open_regular(path: Path, mode: Literal["rb", "ab", "wb"] = "rb") -> IO[bytes]:
    """Open a regular file, but nothing else: opening a named pipe, say, could block forever.

    A link to a regular file is followed for reading, never for writing. Raises OSError if `path` is
    something else, such as a folder, a pipe or a device.
    """
    reads = mode == "rb"
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.stat(follow_symlinks=reads).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    if not reads:
        check_held(path)
    return path.open(mode)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a temporary file. If the context succeeds, flush it to disk and replace `path` by it.

    First delete older temporary files for `path`, left by killed processes.
    """

    def make() -> Path:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        temporary.touch(exist_ok=False)
        return temporary

    with naming(path):
        remove_temporary_files(path.parent, glob.escape(path.name))
        with locked_new(make) as temporary:
            try:
                with open_regular(temporary, "wb") as file:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(path)
                _flush_folder(path.parent)
            finally:
                with contextlib.suppress(OSError):  # an earlier error says more
                    temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """If an OSError without a file name is raised in this context, make `path` its file name."""
    check_held(path)
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def remedy(error: OSError) -> str:
    """Return what the user can do about an error that the system reports."""
    return _REMEDIES.get(error.errno or 0, "check the path, its permissions and free space")


@contextlib.contextmanager
def explaining(folder: Path, then: str = "") -> Iterator[None]:
    """Turn an OSError of this context into AttnlmError. Its hint is `remedy(error) + then`."""
    try:
        yield
    except BrokenPipeError:
        raise  # the reader of the output has ended
    except OSError as error:
        # NumPy's OSError has no errno, and counts what was written.
        reason = error.strerror or f"the disk may be full ({' '.join(map(str, error.args))})"
        hint = f"{remedy(error)}{then}"
        raise AttnlmError(f"cannot write {error.filename or folder}: {reason}", hint) from error


def remove_temporary_files(folder: Path, name: str = "*") -> None:
    """Remove killed processes' temporary files for the file `name`, a glob pattern, in `folder`."""
    clear(folder.glob(f".{name}.*.tmp"), Path.unlink)


def unless_replaced(path: Path, read: Callable[[], _Read]) -> _Read:
    """Return the result of `read`, which reads the file or folder at `path`.

    If `path` was replaced during that, call `read` again, so that the result never mixes the old
    and the new content. Raises what `read` raises, and OSError if nothing is at `path`.
    """

    def identity() -> tuple[int, int]:
        about = path.stat()
        return about.st_ino, about.st_ctime_ns  # inode numbers may be reused

    while True:
        before = identity()
        try:
            result = read()
        except AttnlmError:
            if identity() == before:
                raise
            continue
        if identity() == before:
            return result


def write_bytes(path: Path, content: bytes) -> None:
    """Replace the file at `path` by `content`, or leave it unchanged."""
    with replacing(path) as file:
        file.write(content)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` with its SHA-256 under the key `sha256`, which `read_sealed` checks."""
    sealed = {**content, "sha256": _json_hash(content)}
    write_bytes(path, (json.dumps(sealed, indent=2) + "\n").encode())


def read_bytes(path: Path, at_most: int) -> bytes:
    """Return the content of a small file.

    Raises AttnlmError if it can't be read, is not a regular file, or exceeds `at_most` bytes.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size <= at_most:
                return file.read(size)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise AttnlmError(
            f"cannot read {path}: {reason}", "check that it exists and that you may read it"
        ) from None
    raise AttnlmError(
        f"{path} is damaged: it has {size:,} bytes, too many for such a file", _COPY_OR_MAKE
    )


def read_text(file: IO[bytes], shown: str, at_most: int = 2**24) -> str:
    """Return the text of a file or pipe; `shown` is its name in messages.

    Raises AttnlmError if the text exceeds `at_most` bytes or is not UTF-8.
    """
    content = file.read(at_most + 1)
    if len(content) > at_most:
        raise AttnlmError(f"{shown} has more than {at_most:,} bytes", "use a part of it")
    return utf8(content, shown)


def utf8(content: bytes, shown: str) -> str:
    """Return the bytes as text, without a byte order mark. Raises AttnlmError if not UTF-8."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise AttnlmError(f"{shown} is not UTF-8", "convert it, then try again") from None


def read_json(path: Path, at_most: int = _LARGEST_JSON) -> dict[str, Any]:
    """Return what `write_json` wrote to `path`, without the hash. People may have edited the file.

    Raises AttnlmError as `json_object` does.
    """
    content = json_object(path, at_most)
    content.pop("sha256", None)
    return content


def read_sealed(path: Path, at_most: int = _LARGEST_JSON) -> dict[str, Any]:
    """Return what `write_json` wrote to `path`, without the hash.

    Raises AttnlmError as `json_object` does, or if the file was changed after `write_json`.
    """
    content = json_object(path, at_most)
    if content.pop("sha256", None) != _json_hash(content):
        raise AttnlmError(
            f"{path} was changed after attnlm wrote it: it does not match its own hash",
            f"undo the change, {_COPY_OR_MAKE}",
        )
    return content


def json_object(path: Path, at_most: int) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises AttnlmError, which names the line and column of a mistake, if the file is missing,
    exceeds `at_most` bytes or is not a JSON object.
    """
    try:
        content = json.loads(read_bytes(path, at_most))
        reason = "" if isinstance(content, dict) else "it is not a JSON object"
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise AttnlmError(
            f"{path} is not valid JSON: {error.msg} in {place}", f"correct it, {_COPY_OR_MAKE}"
        ) from None
    except UnicodeDecodeError as error:
        reason = f"byte {error.start:,} is not UTF-8"
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError:
        reason = "it has a number that is too large"
    if reason:
        raise AttnlmError(f"{path} is not valid: {reason}", f"correct it, {_COPY_OR_MAKE}")
    found: dict[str, Any] = content
    return found


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a regular file in hexadecimal. Raises OSError for anything else."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def _json_hash(content: dict[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _flush_folder(folder: Path) -> None:
    """Flush a folder to disk, to make a rename in it durable. Do nothing if the system can't."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in _DISK_FAILS:
            raise
