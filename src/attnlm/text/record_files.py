"""Texts of records: one column of the lines of a .jsonl file or the rows of a .parquet file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attnlm.base.errors import AttnlmError, import_optional
from attnlm.base.formatting import listed
from attnlm.base.suggestions import suggestion
from attnlm.text.text_files import PIECE, Piece, open_decompressed, record_suffix

_LONGEST_LINE = 2**26  # bytes
_ONE_RECORD = 'each line must be one record in UTF-8, such as {"text": "…"}'


def record_pieces(path: Path, column: str, shown: str, marks_ends: bool) -> Iterator[Piece]:
    """Yield, in pieces, the texts in one column of a file of records. Empty texts are left out.

    Pieces have the end of each text. Unless `marks_ends` is set, each text ends with a newline.
    `shown` is the file's name in messages, which also name the line or row.
    """
    parts: list[str] = []
    ends: list[int] = []
    length = 0
    for text in filter(None, record_texts(path, column, shown)):
        if not marks_ends and not text.endswith("\n"):
            text += "\n"
        for i in range(0, len(text), PIECE):
            part = text[i : i + PIECE]
            if length + len(part) > PIECE:
                yield Piece("".join(parts), tuple(ends))
                parts = []
                ends = []
                length = 0
            parts.append(part)
            length += len(part)
        ends.append(length)
    if parts:
        yield Piece("".join(parts), tuple(ends))


def record_texts(path: Path, column: str, shown: str) -> Iterator[str]:
    """Yield the text of each record, also if it is empty. Raises AttnlmError as `record_pieces`."""
    read_values = _jsonl_values if record_suffix(path) == ".jsonl" else _parquet_values
    values = read_values(path, column, shown)
    return (require_text(value, f"column {column!r}", where) for where, value in values)


def record_values(path: Path, column: str, shown: str) -> Iterator[tuple[str, Any]]:
    """Yield the JSON value in a column of each line of a .jsonl file, after the line's name."""
    if record_suffix(path) != ".jsonl":
        raise AttnlmError(f"{shown} is not a .jsonl file", "write its records to one")
    return _jsonl_values(path, column, shown)


def require_text(value: object, shown: str, where: str) -> str:
    """Return `value`, called `shown` in messages. Raises AttnlmError unless it is a text."""
    if not isinstance(value, str):
        problem = "null" if value is None else f"not text: {type(value).__name__}"
        raise AttnlmError(
            f"{where}: {shown} is {problem}", "leave out such records, or choose another column"
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise AttnlmError(
            f"{where}: {shown} has half a surrogate pair, which is not a character",
            "repair or leave out this record",
        ) from None
    return value


def missing_column_error(column: str, columns: list[str], where: str) -> AttnlmError:
    """Return the error for a column that does not exist, with a similar column as its hint."""
    choice = f"choose a column from {listed(columns)}" if columns else "it has no columns at all"
    if len(columns) > 1:
        choice += "; questions with answers need `prompt_column` and `answer_column`"
    return AttnlmError(f"{where} has no column {column!r}", suggestion(column, columns, choice))


def _jsonl_values(path: Path, column: str, shown: str) -> Iterator[tuple[str, Any]]:
    with open_decompressed(path, shown) as file:
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE + 1), b""), 1):
            where = f"line {number:,} of {shown}"
            if len(line) > _LONGEST_LINE:
                message = f"{where} is longer than {_LONGEST_LINE:,} bytes"
                raise AttnlmError(message, "split it into shorter records")
            if line.isspace():
                continue
            try:
                record = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                # The line of the file is known; json counts lines within the record.
                reason = str(error).replace(": line 1 column", ": column").partition(" (char")[0]
                raise AttnlmError(f"{where} is not valid JSON: {reason}", _ONE_RECORD) from None
            if not isinstance(record, dict):
                kind = type(record).__name__
                raise AttnlmError(f"{where} is not an object, but a {kind}", _ONE_RECORD)
            if column not in record:
                raise missing_column_error(column, list(record), where)
            yield where, record[column]


def _parquet_values(path: Path, column: str, shown: str) -> Iterator[tuple[str, Any]]:
    arrow: Any = import_optional("pyarrow", f"reading {shown}")
    parquet = import_optional("pyarrow.parquet", f"reading {shown}")
    row = 0
    try:
        with parquet.ParquetFile(path) as table:
            schema = table.schema_arrow
            if schema.get_field_index(column) < 0:
                raise missing_column_error(column, schema.names, shown)
            kind = schema.field(column).type
            kind = kind.value_type if arrow.types.is_dictionary(kind) else kind
            if str(kind) not in ("string", "large_string", "string_view"):
                raise AttnlmError(
                    f"column {column!r} of {shown} is not text: {kind}",
                    "choose a `column` that contains text",
                )
            for batch in table.iter_batches(columns=[column], use_threads=False):
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


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error message, cut to 200 characters."""
    return next(iter(str(error).splitlines()), type(error).__name__)[:200].rstrip(". ")
