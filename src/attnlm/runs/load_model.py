"""Load the model of a run, and the weights of its parent: the run whose weights it started from.

Only `load_model` loads torch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from attnlm.base.errors import AttnlmError
from attnlm.compute.device import Device, choose_device
from attnlm.data.dataset import Dataset
from attnlm.model.spec import is_ours
from attnlm.runs.checkpoint import Array, load_checkpoint
from attnlm.runs.records import ParentRecord
from attnlm.runs.run import Checkpoint, Run, open_run

if TYPE_CHECKING:
    from attnlm.model.language_model import LanguageModel


def load_model(
    run: str | Path | Run | None = None,
    *,
    checkpoint: str | Checkpoint = "auto",
    device: str = "auto",
) -> tuple[LanguageModel, Device]:
    """Return the model of a run (default: the newest one), and its device.

    The model is a torch.nn.Module in evaluation mode, on `device.torch`: ids (B, T) of at most
    block_size tokens → logits (B, T, V).

        model, device = attnlm.load_model("multi-head-001")
        ids = attnlm.open_run("multi-head-001").tokenizer.encode("Once ")
        logits = model(torch.tensor([ids], device=device.torch))

    Hooks of all its modules fire when the model is called. `model.loss(inputs, targets)` does not
    call the LM head. `checkpoint` is auto, best, last, or a step that `keep_every` kept. `device`
    is auto, cpu, cuda or mps. Raises AttnlmError if files are missing or damaged, or if the device
    is not available.
    """
    from attnlm.model.building import build_with_weights

    run = open_run(run)
    chosen = run.checkpoint(checkpoint)
    # A float32 run stays float32 on any device; others use bfloat16 if the hardware has it.
    dtype = "float32" if run.config.training.dtype == "float32" else "auto"
    placed = choose_device(device, dtype)
    model = build_with_weights(run.config.spec, run.vocab_size, load_weights(run, chosen))
    return model.to(placed.torch).eval(), placed


def load_weights(run: Run, checkpoint: Checkpoint) -> dict[str, Array]:
    """Return the weights of a run's model."""
    return load_checkpoint(checkpoint.path, run.config.spec, run.vocab_size)[1]


def checked_weights(run: Run, checkpoint: Checkpoint) -> dict[str, Array]:
    """Return the weights of a run's model, for code that computes the model without its modules.

    Raises as `load_weights` and `check_textbook` do.
    """
    weights = load_weights(run, checkpoint)
    if not has_usual_classes(run):
        from attnlm.model.building import uninitialised_model
        from attnlm.model.inspection import check_textbook

        check_textbook(uninitialised_model(run.config.spec, run.vocab_size, "meta"), run.name)
    return weights


def has_usual_classes(run: Run) -> bool:
    """Return True if the classes of a run's model compute what its settings say.

    The program around attnlm may have changed them, if they are loaded.
    """
    if not is_ours(run.config.spec):
        return False
    if "attnlm.model.language_model" not in sys.modules:
        return True
    from attnlm.model.building import uninitialised_model
    from attnlm.model.inspection import is_as_built

    return is_as_built(uninitialised_model(run.config.spec, run.vocab_size, "meta"))


# --- The run that a run starts from ---------------------------------------------------------------


def check_tokenizer(parent: Run, dataset: Dataset) -> None:
    """Raise AttnlmError if the data set was not encoded with the parent's tokenizer."""
    if dataset.tokenizer.to_json() != parent.tokenizer.to_json():
        raise AttnlmError(
            f"{dataset.name} was not encoded with the tokenizer of {parent.name}",
            f"prepare its text again with `tokenizer` {parent.path}",
        )


def parent_record(parent: Run, checkpoint: str) -> ParentRecord:
    """Return what a new run records about its parent. Raises as `Run.checkpoint` does."""
    start = parent.checkpoint(checkpoint)
    return ParentRecord(
        name=parent.name,
        path=str(parent.path.absolute()),
        checkpoint=start.which,
        step=start.step,
        sha256=parent.facts(start.path).sha256,
    )


def parent_weights(run: Run, parent: ParentRecord) -> Mapping[str, Array]:
    """Return the weights that a run starts from: its parent's, as `load_weights` returns them.

    Raises AttnlmError if the parent was trained further after the run began.
    """
    parent_run = open_run(Path(parent.path))
    start = parent_run.checkpoint(parent.checkpoint)
    facts, weights, _ = load_checkpoint(start.path, parent_run.config.spec, parent_run.vocab_size)
    if facts["sha256"] != parent.sha256:
        raise AttnlmError(
            f"{parent.name} has changed since {run.name} was created from it",
            "wait until its training has ended, then start again",
        )
    return weights
