"""Random numbers in training, which depend only on the run's seed, the step and the window."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

from attnlm.compute.device import Device
from attnlm.config.settings import Config
from attnlm.data.batches import window_seeds


@contextlib.contextmanager
def keeping_random_state(device: Device, config: Config) -> Iterator[None]:
    """Restore the random state of the CPU, the device and all GPUs at the end of the context.

    torch.manual_seed seeds the generators of all devices, whichever device the model is on. Own
    code may draw from Python's and NumPy's generators, too.
    """
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    apple = torch.mps.get_rng_state() if device.name == "mps" else None
    others = (random.getstate(), np.random.get_state()) if config.codes else None
    with torch.random.fork_rng(gpus):
        try:
            yield
        finally:
            if apple is not None:
                torch.mps.set_rng_state(apple)
            if others is not None:
                random.setstate(others[0])
                np.random.set_state(others[1])


def seed_generators(seed: int, config: Config) -> None:
    """Seed PyTorch's generators and, for own code, those of Python and NumPy."""
    torch.manual_seed(seed)
    if config.codes:
        random.seed(seed)
        np.random.seed(seed % 2**32)


class StepDraws:
    """Seeds for dropout and for what own code draws in a step."""

    def __init__(self, config: Config, device: Device, windows: int) -> None:
        """Seed the computation of `windows` windows at once."""
        training = config.training.complete()
        has_dropout = bool(config.spec.settings().get("dropout"))
        # Own code, a GPU and compiled code draw from PyTorch's own generator.
        is_torch_drawing = device.name != "cpu" or training.compile == "torch"
        self._config = config
        self._seed = training.seed
        self._windows = windows
        self._seeds_torch = bool(config.codes) or (has_dropout and is_torch_drawing)
        has_generators = has_dropout and not is_torch_drawing
        self.generators = [torch.Generator() for _ in range(windows if has_generators else 0)]
        """of dropout, one for each window; empty if PyTorch's own generator is used"""

    def seed(self, step: int, first: int) -> None:
        """Seed the draws for a step and the windows from index `first` of the whole batch on."""
        if not self._seeds_torch and not self.generators:
            return
        seeds = window_seeds(self._seed, step, first, self._windows)
        if self._seeds_torch:
            seed_generators(seeds[0], self._config)
        for generator, seed in zip(self.generators, seeds, strict=False):
            generator.manual_seed(seed)
