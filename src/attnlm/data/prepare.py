"""Prepare a data set: read its source, get its tokenizer, encode the text, write the folder."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attnlm.base.atomic_folders import workspace
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import Note, OnEvent, ignore
from attnlm.base.files import explaining_os_errors
from attnlm.base.folders import check_name, put_back, write_latest
from attnlm.base.setting_fields import (
    check_value,
    describe_settings,
    fields_of,
    quoted,
)
from attnlm.base.suggestions import suggestion
from attnlm.config.prepare_options import PrepareOptions
from attnlm.config.settings import resolve
from attnlm.data.batches import check_splits
from attnlm.data.dataset import Dataset, open_dataset_folder
from attnlm.data.new_dataset import (
    TokenizerOrigin,
    UnencodedDataset,
    find_tokenizer,
    install_dataset,
    is_prepared,
    write_dataset,
)
from attnlm.data.prepare_examples import dataset_from_records, dataset_from_task
from attnlm.data.prepare_ids import SUFFIXES, dataset_from_ids
from attnlm.data.prepare_text import dataset_from_text
from attnlm.text.corpus import SOURCES, Source, TextFile, get_corpus
from attnlm.text.download import is_hub_offline
from attnlm.text.tasks import TASKS
from attnlm.text.text_files import text_encoding
from attnlm.tokens.tokenizer import IdsTokenizer

# The options of each kind of data.
_OF_TASK: tuple[str, ...] = ("tokenizer", "examples", "length", "digits")
_SPLITTING = ("tokenizer", "encoding", "val_fraction", "val_file")
_OF_RECORDS = ("prompt_column", "answer_column", *_SPLITTING)
_OF_TEXT = ("column", "split", "max_bytes", *_SPLITTING)
_OF_IDS = ("vocab_size", "dtype", "val_fraction", "val_file")


def prepare(
    source: Source | Iterable[Source] | None = None,
    *,
    name: str | None = None,
    data_dir: str | Path = "data",
    offline: bool = False,
    force: bool = False,
    on_event: OnEvent | None = None,
    **options: Any,
) -> Dataset:
    """Encode a text as the data set `name` in `data_dir`, and make it the latest.

        dataset = attnlm.prepare("my-novel.txt", tokenizer="bpe:512")

    `source` is a file, a folder, a pattern, a URL, "hf:NAME", "tinyshakespeare", "tales", or "-"
    for stdin. Several sources are joined in their order. The default is Tiny Shakespeare, or
    `tales` if Tiny Shakespeare is not available. `column` is the column of records that holds the
    text, by default "text". If it is given, stdin contains records: JSON lines or a CSV table.

    `tokenizer` is a spec such as "char" or "bpe:512", or names a run or data set. The tokenizer of
    this run or data set is then used, so that ids have the same meaning in both. Each record, and
    each of several files, is a document: the end-of-text id follows each document if the tokenizer
    has such an id. The tokenizers char, byte and bpe:N have it if there are records.

    If `split` is "tail", the validation split is the last `val_fraction` (default: 0.1) of the
    characters. If `split` is "documents", it is this fraction of the documents, always the same
    random choice, so that every source can be in both splits. The default is "documents" if both
    splits then have at least 10 documents (100 documents at a `val_fraction` of 0.1), else "tail".
    If `val_file`, a source like `source`, is given, the validation split is its whole text instead.

    A data set can consist of examples: questions with answers, on which training counts the loss of
    the answers only. They are read from records whose columns `prompt_column` and `answer_column`
    hold the questions and answers; without `answer_column`, the first holds lists of messages, each
    with a role and a content. Or `source` names a task: copy, reverse, sort, addition,
    modular-addition, parity, brackets or recall, with a number of training `examples` (default:
    20,000) and the `length` of a question in letters, bits, brackets or pairs, or for addition the
    `digits` of its numbers. The examples depend only on their number and size: they are the same on
    every machine, no question is in both splits, and the file longer.jsonl has longer ones.

    A data set with the same content is left unchanged; a data set with other content is replaced
    only if `force` is true. A new data set appears at its path when it is complete; a preparation
    that is stopped leaves no files.

    Raises UsageError for invalid arguments, AttnlmError for a text that can't be found, downloaded,
    read, split or encoded, and for files that can't be written. Existing files are then unchanged.
    """
    on_event = on_event or ignore
    data_dir = Path(data_dir)
    offline = offline or is_hub_offline()
    sources = _as_list(source)
    chosen = _checked(sources, options)
    put_back(data_dir)
    if chosen.vocab_size is None:
        origin = find_tokenizer(chosen.tokenizer, data_dir)
    else:
        origin = TokenizerOrigin("ids", existing=IdsTokenizer(chosen.vocab_size))
    if name is not None:
        check_name(name)
    with (
        explaining_os_errors(data_dir, ", or name another `data_dir`"),
        workspace(data_dir) as work,
    ):
        unencoded = _read_source(sources, chosen, origin.marks_ends, offline, work, on_event)
        name = name or f"{unencoded.corpus.name}-{origin.label}"
        target = data_dir / name
        is_up_to_date = functools.partial(is_prepared, target, origin, unencoded.facts, force)
        if is_up_to_date():
            digest = unencoded.facts["source_sha256"]
            on_event(Note(f"{target} exists, prepared from the same text ({digest[:12]}…)"))
        else:
            tokenizer = origin.load_or_train(unencoded, work, offline, on_event)
            write_dataset(work / "new", name, unencoded, tokenizer, origin.folder)
            install_dataset(work / "new", target, is_up_to_date)
        write_latest(data_dir, name)
        dataset = open_dataset_folder(target, trusted=True)
    _note_short_text(dataset, on_event)
    return dataset


prepare.__doc__ = f"""{inspect.cleandoc(prepare.__doc__ or "")}

Options:

{describe_settings(dict.fromkeys(fields_of(PrepareOptions), PrepareOptions), with_defaults=True)}
"""


def _as_list(source: Source | Iterable[Source] | None) -> list[Source | None]:
    """Return the named sources; [None] stands for the default source."""
    if source is None or isinstance(source, str | os.PathLike):
        return [source]
    return list(source)


def _task_of(sources: Sequence[object]) -> str | None:
    """Return the name of the task that is the only source, or None."""
    source = sources[0]
    return source if len(sources) == 1 and isinstance(source, str) and source in TASKS else None


def _checked(sources: Sequence[Source | None], options: Mapping[str, Any]) -> PrepareOptions:
    """Return the options. Raises UsageError if they are invalid, or don't apply to the sources."""
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        if name not in fields_of(PrepareOptions):
            hint = suggestion(name, fields_of(PrepareOptions), "help(attnlm.prepare) lists them")
            raise UsageError(f"`prepare` has no option {quoted(name)}", hint)
        if not isinstance(value, os.PathLike):
            check_value(PrepareOptions, name, value)
    if not sources:
        raise UsageError("no source", f"name {SOURCES}")
    if [*sources, given.get("val_file")].count("-") > 1:
        raise UsageError("stdin is named more than once", "name - once")
    for source in sources if len(sources) > 1 else ():
        if source in TASKS and not Path(source).exists():
            message = f"the task {source} cannot be joined with other sources"
            raise UsageError(message, "name it alone")
    if _task_of(sources) is not None:
        kind, allowed = f"the task {sources[0]}", _OF_TASK
    elif "vocab_size" in given:
        kind, allowed = "a file of ids", _OF_IDS
        for path in (*sources, given.get("val_file")):
            if path is not None and Path(path).suffix.lower() not in SUFFIXES:
                raise UsageError(f"{path} is no .npy or .bin file of ids", "leave out `vocab_size`")
        if len(sources) > 1 or None in sources:
            raise UsageError("`vocab_size` needs one file of ids", "name a .npy or .bin file")
    elif any(source is not None and str(source).lower().endswith(".npy") for source in sources):
        raise UsageError(
            "a file of ids needs `vocab_size`", "name it: the number above the largest id"
        )
    elif "prompt_column" in given:
        kind, allowed = "examples from records", _OF_RECORDS
    else:
        kind, allowed = "a text", _OF_TEXT
    text_encoding(given.get("encoding", "utf-8"))
    fields = fields_of(PrepareOptions)
    for name, value in given.items():
        if name not in allowed and value != fields[name].default:
            raise UsageError(f"`{name}` does not apply to {kind}", f"leave `{name}` out")
    for name in ("val_fraction", "split"):
        if name in given and "val_file" in given:
            message = f"`val_file` cannot be combined with `{name}`"
            raise UsageError(message, "use only one")
    return PrepareOptions(**given)


def _check_effect(options: PrepareOptions, shown: str, files: Sequence[TextFile]) -> None:
    """Raise UsageError if none of the files uses the given column or encoding."""
    for name in ("column", "prompt_column"):
        column = getattr(options, name)
        if column is not None and not any(file.is_records for file in files):
            raise UsageError(
                f"`{name}` {column} does not apply to {shown}",
                "it needs records: a .jsonl, .json, .csv or .parquet file, hf: data, or JSON "
                "lines or a .csv table on stdin",
            )
    encoding = text_encoding(options.encoding)
    if encoding != "utf-8" and all(file.is_records or file.encoding != encoding for file in files):
        raise UsageError(
            f"`encoding` {options.encoding} does not apply to {shown}",
            "leave it out: records, hf: data and built-in texts are UTF-8",
        )


def _read_source(
    sources: Sequence[Source | None],
    options: PrepareOptions,
    marks_ends: bool | None,
    offline: bool,
    work: Path,
    on_event: OnEvent,
) -> UnencodedDataset:
    """Draw the examples of a task, or read the source once to measure, hash and split it."""
    if (task := _task_of(sources)) is not None:
        sizes = {"length": options.length, "digits": options.digits}
        return dataset_from_task(task, options.examples or 20_000, sizes, on_event)
    if options.vocab_size is not None:
        val_path = None if options.val_file is None else Path(options.val_file)
        dtype = options.dtype or "uint16"
        path = Path(str(sources[0]))
        return dataset_from_ids(
            path, val_path, options.fraction, options.vocab_size, dtype, on_event
        )
    open_corpus = functools.partial(
        get_corpus,
        encoding=options.encoding,
        column=options.column or options.prompt_column,
        marks_ends=marks_ends,
        max_bytes=options.max_bytes,
        offline=offline,
        spool=work,
        on_event=on_event,
    )
    corpus = open_corpus(sources)
    val_corpus = None if options.val_file is None else open_corpus([options.val_file])
    val_files = () if val_corpus is None else val_corpus.files
    _check_effect(options, corpus.shown, (*corpus.files, *val_files))
    if options.prompt_column is not None:
        columns = (options.prompt_column, options.answer_column)
        return dataset_from_records(corpus, val_corpus, options.fraction, *columns, on_event)
    return dataset_from_text(corpus, val_corpus, options.fraction, options.split, work, on_event)


def _note_short_text(dataset: Dataset, on_event: OnEvent) -> None:
    """Note a data set that is too small for the default context."""
    try:
        check_splits(dataset, resolve({}).spec.block_size)
    except AttnlmError as error:
        on_event(Note(f"too small for the default context: {error.message}; {error.hint}"))
