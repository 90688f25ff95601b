"""A head's attention maps from evaluation to evaluation, as a strip of frames in one picture."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from attnlm.see.attend import Numbers

_CELL = 6  # pixels, so that a browser that smooths what it enlarges hardly blurs the cells


def strip(maps: Sequence[Numbers]) -> str:
    """Maps (T, T) side by side, as the URL of a PNG: a mask, as opaque as the weights are large."""
    weights = np.concatenate(maps, axis=1)
    return png_mask(np.rint(weights * 255).astype(np.uint8).repeat(_CELL, 0).repeat(_CELL, 1))


def png_mask(alpha_HW: NDArray[np.uint8]) -> str:
    """A black picture with that opacity, as a data: URL (PNG, W3C 2003: grey and alpha)."""
    height, width = alpha_HW.shape
    grey_alpha = np.zeros((height, width, 2), np.uint8)
    grey_alpha[..., 1] = alpha_HW
    rows = grey_alpha.reshape(height, -1)
    # Filter 2: each row as its difference from the one above, and many are the same.
    differences = np.diff(rows, axis=0, prepend=np.zeros((1, 2 * width), np.uint8))
    filtered = np.concatenate([np.full((height, 1), 2, np.uint8), differences], axis=1)
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 4, 0, 0, 0)),
        (b"IDAT", zlib.compress(filtered.tobytes(), 9)),
        (b"IEND", b""),
    )
    content = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    return "data:image/png;base64," + base64.b64encode(content).decode()


def previous_token_score(weights_TT: Numbers) -> float:
    """The mean share of attention on the token just before, as heads.py has it."""
    return float(np.diagonal(weights_TT, -1).mean())
