"""The operations and activations of models, counted without building them."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from attnlm.config.settings import resolve
from attnlm.config.variants import variant
from attnlm.model.layers import dropout_from
from attnlm.model.ops import Kernels, use_kernels
from attnlm.model.ops.loss import LOGITS_AT_ONCE
from attnlm.training.memory import FACTOR
from tests.models import SIZES, VARIANTS, needs_kernels, parts_of


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(("vocab_size", "at_once"), [(11, 2**21), (300, 3000)])
def test_flops_equal_the_count_of_pytorch(
    name: str, vocab_size: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference implementation never holds all logits if there are many ids and tokens."""
    monkeypatch.setitem(LOGITS_AT_ONCE, "cpu", at_once)
    a = parts_of(resolve(variant(name), SIZES))
    model = a.build(vocab_size)
    ids = torch.zeros((2, a.block_size), dtype=torch.long)
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH):
        with counter, torch.no_grad():
            model(ids)
        assert counter.get_total_flops() == a.costs(vocab_size).forward_flops * ids.numel()
        with counter:
            model.loss(ids, ids).backward()
        assert counter.get_total_flops() == a.costs(vocab_size).training_flops * ids.numel()


def test_a_billion_parameters_by_hand() -> None:
    """Llama 3.2 1B has 1,235,814,400; 6·N·D, and attention on top."""
    llama = "llama:layers=16:embed_dim=2048:heads=32:kv_heads=8:mlp_width=8192:block_size=4096"
    costs = resolve(variant(f"{llama}:tie_embeddings=true")).spec.costs(128_256)
    attention, norms = 12 * 16 * 2048 * 4096, 33 * 2048
    assert costs.training_flops == 6 * (1_235_814_400 - norms) + attention


KEPT = (
    *(name for name in VARIANTS if "projection=false" not in name),
    *("transformer:dropout=0.1", "gpt2:dropout=0.1"),
)


@needs_kernels
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("name", KEPT)
def test_activations_equal_the_tensors_that_autograd_keeps(name: str, compiled: bool) -> None:
    """The short formula comes near it, but for models that keep hardly anything."""
    sizes = {"embed_dim": 92, "heads": 4, "head_size": 22, "layers": 3, "block_size": 64}
    a, vocab_size, windows = parts_of(resolve(variant(name), sizes)), 7, 5
    model = a.build(vocab_size).train()
    tensors = [*model.parameters(), *model.buffers()]
    lasting = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in lasting:
            kept[storage.data_ptr()] = storage
        return tensor

    ids = torch.zeros((windows, a.block_size), dtype=torch.long)
    generators = [torch.Generator() for _ in range(windows)] if a.dropout else []
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        use_kernels(Kernels(compiled)),
        dropout_from(generators),
    ):
        model.loss(ids, ids)
    found = sum(storage.nbytes() for storage in kept.values())
    costs = a.costs(vocab_size)
    by_blocks = costs.layers * costs.kept_features
    estimated = 4 * (by_blocks + 2 * costs.lm_head_inputs + vocab_size)
    most = 3 if name == "dot-product" else FACTOR
    assert found / FACTOR < ids.numel() * estimated < most * found
