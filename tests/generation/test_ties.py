"""Of equally likely tokens, the lowest ids count first, whatever chooses among them."""

from __future__ import annotations

import numpy as np
import pytest

from attnlm.generation.next_token import unnormalised_probabilities

TIED = [
    [2.0, 5.0, 5.0, 1.0, 5.0],
    [0.0, 0.0, 0.0, 0.0, 0.0],
    [1.0, 7.0, 3.0, 3.0, 3.0],
]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "kept"),
    [
        (0.0, None, None, [[1], [0], [1]]),
        (1.0, 1, None, [[1], [0], [1]]),
        (1.0, None, 1e-9, [[1], [0], [1]]),
        (1.0, 2, None, [[1, 2], [0, 1], [1, 2]]),
        (0.5, 3, None, [[1, 2, 4], [0, 1, 2], [1, 2, 3]]),
    ],
)
def test_of_equally_likely_tokens_the_lowest_ids_are_kept(
    temperature: float, top_k: int | None, top_p: float | None, kept: list[list[int]]
) -> None:
    p_BV = unnormalised_probabilities(np.array(TIED, np.float32), temperature, top_k, top_p)
    assert [np.flatnonzero(row).tolist() for row in p_BV] == kept
