"""`attnlm import`: import a model of another project as a run."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from attnlm.base.folders import command_for
from attnlm.cli import completion, console
from attnlm.cli.displays import Display
from attnlm.cli.options import CheckpointDir, JsonOption, option
from attnlm.runs.hugging_face.hub import check_source


def import_(
    source: Annotated[
        str,
        typer.Argument(
            metavar="DIR|FILE|NAME",
            help="folder in the format of Hugging Face or peft, a safetensors file in such a "
            "folder, or the name of a model on the Hugging Face Hub, such as Qwen/Qwen3-0.6B",
        ),
    ],
    base: Annotated[
        str | None,
        option("name or path of the run that a peft adapter was trained for", completion.runs),
    ] = None,
    name: Annotated[
        str | None, option("name of the run; default: <model>-001, <model>-002, …")
    ] = None,
    revision: Annotated[
        str | None, option("branch, tag or commit of a model on the Hub; default: main")
    ] = None,
    block_size: Annotated[int | None, option("context of the run; default: the model's")] = None,
    checkpoint_dir: CheckpointDir = Path("checkpoints"),
    json: JsonOption = False,
) -> None:
    """Import a model or an adapter from Hugging Face files as a run.

    Models: GPT-2, Llama, Mistral, Qwen2 and Qwen3. Adapters: LoRA of peft.
    """
    if base is None:
        check_source(source)

    from attnlm.runs.hugging_face.import_run import import_run

    with contextlib.closing(Display()) as display:
        run = import_run(
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
