"""Exports a run to a format of other tools."""

from __future__ import annotations

import os
from pathlib import Path

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import OnEvent, ignore
from attnlm.runs.forms import Exported, check_format
from attnlm.runs.gguf.export import export_to_gguf
from attnlm.runs.hugging_face.export import export_to_hf
from attnlm.runs.open_run import open_run
from attnlm.runs.run import Run


def export(
    run: str | Path | Run | None,
    path: str | Path,
    *,
    to: str = "hf",
    type: str | None = None,
    checkpoint: str = "auto",
    checkpoint_dir: str | Path = "checkpoints",
    on_event: OnEvent | None = None,
) -> Exported:
    """Writes a run's checkpoint in another format: `hf`, a new folder for `transformers`, or
    `gguf`, a new file for llama.cpp, its numbers of `type` f32 (default), f16 or q8_0.

        attnlm.export("transformer-001", "exported")

    What is written is whole or absent. Raises UsageError for an unknown format or type and for a
    model that the format can't express, AttnlmError when there is something at `path` already, when
    files are missing or damaged, and where the tokenizer can't be expressed.
    """
    check_format(to, type)
    if not str(path):
        raise UsageError("the name of what to write can't be empty", "name a new folder or file")
    opened = open_run(run, checkpoint_dir=checkpoint_dir)
    if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(opened.path)):
        raise AttnlmError(
            f"{path} lies in the run's own folder", "name a folder or file outside of it"
        )
    if to == "hf":
        return export_to_hf(opened, Path(path), checkpoint=checkpoint)
    return export_to_gguf(
        opened, Path(path), checkpoint=checkpoint, type=type or "f32", on_event=on_event or ignore
    )
