"""The README.md of an exported model: what it is, and how it was trained."""

from __future__ import annotations

import json
from collections.abc import Iterator

import attnlm
from attnlm.runs.facts import facts
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
    yield from (f"- {label}: {_plain(value)}" for label, value in facts(run, checkpoint))
    if run.imported_from:
        return
    yield from ("", "## Settings", "", "As a recipe of attnlm:", "", "```toml")
    for name, setting in run.config.settings().items():
        yield f"{name} = {json.dumps(setting)}"
    yield "```"


def _plain(text: str) -> str:
    """A name in one line of Markdown, nothing of it read as markup."""
    return "".join(f"\\{c}" if c in r"\`*_[]<>#|" else c if c.isprintable() else "?" for c in text)
