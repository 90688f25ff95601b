"""Take a snapshot of a model: 80 sampled tokens at most, and each head's map of a passage."""

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
    dataset: Dataset, tokens: int, step: int, model: LanguageModel, device: Device
) -> tuple[Snapshot, list[str]]:
    """Return a sample of `tokens` tokens with attention maps, and the tokens that the maps show.

    PyTorch's random state is not used. The sample is "" if the model's outputs give no
    probabilities.
    """
    length, training = min(PASSAGE, model.architecture.block_size), model.training
    passage = ids_at(dataset.val, slice(length), model.vocab_size, "val.bin").tolist()
    maps: NDArray[np.float32] | None = None
    model.eval()
    try:
        # The training loop reports numbers that are not finite.
        with np.errstate(all="ignore"):
            text = _sample(model, dataset, device, tokens)
            if model.architecture.maps_per_layer:
                recorded = record(model, torch.tensor([passage], device=device.torch))
                maps = recorded.weights[:, 0].float().cpu().numpy()
    finally:
        model.train(training)
    return Snapshot(step, text, maps), token_texts(dataset.tokenizer, passage)


def _sample(model: LanguageModel, dataset: Dataset, device: Device, tokens: int) -> str:
    sampler = Sampler(model, dataset.tokenizer, device)
    try:
        config = SamplingConfig(tokens=tokens, seed=0, ignore_eos=True)
        return "".join(sampler.stream(sampler.prompt_ids(""), config))
    except AttnlmError:
        return ""
