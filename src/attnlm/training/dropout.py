"""The random numbers that a model draws in a training step."""

from __future__ import annotations

import torch

from attnlm.compute.device import Device
from attnlm.config.settings import Config
from attnlm.data.batches import window_seeds
from attnlm.model.language_model import LanguageModel
from attnlm.model.layers import dropout_from


class DropoutDraws:
    """Seeds for dropout. They depend only on the run's seed, the step and the window's index."""

    def __init__(self, config: Config, device: Device, windows: int) -> None:
        """Seed the computation of `windows` windows at once."""
        training = config.training.complete()
        has_dropout = bool(config.spec.settings().get("dropout"))
        # Own code, a GPU and compiled code draw from PyTorch's own generator.
        is_torch_drawing = device.name != "cpu" or training.compile == "on"
        self._seed = training.seed
        self._windows = windows
        self._seeds_torch = bool(config.codes) or (has_dropout and is_torch_drawing)
        has_generators = has_dropout and not is_torch_drawing
        self.generators = [torch.Generator() for _ in range(windows if has_generators else 0)]

    def seed(self, step: int, first: int) -> None:
        """Seed the draws for a step and the windows from index `first` of the whole batch on."""
        if not self._seeds_torch and not self.generators:
            return
        seeds = window_seeds(self._seed, step, first, self._windows)
        if self._seeds_torch:
            torch.manual_seed(seeds[0])
        for generator, seed in zip(self.generators, seeds, strict=False):
            generator.manual_seed(seed)


@torch.no_grad()
def draws_or_changes_buffers(model: LanguageModel) -> bool:
    """Return True if own code draws random numbers or changes buffers in training.

    The replicas' threads would draw from one generator, and change different buffers.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.random.fork_rng(devices=[]), dropout_from([torch.Generator()]):
        state = torch.get_rng_state()
        model.train()(torch.zeros(1, model.block_size, dtype=torch.long))
        is_changed = not state.equal(torch.get_rng_state())
    for name, buffer in model.named_buffers():
        is_changed |= not buffer.equal(buffers[name])
        buffer.copy_(buffers[name])
    return is_changed
