"""Settings of sampling, checked before torch is loaded."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from attnlm.base.errors import UsageError

MOST_HELD = 2**26
"""The most tokens of all samples together if memory keeps them to the end, in about 2 GB."""
MOST_CHOICES_HELD = 2**20
"""The most tokens if memory also keeps, for each token, the likeliest others and probabilities."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Settings of the choice of tokens. Raises UsageError for invalid values."""

    tokens: int = 500
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    num_samples: int = 1
    seed: int = 0
    stop: str | Sequence[str] = ()
    """Stop texts: a generated text ends before the first of them."""
    ignore_eos: bool = False
    """Continue after the end-of-text token."""

    def __post_init__(self) -> None:
        self._require(self.tokens >= 0, "tokens", "0 or more")
        finite = math.isfinite(self.temperature) and self.temperature >= 0
        self._require(finite, "temperature", "0 (greedy) or more")
        self._require(self.top_k is None or self.top_k >= 1, "top_k", "1 or more")
        self._require(self.top_p is None or 0 < self.top_p <= 1, "top_p", "above 0, and at most 1")
        self._require(1 <= self.num_samples <= 2**16, "num_samples", f"from 1 to {2**16}")
        most = max(1, MOST_HELD // max(1, self.tokens))
        words = f"at most {most} with `tokens` {self.tokens}, since memory holds all texts"
        self._require(self.num_samples <= most, "num_samples", words)
        self._require(0 <= self.seed < 2**63, "seed", "0 or more, below 2^63")
        self._require("" not in self.stop_texts, "stop", "a text of at least one character")

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """Return the stop texts as a tuple, also if `stop` is a single text."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def check_room(self, prompts: int) -> None:
        """Raise UsageError if memory can't hold the texts of so many prompts."""
        if prompts * self.num_samples * self.tokens > MOST_HELD:
            raise UsageError(
                f"the texts of {prompts:,} prompts do not fit into memory, with `tokens` "
                f"{self.tokens:,} and `num_samples` {self.num_samples:,}",
                f"together, the texts can have {MOST_HELD:,} tokens",
            )

    def _require(self, holds: bool, name: str, words: str) -> None:
        if not holds:
            raise UsageError(
                f"invalid value for `{name}`: {getattr(self, name)}", f"it must be {words}"
            )


def drawn_seed() -> int:
    """Return a random seed. Callers report the seed, so that the text can be reproduced."""
    return secrets.randbits(31)
