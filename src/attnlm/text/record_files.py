"""Records: columns of .jsonl and .json files, and of .csv and .parquet tables."""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from attnlm.base.errors import AttnlmError, import_optional
from attnlm.base.formatting import listed
from attnlm.base.suggestions import suggestion
from attnlm.text.text_files import OpenStream, open_decompressed, record_suffix

_LONGEST_LINE = 2**26  # bytes
_ONE_RECORD = 'each line must be one record in UTF-8, such as {"text": "…"}, or all in one array'


def record_values(
    path: Path, columns: Sequence[str], shown: str, stream: OpenStream | None = None
) -> Iterator[tuple[str, list[Any]]]:
    """Yield the values of each record in these columns, after the name of its line or row.

    `shown` is the name of the file in messages; a `stream` is read in its place, as JSON if it
    begins like JSON, else as a table. Raises AttnlmError for what is no record, and for one that
    lacks a column.
    """
    suffix = record_suffix(path)
    if suffix == ".parquet":
        yield from _parquet_values(path, columns, shown)
        return
    with open_decompressed(path, shown, stream) as file, contextlib.ExitStack() as ending:
        is_table = suffix == ".csv"
        if stream is not None:
            file = peeked = io.BufferedReader(file)  # type: ignore[type-var]
            ending.callback(peeked.detach)  # or stdin would be closed
            is_table = peeked.peek().lstrip(codecs.BOM_UTF8 + b" \t\r\n")[:1] not in b"{["
        for place, record in (_csv_records if is_table else _json_records)(file, shown):
            where = f"{place} of {shown}"
            if not isinstance(record, dict):
                kind = type(record).__name__
                raise AttnlmError(f"{where} is of type {kind}, not an object", _ONE_RECORD)
            for column in columns:
                if column not in record:
                    raise missing_column_error(column, list(record), where)
            yield where, [record[column] for column in columns]


def record_texts(path: Path, column: str, shown: str) -> Iterator[str]:
    """Yield the text in a column of each record, also if it is empty. Raises AttnlmError."""
    for where, (value,) in record_values(path, [column], shown):
        yield require_text(value, column, where)


def require_text(value: object, column: str, where: str) -> str:
    """Return a value of a column of records. Raises AttnlmError unless it is a text."""
    shown = f"column {column!r}"
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


def _json_records(file: BinaryIO, shown: str) -> Iterator[tuple[str, Any]]:
    """Yield the values of a file, one in each line or all in one array."""
    is_first = True
    for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE + 1), b""), 1):
        if len(line) > _LONGEST_LINE:
            message = f"line {number:,} of {shown} is longer than {_LONGEST_LINE:,} bytes"
            raise AttnlmError(message, "split it into shorter records")
        if line.isspace():
            continue
        if is_first and line.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            array = _parsed(line + file.read(), shown)
            yield from ((f"record {n:,}", record) for n, record in enumerate(array, 1))
            return
        is_first = False
        yield f"line {number:,}", _parsed(line, f"line {number:,} of {shown}")


def _parsed(content: bytes, where: str) -> Any:
    try:
        return json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        # The line of the file is known; json counts lines within the record.
        reason = str(error).replace(": line 1 column", ": column").partition(" (char")[0]
        raise AttnlmError(f"{where} is not valid JSON: {reason}", _ONE_RECORD) from None


def _csv_records(file: BinaryIO, shown: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a table, whose first row has the names of the columns."""
    csv.field_size_limit(2**31 - 1)
    text = io.TextIOWrapper(file, "utf-8-sig", newline="")
    rows = csv.DictReader(text, strict=True)
    try:
        for row in rows:
            yield f"line {rows.line_num:,}", row
    except (csv.Error, UnicodeDecodeError) as error:
        message = f"line {rows.line_num + 1:,} of {shown} is not valid CSV: {first_line(error)}"
        raise AttnlmError(message, "it needs UTF-8, with columns between commas") from None
    finally:
        text.detach()


def _parquet_values(
    path: Path, columns: Sequence[str], shown: str
) -> Iterator[tuple[str, list[Any]]]:
    arrow: Any = import_optional("pyarrow", f"reading {shown}")
    parquet = import_optional("pyarrow.parquet", f"reading {shown}")
    row = 0
    try:
        with parquet.ParquetFile(path) as table:
            names = table.schema_arrow.names
            for column in columns:
                if column not in names:
                    raise missing_column_error(column, names, shown)
            for batch in table.iter_batches(columns=[*columns], use_threads=False):
                for scalars in zip(*map(batch.column, columns), strict=True):
                    row += 1
                    yield f"row {row:,} of {shown}", [scalar.as_py() for scalar in scalars]
    except UnicodeDecodeError:
        raise AttnlmError(f"row {row:,} of {shown} is not UTF-8", "leave out such rows") from None
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
