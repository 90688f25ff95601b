"""Export runs: folders for `transformers`, and pages."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import attnlm
from attnlm.base import files
from attnlm.base.atomic_folders import workspace
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import OnEvent, ignore
from attnlm.base.folders import CHECKPOINT_DIR, DATA_DIR
from attnlm.data.dataset import Dataset, open_dataset
from attnlm.runs import hub
from attnlm.runs.external_formats import Exported, check_format
from attnlm.runs.run import Checkpoint, Run, open_dataset_of, open_run, run_summary
from attnlm.see.model_page import PageMaker, export_to_html, play_page
from attnlm.see.train_page import train_page, training_text


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
    checkpoint_dir: str | Path = CHECKPOINT_DIR,
    data_dir: str | Path = DATA_DIR,
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
    or the page can't train. Raises AttnlmError if `path` exists already (for hf, an empty folder
    may exist), if files are missing or damaged, or if the format can't express the tokenizer.
    """
    check_format(to, type)
    if not str(path):
        raise UsageError("the name of the output cannot be empty", "name a new folder or file")
    path = Path(path)
    on_event = on_event or ignore
    named = [run] if run is None or isinstance(run, str | Path | Run) else run
    runs = [open_run(name, checkpoint_dir=checkpoint_dir) for name in named]
    if to != "html" and (len(runs) > 1 or force):
        what = "several runs" if len(runs) > 1 else "`force`"
        raise UsageError(f"`to` {to} cannot be combined with {what}", "use one run, or `to` html")
    _check_page_options(to, train, title, text)
    if public and (to != "hf" or not str(path).startswith(hub.PREFIX)):
        raise UsageError("`public` applies only to a model on the Hub", "export to hf:OWNER/NAME")
    if not runs and train in (True, False):
        raise UsageError("no run was given", "name a run, or a data set as `train`")
    if to == "hf":
        return _export_hf(runs[0], path, checkpoint, public)
    return export_to_html(
        runs,
        path,
        type=type,
        checkpoint=checkpoint,
        force=force,
        make_page=_page_maker(runs, train, title or "", Path(data_dir), on_event),
        text=text,
    )


def _check_page_options(
    to: str, train: bool | str | Path | Dataset, title: str | None, text: str | None
) -> None:
    """Raise UsageError for options of pages with another format, or that exclude each other."""
    for option, value in {"train": train or None, "title": title, "text": text}.items():
        if value is not None and to != "html":
            hint = f"leave `{option}` out, or use `to` html"
            raise UsageError(f"`{option}` applies only to `to` html", hint)
    if train and text is not None:
        raise UsageError(
            "`text` cannot be combined with `train`",
            "type the text in the page, or leave `train` out",
        )


def _page_maker(
    runs: Sequence[Run],
    train: bool | str | Path | Dataset,
    title: str,
    data_dir: Path,
    on_event: OnEvent,
) -> PageMaker:
    """Return the function that makes the page from its models and the first text."""
    if not train:
        return lambda models, prompt: play_page(models, prompt, title)
    if train is True:
        dataset = open_dataset_of(runs[0], data_dir)
    else:
        dataset = open_dataset(train, data_dir=data_dir)
    text = training_text(dataset, on_event)
    spec = runs[0].config.spec if runs else None
    return lambda models, _: train_page(text, models, spec, title)


# --- Models for transformers ----------------------------------------------------------------------


def _export_hf(run: Run, path: Path, checkpoint: str, public: bool) -> Exported:
    from attnlm.runs.hugging_face import choose_class, write_model  # they load PyTorch

    choose_class(run)  # raises an error
    place = str(path)
    if is_upload := place.startswith(hub.PREFIX):
        hub.check_upload(place)
    else:
        _check_folder_free(path)
    chosen = run.checkpoint(checkpoint)
    hub.import_transformers("exporting a run")
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
            _check_folder_free(path)
            if path.is_dir():
                path.rmdir()
            new.rename(path)
    return Exported(path, stock, chosen.which)


def _check_folder_free(folder: Path) -> None:
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise AttnlmError(f"{folder} is not a folder", "name a new folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise AttnlmError(f"the folder {folder} is not empty", "name a new folder")


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
