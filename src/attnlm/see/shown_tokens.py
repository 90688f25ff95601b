"""Check and encode what a run's model reads, and make tokens visible."""

from __future__ import annotations

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.runs.run import Run
from attnlm.tokens.tokenizer import Tokenizer

_SHOWN = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"}


def check_windows(windows: int) -> None:
    """Raise UsageError for an invalid number of windows to score heads on."""
    if not 1 <= windows <= 10**5:
        raise UsageError(f"invalid value for `windows`: {windows}", "it must be 1 to 100000")


def ids_within_context(run: Run, text: str) -> list[int]:
    """Return at least one id: ids of `text`, after the beginning token if the tokenizer has one.

    Raises UsageError for an empty text, AttnlmError if the text has more than block_size tokens or
    if the vocabulary lacks one of its characters.
    """
    if not isinstance(text, str):
        kind = type(text).__name__
        raise UsageError(f"the text is a {kind}", "the text comes first, then the run")
    if not text:
        raise UsageError("the text is empty", "use at least one character")
    ids = run.tokenizer.encode_from_start(text)
    limit = run.config.spec.block_size
    if len(ids) > limit:
        raise AttnlmError(
            f"the text has {len(ids)} tokens, more than the context of {run.name}, {limit}",
            f"use a text of at most {limit} tokens, or train with a larger `block_size`",
        )
    return ids


def token_texts(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """Return each token decoded separately; bytes of incomplete characters become U+FFFD."""
    return [tokenizer.decode([i]) for i in ids]


def visible(text: str) -> str:
    """Return a text with symbols for spaces and line ends, and other invisible characters
    escaped."""
    return "".join(
        _SHOWN.get(c) or (c if c.isprintable() else c.encode("unicode_escape").decode())
        for c in text
    )
