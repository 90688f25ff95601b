"""`attnlm eval`: the loss of a run."""

from __future__ import annotations

from pathlib import Path

import attnlm
from attnlm.cli import completion, console, options
from attnlm.cli.displays import reference_losses
from attnlm.cli.options import option


def evaluate(
    run: str | None = options.RUN,
    checkpoint: str = options.CHECKPOINT,
    data: str | None = option(
        None, "name or path of another data set with the same tokenizer", completion.datasets
    ),
    device: str = options.DEVICE,
    checkpoint_dir: Path = options.CHECKPOINT_DIR,
    data_dir: Path = options.DATA_DIR,
    verify: bool = options.VERIFY,
    json: bool = options.JSON,
) -> None:
    """Measure a model's loss on the validation split.

    Of a larger split, the first 4,194,304 tokens are used.
    """
    opened = attnlm.open_run(run, checkpoint_dir=checkpoint_dir)
    other = None if data is None else attnlm.open_dataset(data, data_dir=data_dir, verify=verify)
    about = opened.dataset if other is None else vars(other)
    bigram, floor = about["bigram_loss"], about["floor"]
    chosen = opened.checkpoint(checkpoint)
    evaluation = attnlm.evaluate(
        opened, checkpoint=chosen.which, data=other, device=device, data_dir=data_dir, verify=verify
    )
    console.say(
        f"{opened.name}, step {chosen.step} ({chosen.which}), "
        f"{evaluation.tokens:,} tokens predicted"
    )
    console.say(f"baselines: {reference_losses(opened.vocab_size, bigram, floor)}")
    facts = {
        "val_loss": evaluation.loss,
        "bits_per_byte": evaluation.bits_per_byte,
        "perplexity": evaluation.perplexity,
        "tokens": evaluation.tokens,
        "bigram_loss": bigram,
        "floor": floor,
        "checkpoint": chosen.which,
        "step": chosen.step,
    }
    perplexity = evaluation.perplexity
    shown = f"{perplexity:,.3f}" if perplexity < 1e6 else "above a million"
    words = f"{evaluation.loss:.4f} nats per token, {evaluation.bits_per_byte:.4f} bits per byte"
    console.result_or_json(f"{words}, perplexity {shown}", facts, json)
