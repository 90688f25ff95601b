"""Random numbers in training, which depend only on the run's seed, the step and the window."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

from attnlm.compute.device import Device


@contextlib.contextmanager
def keeping_random_state(device: Device) -> Iterator[None]:
    """Restore the generators that `seed_generators` seeds at the end of the context."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    apple = torch.mps.get_rng_state() if device.name == "mps" else None
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(gpus):
        try:
            yield
        finally:
            if apple is not None:
                torch.mps.set_rng_state(apple)
            random.setstate(python)
            np.random.set_state(numpy)


def seed_generators(seed: int) -> None:
    """Seed PyTorch's generators of all devices and, since own code may draw from them, those of
    Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
