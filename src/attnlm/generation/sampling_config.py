"""Settings of sampling, checked before torch is loaded."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from attnlm.base.errors import UsageError
from attnlm.base.setting_fields import check_value, fields_of, quoted, setting, settings_of


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Settings of the choice of tokens. Raises UsageError for invalid values."""

    tokens: int = setting(
        "number of tokens to generate, without the prompt", default=500, at_least=0
    )
    temperature: float = setting(
        "below 1 favours likely tokens, above 1 flattens the distribution; 0 is greedy",
        default=1.0,
        at_least=0,
    )
    top_k: int | None = setting("sample only from the K likeliest tokens; default: all", at_least=1)
    top_p: float | None = setting(
        "sample only from the likeliest tokens whose probabilities sum to P; default: all",
        above=0,
        at_most=1,
    )
    seed: int = setting(
        "random seed; default: a random one", default=0, at_least=0, at_most=2**63 - 1
    )
    num_samples: int = setting(
        "number of texts to generate, for each prompt", default=1, at_least=1, at_most=2**16
    )
    ignore_eos: bool = setting("continue after the end-of-text token", default=False)
    stop: str | Sequence[str] = ()
    """Stop texts: a generated text ends before the first of them."""

    def __post_init__(self) -> None:
        for name in SAMPLING:
            value = getattr(self, name)
            if value is not None or fields_of(SamplingConfig)[name].default is not None:
                check_value(SamplingConfig, name, value)
        is_listed = isinstance(self.stop, str | Sequence)
        if not is_listed or not all(isinstance(s, str) and s for s in self.stop_texts):
            raise UsageError(
                f"invalid value for `stop`: {quoted(self.stop)}",
                "each stop text must be a text of at least one character",
            )

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """Return the stop texts as a tuple, also if `stop` is a single text."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


SAMPLING = settings_of(SamplingConfig)
"""The settings of sampling that have a line of help."""


def draw_seed() -> int:
    """Return a random seed. Callers report the seed, so that the text can be reproduced."""
    return secrets.randbits(31)
