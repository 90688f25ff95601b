"""Texts, records and tokenizers that several test files share."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import strategies as st

from attnlm.tokens.specs import CL100K_PATTERN, GPT2_PATTERN, O200K_PATTERN
from attnlm.tokens.tokenizer import (
    BpeTokenizer,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    train_vocabulary,
    visible,
)
from attnlm.tokens.tokenizer_json import listed_pairs
from tests.models import FRUITS

needs_gpt2 = pytest.mark.skipif(
    "ATTNLM_TEST_DATA" not in os.environ, reason="ATTNLM_TEST_DATA names no folder with GPT-2's"
)


def json_lines(texts: Iterable[object], column: str = "text") -> bytes:
    return "".join(json.dumps({"id": 1, column: text}) + "\n" for text in texts).encode()


RANKS = train_vocabulary(
    "bpe:600", 600, [FRUITS + "Don't stop: I'VE 1234 naïve  \n\n cafés …" * 40]
).ranks

TOKENIZERS = (
    ByteTokenizer(),
    CharTokenizer(" \n\r\x00aAé\u0301'\U0001f44d\ufeff\uffff\u2028<|>"),
    BpeTokenizer("bpe:600", RANKS),
    BpeTokenizer("gpt2", RANKS, vocab_size=601, end_of_text=600),
    # Some published vocabularies have unused ids around the end of text.
    BpeTokenizer("cl100k_base", RANKS, vocab_size=620, end_of_text=605),
    BpeTokenizer("o200k_base", RANKS, vocab_size=620, end_of_text=605),
    ByteTokenizer(has_end=True),
    CharTokenizer(" \nA'<|>é", has_end=True),
)


def texts(tokenizer: Tokenizer) -> Iterator[str]:
    drawn = random.Random(2)
    for _ in range(400):
        if isinstance(tokenizer, CharTokenizer):
            signs = [*tokenizer.characters, *tokenizer.special]
            yield "".join(drawn.choices(signs, k=drawn.randrange(50)))
            continue
        ends = (128, 0x3000, 0x110000)
        points = [drawn.randrange(drawn.choice(ends)) for _ in range(drawn.randrange(60))]
        yield "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)
        signs = [*" \n\r\t'sSdDLlvVrRe019aAé\u017f\u00a0/!", "<|endoftext|>", "    ", "apples"]
        yield "".join(drawn.choices(signs, k=drawn.randrange(80)))


TALE = "It's the cat, isn't it? The cat that sat on the mat; the other cat's hat.\n\n  'Twas!\n" * 9

PATTERNS = {"gpt2": GPT2_PATTERN, "cl100k_base": CL100K_PATTERN, "o200k_base": O200K_PATTERN}

# What patterns treat differently: white space of all kinds, contractions, slashes, cases, marks.
TRICKY = st.text(
    st.sampled_from(list(" \n\r\t/'s/ \n\u00a0\u3000\u2028\x1caZé字1.<|\u0301ſ"))
    | st.characters(codec="utf-8"),
    max_size=40,
)

TRAINED = train_vocabulary(
    "bpe:400", 400, [TALE + " \n\n\n    \r\n\r\n ...///\n/ 123 12 'S 'LL" * 4]
)


def published_like(name: str) -> BpeTokenizer:
    """The pattern and the special id of a published vocabulary, with few ranks."""
    size = len(TRAINED.ranks)
    return BpeTokenizer(name, TRAINED.ranks, vocab_size=size + 20, end_of_text=size + 1)


LLAMA3_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

BYTE_LEVEL: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}

BOS = "<|begin_of_text|>"

BEGIN = {"SpecialToken": {"id": BOS, "type_id": 0}}

PARTS = (
    *(" ", "  ", "\n", "\r\n", "\t", "'s", "'LL", "a", "Be", "12", "3", "½", "!", "?!", "/", "\0"),
    *("é", "e\u0301", ">\u0338", "\ufb2c", "中", "👍🏽", "\u00a0", "\u1e9e"),
    *("the", " and", "apples"),
)


def split(regex: str) -> dict[str, Any]:
    isolated = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated"}
    as_bytes = {**BYTE_LEVEL, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [{**isolated, "invert": False}, as_bytes]}


def added(token: int, text: str) -> dict[str, Any]:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {"id": token, "content": text, **dict.fromkeys(flags, False)}


def tokenizer_json(first_id: int, special: dict[str, int], **parts: Any) -> dict[str, Any]:
    """Byte pairs with the ids from `first_id` on, in the layout of the published files."""
    tokens = [visible(token) for token in RANKS]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added(i, text) for text, i in special.items()],
        "normalizer": None,
        "post_processor": None,
        "decoder": {**BYTE_LEVEL, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "ignore_merges": True,
            "vocab": {
                **{token: first_id + i for i, token in enumerate(tokens)},
                **{text: i for text, i in special.items() if i < first_id},
            },
            "merges": list(map(list, listed_pairs(BpeTokenizer("gpt2", RANKS)))),
        },
        **parts,
    }


PUBLISHED = {
    "llama3": (
        tokenizer_json(
            0,
            {BOS: 600, "<|end_of_text|>": 601, "<|eot_id|>": 602},
            pre_tokenizer=split(LLAMA3_REGEX),
            post_processor={
                "type": "Sequence",
                "processors": [
                    {**BYTE_LEVEL, "use_regex": True},
                    {
                        "type": "TemplateProcessing",
                        "single": [BEGIN, {"Sequence": {"id": "A", "type_id": 0}}],
                        "pair": [BEGIN, {"Sequence": {"id": "B", "type_id": 1}}],
                        "special_tokens": {BOS: {"id": BOS, "ids": [600], "tokens": [BOS]}},
                    },
                ],
            },
        ),
        (601, 600),
    ),
    "qwen2": (
        tokenizer_json(
            0,
            {"<|endoftext|>": 600, "<|im_start|>": 601, "<think>": 602},
            pre_tokenizer=split(LLAMA3_REGEX.replace("{1,3}", "")),
            normalizer={"type": "NFC"},
            post_processor={**BYTE_LEVEL, "use_regex": False},
        ),
        (600, None),
    ),
    "smollm": (
        tokenizer_json(
            3,
            {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2},
            pre_tokenizer={
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Digits", "individual_digits": True},
                    {**BYTE_LEVEL, "use_regex": True},
                ],
            },
        ),
        (0, None),
    ),
}


def texts_with_special(special: list[str], count: int = 150) -> list[str]:
    drawn = random.Random(1)
    return ["".join(drawn.choices([*PARTS, *special], k=40)) for _ in range(count)]
