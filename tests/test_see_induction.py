"""Induction on repeated random tokens: scores find the heads of a model built to have them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attnlm.base.errors import AttnlmError
from attnlm.config.settings import resolve
from attnlm.config.variants import variant
from attnlm.data.dataset import Dataset
from attnlm.model.inspection import parameters_of
from attnlm.model.language_model import build_model
from attnlm.runs.checkpoint import save_checkpoint
from attnlm.runs.create_run import create_run
from attnlm.runs.run import Run
from attnlm.see.heads import REPEATED, TooShortError, repeated_random_tokens, study_heads
from tests.command import attnlm
from tests.models import self_attention

T, HEADS = 40, 3
SHARP = 60.0  # of scores: what is looked for gets nearly all attention
BUILT = {(0, 1): "previous-token", (0, 2): "same-token", (1, 0): "induction"}
"""The heads that look for something; the other three have equal scores, and look everywhere."""


@pytest.fixture(name="built", scope="module")
def built_by_hand(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two layers of attention on a stream of three parts: the token, its position, and the token
    before, which the first layer writes there and the second compares with the token."""
    size = dataset.vocab_size
    name = "transformer:mlp=none:norm=none:positions=learned:query_key_norm=false:bias=false"
    sizes = {"embed_dim": 2 * size + T, "head_size": T, "heads": HEADS}
    config = resolve({**variant(name), **sizes, "layers": 2, "block_size": T})
    model = build_model(config.model, size)
    token, position, before = (slice(0, size), slice(size, size + T), slice(size + T, None))
    of: dict[str, torch.Tensor] = dict(model.named_parameters())
    with torch.no_grad():
        for parameter in of.values():
            parameter.zero_()
        of["token_embedding.weight"][:, token] = torch.eye(size)
        of["position_embedding.weight"][:, position] = torch.eye(T)
        of["head.weight"][:, token] = torch.eye(size)
        for layer, head in BUILT:
            attention = self_attention(model, layer)
            rows = slice(head * T, (head + 1) * T)
            query, key = attention.query.weight[rows], attention.key.weight[rows]
            if BUILT[layer, head] == "previous-token":
                query[:, position] = SHARP * torch.eye(T).roll(-1, 0).triu(1)
                key[:, position] = torch.eye(T)
                attention.value.weight[rows][:size, token] = torch.eye(size)
                assert attention.projection is not None
                attention.projection.weight[before, rows][:, :size] = torch.eye(size)
            else:
                query[:size, token] = SHARP * torch.eye(size)
                key[:size, before if layer else token] = torch.eye(size)
    folder = tmp_path_factory.mktemp("built")
    parameters = parameters_of(config.model, dataset.vocab_size)
    run = create_run(config, dataset, parameters, name=None, checkpoint_dir=folder)
    save_checkpoint(run.best, dict(model.named_parameters()), {"step": 1, "val_loss": 2.5})
    return run


@pytest.mark.parametrize("has_text", [True, False])
def test_the_scores_find_the_heads_and_only_them(has_text: bool, built: Run) -> None:
    run = built if has_text else replace(built, imported_from="elsewhere")
    report = study_heads(run, windows=8, device="cpu")
    assert report.has_text == has_text and report.repeated == min(T // 2, run.vocab_size)
    for head in report.heads:
        wanted = BUILT.get((head.layer, head.head), "uniform")
        assert head.name == wanted
        assert head.scores[wanted] > 0.9
        for pattern in ("previous-token", "induction"):
            assert head.scores[pattern] > 0.9 or head.scores[pattern] < 0.2
            assert (head.scores[pattern] > 0.9) == (pattern == wanted)


def test_random_tokens_come_twice_and_no_two_are_alike() -> None:
    tokens = repeated_random_tokens(50_257, 1024, 4)
    assert tokens.shape == (4, 2 * REPEATED)
    np.testing.assert_array_equal(tokens[:, :REPEATED], tokens[:, REPEATED:])
    assert all(len(set(row)) == REPEATED for row in tokens.tolist())
    assert len(set(map(tuple, tokens.tolist()))) == 4 and tokens.max() > 40_000
    np.testing.assert_array_equal(tokens, repeated_random_tokens(50_257, 1024, 4))
    assert repeated_random_tokens(7, 64, 2).shape == (2, 14)
    assert repeated_random_tokens(65, 9, 2).shape == (2, 8)


def test_an_imported_run_needs_no_text(built: Run, tmp_path: Path) -> None:
    imported = replace(built, imported_from="elsewhere")
    imported.save_config()
    try:
        done = attnlm("heads", str(built.path), "--windows", "3", cwd=tmp_path)
    finally:
        built.save_config()
    assert f"3 windows of {T // 2} random tokens, repeated once" in done.stderr
    named = [line.split()[2] for line in done.stdout.splitlines()[1:-1]]
    assert named == [
        BUILT.get((layer, head), "uniform") for layer in range(2) for head in range(HEADS)
    ]
    with pytest.raises(AttnlmError, match="no text to measure a loss on"):
        study_heads(imported, ablate=True)
    tiny: Any = replace(built.config, model=replace(built.config.model, block_size=1))
    with pytest.raises(TooShortError, match="too short"):
        study_heads(replace(imported, config=tiny))
