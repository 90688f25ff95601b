"""The stages of a run that was planned again as it went: from which step on, how many in all."""

from __future__ import annotations

import functools
import itertools
import re
from typing import NamedTuple

from attnlm.base.errors import UsageError


class Stage(NamedTuple):
    """From step `begin` on, the run was to have `steps` in all."""

    begin: int
    steps: int


@functools.lru_cache
def parsed_stages(text: str) -> tuple[Stage, ...]:
    """The stages of a text such as `0:300,120:280`. Raises UsageError for any other."""
    if re.fullmatch(r"\d{1,13}:\d{1,13}(,\d{1,13}:\d{1,13}){0,999}", text, flags=re.ASCII):
        stages = tuple(Stage(*map(int, stage.split(":"))) for stage in text.split(","))
        follow = all(
            one.begin < other.begin < one.steps for one, other in itertools.pairwise(stages)
        )
        if follow and stages[0].begin == 0 and stages[-1].begin < stages[-1].steps:
            return stages
    raise UsageError(
        f"`stages` can't be {text[:50]!r}",
        "take it from a run's config.json, such as 0:300,120:280",
    )


def written(stages: tuple[Stage, ...]) -> str:
    """The inverse."""
    return ",".join(f"{begin}:{steps}" for begin, steps in stages)
