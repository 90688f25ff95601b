"""Data sets of text: surveyed, split into training and validation text, and encoded."""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from pathlib import Path

from attnlm.base.errors import AttnlmError
from attnlm.base.events import Note, OnEvent
from attnlm.data.bin_files import write_bins
from attnlm.data.new_dataset import Content, EncodedDataset, UnencodedDataset
from attnlm.data.splits import Split, SurveyedText, survey_text
from attnlm.text.corpus import Corpus
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
    else:
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
