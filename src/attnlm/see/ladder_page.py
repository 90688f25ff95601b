"""What a ladder shows: its pictures, and one self-contained page with all of it."""

from __future__ import annotations

import itertools
from pathlib import Path

import attnlm
from attnlm.base import files
from attnlm.model.architecture import MODELS
from attnlm.see.curves import Line, panel_svg, panels_png
from attnlm.see.ladder import Ladder, Rung
from attnlm.see.page import render
from attnlm.see.reproduce import ladder_command

# Legible on white and on black; a model keeps its colour in every picture, a variant takes one that
# is free.
_COLOURS = (
    *("#a8607f", "#7c7fd0", "#4f8fd8", "#1f9bb5", "#2a9d6e", "#8a961c", "#d9730d"),
    *("#c2554d", "#8c6bb1", "#5f7f4f"),
)
_COLOUR_OF = dict(zip(MODELS, _COLOURS, strict=True))

# Of each rung what it is, why that helps, and why it may not.
_IDEAS = {
    "bigram": (
        "A table in which the last token's row holds the logits of the next",
        "one token already says much about the next",
        "it sees nothing but the last token",
    ),
    "average": (
        "Each token becomes the mean of itself and all tokens before it",
        "it sees more than one token",
        "the mean does not say which token came last",
    ),
    "dot-product": (
        "Attention without parameters: each token reads most from those whose embeddings are "
        "like its own",
        "it tells the tokens of the past apart",
        "nothing in it learns what to look for",
    ),
    "single-head": (
        "One head with learned queries, keys and values",
        "it learns which earlier tokens to read, and what to take from them",
        "it looks for one thing at a time",
    ),
    "multi-head": (
        "Several narrow heads side by side",
        "they look for several things at once",
        "each head is narrow",
    ),
    "wide-head": (
        "Heads as wide as the embedding, mapped back to it",
        "each head can carry more",
        "it has more parameters to learn, and narrow heads are often wide enough",
    ),
    "transformer": (
        "Blocks of attention and an MLP with residual connections, norms and rotary positions",
        "later heads look for what earlier ones found, and each MLP computes with it",
        "more parameters take more steps to learn",
    ),
}
_IDEAS |= {
    "gpt2": (
        "A transformer in the shape of GPT-2: layer norm, learned positions, GELU, tied embeddings",
        *_IDEAS["transformer"][1:],
    ),
    "llama": (
        "A transformer in the shape of Llama: RMS norm, rotary positions, SwiGLU",
        *_IDEAS["transformer"][1:],
    ),
    "qwen3": (
        "A transformer in the shape of Qwen3: Llama's parts, with normalised queries and keys",
        *_IDEAS["transformer"][1:],
    ),
}
_NOTICEABLE = 0.01  # nats per token


def explained(ladder: Ladder) -> list[tuple[str, str]]:
    """Of each rung its name and, in words, what it adds, its gain over the best so far, and why.

    A variant of a model says what was changed, and is compared in the same way.
    """
    best, sentences = ladder.rungs[0], []
    for rung, gain in zip(ladder.rungs, ladder.gains, strict=True):
        idea, why, why_not = _idea(rung)
        if gain is None:
            said = "The others are compared with it"
        elif gain > _NOTICEABLE:
            said = f"{gain:.3f} nats per token better than {best.model}{why}"
        elif gain < -_NOTICEABLE:
            said = f"{-gain:.3f} nats per token worse than {best.model}{why_not}"
        else:
            said = f"As good as {best.model} after these steps"
        sentences.append((rung.model, f"{idea}. {said}."))
        best = rung if gain is not None and gain > 0 else best
    return sentences


def _idea(rung: Rung) -> tuple[str, str, str]:
    """What a rung is, and what follows "better than" and "worse than"."""
    model, *changes = rung.model.split(":")
    idea, why, why_not = _IDEAS[model]
    if changes:
        changed = " and ".join(change.replace("=", " ").replace("_", " ") for change in changes)
        return f"{model} with {changed}", "", ""
    return idea, f": {why}", f": {why_not}"


def _colours(ladder: Ladder) -> dict[str, str]:
    models = [rung.model for rung in ladder.rungs]
    free = [colour for model, colour in _COLOUR_OF.items() if model not in models]
    others = itertools.cycle(free or _COLOURS)
    return {m: _COLOUR_OF[m] if m in _COLOUR_OF else next(others) for m in models}


def write_ladder(ladder: Ladder) -> Path:
    """Writes `curves.png` and `index.html` into the ladder's folder; returns the page's path."""
    known = ladder.rungs[-1].run.references()
    panels = {x: _lines(ladder, x) for x in ("tokens", "seconds")}
    files.write_bytes(ladder.path / "curves.png", panels_png(panels, known))
    pictures = {x: panel_svg(lines, known, x) for x, lines in panels.items()}
    page = ladder.path / "index.html"
    content = render(
        "ladder.html",
        ladder=ladder,
        rows=list(zip(ladder.rungs, ladder.gains, strict=True)),
        explained=explained(ladder),
        what="variant changes" if any(":" in r.model for r in ladder.rungs) else "rung adds",
        pictures=pictures,
        colours=_colours(ladder),
        again=ladder_command(ladder.plan),
        references=known,
        version=attnlm.__version__,
    )
    files.write_bytes(page, content)
    return page


def _lines(ladder: Ladder, x: str) -> list[Line]:
    colours = _colours(ladder)
    return [
        Line(
            ladder.labels[rung.model],
            [record[x] for record in rung.records],
            [record["val_loss"] for record in rung.records],
            colours[rung.model],
        )
        for rung in ladder.rungs
    ]
