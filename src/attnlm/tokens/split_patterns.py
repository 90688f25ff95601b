"""The regular expressions that split a text to words, within which bytes are merged."""

from __future__ import annotations

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
# As cl100k_base's was at first: it takes other words from whitespace at the end of a text.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
# Digits stand alone, and the whitespace before one is a word.
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
    """The one that belongs to a byte-pair vocabulary: GPT-2's for those of our own."""
    return _PATTERNS.get(name, GPT2_PATTERN)


def takes_line_ends(pattern: str) -> bool:
    """Whether signs have the line ends that follow them in the same word."""
    return pattern not in (GPT2_PATTERN, SMOLLM_PATTERN)
