"""A run in a format of other tools."""

from __future__ import annotations

from pathlib import Path

from attnlm.base.errors import UsageError
from attnlm.base.suggestions import suggestion
from attnlm.runs.hugging_face.export import Exported, export_to_hf
from attnlm.runs.open_run import open_run
from attnlm.runs.run import Run

_WRITERS = {"hf": export_to_hf}


def export(
    run: str | Path | Run | None,
    folder: str | Path,
    *,
    to: str = "hf",
    checkpoint: str = "auto",
    checkpoint_dir: str | Path = "checkpoints",
) -> Exported:
    """Writes a run's checkpoint to a new folder in another format: `hf`, for `transformers`.

        attnlm.export("transformer-001", "exported")

    The folder is written whole or not at all. Raises UsageError for an unknown format and for a
    model that the format can't express, AttnlmError when the folder is not empty and when files
    are missing or damaged.
    """
    if to not in _WRITERS:
        hint = suggestion(to, _WRITERS, f"choose from {', '.join(_WRITERS)}")
        raise UsageError(f"`to` can't be {to!r}", hint)
    opened = open_run(run, checkpoint_dir=checkpoint_dir)
    return _WRITERS[to](opened, Path(folder), checkpoint=checkpoint)
