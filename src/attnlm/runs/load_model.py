"""Load the model of a run, or its weights with adapters merged.

The checkpoints of a run that trains adapters hold only the adapters. Its folder has the base
weights, if possible as a hard link to the parent's file: it takes no space and stays valid if that
file is replaced.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from attnlm.base.errors import AttnlmError, NotFiniteError
from attnlm.compute.device import Device, choose_device
from attnlm.compute.processes import rows_of
from attnlm.model.inspection import model_of
from attnlm.model.language_model import LanguageModel
from attnlm.model.lora import fold
from attnlm.runs.checkpoint import load_checkpoint, load_header
from attnlm.runs.open_run import open_run
from attnlm.runs.run import Checkpoint, Run


def load_model(
    run: str | Path | Run | None = None,
    *,
    checkpoint: str | Checkpoint = "auto",
    device: str = "auto",
    checkpoint_dir: str | Path = "checkpoints",
) -> tuple[LanguageModel, Device]:
    """Return the model of a run (default: the newest one), and its device.

    The model is a torch.nn.Module in evaluation mode, on `device.torch`: ids (B, T) of at most
    block_size tokens → logits (B, T, V).

        model, device = attnlm.load_model("multi-head-001")
        ids = attnlm.open_run("multi-head-001").tokenizer.encode("Once ")
        logits = model(torch.tensor([ids], device=device.torch))

    `checkpoint` is auto, best or last, `device` auto, cpu, cuda or mps. Raises AttnlmError if
    files are missing or damaged, or the device is not available.
    """
    run = open_run(run, checkpoint_dir=checkpoint_dir)
    chosen = run.checkpoint(checkpoint)
    # A float32 run stays float32 on any device; others use bfloat16 if the hardware has it.
    dtype = "float32" if run.config.training.dtype == "float32" else "auto"
    placed = choose_device(device, dtype)
    model = model_of(run.config.model, run.vocab_size, load_weights(run, chosen))
    return model.to(placed.torch).eval(), placed


def load_weights(
    run: Run, checkpoint: Checkpoint, rank: int = 0, count: int = 1
) -> dict[str, Tensor]:
    """Return the weights of a run's model, with adapters merged.

    If `count` processes share the rows, return the rows of process `rank`. Raises as
    `load_checkpoint` does.
    """
    about, lora = (run.config.model, run.vocab_size), run.config.training.adapters
    path, header = checkpoint.path, checkpoint.header
    if lora is None:
        return load_checkpoint(path, *about, rank, count, header=header)[1]
    _, adapters, _ = load_checkpoint(path, *about, lora=lora, header=header)
    weights = base_weights(run)
    fold(weights, adapters, lora)
    if count > 1:
        weights = {n: w[rows_of(len(w), rank, count)].clone() for n, w in weights.items()}
    return weights


def base_weights(run: Run) -> dict[str, Tensor]:
    """Return the base weights of a run with adapters. Raises as `load_checkpoint` does."""
    hint = "copy the run's folder again, with all of its files"
    if not run.base.exists():
        raise AttnlmError(
            f"{run.base} is missing: the weights that the run's adapters are for", hint
        )
    assert run.parent is not None
    about = run.base, run.config.model, run.vocab_size
    try:
        header = load_header(*about)
        if header.digest == run.parent["base"]:
            return load_checkpoint(*about, header=header)[1]
    except NotFiniteError:
        raise
    except AttnlmError as error:  # `checkpoint` can't help: best and last both need the base
        raise AttnlmError(error.message, hint) from None
    raise AttnlmError(f"{run.base} is not what the run's adapters are for", hint)
