"""`attnlm export` and `import`: runs for other tools or as pages, and models of other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attnlm
from attnlm.base.errors import UsageError
from attnlm.base.folders import command_for
from attnlm.cli import console, options
from attnlm.cli.event_printer import parts_in_words
from attnlm.cli.options import REQUIRED, argument, option, utf8, with_options
from attnlm.runs import hub


@with_options(
    "checkpoint",
    to=option(
        "hf",
        "format: hf (a folder for transformers) or html (a page in which the model runs)",
        complete=options.words("hf", "html"),
    ),
    type=option(
        None,
        "with html: number type, f32 or f16; default: f32 up to 2 million parameters, else f16",
        complete=options.words("f32", "f16"),
    ),
    train=option(
        False,
        "with html: models can be trained in the page, on the first 1 MB of the data set DATASET, "
        "named after the file (default: the run's); with DATASET, no RUN is needed",
    ),
    title=option(None, "with html: heading of the page; default: the runs' names"),
    text=option(
        None,
        "with html: text that the page begins with; default: the start of the validation split",
        callback=utf8,
    ),
    force=option(
        False, "with html: replace an existing page, and allow more than 60 million parameters"
    ),
    public=option(False, "with hf:OWNER/NAME: a public model; default: private"),
)
def export(
    names: list[str] | None = argument(
        None,
        "[RUN...] PLACE",
        "name or path of the run (one or more for html; default: the run trained last), "
        "followed by what to create: a folder (hf), hf:OWNER/NAME on the Hugging Face Hub (hf), or "
        "a file (html)",
        options.names("run"),
    ),
    *,
    to: str,
    type: str | None,
    train: bool,
    checkpoint_dir: str,
    data_dir: str,
    json: bool,
    on_event: Any,
    **settings: Any,
) -> None:
    """Write a run for other tools, or as a web page in which it runs."""
    from attnlm.workflows.export import check_format

    usage = "attnlm export [RUN] DIR, or attnlm export [RUN] FILE --to html"
    if not names:
        raise UsageError("no folder or file to write was given", usage)
    data: Any = train
    if train and len(names) > 1 and names[-2].endswith(".html"):
        *names, dataset = names
        data = attnlm.open_dataset(dataset, data_dir=data_dir)
    *runs, path = names
    if not runs and Path(checkpoint_dir, path, "config.json").exists():
        usage = usage.replace("[RUN]", path)
        raise UsageError(f"{path} is a run, and no folder or file to write was given", usage)
    if to == "hf" and Path(path).suffix == ".html":
        raise UsageError(
            f"{path} is the name of a file, but --to hf writes a folder", "use --to html"
        )
    check_format(to, type)
    named: list[str | None] = [*runs] or ([] if data not in (True, False) else [None])
    opened = [
        attnlm.open_run(run, checkpoint_dir=checkpoint_dir, data_dir=data_dir) for run in named
    ]
    exported = attnlm.export(
        opened, path, to=to, type=type, train=data, on_event=on_event, **settings
    )
    parameters = sum(run.parameters for run in opened)
    shown = "; ".join(f"{run.name}, {run.checkpoint(settings['checkpoint'])}" for run in opened)
    form = exported.form
    console.say(f"{shown}: {form}, {parameters:,} parameters" if opened else form)
    facts = {
        "output": str(exported.path),
        "form": exported.form,
        "checkpoint": exported.checkpoint,
        "parameters": parameters,
    }
    console.print_result_or_json(str(exported.path), facts, json)


@with_options(
    "name",
    "checkpoint_dir",
    revision=option(None, "branch, tag or commit of a model on the Hub; default: main"),
    base=option(
        None,
        "for an adapter of peft: folder or name of its model; default: the one that it names",
    ),
    block_size=option(
        None, "context of the run; default: the model's, but at most 1,024", type=int
    ),
)
def import_(
    source: str = argument(
        REQUIRED,
        "PLACE",
        "folder in the format of Hugging Face, a safetensors file in such a folder, or the name of "
        "a model on the Hugging Face Hub, such as Qwen/Qwen3-0.6B",
    ),
    *,
    json: bool,
    on_event: Any,
    **settings: Any,
) -> None:
    """Import a model from Hugging Face files as a run.

    Models: GPT-2, Llama, Mistral, Qwen2 and Qwen3, and files that a page saved.
    """
    hub.check_source(source.removeprefix(hub.PREFIX))
    run = attnlm.import_run(source, on_event=on_event, **settings)
    spec = run.config.spec
    console.say(
        f"{run.name}: {spec.name}, {run.parameters:,} parameters: {parts_in_words(spec)}; "
        f"{run.vocab_size:,} ids ({run.tokenizer.name})"
    )
    facts = {"run": str(run.path), "model": spec.name, "parameters": run.parameters}
    console.print_result_or_json(str(run.path), facts, json)
    console.say_next(command_for("attnlm sample", run.path))
