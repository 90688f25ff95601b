"""Measure a run's loss on a validation split, and take snapshots of a model in training."""

from __future__ import annotations

import contextlib
import copy
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from attnlm.base.errors import AttnlmError, NotFiniteError
from attnlm.base.events import Note, OnEvent
from attnlm.compute.device import Device, choose_device, use_precision
from attnlm.compute.threads import torch_settings_restored
from attnlm.data.dataset import Dataset, ids_at, open_dataset
from attnlm.generation.native_decoder import is_fastest_on_cpu
from attnlm.generation.sampling import sampler_of
from attnlm.generation.sampling_config import SamplingConfig
from attnlm.model.language_model import LanguageModel, evaluating
from attnlm.model.recorder import record
from attnlm.runs.journal import PASSAGE, Snapshot
from attnlm.runs.load_model import check_tokenizer, load_model
from attnlm.runs.run import Run, open_run
from attnlm.see.head_scores import snapshot_scores
from attnlm.see.shown_tokens import token_texts
from attnlm.training.optimizer import flatten_parameters
from attnlm.training.schedule import MOST_TOKENS, is_whole_affordable
from attnlm.training.validation import Evaluation, Split, right_answers, validation_loss

_SAMPLED_TOKENS = 80


def evaluate(
    run: str | Path | Run | None = None,
    *,
    checkpoint: str = "auto",
    data: str | Path | Dataset | None = None,
    device: str = "auto",
) -> Evaluation:
    """Return the loss of a run's checkpoint on the validation split of a data set.

        attnlm.evaluate("multi-head-001").loss  # nats per token; also perplexity, bits_per_byte

    The data set is `data` or, if `data` is None, the one that the run was trained on. At most the
    first 4,194,304 tokens of the split are measured. On the machine of the training, the loss
    equals bit for bit what training logged for the same tokens, because `evaluate` keeps the
    layout of parameters in memory, the threads and the precision of the training.

    Raises AttnlmError if something is missing or damaged, if `data` was encoded with another
    tokenizer, or if the loss is not finite.
    """
    run = open_run(run)
    if data is None:
        dataset = run.open_dataset()
    else:
        dataset = open_dataset(data)
        check_tokenizer(run, dataset)
    model, chosen = load_model(run, checkpoint=checkpoint, device=device)
    training = run.config.training
    if chosen.name == training.device:
        chosen = choose_device(chosen.name, training.dtype)
    flatten_parameters(model, training)
    with torch_settings_restored():
        use_precision(chosen)
        threads = max(training.threads or 1, torch.get_num_threads())  # training may leave 1
        here = replace(training, device=chosen.name, dtype=chosen.dtype, threads=threads)
        evaluation = validation_loss(model, Split.of(dataset, training), here)
        if not math.isfinite(evaluation.loss):
            raise NotFiniteError
        if dataset.val_examples is None:
            return evaluation
        is_right = right_answers(model, dataset.val, dataset.val_examples, chosen)
        evaluation = replace(evaluation, accuracy=float(is_right.mean()))
        longer = dataset.longer_examples()
        if longer is not None and not longer[1].is_longer(model.block_size).any():
            is_right = right_answers(model, *longer, chosen)
            evaluation = replace(evaluation, longer_accuracy=float(is_right.mean()))
        return evaluation


def measure_on_whole(run: Run, dataset: Dataset, on_event: OnEvent) -> None:
    """Measure a run's best and last checkpoints on the whole validation split; save the losses.

    The losses are the last lines of the run's metrics. Do nothing if they are there already, if the
    evaluations during training covered the whole split, or if measuring would cost much compared
    with the training. Of a split over 4,194,304 tokens, only the first 4,194,304 are measured.
    """
    if not run.evaluated_part or run.whole():
        return
    checkpoints = [run.checkpoint("best"), run.checkpoint("last")]
    steps = {checkpoint.step: checkpoint for checkpoint in checkpoints}
    if not is_whole_affordable(run.config, dataset.val_tokens, max(steps), len(steps)):
        return
    which = "whole" if dataset.val_tokens <= MOST_TOKENS else "beginning of the"
    tokens = min(dataset.val_tokens, MOST_TOKENS)
    on_event(Note(f"measuring on the {which} validation split, {tokens:,} tokens"))
    records = {record.step: record for record in run.evaluations()}
    for step, checkpoint in steps.items():
        found = evaluate(
            run, checkpoint=checkpoint.which, data=dataset, device=run.config.training.device
        )
        records[step] = replace(
            records[step],
            val_loss=found.loss,
            bits_per_byte=found.bits_per_byte,
            evaluated_tokens=found.tokens,
            accuracy=found.accuracy,
        )
    run.append_evaluations(
        *(replace(records[saved.step], checkpoint=saved.which) for saved in checkpoints)
    )


def take_snapshot(dataset: Dataset, step: int, model: LanguageModel, device: Device) -> Snapshot:
    """Return a snapshot of the model.

    A snapshot is a sampled text of _SAMPLED_TOKENS tokens, attention maps for the beginning of the
    validation split, and scores of all heads. The text is "" if sampling fails. PyTorch's random
    state is not used.
    """
    length = min(PASSAGE, model.block_size)
    passage = ids_at(dataset.val, slice(length), model.vocab_size, "val.bin").tolist()
    text = ""
    maps = None
    scores = None
    # The training loop reports numbers that are not finite.
    with evaluating(model), np.errstate(all="ignore"):
        with contextlib.suppress(AttnlmError):
            if device.name != "cpu" and is_fastest_on_cpu(model.spec, model.vocab_size):
                on_cpu = copy.deepcopy(model).cpu().float()
                sampler = sampler_of(on_cpu, dataset.tokenizer, Device("cpu", "float32", "faster"))
            else:
                sampler = sampler_of(model, dataset.tokenizer, device)
            config = SamplingConfig(tokens=_SAMPLED_TOKENS, seed=0, ignore_eos=True)
            text = "".join(sampler.stream(sampler.prompt_ids(""), config))
        recorded = record(model, torch.tensor([passage], device=device.torch))
        with contextlib.suppress(AttnlmError):
            maps = recorded.maps[:, 0].float().cpu().numpy()
            scores = snapshot_scores(model, dataset.val, device.torch)
    return Snapshot.of(step, text, maps, scores, token_texts(dataset.tokenizer, passage))
