"""Tokenizers by name: the specs that a user gives, and the patterns of byte-pair vocabularies."""

from __future__ import annotations

import re

from attnlm.base.errors import UsageError

PUBLISHED = ("gpt2", "cl100k_base", "o200k_base")
IMPORTED = ("llama3", "qwen2", "smollm")
"""Vocabularies that attnlm gets only by importing a model."""
SPECS = "char, byte, bpe:N (N from 257 to 65536), gpt2, cl100k_base or o200k_base"


def bpe_size(spec: str) -> int | None:
    """Return N of "bpe:N", or None for other specs. Raises UsageError if `spec` is not a spec."""
    if spec in ("char", "byte", *PUBLISHED):
        return None
    pairs = re.fullmatch(r"bpe:(0|[1-9][0-9]{0,8})", spec)
    if pairs and 257 <= int(pairs[1]) <= 65536:
        return int(pairs[1])
    problem = " (N is out of range)" if pairs else ""
    raise UsageError(f"unknown tokenizer: {spec!r}{problem}", f"choose from {SPECS}")


# --- The regular expressions that split a text into words; bytes are merged only in a word --------

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
CL100K_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
O200K_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The original pattern of cl100k_base: it splits whitespace at the end of a text differently.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
# Each digit is a word, and so is the whitespace before a digit.
SMOLLM_PATTERN = GPT2_PATTERN.replace(r" ?\p{N}++", r"\p{N}").replace(
    r"|\s+(?!\S)", r"|\s+(?=\p{N})|\s+(?!\S)"
)

_PATTERNS = {
    "cl100k_base": CL100K_PATTERN,
    "o200k_base": O200K_PATTERN,
    "llama3": LLAMA3_PATTERN,
    "qwen2": QWEN2_PATTERN,
    "smollm": SMOLLM_PATTERN,
}


def pattern_of(name: str) -> str:
    """Return the split pattern of a vocabulary. Vocabularies trained by attnlm use GPT-2's."""
    return _PATTERNS.get(name, GPT2_PATTERN)
