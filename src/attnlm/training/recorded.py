"""Is what a run records what it trains? The run is opened as another process would open it."""

from __future__ import annotations

import ast
import contextlib
import dis
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from attnlm.base import files
from attnlm.base.errors import AttnlmError
from attnlm.base.own_code import OwnCode, allow_call, opened_again
from attnlm.compute.device import Device, use_precision
from attnlm.compute.threads import flush_subnormals
from attnlm.config.settings import Config, resolve
from attnlm.model.inspection import (
    are_close,
    build_with_weights,
    draw_zeros,
    restoring,
    stored_buffers,
)
from attnlm.model.language_model import LanguageModel
from attnlm.model.layers import drop_by
from attnlm.model.own_arguments import CODE
from attnlm.model.own_modules import built_buffers
from attnlm.model.own_parts import on_device_of
from attnlm.runs.checkpoint import load_checkpoint, save_checkpoint
from attnlm.runs.run import with_recorded_code
from attnlm.training.forms import batch_loss
from attnlm.training.optimizer import flatten_parameters
from attnlm.training.random_state import keeping_random_state, seed_generators

_TEXTS = 2
_WEIGHTS, _NUMBERS = "opened.safetensors", "numbers.safetensors"


class NotAsRecordedError(AttnlmError):
    """Error for own code that computes something else than its run will when opened."""


def check_recorded(config: Config, model: LanguageModel, device: Device) -> None:
    """Raise NotAsRecordedError unless a model with own code computes what its run will when opened.

    Own code is run anew from its recorded source, and gets the recorded state. Logits and losses of
    a batch must be the same, in evaluation and in training; then again, after that batch. If the
    source may depend on the order of a set, another process computes them too, once. The parameters
    must be flat, as the optimizer makes them. Nothing of the model changes.
    """
    if not config.codes:
        return
    is_same = _is_same if device.name == "cpu" else are_close
    with (
        tempfile.TemporaryDirectory() as name,
        keeping_random_state(device, config),
        restoring(model),
    ):
        folder = Path(name)
        draw_zeros(model)
        drop_by(model, ())
        parameters = model.named_parameters()
        trained = {name: (p, p.data_ptr()) for name, p in parameters if p.requires_grad}
        for _ in range(2):
            weights = dict(model.named_parameters()) | stored_buffers(model)
            with files.explaining_os_errors(folder):
                save_checkpoint(folder / _WEIGHTS, weights, {})
            ours = list(_numbers(model, config, device))
            _check_kept(trained, model)
            with opened_again(config.codes), _explaining(config):
                recorded = recorded_config(config, folder)
                _check_forms(stored_buffers(model), built_buffers(recorded.spec, model.vocab_size))
                opened, theirs = _open(recorded, model.vocab_size, device, folder)
            if not all(map(is_same, ours, theirs)):
                cause, hint = _likely_cause(model, opened)
                raise NotAsRecordedError(
                    f"{config.spec.name} computes something else when its run is opened: {cause}",
                    hint,
                )
            about = repr((config.spec.settings(), config.settings()[CODE]))
            if about in _COMPARED or not any(map(_may_depend_on_hashes, config.codes)):
                continue
            theirs = _other_process(config, model.vocab_size, device, folder)
            if not all(map(is_same, ours, theirs)):
                raise _differs_elsewhere(config, "computes something else")
            _COMPARED.add(about)


@contextlib.contextmanager
def _explaining(config: Config) -> Iterator[None]:
    """Turn what own code raises when it is opened into NotAsRecordedError."""
    try:
        yield
    except AttnlmError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - own code may raise anything
        raise NotAsRecordedError(
            f"{config.spec.name} cannot be opened by another process: "
            f"{type(error).__name__}: {error}",
            "a run keeps one file of own code: put all into it that it needs",
        ) from None


def recorded_config(config: Config, folder: Path) -> Config:
    """Return the configuration as config.json holds it, with a copy of the code in a folder."""
    (folder / CODE).mkdir(exist_ok=True)
    for code in config.codes:
        (folder / CODE / code.file).write_bytes(code.content())
    files.write_json(folder / "config.json", config.settings())
    return _read_config(folder)


def _read_config(folder: Path) -> Config:
    return resolve({}, with_recorded_code(files.read_json(folder / "config.json"), folder / CODE))


def _open(
    recorded: Config, vocab_size: int, device: Device, folder: Path
) -> tuple[LanguageModel, list[Tensor]]:
    """Return the model with the weights in a folder, and its numbers."""
    weights = load_checkpoint(folder / _WEIGHTS, recorded.spec, vocab_size)[1]
    opened = build_with_weights(recorded.spec, vocab_size, weights).to(device.torch)
    flatten_parameters(opened, recorded.training)
    return opened, list(_numbers(opened, recorded, device))


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


def _is_same(ours: Tensor, theirs: Tensor) -> bool:
    return _content(ours) == _content(theirs)


def _check_kept(trained: Mapping[str, tuple[nn.Parameter, int]], model: LanguageModel) -> None:
    """Raise NotAsRecordedError unless parameters are those, and in the memory, that are updated."""
    parameters = dict(model.named_parameters())
    for name, (parameter, place) in trained.items():
        if parameters.get(name) is not parameter or parameter.data_ptr() != place:
            raise NotAsRecordedError(
                f"the parameter {name} is replaced while the model computes, and would not train",
                "change it in place, as in: with torch.no_grad(): self.weight.clamp_(-1, 1)",
            )


def _check_forms(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """Raise NotAsRecordedError if buffers are not of the form that the constructor gives them."""
    forms, built = (
        {n: f"{tuple(b.shape)} of {b.dtype}" for n, b in buffers.items()}
        for buffers in (ours, theirs)
    )
    for name in sorted(forms.keys() | built.keys()):
        now, then = forms.get(name, "None"), built.get(name, "None")
        if now != then:
            raise NotAsRecordedError(
                f"the buffer {name} is {now}, but {then} when the model is built",
                "give it its shape and type in the constructor, or register it with "
                "persistent=False if each batch makes it again",
            )


# --- Another process, in which sets have other orders ---------------------------------------------

_HASHED = {"set", "frozenset", "hash", "__hash__", "id", "keys"}
"""names of what depends on a hash, or, of two keys(), makes a set"""
_COMPARED: set[str] = set()
"""models and files of own code that computed the same in another process"""
_SEEDS = [s for s in map(str, range(1, 33)) if s != os.environ.get("PYTHONHASHSEED")]


def _may_depend_on_hashes(code: OwnCode) -> bool:
    """Return True if a file mentions a set, but not only to look something up in it."""
    nodes = list(ast.walk(ast.parse(code.content())))
    looked_up = [x for node in nodes if isinstance(node, ast.Compare) for x in node.comparators]
    return any(
        (isinstance(node, ast.Set | ast.SetComp) and node not in looked_up)
        or not _HASHED.isdisjoint((getattr(node, "id", ""), getattr(node, "attr", "")))
        for node in nodes
    )


def _other_process(config: Config, vocab_size: int, device: Device, folder: Path) -> list[Tensor]:
    """Return the numbers of another process, in which texts have other hashes."""
    about = str(folder), vocab_size, (device.name, device.dtype, ""), torch.get_num_threads()
    program = f"from attnlm.training.recorded import open_in_child as f; f(*{about!r})"
    done = _python(_seed_of_other_orders(config), program)
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2]
        raise _differs_elsewhere(config, f"fails ({reason})")
    return [x.to(device.torch) for _, x in sorted(load_file(folder / _NUMBERS).items())]


def _differs_elsewhere(config: Config, what: str) -> NotAsRecordedError:
    return NotAsRecordedError(
        f"{config.spec.name} {what} in another process: a set has no order, and hash and id change",
        "sort the set, as in sorted({'a', 'b'}), or write a list or a dictionary",
    )


def open_in_child(path: str, vocab_size: int, device: tuple[str, str, str], threads: int) -> None:
    """Open the run in a folder, in this process for it alone, and write its numbers there."""
    folder = Path(path)
    torch.set_num_threads(threads)
    flush_subnormals()
    use_precision(Device(*device))
    recorded = _read_config(folder)
    for code in recorded.codes:
        allow_call(code.content(), code.name)
    numbers = _open(recorded, vocab_size, Device(*device), folder)[1]
    save_file({str(i): x.cpu() for i, x in enumerate(numbers)}, folder / _NUMBERS)


def _seed_of_other_orders(config: Config) -> str:
    """Return a seed of hashes with which texts have other places in the sources' sets than here.

    With a seed that is not chosen, two texts have the same order half of the time.
    """
    made: list[ast.expr] = []
    for node in (node for code in config.codes for node in ast.walk(ast.parse(code.content()))):
        if isinstance(node, ast.Set):
            made.append(ast.List(node.elts))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in _HASHED:
            made += node.args
    groups = []
    for node in made:
        with contextlib.suppress(ValueError, TypeError):
            texts = [x for x in ast.literal_eval(node) if isinstance(x, str)]
            groups += [texts] if len(texts) > 1 else []

    def moved(seed: str) -> float:
        theirs = ast.literal_eval(_python(seed, f"print([[*{{*x}}] for x in {groups}])").stdout)
        pairs = zip(([*{*group}] for group in groups), theirs, strict=True)
        return sum(sum(map(str.__ne__, *pair)) / len(pair[0]) for pair in pairs)

    return max(_SEEDS if groups else _SEEDS[:1], key=moved)


def _python(seed: str, program: str) -> subprocess.CompletedProcess[str]:
    """Run a program, its stdin, with a seed of hashes."""
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONSAFEPATH": "1"}
    return subprocess.run(
        [sys.executable, "-"],
        input=program,
        env=environment,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )


# --- The likely cause -----------------------------------------------------------------------------


def _likely_cause(model: nn.Module, opened: nn.Module) -> tuple[str, str]:
    """Return why a model and the opened one differ, and a hint."""
    recorded = model.state_dict(keep_vars=True).keys()
    for (path, ours), theirs in zip(model.named_modules(), opened.modules(), strict=False):
        for our_class, their_class in zip(type(ours).__mro__, type(theirs).__mro__, strict=False):
            for name, value in vars(our_class).items():
                is_code = isinstance(value, FunctionType) or not name.startswith("__")
                if is_code and _content(value) != _content(vars(their_class).get(name)):
                    return (
                        f"{our_class.__name__}.{name} is not what the recorded source says",
                        "write it into the class, and change it there alone",
                    )
        for name, value in {**vars(ours), **dict(ours.named_buffers(recurse=False))}.items():
            is_kept = f"{path}.{name}" in recorded or name in vars(nn.Module())
            if not is_kept and _content(value) != _content(getattr(theirs, name, None)):
                is_buffer = isinstance(ours._buffers.get(name), Tensor)
                what = "buffer" if is_buffer else "attribute"
                why = "not persistent, and so " if is_buffer else ""
                return (
                    f"the {what} {path}.{name} is {why}not recorded",
                    f"keep it in a buffer: self.register_buffer({name!r}, …)",
                )
    return (
        "it depends on a variable of its file, or on random numbers of its own",
        "keep what changes in buffers, and draw random numbers with torch.rand and the like",
    )


def _content(value: object) -> object:
    """Return what is compared of a value; None for objects of which that is not known."""
    match value:
        case Tensor() if value.layout is torch.strided:
            flat = value.detach().resolve_conj().reshape(-1)
            return value.shape, value.dtype, flat.view(torch.uint8).cpu().numpy().tobytes()
        case np.ndarray():
            return repr(value.tolist())
        case FunctionType():
            return _instructions(value)
        case dict():
            return {key: _content(held) for key, held in value.items()}
        case list() | tuple():
            return [_content(held) for held in value]
        case bool() | int() | float() | complex() | str() | None:
            return repr(value)
    return None


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
