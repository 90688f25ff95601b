"""Make the page of a ladder: its curves, and what each rung adds."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Mapping
from typing import Any

import attnlm
from attnlm.base.folders import flag
from attnlm.config.variants import split_variant
from attnlm.model.architecture import MODELS, UnsupportedError
from attnlm.model.inspection import ChangedModelError
from attnlm.see.curves import Line, panel_svg, panels_png
from attnlm.see.ladder import NOTICEABLE, Ladder, interval_text
from attnlm.see.model_page import first_text, run_data
from attnlm.see.page import render
from attnlm.see.reproduce import ladder_command
from attnlm.see.verdicts import Pair

# Colours that are legible on white and on black. A model has the same colour in all pictures; a
# variant, or a model beyond these colours, takes the colour of a model that the ladder lacks.
_COLOURS = (
    "#a8607f", "#7c7fd0", "#4f8fd8", "#1f9bb5", "#2a9d6e", "#8a961c", "#d9730d",
    "#c2554d", "#8c6bb1", "#5f7f4f",
)  # fmt: skip
_COLOUR_OF = dict(zip(MODELS, _COLOURS, strict=False))

# For each rung: what it is, why it helps, and why it may not. A rung without an entry is named by
# its model, and its gain has no reason.
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
        "Several narrow heads in parallel",
        "they look for several things at once",
        "each head is narrow",
    ),
    "wide-head": (
        "Heads as wide as the embedding, projected back to its width",
        "each head can carry more",
        "it has more parameters to learn, and narrow heads are often wide enough",
    ),
    "transformer": (
        "Blocks of attention and an MLP with residual connections, norms and rotary positions",
        "later heads look for what earlier ones found, and each MLP computes with it",
        "more parameters take more steps to learn",
    ),
}
_SHAPES = {
    "gpt2": "GPT-2: layer norm, learned positions, GELU, tied embeddings",
    "llama": "Llama: RMS norm, rotary positions, SwiGLU",
    "qwen3": "Qwen3: Llama's parts, with normalised queries and keys",
}
_IDEAS |= {
    model: (f"A transformer in the shape of {shape}", *_IDEAS["transformer"][1:])
    for model, shape in _SHAPES.items()
}
_MOST_TO_TRY = 2_000_000  # parameters of all rungs, for a page of about 10 MB


def curves_png(ladder: Ladder) -> bytes:
    """Return a picture of the rungs' losses by tokens and by seconds."""
    panels = {x: loss_curves(ladder, x) for x in ("tokens", "seconds")}
    return panels_png(panels, _references(ladder))


def ladder_page(ladder: Ladder) -> bytes:
    """Return the page, in UTF-8, which works offline."""
    references = _references(ladder)
    pictures = {x: panel_svg(loss_curves(ladder, x), references, x) for x in ("tokens", "seconds")}
    trials = []
    for rung, label in ladder.labels.items():
        points = {t.value: t.loss for t in ladder.plan.trials if t.rung == rung and t.loss}
        if points:
            trials.append(Line(label, [*points], [*points.values()], _colours(ladder)[rung]))
    if ladder.plan.tune and trials:
        pictures[ladder.plan.tune] = panel_svg(trials, {}, ladder.plan.tune)
    header, rows = ladder.table()
    notes = ladder.certainty, ladder.equality, ladder.tuning
    runs = {ladder.labels[rung.model]: rung.run for rung in ladder.rungs}
    models: list[dict[str, Any]] = []
    if sum(run.parameters for run in runs.values()) <= _MOST_TO_TRY:
        with contextlib.suppress(ChangedModelError, UnsupportedError):  # can't run in a page
            models = [run_data(run, run.checkpoint(), name=label) for label, run in runs.items()]
    prompt = ladder.plan.prompt or first_text([rung.run for rung in ladder.rungs])
    return render(
        "ladder.html",
        ladder=ladder,
        header=header,
        rows=list(itertools.zip_longest(ladder.rungs, rows)),
        verdicts=ladder.verdicts(),
        notes=[re.sub(r"`(\w+)`", lambda setting: flag(setting[1]), note) for note in notes],
        explained=explain_rungs(ladder),
        captions=_captions(ladder, pictures),
        what="variant changes" if any(":" in r.model for r in ladder.rungs) else "rung adds",
        pictures=pictures,
        colours=_colours(ladder),
        again=ladder_command(ladder.plan),
        references=references,
        version=attnlm.__version__,
        models=models,
        script="play_page.js" if models else "",
        data={"models": models, "prompt": prompt},
    )


def _references(ladder: Ladder) -> Mapping[str, float]:
    return ladder.rungs[-1].run.references()


def _captions(ladder: Ladder, pictures: Mapping[str, str]) -> dict[str, str]:
    """Return a sentence for each picture."""
    captions = {x: f"Validation loss by {x}" for x in pictures}
    if ladder.plan.seeds > 1 and "tokens" in captions:
        captions["tokens"] += (
            f"; the band is from the lowest to the highest of {ladder.plan.seeds} seeds"
        )
    if ladder.plan.tune in captions:
        tried = f"the loss on the last tenth of the training split by {ladder.plan.tune}"
        captions[ladder.plan.tune] = f"What tuning tried: {tried}"
    return captions


def explain_rungs(ladder: Ladder) -> list[tuple[str, str]]:
    """Return each rung's name and sentences: what the rung adds, its gain over the best rung before
    it, and a reason for the gain.

    For a variant of a model, the sentences state the change and the gain, without a reason.
    """
    sentences = []
    judged_pairs = {(pair.rung, pair.rival): pair for pair in ladder.pairs}
    for rung, gain in zip(ladder.rungs, ladder.gains, strict=True):
        model, *changes = split_variant(rung.model)
        pairs = (change.partition("=") for change in changes)
        changed = " and ".join(f"{key.replace('_', ' ')} {value}" for key, _, value in pairs)
        unexplained = (f"{model} with {changed}" if changed else f"The model {model}", "", "")
        idea, why, why_not = unexplained if changed else _IDEAS.get(model, unexplained)
        if gain is None:
            comparison = "The others are compared with it"
        elif judged_pairs[rung.model, gain.rival.model].verdict == "the same":
            comparison = f"The same loss as {gain.rival.model}, up to rounding"
        elif ladder.plan.seeds == 1 and abs(gain.nats) <= NOTICEABLE:
            comparison = f"As good as {gain.rival.model} after these steps"
        else:
            comparison = _comparison(judged_pairs[rung.model, gain.rival.model], why, why_not)
        sentences.append((rung.model, f"{idea}. {comparison}."))
    return sentences


def _comparison(pair: Pair, why: str, why_not: str) -> str:
    """Return the sentence on a gain: what the interval shows, and a reason for it."""
    nats = pair.difference
    if pair.interval is not None and pair.verdict == "not shown":
        needed = f"about {pair.seeds_needed} seeds" if pair.seeds_needed else "over 100 seeds"
        return (
            f"Not shown to differ from {pair.rival}: the interval for the difference, "
            f"{interval_text(pair.interval)} nats per token, includes 0; to show a difference of "
            f"{abs(nats):.4f} takes {needed}"
        )
    difference = f"{abs(nats):.3f} nats per token {'better' if nats > 0 else 'worse'}"
    interval = f" ({interval_text(pair.interval)})" if pair.interval else ""
    reason = why if nats > 0 else why_not
    return f"{difference} than {pair.rival}{interval}" + (f": {reason}" if reason else "")


def _colours(ladder: Ladder) -> dict[str, str]:
    models = [rung.model for rung in ladder.rungs]
    free = [colour for model, colour in _COLOUR_OF.items() if model not in models]
    others = itertools.cycle(free or _COLOURS)
    return {m: _COLOUR_OF[m] if m in _COLOUR_OF else next(others) for m in models}


def loss_curves(ladder: Ladder, x: str) -> list[Line]:
    """Return the curve of each rung.

    A curve by tokens has a band from the lowest to the highest loss of all seeds, unless there is
    one seed only or a seed lacks an evaluation.
    """
    colours = _colours(ladder)
    lines = []
    for rung in ladder.rungs:
        records = rung.result.records
        steps = [record.step for record in records]
        seeds = [{r.step: r.val_loss for r in seed.records} for seed in rung.results]
        band: list[tuple[float, float]] = []
        if x == "tokens" and len(seeds) > 1 and all(seed.keys() >= {*steps} for seed in seeds):
            band = [(min(s[step] for s in seeds), max(s[step] for s in seeds)) for step in steps]
        line = Line(
            label=ladder.labels[rung.model],
            x=[record.tokens if x == "tokens" else record.seconds for record in records],
            losses=[record.val_loss for record in records],
            colour=colours[rung.model],
            band=band,
        )
        lines.append(line)
    return lines
