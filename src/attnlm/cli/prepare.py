"""`attnlm prepare`: make a data set of a text."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from pathlib import Path

import attnlm
from attnlm.base.folders import KINDS, command_for
from attnlm.cli import completion, console, options
from attnlm.cli.event_printer import Display, baselines
from attnlm.cli.options import argument, option, switch
from attnlm.config.settings import resolve
from attnlm.text.tasks import TASKS

_FACTS = (
    "characters", "documents", "vocab_size", "train_tokens", "val_tokens",
    "bigram_loss", "floor", "split",
)  # fmt: skip
_SHOWN = 60  # characters of an example


def prepare(
    source: list[str] | None = argument(
        None,
        "SOURCE...",
        "tinyshakespeare | tales | a file | a directory | a pattern such as 'a/*.gz' | "
        "a URL | hf:OWNER/NAME | - (stdin); several sources are joined in this order; "
        f"or a task: {' | '.join(TASKS)}; "
        "default: tinyshakespeare, or tales if that is not available",
        completion.choice_completer("tinyshakespeare", "tales", *TASKS),
    ),
    tokenizer: str = option(
        "char",
        "char|byte|bpe:N|gpt2|cl100k_base|o200k_base, or the name or path of a run or "
        "data set, to use its tokenizer",
        completion.complete_tokenizer,
    ),
    val_fraction: float | None = option(
        None, "fraction of the text for the validation split; default: 0.1"
    ),
    val_file: str | None = option(
        None,
        "a source for the validation split; all of SOURCE is then for training",
        completion.choice_completer("tales"),
    ),
    split: str | None = option(
        None,
        "validation split: the tail of the text, or some of its documents (records or files), "
        "chosen at random: tail|documents; default: documents if there are at least 10 for each "
        "split, else tail",
        completion.choice_completer("tail", "documents"),
    ),
    name: str | None = option(None, "name of the data set; default: <source>-<tokenizer>"),
    data_dir: Path = options.DATA_DIR,
    encoding: str = option("utf-8", "character encoding of the text"),
    column: str | None = option(
        None,
        "name of the column with the text, in .jsonl and .parquet files, hf: data, and "
        "JSON lines on stdin; default: text",
    ),
    prompt_column: str | None = option(
        None,
        "make a data set of questions and answers: name of the column with the questions; "
        "without --answer-column, it has lists of messages, each with a role and a content",
    ),
    answer_column: str | None = option(None, "name of the column with the answers"),
    examples: int | None = option(None, "number of training examples of a task; default: 20,000"),
    length: int | None = option(
        None, "length of a task's questions, in letters, bits, brackets or pairs; default: 4 to 12"
    ),
    digits: int | None = option(None, "digits of the numbers of addition; default: 3"),
    offline: bool = options.OFFLINE,
    force: bool = switch("replace an existing data set of the same name", "--force"),
    json: bool = options.JSON,
    quiet: bool = options.QUIET,
) -> None:
    """Encode a text, or questions with answers, and split off validation data."""
    try:
        with contextlib.closing(Display(quiet)) as display:
            dataset = attnlm.prepare(
                source or None,
                tokenizer=tokenizer,
                val_fraction=val_fraction,
                val_file=val_file,
                split=split,
                name=name,
                data_dir=data_dir,
                encoding=encoding,
                column=column,
                prompt_column=prompt_column,
                answer_column=answer_column,
                examples=examples,
                length=length,
                digits=digits,
                offline=offline,
                force=force,
                on_event=display,
            )
    except KeyboardInterrupt:
        console.say("stopped; nothing was written")
        raise
    if not quiet:
        console.say_facts(
            {
                "data": f"{dataset.name}, from {dataset.source}",
                "text": f"{dataset.characters:,} characters"
                + (f" in {dataset.documents:,} documents" if dataset.documents else ""),
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
