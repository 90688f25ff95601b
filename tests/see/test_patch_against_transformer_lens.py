"""Patching agrees with TransformerLens, which loads an exported model as it is.

`pip install torch transformer-lens pytest` in an environment of its own: the package pins versions
of others. docs/import-export.md says what these tests found.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import attnlm
from attnlm.data.dataset import Dataset
from attnlm.runs.run import Run
from tests.models import random_run

pytestmark = pytest.mark.slow

PAIRS = [("3 apples an", "4 pears are", "a", "s"), ("7 apples an", "7 pears are", "s", "e")]
HOOKS = {"stream": "hook_resid_post", "attention": "hook_attn_out", "mlp": "hook_mlp_out"}


@pytest.fixture
def bridge() -> Any:
    reason = "transformer-lens is not installed"
    return pytest.importorskip("transformer_lens.model_bridge", reason=reason).TransformerBridge


def share_of(theirs: Any, run: Run, name: str, index: Any) -> float:
    """The share that an activation of TransformerLens brings back, of the mean difference."""
    found = []
    for *texts, a, b in PAIRS:
        clean, corrupted = (torch.tensor([run.tokenizer.encode(text)]) for text in texts)
        _, cache = theirs.run_with_cache(clean)

        def patched(values: Tensor, hook: Any, cache: Any = cache) -> Tensor:
            values = values.clone()
            values[index] = cache[name][index]
            return values

        logits = [theirs(clean), theirs(corrupted)]
        logits.append(theirs.run_with_hooks(corrupted, fwd_hooks=[(name, patched)]))
        first, second = run.tokenizer.encode(a + b)
        found.append([float(one[0, -1, first] - one[0, -1, second]) for one in logits])
    full, none, d = np.mean(found, 0)
    return float((d - none) / (full - none))


@pytest.mark.parametrize("variant", ["transformer", "gpt2"])
@torch.no_grad()
def test_shares_equal_those_of_transformer_lens(
    variant: str, bridge: Any, dataset: Dataset, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    run = random_run(variant, dataset, tmp_path)
    folder = attnlm.export(run, tmp_path / "exported").path
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    theirs = bridge.boot_transformers(
        str(folder), hf_model=model, tokenizer=tokenizer, device="cpu", dtype=torch.float32
    )
    ours = attnlm.patch(run, PAIRS)
    for kind, hook in HOOKS.items():
        rows = getattr(ours, kind)
        for (layer, t), share in np.ndenumerate(rows[-2:]):  # without the embedding
            place = f"blocks.{layer}.{hook}", (0, t)
            assert share_of(theirs, run, *place) == pytest.approx(share, abs=1e-3), (kind, place)
    for (layer, head), share in np.ndenumerate(ours.heads):
        of_head = f"blocks.{layer}.attn.hook_z", (0, slice(None), head)
        assert share_of(theirs, run, *of_head) == pytest.approx(share, abs=1e-3), of_head
    assert np.abs(ours.heads).max() > 0.05
