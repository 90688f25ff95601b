"""A head's attention maps from evaluation to evaluation, as a strip of frames in one picture."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

import numpy as np

from attnlm.see.attend import Numbers
from attnlm.see.drawing import drawing

_CELL = 6  # pixels, so that a browser that smooths what it enlarges hardly blurs the cells


def strip(maps: Sequence[Numbers]) -> str:
    """Maps (T, T) side by side, as the URL of a PNG: a mask, as opaque as the weights are large."""
    weights = np.concatenate(maps, axis=1)
    alpha_HW = np.rint(weights * 255).astype(np.uint8).repeat(_CELL, 0).repeat(_CELL, 1)
    black_HW4 = np.zeros((*alpha_HW.shape, 4), np.uint8)
    black_HW4[..., 3] = alpha_HW
    content = io.BytesIO()
    with drawing():
        from matplotlib.image import imsave

        imsave(content, black_HW4, format="png", pil_kwargs={"optimize": True})
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()


def previous_token_score(weights_TT: Numbers) -> float:
    """The mean share of attention on the token just before, as heads.py has it."""
    return float(np.diagonal(weights_TT, -1).mean())
