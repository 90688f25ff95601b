"""What data sets are made of: a text, perhaps of questions with answers, or the user's own ids.

Each kind of content has the same parts. `name` is the first part of the data set's default name,
and `meta` says what is known without a tokenizer. `write` encodes both splits to files in a folder,
and returns `meta` with all that is known then.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import Note, OnEvent, Progress
from attnlm.base.files import file_hash, open_given, open_replacement
from attnlm.compute.threads import cores, map_ahead
from attnlm.config.prepare_options import PrepareOptions
from attnlm.data.dataset import ExampleFacts, Meta, id_dtype
from attnlm.data.examples import (
    LONGER,
    Examples,
    encode_examples,
    join_examples,
    write_longer,
    write_marks,
)
from attnlm.data.spool import Part, read_spool
from attnlm.text.corpus import Corpus, safe_name, summary
from attnlm.text.record_files import END_OF_TEXT, Questions
from attnlm.text.tasks import TASKS, generate_examples
from attnlm.text.text_files import ANSWER_END, TextFile, without_marks
from attnlm.tokens.tokenizer import BpeTokenizer, Tokenizer

_MOST_BIGRAM_IDS = 1024

Pairs = NDArray[np.int64] | None
"""How often each id (row) is followed by each id (column), (V, V); None for a large vocabulary."""
_ENOUGH = 10  # documents of each split, for which documents are split by default
_MOST_WORKERS = 8
_IDS_AT_ONCE = 2**20


class Bin(NamedTuple):
    """Ids, (N,), and what they stand for. In the counts of a whole file, `ids` are its last ones.

    `utf8_bytes` is the length of their text in UTF-8, 0 for ids that are no text; `answer_bytes` is
    that of the answers in it. `places` are those of examples, None for a text.
    """

    ids: NDArray[Any]
    tokens: int
    characters: int
    utf8_bytes: int
    pairs: Pairs
    places: Examples | None = None
    answer_bytes: int = 0

    def behind(self, before: Bin) -> Bin:
        """Return the counts of ids that follow those of `before`, with their own places."""
        if self.pairs is not None and before.pairs is not None:
            if self.places is None:
                self.pairs[before.ids[-1], self.ids[0]] += 1
            np.add(self.pairs, before.pairs, out=self.pairs)
        return self._replace(
            tokens=before.tokens + self.tokens,
            characters=before.characters + self.characters,
            utf8_bytes=before.utf8_bytes + self.utf8_bytes,
            answer_bytes=before.answer_bytes + self.answer_bytes,
        )


def count(
    ids: NDArray[Any],
    vocab_size: int,
    characters: int,
    utf8_bytes: int,
    places: Examples | None = None,
    answer_bytes: int = 0,
) -> Bin:
    """Return ids with their counts. In examples, pairs count whose second id is of an answer."""
    stored = ids.astype(id_dtype(vocab_size), copy=False)
    pairs_VV: Pairs = None
    if vocab_size <= _MOST_BIGRAM_IDS:
        dtype = np.min_scalar_type(vocab_size**2 - 1)  # narrow is fast
        pairs = np.multiply(stored[:-1], vocab_size, dtype=dtype)
        pairs += stored[1:].astype(dtype)
        if places is not None:
            pairs = pairs[places.is_answer[1:]]
        pairs_VV = np.bincount(pairs, minlength=vocab_size**2).reshape(vocab_size, vocab_size)
    return Bin(stored, len(stored), characters, utf8_bytes, pairs_VV, places, answer_bytes)


def write_bin(path: Path, blocks: Iterable[Bin]) -> Bin:
    """Write the ids of all blocks to a file, and return their counts."""
    whole: Bin | None = None
    places: list[Examples] = []
    with open_replacement(path) as file:
        for block in blocks:
            file.write(block.ids.data)
            places += [] if block.places is None else [block.places]
            whole = block if whole is None else block.behind(whole)
    if whole is None:
        return Bin(np.empty(0), 0, 0, 0, None)
    return whole._replace(places=join_examples(places) if places else None)


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
    """A text that is divided into training and validation text, or two texts.

    A text of questions with answers, drawn for a task or read from records, is divided between
    examples; its data set marks their places. `alphabet` has the distinct characters, and
    `has_ends` is set if a new tokenizer needs an end-of-text id. `sample` returns texts of the
    training split, to train a tokenizer on.
    """

    def __init__(
        self, corpora: Sequence[Corpus], options: PrepareOptions, work: Path, on_event: OnEvent
    ) -> None:
        """Read the corpora, for training and perhaps for validation; `work` is for their spools."""
        paths = (work / f"{i}.spool" for i in range(2))
        self._spools = [read_spool(*pair, on_event) for pair in zip(corpora, paths, strict=False)]
        spool, val_spool = self._spools[0], self._spools[-1]
        documents, fraction, is_one = len(spool.ends), options.fraction, len(corpora) == 1
        self._questions = spool.corpus.questions
        by_documents = is_one and (options.split == "documents" or self._questions is not None)
        if is_one and options.split is None:
            by_documents |= documents * min(fraction, 1 - fraction) >= _ENOUGH
        self._train, self._val = (Part(s, np.array([[0, s.size]])) for s in (spool, val_spool))
        if is_one:
            self._train, self._val = spool.parts(fraction, by_documents)
            if self._questions is None and not len(self._val.ranges):
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
        ends, longer = "", ""
        if self._questions is not None:
            ends, longer = self._questions.answer_end or "", "".join(self._questions.longer)
        texts = (ends, without_marks(longer), *(s.alphabet for s in self._spools))
        self.alphabet = "".join(sorted(set().union(*texts)))
        self.has_ends = not ends and any(s.corpus.marks_ends for s in self._spools)
        self.sample = self._train.sample
        self._note_copies(on_event)

    @classmethod
    def of_task(cls, name: str, options: PrepareOptions, work: Path, on_event: OnEvent) -> Text:
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
        questions = Questions(task.question_end, "\n", longer)
        files = (TextFile(Path(name), name, examples=drawn) for drawn in (train, val))
        corpora = [
            Corpus(name, (name,), (file,), questions=questions, marks_ends=True) for file in files
        ]
        return cls(corpora, options, work, on_event)

    def _note_copies(self, on_event: OnEvent) -> None:
        """Note how many documents are equal to earlier ones, and what both splits share."""
        train, val, keys = self._train.spool, self._val.spool, self._train.spool.keys
        asked = self._questions is not None
        if train is not val:
            train_keys, val_keys = (s.keys if asked else s.line_keys() for s in (train, val))
            if shared := np.isin(val_keys, train_keys).sum():
                words = f"{shared:,} of {len(val_keys):,} {'questions' if asked else 'lines'} of "
                on_event(Note(f"{words}{val.corpus.shown} are also in {train.corpus.shown}"))
        elif copies := len(keys) - len(np.unique(keys)):
            words = f"{copies:,} of {len(keys):,} "
            if asked:
                words += "records repeat the question of another one: equal questions stand in the "
                words += "same split"
            else:
                words += "documents are copies of others"
                if self.meta.split == "documents":
                    is_val = train.held_out(Fraction(str(self.meta.val_fraction)))
                    shared = np.isin(keys[is_val], keys[~is_val]).sum()
                    words += f": {shared:,} of {is_val.sum():,} for validation are also in the "
                    words += "training split"
            on_event(Note(words))

    def write(self, folder: Path, tokenizer: Tokenizer, on_event: OnEvent) -> Meta:
        """Encode both splits, and mark their examples. Raises AttnlmError for a split of less than
        two tokens, and for text that the tokenizer can't encode."""
        tokenizer.encode(self.alphabet)  # before it takes long
        done = 0

        def told(blocks: Iterable[Bin]) -> Iterator[Bin]:
            nonlocal done
            for block in blocks:
                done += block.characters
                on_event(Progress("encode", done, self.meta.characters, "chars"))
                yield block

        # Characters take one worker: this thread, which reads and writes, has as much to do.
        workers = min(cores(), _MOST_WORKERS) if isinstance(tokenizer, BpeTokenizer) else 1
        end = None if self._questions is None else _answer_end(self._questions, tokenizer)
        splits = []
        for key, part in (("train", self._train), ("val", self._val)):
            encode = functools.partial(_encode, tokenizer, part.spool.corpus.marks_ends, end)
            with contextlib.closing(map_ahead(encode, part.blocks(), workers)) as ahead:
                split = write_bin(folder / f"{key}.bin", told(ahead))
            if split.places is not None:
                write_marks(folder / f"{key}.marks", split.places)
            splits.append(split)
        train, val = splits
        if end is not None and self._questions is not None and train.places and val.places:
            if longer := self._questions.longer:
                write_longer(folder / LONGER, longer)
            facts = ExampleFacts(
                train=len(train.places),
                val=len(val.places),
                longer=len(longer),
                question_end=self._questions.question_end,
                answer_end=end,
                val_answer_tokens=int(val.places.is_answer.sum()),
                val_answer_bytes=val.answer_bytes,
            )
            floor = None if self._questions.answer_end is None else 0.0
            return _with_counts(self.meta, splits, floor=floor, examples=facts)
        nats = None
        if len(self._spools) == 1 and self._train.spool.corpus.floor_nats:
            nats = self._train.spool.corpus.floor_nats.get(train.characters)
        return _with_counts(self.meta, splits, floor=None if nats is None else nats / val.tokens)


def _encode(tokenizer: Tokenizer, marks_ends: bool, answer_end: str | None, block: str) -> Bin:
    """Return the ids of a block of a text, or of examples whose answers end with `answer_end`."""
    text = without_marks(block)
    utf8_bytes = len(text) if text.isascii() else len(text.encode())
    if answer_end is None:
        ids = tokenizer.encode_documents(block) if marks_ends else tokenizer.encode_piece(block)
        return count(ids, tokenizer.vocab_size, len(text), utf8_bytes)
    ids, places, answer_bytes = encode_examples(block, tokenizer, answer_end)
    utf8_bytes += block.count(ANSWER_END) * len(answer_end.encode())
    return count(ids, tokenizer.vocab_size, len(text), utf8_bytes, places, answer_bytes)


def _answer_end(questions: Questions, tokenizer: Tokenizer) -> str:
    """Return the text that ends an answer; "" for the end-of-text id."""
    if questions.answer_end is not None:
        return questions.answer_end
    if tokenizer.end_of_text is not None:
        return ""
    return END_OF_TEXT if END_OF_TEXT.encode() in tokenizer.tokens else "\n"


class OwnIds:
    """Ids that the user made: they are no text, and are copied as they are."""

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


Content: TypeAlias = Text | OwnIds
