"""Tokenizers of other tools: from a tokenizer.json, where ours can be exactly that.

Everything in the file is compared with what ours mean; the rest is refused, with its name. Then the
tokenizer that the file describes is built, and ours compared with it on texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attnlm.base.errors import AttnlmError
from attnlm.base.settings import quoted
from attnlm.tokens import byte_characters
from attnlm.tokens.split_patterns import CL100K_PATTERN, GPT2_PATTERN, O200K_PATTERN
from attnlm.tokens.tokenizer import (
    END_OF_TEXT,
    BpeTokenizer,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
)
from attnlm.tokens.tokenizer_json import check_equal, library_pattern, pairs_tokenizer

_HINT = "attnlm has byte-level pairs with the patterns of gpt2, cl100k_base and o200k_base"
_PATTERNS = {
    library_pattern(pattern): pattern for pattern in (GPT2_PATTERN, CL100K_PATTERN, O200K_PATTERN)
}
_BYTES = {"type": "ByteLevel", "add_prefix_space": False}
_CHARACTERS = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated"}


def read_tokenizer(content: Mapping[str, Any], vocab_size: int) -> Tokenizer:
    """Ours that encodes and decodes as a tokenizer.json, for a model of `vocab_size` ids.

    Raises AttnlmError, with the reason, where there is none.
    """
    try:
        for key in ("normalizer", "truncation", "padding"):
            _expect(key, content.get(key), content.get(key) is None)
        model, splits, end = content["model"], content["pre_tokenizer"], _end_of_text(content)
        kind, decoder = model["type"], _kind(content.get("decoder"))
        _expect("post_processor", content.get("post_processor"), _adds_nothing(content))
        if kind == "WordLevel" and _has(splits, _CHARACTERS) and not splits.get("invert"):
            _expect("decoder", decoder, decoder == "Fuse" and end is None)
            return _characters(model["vocab"], vocab_size)
        _expect("model", kind, kind == "BPE")
        _expect("decoder", decoder, decoder == "ByteLevel")
        for key in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"):
            _expect(key, model.get(key), not model.get(key))
        _expect("byte_fallback", True, not model.get("byte_fallback"))
        pattern = _pattern(splits)
        merges = [
            merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]
        ]
        whole = bool(model.get("ignore_merges"))
        return _pairs(model["vocab"], merges, pattern, end, vocab_size, whole)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise AttnlmError("its tokenizer.json is damaged", _HINT) from None


def read_vocab_and_merges(vocabulary: Mapping[str, Any], merges: str, vocab_size: int) -> Tokenizer:
    """Ours for the vocab.json and merges.txt of GPT-2. Raises AttnlmError where there is none."""
    lines = [line for line in merges.split("\n") if line and not line.startswith("#version")]
    try:
        pairs, end = [line.split(" ") for line in lines], vocabulary.get(END_OF_TEXT)
        return _pairs(vocabulary, pairs, GPT2_PATTERN, end, vocab_size, whole=False)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise AttnlmError("its vocab.json or merges.txt is damaged", _HINT) from None


def _expect(what: str, value: object, holds: bool) -> None:
    if not holds:
        raise AttnlmError(
            f"its tokenizer has {what} {quoted(value)}, which attnlm can't express exactly", _HINT
        )


def _has(part: object, expected: Mapping[str, object]) -> bool:
    return isinstance(part, dict) and expected.items() <= part.items()


def _kind(part: object) -> object:
    return part.get("type") if isinstance(part, dict) else part


def _adds_nothing(content: Mapping[str, Any]) -> bool:
    return _kind(content.get("post_processor")) in (None, "ByteLevel")


def _end_of_text(content: Mapping[str, Any]) -> int | None:
    """The id of the only token that stands for a special text. Raises AttnlmError for others."""
    end: int | None = None
    for added in content.get("added_tokens") or []:
        widens = any(added.get(key) for key in ("lstrip", "rstrip", "single_word"))
        _expect("the added token", added["content"], added["content"] == END_OF_TEXT and not widens)
        end = added["id"]
    return end


def _pattern(splits: object) -> str | None:
    """How text is split to words: a pattern of ours, or None where it is not."""
    if _has(splits, _BYTES):
        assert isinstance(splits, dict)
        return GPT2_PATTERN if splits.get("use_regex", True) else None
    parts = splits.get("pretokenizers") if isinstance(splits, dict) else None
    if isinstance(parts, list) and len(parts) == 2 and isinstance(parts[0], dict):
        split, as_bytes = parts
        regex = split["pattern"].get("Regex") if split.get("type") == "Split" else None
        plain = split.get("behavior") == "Isolated" and not split.get("invert")
        if regex in _PATTERNS and plain and _has(as_bytes, {**_BYTES, "use_regex": False}):
            return _PATTERNS[regex]
        _expect("the split pattern", regex, holds=False)
    _expect("the pre_tokenizer", _kind(splits), holds=False)
    return None


def _characters(vocabulary: Mapping[str, int], vocab_size: int) -> Tokenizer:
    characters = _in_order(vocabulary)
    if len(characters) != vocab_size or any(len(character) != 1 for character in characters):
        raise ValueError("not a character for each id")
    return CharTokenizer("".join(characters))


def _pairs(
    vocabulary: Mapping[str, int],
    merges: Sequence[Sequence[str]],
    pattern: str | None,
    end: int | None,
    vocab_size: int,
    whole: bool,
) -> Tokenizer:
    tokens = _in_order({token: i for token, i in vocabulary.items() if i != end})
    ranks = [byte_characters.read(token) for token in tokens]
    if pattern is None:
        is_bytes = ranks == [bytes([byte]) for byte in range(256)] and vocab_size == 256
        _expect("the split pattern", None, is_bytes and not merges and end is None)
        return ByteTokenizer()
    made = [vocabulary[left + right] for left, right in merges]
    _expect("merges", "in another order than its ids", made == sorted(made))
    tokenizer = BpeTokenizer(
        _name(pattern, len(ranks), end, vocab_size),
        pattern,
        ranks,
        vocab_size=vocab_size,
        end_of_text=end,
    )
    pairs = [(left, right) for left, right in merges if {left, right} <= vocabulary.keys()]
    if len(pairs) < len(merges):
        raise ValueError("it merges what are no tokens")
    check_equal(tokenizer, pairs_tokenizer(ranks, pairs, pattern, end, whole=whole))
    return tokenizer


def _in_order(vocabulary: Mapping[str, int]) -> list[str]:
    """The tokens of the ids from 0 up. Raises ValueError where one is missing."""
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    if not _are_all(vocabulary[token] for token in tokens):
        raise ValueError("its ids are not all from 0 up")
    return tokens


def _are_all(ids: Iterable[object]) -> bool:
    return all(type(i) is int and i == place for place, i in enumerate(ids))


def _name(pattern: str, count: int, end: int | None, vocab_size: int) -> str:
    """A spec that means the same pattern; the vocabulary lies in the run's folder."""
    if pattern == CL100K_PATTERN:
        return "cl100k_base"
    if pattern == O200K_PATTERN:
        return "o200k_base"
    published = (count, end, vocab_size) == (50256, 50256, 50257)
    return f"bpe:{count}" if not published and 257 <= count <= 65536 else "gpt2"
