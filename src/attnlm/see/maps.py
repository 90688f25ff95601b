"""All heads' maps in a few MB, for a page that draws them.

A share of attention is a byte, in steps of 1/255. A page holds the largest shares of all maps, as
many as fit: in a short text all that are not 0. The rest of a row, 1 less what is held of it, is
divided equally among its other tokens, each of which has less than the least share that is held. So
what a page draws is never wrong by more than that share, and rows add up to 1 as they should.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnlm.see.attend import Numbers

_MOST = 700_000  # shares that a page holds, of four characters each


def packed_maps(weights_LHTT: Numbers) -> dict[str, Any]:
    """For attend.js: how many shares each row holds, and of each its column and its steps.

    Head by head, row by row, in base64 of 16-bit and 8-bit numbers; `least` is the least number of
    steps that is held.
    """
    length = weights_LHTT.shape[-1]
    steps_MTT = np.empty((weights_LHTT[..., 0, 0].size, length, length), np.uint8)
    how_many = np.zeros(256, np.int64)
    for steps_TT, weights_TT in zip(steps_MTT, weights_LHTT.reshape(steps_MTT.shape), strict=True):
        steps_TT[:] = np.rint(weights_TT * 255)
        how_many += np.bincount(steps_TT.ravel(), minlength=256)
    at_least = how_many[::-1].cumsum()[::-1]
    least = 1 + int(np.count_nonzero(at_least[1:] > _MOST))
    held_MTT = steps_MTT >= least
    return {
        "least": least,
        "counts": _base64(held_MTT.sum(-1).astype("<u2")),
        "columns": _base64(held_MTT.nonzero()[-1].astype("<u2")),
        "steps": _base64(steps_MTT[held_MTT]),
    }


def _base64(numbers: NDArray[Any]) -> str:
    return base64.b64encode(numbers.tobytes()).decode()
