"""Texts that are continued together, although their prompts differ in length.

Axes: B texts, S tokens that every prompt has, T steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from attnlm.generation.next_token import Ids, Probabilities, uniform_numbers
from attnlm.generation.sampling_config import SamplingConfig


class Batch:
    """Texts in windows of equal length, from the length S of the shortest prompt on.

    Each text gets one token in each step. As long as its prompt has more tokens, these take the
    place of drawn tokens, and no random numbers are used. So the windows, the random numbers and
    the tokens of a text are the same as if it were alone.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        samples: Sequence[int],
        config: SamplingConfig,
        block_size: int,
    ) -> None:
        """Make a text for each prompt, which gets `config.tokens` tokens.

        `samples` has the number of each text's stream of random numbers. The prompts have at least
        one token.
        """
        assert all(prompts), "there is always a first token"
        windows = [prompt[-block_size:] for prompt in prompts]
        shortest = min(map(len, windows))
        self.start: Ids = np.array([ids[:shortest] for ids in windows], np.int64)
        """The first S tokens of each prompt, (B, S). Of a long prompt, only the last tokens that
        fit into the context count."""
        self._rest = [ids[shortest:] for ids in windows]
        self.delays = [len(ids) for ids in self._rest]
        """For each text, the number of steps before its first drawn token."""
        self.ends = [delay + config.tokens for delay in self.delays]
        """For each text, the number of steps up to its last token. Later tokens are 0."""
        self.config = config
        self._samples = samples

    def steps(self) -> Iterator[tuple[Ids | None, Probabilities]]:
        """Yield each text's next token, (B,), and random number, (B,), for each step of the batch.

        -1 stands for a token that is drawn with the random number; None, for all tokens.
        """
        steps = max(self.ends)
        uniforms = uniform_numbers(self.config.seed, self._samples, self.delays, steps)
        all_draw = range(max(self.delays), min(self.ends))
        for step, uniforms_B in enumerate(uniforms):
            yield None if step in all_draw else self._given(step), uniforms_B

    def _given(self, step: int) -> Ids:
        texts = zip(self._rest, self.ends, strict=True)
        given = [ids[step] if step < len(ids) else -(step < end) for ids, end in texts]
        return np.array(given, np.int64)

    def drawn_tokens(self, text: int, ids: list[int], first: int) -> list[int]:
        """Return the drawn tokens among the tokens `ids` of a text in the steps from `first` on."""
        return ids[max(0, self.delays[text] - first) : max(0, self.ends[text] - first)]


def group_texts(
    prompts: Sequence[Sequence[int]], block_size: int, tokens: int, most: int
) -> list[list[int]]:
    """Divide texts among batches of at most `most` texts; return the indices of their prompts.

    The prompts of a batch differ by at most `tokens` tokens: no text of a batch waits longer for
    the others than it needs itself.
    """
    lengths = [min(len(prompt), block_size) for prompt in prompts]
    groups: list[list[int]] = []
    for index in sorted(range(len(prompts)), key=lengths.__getitem__):
        group = groups[-1] if groups else []
        if not group or len(group) == most or lengths[index] - lengths[group[0]] > tokens:
            groups.append(group := [])
        group.append(index)
    return groups
