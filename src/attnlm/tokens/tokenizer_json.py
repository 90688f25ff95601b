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
from attnlm.tokens.tokenizer import END_OF_TEXT, BpeTokenizer, CharTokenizer, Tokenizer

_CHECKED, _LENGTH = 200, 100  # texts, and pieces of each
_AWKWARD = " \n\r\t\u00a0\u2028'09½²aZéßΩжשא中あ👍🏽\u0301\u200d\ufeff\U0010ffff"


def library_tokenizer(tokenizer: Tokenizer) -> Any:
    """The `tokenizers.Tokenizer` that encodes and decodes as ours does.

    It was compared with ours on texts made of its tokens and of awkward characters. Raises
    AttnlmError where the two differ.
    """
    made = _made(tokenizer)
    for text in _texts(tokenizer):
        ids = tokenizer.encode(text)
        theirs = made.encode(text, add_special_tokens=False).ids
        decoded = made.decode(ids, skip_special_tokens=False)
        if theirs != ids or decoded != tokenizer.decode(ids):
            raise AttnlmError(
                f"the installed tokenizers can't express this {tokenizer.name}: "
                f"it encodes {text[:20]!r} differently",
                "install the version that attnlm's constraints name, or use `tokenizer` byte",
            )
    return made


def _made(tokenizer: Tokenizer) -> Any:
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as LibraryTokenizer

    if isinstance(tokenizer, CharTokenizer):
        # A word's model refuses an unknown word, as ours does; byte pairs would leave it out.
        made = LibraryTokenizer(
            models.WordLevel({c: i for i, c in enumerate(tokenizer.characters)})
        )
        made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        made.decoder = decoders.Fuse()
        return made
    ranks = tokenizer.ranks if isinstance(tokenizer, BpeTokenizer) else tokenizer.tokens
    vocabulary = {byte_characters.written(token): rank for rank, token in enumerate(ranks)}
    merges = list(_merges(vocabulary))
    if tokenizer.end_of_text is not None:
        vocabulary[END_OF_TEXT] = tokenizer.end_of_text
    made = LibraryTokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer, made.decoder = as_bytes, decoders.ByteLevel()
    if isinstance(tokenizer, BpeTokenizer):
        split = pre_tokenizers.Split(Regex(library_pattern(tokenizer.pattern)), "isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    if tokenizer.end_of_text is not None:
        made.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return made


def library_pattern(pattern: str) -> str:
    """A pattern of ours as the library's regular expressions have it.

    What is possessive in ours can't match otherwise either: it is so for speed. `$` would end a
    line there, not the text.
    """
    return re.sub(r"([+*?}])\+", r"\1", pattern).replace("$", r"\z")


def _merges(vocabulary: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Every pair of tokens that makes a token, by the ids of what they make."""
    for token in vocabulary:  # in the order of their ids
        for place in range(1, len(token)):
            left, right = token[:place], token[place:]
            if left in vocabulary and right in vocabulary:
                yield left, right


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
