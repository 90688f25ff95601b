"""Gradients of two processes averaged over our one vector, and by PyTorch's DDP.

`python -m benchmarks.gradients` in each of several processes, as torchrun starts them; prints
seconds of a forward and backward pass with either, in turns.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from attnlm.base.setting_fields import Setting
from attnlm.config.settings import resolve
from attnlm.model.language_model import LanguageModel
from attnlm.model.ops import Kernels, use_kernels
from attnlm.training.optimizer import FlatOptimizer
from tests.models import parts_of

VOCAB, ROUNDS, STEPS = 65, 5, 10
SHAPES: dict[str, dict[str, Setting]] = {
    "transformer": {"model": "transformer", "batch_size": 16},
    "4 × 192, context 256": {
        "model": "transformer",
        "layers": 4,
        "embed_dim": 192,
        "heads": 6,
        "block_size": 256,
        "batch_size": 16,
    },
    "6 × 384, context 256": {
        "model": "transformer",
        "layers": 6,
        "embed_dim": 384,
        "heads": 6,
        "block_size": 256,
        "batch_size": 8,
    },
}


class _Loss(nn.Module):
    """A model whose forward pass is its loss, as DDP wants it."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.model.loss(inputs, targets)
        return loss


def main() -> None:
    """Prints one line of JSON for each shape, from the first process."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for name, settings in SHAPES.items():
        config = resolve(settings)
        torch.manual_seed(0)
        flat, wrapped = (parts_of(config).build(VOCAB) for _ in range(2))
        vector = FlatOptimizer(flat, config.training).gradient
        parallel = DistributedDataParallel(_Loss(wrapped), gradient_as_bucket_view=True)
        rows = config.training.batch_size // dist.get_world_size()
        ids = torch.randint(VOCAB, (rows, config.spec.block_size))

        def by_vector(
            flat: LanguageModel = flat, vector: Tensor = vector, ids: Tensor = ids
        ) -> None:
            vector.zero_()
            flat.loss(ids, ids).backward()
            dist.all_reduce(vector)
            vector.mul_(1 / dist.get_world_size())

        def by_ddp(parallel: DistributedDataParallel = parallel, ids: Tensor = ids) -> None:
            parallel.zero_grad()
            parallel(ids, ids).backward()

        pairs = [(_seconds(by_vector), _seconds(by_ddp)) for _ in range(ROUNDS + 1)][1:]
        if dist.get_rank() == 0:
            ours, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
            ratio = statistics.median(b / a for a, b in pairs)
            print(json.dumps({"shape": name, "vector": ours, "ddp": theirs, "ratio": ratio}))
    dist.destroy_process_group()


def _seconds(step: Callable[[], None]) -> float:
    dist.barrier()
    began = time.perf_counter()
    with use_kernels(Kernels(native_ops=True, matmul="onednn", attention="native")):
        for _ in range(STEPS):
            step()
    return (time.perf_counter() - began) / STEPS


if __name__ == "__main__":
    main()
