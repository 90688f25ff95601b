"""A run's checkpoints measured on the whole validation split, once it has ended."""

from __future__ import annotations

from typing import Any

from attnlm.base.events import Note, OnEvent
from attnlm.data.dataset import Dataset
from attnlm.experiments.evaluate import evaluate
from attnlm.runs.run import Checkpoint, Run
from attnlm.training.price import is_whole_affordable
from attnlm.training.validation import MOST_TOKENS


def measure_on_whole(run: Run, dataset: Dataset, on_event: OnEvent) -> None:
    """Measures and records the best and the last checkpoint, where that is still to be done.

    Only where evaluations took a part of the split, and all of it is cheap beside the training.
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
