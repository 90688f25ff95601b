"""The angles of rotary positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from attnlm.model.architecture import Architecture


def rotary_angles(a: Architecture) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return cosines and sines (T, D / 2) of rotary positions (Su et al., 2021).

    `rotary_factor` divides frequencies (Chen et al., 2023). If `rotary_context` is also set, as in
    Llama 3.1, the frequency of a pair that turns 4 times or more within so many positions is not
    divided, and the frequency of a pair that turns 1 to 4 times is divided in part.
    """
    frequencies = a.rotary_base ** (-np.arange(0, a.head_dim, 2, dtype=np.float64) / a.head_dim)
    if a.rotary_factor is not None:
        turns = frequencies * (a.rotary_context or 0) / (2 * np.pi)
        kept = ((turns - 1) / 3).clip(0, 1)
        frequencies = frequencies * (kept + (1 - kept) / a.rotary_factor)
    angles = np.outer(np.arange(a.block_size), frequencies)
    return np.cos(angles), np.sin(angles)
