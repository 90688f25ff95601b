"""What a run's model said, and where its heads looked, at each evaluation."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Moment:
    """One evaluation: the text, and the heads' weights (L, H, T, T), None for a bigram."""

    step: int
    text: str
    maps: NDArray[np.float32] | None


def read(path: Path, layers: int, heads: int) -> tuple[list[Moment], list[str]]:
    """The moments, oldest first, and the passage that the maps are over."""
    if not path.exists():
        return [], []
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    passage = lines[0].get("passage", []) if lines else []
    length = len(passage)
    moments = []
    for line in lines:
        maps = None
        if line["maps"] is not None:
            maps = np.zeros((layers, heads, length, length), np.float32)
            flat = np.frombuffer(base64.b64decode(line["maps"]), np.uint8)
            maps[..., *np.tril_indices(length)] = flat.reshape(layers, heads, -1) / 255
        moments.append(Moment(line["step"], line["text"], maps))
    return moments, passage
