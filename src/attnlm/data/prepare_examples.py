"""Data sets of examples: drawn for a task, or read from records, and written to a folder."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import Note, OnEvent
from attnlm.base.files import write_bytes
from attnlm.data.bin_files import MOST_BIGRAM_IDS, bigram_loss
from attnlm.data.dataset import ExampleFacts, id_dtype
from attnlm.data.examples import EncodedExamples, encode_examples, write_marks
from attnlm.data.new_dataset import UnencodedDataset
from attnlm.data.splits import SAMPLE_BYTES, chosen_documents
from attnlm.text import tasks
from attnlm.text.corpus import Corpus
from attnlm.text.example_files import END_OF_TEXT, QUESTION_END, Example, read_examples
from attnlm.tokens.tokenizer import Tokenizer, UnknownCharactersError

LONGER = "longer.jsonl"


@dataclass(frozen=True)
class _SplitExamples:
    """The examples of both splits."""

    train: Sequence[Example]
    val: Sequence[Example]
    val_fraction: Fraction | None
    """the share of the examples that were chosen for validation; None if none were chosen"""
    question_end: str
    answer_end: str | None
    """None for the tokenizer's end-of-text id or, if it has none, the control character"""
    longer: Sequence[Example] = ()
    floor: float | None = None


def dataset_from_task(
    name: str, count: int, sizes: Mapping[str, int | None], on_event: OnEvent
) -> UnencodedDataset:
    """Return the data set of a task to be made. Raises UsageError for `sizes` that it lacks."""
    setting = tasks.TASKS[name].setting
    for size_name, value in sizes.items():
        if value is not None and size_name != setting:
            raise UsageError(
                f"`{size_name}` does not apply to the task {name}",
                f"use `{setting}`" if setting else f"leave `{size_name}` out",
            )
    (train, val, longer), size = tasks.generate_examples(
        name, examples=count, size=sizes.get(setting)
    )
    if len(train) < count:
        on_event(
            Note(
                f"{name}{f' of {setting} {size}' if setting else ''} has only "
                f"{len(train) + len(val):,} questions: {len(train):,} are for training, "
                f"{len(val):,} for validation"
            )
        )
    corpus = Corpus(name, (name,), ())
    split = _SplitExamples(
        train,
        val,
        val_fraction=None,
        question_end=tasks.TASKS[name].question_end,
        answer_end=tasks.ANSWER_END,
        longer=longer,
        floor=0.0,
    )
    return _unencoded_dataset(split, corpus, corpus)


def dataset_from_records(
    corpus: Corpus,
    val_corpus: Corpus | None,
    fraction: Fraction,
    prompt_column: str,
    answer_column: str | None,
    on_event: OnEvent,
) -> UnencodedDataset:
    """Return the data set of records to be made. Examples with equal first questions stand in the
    same split, unless validation has a corpus of its own. Blanks at the ends do not make a question
    another one. Raises AttnlmError as `read_examples`."""
    train = list(read_examples(corpus.files, prompt_column, answer_column))
    numbers: dict[str, int] = {}  # of each different question
    for example in train:
        numbers.setdefault(_asked(example), len(numbers))
    if repeated := len(train) - len(numbers):
        equal = f"{repeated:,} of {len(train):,} records repeat the question of another one"
        on_event(Note(equal if val_corpus else f"{equal}: equal questions stand in the same split"))
    if val_corpus is None:
        chosen = set(itertools.takewhile(lambda i: i < len(numbers), chosen_documents(fraction)))
        val = [example for example in train if numbers[_asked(example)] in chosen]
        train = [example for example in train if numbers[_asked(example)] not in chosen]
    else:
        val = list(read_examples(val_corpus.files, prompt_column, answer_column))
        if shared := sum(_asked(example) in numbers for example in val):
            both = f"{shared:,} of {len(val):,} questions of {val_corpus.shown}"
            on_event(Note(f"{both} are also in {corpus.shown}"))
    split = _SplitExamples(train, val, None if val_corpus else fraction, QUESTION_END, None)
    for examples, name, source in (
        (train, "training", corpus),
        (val, "validation", val_corpus or corpus),
    ):
        if not examples:
            raise AttnlmError(
                f"{source.shown} has too few examples: the {name} split has none",
                "add examples" if val_corpus else "add examples, or use another `val_fraction`",
            )
    return _unencoded_dataset(split, corpus, val_corpus)


def _asked(example: Example) -> str:
    """Return the first question of an example, without blanks at its ends."""
    return example[0].question.strip()


def _unencoded_dataset(
    split: _SplitExamples, corpus: Corpus, val_corpus: Corpus | None
) -> UnencodedDataset:
    texts = map(example_text, itertools.chain(split.train, split.val, split.longer))
    return UnencodedDataset(
        corpus,
        val_corpus,
        {
            "source_sha256": _hash_examples(split.train),
            "val_source_sha256": _hash_examples(split.val),
            "split": "documents" if split.val_fraction else None,
            "val_fraction": float(split.val_fraction) if split.val_fraction else None,
            "documents": len(split.train) + len(split.val),
            "characters": _count_characters([*split.train, *split.val]),
            "train_characters": _count_characters(split.train),
            "val_characters": _count_characters(split.val),
        },
        alphabet="".join(sorted(set(split.answer_end or "").union(*texts))),
        sample=functools.partial(_training_sample, split.train),
        has_ends=split.answer_end is None,
        encode=functools.partial(_encode_splits, split),
    )


def example_text(example: Example) -> str:
    """Return the questions and answers of an example, joined."""
    return "".join(turn.question + turn.answer for turn in example)


def _hash_examples(examples: Sequence[Example]) -> str:
    digest = hashlib.sha256()
    for example in examples:
        digest.update(json.dumps(example).encode() + b"\n")
    return digest.hexdigest()


def _count_characters(examples: Sequence[Example]) -> int:
    """Return the number of characters of questions and answers, without the ends of answers."""
    return sum(len(example_text(example)) for example in examples)


def _training_sample(examples: Sequence[Example]) -> list[str]:
    """Return texts of examples, of 4 MiB at most, to train a tokenizer on."""
    texts = list(map(example_text, examples))
    sizes = itertools.accumulate(map(len, texts))
    return [text for text, size in zip(texts, sizes, strict=True) if size <= SAMPLE_BYTES]


def _encode_splits(split: _SplitExamples, folder: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """Write the ids of the examples, and their places, to `folder`."""
    end, end_ids = _answer_end(split, tokenizer)
    encoded_train = encode_examples(split.train, tokenizer, end_ids)
    encoded_val = encode_examples(split.val, tokenizer, end_ids)
    for key, encoded in (("train", encoded_train), ("val", encoded_val)):
        ids = encoded.ids.astype(id_dtype(tokenizer.vocab_size))
        write_bytes(folder / f"{key}.bin", ids.tobytes())
        write_marks(folder / f"{key}.marks", encoded.examples)
    if split.longer:
        _write_longer(folder, split)
    end_bytes = len(end.encode())
    turns = [turn for example in split.val for turn in example]
    val_bytes = sum(len((t.question + t.answer).encode()) + end_bytes * t.ends for t in turns)
    return {
        "train_tokens": len(encoded_train.ids),
        "val_tokens": len(encoded_val.ids),
        "val_bytes": val_bytes,
        "bigram_loss": _answer_bigram_loss(encoded_train, encoded_val, tokenizer.vocab_size),
        "floor": split.floor,
        "examples": ExampleFacts(
            train=len(split.train),
            val=len(split.val),
            longer=len(split.longer),
            question_end=split.question_end,
            answer_end=end,
            val_answer_tokens=int(encoded_val.examples.is_answer.sum()),
            val_answer_bytes=sum(
                len(turn.answer.encode()) + max(1, end_bytes) * turn.ends for turn in turns
            ),
        ),
    }


def _answer_end(split: _SplitExamples, tokenizer: Tokenizer) -> tuple[str, list[int]]:
    """Return the text that ends an answer, "" for the tokenizer's end-of-text id, and its ids."""
    if split.answer_end is not None:
        return split.answer_end, tokenizer.encode(split.answer_end)
    if tokenizer.end_of_text is not None:
        return "", [tokenizer.end_of_text]
    try:
        return END_OF_TEXT, tokenizer.encode(END_OF_TEXT)
    except UnknownCharactersError:  # characters of a text, which end no document
        turns = itertools.chain.from_iterable((*split.train, *split.val))
        if any("\n" in turn.answer for turn in turns):
            raise AttnlmError(
                f"the vocabulary of {tokenizer.dataset} has no end for answers of several lines",
                "leave out line ends in answers, or train the first run on a text that was "
                "prepared with `tokenizer` byte",
            ) from None
        return "\n", tokenizer.encode("\n")


def _write_longer(folder: Path, split: _SplitExamples) -> None:
    """Write the longer examples as records."""
    lines = []
    for example in split.longer:
        answer = example[-1].answer
        prompt = example_text(example).removesuffix(answer).removesuffix(split.question_end)
        lines.append(json.dumps({"prompt": prompt, "answer": answer}) + "\n")
    write_bytes(folder / LONGER, "".join(lines).encode())


def _answer_bigram_loss(
    train: EncodedExamples, val: EncodedExamples, vocab_size: int
) -> float | None:
    """Return the loss of the validation answers with counted bigrams of the training answers."""
    if vocab_size > MOST_BIGRAM_IDS:
        return None
    counts = []
    for ids, examples in (train, val):
        answers = np.flatnonzero(examples.is_answer)
        pairs = ids[answers - 1].astype(np.int64) * vocab_size + ids[answers]
        counts.append(np.bincount(pairs, minlength=vocab_size**2).reshape(vocab_size, vocab_size))
    return bigram_loss(*counts)
