"""Random numbers in training, which depend only on the run's seed, the step and the window."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

from attnlm.compute.device import Device
from attnlm.config.settings import Config


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
