"""Show a run in a notebook as plain HTML: facts, loss curve and links."""

from __future__ import annotations

import base64
import os
from html import escape
from pathlib import Path
from urllib.parse import quote

from attnlm.runs.run import Run

_LARGEST_PICTURE = 2**20  # bytes; curve.png has about 50,000
_LINKED = ("report.html", "curve.png", "config.json", "metrics.jsonl")


def run_html(run: Run) -> str:
    """Return the run's table, its loss curve if it has been drawn, and links to its files.

    Raises AttnlmError if its metrics are damaged, OSError if a file can't be read.
    """
    rows = "".join(
        f'<tr><th style="text-align:left">{escape(label)}</th>'
        f'<td style="text-align:left">{escape(value)}</td></tr>'
        for label, value in {"run": run.name, **run_facts(run)}.items()
    )
    return f"<div><table>{rows}</table>{_picture(run.path / 'curve.png')}{_links(run.path)}</div>"


def run_facts(run: Run) -> dict[str, str]:
    """Return facts about a run's model, data and losses, but no times.

    Raises AttnlmError if its metrics are damaged.
    """
    training, about = run.config.training, run.dataset
    facts = {"model": f"{run.config.model.model}, {run.parameters:,} parameters"}
    if run.imported_from:
        vocabulary = f"{run.vocab_size:,} ids ({run.tokenizer.name})"
        return {**facts, "vocabulary": vocabulary, "imported from": run.imported_from}
    facts["data"] = (
        f"{about['name']}: {run.vocab_size:,} ids, {about['train_tokens']:,} tokens to train on, "
        f"{about['val_tokens']:,} to validate"
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


def _picture(path: Path) -> str:
    if not path.is_file() or not 0 < path.stat().st_size <= _LARGEST_PICTURE:
        return ""
    content = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="loss by step" width="560" src="data:image/png;base64,{content}"/>'


def _links(folder: Path) -> str:
    """Return links to the folder and its files, relative to the working folder if possible,
    since a page can't open other files on its machine."""
    there = folder.absolute()
    if there.is_relative_to(Path.cwd()):
        there = Path(os.path.relpath(there))
    found = {str(there): there} | {n: there / n for n in _LINKED if (folder / n).is_file()}
    links = (
        f'<a href="{escape(quote(path.as_posix()))}" target="_blank">{escape(name)}</a>'
        for name, path in found.items()
    )
    return f"<div>{' · '.join(links)}</div>"
