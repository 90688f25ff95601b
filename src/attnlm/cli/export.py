"""`attnlm export`: a run for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from attnlm.base.errors import UsageError
from attnlm.cli import completion, console
from attnlm.cli.displays import PreparationDisplay
from attnlm.cli.help import Command
from attnlm.cli.options import Checkpoint, CheckpointDir, JsonOption, RunArgument, opened_run
from attnlm.runs.forms import FORMATS, check_format


class ExportCommand(Command):
    """`attnlm export [RUN] PATH`: a single argument is the path."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As Typer does, which gives RUN a single argument. Raises UsageError without any."""
        rest = super().parse_args(ctx, args)
        if ctx.resilient_parsing:  # for completion: the rest is not typed yet
            return rest
        given = [ctx.params.pop(name) for name in ("run_option", "run", "path")]
        named = [name for name in given if name is not None]
        if len(named) == 3:
            raise UsageError("RUN and --run exclude each other", "give one of them")
        if not named or (len(named) == 1 and given[0] is not None):
            raise UsageError(
                "the folder or file to write is missing",
                "attnlm export [RUN] DIR, or attnlm export [RUN] FILE.gguf --to gguf",
            )
        ctx.params |= {"run": named[0] if len(named) == 2 else None, "path": named[-1]}
        return rest

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """`[RUN] DIR|FILE`."""
        return [p.replace("[DIR|FILE]", "DIR|FILE") for p in super().collect_usage_pieces(ctx)]


def export(
    run: RunArgument = None,
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="DIR|FILE", help="folder (hf) or file (gguf) to create", show_default=False
        ),
    ] = None,
    to: Annotated[
        str,
        typer.Option(
            help="format: hf, a folder for transformers, or gguf, a file for llama.cpp",
            autocompletion=completion.choices(*FORMATS),
        ),
    ] = "hf",
    type: Annotated[
        str | None,
        typer.Option(
            help="number format of the gguf file: f32, f16 or q8_0 (8 bits); default: f32",
            autocompletion=completion.choices(*FORMATS["gguf"]),
            show_default=False,
        ),
    ] = None,
    checkpoint: Checkpoint = "auto",
    checkpoint_dir: CheckpointDir = Path("checkpoints"),
    json: JsonOption = False,
) -> None:
    """Write a run in a format that other tools load."""
    assert path is not None  # the command's class sees to it
    if run is None and (checkpoint_dir / path / "config.json").exists():
        raise UsageError(
            f"{path} is a run: the folder or file to write is missing",
            f"attnlm export {path} DIR, or attnlm export {path} FILE.gguf --to gguf",
        )
    if to == "hf" and path.endswith(".gguf"):
        raise UsageError(f"{path} is a file's name, and hf a folder", "give --to gguf")
    check_format(to, type)
    opened = opened_run(run, checkpoint_dir)

    from attnlm.experiments import export as experiment

    exported = experiment.export(
        opened, path, to=to, type=type, checkpoint=checkpoint, on_event=PreparationDisplay()
    )
    console.say(
        f"{opened.name}, {opened.checkpoint(exported.checkpoint)}: {exported.form}, "
        f"{opened.parameters:,} parameters"
    )
    if json:
        console.result_json(
            {
                "path": str(exported.path),
                "class" if to == "hf" else "architecture": exported.form,
                "checkpoint": exported.checkpoint,
                "parameters": opened.parameters,
            }
        )
    else:
        console.result(str(exported.path))
