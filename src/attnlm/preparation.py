"""A text becomes a data set: read twice in a stream, encoded, and put in place whole."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnlm import bpe
from attnlm.config import resolve
from attnlm.corpus import NEWLINES, Corpus, Source, get_corpus
from attnlm.dataset import (
    FORMAT,
    LONGEST_TEXT,
    Dataset,
    Ids,
    id_dtype,
    open_dataset,
    open_trusted,
    sampled_hash,
)
from attnlm.errors import AttnlmError, UsageError
from attnlm.events import Note, OnEvent, Progress, ignore
from attnlm.files import explaining, file_hash, replacing, write_json
from attnlm.folders import check_name, exchange, workspace, write_latest
from attnlm.parallel import cores, map_ahead
from attnlm.tokenizer import (
    PIECE,
    BpeTokenizer,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    UnknownCharactersError,
    bpe_size,
    canonical_spec,
    code_points,
    encoded,
    safe_pieces,
    save,
)
from attnlm.words import PieceEncoder, piece_encoder

# UTF-8 bytes. The trainer takes up to a hundred times as many, when no word comes twice.
_SAMPLE_BYTES = 2**22
_SAMPLE_BLOCK = 2**14  # characters
_MOST_BIGRAM_IDS = 1024
_MOST_WORKERS = 8
_PIECE = PIECE  # characters encoded at once


def prepare(
    source: Source | Iterable[Source] | None = None,
    *,
    tokenizer: str = "char",
    val_fraction: float = 0.1,
    val_file: str | os.PathLike[str] | None = None,
    name: str | None = None,
    data_dir: str | Path = "data",
    encoding: str = "utf-8",
    newlines: str = "keep",
    offline: bool = False,
    force: bool = False,
    on_event: OnEvent | None = None,
) -> Dataset:
    """Encodes a text as the data set `name` in `data_dir`, and makes it the latest.

    `source`, one or several, is what `corpus.get_corpus` takes. The last `val_fraction` of its
    characters are the validation split; or, with `val_file`, the whole of that text. Line ends
    are kept as they are, or CR LF and CR become LF with `newlines` "unix". A data set with the
    same content is left as it is, one with other content is replaced only with `force`.

    Raises UsageError for arguments that make no sense, AttnlmError for a text that can't be had,
    read, split or encoded, and for files that can't be written. What was there stays then.
    """
    on_event = on_event or ignore
    tokenizer = canonical_spec(tokenizer)
    bpe_size(tokenizer)  # for its error
    if newlines not in NEWLINES:
        raise UsageError(f"--newlines can't be {newlines!r}", "give keep or unix")
    if not 0 < val_fraction < 1:
        raise UsageError(f"--val-fraction can't be {val_fraction}", "it lies between 0 and 1")
    if name is not None:
        check_name(name, "--name")
    data_dir = Path(data_dir)
    hint = "free some space, or name another --data-dir"
    with explaining(data_dir, hint), workspace(data_dir) as work:

        def read(place: Source | Iterable[Source] | None) -> _Text:
            corpus = get_corpus(
                place,
                encoding=encoding,
                newlines=newlines,
                offline=offline,
                spool=work,
                on_event=on_event,
            )
            return _read(corpus, on_event)

        if val_file is None:
            split = _Split(read(source), float(val_fraction), None)
        else:
            split = _Split(read(source), None, read(Path(val_file)))
        name = name or f"{split.text.corpus.name}-{tokenizer.replace(':', '')}"
        target = data_dir / name
        if _is_prepared(target, tokenizer, split, force):
            text_hash = f"{split.text.sha256[:12]}…"
            on_event(Note(f"{target} is prepared already, from the same text ({text_hash})"))
        else:
            chosen = _tokenizer(tokenizer, split, work, offline, on_event)
            _build(work / "new", name, split, chosen, on_event)
            _install(work / "new", target, lambda: _is_prepared(target, tokenizer, split, force))
        write_latest(data_dir, name)
        dataset = open_trusted(target)
    most, usual = dataset.largest_block_size, resolve({}).model.block_size
    if most < usual:
        on_event(
            Note(
                f"{name} is too small for the default context of {usual} tokens: "
                f"train with --block-size {most} or less, or prepare a longer text"
            )
        )
    return dataset


# --- The text, and where it is split --------------------------------------------------------------


@dataclass(frozen=True)
class _Text:
    """A corpus that was read once. `sha256` is of its UTF-8, `distinct` sorted."""

    corpus: Corpus
    characters: int
    utf8_bytes: int
    sha256: str
    distinct: str

    def pieces(self) -> Iterator[str]:
        """The text again. Raises AttnlmError at its end when it is not the same any more."""
        digest = hashlib.sha256()
        for piece in self.corpus.pieces():
            digest.update(encoded(piece, "utf-8"))
            yield piece
        if digest.hexdigest() != self.sha256:
            raise self.changed()

    def changed(self) -> AttnlmError:
        """What to raise where it is not the same any more."""
        return AttnlmError(
            f"{self.corpus.shown} changed while it was read",
            "prepare it when nothing writes to it any more",
        )


@dataclass(frozen=True)
class _Split:
    """What to train and to validate on: two texts, or one less the last `val_fraction` of it."""

    text: _Text
    val_fraction: float | None
    val_text: _Text | None

    @property
    def train_characters(self) -> int:
        # As written: the double 0.9 is a little more than 9/10, which would cost a character.
        fraction = Fraction(str(self.val_fraction or 0))
        return math.floor(self.text.characters * (1 - fraction))

    @property
    def characters(self) -> int:
        return self.text.characters + (self.val_text.characters if self.val_text else 0)

    @property
    def utf8_bytes(self) -> int:
        return self.text.utf8_bytes + (self.val_text.utf8_bytes if self.val_text else 0)

    def pieces(self) -> Iterator[tuple[str, str]]:
        """Both splits, each piece with the name of its split."""
        left = self.train_characters
        for piece in self.text.pieces():
            if left > 0:
                yield "train", piece[:left]
            if left < len(piece):
                yield "val", piece[left:]
            left = max(0, left - len(piece))
        if self.val_text:
            for piece in self.val_text.pieces():
                yield "val", piece

    def train_sample(self) -> list[str]:
        """The training split, or blocks spread evenly over it when it is large."""
        share = min(Fraction(1), Fraction(_SAMPLE_BYTES, self.text.utf8_bytes))
        stride = math.ceil(_SAMPLE_BLOCK / share)
        blocks = []
        position = 0
        for _, piece in itertools.takewhile(lambda item: item[0] == "train", self.pieces()):
            for start in range(-(position % stride), len(piece), stride):
                blocks.append(piece[max(start, 0) : max(start + _SAMPLE_BLOCK, 0)])
            position += len(piece)
        return blocks


def _read(corpus: Corpus, on_event: OnEvent) -> _Text:
    """Reads a corpus once, for its counts and its hash. Raises AttnlmError when it is empty."""
    characters = utf8_bytes = 0
    digest = hashlib.sha256()
    is_there = np.zeros(0x110000, np.bool_)

    def survey(piece: str) -> tuple[int, bytes, NDArray[np.unsignedinteger[Any]]]:
        utf8 = encoded(piece, "utf-8")
        return len(piece), utf8, _newcomers(piece, utf8, is_there)

    with contextlib.closing(map_ahead(survey, corpus.pieces())) as surveys:
        for length, utf8, newcomers in surveys:
            digest.update(utf8)
            is_there[newcomers] = True
            characters += length
            utf8_bytes += len(utf8)
            on_event(Progress("read", characters, None, "chars"))
    if characters == 0:
        raise AttnlmError(f"{corpus.shown} is empty", "give a text with something in it")
    distinct = "".join(map(chr, np.flatnonzero(is_there)))
    if "\r" in distinct:
        on_event(
            Note(
                f"there are carriage returns in {corpus.shown}, as Windows ends lines (CR LF): "
                "they are kept; --newlines unix makes plain newlines of them"
            )
        )
    return _Text(corpus, characters, utf8_bytes, digest.hexdigest(), distinct)


def _newcomers(
    piece: str, utf8: bytes, is_there: NDArray[np.bool_]
) -> NDArray[np.unsignedinteger[Any]]:
    """The code points of `piece` that are not there yet, each as often as it comes."""
    if piece.isascii():
        known = np.flatnonzero(is_there[:128]).astype(np.uint8).tobytes()
        return np.frombuffer(utf8.translate(None, known), np.uint8)
    points = code_points(piece)
    return points[~is_there.take(points)]


def _tokenizer(
    spec: str, split: _Split, spool: Path, offline: bool, on_event: OnEvent
) -> Tokenizer:
    """The tokenizer of that spec: of the whole text for char, of the training split for bpe:N."""
    size = bpe_size(spec)
    if size is not None:
        return bpe.train(spec, size, split.train_sample(), on_event)
    if spec == "char":
        texts = filter(None, (split.text, split.val_text))
        return CharTokenizer("".join(sorted(set().union(*(text.distinct for text in texts)))))
    if spec == "byte":
        return ByteTokenizer()
    return bpe.published(spec, spool=spool, offline=offline, on_event=on_event)


# --- What goes into the folder --------------------------------------------------------------------


@dataclass(frozen=True)
class _Bin:
    """A file of ids that was written; `utf8_bytes` are those of the text.

    `pair_counts`, shape (V, V), says how often each id (row) is followed by each (column); it is
    None for large vocabularies.
    """

    tokens: int
    utf8_bytes: int
    sha256: str
    pair_counts: NDArray[np.int64] | None


def _build(folder: Path, name: str, split: _Split, tokenizer: Tokenizer, on_event: OnEvent) -> None:
    """Makes `folder` a whole data set, with meta.json as its last file."""
    folder.mkdir()
    bins = _write_bins(folder, split, tokenizer, on_event)
    save(tokenizer, folder / "tokenizer.json")
    text, val_text, val_tokens = split.text, split.val_text, bins["val"].tokens
    floor_nats = None
    if text.corpus.floor_nats and not val_text:
        floor_nats = text.corpus.floor_nats.get(split.train_characters)
    meta = {
        "format": FORMAT,
        "name": name,
        "source": text.corpus.source[:LONGEST_TEXT],
        "sources": text.corpus.sources,
        "source_sha256": text.sha256,
        "val_source": val_text.corpus.source[:LONGEST_TEXT] if val_text else None,
        "val_source_sha256": val_text.sha256 if val_text else None,
        "encoding": text.corpus.encoding,
        "newlines": text.corpus.newlines,
        "val_fraction": split.val_fraction,
        "characters": split.characters,
        "train_characters": split.train_characters,
        "val_characters": split.characters - split.train_characters,
        "val_bytes": bins["val"].utf8_bytes,
        "tokenizer": tokenizer.name,
        "tokenizer_sha256": file_hash(folder / "tokenizer.json"),
        "vocab_size": tokenizer.vocab_size,
        "dtype": id_dtype(tokenizer.vocab_size).name,
        "bigram_loss": _bigram_loss(bins["train"], bins["val"]),
        "floor": None if floor_nats is None else floor_nats / val_tokens,
    }
    for key, written in bins.items():
        meta[f"{key}_tokens"] = written.tokens
        meta[f"{key}_sha256"] = written.sha256
        meta[f"{key}_sampled_sha256"] = sampled_hash(folder / f"{key}.bin")
    write_json(folder / "meta.json", meta)


def _write_bins(
    folder: Path, split: _Split, tokenizer: Tokenizer, on_event: OnEvent
) -> dict[str, _Bin]:
    """Encodes both splits. Raises AttnlmError when one of them has less than two tokens."""
    done = 0

    def count(characters: int) -> None:
        nonlocal done
        done += characters
        on_event(Progress("encode", done, split.characters, "chars"))

    encode_piece = piece_encoder(tokenizer, split.utf8_bytes)
    bins = {}
    for key, pieces in itertools.groupby(split.pieces(), itemgetter(0)):
        try:
            bins[key] = _write_bin(
                folder / f"{key}.bin", map(itemgetter(1), pieces), tokenizer, encode_piece, count
            )
        except UnknownCharactersError:  # the vocabulary was that of the whole text
            text = split.val_text if key == "val" and split.val_text else split.text
            raise text.changed() from None
    for key, title in (("train", "training"), ("val", "validation")):
        if key not in bins or bins[key].tokens < 2:
            text = split.val_text if key == "val" and split.val_text else split.text
            raise AttnlmError(
                f"the {title} split of {text.corpus.shown} has less than two tokens",
                "give a longer text" + ("" if split.val_text else ", or another --val-fraction"),
            )
    return bins


@dataclass(frozen=True)
class _Encoded:
    """The ids of a piece of text, as they are stored, and what was counted on the way."""

    ids: Ids
    characters: int
    utf8_bytes: int
    pair_counts: NDArray[np.int64] | None  # shape (V, V)


def _write_bin(
    path: Path,
    texts: Iterable[str],
    tokenizer: Tokenizer,
    encode_piece: PieceEncoder,
    count: Callable[[int], None],
) -> _Bin:
    tokens = utf8_bytes = 0
    digest = hashlib.sha256()
    pairs = _Pairs(tokenizer.vocab_size)
    workers = 1  # this thread, which reads, hashes and writes, has as much to do
    if isinstance(tokenizer, BpeTokenizer):
        texts = safe_pieces(texts, _PIECE)
        workers = min(cores(), _MOST_WORKERS)
    encode = functools.partial(_encode, encode_piece, tokenizer.vocab_size)
    encoding = map_ahead(encode, texts, workers)
    with replacing(path) as file, contextlib.closing(encoding):
        for piece in encoding:
            file.write(piece.ids.data)
            digest.update(piece.ids.data)
            tokens += len(piece.ids)
            utf8_bytes += piece.utf8_bytes
            pairs.add(piece)
            count(piece.characters)
    return _Bin(tokens, utf8_bytes, digest.hexdigest(), pairs.counts_VV)


def _encode(encode_piece: PieceEncoder, vocab_size: int, text: str) -> _Encoded:
    ids = encode_piece(text)
    return _Encoded(
        ids.astype(id_dtype(vocab_size), copy=False),
        len(text),
        len(text) if text.isascii() else len(text.encode()),
        _pair_counts(ids, vocab_size),
    )


class _Pairs:
    """How often each id (row) is followed by each (column); None for large vocabularies."""

    def __init__(self, vocab_size: int) -> None:
        shape = (vocab_size, vocab_size)
        self.counts_VV = np.zeros(shape, np.int64) if vocab_size <= _MOST_BIGRAM_IDS else None
        self._before: Ids | None = None

    def add(self, piece: _Encoded) -> None:
        """Counts the pairs in the next piece, and the one across its beginning."""
        if self.counts_VV is None or piece.pair_counts is None:
            return
        self.counts_VV += piece.pair_counts
        if self._before is not None:
            self.counts_VV[self._before[-1], piece.ids[0]] += 1
        self._before = piece.ids


def _pair_counts(
    ids: NDArray[np.unsignedinteger[Any]], vocab_size: int
) -> NDArray[np.int64] | None:
    """How often each id is followed by each, shape (V, V); None for large vocabularies."""
    if vocab_size > _MOST_BIGRAM_IDS:
        return None
    dtype = np.min_scalar_type(vocab_size**2 - 1)  # narrow is fast
    pairs = np.multiply(ids[:-1], vocab_size, dtype=dtype)
    pairs += ids[1:]
    return np.bincount(pairs, minlength=vocab_size**2).reshape(vocab_size, vocab_size)


def _bigram_loss(train: _Bin, val: _Bin) -> float | None:
    """Nats per validation token of training counts plus one; None for large vocabularies."""
    if train.pair_counts is None or val.pair_counts is None:
        return None
    counts_VV = train.pair_counts + 1
    log_p_VV = np.log(counts_VV / counts_VV.sum(axis=1, keepdims=True))
    return 0.0 - float((val.pair_counts * log_p_VV).sum() / val.pair_counts.sum())  # never −0


# --- Where the folder goes ------------------------------------------------------------------------


def _is_prepared(target: Path, spec: str, split: _Split, force: bool) -> bool:
    """Whether what is at `target` can stay; False means that it may be replaced, or is nothing.

    Raises AttnlmError when it is something else, and without `force` also when it is a data set
    that is damaged or has other content.
    """
    if not os.path.lexists(target):
        return False
    if not (target / "meta.json").is_file():
        raise AttnlmError(f"{target} exists and is not a data set", "choose another --name")
    if force:
        return False
    hint = "--force replaces it, another --name keeps it"
    try:
        there = open_dataset(target)
    except AttnlmError as error:
        raise AttnlmError(f"{target} exists, and {error}", hint) from None
    if (
        there.tokenizer.name == spec
        and there.source_sha256 == split.text.sha256
        and there.val_source_sha256 == (split.val_text.sha256 if split.val_text else None)
        and there.train_characters == split.train_characters
    ):
        return True
    raise AttnlmError(f"{target} exists with other content", hint)


def _install(new: Path, target: Path, is_prepared: Callable[[], bool]) -> None:
    """Moves the folder `new` to `target`, unless `is_prepared` what is there by then."""
    while True:
        try:
            if not os.path.lexists(target):
                new.rename(target)
            elif not is_prepared():
                exchange(new, target)
            return
        except OSError as error:
            # Somebody else put theirs there in this moment, or took it away: look at that.
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT) or not new.is_dir():
                raise
