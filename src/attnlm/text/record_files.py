"""Records of .jsonl, .json, .csv and .parquet files, and the questions and answers in them."""

from __future__ import annotations

import codecs
import csv
import itertools
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from attnlm.base.errors import AttnlmError, UsageError, import_optional
from attnlm.base.formatting import listed
from attnlm.base.suggestions import suggestion
from attnlm.text.text_files import (
    ANSWER_END,
    BLOCK,
    RECORDS,
    TURN,
    NotTextError,
    Rows,
    TextFile,
    record_suffix,
)

_LONGEST = 2**26  # bytes of a line or a record of an array, characters of a value of a table
_ONE_RECORD = 'each line must be one record in UTF-8, such as {"text": "…"}, or all in one array'
HUB_PREFIX = "hf:"
HUB_SYNTAX = "hf:OWNER/NAME, then if needed @REVISION, /CONFIG and :SPLIT"
# Readers of plain data. Others decode media and archives, or need other programs.
_READERS = ("arrow", "csv", "json", "parquet", "text")
_SPLIT = "(?::(?P<split>.+))?"
_LOCAL = re.compile(f"(?P<path>[^:]+){_SPLIT}")
_NAME = re.compile(
    f"(?P<path>[^/@:]+(?:/[^/@:]+)?)(?:@(?P<revision>[^/:]+))?(?:/(?P<config>[^@:]*[^/@:]))?{_SPLIT}"
)

END_OF_TEXT = "\x03"
"""The control character "end of text". It ends answers if the tokenizer has no end-of-text id."""
_QUESTION_ROLES = ("system", "user", "human")
_ANSWER_ROLES = ("assistant", "gpt", "model")
_ONE_MESSAGE = 'a message is like {"role": "user", "content": "…"}'


def record_values(file: TextFile, columns: Sequence[str]) -> Iterator[tuple[str, list[Any]]]:
    """Yield the values of each record in these columns, after the name of its line or row.

    Raises AttnlmError for a file without records, for what is no record, and for a record that
    lacks a column.
    """
    if file.rows is not None:
        records = file.rows(columns)
    elif file.format == ".parquet":
        records = _parquet_records(file, columns)
    elif file.format:
        records = _text_records(file)
    else:
        raise AttnlmError(
            f"{file.shown} has no columns", f"`prompt_column` needs one of {', '.join(RECORDS)}"
        )
    for place, record in records:
        where = f"{place} of {file.shown}"
        if not isinstance(record, Mapping):
            kind = type(record).__name__
            raise AttnlmError(f"{where} is of type {kind}, not an object", _ONE_RECORD)
        if missing := [column for column in columns if column not in record]:
            choice = f"choose a column from {listed([*record])}" if record else "it has no columns"
            if len(record) > 1:
                choice += "; questions with answers need `prompt_column` and `answer_column`"
            hint = suggestion(missing[0], record, choice)
            raise AttnlmError(f"{where} has no column {missing[0]!r}", hint)
        yield where, [record[column] for column in columns]


def record_texts(path: Path, column: str) -> Iterator[str]:
    """Yield the text in a column of each record, also if it is empty. Raises AttnlmError."""
    for where, (value,) in record_values(
        TextFile(path, str(path), format=record_suffix(path)), [column]
    ):
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


def _text_records(file: TextFile) -> Rows:
    """Yield the records of a file of JSON or of a table, or of a stream that begins like JSON, or
    else is a table."""
    with file.open() as opened:
        blank = 0
        while (begin := opened.readline(BLOCK).removeprefix(codecs.BOM_UTF8)).isspace():
            blank += 1
        sign = begin.lstrip()[:1]
        lines = _lines(opened, begin, blank, file.shown)
        if file.format == ".csv" if file.stream is None else sign not in (b"{", b"["):
            yield from _csv_records(lines, file.shown)
        elif sign == b"[":
            yield from _array_records(opened, begin.lstrip()[1:], file.shown)
        else:
            for place, line in lines:
                if not line.isspace():
                    yield place, _parsed(line, f"{place} of {file.shown}")


def _lines(file: BinaryIO, line: bytes, number: int, shown: str) -> Iterator[tuple[str, bytes]]:
    """Yield the lines of a file, each after its name: the next one begins with `line`, and `number`
    lines are before it. Raises AttnlmError for a long one, as a stream may have no line ends."""
    while line or (line := file.readline(BLOCK)):
        while not line.endswith(b"\n") and (more := file.readline(max(BLOCK, len(line)))):
            if len(line := line + more) > _LONGEST:
                break
        number += 1
        if len(line) > _LONGEST:
            message = f"line {number:,} of {shown} is longer than {_LONGEST:,} bytes"
            raise AttnlmError(message, "split it into shorter records")
        yield f"line {number:,}", line
        line = b""


def _array_records(file: BinaryIO, chunk: bytes, shown: str) -> Rows:
    """Yield the values of an array, which begins with `chunk`, each as soon as it is read."""
    parse = json.JSONDecoder().raw_decode
    decoder = codecs.getincrementaldecoder("utf-8")()
    text, number, is_last, wrong = "", 0, False, ""
    while True:
        try:
            text += decoder.decode(chunk, final=is_last)
        except UnicodeDecodeError as error:  # there may be whole records before it
            text += error.object[: error.start].decode()
            byte = error.object[error.start]
            wrong = f"'utf-8' codec can't decode byte 0x{byte:02x}: {error.reason}"
        place, reason, is_cut = 0, "Expecting ',' delimiter", False
        try:
            while between := re.compile(r"\s*,\s*" if number else r"\s*").match(text, place):
                record, place = parse(text, between.end())
                number += 1
                yield f"record {number:,}", record
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", str(error))
            is_cut = getattr(error, "pos", 0) == len(text) or reason.startswith("Unterminated")
        text = text[place:]
        size = len(text.encode())
        if wrong or is_last or size > _LONGEST:
            break
        # The size of a read doubles, so that a long record is not parsed often.
        chunk = file.read(max(BLOCK, size))
        is_last = not chunk
    if wrong or text.strip() != "]":
        if wrong and (is_cut or text.strip() in ("", "]")):  # no other fault is before it
            reason = wrong
        longer = f"longer than {_LONGEST:,} bytes, or " if size > _LONGEST else ""
        message = f"record {number + 1:,} of {shown} is {longer}not valid JSON: {reason}"
        raise AttnlmError(message, _ONE_RECORD)


def _parsed(content: bytes, where: str) -> Any:
    try:
        return json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        # The line of the file is known; json counts lines within the record.
        reason = str(error).replace(": line 1 column", ": column").partition(" (char")[0]
        raise AttnlmError(f"{where} is not valid JSON: {reason}", _ONE_RECORD) from None


def _csv_records(lines: Iterator[tuple[str, bytes]], shown: str) -> Rows:
    """Yield the rows of a table, whose first row has the names of the columns."""
    csv.field_size_limit(_LONGEST)
    place = "line 1"

    def decoded() -> Iterator[str]:
        nonlocal place
        for place, line in lines:  # noqa: B007 - for errors
            yield from re.split(r"(?<=\r)(?!\n)", line.decode())  # old ends of lines, too

    try:
        for row in csv.DictReader(decoded(), strict=True):
            if None in row:
                message = f"{place} of {shown} has more values than the table has columns"
                raise AttnlmError(message, "put values with commas between quotes")
            yield place, row
    except (csv.Error, UnicodeDecodeError) as error:
        message = f"{place} of {shown} is not valid CSV: {first_line(error)}"
        raise AttnlmError(message, "it needs UTF-8, with columns between commas") from None


def _parquet_records(file: TextFile, columns: Sequence[str]) -> Rows:
    arrow: Any = import_optional("pyarrow", f"reading {file.shown}")
    parquet = import_optional("pyarrow.parquet", f"reading {file.shown}")
    row = 0
    try:
        with parquet.ParquetFile(file.path) as table:
            names = table.schema_arrow.names
            if not {*columns} <= {*names}:
                yield "row 1", dict.fromkeys(names)  # the caller names what is missing
            for batch in table.iter_batches(columns=[*columns], use_threads=False):
                for scalars in zip(*map(batch.column, columns), strict=True):
                    row += 1
                    values = (scalar.as_py() for scalar in scalars)
                    yield f"row {row:,}", dict(zip(columns, values, strict=True))
    except UnicodeDecodeError:
        message = f"row {row:,} of {file.shown} is not UTF-8"
        raise AttnlmError(message, "leave out such rows") from None
    except (arrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an error of the system, not of pyarrow
        after = f" after row {row:,}" if row else ""
        raise NotTextError(
            f"{file.shown} is not a complete parquet file{after}: {first_line(error)}",
            "copy or download it again; the file itself must not be compressed",
            "not complete",
        ) from None


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error message, cut to 200 characters."""
    return next(iter(str(error).splitlines()), type(error).__name__)[:200].rstrip(". ")


# --- Data sets of the Hugging Face Hub, or folders with the same layout, by `datasets`


def hub_parts(source: str) -> dict[str, Any]:
    """Return path, revision, config and split of `hf:OWNER/NAME@REVISION/CONFIG:SPLIT`.

    All but the path may be absent; the split is then "train". Raises UsageError if `source` has
    another form.
    """
    name = source.removeprefix(HUB_PREFIX)
    found = (_LOCAL if _is_local(name) else _NAME).fullmatch(name)
    if found is None:
        raise UsageError(f"{source!r} is not the name of a data set", f"use {HUB_SYNTAX}")
    parts = {"revision": None, "config": None, **found.groupdict()}
    return {**parts, "split": parts["split"] or "train"}


def _is_local(path: str) -> bool:
    return path.startswith(("/", "~")) or path.split("/")[0] in (".", "..")


def hub_records(source: str, columns: Sequence[str], offline: bool) -> Rows:
    """Stream the records of the data set that `source` names: if possible, only these columns.

    Code and pickles in a data set are not run. Raises AttnlmError if the data set can't be
    downloaded or read.
    """
    name, row = hub_parts(source), 0
    path, hint = name["path"], f"check the name ({HUB_SYNTAX}) and the network, or use a folder"
    if offline:  # a local folder may name addresses, too
        message = f"{source} needs the network, but `offline` is set"
        raise AttnlmError(message, "use a file or a folder, without hf:")
    if _is_local(path):
        path = str(Path(path).expanduser().absolute())
    elif Path(path).is_dir():  # the library would read this folder instead
        path, hint = f"hf://datasets/{path}", f"for the folder, use {HUB_PREFIX}./{path}"
    datasets = import_optional("datasets", f"reading {source}")
    datasets.disable_progress_bars()
    for library in ("datasets", "huggingface_hub"):  # they log errors and retries
        logging.getLogger(library).setLevel(logging.CRITICAL)
    try:
        builder = datasets.load_dataset_builder(path, name["config"], revision=name["revision"])
        if builder.name not in _READERS:
            raise AttnlmError(
                f"{source} has an unsupported format: {builder.name}",
                f"supported formats: {', '.join(_READERS)}",
            )
        stream = builder.as_streaming_dataset(split=name["split"])
        if stream.features is not None and set(columns) <= stream.features.keys():
            stream = stream.select_columns([*columns])
        for record in stream:
            row += 1
            yield f"row {row:,}", record
    except (AttnlmError, MemoryError):
        raise
    except Exception as error:  # any error of the library or the Hub
        after = f" after row {row:,}" if row else ""
        raise AttnlmError(f"cannot read {source}{after}: {first_line(error)}", hint) from error


# --- Questions with answers -----------------------------------------------------------------------


class Questions(NamedTuple):
    """How a data set of questions with answers is written.

    `question_end` separates a question from its answer; the texts of questions include it. If
    `answer_end` is None, the tokenizer's end-of-text id or a control character ends an answer.
    `longer` are examples that are in no split.
    """

    question_end: str = "\n"
    answer_end: str | None = None
    longer: Sequence[str] = ()


def example_text(values: Sequence[Any], columns: Sequence[str], where: str) -> str:
    """Return a record's questions and answers as one text, with TURN and ANSWER_END as marks.

    Two columns have the question and the answer, both texts. A single one has a list of messages,
    each with a role and a content.
    """
    if len(columns) == 1:
        said = _conversation(values[0], columns[0], where)
    else:
        said = list(map(require_text, values, columns, itertools.repeat(where)))
    turns = []
    for question, answer in zip(said[::2], said[1::2], strict=False):  # without a last question
        if not question or not answer:
            raise AttnlmError(
                f"{where} has an empty {'answer' if question else 'question'}", "leave it out"
            )
        if END_OF_TEXT in question + answer:
            raise AttnlmError(
                f"{where} has the control character U+0003, which ends answers", "remove it"
            )
        turns.append(f"{question}{Questions().question_end}{TURN}{answer}{ANSWER_END}")
    return TURN.join(turns)


def _conversation(messages: object, column: str, where: str) -> list[str]:
    """Return a question, its answer, and so on, of a list of messages. Messages in a row of one
    side are joined."""
    if not isinstance(messages, list) or not all(isinstance(m, Mapping) for m in messages):
        raise AttnlmError(
            f"{where}: column {column!r} is not a list of messages",
            f"{_ONE_MESSAGE}; texts need `answer_column` too",
        )
    said: list[tuple[bool, str]] = []  # whether it answers, and the text
    for message in messages:
        role = message.get("role", message.get("from"))
        if role not in _QUESTION_ROLES + _ANSWER_ROLES:
            roles = ", ".join(_QUESTION_ROLES + _ANSWER_ROLES)
            raise AttnlmError(
                f"{where} has a message with the role {role!r}",
                f"{_ONE_MESSAGE}; roles are {roles}",
            )
        content = message.get("content", message.get("value"))
        text = require_text(content, column, f"{where}: a message")
        said.append((role in _ANSWER_ROLES, text))
    sides = itertools.groupby(said, key=lambda message: message[0])
    joined = [(answers, "\n".join(text for _, text in side)) for answers, side in sides]
    if len(joined) < 2 or joined[0][0]:
        raise AttnlmError(f"{where} has no question with an answer behind it", "leave it out")
    return [text for _, text in joined]
