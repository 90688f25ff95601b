"""Files as the bytes that are in them: .gz and .zst are decompressed in a stream."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import BinaryIO, cast

from attnlm.base.errors import AttnlmError
from attnlm.base.files import open_regular

COMPRESSED = (".gz", ".zst")
_BUFFER = 2**18  # bytes


@contextlib.contextmanager
def opened(path: Path, shown: str) -> Iterator[BinaryIO]:
    """The bytes of a regular file, decompressed where its name ends with .gz or .zst.

    Raises AttnlmError, here or as it is read, for what does not decompress; `shown` is the file's
    name for the user. Raises OSError for what can't be read.
    """
    with open_regular(path) as file:
        if not is_compressed(path):
            yield cast(BinaryIO, file)
            return
        with _explaining(shown), contextlib.closing(_decompressing(path, file, shown)) as stream:
            yield cast(BinaryIO, io.BufferedReader(stream, _BUFFER))


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() in COMPRESSED


def optional(name: str, extra: str, what: str) -> ModuleType:
    """A module that is installed with an extra. Raises AttnlmError, which names that, without."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        package = error.name if error.name != "backports" else name
        raise AttnlmError(
            f"{what} needs the Python package {package}, which is not installed",
            f'install it: pip install "attnlm[{extra}]"',
        ) from None


def _decompressing(path: Path, file: object, shown: str) -> io.RawIOBase:
    if path.suffix.lower() == ".gz":
        return cast(io.RawIOBase, gzip.GzipFile(fileobj=file))  # type: ignore[call-overload]
    return cast(io.RawIOBase, _zstd(shown).ZstdFile(file))


def _zstd(shown: str) -> ModuleType:
    try:
        return importlib.import_module("compression.zstd")  # Python 3.14
    except ModuleNotFoundError:
        return optional("backports.zstd", "large", f"reading {shown}")


@contextlib.contextmanager
def _explaining(shown: str) -> Iterator[None]:
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _damaged(shown, error) from None
    except Exception as error:
        if type(error).__name__ != "ZstdError":  # of a module that may not be there
            raise
        raise _damaged(shown, error) from None


def _damaged(shown: str, error: Exception) -> AttnlmError:
    reason = "it ends too early" if isinstance(error, EOFError) else str(error) or "it is not valid"
    return AttnlmError(
        f"can't decompress {shown}: {reason}",
        "copy or download it again; `gzip -t` and `zstd -t` test such files",
    )
