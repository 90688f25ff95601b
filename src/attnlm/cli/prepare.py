"""`attnlm prepare`: make a data set of a text."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnlm.base.folders import command_for
from attnlm.cli import completion, console
from attnlm.cli.displays import Display, reference_losses
from attnlm.cli.options import DataDir, JsonOption, QuietOption, option, switch
from attnlm.config.settings import resolve

if TYPE_CHECKING:
    from attnlm.data.dataset import Dataset

_FACTS = (
    *("characters", "documents", "vocab_size", "train_tokens", "val_tokens"),
    *("bigram_loss", "floor"),
)


def prepare(
    source: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SOURCE...",
            help="tinyshakespeare | tales | a file | a directory | a pattern such as 'a/*.gz' | "
            "a URL | hf:OWNER/NAME | - (stdin); several sources are joined in this order; "
            "default: tinyshakespeare, or tales if that is not available",
            autocompletion=completion.choices("tinyshakespeare", "tales"),
        ),
    ] = None,
    tokenizer: Annotated[
        str,
        option(
            "char|byte|bpe:N|gpt2|cl100k_base|o200k_base, or the name or path of a run or "
            "data set, to use its tokenizer",
            completion.tokenizers,
        ),
    ] = "char",
    val_fraction: Annotated[
        float, option("fraction of the text, at its end, for the validation split")
    ] = 0.1,
    val_file: Annotated[
        str | None,
        option(
            "use this file as the validation split, and all of SOURCE for training",
            metavar="<path>",
        ),
    ] = None,
    name: Annotated[
        str | None, option("name of the data set; default: <source>-<tokenizer>")
    ] = None,
    data_dir: DataDir = Path("data"),
    encoding: Annotated[str, option("character encoding of the text")] = "utf-8",
    newlines: Annotated[
        str,
        option(
            "line endings: keep them, or convert CR LF and CR to LF: keep|unix",
            completion.choices("keep", "unix"),
        ),
    ] = "keep",
    column: Annotated[
        str, option("name of the column with the text, in .jsonl and .parquet files and hf: data")
    ] = "text",
    offline: Annotated[bool, switch("never use the network", "--offline")] = False,
    force: Annotated[
        bool, switch("replace an existing data set of the same name", "--force")
    ] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Encode a text with a tokenizer, and split off validation data."""
    from attnlm.data.prepare import prepare as run_prepare

    with contextlib.closing(Display(quiet)) as display:
        dataset = run_prepare(
            source or None,
            tokenizer=tokenizer,
            val_fraction=val_fraction,
            val_file=val_file,
            name=name,
            data_dir=data_dir,
            encoding=encoding,
            newlines=newlines,
            column=column,
            offline=offline,
            force=force,
            on_event=display,
        )
    if not quiet:
        _say(dataset)
    facts = {"dataset": str(dataset.path)} | {name: getattr(dataset, name) for name in _FACTS}
    console.result_or_json(str(dataset.path), facts, json)


def _say(dataset: Dataset) -> None:
    console.say_facts(
        {
            "data": f"{dataset.name}, from {dataset.source}",
            "text": f"{dataset.characters:,} characters"
            + (f" in {dataset.documents:,} documents" if dataset.documents else ""),
            "tokens": f"{dataset.train_tokens + dataset.val_tokens:,}, vocabulary of "
            f"{dataset.vocab_size:,} ({dataset.tokenizer.name})",
            "split": f"{dataset.train_tokens:,} for training, "
            f"{dataset.val_tokens:,} for validation",
            "losses": reference_losses(dataset.vocab_size, dataset.bigram_loss, dataset.floor),
        }
    )
    is_small = dataset.largest_block_size < resolve({}).model.block_size
    flags = ["--block-size", str(dataset.largest_block_size)] if is_small else []
    console.say_next(command_for("attnlm train", dataset.path, *flags, kind="data set"))
