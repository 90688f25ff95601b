"""Export runs: folders for `transformers`, and pages."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import attnlm
from attnlm.base import files
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import OnEvent, ignore
from attnlm.base.files import move_to_free, workspace
from attnlm.base.formatting import quantity
from attnlm.base.suggestions import suggestion
from attnlm.data.dataset import Dataset, open_dataset
from attnlm.runs import hub
from attnlm.runs.run import Checkpoint, Run, open_run, run_summary
from attnlm.see.model_page import first_text, play_page, run_data
from attnlm.see.train_page import train_page, training_text

_LARGEST_PAGE = 60_000_000
"""The limit for the parameters of a page's models together. It does not hold if `force` is set."""


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    path: Path
    form: str
    """a class of `transformers`, or "a page of" and its file size"""
    checkpoint: str
    """best, last or a step; for a page of several runs, those that occur, separated by commas"""


def export(
    run: str | Path | Run | Sequence[str | Path | Run | None] | None,
    path: str | Path,
    *,
    to: str = "hf",
    type: str | None = None,
    train: bool | str | Path | Dataset = False,
    title: str | None = None,
    text: str | None = None,
    force: bool = False,
    public: bool = False,
    checkpoint: str = "auto",
    on_event: OnEvent | None = None,
) -> Exported:
    """Write a run's checkpoint to `path`, in the format `to`.

        attnlm.export("transformer-001", "exported")
        attnlm.export(["transformer-001", "multi-head-001"], "page.html", to="html")

    The format hf is a new folder for `transformers`, or a new model on the Hugging Face Hub if
    `path` is hf:OWNER/NAME: a private one, unless `public` is True. The format html is a page in
    which the models of one or more runs work; `type` is f32 (default up to 2 million parameters) or
    f16. For a page,
    `force` replaces an existing file, and allows more than 60 million parameters; `title` is its
    heading (default: the names of the runs), and `text` the text that its box begins with (default:
    the start of the validation split). A page also says how its models were trained.

    With `train`, the page also trains models, on the first 1 MB of a data set's text: of the data
    set `train`, or for True of the run's. `run` may then be [], for a page without a trained model:

        attnlm.export([], "page.html", to="html", train="tales-char")

    The output is complete or absent. `on_event` receives a Note if a text is too long.
    Raises UsageError for an unknown format or type, and for a model that the format can't express
    or the page can't train. Raises AttnlmError if `path` exists already, if files are missing or
    damaged, or if the format can't express the tokenizer.
    """
    on_event = on_event or ignore
    named = [run] if run is None or isinstance(run, str | Path | Run) else run
    runs = [open_run(name) for name in named]
    of_pages: dict[str, Any] = {
        "type": type,
        "force": force,
        "train": train,
        "title": title,
        "text": text,
    }
    check_format(to, type)
    _check_options(to, path, runs, public, of_pages)
    path = Path(path)
    if to == "hf":
        return _export_hf(runs[0], path, checkpoint, public)
    return _export_html(runs, path, checkpoint, **of_pages, on_event=on_event)


def check_format(to: str, type: str | None) -> None:
    """Raise UsageError if `to` is not a format, or `type` not a number type of pages."""
    for name, value, choices in (
        ("to", to, ("hf", "html")),
        ("type", type or "f32", ("f32", "f16")),
    ):
        if value not in choices:
            hint = suggestion(value, choices, f"choose from {', '.join(choices)}")
            raise UsageError(f"invalid value for `{name}`: {value!r}", hint)


def _check_options(
    to: str, path: str | Path, runs: Sequence[Run], public: bool, of_pages: Mapping[str, Any]
) -> None:
    """Raise UsageError for options that the format lacks, or that exclude each other."""
    if not str(path):
        raise UsageError("the name of the output cannot be empty", "name a new folder or file")
    for option, value in of_pages.items():
        if to == "hf" and value not in (None, False):
            hint = f"leave `{option}` out, or use `to` html"
            raise UsageError(f"`{option}` applies only to `to` html", hint)
    if to == "hf" and len(runs) != 1:
        raise UsageError("`to` hf takes one run, not several runs", "name one, or use `to` html")
    if public and not (to == "hf" and str(path).startswith(hub.PREFIX)):
        raise UsageError("`public` applies only to a model on the Hub", "export to hf:OWNER/NAME")
    if of_pages["train"] and of_pages["text"] is not None:
        raise UsageError(
            "`text` cannot be combined with `train`",
            "type the text in the page, or leave `train` out",
        )
    if not runs and of_pages["train"] in (True, False):
        raise UsageError("no run was given", "name a run, or a data set as `train`")


def _export_html(
    runs: Sequence[Run],
    path: Path,
    checkpoint: str,
    *,
    type: str | None,
    force: bool,
    train: bool | str | Path | Dataset,
    title: str | None,
    text: str | None,
    on_event: OnEvent,
) -> Exported:
    """Write a page in which the models of `runs` run and, with `train`, models are trained."""
    if path.suffix != ".html":
        raise UsageError("the name of a page must end with .html", f"name it {path.name}.html")
    if path.is_dir():
        raise AttnlmError(f"{path} is a folder", "choose another name")
    if path.exists() and not force:
        raise AttnlmError(
            f"{path} already exists", "choose a new name, or replace the page with `force`"
        )
    parameters = sum(run.parameters for run in runs)
    if parameters > _LARGEST_PAGE and not force:
        raise AttnlmError(
            f"{parameters:,} parameters are too many for a page (at most {_LARGEST_PAGE:,})",
            "export a smaller model, or use `force`",
        )
    for run in runs:
        run.tokenizer.encode(text or "")
    checkpoints = [run.checkpoint(checkpoint) for run in runs]
    models = [run_data(run, one, type) for run, one in zip(runs, checkpoints, strict=True)]
    if train:
        dataset = runs[0].open_dataset() if train is True else open_dataset(train)
        spec = runs[0].config.spec if runs else None
        page = train_page(training_text(dataset, on_event), models, spec, title or "")
    else:
        page = play_page(models, first_text(runs) if text is None else text, title or "")
    with files.explaining_os_errors(path, ", or name another file"):
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        files.write_bytes(path, page)
    kind = f"a page of {quantity(len(page), 'B')}"
    return Exported(path, kind, ", ".join(dict.fromkeys(one.which for one in checkpoints)))


# --- Models for transformers ----------------------------------------------------------------------


def _export_hf(run: Run, path: Path, checkpoint: str, public: bool) -> Exported:
    place = str(path)
    if is_upload := place.startswith(hub.PREFIX):
        hub.check_upload(place)
    elif os.path.lexists(path):
        raise AttnlmError(f"{path} exists", "name a new folder")
    chosen = run.checkpoint(checkpoint)
    hub.import_transformers("exporting a run")
    from attnlm.runs.hugging_face import write_model  # loads PyTorch

    with (
        files.explaining_os_errors(path, ", or name another folder"),
        workspace(Path(tempfile.gettempdir()) if is_upload else path.absolute().parent) as work,
    ):
        new = work / "new"
        with hub.quiet_transformers(f"write {run.name}", "free some space, or name another folder"):
            stock = write_model(run, chosen, new)
        files.write_bytes(new / "README.md", _model_card(run, chosen, stock).encode())
        if is_upload:
            hub.upload(new, place, public)
        else:
            move_to_free(new, [path])
    return Exported(path, stock, chosen.which)


def _model_card(run: Run, checkpoint: Checkpoint, stock: str) -> str:
    """Return README.md: first the fields that the Hugging Face Hub reads, then text."""
    rows = {**run_summary(run), "checkpoint": str(checkpoint)}
    made, recipe = "imported into", ""
    if Path(run.imported_from or "").is_absolute():  # which tells of this machine
        rows["imported from"] = run.dataset.name
    if not run.imported_from:
        made = "trained with"
        rows["SHA-256 of the training tokens"] = run.dataset.train_sha256
        settings = (f"{k} = {json.dumps(v)}\n" for k, v in run.config.settings().items())
        recipe = f"\nAs a recipe of attnlm:\n\n```toml\n{''.join(settings)}```\n"
    facts = "".join(f"- {label}: {_escape_markdown(value)}\n" for label, value in rows.items())
    spec = run.config.spec
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {_escape_markdown(run.name)}

A {spec.name} of {run.parameters:,} parameters, {made} attnlm {attnlm.__version__} and exported as
{stock}. It sees {spec.block_size:,} tokens at a time: longer texts are out of its range.

{facts}{recipe}"""


def _escape_markdown(text: str) -> str:
    """Return the text as one line of Markdown, with its markup escaped."""
    return "".join(f"\\{c}" if c in r"\`*_[]<>#|" else c if c.isprintable() else "?" for c in text)
