"""What a ladder shows: its pictures, and one self-contained page with all of it."""

from __future__ import annotations

from pathlib import Path

import attnlm
from attnlm.base import files
from attnlm.config.settings import RUNGS
from attnlm.experiments.ladder import Ladder
from attnlm.see.curves import Line, panel_svg, panels_png, references_of
from attnlm.see.page import render

# In the ladder's order, legible on white and on black; a rung keeps its colour in every picture.
_COLOURS = ("#a8607f", "#7c7fd0", "#4f8fd8", "#1f9bb5", "#2a9d6e", "#8a961c", "#d9730d")
COLOUR_OF = dict(zip(RUNGS, _COLOURS, strict=True))


def write_ladder(ladder: Ladder) -> Path:
    """Writes `curves.png` and `index.html` into the ladder's folder; returns the page's path."""
    known = references_of(ladder.rungs[-1].run)
    panels = {x: _lines(ladder, x) for x in ("tokens", "seconds")}
    files.write_bytes(ladder.path / "curves.png", panels_png(panels, known))
    pictures = {x: panel_svg(lines, known, x) for x, lines in panels.items()}
    page = ladder.path / "index.html"
    content = render(
        "ladder.html",
        ladder=ladder,
        rows=list(zip(ladder.rungs, ladder.gains, strict=True)),
        pictures=pictures,
        colours=COLOUR_OF,
        references=known,
        version=attnlm.__version__,
    )
    files.write_bytes(page, content)
    return page


def _lines(ladder: Ladder, x: str) -> list[Line]:
    return [
        Line(
            rung.model,
            [record[x] for record in rung.records],
            [record["val_loss"] for record in rung.records],
            COLOUR_OF[rung.model],
        )
        for rung in ladder.rungs
    ]
