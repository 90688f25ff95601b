"""Bytes of a text file to characters: encodings, line ends, and what is no text."""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator
from pathlib import Path

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.text.compressed import opened

# Characters at most in a piece of decoded text, and bytes in a read: what is made of it on the way
# to ids stays in a processor's cache.
PIECE = 2**18
SNIFFED_BYTES = 2**13  # of each file in a folder, to tell text from the rest
UTF16_SNIFFED_BYTES = 2**16


def unreadable(shown: object, error: OSError) -> AttnlmError:
    return AttnlmError(
        f"can't read {shown}: {error.strerror}", "check the path and its permissions"
    )


def start_of(path: Path, encoding: str) -> str | None:
    """The first characters of a text file; None where it is no text.

    A text decodes and holds no NUL, which wide encodings are full of.
    """
    if not path.is_file():
        return None
    with opened(path, str(path)) as file:
        start = file.read(SNIFFED_BYTES)
    if b"\0" in start and not encoding.startswith(("utf-16", "utf-32")):
        return None
    try:
        decoder = codecs.getincrementaldecoder(encoding)()
        return decoder.decode(start, final=len(start) < SNIFFED_BYTES).removeprefix("\ufeff")
    except UnicodeError:
        return None


def text_encoding(name: str) -> str:
    """Python's own name for a text encoding; raises UsageError for any other."""
    try:
        b" ".decode(name, "replace")  # refuses codecs that are not from bytes to text
        codecs.getincrementaldecoder(name)
        return codecs.lookup(name).name
    except (LookupError, ValueError):
        raise UsageError(
            f"unknown text encoding: {name!r}",
            "give one that Python knows, such as utf-8, utf-16, latin-1 or shift_jis",
        ) from None


def decoded(path: Path, encoding: str, newlines: str, shown: str) -> Iterator[str]:
    """A file's text, in strings of any length; `shown` is the file's name for the user.

    Places in what is compressed are counted in what comes out.
    """
    decoder: codecs.IncrementalDecoder | io.IncrementalNewlineDecoder
    decoder = codecs.getincrementaldecoder(encoding)()
    if newlines == "unix":
        decoder = io.IncrementalNewlineDecoder(decoder, translate=True)
    read = 0  # bytes
    try:
        with opened(path, shown) as file:
            chunk = file.read(PIECE)
            start = chunk[:UTF16_SNIFFED_BYTES]
            if encoding == "utf-8" and _is_full_of_nuls(start):
                raise AttnlmError(
                    f"{shown} looks like UTF-16: many of its bytes are NUL",
                    f"if it is a text, try `encoding` {_likely_encoding(start, encoding)}",
                )
            while chunk:
                read += len(chunk)
                yield decoder.decode(chunk)
                chunk = file.read(PIECE)
            yield decoder.decode(b"", final=True)
    except UnicodeError as error:
        offset = 0
        if isinstance(error, UnicodeDecodeError):
            # What the decoder was given ends where our reading does, and may start a chunk before.
            offset = read - len(error.object) + error.start
        raise AttnlmError(
            f"{shown} is not valid {encoding} at byte {offset}",
            f"name its encoding, perhaps `encoding` {_likely_encoding(start, encoding)}",
        ) from error
    except OSError as error:
        raise unreadable(shown, error) from error


def _is_full_of_nuls(start: bytes) -> bool:
    """Whether a quarter is NUL: text in UTF-16 often is, and would be valid, if odd, UTF-8."""
    return 4 * start.count(0) >= len(start) > 0


def _likely_encoding(start: bytes, refused: str) -> str:
    """What to try for a file with this start that is not in the encoding `refused`."""
    has_mark = start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if has_mark and refused != "utf-16":
        return "utf-16"
    if refused == "utf-16" or _is_full_of_nuls(start):
        return "utf-16-le" if start[1::2].count(0) >= start[::2].count(0) else "utf-16-be"
    return "latin-1"
