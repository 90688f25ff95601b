"""Takes a moment of a run: one line of sample, and every head's map of one short passage."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from attnlm.dataset import Dataset, ids_at
from attnlm.device import Device
from attnlm.errors import AttnlmError
from attnlm.explicit import explicit_pass
from attnlm.model import Bigram, LanguageModel
from attnlm.sampling import Sampler, SamplingConfig
from attnlm.see.text import token_texts
from attnlm.ticker import PASSAGE, Moment

_SAMPLING = SamplingConfig(tokens=80, seed=0)


def take_moment(step: int, model: LanguageModel, dataset: Dataset, device: Device) -> Moment:
    """What the model says and sees now. Nothing is drawn from torch's random state.

    The text is "" where the model's numbers give no probabilities.
    """
    training = model.training
    model.eval()
    try:
        # What numbers have gone wrong is found, and named, by whoever trains.
        with np.errstate(all="ignore"):
            return Moment(step, _said(model, dataset, device), _maps(model, dataset, device))
    finally:
        model.train(training)


def passage_texts(model: LanguageModel, dataset: Dataset) -> list[str]:
    """The tokens that the maps are of."""
    return token_texts(dataset.tokenizer, _passage(model, dataset))


def _passage(model: LanguageModel, dataset: Dataset) -> list[int]:
    length = min(PASSAGE, model.config.block_size)
    ids: list[int] = ids_at(dataset.val, slice(length), model.vocab_size, "val.bin").tolist()
    return ids


def _said(model: LanguageModel, dataset: Dataset, device: Device) -> str:
    sampler = Sampler(model, dataset.tokenizer, device)
    try:
        return sampler.samples(sampler.prompt_ids(""), _SAMPLING)[0]
    except AttnlmError:
        return ""


def _maps(model: LanguageModel, dataset: Dataset, device: Device) -> NDArray[np.float32] | None:
    if isinstance(model, Bigram):
        return None
    ids_T = torch.tensor(_passage(model, dataset), device=device.torch)
    maps_LHTT: NDArray[np.float32] = explicit_pass(model, ids_T).weights.float().cpu().numpy()
    return maps_LHTT
