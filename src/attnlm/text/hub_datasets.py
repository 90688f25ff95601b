"""Data sets of the Hugging Face Hub, or folders with the same layout, read through `datasets`."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attnlm.base.errors import AttnlmError, UsageError, import_optional
from attnlm.text.record_files import check_columns, first_line

PREFIX = "hf:"
SYNTAX = "hf:OWNER/NAME, then if needed @REVISION, /CONFIG and :SPLIT"
# Readers of plain data. Others decode media and archives, or need other programs.
_READERS = ("arrow", "csv", "json", "parquet", "text")
_SPLIT = "(?::(?P<split>.+))?"
_LOCAL = re.compile(f"(?P<path>[^:]+){_SPLIT}")
_NAME = re.compile(
    f"(?P<path>[^/@:]+(?:/[^/@:]+)?)(?:@(?P<revision>[^/:]+))?(?:/(?P<config>[^@:]*[^/@:]))?{_SPLIT}"
)


def parsed(source: str) -> dict[str, Any]:
    """Return path, revision, config and split of `hf:OWNER/NAME@REVISION/CONFIG:SPLIT`.

    All but the path may be absent; the split is then "train". Raises UsageError if `source` has
    another form.
    """
    name = source.removeprefix(PREFIX)
    found = (_LOCAL if _is_local(name) else _NAME).fullmatch(name)
    if found is None:
        raise UsageError(f"{source!r} is not the name of a data set", f"use {SYNTAX}")
    parts = {"revision": None, "config": None, **found.groupdict()}
    return {**parts, "split": parts["split"] or "train"}


def _is_local(path: str) -> bool:
    return path.startswith(("/", "~")) or path.split("/")[0] in (".", "..")


def _named_url(folder: Path) -> str | None:
    """Return a URL in the `configs` of a folder's README.md or .huggingface.yaml, if any."""
    import yaml  # type: ignore[import-untyped]  # `datasets` needs it

    for name, pattern in (
        ("README.md", r"\s*---[ \t]*\r?\n(.*?)\n---[ \t]*\r?(?:\n|$)"),
        (".huggingface.yaml", "(.*)"),
    ):
        with contextlib.suppress(OSError, yaml.YAMLError, AttributeError):
            text = (folder / name).read_text("utf-8-sig", "replace")
            if header := re.match(pattern, text, flags=re.DOTALL):
                configs = str(yaml.safe_load(header[1]).get("configs"))
                if found := re.search(r"[^\s'\"]*://[^\s'\"]*", configs):
                    return found[0]
    return None


def records(source: str, columns: Sequence[str], offline: bool) -> Iterator[tuple[str, list[Any]]]:
    """Stream these columns of the data set that `source` names, as `record_values` does.

    Code and pickles in a data set are not run. Raises AttnlmError if the data set can't be
    downloaded or read, or lacks a column.
    """
    name, row = parsed(source), 0
    path = name["path"]
    is_local = _is_local(path)
    hint = f"check the name ({SYNTAX}) and the network, or use a folder"
    if is_local:
        path = str(Path(path).expanduser().absolute())
        hint = f"check the name ({SYNTAX})"
    elif Path(path).is_dir():  # the library would read this folder instead
        path, hint = f"hf://datasets/{path}", f"for the folder, use {PREFIX}./{path}"
    if offline and not is_local:
        raise AttnlmError(f"{source} needs the network, but `offline` is set", hint)
    datasets = import_optional("datasets", f"reading {source}")
    if offline and (url := _named_url(Path(path))):
        raise AttnlmError(
            f"{source} names {url}, which needs the network, but `offline` is set",
            "leave it out of README.md or .huggingface.yaml there, or allow the network",
        )
    datasets.disable_progress_bars()
    for library in ("datasets", "huggingface_hub"):  # they log errors and retries
        logging.getLogger(library).setLevel(logging.CRITICAL)
    try:
        builder = datasets.load_dataset_builder(path, name["config"], revision=name["revision"])
        if builder.name not in _READERS:
            raise AttnlmError(
                f"{source} has an unsupported format: {builder.name}",
                f"supported formats: {', '.join(_READERS)}",
            )
        stream = builder.as_streaming_dataset(split=name["split"])
        if stream.features is not None and set(columns) <= stream.features.keys():
            stream = stream.select_columns([*columns])
        for record in stream:
            row += 1
            check_columns(columns, list(record), source)
            yield f"row {row:,} of {source}", [record[column] for column in columns]
    except (AttnlmError, MemoryError):
        raise
    except Exception as error:  # any error of the library or the Hub
        after = f" after row {row:,}" if row else ""
        raise AttnlmError(f"cannot read {source}{after}: {first_line(error)}", hint) from error
