"""The README.md of an exported model: what it is, and how it was trained."""

from __future__ import annotations

import json
from collections.abc import Iterator

import attnlm
from attnlm.runs.run import Checkpoint, Run


def model_card(run: Run, checkpoint: Checkpoint, stock_class: str) -> str:
    """Markdown, with the header of fields that the Hugging Face hub reads."""
    return "\n".join(_lines(run, checkpoint, stock_class)) + "\n"


def _lines(run: Run, checkpoint: Checkpoint, stock_class: str) -> Iterator[str]:
    a = run.config.model
    yield from ("---", "library_name: transformers", "pipeline_tag: text-generation", "---", "")
    yield from (f"# {_plain(run.name)}", "")
    made = "imported into" if run.imported_from else "trained with"
    yield (
        f"A {a.model} of {run.parameters:,} parameters, {made} attnlm {attnlm.__version__} and "
        f"exported as {stock_class}. It sees {a.block_size:,} tokens at a time: longer texts are "
        "out of its range."
    )
    yield from ("", "```python", "from transformers import AutoModelForCausalLM, AutoTokenizer", "")
    yield 'model = AutoModelForCausalLM.from_pretrained("FOLDER")'
    yield 'tokenizer = AutoTokenizer.from_pretrained("FOLDER")'
    yield 'ids = tokenizer("The ", return_tensors="pt").input_ids'
    yield f"out = model.generate(ids, max_new_tokens={max(1, min(200, a.block_size // 2))})"
    yield from ("print(tokenizer.decode(out[0]))", "```", "", "## Training", "")
    yield from (f"- {label}: {value}" for label, value in _facts(run, checkpoint))
    if run.imported_from:
        return
    yield from ("", "## Settings", "", "As a recipe of attnlm:", "", "```toml")
    for name, setting in run.config.settings().items():
        yield f"{name} = {json.dumps(setting)}"
    yield "```"


def _facts(run: Run, checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    about, training = run.dataset, run.config.training
    if run.imported_from:
        yield "origin", f"imported from {_plain(run.imported_from)}"
        return
    yield (
        "data",
        f"{_plain(about['name'])}, {about['train_tokens']:,} tokens to train on, "
        f"{about['val_tokens']:,} to validate",
    )
    yield "SHA-256 of the training tokens", about["train_sha256"]
    yield "tokenizer", f"{run.tokenizer.name}, {run.vocab_size:,} ids"
    steps = f"{checkpoint.step:,} of {training.steps:,}"
    tokens = checkpoint.step * training.batch_size * run.config.model.block_size
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


def _plain(text: str) -> str:
    """A name in one line of Markdown, nothing of it read as markup."""
    return "".join(f"\\{c}" if c in r"\`*_[]<>#|" else c if c.isprintable() else "?" for c in text)
