"""Tokenizers, which convert text to ids and back: by characters, bytes, byte pairs, or numbers."""

from __future__ import annotations

import abc
import base64
import hashlib
import itertools
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import Note, OnEvent, ignore
from attnlm.base.files import file_hash, read_json
from attnlm.base.formatting import listed
from attnlm.text.download import fetch_cached
from attnlm.text.text_files import BLOCK, END
from attnlm.tokens.specs import IMPORTED, bpe_size, pattern_of

END_OF_TEXT = "<|endoftext|>"
BYTES = [bytes([byte]) for byte in range(256)]

_FORMAT = 1
_COPY_AGAIN = "copy it again from its source, or prepare the text again"
_MAX_VOCABULARY = 2**21  # ids: more than Unicode has characters
_NO_BYTE = 255  # in `_id_of_ascii`: the character has no id, or an id above 254
# No token or lookahead of the patterns in use crosses these places: before a space that follows
# text; and between a line end that follows text and the text of the next line, except a slash (in
# o200k_base, a slash belongs to the line end before it).
_CUT = re.compile(r"(?s).+(?:(?<=\S)(?= )|(?<=\S\n)(?=[^\s/]))")


Ids: TypeAlias = NDArray[np.unsignedinteger[Any]]


class Tokenizer(abc.ABC):
    """A vocabulary, with the conversion of text to ids and back.

    `name` is the spec, such as "bpe:512". Ids are below `vocab_size`, and `tokens` are the bytes of
    each id. `special` maps special texts to their ids. `end_of_text` is the id of `end_text`,
    "<|endoftext|>" or another special text; `newline` is the id of "\\n", and `beginning` the id
    that a text begins with; each may be None. `dataset` is the name of the data set with this
    tokenizer, if known.
    """

    dataset: str | None = None
    beginning: int | None = None

    def __init__(
        self,
        name: str,
        tokens: Sequence[bytes],
        special: Mapping[str, int],
        end_of_text: int | None = None,
    ) -> None:
        self.name = name
        self.vocab_size = len(tokens)
        self.tokens = tokens
        self.special = special
        self.end_of_text = special.get(END_OF_TEXT) if end_of_text is None else end_of_text
        self.end_text = next((t for t, i in special.items() if i == self.end_of_text), "")
        self.newline = tokens.index(b"\n") if b"\n" in tokens else None
        self._special = re.compile(f"({'|'.join(map(re.escape, special)) or '(?!)'})")

    @property
    def first(self) -> int:
        """Return the id to sample from without a prompt: `beginning`, else `newline`, else
        `end_of_text`, else 0."""
        choices = (self.beginning, self.newline, self.end_of_text)
        return next((token for token in choices if token is not None), 0)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`. `decode` restores the text; a model takes torch.tensor([ids]).

        Raises AttnlmError if the vocabulary lacks a character, or the text is not Unicode.
        """
        ids: list[int] = self.encode_array(text).tolist()
        return ids

    def encode_array(self, text: str) -> Ids:
        """Return the same ids of `text` as `encode`, but in a NumPy array."""
        blocks = (text[i : i + BLOCK] for i in range(0, len(text), BLOCK))
        ids = map(self.encode_piece, safe_blocks(blocks))
        return np.concatenate([np.empty(0, np.uint32), *ids])

    def encode_from_start(self, text: str) -> list[int]:
        """Return the ids of `text`. The first is the id `beginning`, if the tokenizer has one."""
        ids = self.encode(text)
        if self.beginning is None or ids[:1] == [self.beginning]:
            return ids
        return [self.beginning, *ids]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; bytes that never complete a character become U+FFFD.

        Raises UsageError if an id is outside of the vocabulary.
        """
        ids = list(ids)
        size = len(self.tokens)
        for token in ids:
            if not 0 <= token < size:
                raise UsageError(f"there is no id {token}", f"ids are from 0 to {size - 1}")
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the UTF-8 bytes of `ids`. These bytes may begin or end within a character."""
        return b"".join(self.tokens[token] for token in ids)

    def to_json(self) -> dict[str, Any]:
        """Return all data of the tokenizer as JSON values. Equal tokenizers return equal values."""
        end = {} if self.end_of_text is None else {"end_of_text": self.end_of_text}
        return {"format": _FORMAT, "name": self.name, **end}

    def encode_piece(self, text: str) -> Ids:
        """Return the ids of a text of at most `BLOCK` characters, as uint8, uint16 or uint32."""
        if not self.special:
            return self.encode_ordinary(text)
        parts = self._special.split(text)  # odd parts are special
        parts_ids = [
            np.array([self.special[part]], np.uint32) if i % 2 else self.encode_ordinary(part)
            for i, part in enumerate(parts)
        ]
        return np.concatenate(parts_ids) if parts[1:] else parts_ids[0]

    def encode_documents(self, block: str) -> Ids:
        """Return the ids of a block, with the end-of-text id at the ends of its documents.

        A special text in the block itself, such as "<|endoftext|>", is encoded as ordinary text.
        """
        end = np.array([self.end_of_text], np.uint32)
        parts = [ids for text in block.split(END) for ids in (self.encode_ordinary(text), end)]
        return np.concatenate(parts[:-1])

    @abc.abstractmethod
    def encode_ordinary(self, text: str) -> Ids:
        """Return the ids of `text`; special texts, such as "<|endoftext|>", are ordinary text."""


def _with_end(units: Sequence[bytes], has_end: bool) -> tuple[list[bytes], dict[str, int]]:
    """Return the tokens of these units and, if `has_end`, the last one, which ends a text."""
    special = {END_OF_TEXT: len(units)} if has_end else {}
    return [*units, *map(str.encode, special)], special


class CharTokenizer(Tokenizer):
    """A tokenizer with one id for each of `characters`, in their order.

    If `has_end` is set, "<|endoftext|>" has the last id.
    """

    def __init__(self, characters: str, *, has_end: bool = False) -> None:
        super().__init__("char", *_with_end([c.encode() for c in characters], has_end))
        self.characters = characters
        dtype = np.dtype(np.uint16 if self.vocab_size < 2**16 else np.uint32)
        self._id_of: NDArray[Any] = np.full(0x110000, self.vocab_size, dtype)
        self._id_of[code_points(characters)] = np.arange(len(characters), dtype=dtype)
        has_byte = self._id_of[:256] < min(self.vocab_size, _NO_BYTE)
        self._id_of_ascii = np.where(has_byte, self._id_of[:256], _NO_BYTE).astype("u1").tobytes()

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "characters": self.characters}

    def encode_ordinary(self, text: str) -> Ids:
        if text.isascii():
            # Long parts of many texts are ASCII, for which a table of bytes is fastest.
            in_bytes = text.encode().translate(self._id_of_ascii)
            if _NO_BYTE not in in_bytes:
                return np.frombuffer(in_bytes, np.uint8)
        ids: Ids = self._id_of.take(code_points(text))
        if ids.max() == self.vocab_size:
            unknown = (text[i] for i in np.flatnonzero(ids == self.vocab_size))
            missing = list(map(repr, dict.fromkeys(unknown)))
            of = f" of {self.dataset}" if self.dataset else ""
            raise AttnlmError(
                f"the vocabulary{of} lacks {listed(missing)}",
                "leave them out: a run keeps its vocabulary; a new model reads any text if it is "
                "prepared with `tokenizer` byte",
            )
        return ids


class ByteTokenizer(Tokenizer):
    """A tokenizer with one id for each of the 256 bytes. It encodes any text, in UTF-8.

    If `has_end` is set, "<|endoftext|>" has the last id.
    """

    def __init__(self, *, has_end: bool = False) -> None:
        super().__init__("byte", *_with_end(BYTES, has_end))

    def encode_ordinary(self, text: str) -> Ids:
        return np.frombuffer(encode_unicode(text, "utf-8"), np.uint8)


class IdsTokenizer(Tokenizer):
    """A tokenizer of ids that stand for no text. They are written as numbers: " 3 1 4"."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__("ids", [f" {i}".encode() for i in range(vocab_size)], {})

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "vocab_size": self.vocab_size}

    def encode_ordinary(self, text: str) -> Ids:
        words = text.split()
        for word in words:
            if not re.fullmatch("[0-9]{1,9}", word) or int(word) >= self.vocab_size:
                raise AttnlmError(
                    f"{word!r} is no id from 0 to {self.vocab_size - 1:,}",
                    "write ids as numbers with blanks between them, such as 3 1 4",
                )
        return np.array(words, np.uint32)


class BpeTokenizer(Tokenizer):
    """Byte-pair encoding (Sennrich et al., 2016) of UTF-8 bytes (Radford et al., 2019).

    `ranks` lists the bytes of ids 0, 1, 2 …, in the order of merges. The bytes are empty for an id
    that is neither a byte nor a merge. `pattern_of(name)` splits a text into words, and bytes are
    merged only within words. `special` maps special texts to their ids. If no text in `special` has
    the id `end_of_text`, "<|endoftext|>" gets this id. If `nfc` is set, text is first normalised to
    Unicode's form NFC. Raises ValueError if the arguments don't make a valid tokenizer.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[bytes],
        *,
        vocab_size: int | None = None,
        end_of_text: int | None = None,
        special: Mapping[str, int] | None = None,
        beginning: int | None = None,
        nfc: bool = False,
    ) -> None:
        special = dict(special or {})
        if end_of_text is not None and end_of_text not in special.values():
            special[END_OF_TEXT] = end_of_text
        vocab_size = len(ranks) if vocab_size is None else vocab_size
        if vocab_size > _MAX_VOCABULARY:
            raise ValueError(f"its vocab_size is larger than {_MAX_VOCABULARY:,}")
        tokens = [*ranks, *[b""] * (vocab_size - len(ranks))]
        rank_of = {token: rank for rank, token in enumerate(ranks) if token}
        # tiktoken panics at a byte without a rank, and `except Exception` does not catch a panic.
        if len(rank_of) != sum(map(bool, ranks)) or not rank_of.keys() >= set(BYTES):
            raise ValueError("its ranks are not distinct, or lack a byte")
        for text, token in special.items():
            if not 0 <= token < len(tokens) or tokens[token]:
                raise ValueError("its special ids are out of range, or stand for two things")
            tokens[token] = text.encode()
        if len(tokens) > vocab_size:
            raise ValueError("its ids are not below its vocab_size")
        texts = sorted(special)
        is_ambiguous = any(b.startswith(a) for a, b in itertools.pairwise(texts))
        if is_ambiguous or not all(re.fullmatch(r"\S+", text) for text in texts):
            raise ValueError("its special texts are ambiguous")
        if beginning not in (None, *special.values()):
            raise ValueError("its beginning is no special text")
        super().__init__(name, tokens, special, end_of_text)
        self.pattern = pattern_of(name)
        self.ranks = ranks
        self.beginning = beginning
        self.nfc = nfc
        self._rank_of = rank_of
        self._of_thread = threading.local()

    def to_json(self) -> dict[str, Any]:
        optional_fields = {"special": self.special, "beginning": self.beginning, "nfc": self.nfc}
        return {
            "format": _FORMAT,
            "name": self.name,
            "pattern": self.pattern,
            "vocab_size": self.vocab_size,
            "end_of_text": self.end_of_text,
            "ranks": " ".join(base64.b64encode(token).decode() for token in self.ranks),
            **(optional_fields if self.special.keys() - {END_OF_TEXT} or self.nfc else {}),
        }

    def encode_ordinary(self, text: str) -> Ids:
        import tiktoken

        encode_unicode(text, "utf-8")  # for its error: tiktoken replaces what is not Unicode
        if self.nfc:
            from tokenizers.normalizers import NFC  # models were trained with its Unicode tables

            text = NFC().normalize_str(text)
        if not hasattr(self._of_thread, "encoding"):
            # Threads that share an encoding wait for each other at each word: two are then slower
            # than one.
            self._of_thread.encoding = tiktoken.Encoding(
                self.name,
                pat_str=self.pattern,
                mergeable_ranks=self._rank_of,
                special_tokens={},
            )
        ids: Ids = self._of_thread.encoding.encode_to_numpy(text, disallowed_special=())
        return ids


def safe_blocks(blocks: Iterable[str], limit: int = BLOCK) -> Iterator[str]:
    """Yield the text of `blocks` in new blocks of at most `limit` characters.

    The new blocks do not depend on how `blocks` divide the text. Each is as long as possible and
    ends at a place that no token can cross, or where a document ends. If `limit` characters have no
    such place, the block ends after `limit` characters.
    """
    rest = ""
    for block in blocks:
        rest += block
        while len(rest) > limit:
            cut = _CUT.match(rest[: limit + 1])  # the last character is only context
            place = max(cut.end() if cut else 0, rest.rfind(END, 0, limit) + 1) or limit
            yield rest[:place]
            rest = rest[place:]
    if rest:
        yield rest


def code_points(text: str) -> NDArray[np.uint32]:
    """Return the code point of each character. Raises AttnlmError for half a surrogate pair."""
    return np.frombuffer(encode_unicode(text, "utf-32-le"), "<u4")


def encode_unicode(text: str, codec: str) -> bytes:
    """Return `text` encoded by a Unicode codec. Raises AttnlmError for half a surrogate pair."""
    try:
        return text.encode(codec)
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X}"
        raise AttnlmError(
            f"the text has half a surrogate pair ({half}), which is not a character",
            "it was decoded wrongly: set the right `encoding`",
        ) from None


def load_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer whose `to_json` was written to `path`. Raises AttnlmError."""
    stored = read_json(path, sealed=True)
    try:
        if stored.pop("format") != _FORMAT:
            raise ValueError("another version of attnlm wrote it")
        name, end = stored.pop("name"), stored.pop("end_of_text", None)
        match name:
            case "ids":
                return IdsTokenizer(**stored)
            case "char":
                return CharTokenizer(**stored, has_end=end is not None)
            case "byte":
                return ByteTokenizer(**stored, has_end=end is not None)
        if name not in IMPORTED:
            bpe_size(name)
        # An unknown pattern may run forever, or stop the process.
        if stored.pop("pattern") != pattern_of(name):
            raise ValueError(f"its pattern is not that of {name}")
        ranks = [base64.b64decode(token, validate=True) for token in stored.pop("ranks").split(" ")]
        return BpeTokenizer(name, ranks, end_of_text=end, **stored)
    except (AttnlmError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise AttnlmError(f"{path} is damaged: {error}", _COPY_AGAIN) from None


# --- Byte pairs: trained on a text, or published with a language model ----------------------------

# The notation of GPT-2 and `tokenizers` for bytes: each byte is one visible character.
_VISIBLE = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
_OTHERS = [byte for byte in range(256) if byte not in _VISIBLE]
BYTE_OF = {chr(byte): byte for byte in _VISIBLE} | {chr(256 + i): b for i, b in enumerate(_OTHERS)}
"""The byte of each character, in the order of GPT-2's ids."""
_CHARACTER_OF = {byte: character for character, byte in BYTE_OF.items()}

_BLOBS = "https://openaipublic.blob.core.windows.net/"

# For each vocabulary, the URL and the hash of its token file, its end-of-text id and its size.
_PUBLISHED = {
    "gpt2": (
        _BLOBS + "gpt-2/encodings/main/vocab.bpe",
        "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
        50256,
        50257,
    ),
    "cl100k_base": (
        _BLOBS + "encodings/cl100k_base.tiktoken",
        "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
        100257,
        100277,
    ),
    "o200k_base": (
        _BLOBS + "encodings/o200k_base.tiktoken",
        "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
        199999,
        200019,
    ),
}
# Characters given to the trainer at a time. Its time grows with the square of a word's length, and
# a text without spaces is one word.
_TRAINING_PIECE = 2**10


def visible(token: bytes) -> str:
    """Return the bytes of a token as visible characters."""
    return "".join(_CHARACTER_OF[byte] for byte in token)


def token_bytes(shown: str) -> bytes:
    """Return the bytes of a token that `visible` shows. Raises KeyError for other characters."""
    return bytes(BYTE_OF[character] for character in shown)


def train_vocabulary(
    name: str,
    size: int,
    sample: Sequence[str],
    on_event: OnEvent = ignore,
    *,
    has_end: bool = False,
) -> BpeTokenizer:
    """Return a vocabulary of `size` ids: the 256 bytes, then the most frequent merges of `sample`.

    If `has_end` is set, the id of "<|endoftext|>" follows, as one more. If the sample has too few
    pairs to merge, the vocabulary is smaller, and a Note says so.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    trained.train_from_iterator(safe_blocks(sample, _TRAINING_PIECE), trainer)
    id_of: dict[str, int] = trained.get_vocab()
    # Two merges of the trainer may make the same bytes. Both have the id of the first merge, since
    # ranks have one id for each token.
    merged = map(token_bytes, sorted(id_of, key=id_of.__getitem__)[256:])
    ranks = [*BYTES, *merged]
    if len(ranks) < size:
        on_event(Note(f"the text is too short for {size:,} ids; {len(ranks):,} were made"))
    end = len(ranks) if has_end else None
    return BpeTokenizer(name, ranks, vocab_size=len(ranks) + has_end, end_of_text=end)


def load_published(
    name: str, *, spool: Path, offline: bool = False, on_event: OnEvent = ignore
) -> BpeTokenizer:
    """Return gpt2, cl100k_base or o200k_base from the cache of tiktoken or attnlm, or the network.

    A download that can't be kept in attnlm's cache is left in the folder `spool`.
    """
    url, sha256, end_of_text, vocab_size = _PUBLISHED[name]
    path = Path(os.environ.get("TIKTOKEN_CACHE_DIR", ""), hashlib.sha1(url.encode()).hexdigest())
    if not path.is_file() or file_hash(path) != sha256:
        try:
            path = fetch_cached(
                url, url.rpartition("/")[2], sha256, spool, offline=offline, on_event=on_event
            )
        except AttnlmError as error:
            raise AttnlmError(
                error.message,
                "use `tokenizer` bpe:1024, which needs no network, or set TIKTOKEN_CACHE_DIR to a "
                "copy of tiktoken's cache",
            ) from error
    lines = path.read_text(encoding="utf-8").splitlines()
    if name == "gpt2":  # a line with the version, then a merge in each line
        merges = [token_bytes(merge.replace(" ", "")) for merge in lines[1:]]
        ranks = [*(bytes([byte]) for byte in BYTE_OF.values()), *merges]
    else:  # in each line a token in base64, and its rank
        ranks = [base64.b64decode(line.split()[0]) for line in lines]
    return BpeTokenizer(name, ranks, vocab_size=vocab_size, end_of_text=end_of_text)
