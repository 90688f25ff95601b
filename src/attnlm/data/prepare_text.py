"""Data sets of text: read, split into training and validation text, and encoded."""

from __future__ import annotations

import functools
import itertools
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from attnlm.base.errors import AttnlmError
from attnlm.base.events import Note, OnEvent
from attnlm.data.bin_files import bigram_loss, write_bins
from attnlm.data.new_dataset import UnencodedDataset
from attnlm.data.splits import Split, chosen_documents, has_many_documents, read_text
from attnlm.text.corpus import Corpus
from attnlm.tokens.tokenizer import Tokenizer


def dataset_from_text(
    corpus: Corpus,
    val_corpus: Corpus | None,
    fraction: Fraction,
    split: str | None,
    work: Path,
    on_event: OnEvent,
) -> UnencodedDataset:
    """Return the data set to be made of a text, and of another one for validation, if given.

    Copies of the texts are written to the folder `work`.
    """
    text = read_text(corpus, work / "text.spool", on_event)
    val_text = None
    if val_corpus is not None:
        val_text = read_text(val_corpus, work / "val.spool", on_event)
    by_documents = val_text is None and (
        split == "documents" or (split is None and has_many_documents(text, fraction))
    )
    splits = Split(text, val_text, fraction, by_documents)
    if by_documents:
        _check_documents(splits, on_event)
    _note_copies(splits, on_event)
    counted = [text for text in splits.texts if text.corpus.marks_ends or by_documents]
    return UnencodedDataset(
        corpus,
        val_corpus,
        {
            "source_sha256": text.sha256,
            "val_source_sha256": val_text.sha256 if val_text else None,
            "split": None if val_text else "documents" if by_documents else "tail",
            "val_fraction": None if val_text else float(fraction),
            "documents": sum(text.documents for text in counted),
            "characters": splits.characters,
            "train_characters": splits.train_characters,
            "val_characters": splits.characters - splits.train_characters,
        },
        alphabet="".join(sorted(set().union(*(text.alphabet for text in splits.texts)))),
        sample=splits.train_sample,
        has_ends=any(text.corpus.marks_ends for text in splits.texts),
        encode=functools.partial(_encode_splits, splits, on_event),
    )


def _check_documents(splits: Split, on_event: OnEvent) -> None:
    """Raise AttnlmError if the documents are too few to choose from; note an unusual fraction."""
    fraction = float(splits.fraction)
    text = splits.text
    if text.documents < 2:
        raise AttnlmError(
            f"{text.corpus.shown} is a single document, which `split` documents cannot divide",
            "use `split` tail, or name several files, or a file of records (.jsonl, .csv, …)",
        )
    share = 1 - splits.train_characters / text.characters
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


def _note_copies(splits: Split, on_event: OnEvent) -> None:
    """Note how many documents are equal to earlier ones, and what both splits have in common."""
    text, val_text = splits.text, splits.val_text
    if val_text is not None:
        # Numbers in place of lines: both texts may be larger than the memory.
        train, lines = (np.fromiter(map(hash, t.lines()), np.int64) for t in (text, val_text))
        if shared := np.isin(lines, train).sum():
            words = f"{shared:,} of {len(lines):,} lines of {val_text.corpus.shown}"
            on_event(Note(f"{words} are also in {text.corpus.shown}"))
        return
    digests = text.digests()
    copies = len(digests) - len(np.unique(digests))
    if copies:
        words = f"{copies:,} of {len(digests):,} documents are copies of others"
        if splits.by_documents:
            chosen = itertools.takewhile(
                lambda i: i < len(digests), chosen_documents(splits.fraction)
            )
            is_val = np.zeros(len(digests), np.bool_)
            is_val[list(chosen)] = True
            shared = np.isin(digests[is_val], digests[~is_val]).sum()
            words += (
                f": {shared:,} of {is_val.sum():,} for validation are also in the training split"
            )
        on_event(Note(words))


def _encode_splits(
    splits: Split, on_event: OnEvent, folder: Path, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Encode both splits to files in `folder`."""
    written = write_bins(folder, splits, tokenizer, on_event)
    train, val = written["train"], written["val"]
    floor_nats = None
    if splits.text.corpus.floor_nats and not splits.val_text:
        floor_nats = splits.text.corpus.floor_nats.get(splits.train_characters)
    return {
        "train_tokens": train.tokens,
        "val_tokens": val.tokens,
        "val_bytes": val.utf8_bytes,
        "bigram_loss": bigram_loss(train.pairs_VV, val.pairs_VV),
        "floor": None if floor_nats is None else floor_nats / val.tokens,
    }
