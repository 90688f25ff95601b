"""Data sets of text: surveyed, split into training and validation text, and encoded."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np

from attnlm.base.errors import AttnlmError
from attnlm.base.events import Note, OnEvent
from attnlm.data.bin_files import write_bins
from attnlm.data.new_dataset import Content, EncodedDataset, UnencodedDataset
from attnlm.data.splits import Split, SurveyedText, chosen_documents, survey_text
from attnlm.text.corpus import Corpus
from attnlm.text.text_files import PIECE
from attnlm.tokens.tokenizer import Tokenizer


def dataset_from_text(
    corpus: Corpus,
    val_corpus: Corpus | None,
    fraction: Fraction,
    split: str | None,
    on_event: OnEvent,
) -> UnencodedDataset:
    """Return the data set to be made of a text, and of another one for validation, if given."""
    text = survey_text(corpus, fraction, on_event)
    if val_corpus is None:
        by_documents = split == "documents" or (split is None and text.has_many_documents)
        if by_documents:
            _check_documents(text, on_event)
        splits = Split(text, by_documents=by_documents)
        _note_copies(text, by_documents, on_event)
    else:
        _note_shared_lines(corpus, val_corpus, on_event)
        splits = Split(text, survey_text(val_corpus, fraction, on_event))
    return UnencodedDataset(
        corpus,
        val_corpus,
        _split_content(splits),
        alphabet="".join(sorted(set().union(*(text.alphabet for text in splits.texts)))),
        sample=splits.train_sample,
        has_ends=any(text.corpus.marks_ends for text in splits.texts),
        encode=functools.partial(_encode_splits, splits, on_event),
    )


def _check_documents(text: SurveyedText, on_event: OnEvent) -> None:
    """Raise AttnlmError if the documents are too few to choose from; note an unusual fraction."""
    fraction = float(text.fraction)
    if text.documents < 2:
        raise AttnlmError(
            f"{text.corpus.shown} is a single document, which `split` documents cannot divide",
            "use `split` tail, or name several files, or a file of records (.jsonl, .parquet)",
        )
    share = text.chosen / text.characters
    if share == 0:
        least_fraction = math.ceil(100 / text.documents) / 100
        raise AttnlmError(
            f"a `val_fraction` of {fraction:g} of {text.documents} documents chooses none",
            f"use `val_fraction` {least_fraction:g} or more, or `split` tail",
        )
    if not fraction / 2 <= share <= 2 * fraction:
        on_event(
            Note(
                f"the documents for validation have {share:.2%} of the text, not {fraction:.2%}: "
                "documents differ in length; `split` tail divides the text between any two "
                "characters"
            )
        )


def _note_copies(text: SurveyedText, by_documents: bool, on_event: OnEvent) -> None:
    """Note how many documents are equal to earlier ones, and how many are in both splits."""
    digests = text.digests
    if copies := len(digests) - len(np.unique(digests)):
        words = f"{copies:,} of {len(digests):,} documents are copies of others"
        if by_documents:
            chosen = itertools.takewhile(
                lambda i: i < len(digests), chosen_documents(text.fraction)
            )
            is_val = np.zeros(len(digests), np.bool_)
            is_val[list(chosen)] = True
            shared = np.isin(digests[is_val], digests[~is_val]).sum()
            words += (
                f": {shared:,} of {is_val.sum():,} for validation are also in the training split"
            )
        on_event(Note(words))


def _note_shared_lines(corpus: Corpus, val_corpus: Corpus, on_event: OnEvent) -> None:
    """Note how many lines of the validation text are also in the training text."""
    lines = list(_lines(val_corpus))
    both = set(lines).intersection(_lines(corpus))
    if shared := sum(line in both for line in lines):
        words = f"{shared:,} of {len(lines):,} lines of {val_corpus.shown}"
        on_event(Note(f"{words} are also in {corpus.shown}"))


def _lines(corpus: Corpus) -> Iterator[str]:
    """Yield the lines of a text that are not blank. A line longer than a piece is cut."""
    rest = ""
    for piece in corpus.pieces():
        places = itertools.pairwise((0, *piece.ends, len(piece.text)))
        documents = "\n".join(piece.text[begin:end] for begin, end in places)
        *lines, rest = (rest + documents).split("\n")
        yield from filter(None, map(str.strip, lines))
        if len(rest) > PIECE:
            yield rest
            rest = ""
    yield from filter(None, [rest.strip()])


def _split_content(split: Split) -> Content:
    val_text = split.val_text
    return Content(
        split.text.sha256,
        val_text.sha256 if val_text else None,
        split.train_characters,
        None if val_text else "documents" if split.by_documents else "tail",
    )


def _encode_splits(
    split: Split, on_event: OnEvent, folder: Path, tokenizer: Tokenizer
) -> EncodedDataset:
    """Encode both splits to files in `folder`."""
    bins = write_bins(folder, split, tokenizer, on_event)
    text = split.text
    corpus = text.corpus
    val_text = split.val_text
    floor_nats = None
    if corpus.floor_nats and not val_text:
        floor_nats = corpus.floor_nats.get(split.train_characters)
    return EncodedDataset(
        bins=bins,
        floor=None if floor_nats is None else floor_nats / bins.val.tokens,
        documents=sum(
            text.documents for text in split.texts if text.corpus.marks_ends or split.by_documents
        ),
        val_fraction=None if val_text else float(text.fraction),
        characters=split.characters,
        records_on_stdin=corpus.has_records_on_stdin,
    )
