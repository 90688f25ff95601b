"""Whether this machine trains as fast as it can: ten steps, beside the products it is able to."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from attnlm.compute.device import choose_device
from attnlm.compute.threads import compute_all, new_pool, threads_of_torch
from attnlm.experiments.plan import plan
from attnlm.model.ops import Kernels, using
from attnlm.model.ops.linear import product

USUAL_SHARE = 0.45
"""Of the products' speed, on a CPU: 0.42 to 0.48 were measured with two threads, 0.48 to 0.52 with
one."""

_MODEL: dict[str, Any] = {
    "layers": 2,
    "heads": 4,
    "embed_dim": 128,
    "block_size": 128,
    "batch_size": 16,
}
_VOCAB_SIZE = 256
_SIZE, _PRODUCTS = 1024, 12
_SMALL_SIZE, _SECONDS = 192, 0.25


@dataclass(frozen=True)
class SpeedCheck:
    """How fast a small transformer trains here."""

    device: str
    tokens_per_second: float
    flops_per_second: float
    """That its steps reach."""
    peak: float | None = None
    """FLOP/s of large float32 products, on a CPU: the most that a training can reach."""
    processor_share: float | None = None
    """How much of the processor time that it asked for this process was given."""

    @property
    def share(self) -> float | None:
        """Of the peak."""
        return None if self.peak is None else self.flops_per_second / self.peak


def check_speed() -> SpeedCheck:
    """Ten steps of a fixed transformer, and on a CPU what there is to reach. About three seconds.

    Raises AttnlmError where no step can be made.
    """
    device, threads = choose_device().name, torch.get_num_threads()
    on_cpu = device == "cpu"
    share = _processor_share(threads) if on_cpu else None
    peaks = [peak_of_products(threads)] if on_cpu else []
    planned = plan(
        vocab_size=_VOCAB_SIZE,
        tokens=10**6,
        model="transformer",
        optimizer="adamw",
        device=device,
        threads=threads,
        seed=0,
        **_MODEL,
    )
    peaks += [peak_of_products(threads)] if on_cpu else []
    return SpeedCheck(
        device,
        planned.tokens_per_second,
        planned.flops_per_second,
        peak=max(peaks, default=None),
        processor_share=share,
    )


def peak_of_products(threads: int) -> float:
    """FLOP/s of float32 products on a CPU, by the faster of PyTorch's two libraries.

    The fastest of some products: another program hardly disturbs all of them.
    """
    one, other = torch.rand(_SIZE, _SIZE), torch.rand(_SIZE, _SIZE)
    best = float("inf")
    with threads_of_torch(threads):
        for matmul in ("blas", "onednn"):
            for _ in range(_PRODUCTS):
                began = time.perf_counter()
                with using(Kernels(matmul=matmul)):
                    product(one, other)
                best = min(best, time.perf_counter() - began)
    return 2 * _SIZE**3 / best


def _processor_share(threads: int) -> float:
    """Of the time of so many threads that only compute, how much they were running."""

    def compute() -> float:
        one = torch.rand(_SMALL_SIZE, _SMALL_SIZE)
        made = torch.empty_like(one)
        began, ran = time.perf_counter(), time.thread_time()
        while time.perf_counter() - began < _SECONDS:
            torch.mm(one, one, out=made)
        return (time.thread_time() - ran) / (time.perf_counter() - began)

    pool = new_pool(threads)
    try:
        with threads_of_torch(1):
            return sum(compute_all([compute] * threads, pool)) / threads
    finally:
        pool.shutdown()
