"""Files that are complete or absent: atomic replacement, and JSON that knows its own hash."""

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
from attnlm.base.workspaces import FolderGoneError, check_held, clear, locked_new

_Read = TypeVar("_Read")

_DISK_FAILS = (errno.EIO, errno.ENOSPC, errno.EDQUOT)
_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "check the permissions"),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), "check that the path still exists"),
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
}

_LARGEST_JSON = 2**20  # bytes
_LARGEST_INTEGER, _LARGEST_FLOAT = 2**63 - 1, 3.4028234663852886e38  # of int64 and float32

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
}
_AT_ONCE, _NO_LINK = getattr(os, "O_NONBLOCK", 0), getattr(os, "O_NOFOLLOW", 0)  # not on Windows


def open_regular(path: Path, mode: Literal["rb", "ab", "wb"] = "rb") -> IO[bytes]:
    """Opens a regular file and nothing else: a named pipe could be waited for without end.

    A link to a regular file is read, never written through. Raises OSError, which says what is
    there instead.
    """

    def opener(name: str, flags: int) -> int:
        reads = not flags & (os.O_WRONLY | os.O_RDWR)
        # Looked at before, since opening a device may set it going, and after: it may be replaced.
        with contextlib.suppress(FileNotFoundError):
            _check_regular(path, path.stat(follow_symlinks=reads))
        descriptor = os.open(name, flags | _AT_ONCE | (0 if reads else _NO_LINK), 0o666)
        try:
            _check_regular(path, os.fstat(descriptor))
            if not reads:
                check_held(path)
        except (OSError, FolderGoneError):
            os.close(descriptor)
            raise
        return descriptor

    return open(path, mode, opener=opener)


def _check_regular(path: Path, about: os.stat_result) -> None:
    if not stat.S_ISREG(about.st_mode):
        kind = _KINDS.get(stat.S_IFMT(about.st_mode), "a device")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Opens a temporary file beside `path` and puts it there, flushed to disk, on success only."""
    with naming(path), _temporary_beside(path) as temporary:
        with open_regular(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _flush_folder(path.parent)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add `path` to what the system says of a write that fails, since it does not say where."""
    check_held(path)
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
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        temporary.touch(exist_ok=False)
        return temporary

    remove_leftovers(path.parent, glob.escape(path.name))
    with locked_new(make) as temporary:
        try:
            yield temporary
        finally:
            with contextlib.suppress(OSError):  # what went wrong before says more
                temporary.unlink(missing_ok=True)


def remedy(error: OSError) -> str:
    """Return what the user can do about an error of the system."""
    return _REMEDIES.get(error.errno or 0, "check the path, its permissions and free space")


@contextlib.contextmanager
def explaining(folder: Path, then: str = "") -> Iterator[None]:
    """Turn what the system says about our files into AttnlmError: one line, its remedy, `then`."""
    try:
        yield
    except BrokenPipeError:
        raise  # of whoever listens to us
    except OSError as error:
        reason = error.strerror or "".join(map(str, error.args))  # NumPy's has no number
        hint = f"{remedy(error)}{then}"
        raise AttnlmError(f"can't write {error.filename or folder}: {reason}", hint) from error


def remove_leftovers(folder: Path, name: str = "*") -> None:
    """Remove what killed processes left in `folder` as they replaced the file `name`, or any."""
    clear(folder.glob(f".{name}.*.tmp"), Path.unlink)


def unless_replaced(path: Path, read: Callable[[], _Read]) -> _Read:
    """`read()`, again where the file or folder at `path` was replaced meanwhile: both would mix.

    Raises what `read` raises, and OSError when there is nothing at `path`.
    """
    while True:
        before = _identity(path)
        try:
            result = read()
        except AttnlmError:
            if _identity(path) == before:
                raise
            continue
        if _identity(path) == before:
            return result


def _identity(path: Path) -> tuple[int, int]:
    """What a replacement changes: systems give the same inode number again."""
    about = path.stat()
    return about.st_ino, about.st_ctime_ns


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

    Raises AttnlmError when it can't be read, is no regular file, or has more bytes than that.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size <= at_most:
                return file.read(size)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise AttnlmError(
            f"can't read {path}: {reason}", "check that it is there and may be read"
        ) from None
    raise _damaged(path, f"it has {size:,} bytes, more than it ever needs")


def json_value(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError for invalid JSON and for large numbers."""
    return json.loads(text, parse_int=_integer, parse_float=_float)


def _integer(digits: str) -> int:
    if abs(number := int(digits)) > _LARGEST_INTEGER:
        raise ValueError("an integer is too large")
    return number


def _float(digits: str) -> float:
    if abs(number := float(digits)) > _LARGEST_FLOAT:
        raise ValueError("a number is too large")
    return number


def read_json(path: Path, at_most: int = _LARGEST_JSON) -> dict[str, Any]:
    """What `write_json` wrote there, less the hash.

    Raises AttnlmError when the file is missing, is no JSON object of at most so many bytes, has a
    number that is too large, or was changed since.
    """
    try:
        content = json_value(read_bytes(path, at_most).decode())
    except (ValueError, RecursionError):
        raise _damaged(path, "it is not valid JSON, or has a number that is too large") from None
    if not isinstance(content, dict):
        raise _damaged(path, "it is not a JSON object")
    if content.pop("sha256", None) != _json_hash(content):
        raise _damaged(path, "it does not match its own hash")
    return content


def file_hash(path: Path) -> str:
    """The SHA-256 of a regular file's bytes, in hexadecimal. Raises OSError for any other."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def _damaged(path: Path, reason: str) -> AttnlmError:
    return AttnlmError(
        f"{path} is damaged: {reason}", "copy it again from where it came, or make it again"
    )


def _json_hash(content: dict[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


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
