"""The model of a run."""

from __future__ import annotations

from pathlib import Path

from attnlm.compute.device import Device, choose_device
from attnlm.model.inspection import model_of
from attnlm.model.language_model import LanguageModel
from attnlm.runs.open_run import open_run
from attnlm.runs.run import Run
from attnlm.runs.weights import load_weights


def load_model(
    run: str | Path | Run | None = None,
    *,
    checkpoint: str = "auto",
    device: str = "auto",
    checkpoint_dir: str | Path = "checkpoints",
) -> tuple[LanguageModel, Device]:
    """The model of a run (by default the one trained last), ready to be used, and its device.

    The model is a torch.nn.Module in evaluation mode, on `device.torch`: ids (B, T) of at most
    block_size tokens → logits (B, T, V).

        model, device = attnlm.load_model("multi-head-001")
        ids = attnlm.open_run("multi-head-001").tokenizer.encode("Once ")
        logits = model(torch.tensor([ids], device=device.torch))

    `checkpoint` is auto, best or last, `device` auto, cpu, cuda or mps. Raises AttnlmError when
    files are missing or damaged, or the device is not available.
    """
    run = open_run(run, checkpoint_dir=checkpoint_dir)
    path = run.checkpoint(checkpoint).path
    # A run in float32 stays so on any device; bfloat16 only where the hardware has it.
    dtype = "float32" if run.config.training.dtype == "float32" else "auto"
    chosen = choose_device(device, dtype)
    _, weights = load_weights(run, path)
    model = model_of(run.config.model, run.vocab_size, weights)
    return model.to(chosen.torch).eval(), chosen
