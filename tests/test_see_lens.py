"""The logit lens: its last row is the model, its others are what the head makes of a stream."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from attnlm import load_model
from attnlm.model.architecture import RUNGS
from attnlm.model.language_model import Transformer
from attnlm.model.recorder import record
from attnlm.see.report import LensRow, logit_lens
from attnlm.see.report_page import lens_data

IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])


def model_of(trained: Path, name: str) -> Transformer:
    model, _ = load_model(trained / "checkpoints" / name, device="cpu")
    assert isinstance(model, Transformer)
    return model.eval()


def assert_predicts(row: LensRow, model: Transformer) -> None:
    with torch.no_grad():
        probabilities, ids = torch.softmax(model(IDS[None])[0], -1).max(-1)
    assert row.ids[:, 0].tolist() == ids.tolist()
    np.testing.assert_allclose(row.probabilities[:, 0], probabilities, atol=1e-5)


@pytest.mark.parametrize("rung", [*RUNGS[1:], "projected", "tied"])
def test_the_last_row_is_the_model(rung: str, trained: Path) -> None:
    model = model_of(trained, rung)
    rows = logit_lens(model, record(model, IDS[None]))
    layers = range(1, len(model.blocks) + 1)
    assert [row.name for row in rows] == ["embedding", *(f"layer {n}" for n in layers)]
    assert_predicts(rows[-1], model)


def test_an_earlier_row_is_the_model_without_the_layers_above(trained: Path) -> None:
    model = model_of(trained, "transformer")
    rows = logit_lens(model, record(model, IDS[None]))
    for kept in (1, 0):
        model.blocks = model.blocks[:kept]
        assert_predicts(rows[kept], model)


def test_a_page_holds_the_likeliest_tokens_of_each_layer_and_place(trained: Path) -> None:
    model = model_of(trained, "transformer")
    rows = logit_lens(model, record(model, IDS[None]), count=4)
    words = [f"<{i}>" for i in range(model.vocab_size)]
    data = lens_data(rows, words)
    ids_LTK, probabilities_LTK = (
        np.stack([getattr(row, name) for row in rows]) for name in ("ids", "probabilities")
    )
    assert ids_LTK.shape == (3, len(IDS), 4) and (np.diff(probabilities_LTK) <= 0).all()
    assert [data["words"][i] for i in data["ids"]] == [words[i] for i in ids_LTK.ravel()]
    np.testing.assert_allclose(data["percents"], 100 * probabilities_LTK.ravel(), atol=0.51)
