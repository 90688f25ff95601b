"""What data sets are made of: a text, questions with answers, or ids of the user's own.

Each kind of content has the same parts. `name` is the first part of the data set's default name,
and `meta` says what is known without a tokenizer. `alphabet` has the distinct characters, and
`has_ends` is set if a new tokenizer needs an end-of-text id. `sample` returns texts of the training
split, to train a tokenizer on. `write` encodes both splits to files in a folder, and returns `meta`
with all that is known then.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import Note, OnEvent, Progress
from attnlm.base.files import file_hash, open_given, open_replacement, write_bytes
from attnlm.compute.threads import cores, map_ahead
from attnlm.config.prepare_options import PrepareOptions
from attnlm.data.dataset import ExampleFacts, Meta, id_dtype
from attnlm.data.examples import LONGER, encode_examples, write_marks
from attnlm.data.spool import SAMPLE_BYTES, Part, chosen_documents, read_spool
from attnlm.text.corpus import Corpus, safe_name, summary
from attnlm.text.record_files import END_OF_TEXT, QUESTION_END, Example, read_examples
from attnlm.text.tasks import ANSWER_END, TASKS, generate_examples
from attnlm.text.text_files import BLOCK, END
from attnlm.tokens.tokenizer import (
    BpeTokenizer,
    Tokenizer,
    UnknownCharactersError,
    safe_blocks,
)

_MOST_BIGRAM_IDS = 1024

Pairs = NDArray[np.int64] | None
"""How often each id (row) is followed by each id (column), (V, V); None for a large vocabulary."""
_ENOUGH = 10  # documents of each split, for which documents are split by default
_MOST_WORKERS = 8
_IDS_AT_ONCE = 2**20


class Bin(NamedTuple):
    """Ids, (N,), and what they stand for. In the counts of a whole file, `ids` are its last ones.

    `utf8_bytes` is the length of their text in UTF-8, 0 for ids that are no text.
    """

    ids: NDArray[Any]
    tokens: int
    characters: int
    utf8_bytes: int
    pairs: Pairs


def count(
    ids: NDArray[Any],
    vocab_size: int,
    characters: int,
    utf8_bytes: int,
    is_counted: NDArray[np.bool_] | slice = slice(None),
) -> Bin:
    """Return ids with their counts. `is_counted` says for each id if its pair with the id before
    it is counted."""
    stored = ids.astype(id_dtype(vocab_size), copy=False)
    pairs_VV: Pairs = None
    if vocab_size <= _MOST_BIGRAM_IDS:
        dtype = np.min_scalar_type(vocab_size**2 - 1)  # narrow is fast
        pairs = np.multiply(stored[:-1], vocab_size, dtype=dtype)
        pairs += stored[1:].astype(dtype)
        if not isinstance(is_counted, slice):
            pairs = pairs[is_counted[1:]]
        pairs_VV = np.bincount(pairs, minlength=vocab_size**2).reshape(vocab_size, vocab_size)
    return Bin(stored, len(stored), characters, utf8_bytes, pairs_VV)


def write_bin(path: Path, blocks: Iterable[Bin]) -> Bin:
    """Write the ids of all blocks to a file, and return their counts."""
    counted: list[Bin] = []
    with open_replacement(path) as file:
        for block in blocks:
            file.write(block.ids.data)
            for before in counted:
                if block.pairs is not None and before.pairs is not None:
                    block.pairs[before.ids[-1], block.ids[0]] += 1
                    np.add(block.pairs, before.pairs, out=block.pairs)
                block = block._replace(
                    tokens=before.tokens + block.tokens,
                    characters=before.characters + block.characters,
                    utf8_bytes=before.utf8_bytes + block.utf8_bytes,
                )
            counted = [block]
    return counted[0] if counted else Bin(np.empty(0), 0, 0, 0, None)


def bigram_loss(train_VV: Pairs, val_VV: Pairs) -> float | None:
    """Return the loss of the validation split, in nats per token, with the bigram probabilities of
    the training split, given the pair counts of both.

    1 is added to each count of the training split. Return None without counts.
    """
    if train_VV is None or val_VV is None:
        return None
    smoothed_VV = train_VV + 1
    log_p_VV = np.log(smoothed_VV / smoothed_VV.sum(axis=1, keepdims=True))
    return 0.0 - float((val_VV * log_p_VV).sum() / val_VV.sum())  # never −0


def _with_counts(meta: Meta, splits: Sequence[Bin], **more: Any) -> Meta:
    """Return `meta` with the counts of both files of ids."""
    train, val = splits
    for title, split in (("training", train), ("validation", val)):
        if split.tokens < 2:
            raise AttnlmError(
                f"the {title} split of {meta.val_source or meta.source} has fewer than two tokens",
                "use a longer text" + (", or another `val_fraction`" if meta.val_fraction else ""),
            )
    return replace(
        meta,
        train_characters=train.characters,
        val_characters=val.characters,
        train_tokens=train.tokens,
        val_tokens=val.tokens,
        val_bytes=val.utf8_bytes,
        bigram_loss=bigram_loss(train.pairs, val.pairs),
        **more,
    )


class Text:
    """A text that is divided into training and validation text, or two texts."""

    def __init__(
        self, corpora: Sequence[Corpus], options: PrepareOptions, work: Path, on_event: OnEvent
    ) -> None:
        """Read the corpora, for training and perhaps for validation; `work` is for copies."""
        paths = (work / f"{i}.spool" for i in range(2))
        self._spools = [read_spool(*pair, on_event) for pair in zip(corpora, paths, strict=False)]
        spool, val_spool = self._spools[0], self._spools[-1]
        documents, fraction, is_one = len(spool.ends), options.fraction, len(corpora) == 1
        by_documents = is_one and options.split == "documents"
        if is_one and options.split is None:
            by_documents = documents * min(fraction, 1 - fraction) >= _ENOUGH
        self._train, self._val = (Part(s, np.array([[0, s.size]])) for s in (spool, val_spool))
        if is_one:
            self._train, self._val = spool.parts(fraction, by_documents)
            if not len(self._val.ranges):
                raise AttnlmError(
                    f"{spool.corpus.shown} has too few documents for `split` documents",
                    "use `split` tail, a larger `val_fraction`, or more files or records",
                )
        self.name = spool.corpus.name
        self.meta = Meta(
            sources=spool.corpus.sources,
            source_sha256=spool.sha256,
            val_source=None if is_one else summary(val_spool.corpus.sources),
            val_source_sha256=None if is_one else val_spool.sha256,
            split=("documents" if by_documents else "tail") if is_one else None,
            val_fraction=float(fraction) if is_one else None,
            documents=sum(len(s.ends) for s in self._spools if s.corpus.marks_ends or by_documents),
            characters=sum(s.characters for s in self._spools),
        )
        self.alphabet = "".join(sorted(set().union(*(s.alphabet for s in self._spools))))
        self.has_ends = any(s.corpus.marks_ends for s in self._spools)
        self.sample = self._train.sample
        self._note_copies(on_event)

    def _note_copies(self, on_event: OnEvent) -> None:
        """Note how many documents are equal to earlier ones, and what both splits share."""
        train, val, digests = self._train.spool, self._val.spool, self._train.spool.digests
        if train is not val:
            # Numbers in place of lines: both texts may be larger than the memory.
            hashed = (np.fromiter(map(hash, p.lines()), np.int64) for p in (self._train, self._val))
            train_lines, lines = hashed
            if shared := np.isin(lines, train_lines).sum():
                words = f"{shared:,} of {len(lines):,} lines of {val.corpus.shown}"
                on_event(Note(f"{words} are also in {train.corpus.shown}"))
        elif copies := len(digests) - len(np.unique(digests)):
            words = f"{copies:,} of {len(digests):,} documents are copies of others"
            if self.meta.split == "documents":
                is_val = np.zeros(len(digests), np.bool_)
                is_val[chosen_documents(Fraction(str(self.meta.val_fraction)), len(digests))] = True
                shared = np.isin(digests[is_val], digests[~is_val]).sum()
                words += f": {shared:,} of {is_val.sum():,} for validation are also in the training"
                words += " split"
            on_event(Note(words))

    def write(self, folder: Path, tokenizer: Tokenizer, on_event: OnEvent) -> Meta:
        """Encode both splits. Raises AttnlmError for a split of less than two tokens, and if the
        user's file has changed."""
        done = 0

        def told(blocks: Iterable[Bin]) -> Iterator[Bin]:
            nonlocal done
            for block in blocks:
                done += block.characters
                on_event(Progress("encode", done, self.meta.characters, "chars"))
                yield block

        # Characters take one worker: this thread, which reads and writes, has as much to do.
        workers = min(cores(), _MOST_WORKERS) if isinstance(tokenizer, BpeTokenizer) else 1
        splits = []
        try:
            for key, part in (("train", self._train), ("val", self._val)):
                encode = functools.partial(_encode, tokenizer, part.spool.corpus.marks_ends)
                blocks = safe_blocks(part.blocks(), BLOCK)
                with contextlib.closing(map_ahead(encode, blocks, workers)) as ahead:
                    splits.append(write_bin(folder / f"{key}.bin", told(ahead)))
        except AttnlmError:  # the vocabulary was made from the whole text
            for spool in self._spools:
                spool.check_unchanged()
            raise
        for spool in self._spools:
            spool.check_unchanged()
        floor_nats = None
        if len(self._spools) == 1 and self._train.spool.corpus.floor_nats:
            floor_nats = self._train.spool.corpus.floor_nats.get(splits[0].characters)
        floor = None if floor_nats is None else floor_nats / splits[1].tokens
        return _with_counts(self.meta, splits, floor=floor)


def _encode(tokenizer: Tokenizer, marks_ends: bool, block: str) -> Bin:
    ids = tokenizer.encode_documents(block) if marks_ends else tokenizer.encode_piece(block)
    text = block.replace(END, "") if marks_ends else block
    utf8_bytes = len(text) if text.isascii() else len(text.encode())
    return count(ids, tokenizer.vocab_size, len(text), utf8_bytes)


class Questions:
    """Examples: questions with answers, drawn for a task or read from records."""

    def __init__(
        self,
        corpora: Sequence[Corpus],
        train: Sequence[Example],
        val: Sequence[Example],
        *,
        val_fraction: float | None = None,
        question_end: str = QUESTION_END,
        answer_end: str | None = None,
        longer: Sequence[Example] = (),
        floor: float | None = None,
    ) -> None:
        """If `answer_end` is None, the tokenizer's end-of-text id or a control character ends an
        answer. `val_fraction` is the share of the examples that were chosen for validation."""
        self._splits = {"train": train, "val": val}
        self._question_end, self._answer_end = question_end, answer_end
        self._longer, self._floor = longer, floor
        self.name = corpora[0].name
        self.meta = Meta(
            sources=corpora[0].sources,
            source_sha256=_hash(train),
            val_source=summary(corpora[1].sources) if corpora[1:] else None,
            val_source_sha256=_hash(val),
            split=None if val_fraction is None else "documents",
            val_fraction=val_fraction,
            documents=len(train) + len(val),
            characters=_length([*train, *val]),
        )
        texts = map(example_text, (*train, *val, *longer))
        self.alphabet = "".join(sorted(set(answer_end or "").union(*texts)))
        self.has_ends = answer_end is None

    @classmethod
    def of_task(cls, name: str, options: PrepareOptions, on_event: OnEvent) -> Questions:
        """Draw the examples of a task. Raises UsageError for a size that it lacks."""
        task = TASKS[name]
        for size_name in ("length", "digits"):
            if getattr(options, size_name) is not None and size_name != task.setting:
                raise UsageError(
                    f"`{size_name}` does not apply to the task {name}",
                    f"use `{task.setting}`" if task.setting else f"leave `{size_name}` out",
                )
        examples = options.examples or 20_000
        size = getattr(options, task.setting) if task.setting else None
        train, val, longer = generate_examples(name, examples=examples, size=size)
        if len(train) < examples:
            on_event(
                Note(
                    f"{name} has only {len(train) + len(val):,} questions of this size: "
                    f"{len(train):,} are for training, {len(val):,} for validation"
                )
            )
        return cls(
            [Corpus(name, (name,), ())] * 2,
            train,
            val,
            question_end=task.question_end,
            answer_end=ANSWER_END,
            longer=longer,
            floor=0.0,
        )

    @classmethod
    def of_records(
        cls, corpora: Sequence[Corpus], options: PrepareOptions, on_event: OnEvent
    ) -> Questions:
        """Read the examples of the corpora. Examples with equal first questions stand in the same
        split, unless validation has a corpus of its own. Blanks at the ends do not make a question
        another one. Raises AttnlmError as `read_examples` does."""
        columns = [options.prompt_column or "", *filter(None, [options.answer_column])]
        train, *others = (list(read_examples(corpus.files, columns)) for corpus in corpora)
        numbers: dict[str, int] = {}  # of each different question
        for example in train:
            numbers.setdefault(_asked(example), len(numbers))
        if repeated := len(train) - len(numbers):
            words = f"{repeated:,} of {len(train):,} records repeat the question of another one"
            same_side = "" if others else ": equal questions stand in the same split"
            on_event(Note(words + same_side))
        if others:
            (val,) = others
            if shared := sum(_asked(example) in numbers for example in val):
                words = f"{shared:,} of {len(val):,} questions of {corpora[1].shown}"
                on_event(Note(f"{words} are also in {corpora[0].shown}"))
        else:
            chosen = {*chosen_documents(options.fraction, len(numbers))}
            is_val = [numbers[_asked(example)] in chosen for example in train]
            val = [*itertools.compress(train, is_val)]
            train = [example for example, held in zip(train, is_val, strict=True) if not held]
        return cls(corpora, train, val, val_fraction=None if others else float(options.fraction))

    def sample(self) -> list[str]:
        """Return texts of examples, of 4 MiB at most."""
        texts = list(map(example_text, self._splits["train"]))
        sizes = itertools.accumulate(map(len, texts))
        return [text for text, size in zip(texts, sizes, strict=True) if size <= SAMPLE_BYTES]

    def write(self, folder: Path, tokenizer: Tokenizer, on_event: OnEvent) -> Meta:
        """Encode both splits, mark the examples, and write the longer ones as records."""
        end, end_ids = self._end(tokenizer)
        splits = []
        for key, examples in self._splits.items():
            ids, places = encode_examples(examples, tokenizer, end_ids)
            ends = sum(turn.ends for example in examples for turn in example)
            size = len("".join(map(example_text, examples)).encode()) + ends * len(end.encode())
            counted = count(ids, tokenizer.vocab_size, _length(examples), size, places.is_answer)
            splits.append(write_bin(folder / f"{key}.bin", [counted]))
            write_marks(folder / f"{key}.marks", places)
        if self._longer:
            write_bytes(folder / LONGER, "".join(map(self._record, self._longer)).encode())
        answers = "".join(turn.answer for example in self._splits["val"] for turn in example)
        facts = ExampleFacts(
            train=len(self._splits["train"]),
            val=len(self._splits["val"]),
            longer=len(self._longer),
            question_end=self._question_end,
            answer_end=end,
            val_answer_tokens=int(places.is_answer.sum()),
            val_answer_bytes=len(answers.encode()) + ends * max(1, len(end.encode())),
        )
        return _with_counts(self.meta, splits, floor=self._floor, examples=facts)

    def _end(self, tokenizer: Tokenizer) -> tuple[str, list[int]]:
        """Return the text that ends an answer and its ids; "" for the end-of-text id."""
        if self._answer_end is not None:
            return self._answer_end, tokenizer.encode(self._answer_end)
        if tokenizer.end_of_text is not None:
            return "", [tokenizer.end_of_text]
        try:
            return END_OF_TEXT, tokenizer.encode(END_OF_TEXT)
        except UnknownCharactersError:  # characters of a text, which end no document
            turns = itertools.chain.from_iterable(itertools.chain(*self._splits.values()))
            if any("\n" in turn.answer for turn in turns):
                raise AttnlmError(
                    f"the vocabulary of {tokenizer.dataset} has no end for answers of several "
                    "lines",
                    "leave out line ends in answers, or train the first run on a text that was "
                    "prepared with `tokenizer` byte",
                ) from None
            return "\n", tokenizer.encode("\n")

    def _record(self, example: Example) -> str:
        """Return an example as a line of JSON: its last answer, and all before as the prompt."""
        answer = example[-1].answer
        prompt = example_text(example).removesuffix(answer).removesuffix(self._question_end)
        return json.dumps({"prompt": prompt, "answer": answer}) + "\n"


def _asked(example: Example) -> str:
    """Return the first question of an example, without blanks at its ends."""
    return example[0].question.strip()


def example_text(example: Example) -> str:
    """Return the questions and answers of an example, joined."""
    return "".join(turn.question + turn.answer for turn in example)


def _length(examples: Sequence[Example]) -> int:
    """Return the number of characters of questions and answers, without the ends of answers."""
    return sum(len(example_text(example)) for example in examples)


def _hash(examples: Sequence[Example]) -> str:
    lines = "".join(json.dumps(example) + "\n" for example in examples)
    return hashlib.sha256(lines.encode()).hexdigest()


class OwnIds:
    """Ids that the user made: they are no text, and are copied as they are."""

    alphabet = ""
    has_ends = False

    def __init__(self, path: Path, options: PrepareOptions) -> None:
        """Map a file of ids to memory, and the one for validation, if named.

        Raises AttnlmError for a file that is no list of ids, and for an id that is too large.
        """
        self._train = _read_ids(path, options)
        self.name = safe_name(path.stem)
        val_path = Path(options.val_file) if options.val_file else None
        if val_path is None:
            size = int(len(self._train) * (1 - options.fraction))
            self._train, self._val = self._train[:size], self._train[size:]
        else:
            self._val = _read_ids(val_path, options)
        self.meta = Meta(
            sources=(str(path),),
            source_sha256=file_hash(path),
            val_source=None if val_path is None else str(val_path),
            val_source_sha256=None if val_path is None else file_hash(val_path),
            split="tail" if val_path is None else None,
            val_fraction=float(options.fraction) if val_path is None else None,
            characters=len(self._train) + len(self._val),
        )

    def sample(self) -> list[str]:
        """Return no text."""
        return []

    def write(self, folder: Path, tokenizer: Tokenizer, on_event: OnEvent) -> Meta:
        """Copy both splits."""
        splits = [
            write_bin(
                folder / f"{key}.bin",
                (count(block, tokenizer.vocab_size, len(block), 0) for _, block in _slices(ids)),
            )
            for key, ids in (("train", self._train), ("val", self._val))
        ]
        return _with_counts(self.meta, splits)


def _slices(ids: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield parts of ids of a size that fits into memory, each after its place."""
    for begin in range(0, len(ids), _IDS_AT_ONCE):
        yield begin, ids[begin : begin + _IDS_AT_ONCE]


def _read_ids(path: Path, options: PrepareOptions) -> NDArray[Any]:
    """Map a file of ids to memory, and check them, (N,)."""
    try:
        open_given(path).close()  # for its errors
        if path.suffix.lower() == ".npy":
            ids: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            ids = np.memmap(path, np.dtype(options.dtype or "uint16").newbyteorder("<"), "r")
    except (ValueError, EOFError) as error:
        reason = " ".join(str(error).split())
        raise AttnlmError(f"{path} holds no ids: {reason}", "check the file and `dtype`") from None
    except OSError as error:
        raise AttnlmError(f"cannot read {path}: {error.strerror}", "check its name") from None
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise AttnlmError(
            f"{path} holds an array of {ids.dtype} with {ids.ndim} dimensions",
            "save whole numbers in one dimension: numpy.save(path, ids)",
        )
    largest = (options.vocab_size or 0) - 1
    for begin, block in _slices(ids):
        if len(wrong := np.flatnonzero((block < 0) | (block > largest))):
            raise AttnlmError(
                f"id {block[wrong[0]]} at place {begin + wrong[0]:,} of {path} is not from 0 to "
                f"{largest:,}",
                "correct the file, `vocab_size` or `dtype`",
            )
    return ids


Content: TypeAlias = Text | Questions | OwnIds
