"""Download models of the Hugging Face Hub by name, with the Hub's client and its cache."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnlm.base.errors import AttnlmError, UsageError, import_optional
from attnlm.base.events import OnEvent, Progress
from attnlm.base.folders import is_folder
from attnlm.text.record_files import first_line

DESCRIPTION = (
    "config.json", "tokenizer.json", "vocab.json", "merges.txt",
    "model.safetensors.index.json",
)  # fmt: skip
WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors")
_NAME = r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?"  # NAME or OWNER/NAME


def check_source(source: str | Path) -> None:
    """Raise AttnlmError if `source` is not a folder, a safetensors file or a model's name."""
    if not str(source):
        raise UsageError(
            "the name of a model cannot be empty", "name a folder, a file, or a model on the Hub"
        )
    is_file = Path(source).suffix == ".safetensors" or is_folder(Path(source))
    if not (is_file if os.path.lexists(source) else re.fullmatch(_NAME, str(source))):
        raise AttnlmError(
            f"{source} is not a folder, a safetensors file or the name of a model",
            "use a folder in Hugging Face's format, or a name on the Hub, such as Qwen/Qwen3-0.6B",
        )


def download(name: str, revision: str | None, patterns: Sequence[str], on_event: OnEvent) -> Path:
    """Download files of a model that match `patterns`. Return their folder, named by the commit.

    The Hub's client caches files, resumes an interrupted download, and uses the cached model if the
    network is unavailable.
    """
    hub = import_optional("huggingface_hub", f"downloading {name}")
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]  # no type of items at run time
        """A bar that shows nothing, and reports the bytes of all files as Progress."""

        def __init__(self, *args: Any, **options: Any) -> None:
            self._counts_bytes = options.get("unit") == "B"
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self._counts_bytes:
                on_event(Progress("download", int(self.n), int(self.total or 0), "B"))

    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)  # its errors are shown below
    try:
        return Path(
            hub.snapshot_download(
                name, revision=revision, allow_patterns=[*patterns], tqdm_class=Bar
            )
        )
    except Exception as error:  # from the client, its HTTP library or the Hub
        problem = {
            "GatedRepoError": f"{name} is gated: you have to accept its terms first, on its page",
            "RepositoryNotFoundError": f"model {name} not found on the Hub, or it is private",
            "RevisionNotFoundError": f"`revision` {revision} of {name} not found",
        }.get(
            type(error).__name__,
            f"folder {name} not found, and the download from the Hub failed: {first_line(error)}",
        )
        raise AttnlmError(
            problem,
            "check the name (OWNER/NAME), `revision` and the network; for a gated or private model "
            "log in: hf auth login",
        ) from error
