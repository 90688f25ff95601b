"""An adapter of `peft` as a run: the adapter, and a run's weights that it is for."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from attnlm.base import files
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.folders import check_name
from attnlm.base.settings import Settings
from attnlm.config.settings import resolve
from attnlm.runs.checkpoint import save_weights_in_turn
from attnlm.runs.create_run import put_new
from attnlm.runs.hugging_face.adapter import CONFIG, write_adapter
from attnlm.runs.hugging_face.read_adapter import read_adapter
from attnlm.runs.hugging_face.stock_classes import stock_class_for
from attnlm.runs.open_run import open_run
from attnlm.runs.parent import keep_base, parent_record
from attnlm.runs.run import DatasetFacts, Run


def is_adapter(source: Path) -> bool:
    """Whether a folder is one of peft's adapters."""
    return (source / CONFIG).is_file()


def import_adapter(
    folder: Path, base: str | Path | Run, *, name: str | None, checkpoint_dir: Path
) -> Run:
    """Makes a run of an adapter for the weights of the run `base`.

    Raises as `import_run` does, and UsageError where no stock class can express the model.
    """
    if name is not None:
        check_name(name)
    parent = open_run(base, checkpoint_dir=checkpoint_dir)
    a = parent.config.model
    adapter = read_adapter(folder, a, stock_class_for(a, parent.name))
    lora = adapter.lora
    given: Settings = {"lora": lora.rank, "lora_alpha": lora.alpha, "lora_on": ",".join(lora.on)}
    try:
        config = resolve({**a.settings(), "steps": 1, **given})
    except UsageError as error:
        raise AttnlmError(f"{folder}: {error.message}", error.hint) from None
    run = Run(
        Path(),
        config,
        parent.vocab_size,
        parent.parameters,
        asdict(DatasetFacts(name=folder.absolute().name)),
        parent=parent_record(parent, "auto"),
        imported_from=str(folder.absolute()),
    )
    shapes = {name: tuple(tensor.shape) for name, tensor in adapter.tensors.items()}

    def fill(run: Run) -> Run:
        run = keep_base(run)
        save_weights_in_turn(run.best, shapes, adapter.tensors.__getitem__, {"step": 0})
        write_adapter(run, adapter.tensors)
        return run

    with files.explaining(checkpoint_dir, ", or name another `checkpoint_dir`"):
        return put_new(run, parent.tokenizer, name, checkpoint_dir, fill)
