"""Is what a run records what it trains? The run is opened as another process would open it."""

from __future__ import annotations

import dis
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType

import numpy as np
import torch
from torch import Tensor, nn

from attnlm.base import files
from attnlm.base.errors import AttnlmError
from attnlm.base.own_code import OwnCode, opened_again
from attnlm.compute.device import Device
from attnlm.config.settings import Config, resolve
from attnlm.model.inspection import (
    are_close,
    build_with_weights,
    draw_zeros,
    restoring,
    stored_buffers,
)
from attnlm.model.language_model import LanguageModel, Transformer, on_device_of
from attnlm.model.layers import drop_by
from attnlm.model.own_specs import CODE
from attnlm.runs.checkpoint import load_checkpoint, save_checkpoint
from attnlm.training.forms import batch_loss
from attnlm.training.optimizer import flatten_parameters
from attnlm.training.random_state import keeping_random_state, seed_generators

_TEXTS = 2


class NotRecordedError(AttnlmError):
    """Error for own code that computes something else than its run will when opened."""


def check_recorded(config: Config, model: LanguageModel, device: Device) -> None:
    """Raise NotRecordedError unless a model with own code computes what its run will when opened.

    Own code is run anew from its recorded source, and gets the recorded state. Logits and losses of
    a batch must be the same, in evaluation and in training; then again, after that batch. The
    parameters must be flat, as the optimizer makes them. Nothing of the model changes.
    """
    if not config.codes:
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        keeping_random_state(device, config),
        restoring(model),
    ):
        draw_zeros(model)
        drop_by(model, ())
        parameters = model.named_parameters()
        trained = {name: (p, p.data_ptr()) for name, p in parameters if p.requires_grad}
        for _ in range(2):
            weights = dict(model.named_parameters()) | stored_buffers(model)
            with files.explaining_os_errors(Path(folder)):
                save_checkpoint(Path(folder) / "opened.safetensors", weights, {})
            ours = list(_numbers(model, config, device))
            _check_kept(trained, model)
            with opened_again(config.codes):
                opened, theirs = _open(config, model, device, Path(folder))
            is_same = _is_same if device.name == "cpu" else are_close
            if not all(map(is_same, ours, theirs)):
                cause, hint = _likely_cause(model, opened)
                raise NotRecordedError(
                    f"{config.spec.name} computes something else when its run is opened: {cause}",
                    hint,
                )


def _open(
    config: Config, model: LanguageModel, device: Device, folder: Path
) -> tuple[LanguageModel, list[Tensor]]:
    """Return the model that another process opens, and its numbers."""
    try:
        recorded = recorded_config(config, folder)
        _check_forms(stored_buffers(model), recorded.spec.buffers(model.vocab_size))
        path = folder / "opened.safetensors"
        weights = load_checkpoint(path, recorded.spec, model.vocab_size)[1]
        opened = build_with_weights(recorded.spec, model.vocab_size, weights).to(device.torch)
        flatten_parameters(opened, recorded.training)
        if isinstance(opened, Transformer) and isinstance(model, Transformer):
            opened.recompute = model.recompute
        return opened, list(_numbers(opened, recorded, device))
    except AttnlmError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - own code may raise anything
        raise NotRecordedError(
            f"{config.spec.name} cannot be opened by another process: "
            f"{type(error).__name__}: {error}",
            "a run keeps one file of own code: put all into it that it needs",
        ) from None


def recorded_config(config: Config, folder: Path) -> Config:
    """Return the configuration as config.json holds it, with a copy of the code in a folder."""
    settings = config.settings()
    recorded = json.loads(json.dumps(settings))
    for name, code in settings.items():
        if isinstance(code, OwnCode):
            copy = folder / CODE / code.file
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(code.content())
            recorded[name] = OwnCode(code, copy, code.sha256)
    return resolve({}, recorded)


def _numbers(model: LanguageModel, config: Config, device: Device) -> Iterator[Tensor]:
    """Yield logits and loss of a batch, in evaluation and then in training."""
    loss_of = batch_loss(config.training)
    generator = torch.Generator().manual_seed(0)
    shape = _TEXTS, model.block_size + 1
    ids = torch.randint(model.vocab_size, shape, generator=generator).to(device.torch)
    inputs_BT, targets_BT = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    for is_training in (False, True):
        model.train(is_training)
        seed_generators(config.training.seed or 0, config)
        with torch.set_grad_enabled(is_training), device.autocast(), on_device_of(inputs_BT):
            yield model(inputs_BT).detach()
            yield loss_of(model, inputs_BT, targets_BT).detach()


def _check_kept(trained: Mapping[str, tuple[nn.Parameter, int]], model: LanguageModel) -> None:
    """Raise NotRecordedError unless parameters are those, and in the memory, that are updated."""
    parameters = dict(model.named_parameters())
    for name, (parameter, place) in trained.items():
        if parameters.get(name) is not parameter or parameter.data_ptr() != place:
            raise NotRecordedError(
                f"the parameter {name} is replaced while the model computes, and would not train",
                "change it in place, as in: with torch.no_grad(): self.weight.clamp_(-1, 1)",
            )


def _check_forms(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """Raise NotRecordedError if buffers are not of the form that the constructor gives them."""
    forms, built = (
        {n: f"{tuple(b.shape)} of {b.dtype}" for n, b in buffers.items()}
        for buffers in (ours, theirs)
    )
    for name in sorted(forms.keys() | built.keys()):
        now, then = forms.get(name, "None"), built.get(name, "None")
        if now != then:
            raise NotRecordedError(
                f"the buffer {name} is {now}, but {then} when the model is built",
                "give it its shape and type in the constructor, or register it with "
                "persistent=False if each batch makes it again",
            )


# --- The likely cause -----------------------------------------------------------------------------


def _likely_cause(model: nn.Module, opened: nn.Module) -> tuple[str, str]:
    """Return why a model and the opened one differ, and a hint."""
    recorded = model.state_dict(keep_vars=True).keys()
    pairs = list(zip(model.named_modules(), opened.modules(), strict=False))
    for (_, ours), theirs in pairs:
        for our_class, their_class in zip(type(ours).__mro__, type(theirs).__mro__, strict=False):
            for name, value in vars(our_class).items():
                is_code = isinstance(value, FunctionType) or not name.startswith("__")
                if is_code and not _is_same(value, vars(their_class).get(name)):
                    return (
                        f"{our_class.__name__}.{name} is not what the recorded source says",
                        "write it into the class, and change it there alone",
                    )
    for (path, ours), theirs in pairs:
        for name, value in {**vars(ours), **dict(ours.named_buffers(recurse=False))}.items():
            full = f"{path}.{name}"
            if full in recorded or name in vars(nn.Module()):
                continue
            if not _is_same(value, getattr(theirs, name, None)):
                if isinstance(ours._buffers.get(name), Tensor):
                    return (
                        f"the buffer {full} is not persistent, and so not recorded",
                        "register it without persistent=False",
                    )
                return (
                    f"the attribute {full} is not recorded",
                    f"keep it in a buffer: self.register_buffer({name!r}, …)",
                )
    return (
        "it depends on a variable of its file, or on random numbers of its own",
        "keep what changes in buffers, and draw random numbers with torch.rand and the like",
    )


def _is_same(ours: object, theirs: object) -> bool:
    """Return True unless two values differ; True also for objects of which that is not known."""
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            return False
        are_nan = (ours != ours) & (theirs != theirs)
        return bool(((ours == theirs) | are_nan).all())
    if isinstance(ours, np.ndarray) and isinstance(theirs, np.ndarray):
        return repr(ours.tolist()) == repr(theirs.tolist())
    if isinstance(ours, FunctionType) and isinstance(theirs, FunctionType):
        return _instructions(ours) == _instructions(theirs)
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(_is_same(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(_is_same, ours, theirs))
    if isinstance(ours, bool | int | float | complex | str | None):
        return repr(ours) == repr(theirs)
    return not isinstance(ours, Tensor | np.ndarray | FunctionType | dict | list | tuple)


def _instructions(function: FunctionType) -> list[tuple[str, str]]:
    """Return what a function does. Jumps have no length here, and calls no preparation.

    Both depend on where the modules that it uses were imported: in a notebook, in another cell.
    """
    jumps = {*dis.hasjrel, *dis.hasjabs}
    return [
        (i.opname.replace("METHOD", "ATTR"), "" if i.opcode in jumps else repr(i.argval))
        for i in dis.get_instructions(function)
        if i.opname != "PUSH_NULL" and not isinstance(i.argval, CodeType)
    ]
