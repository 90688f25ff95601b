"""Prepare a data set: stream the text twice, and move the complete folder into place."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path

from attnlm.base.atomic_folders import workspace
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import Note, OnEvent, ignore
from attnlm.base.files import explaining
from attnlm.base.folders import check_name, write_latest
from attnlm.base.settings import check_value
from attnlm.config.settings import resolve
from attnlm.data.bin_files import write_bins
from attnlm.data.dataset import Dataset, Facts, open_folder
from attnlm.data.new_dataset import (
    Content,
    Encoded,
    NewDataset,
    install,
    is_prepared,
    new_tokenizer,
    origin_of,
    taken_tokenizer,
    write_dataset,
)
from attnlm.data.prepare_examples import of_records, of_task
from attnlm.data.splits import HeldOut, Split, Text, survey_text
from attnlm.text.corpus import MOST_PARTS, Corpus, Source, TextFile, get_corpus, safe_name
from attnlm.text.tasks import TASKS
from attnlm.text.text_files import kind_of, text_encoding
from attnlm.tokens.specs import PUBLISHED, canonical_spec
from attnlm.tokens.tokenizer import Tokenizer

_DEFAULT_SEED = 1
# The arguments of each kind of data.
_OF_TASK: tuple[str, ...] = ("examples", "length", "digits")
_SPLITTING = ("encoding", "split_seed", "val_fraction", "val_file")
_OF_RECORDS = ("prompt_column", "answer_column", *_SPLITTING)
_OF_TEXT = ("column", "newlines", "split", *_SPLITTING)


def prepare(
    source: Source | Iterable[Source] | None = None,
    *,
    tokenizer: str | Path = "char",
    val_fraction: float | None = None,
    val_file: Source | None = None,
    split: str | None = None,
    split_seed: int | None = None,
    name: str | None = None,
    data_dir: str | Path = "data",
    encoding: str = "utf-8",
    newlines: str = "keep",
    column: str | None = None,
    prompt_column: str | None = None,
    answer_column: str | None = None,
    examples: int | None = None,
    length: int | None = None,
    digits: int | None = None,
    offline: bool = False,
    force: bool = False,
    on_event: OnEvent | None = None,
) -> Dataset:
    """Encode a text as the data set `name` in `data_dir`, and make it the latest.

        dataset = attnlm.prepare("my-novel.txt", tokenizer="bpe:512")

    `source` is a file, a folder, a pattern, a URL, "hf:NAME", "tinyshakespeare", "tales", or "-"
    for stdin. Several sources are joined in their order. The default is Tiny Shakespeare, or
    `tales` if Tiny Shakespeare is not available. `column` is the column of records that holds the
    text, by default "text". If it is given, stdin contains records, one JSON object per line.

    `tokenizer` is a spec such as "char" or "bpe:512", or names a run or data set. The tokenizer of
    this run or data set is then used, so that ids have the same meaning in both. Each record, and
    each of several files, is a document: the end-of-text id follows each document if the tokenizer
    has such an id. The tokenizers char, byte and bpe:N have it if there are records.

    If `split` is "tail", the validation split is the last `val_fraction` (default: 0.1) of the
    characters. If `split` is "documents", it is this fraction of the documents, chosen by
    `split_seed` (default: 1), so that every source can be in both splits. The default is
    "documents" if both splits then have at least 10 documents (100 documents at a `val_fraction` of
    0.1), else "tail". If `val_file`, a source like `source`, is given, the validation split is its
    whole text instead.

    Line ends are kept; if `newlines` is "unix", CR LF and CR become LF.

    A data set can consist of examples: questions with answers, on which training counts the loss of
    the answers only. They are read from records whose columns `prompt_column` and `answer_column`
    hold the questions and answers; without `answer_column`, the first holds lists of messages, each
    with a role and a content. Or `source` names a task: copy, reverse, sort, addition,
    modular-addition, parity, brackets or recall, with a number of training `examples` (default:
    20,000) and the `length` of a question in letters, bits, brackets or pairs, or for addition the
    `digits` of its numbers. Example number and size decide the examples: they are the same on every
    machine, no question is in both splits, and the file longer.jsonl has longer ones.

    A data set with the same content is left unchanged; a data set with other content is replaced
    only if `force` is true. A new data set appears at its path when it is complete; a preparation
    that is stopped leaves no files.

    Raises UsageError for invalid arguments, AttnlmError for a text that can't be found, downloaded,
    read, split or encoded, and for files that can't be written. Existing files are then unchanged.
    """
    on_event = on_event or ignore
    data_dir = Path(data_dir)
    if not (source is None or isinstance(source, str | os.PathLike)):
        source = list(source)
        source = source[0] if len(source) == 1 else source
    sources = source if isinstance(source, list) else [source]
    if [*sources, val_file].count("-") > 1:
        raise UsageError("stdin is named more than once", "name - once")
    task = source if isinstance(source, str) and source in TASKS else None
    for one in source if isinstance(source, list) else ():
        if one in TASKS and not Path(one).exists():
            raise UsageError(f"the task {one} cannot be joined with other sources", "name it alone")
    given: dict[str, object] = {
        "examples": examples,
        "length": length,
        "digits": digits,
        "column": column,
        "prompt_column": prompt_column,
        "answer_column": answer_column,
        "encoding": None if encoding == "utf-8" else encoding,
        "newlines": None if newlines == "keep" else newlines,
        "split": split,
        "split_seed": split_seed,
        "val_fraction": val_fraction,
        "val_file": val_file,
    }
    _check_arguments(task, given)
    spec = canonical_spec(str(tokenizer))
    origin = origin_of(tokenizer, data_dir)
    taken = taken_tokenizer(origin)
    # The digits as written count: the double 0.9 exceeds 9/10, which would cost a character.
    fraction = Fraction(str(float(0.1 if val_fraction is None else val_fraction)))
    choice = HeldOut(fraction, _DEFAULT_SEED if split_seed is None else split_seed)
    if name is not None:
        check_name(name)
    # The tokenizers that are made here get an end-of-text id for records only.
    marks_ends = True if spec in PUBLISHED else None
    if taken is not None:
        marks_ends = taken.end_of_text is not None
    with explaining(data_dir, ", or name another `data_dir`"), workspace(data_dir) as work:
        if task is not None:
            new = of_task(task, examples, {"length": length, "digits": digits}, on_event)
        else:
            read = functools.partial(
                get_corpus,
                encoding=encoding,
                newlines=newlines,
                column=column or prompt_column,
                marks_ends=marks_ends,
                offline=offline,
                spool=work,
                on_event=on_event,
            )
            corpus = read(source)
            val_corpus = None if val_file is None else read(val_file)
            val_files = () if val_corpus is None else val_corpus.files
            _check_effect(given, corpus.shown, (*corpus.files, *val_files))
            if prompt_column is not None:
                new = of_records(corpus, val_corpus, choice, prompt_column, answer_column)
            else:
                new = _of_text(corpus, val_corpus, choice, split, split_seed, on_event)
        kind = spec.replace(":", "") if origin is None else safe_name(origin.name)
        name = name or f"{new.corpus.name}-{kind}"
        target = data_dir / name
        is_there = functools.partial(is_prepared, target, taken or spec, new.content, force)
        if is_there():
            digest = new.content.source_sha256
            on_event(Note(f"{target} exists, prepared from the same text ({digest[:12]}…)"))
        else:
            if taken is not None:
                taken.check("".join(new.distinct))
            chosen = taken or new_tokenizer(spec, new, work, offline, on_event)
            (work / "new").mkdir()
            write_dataset(work / "new", name, new, chosen, origin)
            install(work / "new", target, is_there)
        write_latest(data_dir, name)
        dataset = open_folder(target, trusted=True)
    most = dataset.largest_block_size
    usual = resolve({}).spec.block_size
    if most < usual:
        on_event(
            Note(
                f"{name} is too small for the default context of {usual} tokens: "
                f"train with `block_size` {most} or less, or prepare a longer text"
            )
        )
    return dataset


# --- The arguments --------------------------------------------------------------------------------


def _check_arguments(task: str | None, given: Mapping[str, object]) -> None:
    """Raise UsageError for arguments that have no effect for this kind of data, or are invalid."""
    if task is not None:
        kind, allowed = f"the task {task}", _OF_TASK
    elif given["prompt_column"] is not None:
        kind, allowed = "examples from records", _OF_RECORDS
    else:
        kind, allowed = "a text", _OF_TEXT
    for name, value in given.items():
        if value is not None and name not in allowed:
            raise UsageError(f"`{name}` does not apply to {kind}", f"leave `{name}` out")
        if value is not None and name in ("newlines", "split", "split_seed", "val_fraction"):
            check_value(Facts, name, value)
    for name in ("val_fraction", "split", "split_seed"):
        if given[name] is not None and given["val_file"] is not None:
            message = f"`val_file` cannot be combined with `{name}`"
            raise UsageError(message, "use only one")


def _check_effect(given: Mapping[str, object], shown: str, files: Sequence[TextFile]) -> None:
    """Raise UsageError if none of the files uses the given column or encoding."""
    for name in ("column", "prompt_column"):
        if given[name] is not None and not any(kind_of(file.path) for file in files):
            raise UsageError(
                f"`{name}` {given[name]} does not apply to {shown}",
                "it needs records: a .jsonl or .parquet file, hf: data, or JSON lines on stdin",
            )
    encoding = text_encoding(str(given["encoding"] or "utf-8"))
    if encoding != "utf-8" and all(
        kind_of(file.path) or file.encoding != encoding for file in files
    ):
        raise UsageError(
            f"`encoding` {given['encoding']} does not apply to {shown}",
            "leave it out: records, hf: data and built-in texts are UTF-8",
        )


# --- A text ---------------------------------------------------------------------------------------


def _of_text(
    corpus: Corpus,
    val_corpus: Corpus | None,
    choice: HeldOut,
    split: str | None,
    split_seed: int | None,
    on_event: OnEvent,
) -> NewDataset:
    """Return the data set to be made of a text, and of another one for validation, if given."""
    text = survey_text(corpus, choice, on_event)
    if len(corpus.sources) > MOST_PARTS:
        on_event(Note(f"the losses of more than {MOST_PARTS} sources are not measured separately"))
    if val_corpus is None:
        by_documents = split == "documents" or (split is None and text.has_many_documents)
        _check_documents(text, by_documents, split_seed, on_event)
        both = Split(text, by_documents=by_documents)
    else:
        both = Split(text, survey_text(val_corpus, choice, on_event))
    return NewDataset(
        corpus,
        val_corpus,
        _content(both),
        distinct=[text.distinct for text in both.texts],
        sample=both.train_sample,
        has_ends=any(text.corpus.marks_ends for text in both.texts),
        build=functools.partial(_build, both, on_event),
    )


def _check_documents(text: Text, by_documents: bool, seed: int | None, on_event: OnEvent) -> None:
    """Raise AttnlmError if the documents are too few to choose from; note an unusual fraction.

    If the validation split is the tail, raise UsageError for a seed, which has no effect.
    """
    if not by_documents:
        if seed is not None:
            hint = "use it, or leave out the seed"
            raise UsageError("`split_seed` needs `split` documents", hint)
        return
    fraction = float(text.choice.fraction)
    if text.documents < 2:
        raise AttnlmError(
            f"{text.corpus.shown} is a single document, which `split` documents cannot divide",
            "use `split` tail, or name several files, or a file of records (.jsonl, .parquet)",
        )
    share = sum(part.chosen for part in text.parts) / text.characters
    if share == 0:
        least = math.ceil(100 / text.documents) / 100
        raise AttnlmError(
            f"a `val_fraction` of {fraction:g} of {text.documents} documents chooses none",
            f"use `val_fraction` {least:g} or more, or `split` tail",
        )
    if not fraction / 2 <= share <= 2 * fraction:
        on_event(
            Note(
                f"the documents for validation have {share:.2%} of the text, not {fraction:.2%}: "
                "documents differ in length; another `split_seed` chooses others, and `split` tail "
                "divides the text between any two characters"
            )
        )


def _content(split: Split) -> Content:
    val_text = split.val_text
    return Content(
        split.text.sha256,
        val_text.sha256 if val_text else None,
        split.train_characters,
        None if val_text else "documents" if split.by_documents else "tail",
        split.text.choice.seed if split.by_documents else None,
    )


def _build(split: Split, on_event: OnEvent, folder: Path, tokenizer: Tokenizer) -> Encoded:
    """Encode both splits to files in `folder`."""
    bins = write_bins(folder, split, tokenizer, on_event)
    text = split.text
    corpus = text.corpus
    val_text = split.val_text
    floor_nats = None
    if corpus.floor_nats and not val_text:
        floor_nats = corpus.floor_nats.get(split.train_characters)
    return Encoded(
        bins=bins,
        floor=None if floor_nats is None else floor_nats / bins.val.tokens,
        documents=sum(
            text.documents for text in split.texts if text.corpus.marks_ends or split.by_documents
        ),
        val_fraction=None if val_text else float(text.choice.fraction),
        characters=split.characters,
        val_characters=split.characters - split.train_characters,
        records_on_stdin=corpus.has_records_on_stdin,
    )
