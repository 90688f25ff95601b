"""A ticker of a run that has none: texts, and maps on their way from equal shares to its heads'."""

from __future__ import annotations

import base64
import json
import zlib

import numpy as np

from attnlm.run import Run
from attnlm.see.report import report


def write_ticker(run: Run) -> None:
    """Writes ticker.jsonl, a line for each evaluation."""
    seen = report(run).attention
    length = len(seen.tokens)
    equal_TT = np.tril(np.ones((length, length))) / np.arange(1, length + 1)[:, None]
    steps = [record["step"] for record in run.metrics()]
    lines = []
    for number, step in enumerate(steps):
        share = number / (len(steps) - 1)
        maps = equal_TT * (1 - share) + seen.weights * share
        packed = np.rint(maps[..., *np.tril_indices(length)] * 255).astype(np.uint8).tobytes()
        said = (
            f"line {number} <b>&amp;\nand then, {number} foxes and dogs, as they may be said. " * 2
        )
        line = {
            "step": step,
            "text": said,
            "maps": base64.b64encode(packed).decode() if len(seen.weights) else None,
            **({"passage": seen.tokens} if number == 0 else {}),
        }
        lines.append(json.dumps({**line, "crc32": zlib.crc32(json.dumps(line).encode())}) + "\n")
    (run.path / "ticker.jsonl").write_text("".join(lines), encoding="utf-8")
