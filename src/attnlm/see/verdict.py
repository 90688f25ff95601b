"""How a run went, in words, from its metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from attnlm.runs.run import Run

# Nats per token. Smaller differences between evaluations are not worth a word.
_NOTICEABLE = 0.01
_NEAR_FLOOR = 0.05
_FEW_TOKENS = 1000  # of validation, whose loss says little


def best_record(records: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """That of the evaluation with the lowest validation loss."""
    return min(records, key=lambda record: float(record["val_loss"]))


def verdict_of(run: Run, records: Sequence[Mapping[str, Any]]) -> str:
    """The verdict on a run, whose metrics are `records`."""
    about = run.dataset
    return verdict(records, bigram_loss=about["bigram_loss"], floor=about["floor"])


def verdict(
    records: Sequence[Mapping[str, Any]],
    *,
    bigram_loss: float | None = None,
    floor: float | None = None,
) -> str:
    """One sentence: whether the validation loss still falls, has levelled off, or rises again.

    `records` are the lines of metrics.jsonl, oldest first; the counted bigram's loss and the floor
    are in nats per token, where they are known.
    """
    best = min((float(record["val_loss"]) for record in records), default=math.inf)
    words = [_trend(records, floor)]
    if bigram_loss is not None and best > bigram_loss + _NOTICEABLE:
        words.append("not as good as the counted bigram")
    tokens = _tokens(records)
    if tokens < _FEW_TOKENS:
        words.append(f"{tokens:,} validation tokens are too few for a reliable loss")
    return "; ".join(words)


def _tokens(records: Sequence[Mapping[str, Any]]) -> float:
    """The number of tokens that the newest evaluation predicted; infinite if it is not known."""
    return records[-1].get("evaluated_tokens") or math.inf if records else math.inf


def _trend(records: Sequence[Mapping[str, Any]], floor: float | None) -> str:
    if len(records) < 3:
        return "too few evaluations to tell whether the loss still falls"
    losses = [float(record["val_loss"]) for record in records]
    best = min(range(len(losses)), key=losses.__getitem__)
    risen = losses[-1] - losses[best]
    # A token's loss changes by about 1 from one evaluation to another: their mean by 1/√tokens.
    if risen > max(_NOTICEABLE, 2 / math.sqrt(_tokens(records))):
        trained = [x for r in records[best:] if (x := r.get("train_loss")) is not None]
        since = f"step {records[best]['step']}"
        if trained and trained[-1] < trained[0] - _NOTICEABLE:
            why = f"overfitting since {since}: the validation loss has risen by {risen:.3f}"
        else:
            why = (
                f"the validation loss has risen by {risen:.3f} since {since} and the training "
                "loss does not fall: a lower `learning_rate` may help"
            )
        return f"{why}; the best checkpoint is kept"
    if floor is not None and losses[best] < floor + _NEAR_FLOOR:
        return f"within {max(0.0, losses[best] - floor):.3f} of the floor: nothing is left to learn"
    tail = max(1, len(losses) // 5)
    fallen = min(losses[:-tail]) - losses[best]
    if fallen > _NOTICEABLE:
        over = "over the last fifth of training"
        return f"loss still falling ({fallen:.3f} {over}): more steps would help"
    rates = [float(record.get("learning_rate", 0)) for record in records]
    if rates[-1] < max(rates) / 2:  # a loss that no longer falls may be all its doing
        return "loss levelled off as the learning rate fell: a longer run may reach a lower one"
    return "loss levelled off: a larger model or another learning rate may help, not more steps"
