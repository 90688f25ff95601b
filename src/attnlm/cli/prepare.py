"""`attnlm prepare`: make a data set of a text."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import attnlm
from attnlm.base.folders import KINDS, command_for
from attnlm.base.setting_fields import fields_of
from attnlm.cli import console, options
from attnlm.cli.event_printer import baselines
from attnlm.cli.options import argument, option, with_options
from attnlm.config.prepare_options import PrepareOptions
from attnlm.config.settings import resolve
from attnlm.text.tasks import TASKS

_FACTS = (
    "characters", "documents", "vocab_size", "train_tokens", "val_tokens",
    "bigram_loss", "floor", "split",
)  # fmt: skip
_SHOWN = 60  # characters of an example


@with_options(
    "data_dir",
    settings=dict.fromkeys(fields_of(PrepareOptions), PrepareOptions),
    name=option(None, "name of the data set; default: <source>-<tokenizer>"),
    offline=option(False, "never use the network"),
    force=option(False, "replace an existing data set of the same name"),
)
def prepare(
    source: list[str] | None = argument(
        None,
        "SOURCE...",
        "tinyshakespeare | tales | a file | a directory | a pattern such as 'a/*.gz' | "
        "a URL | hf:OWNER/NAME | - (stdin); several sources are joined in this order; "
        f"or a task: {' | '.join(TASKS)}; "
        "default: tinyshakespeare, or tales if that is not available",
        options.words("tinyshakespeare", "tales", *TASKS),
    ),
    *,
    json: bool,
    quiet: bool,
    on_event: Any,
    **settings: Any,
) -> None:
    """Encode a text, or questions with answers, and split off validation data."""
    try:
        dataset = attnlm.prepare(source or None, on_event=on_event, **settings)
    except KeyboardInterrupt:
        on_event.note("stopped; nothing was written")
        raise
    if not quiet:
        documents = f" in {dataset.documents:,} documents" if dataset.documents else ""
        console.say_facts(
            {
                "data": f"{dataset.name}, from {dataset.source}",
                "text": f"{dataset.characters:,} characters{documents}"
                if dataset.val_bytes
                else "",
                "examples": _examples_summary(dataset),
                "tokens": f"{dataset.train_tokens + dataset.val_tokens:,}, vocabulary of "
                f"{dataset.vocab_size:,} ({dataset.tokenizer.name})",
                "split": f"{dataset.train_tokens:,} for training, "
                f"{dataset.val_tokens:,} for validation",
                "validation": _validation_summary(dataset),
                "losses": baselines(dataset.vocab_size, dataset),
            }
        )
        flags = []
        origin = Path(dataset.tokenizer_from or "")
        if (origin / KINDS["run"][0]).is_file():
            is_usual = origin.parent == Path(KINDS["run"][1]).absolute()
            flags = ["--from", origin.name if is_usual else str(origin)]
        elif 0 < dataset.largest_block_size < resolve({}).spec.block_size:
            flags = ["--block-size", str(dataset.largest_block_size)]
        console.say_next(command_for("attnlm train", dataset.path, *flags, kind="data set"))
    facts = {"dataset": str(dataset.path)} | {name: getattr(dataset, name) for name in _FACTS}
    facts["examples"] = dataset.examples and asdict(dataset.examples)
    console.print_result_or_json(str(dataset.path), facts, json)


def _examples_summary(dataset: attnlm.Dataset) -> str:
    """Return the number of examples and the first one; "" for a text."""
    if dataset.examples is None or dataset.train_examples is None:
        return ""
    end = int(dataset.train_examples.ends[0])
    first = dataset.tokenizer.decode(dataset.train[:end].tolist()).rstrip()
    longer = dataset.examples.longer
    more = f" and {longer:,} longer ones" if longer else ""
    return (
        f"{dataset.examples.train:,} for training, {dataset.examples.val:,} for validation{more}, "
        f"such as {first[:_SHOWN]!r}"
    )


def _validation_summary(dataset: attnlm.Dataset) -> str:
    """Return which text the validation split consists of, such as `the last 10%`."""
    if dataset.examples is not None and dataset.split is None:
        return f"{dataset.examples.val:,} examples of {dataset.val_source}"
    if dataset.val_source is not None:
        return dataset.val_source
    share = f"{100 * (dataset.val_fraction or 0):g}%"
    if dataset.split == "documents":
        return f"{share} of the documents, chosen at random"
    return f"the last {share}"
