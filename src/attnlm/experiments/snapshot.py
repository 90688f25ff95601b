"""Takes a snapshot of a model: 80 sampled tokens, and every head's map of one short passage."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from attnlm.base.errors import AttnlmError
from attnlm.compute.device import Device
from attnlm.data.dataset import Dataset, ids_at
from attnlm.generation.sampling import Sampler
from attnlm.generation.sampling_config import SamplingConfig
from attnlm.model.language_model import LanguageModel
from attnlm.model.recorder import record
from attnlm.runs.ticker import PASSAGE, Snapshot
from attnlm.see.text import token_texts


def take_snapshot(
    step: int, model: LanguageModel, dataset: Dataset, device: Device, tokens: int = 80
) -> Snapshot:
    """Return a sample of so many tokens and the attention maps at this step.

    PyTorch's random state is not used. The text is "" if the model's numbers give no probabilities.
    """
    training = model.training
    model.eval()
    try:
        # The training loop reports numbers that are not finite.
        with np.errstate(all="ignore"):
            return Snapshot(
                step, _sample(model, dataset, device, tokens), _maps(model, dataset, device)
            )
    finally:
        model.train(training)


def passage_texts(model: LanguageModel, dataset: Dataset) -> list[str]:
    """Return the tokens of the passage that the maps show."""
    return token_texts(dataset.tokenizer, _passage(model, dataset))


def _passage(model: LanguageModel, dataset: Dataset) -> list[int]:
    length = min(PASSAGE, model.architecture.block_size)
    ids: list[int] = ids_at(dataset.val, slice(length), model.vocab_size, "val.bin").tolist()
    return ids


def _sample(model: LanguageModel, dataset: Dataset, device: Device, tokens: int) -> str:
    sampler = Sampler(model, dataset.tokenizer, device)
    try:
        config = SamplingConfig(tokens=tokens, seed=0, ignore_eos=True)
        return "".join(sampler.stream(sampler.prompt_ids(""), config))
    except AttnlmError:
        return ""


def _maps(model: LanguageModel, dataset: Dataset, device: Device) -> NDArray[np.float32] | None:
    if not model.architecture.maps_per_layer:
        return None
    ids_T = torch.tensor(_passage(model, dataset), device=device.torch)
    maps_LHTT: NDArray[np.float32] = record(model, ids_T[None]).weights[:, 0].float().cpu().numpy()
    return maps_LHTT
