"""A Hugging Face folder as a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from attnlm.base import files
from attnlm.base.errors import AttnlmError
from attnlm.base.folders import is_folder
from attnlm.base.names import check_name
from attnlm.base.readable import byte_size
from attnlm.compute.device import machine_memory
from attnlm.runs.checkpoint import save_weights_in_turn
from attnlm.runs.create_run import put_new
from attnlm.runs.hugging_face.read_config import read_config, read_object
from attnlm.runs.hugging_face.read_weights import Weights
from attnlm.runs.run import Run
from attnlm.tokens.read_tokenizer_json import read_tokenizer, read_vocab_and_merges
from attnlm.tokens.tokenizer import Tokenizer

_MOST_TOKENIZER = 2**26  # bytes
_OPENED = 2  # times its weights: what a checkpoint takes while it is loaded


def import_run(
    source: str | Path, *, name: str | None = None, checkpoint_dir: str | Path = "checkpoints"
) -> Run:
    """Makes a run of a Hugging Face folder, or of one of its safetensors files.

        run = attnlm.import_run("exported", name="imported")

    The folder has config.json, safetensors files, and tokenizer.json, or vocab.json and
    merges.txt. Its model is of the GPT-2, Llama or Qwen3 family. One tensor at a time is in memory.

    Raises AttnlmError where anything in it is missing, damaged, or can't be expressed exactly, and
    for weights that this machine's memory can't hold; UsageError when the name can't be a folder's.
    """
    if name is not None:
        check_name(name)
    source = Path(source)
    folder, file = (source, None) if is_folder(source) else (source.parent, source)
    if file is not None and (file.suffix != ".safetensors" or not file.exists()):
        raise AttnlmError(
            f"{source} is neither a folder nor a safetensors file",
            "download the model's folder first, and give its path",
        )
    described = read_config(folder / "config.json")
    a = described.config.model
    weights = Weights(folder, described, file)
    there, needed = machine_memory(), _OPENED * 4 * weights.parameters
    if there is not None and needed > there:
        raise AttnlmError(
            f"its {weights.parameters:,} parameters take {byte_size(needed)} of memory to open, "
            f"and this machine has {byte_size(there)}",
            "import a smaller model",
        )
    with weights:
        tokenizer = _tokenizer(folder, described.vocab_size)
        about = {
            **dict.fromkeys(("train_sha256", "val_sha256", "path"), ""),
            **dict.fromkeys(("train_tokens", "val_tokens", "val_bytes"), 0),
            **dict.fromkeys(("bigram_loss", "floor")),
            "name": folder.absolute().name,
        }
        run = Run(Path(), described.config, described.vocab_size, weights.parameters, about)
        run = replace(run, imported_from=str(source.absolute()))

        def fill(run: Run) -> None:
            save_weights_in_turn(run.best, weights.shapes, weights.__getitem__, {"step": 0})

        checkpoint_dir = Path(checkpoint_dir)
        assert a.embed_dim is not None
        with files.explaining(checkpoint_dir, "free some space, or name another `checkpoint_dir`"):
            return put_new(run, tokenizer, name, checkpoint_dir, fill)


def _tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    if (folder / "tokenizer.json").exists():
        content = read_object(folder / "tokenizer.json", _MOST_TOKENIZER)
        return read_tokenizer(content, vocab_size)
    if not (folder / "vocab.json").exists():
        raise AttnlmError(
            f"{folder} has no tokenizer.json, nor vocab.json and merges.txt",
            "copy the folder again from where it came",
        )
    merges = files.read_bytes(folder / "merges.txt", _MOST_TOKENIZER).decode(errors="replace")
    vocabulary = read_object(folder / "vocab.json", _MOST_TOKENIZER)
    return read_vocab_and_merges(vocabulary, merges, vocab_size)
