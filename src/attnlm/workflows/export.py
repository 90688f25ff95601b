"""Export runs: folders for `transformers`, and pages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import attnlm
from attnlm.base import files
from attnlm.base.atomic_folders import workspace
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import OnEvent, ignore
from attnlm.data.dataset import Dataset, open_dataset
from attnlm.model.architecture import require_architecture
from attnlm.model.spec import Use
from attnlm.runs.external_formats import (
    Exported,
    StockClass,
    check_format,
    choose_class,
)
from attnlm.runs.load_model import checked_weights
from attnlm.runs.run import Checkpoint, Run, open_dataset_of, open_run, run_summary
from attnlm.runs.safetensors_file import Array, Shape, write_tensors
from attnlm.see.model_page import PageMaker, export_to_html, play_page
from attnlm.see.train_page import train_page, training_text
from attnlm.tokens.tokenizer_json import library_tokenizer


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
    checkpoint: str = "auto",
    checkpoint_dir: str | Path = "checkpoints",
    data_dir: str | Path = "data",
    on_event: OnEvent | None = None,
) -> Exported:
    """Write a run's checkpoint to `path`, in the format `to`.

        attnlm.export("transformer-001", "exported")
        attnlm.export(["transformer-001", "multi-head-001"], "page.html", to="html")

    The format hf is a new folder for `transformers`. The format html is a page in which the models
    of one or more runs work; `type` is f32 (default up to 2 million parameters) or f16. For a page,
    `force` replaces an existing file, and allows more than 60 million parameters; `title` is its
    heading (default: the names of the runs), and `text` the text that its box begins with (default:
    the start of the validation split). A page also says how its models were trained, with the first
    200 characters of the training text if the data set is found.

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
    if not runs and train in (True, False):
        raise UsageError("no run was given", "name a run, or a data set as `train`")
    if to == "hf":
        return _export_hf(runs[0], path, checkpoint)
    return export_to_html(
        runs,
        path,
        type=type,
        checkpoint=checkpoint,
        force=force,
        make_page=_page_maker(runs, train, title or "", Path(data_dir), on_event),
        text=text,
        data_dir=Path(data_dir),
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


def _tensors(
    stock: StockClass, run: Run, checkpoint: Checkpoint
) -> tuple[dict[str, Shape], Callable[[str], Array]]:
    """Return the shape of each tensor that `stock` has, by name, and a function that takes a
    tensor's name and returns the tensor, in float32.

    The returned tensor may be a view that is not contiguous. `StockClass.with_missing_parts`
    describes the parts that the class has but our model lacks.
    """
    a = stock.with_missing_parts(require_architecture(run.config.spec, Use.EXPORT))
    weights = checked_weights(run, checkpoint)
    mappings = {mapping.name: mapping for mapping in stock.tensor_mappings(a)}
    shapes = a.parameter_shapes(run.vocab_size)
    names = [name for mapping in mappings.values() for name in mapping.parameters]
    for name in (name for name in names if name not in weights):
        if name.endswith("projection.weight"):
            weights[name] = np.eye(a.width, dtype=np.float32)
        elif name in shapes:
            weights[name] = np.zeros(shapes[name], np.float32)
        else:  # a bias
            module = name.removesuffix(".bias")
            kind = "weight" if f"{module}.weight" in weights else "gain"
            weights[name] = np.zeros(len(weights[f"{module}.{kind}"]), np.float32)

    def read(name: str) -> Array:
        mapping = mappings[name]
        tensors = [weights[ours] for ours in mapping.parameters]
        joined = tensors[0] if len(tensors) == 1 else np.concatenate(tensors)
        return joined.T if mapping.transposed else joined

    return {name: read(name).shape for name in mappings}, read


# --- Folders for transformers ---------------------------------------------------------------------


def _export_hf(run: Run, folder: Path, checkpoint: str) -> Exported:
    architecture = require_architecture(run.config.spec, Use.EXPORT)
    stock = choose_class(architecture, run.tokenizer.name, run.name)
    _check_folder_free(folder)
    chosen = run.checkpoint(checkpoint)
    content = _describe_files(run, chosen, stock)
    tensors = _tensors(stock, run, chosen)
    with (
        files.explaining_os_errors(folder, ", or name another folder"),
        workspace(folder.absolute().parent) as work,
    ):
        new = work / "new"
        new.mkdir()
        for name, text in content.items():
            files.write_bytes(new / name, text.encode())
        write_tensors(new / "model.safetensors", *tensors)
        _check_folder_free(folder)
        if folder.is_dir():
            folder.rmdir()
        new.rename(folder)
    return Exported(folder, stock.name, chosen.which)


def _check_folder_free(folder: Path) -> None:
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise AttnlmError(f"{folder} is not a folder", "name a new folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise AttnlmError(f"the folder {folder} is not empty", "name a new folder")


def _describe_files(run: Run, checkpoint: Checkpoint, stock: StockClass) -> dict[str, str]:
    """Return the files of the folder by name, without the weights."""
    a = stock.with_missing_parts(require_architecture(run.config.spec, Use.EXPORT))
    tokenizer = run.tokenizer
    end = tokenizer.end_of_text
    beginning = tokenizer.beginning
    first = end if beginning is None else beginning
    # Without such a key, `transformers` would use a default id.
    special = {"bos_token_id": first, "eos_token_id": end, "pad_token_id": end}
    texts = {key: tokenizer.decode([i]) for key, i in special.items() if i is not None}
    class_names = {"architectures": [stock.name], "model_type": stock.model_type}
    own_sizes = {name: getattr(a, attribute) for name, attribute in stock.sizes.items()}
    sizes = {"vocab_size": run.vocab_size, **own_sizes, **stock.options(a)}
    # Sample from all tokens at temperature 1, the defaults of `attnlm sample`.
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    tables: dict[str, dict[str, Any]] = {
        "config.json": class_names | sizes | special | {"use_cache": True, "dtype": "float32"},
        "generation_config.json": special | sampling,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": a.block_size,
            "clean_up_tokenization_spaces": False,
            "padding_side": "left",  # as `generate` needs it
            "model_input_names": ["input_ids", "attention_mask"],
            **{key.removesuffix("_id"): text for key, text in texts.items()},
        },
    }
    return {
        "tokenizer.json": library_tokenizer(tokenizer).to_str(pretty=False),
        **{name: json.dumps(table, indent=2) + "\n" for name, table in tables.items()},
        "README.md": "".join(f"{line}\n" for line in _model_card(run, checkpoint, stock)),
    }


def _model_card(run: Run, checkpoint: Checkpoint, stock: StockClass) -> Iterator[str]:
    """Yield the lines of README.md: first the fields that the Hugging Face Hub reads, then text."""
    a = run.config.spec
    made = "imported into" if run.imported_from else "trained with"
    rows = {**run_summary(run), "checkpoint": str(checkpoint)}
    if not run.imported_from:
        rows["SHA-256 of the training tokens"] = run.dataset.train_sha256
    yield from ("---", "library_name: transformers", "pipeline_tag: text-generation", "---", "")
    yield from (f"# {_escape_markdown(run.name)}", "")
    yield (
        f"A {a.name} of {run.parameters:,} parameters, {made} attnlm {attnlm.__version__} and "
        f"exported as {stock.name}. It sees {a.block_size:,} tokens at a time: longer texts are "
        "out of its range."
    )
    yield from ("", "```python", "from transformers import AutoModelForCausalLM, AutoTokenizer", "")
    yield 'model = AutoModelForCausalLM.from_pretrained("FOLDER")'
    yield 'tokenizer = AutoTokenizer.from_pretrained("FOLDER")'
    yield 'ids = tokenizer("The ", return_tensors="pt").input_ids'
    yield f"out = model.generate(ids, max_new_tokens={max(1, min(200, a.block_size // 2))})"
    yield from ("print(tokenizer.decode(out[0]))", "```", "", "## Training", "")
    for label, value in rows.items():
        yield f"- {label}: {_escape_markdown(value)}"
    if not run.imported_from:
        yield from ("", "## Settings", "", "As a recipe of attnlm:", "", "```toml")
        for name, setting in run.config.settings().items():
            yield f"{name} = {json.dumps(setting)}"
        yield "```"


def _escape_markdown(text: str) -> str:
    """Return the text as one line of Markdown, with its markup escaped."""
    return "".join(f"\\{c}" if c in r"\`*_[]<>#|" else c if c.isprintable() else "?" for c in text)
