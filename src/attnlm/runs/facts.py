"""How a run was trained, in words, for what goes with an exported model."""

from __future__ import annotations

from collections.abc import Iterator

from attnlm.runs.run import Checkpoint, Run


def facts(run: Run, checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Labels, and what they say of a checkpoint."""
    about, training = run.dataset, run.config.training
    if run.imported_from:
        yield "origin", f"imported from {run.imported_from}"
        return
    yield (
        "data",
        f"{about['name']}, {about['train_tokens']:,} tokens to train on, "
        f"{about['val_tokens']:,} to validate",
    )
    yield "SHA-256 of the training tokens", about["train_sha256"]
    yield "tokenizer", f"{run.tokenizer.name}, {run.vocab_size:,} ids"
    steps = f"{checkpoint.step:,} of {training.length}"
    tokens = checkpoint.step * run.config.tokens_per_step
    yield "steps", f"{steps}, {tokens:,} tokens"
    whole = run.whole().get(checkpoint.which, {})
    loss, part = whole.get("val_loss", checkpoint.val_loss), "" if whole else run.evaluated_part
    if loss is not None:
        over = part or "the whole validation split"
        yield "validation loss", f"{loss:.4f} nats per token, over {over}"
    if about["bigram_loss"] is not None:
        yield "for comparison", f"the counted bigram has {about['bigram_loss']:.4f}"
    yield "optimizer", f"{training.optimizer}, learning rate {training.learning_rate:g}"
    yield "seed", str(training.seed)
