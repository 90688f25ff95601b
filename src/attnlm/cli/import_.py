"""`attnlm import`: import a model of another project as a run."""

from __future__ import annotations

import contextlib
from pathlib import Path

import attnlm
from attnlm.base.folders import command_for
from attnlm.cli import completion, console, options
from attnlm.cli.displays import Display
from attnlm.cli.options import REQUIRED, argument, option
from attnlm.runs.hugging_face.hub import check_source


def import_(
    source: str = argument(
        REQUIRED,
        "DIR|FILE|NAME",
        "folder in the format of Hugging Face or peft, a safetensors file in such a "
        "folder, or the name of a model on the Hugging Face Hub, such as Qwen/Qwen3-0.6B",
    ),
    base: str | None = option(
        None, "name or path of the run that a peft adapter was trained for", completion.runs
    ),
    name: str | None = options.NAME,
    revision: str | None = option(
        None, "branch, tag or commit of a model on the Hub; default: main"
    ),
    block_size: int | None = option(None, "context of the run; default: the model's"),
    checkpoint_dir: Path = options.CHECKPOINT_DIR,
    json: bool = options.JSON,
) -> None:
    """Import a model or an adapter from Hugging Face files as a run.

    Models: GPT-2, Llama, Mistral, Qwen2 and Qwen3. Adapters: LoRA of peft.
    """
    if base is None:
        check_source(source)

    with contextlib.closing(Display()) as display:
        run = attnlm.import_run(
            source,
            base=base,
            name=name,
            revision=revision,
            block_size=block_size,
            checkpoint_dir=checkpoint_dir,
            on_event=display,
        )
    a = run.config.model
    console.say(
        f"{run.name}: {a.model}, {run.parameters:,} parameters: layers {a.layers}, "
        f"heads {a.heads}, embed_dim {a.embed_dim}, block_size {a.block_size:,}; "
        f"{run.vocab_size:,} ids ({run.tokenizer.name})"
    )
    facts = {"path": str(run.path), "model": a.model, "parameters": run.parameters}
    console.result_or_json(str(run.path), facts, json)
    console.say_next(command_for("attnlm sample", run.path))
