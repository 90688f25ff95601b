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
from attnlm.tokens.specs import IMPORTED, PUBLISHED
from attnlm.tokens.split_patterns import pattern_of
from attnlm.tokens.tokenizer import (
    END_OF_TEXT,
    BpeTokenizer,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    are_apart,
)
from attnlm.tokens.tokenizer_json import check_equal, library_pattern, pairs_tokenizer

_NAMES = (*PUBLISHED, *IMPORTED)
_HINT = f"attnlm has byte-level pairs with the patterns of {', '.join(_NAMES)}"
_PATTERNS = {library_pattern(pattern_of(name)): name for name in _NAMES}
_ENDS = (END_OF_TEXT, "<|end_of_text|>")  # Llama 3's is the second
_DIGITS = {"type": "Digits", "individual_digits": True}
_BYTES = {"type": "ByteLevel", "add_prefix_space": False}
_CHARACTERS = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated"}


def read_tokenizer(content: Mapping[str, Any], vocab_size: int) -> Tokenizer:
    """Ours that encodes and decodes as a tokenizer.json, for a model of `vocab_size` ids.

    Raises AttnlmError, with the reason, where there is none.
    """
    try:
        for key in ("truncation", "padding"):
            _expect(key, content.get(key), content.get(key) is None)
        model, splits = content["model"], content["pre_tokenizer"]
        kind, decoder, special = model["type"], _kind(content.get("decoder")), _special(content)
        normaliser, beginning = content.get("normalizer"), _beginning(content.get("post_processor"))
        if kind == "WordLevel" and _has(splits, _CHARACTERS) and not splits.get("invert"):
            _expect("normalizer", normaliser, normaliser is None)
            _expect("decoder", decoder, decoder == "Fuse" and not special and beginning is None)
            return _characters(model["vocab"], vocab_size)
        _expect("model", kind, kind == "BPE")
        for key in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"):
            _expect(key, model.get(key), not model.get(key))
        _expect("byte_fallback", True, not model.get("byte_fallback"))
        _expect("decoder", decoder, decoder == "ByteLevel")
        _expect("normalizer", normaliser, normaliser in (None, {"type": "NFC"}))
        merges = [
            merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]
        ]
        if _has(splits, {**_BYTES, "use_regex": False}):
            _expect("the split pattern", None, not (merges or special or normaliser))
            return _bytes(model["vocab"], vocab_size)
        return _pairs(
            model["vocab"],
            merges,
            _pattern_name(splits),
            vocab_size,
            special,
            beginning=beginning,
            nfc=normaliser is not None,
            whole=bool(model.get("ignore_merges")),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        raise AttnlmError("the model's tokenizer.json is damaged", _HINT) from None


def read_vocab_and_merges(vocabulary: Mapping[str, Any], merges: str, vocab_size: int) -> Tokenizer:
    """Ours for the vocab.json and merges.txt of GPT-2. Raises AttnlmError where there is none."""
    lines = [line for line in merges.split("\n") if line and not line.startswith("#version")]
    try:
        pairs = [line.split(" ") for line in lines]
        special = {text: vocabulary[text] for text in (END_OF_TEXT,) if text in vocabulary}
        return _pairs(vocabulary, pairs, "gpt2", vocab_size, special)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise AttnlmError("the model's vocab.json or merges.txt is damaged", _HINT) from None


def _expect(what: str, value: object, holds: bool) -> None:
    if not holds:
        raise AttnlmError(
            f"the model's tokenizer has {what} {quoted(value)}, which attnlm can't express exactly",
            _HINT,
        )


def _has(part: object, expected: Mapping[str, object]) -> bool:
    return isinstance(part, dict) and expected.items() <= part.items()


def _kind(part: object) -> object:
    return part.get("type") if isinstance(part, dict) else part


def _beginning(processor: object) -> int | None:
    """The id that is put before each text. Raises AttnlmError where anything else is added."""
    parts = [processor]
    if isinstance(processor, dict) and processor.get("type") == "Sequence":
        parts = processor["processors"]
    beginning: int | None = None
    for part in parts:
        if isinstance(part, dict) and part.get("type") == "TemplateProcessing":
            pieces = [(kind, piece["id"]) for one in part["single"] for kind, piece in one.items()]
            one_before = len(pieces) == 2 and pieces[0][0] == "SpecialToken"
            _expect("post_processor", part["single"], pieces[-1:] == [("Sequence", "A")])
            _expect("post_processor", part["single"], len(pieces) == 1 or one_before)
            if one_before:
                (beginning,) = part["special_tokens"][pieces[0][1]]["ids"]
        else:
            _expect("post_processor", part, _kind(part) in (None, "ByteLevel"))
    return beginning


def _special(content: Mapping[str, Any]) -> dict[str, int]:
    """The texts that have an id of their own. Raises AttnlmError where they are not found as ours
    are."""
    special: dict[str, int] = {}
    for added in content.get("added_tokens") or []:
        widens = any(added.get(key) for key in ("lstrip", "rstrip", "single_word"))
        changes = added.get("normalized") and content.get("normalizer") is not None
        text, token = added["content"], added["id"]
        if type(text) is not str or type(token) is not int or text in special:
            raise ValueError("no text, or twice the same")
        special[text] = token
        _expect("the added token", text, not widens and not changes and are_apart([text]))
    _expect("added tokens", list(special), are_apart(special))
    return special


def _pattern_name(splits: object) -> str:
    """How text is split to words, by the name of one of our patterns."""
    parts = splits.get("pretokenizers") if isinstance(splits, dict) else None
    if _has(splits, _BYTES):
        parts = [splits]
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        parts = []
    by_gpt2 = bool(parts) and _has(parts[-1], _BYTES) and parts[-1].get("use_regex", True)
    if by_gpt2 and len(parts) == 1:
        return "gpt2"
    if by_gpt2 and len(parts) == 2 and _has(parts[0], _DIGITS):
        return "smollm"
    if len(parts) == 2 and _has(parts[1], {**_BYTES, "use_regex": False}):
        split = parts[0]
        regex = split["pattern"].get("Regex") if split.get("type") == "Split" else None
        plain = split.get("behavior") == "Isolated" and not split.get("invert")
        _expect("the split pattern", regex, plain and regex in _PATTERNS)
        return _PATTERNS[str(regex)]
    _expect("the pre_tokenizer", _kind(splits), holds=False)
    raise AssertionError


def _bytes(vocabulary: Mapping[str, int], vocab_size: int) -> Tokenizer:
    tokens = [byte_characters.read(token) for token in _in_order(vocabulary)]
    is_bytes = tokens == [bytes([byte]) for byte in range(256)] and vocab_size == 256
    _expect("the split pattern", None, is_bytes)
    return ByteTokenizer()


def _characters(vocabulary: Mapping[str, int], vocab_size: int) -> Tokenizer:
    characters = _in_order(vocabulary)
    if any(len(character) != 1 for character in characters):
        raise ValueError("tokens that are not characters")
    if len(characters) != vocab_size:
        raise AttnlmError(
            f"the model has {vocab_size:,} ids, but its tokenizer {len(characters):,} characters",
            "attnlm takes a character tokenizer only where each id of the model has a character",
        )
    return CharTokenizer("".join(characters))


def _pairs(
    vocabulary: Mapping[str, int],
    merges: Sequence[Sequence[str]],
    pattern: str,
    vocab_size: int,
    special: Mapping[str, int],
    *,
    beginning: int | None = None,
    nfc: bool = False,
    whole: bool = False,
) -> Tokenizer:
    made = [vocabulary[left + right] for left, right in merges]
    _expect("merges", "in another order than its ids", made == sorted(made))
    pairs = [(left, right) for left, right in merges if {left, right} <= vocabulary.keys()]
    if len(pairs) < len(merges):
        raise ValueError("it merges what are no tokens")
    # `tokenizers` numbers those that its model lacks itself.
    added = sorted(i for text, i in special.items() if vocabulary.get(text) != i)
    numbered = added == list(range(len(vocabulary), len(vocabulary) + len(added)))
    _expect("ids of its added tokens", added, numbered)
    ranks = _ranks({t: i for t, i in vocabulary.items() if special.get(t) != i}, vocab_size)
    end = next((special[text] for text in _ENDS if text in special), None)
    tokenizer = BpeTokenizer(
        _name(pattern, len(ranks), end, vocab_size),
        pattern_of(pattern),
        ranks,
        vocab_size=vocab_size,
        end_of_text=end,
        special=special,
        beginning=beginning,
        nfc=nfc,
    )
    check_equal(tokenizer, pairs_tokenizer(tokenizer, pairs, whole=whole))
    return tokenizer


def _ranks(vocabulary: Mapping[str, object], vocab_size: int) -> list[bytes]:
    """The bytes of each id, none where there is no such id. Raises ValueError for other ids."""
    token_of = {i: token for token, i in vocabulary.items()}
    if len(token_of) < len(vocabulary) or not all(
        type(i) is int and 0 <= i < vocab_size for i in token_of
    ):
        raise ValueError("its ids are not those of its model")
    last = max(token_of, default=-1)  # type: ignore[type-var]
    return [byte_characters.read(token_of.get(i, "")) for i in range(last + 1)]  # type: ignore[operator]


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
    if pattern != "gpt2" or (count, end, vocab_size) == (50256, 50256, 50257):
        return pattern
    return f"bpe:{count}" if 257 <= count <= 65536 else "gpt2"
