"""Prepare a data set: read its source, get its tokenizer, encode the text, write the folder.

sources → corpus → content (a text in its spool, questions, or ids), divided into splits
        → tokenizer → train.bin and val.bin → meta.json
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import Note, OnEvent, ignore
from attnlm.base.files import explaining_os_errors, file_hash, workspace, write_json
from attnlm.base.folders import (
    DATA_DIR,
    KINDS,
    check_name,
    exchange_folders,
    is_safe_name,
    put_back,
    write_latest,
)
from attnlm.base.setting_fields import check_value, describe_settings, fields_of, quoted
from attnlm.base.suggestions import suggestion
from attnlm.config.prepare_options import PrepareOptions
from attnlm.config.settings import resolve
from attnlm.data.batches import check_splits
from attnlm.data.contents import Content, OwnIds, Text
from attnlm.data.dataset import FORMAT, Dataset, Meta, id_dtype, open_dataset, open_dataset_folder
from attnlm.text.corpus import SOURCES, Source, get_corpus, safe_name
from attnlm.text.download import is_hub_offline
from attnlm.text.record_files import Questions
from attnlm.text.tasks import TASKS
from attnlm.tokens.specs import PUBLISHED, bpe_size
from attnlm.tokens.tokenizer import (
    ByteTokenizer,
    CharTokenizer,
    IdsTokenizer,
    Tokenizer,
    load_published,
    load_tokenizer,
    train_vocabulary,
)

# The options of each kind of data.
_SPLITTING = ("tokenizer", "encoding", "val_fraction", "val_file")
_OF_TASK: tuple[str, ...] = ("tokenizer", "examples", "length", "digits")
_OF_RECORDS = ("prompt_column", "answer_column", *_SPLITTING)
_OF_TEXT = ("column", "split", "max_bytes", *_SPLITTING)
_OF_IDS = ("vocab_size", "dtype", "val_fraction", "val_file")
_CONTENT = ("source_sha256", "val_source_sha256", "characters", "split", "val_fraction")
"""The fields of Meta that say what content a data set has, and so, with the tokenizer, its ids."""


def prepare(
    source: Source | Iterable[Source] | None = None,
    *,
    name: str | None = None,
    data_dir: str | Path = DATA_DIR,
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
    modular-addition, parity, running-parity, brackets, closing, recall, induction, selective-copy
    or facts, with a number of training `examples` (default: 20,000) and the `length` of a question
    in letters, bits, brackets, pairs or names, or for addition the `digits` of its numbers. The
    examples depend only on their number and size: they are the same on every machine, no question
    is in both splits, and the file longer.jsonl has longer ones.

    A data set with the same content is left unchanged; a data set with other content is replaced
    only if `force` is true. A new data set appears at its path when it is complete; a preparation
    that is stopped leaves no files.

    Raises UsageError for invalid arguments, AttnlmError for a text that can't be found, downloaded,
    read, split or encoded, and for files that can't be written. Existing files are then unchanged.
    """
    on_event = on_event or ignore
    data_dir = Path(data_dir)
    offline = offline or is_hub_offline()
    sources: list[Source | None] = [None]
    if source is not None:
        sources = [source] if isinstance(source, str | os.PathLike) else [*source]
    chosen = _checked(sources, options)
    put_back(data_dir)
    tokenizer, folder = _find_tokenizer(chosen, data_dir)
    if name is not None:
        check_name(name)
    with (
        explaining_os_errors(data_dir, ", or name another `data_dir`"),
        workspace(data_dir) as work,
    ):
        content = _read(sources, chosen, tokenizer, offline, work, on_event)
        given = {
            key: v for key, v in vars(chosen).items() if v != fields_of(PrepareOptions)[key].default
        }
        given.pop("tokenizer", None)
        if "val_file" in given:
            given["val_file"] = content.meta.val_source
        label = chosen.tokenizer.replace(":", "")
        if tokenizer is not None:
            label = safe_name(tokenizer.dataset or tokenizer.name)
        content.meta = meta = replace(
            content.meta,
            name=name or f"{content.name}-{label}",
            options=given,
            tokenizer_from=None if folder is None else str(folder),
        )
        target = data_dir / meta.name
        is_up_to_date = functools.partial(
            _is_prepared, target, meta, tokenizer or chosen.tokenizer, force
        )
        if is_up_to_date():
            digest = meta.source_sha256[:12]
            on_event(Note(f"{target} exists, prepared from the same text ({digest}…)"))
        else:
            if tokenizer is None:
                assert isinstance(content, Text)  # ids have one
                tokenizer = _new_tokenizer(chosen.tokenizer, content, work, offline, on_event)
            write_dataset(work / "new", content, tokenizer, on_event)
            if not os.path.lexists(target):
                (work / "new").rename(target)
            elif not is_up_to_date():  # or another process has put the same data there
                exchange_folders(work / "new", target)
        write_latest(data_dir, meta.name)
        dataset = open_dataset_folder(target, trusted=True)
    try:
        check_splits(dataset, resolve({}).spec.block_size)
    except AttnlmError as error:
        on_event(Note(f"too small for the default context: {error.message}; {error.hint}"))
    return dataset


prepare.__doc__ = f"""{inspect.cleandoc(prepare.__doc__ or "")}

Options:

{describe_settings(dict.fromkeys(fields_of(PrepareOptions), PrepareOptions), with_defaults=True)}
"""


def _task_of(sources: Sequence[Source | None]) -> str | None:
    """Return the name of the task that is the only source, or None."""
    source = sources[0]
    return source if len(sources) == 1 and isinstance(source, str) and source in TASKS else None


def _checked(sources: Sequence[Source | None], options: Mapping[str, Any]) -> PrepareOptions:
    """Return the options. Raises UsageError if they are invalid, or don't apply to the sources."""
    given = {name: value for name, value in options.items() if value is not None}
    fields = fields_of(PrepareOptions)
    for name, value in given.items():
        if name not in fields:
            hint = suggestion(name, fields, "help(attnlm.prepare) lists them")
            raise UsageError(f"`prepare` has no option {quoted(name)}", hint)
        if not isinstance(value, os.PathLike):
            check_value(PrepareOptions, name, value)
    if not sources:
        raise UsageError("no source", f"name {SOURCES}")
    for source in sources if len(sources) > 1 else ():
        if source in TASKS and not Path(source).exists():
            message = f"the task {source} cannot be joined with other sources"
            raise UsageError(message, "name it alone")
    if _task_of(sources) is not None:
        kind, allowed = f"the task {sources[0]}", _OF_TASK
    elif "vocab_size" in given:
        kind, allowed = "a file of ids", _OF_IDS
        named = [str(path).lower() for path in (*sources, given.get("val_file", ".bin"))]
        if len(sources) > 1 or not all(path.endswith((".npy", ".bin")) for path in named):
            message = "`vocab_size` needs a file of ids, and `val_file` then is another one"
            raise UsageError(message, "name a .npy or .bin file, or leave out `vocab_size`")
    elif any(str(source).lower().endswith(".npy") for source in sources):
        raise UsageError(
            "a file of ids needs `vocab_size`", "name it: the number above the largest id"
        )
    elif "prompt_column" in given:
        kind, allowed = "examples from records", _OF_RECORDS
    else:
        kind, allowed = "a text", _OF_TEXT
    for name, value in given.items():
        if name not in allowed and value != fields[name].default:
            raise UsageError(f"`{name}` does not apply to {kind}", f"leave `{name}` out")
    if "val_file" in given and (divides := given.keys() & {"val_fraction", "split"}):
        message = f"`val_file` cannot be combined with `{min(divides)}`"
        raise UsageError(message, "use only one")
    return PrepareOptions(**given)


def _find_tokenizer(
    options: PrepareOptions, data_dir: Path
) -> tuple[Tokenizer | None, Path | None]:
    """Return the tokenizer of the run or data set that is named, and its folder.

    Return None for a spec. Raises UsageError if the name is neither.
    """
    if options.vocab_size is not None:
        return IdsTokenizer(options.vocab_size), None
    spec = str(options.tokenizer)
    try:
        bpe_size(spec)
        return None, None
    except UsageError:
        folders = [Path(spec)]
        if is_safe_name(spec):
            folders += [Path(KINDS["run"][1]) / spec, data_dir / spec]
        for folder in map(Path.absolute, folders):
            if (folder / "tokenizer.json").is_file():
                existing = load_tokenizer(folder / "tokenizer.json")
                existing.dataset = folder.name
                return existing, folder
        raise


def _new_tokenizer(
    spec: str, content: Text, work: Path, offline: bool, on_event: OnEvent
) -> Tokenizer:
    """Return a tokenizer for a text, trained or downloaded if needed."""
    if (size := bpe_size(spec)) is not None:
        sample, has_end = content.sample(), content.has_ends
        return train_vocabulary(spec, size, sample, on_event, has_end=has_end)
    if spec == "char":
        return CharTokenizer(content.alphabet, has_end=content.has_ends)
    if spec == "byte":
        return ByteTokenizer(has_end=content.has_ends)
    return load_published(spec, spool=work, offline=offline, on_event=on_event)


def _read(
    sources: Sequence[Source | None],
    options: PrepareOptions,
    tokenizer: Tokenizer | None,
    offline: bool,
    work: Path,
    on_event: OnEvent,
) -> Content:
    """Draw the examples of a task, or read the sources once to measure, hash and split them.

    `tokenizer` is that of a run or data set, if one was named.
    """
    if (task := _task_of(sources)) is not None:
        return Text.of_task(task, options, work, on_event)
    if options.vocab_size is not None:
        return OwnIds(Path(str(sources[0])), options)
    # An end-of-text id follows each document; by default, only if there are records.
    marks_ends = True if options.tokenizer in PUBLISHED else None
    if tokenizer is not None:
        marks_ends = tokenizer.end_of_text is not None
    columns, questions = [options.column], None
    if options.prompt_column is not None:
        columns = [options.prompt_column, options.answer_column]
        questions, marks_ends = Questions(), True
    corpora = [
        get_corpus(
            each,
            encoding=options.encoding,
            columns=[*filter(None, columns)],
            questions=questions,
            marks_ends=marks_ends,
            max_bytes=options.max_bytes,
            offline=offline,
            spool=work,
            on_event=on_event,
        )
        for each in (sources, [options.val_file])[: 1 if options.val_file is None else 2]
    ]
    files = [file for corpus in corpora for file in corpus.files]
    if options.column is not None and not any(file.is_records for file in files):
        raise UsageError(
            f"`column` {options.column} does not apply to {corpora[0].shown}",
            "it needs records: a .jsonl, .json, .csv or .parquet file, hf: data, or JSON lines or "
            "a .csv table on stdin",
        )
    return Text(corpora, options, work, on_event)


def write_dataset(folder: Path, content: Content, tokenizer: Tokenizer, on_event: OnEvent) -> None:
    """Write all files of a data set to the new folder `folder`; meta.json is the last one."""
    folder.mkdir()
    encoded = content.write(folder, tokenizer, on_event)
    write_json(folder / "tokenizer.json", tokenizer.to_json())
    meta = replace(
        encoded,
        tokenizer_name=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        dtype=id_dtype(tokenizer.vocab_size).name,
        files={path.name: file_hash(path) for path in sorted(folder.iterdir())},
    )
    write_json(folder / "meta.json", {"format": FORMAT, **asdict(meta)})


def _is_prepared(target: Path, meta: Meta, tokenizer: Tokenizer | str, force: bool) -> bool:
    """Return True if `target` has this content and tokenizer, False if it is to be written.

    Raises AttnlmError if `target` exists but is not a data set. If `force` is false, raises it also
    if `target` is damaged or has other content.
    """
    if not os.path.lexists(target):
        return False
    if not (target / "meta.json").is_file():
        raise AttnlmError(f"{target} exists and is not a data set", "choose another `name`")
    if force:
        return False
    hint = "`force` replaces it, another `name` keeps it"
    try:
        existing = open_dataset(target)
    except AttnlmError as error:
        raise AttnlmError(f"{target} exists, and {error}", hint) from None
    is_same = all(getattr(existing, name) == getattr(meta, name) for name in _CONTENT)
    if isinstance(tokenizer, str):
        is_same &= existing.tokenizer.name == tokenizer
    else:
        is_same &= existing.tokenizer.to_json() == tokenizer.to_json()
    if not is_same:
        raise AttnlmError(f"{target} exists with other content", hint)
    return True
