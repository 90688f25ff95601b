"""Exports a run to a format of other tools, or runs to a page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import OnEvent, ignore
from attnlm.runs.forms import Exported, check_format
from attnlm.runs.gguf.export import export_to_gguf
from attnlm.runs.hugging_face.export import export_to_hf
from attnlm.runs.open_run import open_run
from attnlm.runs.run import Run
from attnlm.see.play import export_to_html


def export(
    run: str | Path | Run | Sequence[str | Path | Run | None] | None,
    path: str | Path,
    *,
    to: str = "hf",
    type: str | None = None,
    force: bool = False,
    checkpoint: str = "auto",
    checkpoint_dir: str | Path = "checkpoints",
    on_event: OnEvent | None = None,
) -> Exported:
    """Write a run's checkpoint in another format: `hf`, a new folder for `transformers`; `gguf`, a
    new file for llama.cpp, its numbers of `type` f32 (default), f16 or q8_0; or `html`, a page in
    which the model runs, its numbers of `type` f32 (default up to 2 million parameters) or f16.

        attnlm.export("transformer-001", "exported")
        attnlm.export(["bigram-001", "multi-head-001"], "page.html", to="html")

    A page holds one run or several. `force` replaces a page, and allows more than 60 million
    parameters.

    What is written is whole or absent. Raises UsageError for an unknown format or type and for a
    model that the format can't express, AttnlmError when there is something at `path` already, when
    files are missing or damaged, and where the tokenizer can't be expressed.
    """
    check_format(to, type)
    if not str(path):
        raise UsageError("the name of what to write can't be empty", "name a new folder or file")
    runs = [run] if run is None or isinstance(run, str | Path | Run) else run
    opened = [open_run(one, checkpoint_dir=checkpoint_dir) for one in runs]
    if to != "html" and (len(opened) > 1 or force):
        what = "several runs" if len(opened) > 1 else "`force`"
        raise UsageError(f"`to` {to} can't take {what}", "give one run, or `to` html")
    for one in opened:
        if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(one.path)):
            raise AttnlmError(
                f"{path} lies in the run's own folder", "name a folder or file outside of it"
            )
    if to == "html":
        return export_to_html(opened, Path(path), type=type, checkpoint=checkpoint, force=force)
    (only,) = opened
    if to == "hf":
        return export_to_hf(only, Path(path), checkpoint=checkpoint)
    return export_to_gguf(
        only, Path(path), checkpoint=checkpoint, type=type or "f32", on_event=on_event or ignore
    )
