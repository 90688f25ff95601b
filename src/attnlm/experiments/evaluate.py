"""Measure the loss of a run on a validation split, in fixed windows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from attnlm.base.errors import AttnlmError, NotFiniteError
from attnlm.base.events import Note, OnEvent
from attnlm.compute.choices import keeping_threads
from attnlm.compute.device import choose_device, use_precision
from attnlm.data.dataset import Dataset, open_dataset
from attnlm.runs.load_model import load_model
from attnlm.runs.open_run import open_dataset_of, open_run
from attnlm.runs.run import Checkpoint, Run
from attnlm.training.kernels import kernels_of
from attnlm.training.optimizer import lay_side_by_side
from attnlm.training.price import is_whole_affordable
from attnlm.training.validation import MOST_TOKENS, Evaluation, validation_loss


def evaluate(
    run: str | Path | Run | None = None,
    *,
    checkpoint: str = "auto",
    data: str | Path | Dataset | None = None,
    device: str = "auto",
    checkpoint_dir: str | Path = "checkpoints",
    data_dir: str | Path = "data",
    verify: bool = False,
) -> Evaluation:
    """Return the loss of a run's checkpoint on the validation split of its data set, or `data`.

        attnlm.evaluate("multi-head-001").loss  # nats per token; also perplexity, bits_per_byte

    At most the first 4,194,304 tokens of the split are measured. The loss equals the number that
    training logged for the same tokens, bit for bit on the same machine: the layout of parameters
    in memory, the threads and the precision are the same. `open_dataset` describes `verify`.

    Raises AttnlmError if something is missing or damaged, if `data` was encoded with another
    tokenizer, or if the loss is not finite.
    """
    run = open_run(run, checkpoint_dir=checkpoint_dir)
    if data is None:
        dataset = open_dataset_of(run, Path(data_dir), verify=verify)
    else:
        dataset = open_dataset(data, data_dir=data_dir, verify=verify)
        if dataset.tokenizer.to_json() != run.tokenizer.to_json():
            raise AttnlmError(
                f"{dataset.name} was encoded with a different tokenizer than {run.name}'s",
                "a model can only be evaluated on ids of its own tokenizer",
            )
    model, chosen = load_model(run, checkpoint=checkpoint, device=device)
    training = run.config.training
    if chosen.name == training.device:
        chosen = choose_device(chosen.name, training.dtype)
    if training.lora is None:
        lay_side_by_side(model, training)
    else:
        model.requires_grad_(False)  # other libraries compute with frozen parameters
    with keeping_threads():
        use_precision(chosen)
        evaluation = validation_loss(
            model,
            dataset.val,
            chosen,
            bytes_per_token=dataset.bytes_per_token,
            kernels=kernels_of(training),
            threads=max(training.threads or 1, torch.get_num_threads()),  # training may leave 1
        )
    if not math.isfinite(evaluation.loss):
        raise NotFiniteError
    return evaluation


def measure_on_whole(run: Run, dataset: Dataset, on_event: OnEvent) -> None:
    """Measure the best and last checkpoints of a run on the whole split, and record the results.

    Do so only if the run's evaluations took a part of the split, and the whole split costs little
    compared with the training.
    """
    if not run.evaluated_part or run.whole():
        return
    best, last = run.checkpoint("best"), run.checkpoint("last")
    checkpoints = [last] if best.step == last.step else [best, last]
    if is_whole_affordable(run.config, dataset.val_tokens, last.step, len(checkpoints)):
        which = "whole" if dataset.val_tokens <= MOST_TOKENS else "beginning of the"
        tokens = min(dataset.val_tokens, MOST_TOKENS)
        on_event(Note(f"measuring on the {which} validation split, {tokens:,} tokens"))
        measured = {c.step: _measured(run, c, dataset) for c in checkpoints}
        run.save_whole({"best": measured[best.step], "last": measured[last.step]})


def _measured(run: Run, checkpoint: Checkpoint, dataset: Dataset) -> dict[str, Any]:
    device = run.config.training.device
    found = evaluate(run, checkpoint=checkpoint.which, data=dataset, device=device)
    return {
        "step": checkpoint.step,
        "val_loss": found.loss,
        "bits_per_byte": found.bits_per_byte,
        "evaluated_tokens": found.tokens,
    }
