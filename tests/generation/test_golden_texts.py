"""The texts of a seed stay what they are, for every preset and every way to choose a token."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attnlm
from attnlm.config.settings import resolve
from attnlm.config.variants import variant
from attnlm.data.dataset import Dataset
from attnlm.runs.run import Run
from tests.models import EXPORTED, parts_of, saved_run

CHOICES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6, "top_k": 7},
    {"top_p": 0.8, "temperature": 1.4},
    {"top_k": 5, "top_p": 0.7, "stop": ["a", "7 f"]},
]
PROMPTS = ["", "4 apples", "pears are 12 fruits and 13 apples are 5 pears"]
GOLDEN = {
    "bigram": "4bfec059045c7d0d",
    "average": "3a7acf9af3b9a3cd",
    "dot-product": "6b1a90ac48d8ac9f",
    "single-head": "e659136f1dcc457c",
    "multi-head": "63b756ab0a3e1e2b",
    "wide-head": "fda27382f04da459",
    "transformer": "31eb2a77be2cb7a5",
    "gpt2": "ce4c72d2d8624837",
    "llama": "f59460180843d70e",
    "qwen3": "e367ec90c578c40a",
    "multi-head:projection=true:qkv_bias=true": "cb87aff0331bf8bf",
}


def run_with_drawn_weights(name: str, dataset: Dataset, folder: Path) -> Run:
    """A run whose weights NumPy draws, the same with every version of PyTorch."""
    config = resolve(variant(name), {**EXPORTED, "block_size": 20})
    model = parts_of(config).build(dataset.vocab_size)
    random = np.random.Generator(np.random.Philox(5))
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            drawn = random.standard_normal(tuple(parameter.shape), np.float32)
            parameter.copy_(torch.from_numpy(drawn) * (2 if name == "bigram" else 0.35))
    return saved_run(model, config, dataset, folder)


@pytest.mark.parametrize("name", GOLDEN)
def test_the_texts_of_a_seed_stay_the_same(name: str, dataset: Dataset, tmp_path: Path) -> None:
    run = run_with_drawn_weights(name, dataset, tmp_path)
    texts = []
    for seed, settings in enumerate(CHOICES, 2**33):
        how: dict[str, Any] = {"tokens": 50, "seed": seed, "device": "cpu", **settings}
        texts += ["".join(attnlm.sample(run, prompt=prompt, **how)) for prompt in PROMPTS]
        texts += attnlm.samples(run, prompt=PROMPTS, num_samples=3, **how)
    assert len(set(texts)) > 20
    assert hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16] == GOLDEN[name]
