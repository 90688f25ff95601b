"""Memory and precision of GPUs, simulated on a CPU: bfloat16, autocast, and large vocabularies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnlm.compute.device import Device
from attnlm.generation.decoders import CachedDecoder, PlainDecoder
from attnlm.model.linear import Linear
from attnlm.model.ops.linear import joined_linear
from tests.models import V, small_model, some_ids

CPU = Device("cpu", "float32", "tests")


class Operations(TorchDispatchMode):
    """Note the name, the size and the precision of what each operation returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[tuple[str, int, torch.dtype]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.made.append((func.overloadpacket.__name__, out.numel(), out.dtype))
        return out


@pytest.mark.parametrize("name", ["bigram", "multi-head", "transformer", "gpt2"])
@pytest.mark.parametrize("kind", [PlainDecoder, CachedDecoder])
def test_a_prompt_has_the_logits_of_its_last_token_alone(
    name: str, kind: type[PlainDecoder]
) -> None:
    """At the other positions they would be most of the memory that a large vocabulary takes."""
    model = small_model(name)
    ids_BT = some_ids(3, model.architecture.block_size)
    with Operations() as seen:
        found = kind(model, CPU).logits(ids_BT.numpy(), 0)
    np.testing.assert_allclose(found, model(ids_BT)[:, -1].detach(), rtol=1e-9, atol=1e-12)
    matmuls = [n for name, n, _ in seen.made if name in ("linear", "addmm", "mm", "embedding")]
    assert matmuls[-1] == 3 * V


@pytest.mark.parametrize("adapted", [(0,), (0, 2), (0, 1, 2)])
def test_maps_beside_adapters_keep_the_precision_of_autocast(adapted: tuple[int, ...]) -> None:
    maps = [Linear(8, size).requires_grad_(False) for size in (4, 4, 2)]
    for i in adapted:
        maps[i].adapt(2, 0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert joined_linear(torch.randn(2, 3, 8), maps).dtype == torch.bfloat16
