"""Models of the Hugging Face Hub, by name: its own client downloads them, to its own cache."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import Note, OnEvent, Progress
from attnlm.base.folders import is_folder
from attnlm.text.compressed import optional
from attnlm.text.records import first_line

_TOKENIZERS = (("tokenizer.json",), ("vocab.json", "merges.txt"))
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
_NETWORK = "check the network; or copy the model's folder to this machine, and import that"


def is_name(source: str) -> bool:
    """Whether this could name a model of the Hub: NAME or OWNER/NAME."""
    return bool(re.fullmatch(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", source))


def check_source(source: str | Path) -> None:
    """Raises AttnlmError unless there is such a folder or safetensors file, or it may be a name."""
    if not str(source):
        raise UsageError(
            "the name of a model can't be empty", "name a folder, a file, or a model on the Hub"
        )
    path = Path(source)
    if path.exists() or is_folder(path):
        fits = is_folder(path) or path.suffix == ".safetensors"
    else:
        fits = is_name(str(source))
    if not fits:
        raise AttnlmError(
            f"{source} is neither a folder nor a safetensors file, nor a model's name",
            "give a folder in Hugging Face's format, or a name on the Hub, such as Qwen/Qwen3-0.6B",
        )


def downloaded(
    name: str, revision: str | None, check: Callable[[Path], None], on_event: OnEvent
) -> Path:
    """A folder with the files of a model that an import reads; its name is their commit.

    `check` sees the folder before it has weights. What is in the cache is not downloaded again, and
    a download that was cut off goes on where it ended. Raises AttnlmError.
    """
    hub = optional("huggingface_hub", "hf", f"downloading {name}")
    api = hub.HfApi()
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)  # errors are told by us
    try:
        with _explaining(name, revision):
            info = api.model_info(name, revision=revision, files_metadata=True)
    except AttnlmError as error:
        if (kept := _kept(hub, name, revision)) is None or error.hint != _NETWORK:
            raise
        on_event(Note(f"{error.message}; the copy in the Hub's cache is taken"))
        return kept
    sizes = {file.rfilename: file.size or 0 for file in info.siblings}
    described, weights = _wanted(name, sizes)
    report = _report(sum(sizes[file] for file in described + weights), on_event)
    folder = Path()
    for files in described, weights:
        for file in files:
            with _explaining(name, revision):
                path = hub.hf_hub_download(name, file, revision=info.sha, tqdm_class=report)
            folder = Path(path).parent
        if files is described:
            check(folder)
    return folder


def _wanted(name: str, sizes: dict[str, int]) -> tuple[list[str], list[str]]:
    """What describes a model, and its weights, among the files of the Hub."""
    tokenizer = next((files for files in _TOKENIZERS if sizes.keys() >= set(files)), ())
    described = ["config.json", *tokenizer]
    weights = [_WHOLE] if _WHOLE in sizes else sorted(filter(_SHARD.fullmatch, sizes))
    if weights != [_WHOLE] and _INDEX in sizes:
        described.append(_INDEX)
    for what, is_lacking in {
        "config.json": "config.json" not in sizes,
        "tokenizer.json, nor vocab.json and merges.txt": not tokenizer,
        "weights as safetensors": not weights,
    }.items():
        if is_lacking:
            raise AttnlmError(
                f"{name} on the Hub has no {what}",
                "choose a model of the GPT-2, Llama or Qwen3 family with these files",
            )
    return described, weights


def _report(total: int, on_event: OnEvent) -> type[Any]:
    """What the client takes for a progress bar: it reports the bytes of all files together."""
    done = 0

    def add(count: float | None) -> None:
        nonlocal done
        done += int(count or 0)
        on_event(Progress("download", done, total, "B"))

    class Report(tqdm):  # type: ignore[type-arg]  # no type of items at run time
        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)
            super().__init__(*args, **{**options, "disable": True})
            add(options.get("initial"))

        def update(self, n: float | None = 1) -> None:
            add(n)

    return Report


def _kept(hub: Any, name: str, revision: str | None) -> Path | None:
    """The folder that was downloaded before, as far as it was; None where there is none."""
    try:
        path = hub.hf_hub_download(name, "config.json", revision=revision, local_files_only=True)
        return Path(path).parent
    except Exception:  # noqa: BLE001  # whatever keeps it from being found
        return None


@contextlib.contextmanager
def _explaining(name: str, revision: str | None) -> Iterator[None]:
    """Turns what the client says into one line, and a hint."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError:
        raise AttnlmError(
            f"{name} is gated: its owner asks for your consent first",
            "accept its terms on its page of the Hub, then log in: hf auth login",
        ) from None
    except errors.RepositoryNotFoundError:
        raise AttnlmError(
            f"the Hub has no model {name}, or it is private",
            "check the name (OWNER/NAME); for a private model log in: hf auth login",
        ) from None
    except errors.RevisionNotFoundError:
        raise AttnlmError(
            f"{name} has no `revision` {revision}", "give a branch, a tag or a commit of it"
        ) from None
    except Exception as error:  # whatever their code, or the Hub, has to say
        raise AttnlmError(
            f"there is no folder {name}, and it can't be downloaded from the Hub: "
            f"{first_line(error)}",
            _NETWORK,
        ) from error
