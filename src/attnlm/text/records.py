"""Texts of records: one column of the lines of a .jsonl file or the rows of a .parquet file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attnlm.base.errors import AttnlmError, optional
from attnlm.base.suggestions import suggestion
from attnlm.text.text_files import PIECE, Piece, kind_of, opened

LONGEST = 2**24  # bytes of a record, which is read as a whole
_MOST_NAMED = 8
_ONE_RECORD = 'each line must be one record in UTF-8, such as {"text": "…"}'


def record_pieces(
    path: Path, column: str, newlines: str, shown: str, marks_ends: bool
) -> Iterator[Piece]:
    """Yield, in pieces, the texts in one column of a file of records. Empty texts are left out.

    Pieces have the end of each text. Unless `marks_ends` is set, each text ends with a newline.
    `shown` is the file's name in messages. Raises AttnlmError for content that is not JSON or
    parquet, and for a column that is missing, null or not text. The error names the line or row.
    """
    waiting: list[str] = []
    ends: list[int] = []
    length = 0
    for text in filter(None, record_texts(path, column, shown)):
        if newlines == "unix":
            text = text.replace("\r\n", "\n").replace("\r", "\n")
        if not marks_ends and not text.endswith("\n"):
            text += "\n"
        for i in range(0, len(text), PIECE):
            part = text[i : i + PIECE]
            if length + len(part) > PIECE:
                yield Piece("".join(waiting), tuple(ends))
                waiting = []
                ends = []
                length = 0
            waiting.append(part)
            length += len(part)
        ends.append(length)
    if waiting:
        yield Piece("".join(waiting), tuple(ends))


def record_texts(path: Path, column: str, shown: str) -> Iterator[str]:
    """Yield the text of each record, also if it is empty. Raises AttnlmError as `record_pieces`."""
    found = (_lines if kind_of(path) == ".jsonl" else _rows)(path, column, shown)
    return (checked(value, f"column {column!r}", where) for where, value in found)


def record_values(path: Path, column: str, shown: str) -> Iterator[tuple[str, Any]]:
    """Yield the JSON value in a column of each line of a .jsonl file, after the line's name.

    Raises AttnlmError for any other file, and as `record_pieces`.
    """
    if kind_of(path) != ".jsonl":
        raise AttnlmError(f"{shown} is not a .jsonl file", "write its records to one")
    return _lines(path, column, shown)


def checked(value: object, shown: str, where: str) -> str:
    """Return `value`. Raises AttnlmError unless it is a text with at most 16 MiB of UTF-8.

    `shown` is the value's name in messages.
    """
    if not isinstance(value, str):
        what = "null" if value is None else f"not text: {type(value).__name__}"
        raise AttnlmError(
            f"{where}: {shown} is {what}", "leave out such records, or choose another column"
        )
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise AttnlmError(
            f"{where}: {shown} has half a surrogate pair, which is not a character",
            "repair or leave out this record",
        ) from None
    if size > LONGEST:
        raise _too_long(where)
    return value


def _too_long(where: str) -> AttnlmError:
    return AttnlmError(f"{where} is longer than {LONGEST / 2**20:g} MiB", "split this record")


def missing(column: str, columns: list[str], where: str) -> AttnlmError:
    """Return the error for a column that does not exist, with a similar column as its hint."""
    choice = f"choose a column from {listed(columns)}" if columns else "it has no columns at all"
    return AttnlmError(f"{where} has no column {column!r}", suggestion(column, columns, choice))


def listed(columns: list[str]) -> str:
    """Return the names of columns in one line; of many, only the first ones."""
    return ", ".join(columns[:_MOST_NAMED]) + (", …" if len(columns) > _MOST_NAMED else "")


def columns_of(path: Path) -> list[str]:
    """Return the columns of a .parquet file or of the first line of a .jsonl file, for a hint.

    The result is [] if the columns can't be read.
    """
    with contextlib.suppress(AttnlmError, OSError, ValueError, RecursionError):
        if kind_of(path) == ".jsonl":
            with opened(path, str(path)) as file:
                return list(dict(json.loads(file.readline(LONGEST).decode("utf-8-sig"))))
        if kind_of(path) == ".parquet":
            parquet = optional("pyarrow.parquet", f"reading {path}")
            with parquet.ParquetFile(path) as table:
                return list(table.schema_arrow.names)
    return []


def _two_columns(column: str, where: str) -> AttnlmError:
    return AttnlmError(
        f"{where} has two columns named {column!r}", "rename or leave out one of them"
    )


def _lines(path: Path, column: str, shown: str) -> Iterator[tuple[str, Any]]:
    with opened(path, shown) as file:
        for number, line in enumerate(iter(lambda: file.readline(LONGEST + 1), b""), 1):
            where = f"line {number:,} of {shown}"
            if len(line) > LONGEST:
                raise _too_long(where)
            if line.isspace():
                continue
            try:
                text = line.decode("utf-8-sig")
                record = json.loads(text)
            except (ValueError, RecursionError) as error:
                reason = str(error).partition(": line 1")[0]
                raise AttnlmError(f"{where} is not valid JSON: {reason}", _ONE_RECORD) from None
            if not isinstance(record, dict):
                kind = type(record).__name__
                raise AttnlmError(f"{where} is not an object, but a {kind}", _ONE_RECORD)
            if column not in record:
                raise missing(column, list(record), where)
            if text.count(json.dumps(column, ensure_ascii=False)) > 1:
                keys = [key for key, _ in json.loads(text, object_pairs_hook=list)]
                if keys.count(column) > 1:
                    raise _two_columns(column, where)
            yield where, record[column]


def _rows(path: Path, column: str, shown: str) -> Iterator[tuple[str, Any]]:
    arrow: Any = optional("pyarrow", f"reading {shown}")
    parquet = optional("pyarrow.parquet", f"reading {shown}")
    row = 0
    try:
        with parquet.ParquetFile(path) as table:
            schema = table.schema_arrow
            if column not in schema.names:
                raise missing(column, schema.names, shown)
            if schema.names.count(column) > 1:
                raise _two_columns(column, shown)
            kind = schema.field(column).type
            kind = kind.value_type if arrow.types.is_dictionary(kind) else kind
            if str(kind) not in ("string", "large_string", "string_view"):
                raise AttnlmError(
                    f"column {column!r} of {shown} is not text: {kind}",
                    "choose a `column` that contains text",
                )
            # One row at a time: a small file may refer to one large value from many rows.
            for batch in table.iter_batches(1, columns=[column], use_threads=False):
                for scalar in batch.column(0):
                    row += 1
                    yield f"row {row:,} of {shown}", scalar.as_py()
    except UnicodeDecodeError:
        raise AttnlmError(
            f"row {row:,} of {shown}: column {column!r} is not UTF-8", "leave out such rows"
        ) from None
    except (arrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an error of the system, not of pyarrow
        after = f" after row {row:,}" if row else ""
        raise AttnlmError(
            f"{shown} is not a complete parquet file{after}: {first_line(error)}",
            "copy or download it again; the file itself must not be compressed",
        ) from None


def first_line(error: BaseException, most: int = 200) -> str:
    """Return the first line of another library's error message, cut to `most` characters."""
    return next(iter(str(error).splitlines()), type(error).__name__)[:most].rstrip(". ")
