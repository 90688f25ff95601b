"""Tokenizers by name: the specs that a user gives, and those that come with a model."""

from __future__ import annotations

import re

from attnlm.base.errors import UsageError

PUBLISHED = ("gpt2", "cl100k_base", "o200k_base")
IMPORTED = ("llama3", "qwen2", "smollm")
"""vocabularies that come with a model only"""
SPECS = "char, byte, bpe:N (N from 257 to 65536), gpt2, cl100k_base or o200k_base"


def canonical_spec(text: str) -> str:
    """The spec that is meant by a text such as "GPT-2"; the text itself where it means none."""
    bare = re.sub("[-_ ]", "", text.lower())
    for name in ("char", "byte", *PUBLISHED):
        if bare == name.replace("_", ""):
            return name
    pairs = re.fullmatch(r"bpe[-_: ]?([0-9]+)", text.strip().lower())
    return f"bpe:{pairs[1]}" if pairs else text


def bpe_size(spec: str) -> int | None:
    """N of "bpe:N", None for the other specs. Raises UsageError for what is no spec."""
    kind, colon, size = spec.partition(":")
    if kind == "bpe" and re.fullmatch(r"[1-9][0-9]{2,4}", size) and 257 <= int(size) <= 65536:
        return int(size)
    if kind == "bpe" and re.fullmatch(r"[0-9]{1,9}", size):
        raise UsageError(
            f"{spec!r} is not a tokenizer: N is too small or too large", f"choose {SPECS}"
        )
    if colon or kind not in ("char", "byte", *PUBLISHED):
        raise UsageError(f"{spec!r} is not a tokenizer", f"choose {SPECS}")
    return None
