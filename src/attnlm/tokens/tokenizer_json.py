"""Tokenizers of other tools: write and read a tokenizer.json of the `tokenizers` library.

Again and again, tiktoken merges the two neighbours that make the token with the lowest id.
`tokenizers` merges listed pairs, in the order of the list. attnlm therefore lists all pairs that
make a token, ordered by the id of this token. As in tiktoken, a word that is a token becomes this
token without merges.

attnlm's tokenizer and the library's then encode the same texts, to check that they are equal.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnlm.base import files
from attnlm.base.errors import AttnlmError
from attnlm.tokens.specs import IMPORTED, PUBLISHED, pattern_of
from attnlm.tokens.tokenizer import (
    BYTES,
    END_OF_TEXT,
    BpeTokenizer,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    token_bytes,
    visible,
)

_CHECKED = 200
_LENGTH = 100  # number of texts to check, and of tokens in each
_AWKWARD = " \n\r\t\u00a0\u2028'09½²aZéßΩжשא中あ👍🏽\u0301\u200d\ufeff\U0010ffff"
_NAMES = (*PUBLISHED, *IMPORTED)
_HINT = f"attnlm supports byte-level BPE with the split patterns of {', '.join(_NAMES)}"
_ENDS = (END_OF_TEXT, "<|end_of_text|>")  # Llama 3's is the second


def library_tokenizer(tokenizer: Tokenizer) -> Any:
    """Return the `tokenizers.Tokenizer` that encodes and decodes as `tokenizer` does."""
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as LibraryTokenizer
    from tokenizers.processors import TemplateProcessing

    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if isinstance(tokenizer, CharTokenizer):
        # WordLevel rejects unknown characters, as attnlm does. Byte pairs would leave them out.
        characters = {character: i for i, character in enumerate(tokenizer.characters)}
        library: Any = LibraryTokenizer(models.WordLevel(characters))
        library.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        library.decoder = decoders.Fuse()
    else:
        ranks: Sequence[bytes] = BYTES
        pairs: list[tuple[str, str]] = []
        library_splits: Any = as_bytes
        if isinstance(tokenizer, BpeTokenizer):
            ranks, pairs = tokenizer.ranks, listed_pairs(tokenizer)
            split = pre_tokenizers.Split(Regex(library_pattern(tokenizer.pattern)), "isolated")
            library_splits = pre_tokenizers.Sequence([split, as_bytes])
        id_of = {visible(token): rank for rank, token in enumerate(ranks) if token}
        library = LibraryTokenizer(
            models.BPE({**id_of, **tokenizer.special}, pairs, ignore_merges=True)
        )
        library.pre_tokenizer = library_splits
        library.decoder = decoders.ByteLevel()
    library.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in tokenizer.special]
    )
    if getattr(tokenizer, "nfc", False):
        library.normalizer = normalizers.NFC()
    for text, token in tokenizer.special.items():
        if token == tokenizer.beginning:
            library.post_processor = TemplateProcessing(
                single=f"{text} $A", pair=f"{text} $A {text}:1 $B:1", special_tokens=[(text, token)]
            )
    check_equal(tokenizer, library)
    return library


def check_equal(tokenizer: Tokenizer, library: Any) -> None:
    """Compare `tokenizer` with a `tokenizers.Tokenizer` on texts of tokens and awkward characters.

    The texts are always the same for a given tokenizer. Raises AttnlmError for a difference.
    """
    random_source = random.Random(0)
    awkward = "" if isinstance(tokenizer, CharTokenizer) else _AWKWARD
    for _ in range(_CHECKED):
        tokens = random_source.choices(range(tokenizer.vocab_size), k=_LENGTH)
        parts = [tokenizer.tokens[i].decode(errors="ignore") for i in tokens]
        for more in filter(None, (awkward, [*tokenizer.special])):
            parts += random_source.choices(more, k=_LENGTH // 4)
        random_source.shuffle(parts)
        text = "".join(parts)
        ids = tokenizer.encode(text)
        try:
            library_ids = library.encode(text, add_special_tokens=False).ids
        except Exception:  # noqa: BLE001 - the library raises no other type
            library_ids = None
        decoded = library.decode(ids, skip_special_tokens=False)
        if (library_ids, decoded) != (ids, tokenizer.decode(ids)):
            raise AttnlmError(
                f"{tokenizer.name} and the installed version of tokenizers encode {text[:20]!r} "
                "differently",
                "install the version of tokenizers that attnlm's constraints.txt lists, or use "
                "`tokenizer` byte",
            )


def library_pattern(pattern: str) -> str:
    """Return a pattern in the syntax of the library's regular expressions.

    Possessive quantifiers are dropped, since they only add speed and don't change a match. `$` is
    replaced, since it would match the end of a line in the library, not the end of the text.
    """
    return re.sub(r"([+*?]|\{\d,\d\})\+", r"\1", pattern).replace("$", r"\z")


def listed_pairs(tokenizer: BpeTokenizer) -> list[tuple[str, str]]:
    """Return every pair of tokens that makes a token, ordered by the id of this token."""
    tokens = dict.fromkeys(visible(token) for token in tokenizer.ranks if token)
    splits = ((token[:i], token[i:]) for token in tokens for i in range(1, len(token)))
    return [(left, right) for left, right in splits if left in tokens and right in tokens]


# --- Reading --------------------------------------------------------------------------------------


def read_tokenizer(content: Mapping[str, Any], vocab_size: int) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json's content, for a model of `vocab_size` ids.

    Raises AttnlmError if attnlm can't encode and decode in exactly the same way.
    """
    from tokenizers import Tokenizer as LibraryTokenizer

    try:
        # `transformers` stores the truncation and padding of the last call, and sets them at each.
        whole = json.dumps({**content, "truncation": None, "padding": None})
        try:
            library: Any = LibraryTokenizer.from_str(whole)
        except Exception as error:  # noqa: BLE001 - the library raises no other type
            raise ValueError(f"it is damaged: {error}") from None
        tokenizer = _tokenizer_like(library, vocab_size)
        check_equal(tokenizer, library)
        return tokenizer
    except (AttnlmError, AttributeError, KeyError, TypeError, ValueError) as error:
        reason = error.message if isinstance(error, AttnlmError) else error
        raise AttnlmError(
            f"attnlm cannot reproduce the model's tokenizer: {reason}", _HINT
        ) from None


def _tokenizer_like(library: Any, vocab_size: int) -> Tokenizer:
    """Return the tokenizer of attnlm that resembles a `tokenizers.Tokenizer`.

    Raises ValueError, or an error of another type for content that nobody writes.
    """
    content = json.loads(library.to_str())  # with every default
    model, splits = content["model"], json.dumps(content["pre_tokenizer"])
    is_normal = content["normalizer"] is None  # else it must be NFC, or a text differs
    special = {token.content: i for i, token in library.get_added_tokens_decoder().items()}
    if max(model["vocab"].values()) >= vocab_size:
        raise ValueError("its ids are not those of its model")
    token_of = {i: token for token, i in model["vocab"].items() if special.get(token) != i}
    tokens = [token_of.get(i, "") for i in range(max(token_of) + 1)]
    text = library.decode([max(token_of)])
    plain, whole = (library.encode(text, add_special_tokens=add).ids for add in (False, True))
    beginning = None if whole == plain else whole[0]
    if whole not in (plain, [beginning, *plain]):
        raise ValueError("its post_processor adds more than one id before a text")
    is_char = model["type"] == "WordLevel"
    if is_char or not model["merges"]:
        has_end = bool(special)
        made = (
            CharTokenizer("".join(tokens), has_end=has_end)
            if is_char
            else ByteTokenizer(has_end=has_end)
        )
        if (made.vocab_size, beginning, is_normal) != (vocab_size, None, True):
            raise ValueError(
                f"the model has {vocab_size:,} ids, but its tokenizer {made.vocab_size:,}, or its "
                "normalizer or post_processor changes a text"
            )
        return made
    merged_ids = [model["vocab"]["".join(pair)] for pair in model["merges"]]
    if merged_ids != sorted(merged_ids):
        raise ValueError("its merges are in another order than its ids")
    name = "smollm" if '"Digits"' in splits else "gpt2"
    if '"Regex"' in splits:  # an unknown pattern may take for ever
        names = {json.dumps(library_pattern(pattern_of(name))): name for name in _NAMES}
        name = next((names[regex] for regex in names if regex in splits), "")
        if not name or splits.count('"Regex"') > 1:
            raise ValueError("its split pattern is unknown")
    end = next((special[text] for text in _ENDS if text in special), None)
    # The name stands for the pattern. The vocabulary need not be the one of this name: it is
    # stored in a file in the run's folder.
    is_gpt2 = (len(tokens), end, vocab_size) == (50256, 50256, 50257)
    if name == "gpt2" and not is_gpt2 and 257 <= len(tokens) <= 65536:
        name = f"bpe:{len(tokens)}"
    return BpeTokenizer(
        name,
        list(map(token_bytes, tokens)),
        vocab_size=vocab_size,
        end_of_text=end,
        special=special,
        beginning=beginning,
        nfc=not is_normal,
    )


def read_tokenizer_files(folder: Path, vocab_size: int) -> Tokenizer:
    """Return the tokenizer in a folder: tokenizer.json, or GPT-2's vocab.json and merges.txt.

    Raises AttnlmError as `read_tokenizer` does, or if the folder has neither.
    """
    from tokenizers import ByteLevelBPETokenizer

    if (folder / "tokenizer.json").exists():
        return read_tokenizer(files.json_object(folder / "tokenizer.json"), vocab_size)
    pair = [folder / name for name in ("vocab.json", "merges.txt")]
    if not all(path.is_file() for path in pair):
        raise AttnlmError(
            f"{folder} has no tokenizer: neither tokenizer.json, nor vocab.json and merges.txt",
            "copy the folder again from its source",
        )
    try:
        library = ByteLevelBPETokenizer.from_file(*map(str, pair), add_prefix_space=False)
    except Exception as error:  # noqa: BLE001 - the library raises no other type
        raise AttnlmError(f"the model's tokenizer is damaged: {error}", _HINT) from None
    if library.token_to_id(END_OF_TEXT) is not None:
        library.add_special_tokens([END_OF_TEXT])
    return read_tokenizer(json.loads(library.to_str()), vocab_size)
