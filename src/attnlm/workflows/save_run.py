"""Make a run of a model that was trained elsewhere, such as in a loop of the user's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.folders import CHECKPOINT_DIR, DATA_DIR
from attnlm.base.setting_fields import record_from_json
from attnlm.config.settings import Config, resolve_new
from attnlm.data.dataset import Dataset, open_dataset
from attnlm.model.building import stored_buffers, uninitialised_model
from attnlm.model.inspection import are_close, check_finite
from attnlm.model.language_model import LanguageModel, evaluating
from attnlm.model.own_modules import OwnLanguageModel
from attnlm.runs.checkpoint import save_checkpoint
from attnlm.runs.create_run import create_run
from attnlm.runs.journal import EvaluationRecord
from attnlm.runs.records import CheckpointFacts
from attnlm.runs.run import Run, open_run
from attnlm.training.validation import Evaluation, Split, validation_loss
from attnlm.workflows.check_own_code import check_required

_UNKNOWN = {
    "train_loss": None,
    **dict.fromkeys(("tokens", "seconds", "learning_rate", "tokens_per_second"), 0),
}
"""what an evaluation in a loop of the user's need not say"""
_HINT = "give each evaluation a step and a val_loss, as plain numbers"


def save_run(
    model: nn.Module,
    dataset: str | Path | Dataset | None = None,
    *,
    name: str | None = None,
    code: Any = None,
    set: Mapping[str, Any] | None = None,
    block_size: int | None = None,
    metrics: Sequence[Mapping[str, Any]] = (),
    checkpoint_dir: str | Path = CHECKPOINT_DIR,
    data_dir: str | Path = DATA_DIR,
) -> Run:
    """Make a run of a trained model, which can then be evaluated, sampled and compared.

        model, _ = attnlm.load_model("multi-head-001")  # train it in a loop of your own, then:
        run = attnlm.save_run(model, "tales-char", name="mine")

    `model` is one of attnlm's, or a module of your own. A module of your own is built again by
    `code`, a class or function of vocab_size and block_size, with the arguments in `set`; default:
    the class of `model`. `metrics` are the evaluations of your loop, oldest first: dictionaries
    with step, val_loss and, if known, train_loss, tokens and seconds. The model is evaluated on the
    whole validation split, and that is its last evaluation.

    Raises AttnlmError if `code` does not build a model with these weights that computes the same.
    """
    opened = open_dataset(dataset, data_dir=data_dir)
    config = _config_of_model(model, code, set, block_size)
    rebuilt = _rebuilt_model(model, config, opened.vocab_size)
    config = config.with_training(seed=0, device="cpu", dtype="float32")
    measured = validation_loss(rebuilt, Split(opened.val, opened.bytes_per_token), config.training)
    records = _evaluations(metrics, measured)
    step = records[-1].step
    config = config.with_training(steps=max(1, step), eval_every=max(1, step))
    run = create_run(
        config,
        opened,
        sum(p.numel() for p in rebuilt.parameters()),
        name=name,
        checkpoint_dir=Path(checkpoint_dir),
        leaks=check_required(config, opened.vocab_size, force=True),
    )
    weights = dict(rebuilt.named_parameters()) | stored_buffers(rebuilt)
    top = min(records, key=lambda record: record.val_loss)
    facts = CheckpointFacts(
        step=step,
        val_loss=measured.loss,
        evaluated_step=step,
        best_step=top.step,
        best_loss=top.val_loss,
    )
    for path in (run.best, run.last):
        save_checkpoint(path, weights, facts.content())
    # Both checkpoints are the last model, whose loss counts, even if an earlier one was lower.
    run.append_evaluations(*records, replace(records[-1], checkpoint="best"))
    return open_run(run.path)


def _evaluations(
    metrics: Sequence[Mapping[str, Any]], measured: Evaluation
) -> list[EvaluationRecord]:
    """Return the evaluations of a user's loop, of which the last is `measured`."""
    *earlier, last = metrics or [{"step": 0}]
    records = []
    for metric in (*earlier, {**last, "val_loss": measured.loss}):
        values = {**_UNKNOWN, **metric, "bits_per_byte": None, "checkpoint": ""}
        record = record_from_json(EvaluationRecord, values, Path("metrics"), _HINT)
        if measured.bits_per_byte is not None:
            bits = record.val_loss * measured.bits_per_byte / (measured.loss or 1.0)
            record = replace(record, bits_per_byte=bits)
        records.append(record)
    steps = [record.step for record in records]
    if steps != sorted(set(steps)):
        raise UsageError("the steps of `metrics` do not rise", "pass the oldest evaluation first")
    return records


def _rebuilt_model(model: nn.Module, config: Config, vocab_size: int) -> LanguageModel:
    """Return the model that `config` describes, with the weights of `model`.

    Raises AttnlmError if it has other weights or computes other logits.
    """
    rebuilt = uninitialised_model(config.spec, vocab_size).eval()
    trained = model
    if not isinstance(trained, LanguageModel):
        trained = OwnLanguageModel(config.spec, vocab_size, model)  # type: ignore[arg-type]
    try:
        rebuilt.load_state_dict(trained.state_dict())
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise AttnlmError(
            f"{config.spec.name} does not build the model that you trained: {reason}",
            "pass the `code` and the arguments in `set` that made it",
        ) from None
    check_finite(*rebuilt.parameters())
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(vocab_size, (2, rebuilt.block_size), generator=generator)
    with evaluating(trained), torch.inference_mode():
        logits_BTV = trained(ids_BT.to(next(model.parameters()).device)).cpu()
        if not are_close(rebuilt(ids_BT), logits_BTV):
            raise AttnlmError(
                "the model computes something else than its settings say", "pass its `code`"
            )
    return rebuilt


def _config_of_model(
    model: nn.Module, code: Any, arguments: Mapping[str, Any] | None, block_size: int | None
) -> Config:
    if isinstance(model, LanguageModel) and code is None:
        return resolve_new(model.spec.settings(), None).config
    if code is None and type(model).__module__.startswith("torch."):
        raise UsageError(
            f"{type(model).__name__} is a class of PyTorch's, which does not say how to build it",
            "pass the module that torch.compile or DataParallel wraps, or the `code` that makes it",
        )
    block_size = block_size or getattr(model, "block_size", None)
    if not isinstance(block_size, int):
        raise UsageError("the context of the model is not known", "pass `block_size`")
    settings: dict[str, Any] = {
        "model": code if code is not None else type(model),
        "set": dict(arguments or {}),
        "block_size": block_size,
    }
    return resolve_new(settings, None).config
