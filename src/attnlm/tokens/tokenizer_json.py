"""Tokenizers for other tools: the `tokenizers` library's form of ours, its tokenizer.json.

Of byte pairs, tiktoken merges any two neighbours that make a token, the one of the lowest id first;
`tokenizers` merges the pairs that are listed, in their order. So every pair that makes a token is
listed, those of lower ids first, and a word that is a token is taken whole, as by tiktoken.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

from attnlm.base.errors import AttnlmError
from attnlm.tokens import byte_characters
from attnlm.tokens.tokenizer import BpeTokenizer, CharTokenizer, Tokenizer

_CHECKED, _LENGTH = 200, 100  # texts, and pieces of each
_AWKWARD = " \n\r\t\u00a0\u2028'09½²aZéßΩжשא中あ👍🏽\u0301\u200d\ufeff\U0010ffff"


def library_tokenizer(tokenizer: Tokenizer) -> Any:
    """The `tokenizers.Tokenizer` that encodes and decodes as ours does.

    Raises AttnlmError where `check_equal` finds that it does not.
    """
    if isinstance(tokenizer, CharTokenizer):
        made = _characters_tokenizer(tokenizer)
    elif isinstance(tokenizer, BpeTokenizer):
        made = pairs_tokenizer(tokenizer, listed_pairs(tokenizer))
    else:
        made = _bytes_tokenizer(tokenizer)
    check_equal(tokenizer, made)
    return made


def check_equal(tokenizer: Tokenizer, theirs: Any) -> None:
    """Compares a `tokenizers.Tokenizer` with ours, on texts of our tokens and awkward characters.

    Raises AttnlmError where they differ.
    """
    for text in _texts(tokenizer):
        ids = tokenizer.encode(text)
        found = theirs.encode(text, add_special_tokens=False).ids
        if found != ids or theirs.decode(ids, skip_special_tokens=False) != tokenizer.decode(ids):
            raise AttnlmError(
                f"this {tokenizer.name} and that of the installed tokenizers differ: "
                f"{text[:20]!r} is encoded differently",
                "install the version of tokenizers that attnlm's constraints.txt lists, or use "
                "`tokenizer` byte",
            )


def _characters_tokenizer(tokenizer: CharTokenizer) -> Any:
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as LibraryTokenizer

    # A word's model refuses an unknown word, as ours does; byte pairs would leave it out.
    id_of = {character: i for i, character in enumerate(tokenizer.characters)}
    made = LibraryTokenizer(models.WordLevel(id_of))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    return made


def _bytes_tokenizer(tokenizer: Tokenizer) -> Any:
    from tokenizers import Tokenizer as LibraryTokenizer
    from tokenizers import decoders, models, pre_tokenizers

    id_of = {byte_characters.written(byte): i for i, byte in enumerate(tokenizer.tokens)}
    made = LibraryTokenizer(models.BPE(id_of, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def pairs_tokenizer(
    tokenizer: BpeTokenizer, pairs: list[tuple[str, str]], *, whole: bool = True
) -> Any:
    """The `tokenizers.Tokenizer` of these byte pairs, in the order in which they are merged.

    `whole` says whether a word that is a token is taken at once.
    """
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as LibraryTokenizer
    from tokenizers.processors import TemplateProcessing

    ranks = enumerate(tokenizer.ranks)
    id_of = {byte_characters.written(token): rank for rank, token in ranks if token}
    made = LibraryTokenizer(models.BPE(id_of | tokenizer.special, pairs, ignore_merges=whole))
    if tokenizer.nfc:
        made.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(library_pattern(tokenizer.pattern)), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in tokenizer.special]
    )
    for text, token in tokenizer.special.items():
        if token == tokenizer.beginning:
            made.post_processor = TemplateProcessing(
                single=f"{text} $A", pair=f"{text} $A {text}:1 $B:1", special_tokens=[(text, token)]
            )
    return made


def library_pattern(pattern: str) -> str:
    """A pattern of ours as the library's regular expressions have it.

    What is possessive in ours can't match otherwise either: it is so for speed. `$` would end a
    line there, not the text.
    """
    return re.sub(r"([+*?]|\{\d,\d\})\+", r"\1", pattern).replace("$", r"\z")


def listed_pairs(tokenizer: BpeTokenizer) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a token, by the ids of what they make."""
    tokens = [byte_characters.written(token) for token in tokenizer.ranks if token]
    known = set(tokens)
    return [
        (token[:place], token[place:])
        for token in tokens
        for place in range(1, len(token))
        if token[:place] in known and token[place:] in known
    ]


def _texts(tokenizer: Tokenizer) -> Iterator[str]:
    """The same texts for the same tokenizer: of its own tokens, and of awkward characters."""
    drawn = random.Random(0)
    is_char = isinstance(tokenizer, CharTokenizer)
    for _ in range(_CHECKED):
        ids = drawn.choices(range(tokenizer.vocab_size), k=_LENGTH)
        words = [tokenizer.tokens[i].decode(errors="ignore") for i in ids]
        others = drawn.choices(_AWKWARD, k=0 if is_char else _LENGTH // 4)
        drawn.shuffle(pieces := words + others)
        yield "".join(pieces)
