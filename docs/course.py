"""The figures of learn.md and teach.md: measured after the commands of learn.md.

A page has a figure as `<!-- bigram -->2.176<!-- -->`. `python docs/generate.py --course` takes all
steps, which takes minutes, and writes the figures anew, with as many digits as before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import attnlm
from attnlm.model.recorder import record, silence
from attnlm.runs.load_model import load_model
from tests.kit import command
from tests.project.documents import blocks_of, shown_in, text_of

FIGURE = re.compile(r"<!-- ([\w-]+) -->([\d.]+)<!-- -->")
TEXT = "To be, or not to be"
PAGE = text_of("docs/learn.md")
(HEAD,) = blocks_of(PAGE, "python")
"""The head of the exercise, distance.py."""


def take_steps(course: Path) -> None:
    """Run the commands of learn.md in a folder."""
    (course / "distance.py").write_text(HEAD)
    for shown in shown_in(PAGE):
        command(*shown.words, cwd=course)


def filled(page: str, figures: Mapping[str, float]) -> str:
    """Return the page with these figures."""

    def rounded(found: re.Match[str]) -> str:
        name, shown = found.groups()
        return f"<!-- {name} -->{figures[name]:.{len(shown.partition('.')[2])}f}<!-- -->"

    return FIGURE.sub(rounded, page)


def outdated(page: str, figures: Mapping[str, float]) -> list[str]:
    """Return the figures of a page that are wrong by more than a unit of their last digit."""
    return [
        f"{name} is {figures[name]}, not {shown}"
        for name, shown in FIGURE.findall(page)
        if abs(float(shown) - figures[name]) > 10.0 ** -len(shown.partition(".")[2])
    ]


def measured(course: Path) -> dict[str, float]:
    """Return the figures by their names, from a folder in which all steps were taken."""
    return dict(_measured(course))


def _measured(course: Path) -> Iterator[tuple[str, float]]:
    data = attnlm.open_dataset("tales-char", data_dir=course / "data")
    yield "uniform", np.log(data.vocab_size)
    yield "counted-bigram", data.bigram_loss or 0
    yield "floor", data.floor or 0
    names = ("bigram", "average", "dot-product", "one-head", "four-heads", "deep", "distance")
    losses = {name: loss(course, name) for name in names}
    yield from losses.items()
    yield "beyond-distance", losses["distance"] - losses["four-heads"]

    yield "average-weight", attention(course, "average")[0, -1, -1]
    o_S = attention(course, "dot-product")[0, 11]
    yield from {"o-itself": o_S[11], "o-second": o_S[7], "o-first": o_S[1]}.items()
    e_S = attention(course, "one-head", "To be")[0, -1]
    yield from {"e-to-b": e_S[-2], "e-itself": e_S[-1], "e-to-rest": e_S[:-2].sum()}.items()

    heads = four_heads(course).heads
    costs = [head.loss_change or 0 for head in heads]
    yield "head-4-before", heads[3].scores["previous-token"]
    yield "head-4-cost", costs[3]
    yield "least-cost", min(costs)
    yield "most-cost", max(costs)
    yield "the-bridg", 100 * shares(course, "four-heads", "the bridg")["e"]
    yield "the-space", 100 * max(shares(course, "four-heads", "the ").values())

    single, narrow, wide = (
        loss(course, f"width-{model}") for model in ("single-head", "multi-head", "wide-head")
    )
    yield from {"wide": wide, "narrow": narrow, "wide-gain": narrow - wide}.items()
    yield "four-gain", single - narrow
    rungs = ladder(course, "parts")["groups"]
    for name, rung in zip(("all-parts", "no-positions", "no-mlp", "no-norm"), rungs, strict=True):
        yield name, rung["mean"]


def loss(course: Path, name: str) -> float:
    """Return the best validation loss of a run."""
    result = attnlm.open_run(name, checkpoint_dir=course / "checkpoints").result()
    assert result is not None
    return result.best.val_loss


def ladder(course: Path, name: str) -> Any:
    """Return what a ladder prints as JSON."""
    return json.loads(command("ladder", "--resume", name, "--json", cwd=course).stdout)


def attention(course: Path, name: str, text: str = TEXT) -> Any:
    """Return the attention weights (H, T, T) of the first layer."""
    return attnlm.attend(text, course / "checkpoints" / name).weights[0]


def four_heads(course: Path) -> attnlm.HeadsReport:
    """Return what `heads` shows in step 5."""
    run = attnlm.open_run(course / "checkpoints" / "four-heads", data_dir=course / "data")
    found = attnlm.heads(run, ablate=True, windows=2000)
    assert found.measured_on.startswith("all ")
    return found


def shares(
    course: Path, name: str, text: str, silenced: tuple[int, int] | None = None
) -> dict[str, float]:
    """Return the probability of each token after a text, also without a layer's head."""
    run = attnlm.open_run(name, checkpoint_dir=course / "checkpoints")
    model, _ = load_model(run, device="cpu")
    ids = torch.tensor([run.tokenizer.encode(text)])
    shares_V = torch.softmax(record(model, ids, silence(silenced)).logits[0, -1], -1).tolist()
    return {run.tokenizer.decode([token]): share for token, share in enumerate(shares_V)}
