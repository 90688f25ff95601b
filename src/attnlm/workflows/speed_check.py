"""Compare the speed of ten training steps with the speed of matmuls on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from attnlm.base.formatting import quantity
from attnlm.compute.device import choose_device
from attnlm.compute.native import native_library
from attnlm.compute.threads import compute_all, new_pool, threads_of_torch
from attnlm.config.variants import variant
from attnlm.model.ops import Kernels, use_kernels
from attnlm.model.ops.attention import fused_attention
from attnlm.model.ops.linear import matmul
from attnlm.training.kernel_choice import faster_matmul
from attnlm.workflows.plan import plan

# Fraction of the FLOP/s of matmuls that training reaches on a CPU: 0.42 to 0.48 were measured with
# two threads, 0.48 to 0.52 with one, on an idle machine.
_USUAL_SHARE = 0.45
# Limits of the processor time and of the usual speed, as fractions: less means a problem.
_LEAST_TIME = 0.85
_LEAST_OF_USUAL = 0.5

_MODEL = "transformer:layers=2:heads=4:embed_dim=128:block_size=128:batch_size=16:optimizer=adamw"
_SIZE = 1024
_PRODUCTS = 12
_SMALL_SIZE = 192
_SECONDS = 0.25
_ROWS = 512
_WIDTH = 256
_ROUNDS = 8
_MUCH_SLOWER = 1.2  # a smaller difference may be noise


def check_speed() -> tuple[str, str]:
    """Return how fast a small transformer trains here, and a remedy if that is slow, else "".

    The check makes ten steps and, on a CPU, compares them with matmuls, in about three seconds.
    Raises AttnlmError if steps can't be made.
    """
    device = choose_device().name
    threads = torch.get_num_threads()
    on_cpu = device == "cpu"
    processor_share = _processor_share(threads) if on_cpu else 1.0
    before = peak_matmul_speed(threads) if on_cpu else 0.0
    settings: Any = {**variant(_MODEL), "device": device, "threads": threads, "seed": 0}
    planned = plan(vocab_size=256, tokens=10**6, **settings)
    reached = planned.flops_per_second
    text = f"{quantity(planned.tokens_per_second)} tokens/s, {quantity(reached, 'FLOP/s')}"
    if not on_cpu:
        return f"{text} on {device}", ""
    peak = max(before, peak_matmul_speed(threads))
    text += f": {reached / peak:.0%} of the {quantity(peak, 'FLOP/s')} of matrix products alone"
    text += f" ({_USUAL_SHARE:.0%} or more is usual)"
    if processor_share < _LEAST_TIME:
        left = f"left {processor_share:.0%} to this one"
        return text, f"other programs use the processor, which {left}: stop them"
    if reached < _LEAST_OF_USUAL * _USUAL_SHARE * peak:
        return text, "try `threads` 1 or another number, and check the kernels above"
    return text, ""


def peak_matmul_speed(threads: int) -> float:
    """Return the FLOP/s of float32 matmuls on a CPU with the faster of PyTorch's two libraries.

    The fastest of several matmuls counts, because other programs may slow down the others.
    """
    left = torch.rand(_SIZE, _SIZE)
    right = torch.rand(_SIZE, _SIZE)
    best = float("inf")
    with threads_of_torch(threads):
        for library in ("blas", "onednn"):
            for _ in range(_PRODUCTS):
                began = time.perf_counter()
                with use_kernels(Kernels(matmul=library)):
                    matmul(left, right)
                best = min(best, time.perf_counter() - began)
    return 2 * _SIZE**3 / best


def compare_kernels() -> Iterator[tuple[str, str, str]]:
    """Yield the name of a setting, the milliseconds of each of its values, and a remedy, else "".

    A remedy is a value that is faster than the one that a rule chooses.
    """
    x = torch.rand(_ROWS, _WIDTH)
    query = torch.rand(1, 4, _ROWS, 64, requires_grad=True)
    weight = torch.rand(4 * _WIDTH, _WIDTH)

    def attend() -> None:
        fused_attention(query, query, query).sum().backward()

    matmuls = {n: (Kernels(matmul=n), lambda: matmul(x, weight)) for n in ("blas", "onednn")}
    yield _compare_values("matmul", faster_matmul(), matmuls)
    if native_library() is not None:
        kernels = {n: Kernels(native_ops=True, attention=n) for n in ("torch", "native")}
        ways = {name: (kernel, attend) for name, kernel in kernels.items()}
        yield _compare_values("attention_kernel", "native", ways)


def _compare_values(
    setting: str, chosen: str, ways: Mapping[str, tuple[Kernels, Callable[[], object]]]
) -> tuple[str, str, str]:
    """Compare ways to compute the same in one thread, in turns; the minimum of each counts."""
    best = dict.fromkeys(ways, float("inf"))
    with threads_of_torch(1):
        for _ in range(_ROUNDS):
            for name, (kernels, compute) in ways.items():
                with use_kernels(kernels):
                    compute()
                    began = time.perf_counter()
                    compute()
                best[name] = min(best[name], time.perf_counter() - began)
    fastest = min(best, key=lambda name: best[name])
    text = ", ".join(f"{name} {1e3 * seconds:.2g} ms" for name, seconds in best.items())
    is_slow = best[chosen] > _MUCH_SLOWER * best[fastest]
    remedy = f"`{setting}` {fastest} is faster here than the default" if is_slow else ""
    return setting, f"{chosen} ({text})", remedy


def _processor_share(threads: int) -> float:
    """Return the fraction of wall time that threads run; less than 1 if other programs run too."""

    def compute() -> float:
        matrix = torch.rand(_SMALL_SIZE, _SMALL_SIZE)
        product = torch.empty_like(matrix)
        began = time.perf_counter()
        ran = time.thread_time()
        while time.perf_counter() - began < _SECONDS:
            torch.mm(matrix, matrix, out=product)
        return (time.thread_time() - ran) / (time.perf_counter() - began)

    pool = new_pool(threads)
    try:
        with threads_of_torch(1):
            return sum(compute_all([compute] * threads, pool)) / threads
    finally:
        pool.shutdown()
