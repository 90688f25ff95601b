"""The weights of a run: as a checkpoint holds them, or with its adapters folded in.

The checkpoints of a run that trains adapters hold these alone. The weights that they are for lie in
its folder: a link to its parent's file, which takes no room and stays when that is replaced.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from attnlm.base.errors import AttnlmError, NotFiniteError
from attnlm.base.rows import rows_of
from attnlm.model.lora import fold
from attnlm.runs.checkpoint import load_checkpoint, stated_digest
from attnlm.runs.run import Run


def load_weights(
    run: Run, path: Path, rank: int = 0, count: int = 1
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The facts of one of a run's checkpoints, and the weights of its model, adapters folded in.

    Of `count` processes, that share rows out, those of one. Raises as `load_checkpoint` does.
    """
    lora = run.config.training.adapters
    if lora is None:
        facts, weights, _ = load_checkpoint(path, run.config.model, run.vocab_size, rank, count)
        return facts, weights
    facts, adapters, _ = load_checkpoint(path, run.config.model, run.vocab_size, lora=lora)
    weights = base_weights(run)
    fold(weights, adapters, lora)
    if count > 1:
        weights = {n: w[rows_of(len(w), rank, count)].clone() for n, w in weights.items()}
    return facts, weights


def base_weights(run: Run) -> dict[str, Tensor]:
    """The weights that a run's adapters are for. Raises as `load_checkpoint` does."""
    hint = "copy the run's folder again, with all of its files"
    if not run.base.exists():
        raise AttnlmError(
            f"{run.base} is missing: the weights that the run's adapters are for", hint
        )
    assert run.parent is not None
    try:
        if stated_digest(run.base) == run.parent.get("base"):
            return load_checkpoint(run.base, run.config.model, run.vocab_size)[1]
    except NotFiniteError:
        raise
    except AttnlmError as error:  # both of the run's checkpoints need it
        raise AttnlmError(error.message, hint) from None
    raise AttnlmError(f"{run.base} is not what the run's adapters are for", hint)
