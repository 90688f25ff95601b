"""The angles of rotary positions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def rotary_angles(
    length: int,
    head_size: int,
    base: float,
    factor: float | None = None,
    context: int | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return cosines and sines (length, head_size / 2) of rotary positions (Su et al., 2021).

    `factor` divides frequencies (Chen et al., 2023). If `context` is also set, as in Llama 3.1, the
    frequency of a pair that turns 4 times or more within `context` positions is not divided, and
    the frequency of a pair that turns 1 to 4 times is divided in part.
    """
    frequencies = base ** (-np.arange(0, head_size, 2, dtype=np.float64) / head_size)
    if factor is not None:
        turns = frequencies * (context or 0) / (2 * np.pi)
        kept = ((turns - 1) / 3).clip(0, 1)
        frequencies = frequencies * (kept + (1 - kept) / factor)
    angles = np.outer(np.arange(length), frequencies)
    return np.cos(angles), np.sin(angles)
