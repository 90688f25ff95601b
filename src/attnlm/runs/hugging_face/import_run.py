"""Create a run from a Hugging Face model."""

from __future__ import annotations

import os
from pathlib import Path

from attnlm.base import files
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import OnEvent, ignore
from attnlm.base.folders import check_name, is_folder
from attnlm.base.formatting import byte_size
from attnlm.compute.device import machine_memory
from attnlm.runs.checkpoint import save_one_by_one
from attnlm.runs.create_run import create_run_folder
from attnlm.runs.hugging_face.download_model import DESCRIPTION, WEIGHTS, check_source, download
from attnlm.runs.hugging_face.read_model import (
    DescribedModel,
    open_weights,
    read_config,
    without_empty_mlp,
)
from attnlm.runs.import_from_page import import_page_model, is_page_model
from attnlm.runs.records import CheckpointFacts, DatasetFacts
from attnlm.runs.run import Run
from attnlm.tokens.tokenizer import Tokenizer
from attnlm.tokens.tokenizer_json import read_tokenizer, read_vocab_and_merges

_OPENED = 1.3  # memory to sample, as a multiple of the weights: measured


def import_run(
    source: str | Path,
    *,
    name: str | None = None,
    revision: str | None = None,
    block_size: int | None = None,
    checkpoint_dir: str | Path = "checkpoints",
    on_event: OnEvent | None = None,
) -> Run:
    """Create a run from a Hugging Face folder, one of its safetensors files, or a name on the Hub.

        run = attnlm.import_run("exported", name="imported")

    A file that a page saved, in which the model was trained, needs no other file. Otherwise, the
    folder has config.json, safetensors files, and either tokenizer.json or both vocab.json and
    merges.txt. The model is of the GPT-2, Llama, Mistral, Qwen2 or Qwen3 family. If `source` is a
    name such as Qwen/Qwen3-0.6B and no folder has this name, the model is downloaded from the
    Hugging Face Hub; `revision` is a branch, tag or commit there. The run has a context of
    `block_size` tokens, by default the model's context. Only one tensor at a time is in memory.

    Raises AttnlmError if files are missing or damaged, if our models can't express the model
    exactly, or if its weights do not fit into this machine's memory. Raises UsageError for invalid
    arguments.
    """
    if name is not None:
        check_name(name)
    checkpoint_dir = Path(checkpoint_dir)
    path = Path(source)
    file = None
    with files.explaining_os_errors(checkpoint_dir, ", or name another `checkpoint_dir`"):
        check_source(source)
        is_local = os.path.lexists(source)
        if is_local:
            if revision is not None:
                raise UsageError(
                    "`revision` applies only to models of the Hub",
                    f"leave it out: {source} is on this machine",
                )
            if not is_folder(path) and is_page_model(path):
                if block_size is not None:
                    raise UsageError(
                        "`block_size` does not apply to a model that a page trained", "leave it out"
                    )
                return import_page_model(path, name=name, checkpoint_dir=checkpoint_dir)
            origin = str(path.absolute())
            folder, file = (path, None) if is_folder(path) else (path.parent, path)
            if (folder / "adapter_config.json").is_file():
                raise AttnlmError(
                    f"{source} is an adapter of peft, not a model",
                    "merge it with peft first: model.merge_and_unload().save_pretrained(DIR)",
                )
        else:
            folder = download(str(source), revision, DESCRIPTION, on_event or ignore)
            origin = f"{source}@{folder.name}"
        model = _read_fitting_config(folder, block_size)
        if not is_local:
            download(str(source), folder.name, WEIGHTS, on_event or ignore)
        with open_weights(folder, model, file) as read_weight:
            model = without_empty_mlp(model, read_weight)
            tokenizer = _read_tokenizer_files(folder, model.vocab_size)

            def add_checkpoint(run: Run) -> None:
                facts = CheckpointFacts(step=0).content()
                save_one_by_one(run.best, model.shapes, read_weight, facts)

            run = Run(
                Path(),
                model.config,
                vocab_size=model.vocab_size,
                parameters=model.parameters,
                dataset=DatasetFacts(name=origin.rpartition("/")[2].partition("@")[0]),
                imported_from=origin,
            )
            return create_run_folder(run, tokenizer, name, checkpoint_dir, add_checkpoint)


def _read_fitting_config(folder: Path, block_size: int | None) -> DescribedModel:
    """Return the model in a config.json. Raises AttnlmError if it does not fit into memory."""
    model = read_config(folder / "config.json", block_size)
    memory = machine_memory()
    needed = int(_OPENED * 4 * model.parameters)
    if memory is not None and needed > memory:
        raise AttnlmError(
            f"the model's {model.parameters:,} parameters need {byte_size(needed)} of memory, "
            f"but this machine has {byte_size(memory)}",
            "import a smaller model",
        )
    return model


def _read_tokenizer_files(folder: Path, vocab_size: int) -> Tokenizer:
    if (folder / "tokenizer.json").exists():
        content = files.json_object(folder / "tokenizer.json")
        return read_tokenizer(content, vocab_size)
    if not (folder / "vocab.json").exists():
        raise AttnlmError(
            f"{folder} has no tokenizer: neither tokenizer.json, nor vocab.json and merges.txt",
            "copy the folder again from its source",
        )
    merges = files.read_bytes(folder / "merges.txt").decode(errors="replace")
    vocabulary = files.json_object(folder / "vocab.json")
    return read_vocab_and_merges(vocabulary, merges, vocab_size)
