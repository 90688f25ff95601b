"""`attnlm eval`: the loss of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attnlm.cli import completion, console
from attnlm.cli.options import (
    Checkpoint,
    CheckpointDir,
    DataDir,
    DeviceOption,
    JsonOption,
    RunArgument,
    Verify,
    opened_run,
)


def evaluate(
    run: RunArgument = None,
    checkpoint: Checkpoint = "auto",
    data: Annotated[
        str | None,
        typer.Option(
            help="another data set with the same tokenizer", autocompletion=completion.datasets
        ),
    ] = None,
    device: DeviceOption = "auto",
    checkpoint_dir: CheckpointDir = Path("checkpoints"),
    data_dir: DataDir = Path("data"),
    verify: Verify = False,
    json: JsonOption = False,
) -> None:
    """Measure a model's loss on the whole validation split."""
    opened = opened_run(run, checkpoint_dir)

    from attnlm.experiments import evaluate as experiment

    chosen = opened.checkpoint(checkpoint)
    evaluation = experiment.evaluate(
        opened,
        checkpoint=chosen.which,
        data=data,
        device=device,
        data_dir=data_dir,
        verify=verify,
    )
    console.say(
        f"{opened.name}, step {chosen.step} ({chosen.which}), "
        f"{evaluation.tokens:,} tokens predicted"
    )
    if json:
        console.result_json(
            {
                "val_loss": evaluation.loss,
                "bits_per_byte": evaluation.bits_per_byte,
                "perplexity": evaluation.perplexity,
                "tokens": evaluation.tokens,
                "checkpoint": chosen.which,
                "step": chosen.step,
            }
        )
    else:
        perplexity = evaluation.perplexity
        shown = f"{perplexity:,.3f}" if perplexity < 1e6 else "above a million"
        console.result(
            f"{evaluation.loss:.4f} nats per token, {evaluation.bits_per_byte:.4f} bits per byte, "
            f"perplexity {shown}"
        )
