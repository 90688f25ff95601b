"""Show a run in a notebook as plain HTML: a table and the loss curve."""

from __future__ import annotations

import base64
from html import escape

from attnlm.runs.run import Run

_LARGEST_PICTURE = 2**20  # bytes; curve.png has about 50,000


def run_html(run: Run) -> str:
    """Return HTML with a table about the run, and with its loss curve if curve.png exists.

    Raises AttnlmError if its metrics are damaged, OSError if a file can't be read.
    """
    rows = "".join(
        f'<tr><th style="text-align:left">{escape(label)}</th>'
        f'<td style="text-align:left">{escape(value)}</td></tr>'
        for label, value in {"run": run.name, "folder": str(run.path), **run_facts(run)}.items()
    )
    picture, path = "", run.path / "curve.png"
    if path.is_file() and 0 < path.stat().st_size <= _LARGEST_PICTURE:
        content = base64.b64encode(path.read_bytes()).decode()
        source = f"data:image/png;base64,{content}"
        picture = f'<img alt="loss by step" width="560" src="{source}"/>'
    return f"<div><table>{rows}</table>{picture}</div>"


def run_facts(run: Run) -> dict[str, str]:
    """Return the rows of the table, by label: the run's model, data and losses, but no times.

    Raises AttnlmError if its metrics are damaged.
    """
    training, about = run.config.training, run.dataset
    facts = {"model": f"{run.config.model.model}, {run.parameters:,} parameters"}
    if run.imported_from:
        vocabulary = f"{run.vocab_size:,} ids ({run.tokenizer.name})"
        return {**facts, "vocabulary": vocabulary, "imported from": run.imported_from}
    facts["data"] = (
        f"{about['name']}: {run.vocab_size:,} ids, {about['train_tokens']:,} tokens for training, "
        f"{about['val_tokens']:,} for validation"
    )
    if run.started_from:
        facts["started from"] = run.started_from
    result = run.result()
    step = 0 if result is None else result.last["step"]
    batch = f"{training.batch_size} × {run.config.model.block_size} tokens"
    facts["steps"] = f"{step:,} of {training.length}, each {batch}, seed {training.seed}"
    if result is not None:
        measured = {f"best loss, {run.evaluated_part or 'whole split'}": result.best}
        measured |= {f"{which} loss, whole split": result.whole[which] for which in result.whole}
        for label, found in measured.items():
            facts[label] = (
                f"{found['val_loss']:.4f} nats per token, {found['bits_per_byte']:.3f} bits per "
                f"byte, at step {found['step']:,}"
            )
    baselines = (f"{name} {loss:z.4f}" for name, loss in run.references().items())
    return {**facts, "baselines": ", ".join(baselines)}
