"""The logit lens: its last row is the model, its others are what the head makes of a stream."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attnlm.model.architecture import RUNGS
from attnlm.model.language_model import Transformer
from attnlm.model.recorder import record
from attnlm.runs.load_model import load_model
from attnlm.runs.open_run import open_run
from attnlm.see.lens import logit_lens

IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])


@pytest.mark.parametrize("rung", [*RUNGS[1:], "projected", "tied"])
def test_the_last_row_is_the_model(rung: str, trained: Path) -> None:
    model, _ = load_model(
        open_run(rung, checkpoint_dir=trained / "checkpoints"), checkpoint="best", device="cpu"
    )
    model.eval()
    rows = logit_lens(model, record(model, IDS[None]))
    assert isinstance(model, Transformer)
    layers = len(model.blocks)
    assert [row.name for row in rows] == [
        "embedding",
        *(f"layer {n}" for n in range(1, layers + 1)),
    ]
    with torch.no_grad():
        probabilities, ids = torch.softmax(model(IDS[None])[0], -1).max(-1)
    assert rows[-1].ids == ids.tolist()
    assert rows[-1].probabilities == pytest.approx(probabilities.tolist(), abs=1e-5)


def test_an_earlier_row_is_the_model_without_the_layers_above(trained: Path) -> None:
    run = open_run("transformer", checkpoint_dir=trained / "checkpoints")
    model, _ = load_model(run, checkpoint="best", device="cpu")
    assert isinstance(model, Transformer)
    rows = logit_lens(model.eval(), record(model, IDS[None]))
    for kept in (1, 0):
        model.blocks = model.blocks[:kept]
        with torch.no_grad():
            probabilities, ids = torch.softmax(model(IDS[None])[0], -1).max(-1)
        assert rows[kept].ids == ids.tolist()
        assert rows[kept].probabilities == pytest.approx(probabilities.tolist(), abs=1e-5)


def test_a_bigram_has_none(trained: Path) -> None:
    run = open_run("bigram", checkpoint_dir=trained / "checkpoints")
    model, _ = load_model(run, checkpoint="best", device="cpu")
    assert logit_lens(model, record(model, IDS[None])) == []
