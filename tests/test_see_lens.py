"""The logit lens: its last row is the model, its others are what the head makes of a stream."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from attnlm.model.architecture import RUNGS
from attnlm.model.language_model import Transformer
from attnlm.model.recorder import record
from attnlm.runs.load_model import load_model
from attnlm.runs.open_run import open_run
from attnlm.see.report import logit_lens
from attnlm.see.report_page import lens_data

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
    assert rows[-1].ids[:, 0].tolist() == ids.tolist()
    np.testing.assert_allclose(rows[-1].probabilities[:, 0], probabilities, atol=1e-5)


def test_an_earlier_row_is_the_model_without_the_layers_above(trained: Path) -> None:
    run = open_run("transformer", checkpoint_dir=trained / "checkpoints")
    model, _ = load_model(run, checkpoint="best", device="cpu")
    assert isinstance(model, Transformer)
    rows = logit_lens(model.eval(), record(model, IDS[None]))
    for kept in (1, 0):
        model.blocks = model.blocks[:kept]
        with torch.no_grad():
            probabilities, ids = torch.softmax(model(IDS[None])[0], -1).max(-1)
        assert rows[kept].ids[:, 0].tolist() == ids.tolist()
        np.testing.assert_allclose(rows[kept].probabilities[:, 0], probabilities, atol=1e-5)


def test_the_likeliest_tokens_of_each_layer_and_place(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run("transformer", checkpoint_dir=trained / "checkpoints")
    model, _ = load_model(run, checkpoint="best", device="cpu")
    assert isinstance(model, Transformer)
    seen = record(model.eval(), IDS[None])
    monkeypatch.setattr("attnlm.see.report._TOKENS_AT_ONCE", 3)
    rows = logit_lens(model, seen, count=4)
    words = [f"<{i}>" for i in range(run.vocab_size)]
    data = lens_data(rows, words)
    at = 0
    for layer, stream in enumerate([seen.embedded, *(layer.stream for layer in seen.layers)]):
        assert stream is not None
        with torch.inference_mode():
            wanted = torch.softmax(model.read_out(stream)[0], -1).sort(-1, descending=True)
        np.testing.assert_array_equal(rows[layer].ids, wanted.indices[:, :4])
        np.testing.assert_allclose(rows[layer].probabilities, wanted.values[:, :4], atol=1e-5)
        for place in range(len(IDS)):
            held = slice(at, at + 4)
            shown = [data["words"][i] for i in data["ids"][held]]
            assert shown == [words[i] for i in rows[layer].ids[place]]
            np.testing.assert_allclose(
                data["percents"][held], 100 * wanted.values[place, :4], atol=0.51
            )
            at += 4
    assert at == len(data["ids"]) == 4 * len(data["rows"]) * len(IDS)


def test_a_bigram_has_none(trained: Path) -> None:
    run = open_run("bigram", checkpoint_dir=trained / "checkpoints")
    model, _ = load_model(run, checkpoint="best", device="cpu")
    assert logit_lens(model, record(model, IDS[None])) == []
