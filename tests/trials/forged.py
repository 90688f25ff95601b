"""Configuration, weights and seals that agree, at sizes that nobody trains: used, or refused."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file

import attnlm
from attnlm.config.settings import Config, resolve
from attnlm.model.architecture import RUNGS
from attnlm.model.inspection import parameter_shapes
from attnlm.model.language_model import build_model
from attnlm.runs import checkpoint
from attnlm.training.optimizer import FlatOptimizer
from tests import command as commands
from tests.trials.children import in_child
from tests.trials.hostile import CHANGES, NASTY, change_tensor
from tests.trials.small import agree, bounded_memory, seal
from tests.trials.trial import Tally, Trial, not_linux, place

_MOST_SECONDS = 30
_MOST_NUMBERS = 2**23  # in the weights of a model that is made
_VOCABULARIES = (1, 2, 3, 26, 257, 3000)
_TOKENS = 4000
_TRAINING: dict[str, Any] = {
    "steps": 4,
    "eval_every": 2,
    "batch_size": 2,
    "seed": 1,
    "threads": 1,
    "device": "cpu",
    "dtype": "float32",
    "compile": "off",
}


@Trial("forged", short=6, full=300, skip=not_linux, forks=True, draws=True)
def _forged(tally: Tally, folder: Path) -> None:
    """Configuration, weights and seals that agree, at odd and impossible sizes: used, or refused.

    Each forged run is read by a few commands in a child. As promised is that a command does its
    work, or refuses in a line and a hint, in bounded memory and time; a run whose tensors are of a
    wrong type or size is always refused.
    """
    for number, generator in tally.drawn(tally.wanted):
        forge = _FORGERIES[number % len(_FORGERIES)]
        vocab_size = generator.choice(_VOCABULARIES)
        made = folder / f"of-{vocab_size}"
        if not made.exists():
            _make_data(made, vocab_size)
        with place(folder, like=made) as copy:
            outcome = in_child(_read_forged, copy, vocab_size, forge, generator)
        what, fault = outcome.result or (forge.__name__, outcome.failure)
        tally.count(fault, f"{what}, {vocab_size} ids")


def _make_data(folder: Path, vocab_size: int) -> None:
    """Make a data set of so many characters, and a run of a bigram that was trained on it."""
    folder.mkdir(parents=True)
    characters = "".join(chr(0x4E00 + i) for i in range(vocab_size))
    text = folder / "text.txt"
    text.write_text(characters * math.ceil(_TOKENS / vocab_size), encoding="utf-8")
    attnlm.prepare(text, data_dir=folder / "data")
    attnlm.train(
        data_dir=folder / "data",
        checkpoint_dir=folder / "checkpoints",
        name="run",
        **{**_TRAINING, "model": "bigram", "block_size": 4, "steps": 2},
    )
    (folder / "checkpoints" / "run" / "ticker.jsonl").unlink()  # a bigram has no heads


def _read_forged(
    folder: Path, vocab_size: int, forge: _Forgery, generator: Random
) -> tuple[str, str | None]:
    """Return what was forged, and what goes wrong as commands read it."""
    run = folder / "checkpoints" / "run"
    what = forge(run, vocab_size, generator)
    os.chdir(folder)
    signal.alarm(3 * _MOST_SECONDS)
    for name in generator.sample(list(_COMMANDS), 4):
        began = time.monotonic()
        with bounded_memory(2**30):
            done = commands.here([argument.format(run=run) for argument in _COMMANDS[name]])
        fault = done.fault() or _told_wrongly(done, "--json" in _COMMANDS[name])
        if fault is None and forge not in _USABLE and done.code == 0:
            fault = "accepted"
        if fault is None and time.monotonic() - began > _MOST_SECONDS:
            fault = f"it took {time.monotonic() - began:.0f} s"
        if fault:
            return f"{what}, {name}", fault
    return what, None


def _told_wrongly(done: commands.Done, is_json: bool) -> str | None:
    """Return what nobody wants to read: warnings, numbers that are none, pages for an error."""
    if "Warning" in done.stderr:
        return f"a warning: {done.stderr[-300:]}"
    if done.code and len(done.stderr) > 2000:
        return f"its refusal has {len(done.stderr):,} characters"
    if done.code == 0 and is_json:
        constants: list[str] = []
        json.loads(done.stdout, parse_constant=constants.append)
        return f"not JSON: {constants}" if constants else None
    return None


_TEXT = "\u4e00" * 5
_SAMPLE = ("sample", "{run}", "--seed", "1", "--tokens", "9")
_COMMANDS = {
    "sample": [*_SAMPLE, "--tokens", "40"],
    "sample last": [*_SAMPLE, "--checkpoint", "last"],
    "sample greedily": [*_SAMPLE, "--temperature", "0", "--json"],
    "sample many": [*_SAMPLE, "--num-samples", "20", "--top-k", "2"],
    "sample from a prompt": [*_SAMPLE, "--prompt", _TEXT * 20],
    "sample with probabilities": [*_SAMPLE, "--show-probs", "--json"],
    "eval": ["eval", "{run}", "--json"],
    "resume": ["train", "--resume", "{run}"],
    "attend": ["attend", _TEXT, "--run", "{run}", "--json"],
    "attend, a page": ["attend", _TEXT, "--run", "{run}", "--output", "a.html"],
    "heads": ["heads", "--run", "{run}", "--windows", "2", "--json"],
    "trace": ["trace", _TEXT, "--run", "{run}", "--json"],
    "trace as code": ["trace", _TEXT, "--run", "{run}", "--as-code"],
    "report": ["report", "{run}", "--windows", "2"],
}


# --- What is forged -------------------------------------------------------------------------------

_Forgery = Callable[[Path, int, Random], str]
"""Forges the run at a path, for so many ids; returns how."""

_FEW = (1, 2, 3, 4, 5, 7, 8, 9)
_EXTREMES = (15, 16, 17, 31, 32, 33, 63, 65, 127, 129, 255, 256, 257, 1000, 4097, 2**16 + 1, 2**20)
_MOST_HEADS = 4097  # some commands print each of them
_SIZES = ("embed_dim", "heads", "head_size", "layers", "block_size")


def _odd_sizes(run: Path, vocab_size: int, generator: Random) -> str:
    """Sizes that may be chosen, one or two of them extreme."""

    def draw() -> dict[str, Any]:
        sizes: dict[str, Any] = {name: generator.choice(_FEW) for name in _SIZES}
        for name in generator.sample(_SIZES, generator.choice((0, 1, 1, 2))):
            sizes[name] = generator.choice(_EXTREMES)
        sizes["heads"] = min(sizes["heads"], _MOST_HEADS)
        return {"model": generator.choice(RUNGS[1:]), **sizes}

    return f"{_write(run, vocab_size, generator, draw)[1]}"


_LIMITS: dict[str, tuple[object, ...]] = {
    "warmup": (1, 4),
    "patience": (1, 2**40),
    "eval_every": (1, 2**40),
    "gradient_clip": (1e-38, 1e-300, 1e38, 1),
    "learning_rate": (1e-300, 1e-38, 100, 100.0),
    "weight_decay": (1000, 1e-300),
    "weight_decay_on": ("all",),
    "beta1": (0, 0.0, 1 - 2**-53),
    "beta2": (0, 0.0, 1 - 2**-53),
    "schedule": ("constant", "cosine"),
    "cooldown": (5e-324, 1),
    "batch_size": (1, 3, 1000, 2**20),
    "sampling": ("random",),
    "stride": (1, 2**40),
    "seed": (0, 2**63 - 1),
    "threads": (2, 3),
    "compile": ("parts", "auto"),
    "dtype": ("bfloat16", "auto"),
    "dropout": (0, 1 - 2**-53, 0.5),
    "optimizer": ("muon",),
    "projection": (True,),
    "qkv_bias": (True,),
    "tie_embeddings": (True,),
    "steps": (2, 3),
}


def _odd_settings(run: Path, vocab_size: int, generator: Random) -> str:
    """Settings at the ends of what they may be."""

    def draw() -> dict[str, Any]:
        names = generator.sample(list(_LIMITS), generator.choice((1, 2, 4)))
        drawn = {name: generator.choice(_LIMITS[name]) for name in names}
        return {"model": generator.choice(RUNGS), **drawn}

    return f"{_write(run, vocab_size, generator, draw)[1]}"


_NO_SIZES: tuple[Any, ...] = (0, -1, 2**20 + 1, 2**40, 2**62, True, False, 2.0, 0.5, "4", None)


def _impossible_sizes(run: Path, vocab_size: int, generator: Random) -> str:
    """A size, or a vocabulary, that can't be; tensors have it too if tensors can."""
    sizes: dict[str, Any] = {"model": "multi-head", "heads": 2, "embed_dim": 4, "head_size": 2}
    config = _write(run, vocab_size, generator, lambda: sizes)[0]
    name = generator.choice(("embed_dim", "heads", "head_size", "block_size", "vocab_size"))
    value = generator.choice(_NO_SIZES)
    changed: dict[str, Any] = {"vocab_size": vocab_size, "config": config.settings()}
    (changed if name in changed else changed["config"])[name] = value
    agree(run / "config.json", **changed)
    with contextlib.suppress(attnlm.AttnlmError, ArithmeticError, RuntimeError, TypeError):
        if name == "vocab_size":
            shapes = parameter_shapes(config.spec, value)
        else:
            shapes = parameter_shapes(replace(config.spec, **{name: value}), vocab_size)
        if sum(map(math.prod, shapes.values())) < 4 * _MOST_NUMBERS:
            for path in _checkpoints(run):
                seal(path, {f"model.{n}": torch.zeros(shapes[n]) for n in shapes}, _FACTS)
    return f"{name} = {value!r}"


def _checkpoints(run: Path) -> list[Path]:
    return [run / "best.safetensors", run / "last.safetensors"]


def _other_tensors(run: Path, vocab_size: int, generator: Random) -> str:
    """A matrix, or each of them, of another type or shape, or gone: the digest is right."""
    _write(run, vocab_size, generator, lambda: {"model": generator.choice(RUNGS[1:])})
    kind, every = generator.choice(list(CHANGES)), generator.random() < 0.3
    for path in _checkpoints(run):
        tensors = load_file(str(path))
        names = [n for n in tensors if n.startswith("model.") and tensors[n].ndim > 1]
        chosen = names if every else [generator.choice(names)]
        for name in chosen:
            change_tensor(tensors, name, kind)
        seal(path, tensors, _FACTS)
    return f"{', '.join(chosen)} {kind}"


def _declared_sizes(run: Path, vocab_size: int, generator: Random) -> str:
    """Up to terabytes, by configuration and header alike; the file is small, or a hole."""
    config = _write(run, vocab_size, generator, lambda: {"model": "multi-head"})[0]
    sizes: dict[str, Any]
    sizes = {name: generator.choice((2**12, 2**16, 2**20)) for name in ("embed_dim", "block_size")}
    sizes |= {"heads": generator.choice((1, 2**12)), "head_size": generator.choice((1, 2**12))}
    agree(run / "config.json", config={**config.settings(), **sizes})
    header: dict[str, Any] = {"__metadata__": {"facts": json.dumps(_FACTS), "digest": "0" * 64}}
    end = 0
    for name, shape in parameter_shapes(replace(config.spec, **sizes), vocab_size).items():
        begin, end = end, end + 4 * math.prod(shape)
        about = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
        header[f"model.{name}"] = about
    described = json.dumps(header).encode()
    length = generator.choice((0, 64, 2**20, min(end, 2**42)))
    for path in _checkpoints(run):
        path.write_bytes(len(described).to_bytes(8, "little") + described)
        os.truncate(path, 8 + len(described) + length)
    return f"{sizes}, {end:,} bytes declared, {length:,} there"


_FACTS: dict[str, Any] = {
    **dict.fromkeys(("step", "evaluated_step", "best_step"), 2),
    **dict.fromkeys(("best_loss", "val_loss", "seconds"), 1.0),
    "stale": 0,
    "loss_sum": 0.0,
}


def _odd_facts(run: Path, vocab_size: int, generator: Random) -> str:
    """Where the run stands, as its last checkpoint tells; a configuration that has seen it."""
    _write(run, vocab_size, generator, lambda: {"model": generator.choice(RUNGS)})
    names = generator.sample(list(_FACTS), generator.choice((1, 1, 2)))
    odd = {name: generator.choice(NASTY) for name in names}
    for path in _checkpoints(run):
        seal(path, load_file(str(path)), {**_FACTS, **odd})
    return f"{odd}"


_USABLE = (_odd_sizes, _odd_settings, _odd_facts)
"""What a command may use; all else must be refused."""
_FORGERIES: tuple[_Forgery, ...] = (
    *(*_USABLE, _impossible_sizes, _other_tensors, _declared_sizes),
    *(_odd_sizes, _odd_settings),
)


def _write(
    run: Path, vocab_size: int, generator: Random, draw: Callable[[], dict[str, Any]]
) -> tuple[Config, dict[str, Any]]:
    """Make of the run one with the first drawn settings that a user could train; return these."""
    while True:
        drawn = draw()
        settings = {**_TRAINING, **drawn}
        with contextlib.suppress(attnlm.AttnlmError):
            # As a recipe, whose settings that the model does not have are left out.
            config = resolve({"model": settings["model"]}, settings)
            numbers = sum(map(math.prod, parameter_shapes(config.spec, vocab_size).values()))
            if numbers <= _MOST_NUMBERS:
                break
    torch.manual_seed(generator.randrange(2**31))
    model = build_model(config.spec, vocab_size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=generator.choice((0.02, 1.0, 30.0)))
    optimizer = FlatOptimizer(model, config.training)
    weights, state = optimizer.weights(), optimizer.state()
    checkpoint.save_checkpoint(run / "best.safetensors", weights, _FACTS)
    checkpoint.save_checkpoint(run / "last.safetensors", weights, _FACTS, state)
    agree(run / "config.json", config=config.settings(), parameters=numbers)
    return config, {name: value for name, value in drawn.items() if name in config.settings()}
