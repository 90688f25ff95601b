"""Text to token ids and back: by characters, by bytes, or by byte pairs."""

from __future__ import annotations

import abc
import base64
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from attnlm.base.errors import AttnlmError
from attnlm.base.files import read_json, write_json
from attnlm.tokens.specs import IMPORTED, bpe_size
from attnlm.tokens.split_patterns import pattern_of

END_OF_TEXT = "<|endoftext|>"
# Characters. tiktoken's regular expressions give up on a run of a million spaces.
PIECE = 2**18

_T = TypeVar("_T")

_FORMAT = 1
_COPY_AGAIN = "copy it again from where it came, or prepare the text again"
_MAX_FILE = 2**24  # bytes: all characters of Unicode, or several times the largest vocabulary
_MAX_VOCABULARY = 2**21  # ids: more than Unicode has characters
_NO_BYTE = 255  # in a table of bytes: there is no id, or it takes more than a byte
# No token of any pattern we use reaches over these places, nor looks across them: before a space
# that follows text; between a line's end that follows text and the text of the next line (a
# slash belongs to that line's end in o200k_base).
_CUT = re.compile(r"(?s).+(?:(?<=\S)(?= )|(?<=\S\n)(?=[^\s/]))")


class UnknownCharactersError(AttnlmError):
    """The text has characters that the vocabulary lacks."""


class Tokenizer(abc.ABC):
    """A vocabulary, and how text becomes ids in it.

    `name` is the spec that makes it, as in "bpe:512"; ids are below `vocab_size`; `end_of_text`
    is the id of "<|endoftext|>" and `newline` that of "\\n", where there is such an id;
    `beginning` is the id that a text begins with, where its models expect one. `tokens` are the
    bytes of each id. `dataset` names the data set that it is of, where that is known.
    """

    dataset: str | None = None
    beginning: int | None = None

    def __init__(self, name: str, tokens: Sequence[bytes], end_of_text: int | None = None) -> None:
        self.name = name
        self.vocab_size = len(tokens)
        self.end_of_text = end_of_text
        self.newline = tokens.index(b"\n") if b"\n" in tokens else None
        self.tokens = tokens

    def encode(self, text: str) -> list[int]:
        """The ids of `text`; `decode` gives the text back, and a model takes torch.tensor([ids]).

        Raises AttnlmError when the vocabulary lacks a character, or the text is not Unicode.
        """
        ids: list[int] = []
        for piece in safe_pieces([text]):
            ids += self.encode_piece(piece).tolist()
        return ids

    def encode_from_start(self, text: str) -> list[int]:
        """As `encode`, of a text that begins here: after `beginning`, where there is one."""
        ids = self.encode(text)
        if self.beginning is None or ids[:1] == [self.beginning]:
            return ids
        return [self.beginning, *ids]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; bytes that never complete a character become U+FFFD."""
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The UTF-8 bytes of `ids`, which may begin or end within a character."""
        return b"".join(self.tokens[token] for token in ids)

    def to_json(self) -> dict[str, Any]:
        """All of the tokenizer as JSON values, equal for equal tokenizers."""
        return {"format": _FORMAT, "name": self.name}

    @abc.abstractmethod
    def encode_piece(self, text: str) -> NDArray[np.unsignedinteger[Any]]:
        """The ids of at most `PIECE` characters, in as few bytes as come cheaply."""


class CharTokenizer(Tokenizer):
    """One id for each of `characters`, in their order."""

    def __init__(self, characters: str) -> None:
        super().__init__("char", [character.encode() for character in characters])
        self.characters = characters
        dtype = np.dtype(np.uint16 if self.vocab_size < 2**16 else np.uint32)
        self._id_of: NDArray[np.unsignedinteger[Any]]
        self._id_of = np.full(0x110000, self.vocab_size, dtype)
        self._id_of[code_points(characters)] = np.arange(self.vocab_size, dtype=dtype)
        has_byte = self._id_of[:256] < min(self.vocab_size, _NO_BYTE)
        self._id_of_ascii = np.where(has_byte, self._id_of[:256], _NO_BYTE).astype("u1").tobytes()

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "characters": self.characters}

    def encode_piece(self, text: str) -> NDArray[np.unsignedinteger[Any]]:
        if text.isascii():
            # Many texts are ASCII for long stretches, and nothing is faster than a table of bytes.
            in_bytes = text.encode().translate(self._id_of_ascii)
            if _NO_BYTE not in in_bytes:
                return np.frombuffer(in_bytes, np.uint8)
        ids: NDArray[np.unsignedinteger[Any]] = self._id_of.take(code_points(text))
        if ids.max() == self.vocab_size:
            lacking = dict.fromkeys(text[i] for i in np.flatnonzero(ids == self.vocab_size))
            more = f" and {len(lacking) - 5} more" if len(lacking) > 5 else ""
            of = f" of {self.dataset}" if self.dataset else ""
            raise UnknownCharactersError(
                f"the vocabulary{of} lacks {', '.join(map(repr, list(lacking)[:5]))}{more}",
                "leave them out, or prepare the text with `tokenizer` byte, which encodes any text",
            )
        return ids


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8: no text is unknown to it."""

    def __init__(self) -> None:
        super().__init__("byte", [bytes([byte]) for byte in range(256)])

    def encode_piece(self, text: str) -> NDArray[np.unsignedinteger[Any]]:
        return np.frombuffer(encoded(text, "utf-8"), np.uint8)


class BpeTokenizer(Tokenizer):
    """Byte-pair encoding (Sennrich et al., 2016) of UTF-8 bytes (Radford et al., 2019).

    `ranks` are the bytes of each id from 0 up, in the order of their merges, none for an id that no
    merge makes; `pattern` splits a text to the words within which bytes are merged. `special` are
    texts with an id of their own: `end_of_text`, by default that of "<|endoftext|>", and others.
    With `nfc`, text is normalised to Unicode's form NFC first. Raises ValueError when that makes no
    tokenizer.
    """

    def __init__(
        self,
        name: str,
        pattern: str,
        ranks: Sequence[bytes],
        *,
        vocab_size: int | None = None,
        end_of_text: int | None = None,
        special: Mapping[str, int] | None = None,
        beginning: int | None = None,
        nfc: bool = False,
    ) -> None:
        import tiktoken

        self.special = dict(special or {})
        if end_of_text is not None and end_of_text not in self.special.values():
            self.special[END_OF_TEXT] = end_of_text
        vocab_size = len(ranks) if vocab_size is None else vocab_size
        tokens = [*ranks, *[b""] * (vocab_size - len(ranks))]
        rank_of = {token: rank for rank, token in enumerate(ranks) if token}
        # tiktoken panics, past any `except Exception`, when it meets a byte without a rank.
        if len(rank_of) != sum(map(bool, ranks)) or not rank_of.keys() >= {
            bytes([b]) for b in range(256)
        }:
            raise ValueError("its ranks are not distinct, or lack a byte")
        for text, token in self.special.items():
            if not 0 <= token < len(tokens) or tokens[token]:
                raise ValueError("its special ids are out of range, or stand for two things")
            tokens[token] = text.encode()
        if len(tokens) > vocab_size:
            raise ValueError("its ids are not below its vocab_size")
        if not are_apart(self.special) or beginning not in (None, *self.special.values()):
            raise ValueError("its special texts can't be told apart")
        super().__init__(name, tokens, end_of_text)
        self.pattern = pattern
        self.ranks = ranks
        self.beginning = beginning
        self.end_text = next((t for t, i in self.special.items() if i == end_of_text), "")
        self.nfc = nfc
        self._special = re.compile(f"({'|'.join(map(re.escape, self.special)) or '(?!)'})")
        self._encoding = tiktoken.Encoding(
            name, pat_str=pattern, mergeable_ranks=rank_of, special_tokens=self.special
        )

    def to_json(self) -> dict[str, Any]:
        more = {"special": self.special, "beginning": self.beginning, "nfc": self.nfc}
        return {
            **super().to_json(),
            "pattern": self.pattern,
            "vocab_size": self.vocab_size,
            "end_of_text": self.end_of_text,
            "ranks": " ".join(base64.b64encode(token).decode() for token in self.ranks),
            **(more if self.special.keys() - {END_OF_TEXT} or self.nfc else {}),
        }

    def encode_piece(self, text: str) -> NDArray[np.unsignedinteger[Any]]:
        return self._encode(self.normalised(text), set(self.special))

    def encode_ordinary(self, text: str) -> NDArray[np.unsignedinteger[Any]]:
        """As `encode_piece`, where "<|endoftext|>" and the like are text like any other."""
        return self._encode(_nfc(text) if self.nfc else text, set())

    def normalised(self, text: str) -> str:
        """What is encoded in the place of `text`: the same, unless there is a normal form."""
        if not self.nfc or text.isascii():
            return text
        parts = self._special.split(text)  # of which the odd ones stay as they are
        return "".join(part if i % 2 else _nfc(part) for i, part in enumerate(parts))

    def has_special(self, text: str) -> bool:
        """Whether a text with an id of its own is in `text`."""
        return self._special.search(text) is not None

    def _encode(self, text: str, special: set[str]) -> NDArray[np.unsignedinteger[Any]]:
        encoded(text, "utf-8")  # for its error: tiktoken replaces what is not Unicode
        return self._encoding.encode_to_numpy(text, allowed_special=special, disallowed_special=())


def are_apart(special: Iterable[str]) -> bool:
    """Whether special texts can be found one way only: none begins another, or has whitespace."""
    texts = sorted(special)
    return all(re.fullmatch(r"\S+", text) for text in texts) and not any(
        later.startswith(text) for text, later in itertools.pairwise(texts)
    )


def _nfc(text: str) -> str:
    from tokenizers.normalizers import NFC  # whose tables are those of Unicode that models were fed

    encoded(text, "utf-8")  # for its error
    return str(NFC().normalize_str(text))


def safe_pieces(pieces: Iterable[str], limit: int = PIECE) -> Iterator[str]:
    """The same text in pieces of at most `limit` characters, however it comes in.

    Each piece is as long as it can be and ends where no token reaches across; where a stretch of
    `limit` characters has no such place, it ends there all the same.
    """
    buffer = ""
    for piece in pieces:
        buffer += piece
        start = 0
        while len(buffer) - start > limit:
            end = start + (safe_cut(buffer[start : start + limit + 1]) or limit)
            yield buffer[start:end]
            start = end
        buffer = buffer[start:]
    if buffer:
        yield buffer


def safe_cut(window: str) -> int | None:
    """The last place in a text that no token reaches across; its last character is only looked at.

    None where there is no such place.
    """
    cut = _CUT.match(window)
    return cut.end() if cut else None


def code_points(text: str) -> NDArray[np.uint32]:
    """The Unicode numbers of the characters, shape (characters,). Raises AttnlmError."""
    return np.frombuffer(encoded(text, "utf-32-le"), "<u4")


def encoded(text: str, codec: str) -> bytes:
    """`text` in a Unicode codec. Raises AttnlmError for half a surrogate pair."""
    try:
        return text.encode(codec)
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X}"
        raise AttnlmError(
            f"the text has half a surrogate pair ({half}), which is no character",
            "it was decoded wrongly: name its real `encoding`",
        ) from None


def save(tokenizer: Tokenizer, path: Path) -> None:
    """Writes all of the tokenizer to a JSON file, so that `load` needs nothing else."""
    write_json(path, tokenizer.to_json())


def load(path: Path) -> Tokenizer:
    """The tokenizer that `save` wrote there.

    Raises AttnlmError when the file is missing, damaged or no tokenizer of ours.
    """
    content = read_json(path, _MAX_FILE)
    if content.get("format") != _FORMAT:
        raise AttnlmError(
            f"{path} has a format that this version of attnlm doesn't know",
            "install a newer attnlm",
        )
    try:
        return _rebuilt(content)
    except (AttnlmError, ValueError) as error:
        raise AttnlmError(f"{path} is damaged: {error}", _COPY_AGAIN) from None


def _rebuilt(content: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a file's content. Raises ValueError or AttnlmError where it makes none."""
    name = _field(content, "name", str)
    if name not in IMPORTED:
        bpe_size(name)
    if name == "byte":
        return ByteTokenizer()
    if name == "char":
        characters = _field(content, "characters", str)
        if not characters or len(set(characters)) != len(characters):
            raise ValueError("its characters are not distinct, or there are none")
        return CharTokenizer(characters)
    vocab_size = _field(content, "vocab_size", int)
    if not 256 <= vocab_size <= _MAX_VOCABULARY:
        raise ValueError("its vocab_size is out of range")
    # A pattern from elsewhere may take for ever, or stop the process.
    if _field(content, "pattern", str) != pattern_of(name):
        raise ValueError(f"its pattern is not that of {name}")
    ranks = _field(content, "ranks", str).split(" ")
    ids = {
        key: None if content.get(key) is None else _field(content, key, int)
        for key in ("end_of_text", "beginning")
    }
    special = _field({"special": {}, **content}, "special", dict)
    if not all(type(token) is int for token in special.values()):
        raise ValueError("its special texts have no ids")
    return BpeTokenizer(
        name,
        content["pattern"],
        [base64.b64decode(token, validate=True) for token in ranks],
        vocab_size=vocab_size,
        special=special,
        nfc=_field({"nfc": False, **content}, "nfc", bool),
        **ids,
    )


def _field(content: dict[str, Any], key: str, kind: type[_T]) -> _T:
    value = content.get(key)
    if type(value) is not kind:
        raise ValueError(f"its {key!r} is missing or of the wrong type")
    return value
