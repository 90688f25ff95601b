"""Data sets of examples: drawn for a task, or read from records, and written to a folder."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import Note, OnEvent
from attnlm.base.files import file_hash, replacing, write_bytes
from attnlm.base.json_records import limited
from attnlm.base.settings import check_value
from attnlm.data.bin_files import MOST_BIGRAM_IDS, WrittenBins, bigram_loss
from attnlm.data.dataset import ExampleFacts, SplitFacts, id_dtype, sampled_hash
from attnlm.data.examples import EncodedExamples, encode_examples, write_marks
from attnlm.data.new_dataset import Content, Encoded, NewDataset
from attnlm.data.splits import SAMPLE_BYTES, HeldOut
from attnlm.text import tasks
from attnlm.text.corpus import Corpus
from attnlm.text.example_files import END_OF_TEXT, QUESTION_END, Example, read_examples
from attnlm.tokens.tokenizer import Tokenizer

LONGER = "longer.jsonl"


@dataclass(frozen=True)
class _Sizes:
    """The sizes of a task. None stands for the task's default."""

    examples: int = limited(default=20_000, at_least=1, at_most=1_000_000)
    length: int | None = limited(default=None)
    digits: int | None = limited(default=None)


@dataclass(frozen=True)
class _Split:
    """The examples of both splits."""

    train: Sequence[Example]
    val: Sequence[Example]
    choice: HeldOut | None
    """the choice of the validation examples, if they were chosen"""
    question_end: str
    answer_end: str | None
    """None for the tokenizer's end-of-text id or, if it has none, the control character"""
    longer: Sequence[Example] = ()
    floor: float | None = None


def of_task(
    name: str, examples: int | None, sizes: Mapping[str, int | None], on_event: OnEvent
) -> NewDataset:
    """Return the data set of a task to be made. Raises UsageError for `sizes` that it lacks."""
    setting = tasks.TASKS[name].setting
    for other, value in sizes.items():
        if value is not None and other != setting:
            raise UsageError(
                f"`{other}` does not apply to the task {name}",
                f"use `{setting}`" if setting else f"leave `{other}` out",
            )
    for size_name, value in {**sizes, "examples": examples}.items():
        if value is not None:
            check_value(_Sizes, size_name, value)
    count = _Sizes.examples if examples is None else examples
    (train, val, longer), size = tasks.generate(name, examples=count, size=sizes.get(setting))
    if len(train) < count:
        on_event(
            Note(
                f"{name}{f' of {setting} {size}' if setting else ''} has only "
                f"{len(train) + len(val):,} questions: {len(train):,} are for training, "
                f"{len(val):,} for validation"
            )
        )
    corpus = Corpus(name, (name,), ())
    split = _Split(
        train,
        val,
        choice=None,
        question_end=tasks.TASKS[name].question_end,
        answer_end=tasks.ANSWER_END,
        longer=longer,
        floor=0.0,
    )
    return _new(split, corpus, corpus)


def of_records(
    corpus: Corpus,
    val_corpus: Corpus | None,
    choice: HeldOut,
    prompt_column: str,
    answer_column: str | None,
) -> NewDataset:
    """Return the data set of records to be made. Raises AttnlmError as `read_examples`."""
    examples = list(read_examples(corpus.files, prompt_column, answer_column))
    if val_corpus is None:
        chosen = set(itertools.takewhile(lambda i: i < len(examples), choice.indices()))
        val = [example for i, example in enumerate(examples) if i in chosen]
        train = [example for i, example in enumerate(examples) if i not in chosen]
    else:
        train = examples
        val = list(read_examples(val_corpus.files, prompt_column, answer_column))
    by_choice = choice if val_corpus is None else None
    for split, name, source in (
        (train, "training", corpus),
        (val, "validation", val_corpus or corpus),
    ):
        if not split:
            raise AttnlmError(
                f"{source.shown} has too few examples: the {name} split has none",
                "add examples, or use another `val_fraction`" if by_choice else "add examples",
            )
    return _new(_Split(train, val, by_choice, QUESTION_END, answer_end=None), corpus, val_corpus)


def _new(split: _Split, corpus: Corpus, val_corpus: Corpus | None) -> NewDataset:
    every = itertools.chain(split.train, split.val, split.longer)
    return NewDataset(
        corpus,
        val_corpus,
        Content(
            _hash(split.train),
            _hash(split.val),
            _characters(split.train),
            split="documents" if split.choice else None,
            split_seed=split.choice.seed if split.choice else None,
        ),
        distinct=["".join(sorted(set(split.answer_end or "").union(*map(text_of, every))))],
        sample=functools.partial(_sample, split.train),
        has_ends=split.answer_end is None,
        build=functools.partial(_build, split),
    )


def text_of(example: Example) -> str:
    """Return the questions and answers of an example, joined."""
    return "".join(turn.question + turn.answer for turn in example)


def _hash(examples: Sequence[Example]) -> str:
    digest = hashlib.sha256()
    for example in examples:
        digest.update(json.dumps(example).encode() + b"\n")
    return digest.hexdigest()


def _characters(examples: Sequence[Example]) -> int:
    """Return the number of characters of questions and answers, without the ends of answers."""
    return sum(len(text_of(example)) for example in examples)


def _sample(examples: Sequence[Example]) -> list[str]:
    """Return texts of examples, of 4 MiB at most, to train a tokenizer on."""
    texts = list(map(text_of, examples))
    sizes = itertools.accumulate(map(len, texts))
    return [text for text, size in zip(texts, sizes, strict=True) if size <= SAMPLE_BYTES]


def _build(split: _Split, folder: Path, tokenizer: Tokenizer) -> Encoded:
    """Write the ids of the examples, and their places, to `folder`."""
    if split.answer_end is None and tokenizer.end_of_text is not None:
        end, end_ids = "", [tokenizer.end_of_text]
    else:
        end = END_OF_TEXT if split.answer_end is None else split.answer_end
        end_ids = tokenizer.encode(end)
    encoded_train = encode_examples(split.train, tokenizer, end_ids)
    encoded_val = encode_examples(split.val, tokenizer, end_ids)
    train = _write_split(folder, "train", encoded_train, tokenizer.vocab_size)
    val = _write_split(folder, "val", encoded_val, tokenizer.vocab_size)
    longer_sha256 = ""
    if split.longer:
        write_bytes(folder / LONGER, "".join(_lines(split)).encode())
        longer_sha256 = file_hash(folder / LONGER)
    end_bytes = len(end.encode())
    val_characters = _characters(split.val)
    turns = [turn for example in split.val for turn in example]
    val_bytes = sum(len((turn.question + turn.answer).encode()) for turn in turns)
    val_bytes += sum(end_bytes for turn in turns if turn.ends)
    bigrams = _bigram_loss(encoded_train, encoded_val, tokenizer.vocab_size)
    return Encoded(
        bins=WrittenBins(train, val, val_bytes, bigrams),
        floor=split.floor,
        documents=len(split.train) + len(split.val),
        val_fraction=float(split.choice.fraction) if split.choice else None,
        characters=_characters(split.train) + val_characters,
        val_characters=val_characters,
        examples=ExampleFacts(
            train=len(split.train),
            val=len(split.val),
            longer=len(split.longer),
            question_end=split.question_end,
            answer_end=end,
            val_answer_tokens=int(encoded_val.examples.is_answer.sum()),
            val_answer_bytes=sum(
                len(turn.answer.encode()) + (max(1, end_bytes) if turn.ends else 0)
                for turn in turns
            ),
            train_marks_sha256=train.marks_sha256,
            val_marks_sha256=val.marks_sha256,
            longer_sha256=longer_sha256,
        ),
    )


def _write_split(folder: Path, key: str, encoded: EncodedExamples, vocab_size: int) -> SplitFacts:
    """Write the ids of a split, and the places of its examples."""
    path = folder / f"{key}.bin"
    marks = folder / f"{key}.marks"
    with replacing(path) as file:
        file.write(encoded.ids.astype(id_dtype(vocab_size)).tobytes())
    write_marks(marks, encoded.examples)
    return SplitFacts(len(encoded.ids), file_hash(path), sampled_hash(path), file_hash(marks))


def _lines(split: _Split) -> Iterator[str]:
    """Yield the longer examples as records."""
    for example in split.longer:
        prompt = text_of(example).removesuffix(example[-1].answer)
        record = {
            "prompt": prompt.removesuffix(split.question_end),
            "answer": example[-1].answer,
        }
        yield json.dumps(record) + "\n"


def _bigram_loss(train: EncodedExamples, val: EncodedExamples, vocab_size: int) -> float | None:
    """Return the loss of the validation answers with counted bigrams of the training answers."""
    if vocab_size > MOST_BIGRAM_IDS:
        return None
    counts = []
    for ids, examples in (train, val):
        answers = np.flatnonzero(examples.is_answer)
        pairs = ids[answers - 1].astype(np.int64) * vocab_size + ids[answers]
        counts.append(np.bincount(pairs, minlength=vocab_size**2).reshape(vocab_size, vocab_size))
    return bigram_loss(*counts)
