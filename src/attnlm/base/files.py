"""Files and folders that are complete or absent, and JSON files with their own hash.

Each is made in a workspace, a hidden folder beside its place, and then moved there. A workspace
that a killed process left is removed when it is a day old.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import itertools
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from attnlm.base.errors import AttnlmError

_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "check the permissions"),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), "check that the path still exists"),
}
COPY_AGAIN = "copy it again from its source, or make it again"
_WORKSPACE = ".unfinished-"
_DAY = 86_400  # seconds


def workspace(root: Path) -> contextlib.AbstractContextManager[Path]:
    """Make `root` and, in it, a hidden folder that is deleted at the end of the context."""
    root.mkdir(parents=True, exist_ok=True)
    return _workspace(root)


@contextlib.contextmanager
def _workspace(root: Path) -> Iterator[Path]:
    remove_leftovers(root)
    folder = Path(tempfile.mkdtemp(prefix=_WORKSPACE, dir=root))
    try:
        yield folder
    finally:
        delete_folder(folder)


def remove_leftovers(root: Path) -> None:
    """Remove the workspaces in `root` that killed processes left: no file is newer than a day.

    Links, and what can't be removed, stay.
    """
    # Match only names by `mkdtemp`: a folder for exports may also have a file .unfinished-novel.
    for leftover in root.glob(_WORKSPACE + "?" * 8):
        with contextlib.suppress(OSError):
            newest = max(path.lstat().st_mtime for path in (leftover, *leftover.rglob("*")))
            if time.time() - newest >= _DAY:
                delete_folder(leftover)


def delete_folder(folder: Path) -> None:
    """Delete a folder without following links in it. Anything that can't be deleted stays."""
    shutil.rmtree(folder, ignore_errors=True)


def numbered_paths(folder: Path, prefix: str) -> Iterator[Path]:
    """Yield the paths `<prefix>-001`, `<prefix>-002`, … in a folder."""
    return (folder / f"{prefix}-{number:03}" for number in itertools.count(1))


def move_to_free(new: Path, places: Iterable[Path]) -> Path:
    """Move the folder `new` to the first of `places` where nothing exists, and return this place.

    Raises FileExistsError if something exists at each place.
    """
    for path in places:
        # A rename would replace an empty folder, which may belong to somebody.
        if os.path.lexists(path):
            continue
        try:
            return new.rename(path)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


@contextlib.contextmanager
def replacement(path: Path) -> Iterator[Path]:
    """Yield the path of an empty file. If the context succeeds, flush the file to disk and replace
    `path` by it.

    If `path` is a link, the link is replaced.
    """
    with naming_path_in_errors(path), _workspace(path.parent) as folder:
        temporary = folder / path.name
        temporary.touch()
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)  # a library may create a file that only its owner can read
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        _flush_folder(path.parent)


@contextlib.contextmanager
def open_replacement(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file that replaces `path`, as `replacement` does."""
    with replacement(path) as temporary, temporary.open("wb") as file:
        yield file


@contextlib.contextmanager
def naming_path_in_errors(path: Path) -> Iterator[None]:
    """Name `path` in an OSError of this context that names no file, or a temporary file."""
    try:
        yield
    except OSError as error:
        if error.filename is None or _WORKSPACE in str(error.filename):
            error.filename = str(path)
        raise


def suggest_remedy(error: OSError) -> str:
    """Return what the user can do about an error that the system reports."""
    return _REMEDIES.get(error.errno or 0, "check the path, its permissions and free space")


@contextlib.contextmanager
def explaining_os_errors(folder: Path, then: str = "") -> Iterator[None]:
    """Turn an OSError of this context into AttnlmError, with the hint `suggest_remedy` + `then`."""
    try:
        yield
    except BrokenPipeError:
        raise  # the reader of the output has ended
    except OSError as error:
        reason = error.strerror or " ".join(map(str, error.args))  # NumPy's has no strerror
        message = f"cannot write {error.filename or folder}: {reason}"
        raise AttnlmError(message, f"{suggest_remedy(error)}{then}") from error


def write_bytes(path: Path, content: bytes) -> None:
    """Replace the file at `path` by `content`, or leave it unchanged."""
    with open_replacement(path) as file:
        file.write(content)


def append_bytes(path: Path, content: bytes) -> None:
    """Append `content` to the file at `path`, which must not be a link, and flush it to disk."""
    if path.is_symlink():
        raise OSError(errno.EINVAL, "it is a link", str(path))
    with naming_path_in_errors(path), path.open("ab") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` with its SHA-256 under the key `sha256`."""
    sealed = {**content, "sha256": _json_hash(content)}
    write_bytes(path, (json.dumps(sealed, indent=2) + "\n").encode())


def open_regular(path: Path) -> io.BufferedReader:
    """Open a file of a run or a data set to read it.

    Raises OSError, also for a pipe or a device: reading it might never end.
    """
    file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115 - returned
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def open_given(path: Path) -> io.BufferedReader:
    """Open a file that the user named to read it; it may be a pipe or a terminal.

    Raises OSError, also for a device: /dev/zero has no end.
    """
    file = path.open("rb")
    mode = os.fstat(file.fileno()).st_mode
    if not (stat.S_ISCHR(mode) or stat.S_ISBLK(mode)) or file.isatty():
        return file
    file.close()
    raise OSError(errno.EINVAL, "it is a device", str(path))


def _open_at_once(path: str, flags: int) -> int:
    """Open a file; a pipe does not wait for its writer."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read_bytes(path: Path) -> bytes:
    """Return the content of a file of a run or a data set. Raises AttnlmError if it can't."""
    try:
        with open_regular(path) as file:
            return file.read()
    except OSError as error:
        raise AttnlmError(
            f"cannot read {path}: {error.strerror}", "check that it exists and that you may read it"
        ) from None


def read_text(path: Path) -> str:
    """Return the text of a file that the user named.

    Raises OSError as `open_given`, or AttnlmError if the file is not UTF-8.
    """
    with open_given(path) as file:
        return decode_utf8(file.read(), str(path))


def decode_utf8(content: bytes, shown: str) -> str:
    """Return the bytes as text, without a byte order mark. Raises AttnlmError if not UTF-8.

    `shown` is the name of the text in the message.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise AttnlmError(f"{shown} is not UTF-8", "convert it, then try again") from None


def read_json(path: Path, *, sealed: bool = False) -> dict[str, Any]:
    """Return what `write_json` wrote to `path`, without the hash.

    People may have edited the file, unless it is `sealed`. Raises AttnlmError as `json_object`
    does, or if a sealed file was changed after `write_json`.
    """
    content = json_object(path)
    if content.pop("sha256", None) != _json_hash(content) and sealed:
        raise AttnlmError(
            f"{path} was changed after attnlm wrote it: it does not match its own hash",
            f"undo the change, {COPY_AGAIN}",
        )
    return content


def json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises AttnlmError if the file is missing or not a JSON object; if it is not JSON, the error
    names the line and column of the mistake.
    """
    hint = f"correct it, {COPY_AGAIN}"
    try:
        content = json.loads(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise AttnlmError(f"{path} is not valid JSON: {error}", hint) from None
    if not isinstance(content, dict):
        raise AttnlmError(f"{path} is not a JSON object", hint)
    return content


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal. Raises OSError if it can't be read."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _json_hash(content: dict[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _flush_folder(folder: Path) -> None:
    """Flush a folder to disk, to make a rename in it durable. Do nothing if the system can't."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
