"""Hugging Face's libraries: the client of the Hub, `transformers` without its messages, `peft`."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attnlm.base.errors import AttnlmError, UsageError, import_optional
from attnlm.base.events import OnEvent, Progress
from attnlm.base.files import json_object, open_regular
from attnlm.base.folders import is_folder
from attnlm.base.setting_fields import quoted
from attnlm.text.record_files import first_line

COPY = "copy the folder again from its source"
PREFIX = "hf:"
"""The beginning of a name on the Hub, where another name would be a folder's."""
WEIGHTS = ("model*.safetensors", "adapter_model.safetensors")
_ADAPTER = "adapter_config.json"
_DESCRIPTION = ("config.json", _ADAPTER, "tokenizer.json", "vocab.json", "merges.txt")
_NAME = r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?"  # NAME or OWNER/NAME
_OLDEST = (5, 3)
"""In older versions of transformers, a config.json could run code (CVE-2026-4372)."""


def check_source(source: str | Path) -> None:
    """Raise AttnlmError if `source` is not a folder, a safetensors file or a model's name."""
    if not str(source):
        raise UsageError(
            "the name of a model cannot be empty", "name a folder, a file, or a model on the Hub"
        )
    is_file = Path(source).suffix == ".safetensors"
    is_name = not is_file and re.fullmatch(_NAME, str(source))
    if not (is_file or is_folder(Path(source)) if os.path.lexists(source) else is_name):
        raise AttnlmError(
            f"{source} is not a folder, a safetensors file or the name of a model",
            "use a folder in Hugging Face's format, or a name on the Hub, such as Qwen/Qwen3-0.6B",
        )


def describe(
    source: str, base: str | Path | None, revision: str | None, on_event: OnEvent
) -> dict[str, Path]:
    """Return the folder of a model, which has no weights yet, by the model's name.

    If the model is an adapter, its base comes first: `base` (default: as the adapter says).
    """
    folder = fetch(source, revision, _DESCRIPTION, on_event)
    if not (folder / _ADAPTER).is_file():
        if base is not None:
            raise UsageError("`base` applies only to adapters of peft", "leave it out")
        return {source: folder}
    base = str(base or json_object(folder / _ADAPTER).get("base_model_name_or_path") or "")
    if not base:
        raise UsageError(f"{source} is an adapter that names no model", "name its model as `base`")
    check_source(base)
    return {base: fetch(base, None, _DESCRIPTION, on_event), source: folder}


def fetch(source: str, revision: str | None, patterns: Sequence[str], on_event: OnEvent) -> Path:
    """Return the folder of a model, or of a file of it.

    If `source` is a name on the Hub, the files that match `patterns` are downloaded; the folder has
    the name of the commit. The Hub's client caches files, resumes an interrupted download, and uses
    the cached model if the network is unavailable.
    """
    if os.path.lexists(source):
        return Path(source) if is_folder(Path(source)) else Path(source).parent
    hub = import_optional("huggingface_hub", f"downloading {source}")
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

    with _explaining(f"folder {source} not found, and the download from the Hub", source, revision):
        folder = hub.snapshot_download(
            source, revision=revision, allow_patterns=[*patterns], tqdm_class=Bar
        )
    return Path(folder)


def check_upload(place: str) -> None:
    """Raise UsageError if `place` is not hf:OWNER/NAME, AttnlmError if nobody is logged in."""
    if "/" not in place or not re.fullmatch(PREFIX + _NAME, place):
        raise UsageError(f"{place} is not the name of a model on the Hub", "use hf:OWNER/NAME")
    if import_optional("huggingface_hub", "an upload").get_token() is None:
        raise AttnlmError("nobody is logged in to the Hugging Face Hub", "log in: hf auth login")


def upload(folder: Path, place: str, public: bool) -> None:
    """Create a model on the Hub from the files in `folder`. `place` is hf:OWNER/NAME.

    Raises AttnlmError if the model exists: nothing on the Hub is overwritten.
    """
    hub = import_optional("huggingface_hub", "an upload").HfApi()
    name = place.removeprefix(PREFIX)
    with _explaining(f"the upload of {name}", name, None):
        hub.create_repo(name, private=not public)
        hub.upload_folder(repo_id=name, folder_path=folder, commit_message="Export from attnlm")


@contextlib.contextmanager
def _explaining(what: str, name: str, revision: str | None) -> Iterator[None]:
    """Turn errors of the Hub's client into AttnlmError, and silence its log."""
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    try:
        yield
    except Exception as error:  # from the client, its HTTP library or the Hub
        if getattr(getattr(error, "response", None), "status_code", None) == 409:
            raise AttnlmError(
                f"{name} exists on the Hub, where nothing is overwritten",
                "choose another name; if an upload was interrupted, delete the model on its page",
            ) from error
        problem = {
            "GatedRepoError": f"{name} is gated: you have to accept its terms first, on its page",
            "RepositoryNotFoundError": f"model {name} not found on the Hub, or it is private",
            "RevisionNotFoundError": f"`revision` {revision} of {name} not found",
        }.get(type(error).__name__, f"{what} failed: {first_line(error)}")
        raise AttnlmError(
            problem,
            "check the name (OWNER/NAME), `revision` and the network; for a gated or private model "
            "log in: hf auth login",
        ) from error


def import_transformers(what: str) -> Any:
    """Return the library for `what`. Raises AttnlmError if it is missing or too old."""
    library = import_optional("transformers", what)
    if tuple(map(int, library.__version__.split(".")[:2])) < _OLDEST:
        raise AttnlmError(
            f"transformers {library.__version__} is too old",
            "install a newer one: pip install -U transformers",
        )
    return library


@contextlib.contextmanager
def quiet_transformers(what: str, hint: str) -> Iterator[None]:
    """Silence transformers, and turn any error in `what` into AttnlmError."""
    from transformers.utils import logging as log

    level, has_bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity(logging.CRITICAL)
    log.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except AttnlmError:
        raise
    except Exception as error:  # of any library that transformers uses
        reason = " ".join(str(error).split())[:200].rstrip(". ") or type(error).__name__
        raise AttnlmError(f"transformers cannot {what}: {reason}", hint) from error
    finally:
        log.set_verbosity(level)
        if has_bars:
            log.enable_progress_bar()


def load(stock: Any, config: Any, folder: Path, file: Path | None) -> Any:
    """Return a model of the class `stock` in float32, with the weights in a folder or a file of it.

    Raises AttnlmError if tensors are missing, unexpected or of another shape.
    """
    import torch
    from safetensors.torch import load_file

    paths = [file] if file else sorted(folder.glob(WEIGHTS[0]))
    if not paths:
        raise AttnlmError(
            f"{folder} has no model.safetensors",
            "get the weights as safetensors: pickled ones could run code, and are not read",
        )
    with quiet_transformers(f"read the weights in {folder}", COPY):
        for path in paths:
            open_regular(path).close()
        model, info = stock.from_pretrained(
            None,
            config=config,
            state_dict={n: tensor for path in paths for n, tensor in load_file(path).items()},
            dtype=torch.float32,
            # With SDPA, GPT-2 ignores its options for scales in some versions.
            attn_implementation="eager" if config.model_type == "gpt2" else "sdpa",
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    for name in sorted(info["missing_keys"]):
        raise AttnlmError(f"the tensor {name} is missing", COPY)
    for name in sorted(info["unexpected_keys"]):
        what = f"the tensor {quoted(name)} does not belong to the model in config.json"
        raise AttnlmError(what, "import a model that was not changed")
    return model


def with_adapter(model: Any, folder: Path) -> Any:
    """Return a model of transformers with the LoRA adapter in `folder`, merged by peft."""
    from safetensors.torch import load_file
    from torch.random import fork_rng

    path = folder / _ADAPTER
    content = json_object(path)
    peft = import_optional("peft", "importing an adapter")
    if content.get("peft_type") != "LORA" or content.get("megatron_config") is not None:
        raise AttnlmError(
            f"{path} has an adapter that attnlm does not read: it is not LORA, or names code",
            "merge it with peft first: model.merge_and_unload().save_pretrained(DIR)",
        )
    with quiet_transformers(f"merge the adapter in {folder}", "copy it again"), fork_rng([]):
        wrapped = peft.PeftModel(model, peft.LoraConfig.from_pretrained(str(folder)))
        loaded = peft.set_peft_model_state_dict(wrapped, load_file(folder / WEIGHTS[1]))
        missing = [name for name in loaded.missing_keys if ".default." in name]
        for name in [*missing, *loaded.unexpected_keys]:
            raise AttnlmError(f"the adapter does not fit its model: {name}", "see `base`")
        return wrapped.merge_and_unload()
