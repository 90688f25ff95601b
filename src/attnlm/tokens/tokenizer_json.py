"""Tokenizers of other tools: write and read a tokenizer.json of the `tokenizers` library.

Again and again, tiktoken merges the two neighbours that make the token with the lowest id.
`tokenizers` merges listed pairs, in the order of the list. attnlm therefore lists all pairs that
make a token, ordered by the id of this token. As in tiktoken, a word that is a token becomes this
token without merges.

If a file has a feature that attnlm's tokenizers lack, an error names the feature. Otherwise,
attnlm's tokenizer and the library's encode the same texts, to check that they are equal.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnlm.base import files
from attnlm.base.errors import AttnlmError
from attnlm.base.setting_fields import quoted
from attnlm.tokens import byte_characters
from attnlm.tokens.specs import IMPORTED, PUBLISHED, pattern_of
from attnlm.tokens.tokenizer import (
    BYTES,
    END_OF_TEXT,
    BpeTokenizer,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    are_unambiguous,
)

_CHECKED = 200
_LENGTH = 100  # number of texts to check, and of tokens in each
_AWKWARD = " \n\r\t\u00a0\u2028'09½²aZéßΩжשא中あ👍🏽\u0301\u200d\ufeff\U0010ffff"
_NAMES = (*PUBLISHED, *IMPORTED)
_HINT = f"attnlm supports byte-level BPE with the split patterns of {', '.join(_NAMES)}"
_ENDS = (END_OF_TEXT, "<|end_of_text|>")  # Llama 3's is the second
_DIGITS = {"type": "Digits", "individual_digits": True}
_BYTES = {"type": "ByteLevel", "add_prefix_space": False}
_CHARACTERS = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated"}


def library_tokenizer(tokenizer: Tokenizer) -> Any:
    """Return the `tokenizers.Tokenizer` that encodes and decodes as `tokenizer` does."""
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as LibraryTokenizer

    if isinstance(tokenizer, BpeTokenizer):
        library = _pairs_tokenizer(tokenizer)
    elif isinstance(tokenizer, CharTokenizer):
        # WordLevel rejects unknown characters, as attnlm does. Byte pairs would leave them out.
        characters = {character: i for i, character in enumerate(tokenizer.characters)}
        library = LibraryTokenizer(models.WordLevel(characters))
        library.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        library.decoder = decoders.Fuse()
        library.add_special_tokens(_added_tokens(tokenizer))
    else:
        id_of = {byte_characters.to_text(byte): i for i, byte in enumerate(BYTES)}
        library = LibraryTokenizer(models.BPE(id_of, []))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        library.decoder = decoders.ByteLevel()
        library.add_special_tokens(_added_tokens(tokenizer))
    check_equal(tokenizer, library)
    return library


def _added_tokens(tokenizer: Tokenizer) -> list[Any]:
    from tokenizers import AddedToken

    return [AddedToken(text, special=True, normalized=False) for text in tokenizer.special]


def check_equal(tokenizer: Tokenizer, library: Any) -> None:
    """Compare `tokenizer` with a `tokenizers.Tokenizer` on texts of tokens and awkward characters.

    The texts are always the same for a given tokenizer. Raises AttnlmError for a difference.
    """
    random_source = random.Random(0)
    is_char = isinstance(tokenizer, CharTokenizer)
    for _ in range(_CHECKED):
        tokens = random_source.choices(range(tokenizer.vocab_size), k=_LENGTH)
        parts = [tokenizer.tokens[i].decode(errors="ignore") for i in tokens]
        parts += random_source.choices(_AWKWARD, k=0 if is_char else _LENGTH // 4)
        random_source.shuffle(parts)
        text = "".join(parts)
        ids = tokenizer.encode(text)
        library_ids = library.encode(text, add_special_tokens=False).ids
        decoded = library.decode(ids, skip_special_tokens=False)
        if library_ids != ids or decoded != tokenizer.decode(ids):
            raise AttnlmError(
                f"{tokenizer.name} and the installed version of tokenizers encode {text[:20]!r} "
                "differently",
                "install the version of tokenizers that attnlm's constraints.txt lists, or use "
                "`tokenizer` byte",
            )


def _pairs_tokenizer(tokenizer: BpeTokenizer) -> Any:
    """Return the `tokenizers.Tokenizer` that merges the pairs of `listed_pairs`, in their order.

    A word that is a token becomes this token without merges.
    """
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as LibraryTokenizer
    from tokenizers.processors import TemplateProcessing

    ranks = enumerate(tokenizer.ranks)
    id_of = {byte_characters.to_text(token): rank for rank, token in ranks if token}
    library = LibraryTokenizer(
        models.BPE({**id_of, **tokenizer.special}, listed_pairs(tokenizer), ignore_merges=True)
    )
    if tokenizer.nfc:
        library.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(library_pattern(tokenizer.pattern)), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(_added_tokens(tokenizer))
    for text, token in tokenizer.special.items():
        if token == tokenizer.beginning:
            library.post_processor = TemplateProcessing(
                single=f"{text} $A", pair=f"{text} $A {text}:1 $B:1", special_tokens=[(text, token)]
            )
    return library


def library_pattern(pattern: str) -> str:
    """Return a pattern in the syntax of the library's regular expressions.

    Possessive quantifiers are dropped, since they only add speed and don't change a match. `$` is
    replaced, since it would match the end of a line in the library, not the end of the text.
    """
    return re.sub(r"([+*?]|\{\d,\d\})\+", r"\1", pattern).replace("$", r"\z")


def listed_pairs(tokenizer: BpeTokenizer) -> list[tuple[str, str]]:
    """Return every pair of tokens that makes a token, ordered by the id of this token."""
    tokens = dict.fromkeys(byte_characters.to_text(token) for token in tokenizer.ranks if token)
    splits = ((token[:i], token[i:]) for token in tokens for i in range(1, len(token)))
    return [(left, right) for left, right in splits if left in tokens and right in tokens]


# --- Reading --------------------------------------------------------------------------------------


def read_tokenizer(content: Mapping[str, Any], vocab_size: int) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json's content, for a model of `vocab_size` ids.

    Raises AttnlmError, with the reason, if attnlm can't encode and decode in exactly the same way.
    """
    # `transformers` stores the truncation and padding of the last call, and sets them at each call.
    content = {**content, "truncation": None, "padding": None}
    try:
        decoder = _type_of(content.get("decoder"))
        normaliser = content.get("normalizer")
        _expect("decoder", decoder, decoder in ("ByteLevel", "Fuse"))
        _expect("normalizer", normaliser, normaliser in (None, {"type": "NFC"}))
        beginning = _beginning_id(content.get("post_processor"))
        special = _special_ids(content)
        model = content["model"]
        splits = content["pre_tokenizer"]
        kind = model["type"]
        vocabulary = model["vocab"]
        ids = [i for i in vocabulary.values() if type(i) is int and 0 <= i < vocab_size]
        if len(set(ids)) < len(vocabulary):
            raise ValueError("its ids are not those of its model")
        token_of = {i: token for token, i in vocabulary.items() if special.get(token) != i}
        tokens = [token_of.get(i, "") for i in range(max(token_of, default=-1) + 1)]
        is_char = kind == "WordLevel" and _has_entries(splits, _CHARACTERS)
        if is_char or _has_entries(splits, {**_BYTES, "use_regex": False}):
            has_end = bool(special)
            plain: Tokenizer = ByteTokenizer(has_end=has_end)
            if is_char:
                plain = CharTokenizer("".join(tokens), has_end=has_end)
            # Only attnlm writes such tokenizers.
            library = _library_from_json({**content, "post_processor": None})
            _expect("the tokenizer", kind, library_tokenizer(plain).to_str() == library.to_str())
            _expect("post_processor", content.get("post_processor"), beginning is None)
            if plain.vocab_size != vocab_size:
                raise AttnlmError(
                    f"the model has {vocab_size:,} ids, but its tokenizer has {plain.vocab_size:,}",
                    "attnlm takes such a tokenizer only if each id of the model has a text",
                )
            return plain
        _expect("model", kind, kind == "BPE")
        affixes = ("continuing_subword_prefix", "end_of_word_suffix")
        for key in ("dropout", "unk_token", "byte_fallback", *affixes):
            _expect(key, model.get(key), not model.get(key))
        merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        merged_ids = [vocabulary[left + right] for left, right in merges]
        _expect("merges", "in another order than its ids", merged_ids == sorted(merged_ids))
        ranks = list(map(byte_characters.to_bytes, tokens))
        pattern = _pattern_name(splits)
        end = next((special[text] for text in _ENDS if text in special), None)
        # The name stands for the pattern. The vocabulary need not be the one of this name: it is
        # stored in a file in the run's folder.
        is_gpt2 = (len(ranks), end, vocab_size) == (50256, 50256, 50257)
        if pattern == "gpt2" and not is_gpt2 and 257 <= len(ranks) <= 65536:
            pattern = f"bpe:{len(ranks)}"
        tokenizer = BpeTokenizer(
            pattern,
            ranks,
            vocab_size=vocab_size,
            end_of_text=end,
            special=special,
            beginning=beginning,
            nfc=normaliser is not None,
        )
        # If the vocabulary lacks an added token, the library chooses the token's id.
        library = _library_from_json({**content, "post_processor": None})
        added_ids = {text: library.token_to_id(text) for text in special}
        _expect("ids of its added tokens", added_ids, added_ids == special)
        check_equal(tokenizer, library)
        return tokenizer
    except (KeyError, TypeError, ValueError, AttributeError):
        raise AttnlmError("the model's tokenizer is damaged", _HINT) from None


def read_tokenizer_files(folder: Path, vocab_size: int) -> Tokenizer:
    """Return the tokenizer in a folder: tokenizer.json, or vocab.json and merges.txt.

    Raises as `read_tokenizer` does.
    """
    if (folder / "tokenizer.json").exists():
        return read_tokenizer(files.json_object(folder / "tokenizer.json"), vocab_size)
    if not (folder / "vocab.json").exists():
        raise AttnlmError(
            f"{folder} has no tokenizer: neither tokenizer.json, nor vocab.json and merges.txt",
            "copy the folder again from its source",
        )
    merges = files.read_bytes(folder / "merges.txt").decode(errors="replace")
    return read_vocab_and_merges(files.json_object(folder / "vocab.json"), merges, vocab_size)


def read_vocab_and_merges(vocabulary: Mapping[str, Any], merges: str, vocab_size: int) -> Tokenizer:
    """Return the tokenizer of GPT-2's vocab.json and merges.txt; raise as `read_tokenizer` does."""
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    end = {"id": vocabulary.get(END_OF_TEXT), "content": END_OF_TEXT, **dict.fromkeys(flags, False)}
    lines = [line for line in merges.split("\n") if line and not line.startswith("#version")]
    content = {
        "added_tokens": [end] if END_OF_TEXT in vocabulary else [],
        "pre_tokenizer": {**_BYTES, "trim_offsets": True},
        "decoder": {**_BYTES, "trim_offsets": True},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": lines},
    }
    return read_tokenizer(content, vocab_size)


def _library_from_json(content: Mapping[str, Any]) -> Any:
    """Return the library's tokenizer. Raises ValueError if the library rejects the content."""
    from tokenizers import Tokenizer as LibraryTokenizer

    try:
        return LibraryTokenizer.from_str(json.dumps(content))
    except Exception as error:  # noqa: BLE001 - the library raises no other type
        raise ValueError(str(error)) from None


def _expect(what: str, value: object, holds: bool) -> None:
    if not holds:
        raise AttnlmError(
            f"attnlm cannot reproduce {what} {quoted(value)} of the model's tokenizer exactly",
            _HINT,
        )


def _has_entries(part: object, expected: Mapping[str, object]) -> bool:
    return isinstance(part, dict) and expected.items() <= part.items()


def _type_of(part: object) -> object:
    return part.get("type") if isinstance(part, dict) else part


def _beginning_id(processor: Any) -> int | None:
    """Return the id, if any, that a post-processor adds before each text."""
    beginning: int | None = None
    for part in processor["processors"] if _type_of(processor) == "Sequence" else [processor]:
        match part:
            case None | {"type": "ByteLevel"}:
                pass
            case {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A"}}]}:
                pass
            case {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": text}}, {"Sequence": {"id": "A"}}],
            }:
                (beginning,) = part["special_tokens"][text]["ids"]
            case _:
                _expect("post_processor", part, False)
    return beginning


def _special_ids(content: Mapping[str, Any]) -> dict[str, int]:
    """Return special texts and their ids, if attnlm would match them as the library does."""
    special: dict[str, int] = {}
    for added in content.get("added_tokens") or []:
        widens = any(added.get(key) for key in ("lstrip", "rstrip", "single_word"))
        changes = added.get("normalized") and content.get("normalizer") is not None
        text = added["content"]
        token = added["id"]
        if type(text) is not str or type(token) is not int or text in special:
            raise ValueError("no text, or twice the same")
        special[text] = token
        _expect("the added token", text, not widens and not changes and are_unambiguous([text]))
    _expect("added tokens", list(special), are_unambiguous(special))
    return special


def _pattern_name(splits: Any) -> str:
    """Return the name of attnlm's pattern that splits text as the pre_tokenizer `splits` does."""
    *before, last = splits["pretokenizers"] if _type_of(splits) == "Sequence" else [splits]
    by_gpt2 = _has_entries(last, _BYTES) and last.get("use_regex", True)
    if by_gpt2 and not before:
        return "gpt2"
    if by_gpt2 and len(before) == 1 and _has_entries(before[0], _DIGITS):
        return "smollm"
    is_plain = _has_entries(last, {**_BYTES, "use_regex": False}) and len(before) == 1
    _expect("the pre_tokenizer", _type_of(splits), is_plain and _type_of(before[0]) == "Split")
    regex = before[0]["pattern"].get("Regex")
    name_of = {library_pattern(pattern_of(name)): name for name in _NAMES}
    is_alike = before[0]["behavior"] == "Isolated" and not before[0].get("invert")
    _expect("the split pattern", regex, is_alike and regex in name_of)
    return name_of[regex]
