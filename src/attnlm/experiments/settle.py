"""Settle what a configuration leaves open: seed, compilation, micro-batch, kernels, threads."""

from __future__ import annotations

import functools
import importlib.util
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import NamedTuple

import torch

from attnlm.base.caches import use_own_compiler_cache
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.readable import quantity
from attnlm.compute.choices import fastest
from attnlm.compute.device import Device, choose_device, use_precision
from attnlm.compute.processes import ALONE, Processes
from attnlm.config.settings import Config, with_steps
from attnlm.config.training import TrainingConfig
from attnlm.data.batches import check_length
from attnlm.model.inspection import parameters_of
from attnlm.training.kernels import faster_attention, faster_matmul, has_parts, parts_compile
from attnlm.training.memory import (
    MemoryEstimate,
    affordable_micro_batch,
    check_memory,
    estimate_memory,
)
from attnlm.training.state import initial_state, keeping_random_state
from attnlm.training.step import Stepper, TrainingData

# Floating-point operations of a long run: a large GPU takes some minutes.
_LONG = 1e17
_LONG_BUDGET = 600.0  # seconds
# Floating-point operations of a step that is too long for a trial, and uses every thread well.
_LARGE_STEP = 4e9
# A second thread that saves less than this fraction of the time isn't worth its cost on a busy
# machine, where each matmul waits for the slowest thread.
_WORTH = 0.1


def chosen_device(config: Config, dataset: TrainingData) -> Device:
    """Return the device to train on: for `auto` and small steps, the faster device in a trial.

    With a small model, a GPU waits for the processor at every operation.
    """
    training = config.training
    device = choose_device(training.device, training.dtype)
    is_open = training.device == training.dtype == "auto" and training.processes == 1
    work = _work(config, dataset)
    if device.name == "cpu" or not is_open or training.compile == "on" or work >= _LARGE_STEP:
        return device
    cpu = choose_device("cpu")

    def step_on(device: Device) -> Callable[[], object]:
        @functools.cache
        def stepper() -> Stepper:
            return trial(settle(config, device, dataset).config, device, dataset)

        return lambda: stepper().step().item()

    with keeping_random_state(device):
        ways = {found.name: step_on(found) for found in (device, cpu)}
        about = asdict(config.model), asdict(training), dataset.vocab_size, device.reason
        name = fastest("device", _sizes(config, dataset), ways, about=about, worth=_WORTH)
    return device if name == device.name else replace(cpu, reason=f"faster here than {device.name}")


class Settled(NamedTuple):
    """Complete configuration, number of parameters, and estimated memory of training."""

    config: Config
    parameters: int
    memory: MemoryEstimate


def settle(
    config: Config, device: Device, dataset: TrainingData, *, is_resumed: bool = False
) -> Settled:
    """Settle what a configuration leaves open, so that the recorded run can be repeated.

    The micro-batch of a resumed run stays as it is. Raises AttnlmError if the data are too short
    for the context, or the run can't fit into memory.
    """
    training = replace(
        config.training,
        seed=secrets.randbits(31) if config.training.seed is None else config.training.seed,
        device=device.name,
        dtype=device.dtype,
        compile=_settled_compile(config, device, dataset),
    )
    parameters = parameters_of(config.model, dataset.vocab_size)
    about = dataset.vocab_size, parameters, dataset.val_tokens
    if training.micro_batch_size is None and not is_resumed:
        size = affordable_micro_batch(replace(config, training=training), *about, device)
        training = replace(training, micro_batch_size=size)
    check_fits(replace(config, training=training), dataset, device)
    use_precision(device)
    training = _with_kernels(replace(config, training=training), device, dataset)
    config = replace(config, training=training)
    threads = training.threads or _chosen_threads(config, device, dataset)
    config = replace(config, training=replace(training, threads=threads))
    return Settled(config, parameters, estimate_memory(config, *about, device.name))


def check_fits(config: Config, dataset: TrainingData, device: Device) -> None:
    """Raise AttnlmError if the data are too short for the context, or the memory is too small."""
    longest = min(len(dataset.train), dataset.val_tokens) - 1
    hint = f"give `block_size` {longest} or less, or prepare a longer text"
    check_length(len(dataset.train), config.model.block_size, "training", hint)
    check_length(dataset.val_tokens, config.model.block_size, "validation", hint)
    parameters = parameters_of(config.model, dataset.vocab_size)
    check_memory(config, dataset.vocab_size, parameters, dataset.val_tokens, device)


def _settled_compile(config: Config, device: Device, dataset: TrainingData) -> str:
    """Return "on" to compile the whole step, "parts" for some operations, or "off" for none.

    Raises AttnlmError if the settings demand compilation, but a compiler or a folder for compiled
    code is missing, or the model lacks such operations.
    """
    asked, on_cpu = config.training.compile, device.name == "cpu"
    if asked == "on" and on_cpu and not _has_compiler():
        raise AttnlmError(
            "`compile` on needs a C++ compiler, and none was found",
            "install g++ or clang++, or give `compile` off",
        )
    on_gpu, shard = device.name == "cuda", config.training.shard
    whole = not shard and config.training.lora is None
    if asked == "auto" and on_gpu and whole and _is_long(config, dataset):
        asked = "on"
    if asked == "on":
        use_own_compiler_cache()
    if asked in ("on", "off"):
        return asked
    tokens = config.training.batch_size * config.model.block_size
    about = config.model, dataset.vocab_size, tokens
    possible = on_cpu and device.dtype == "float32" and has_parts(*about)
    if asked == "auto":
        return "parts" if possible and parts_compile(*about) else "off"
    if not possible:
        raise UsageError(
            "`compile` parts is for float32 on a CPU, and for models that have such parts: "
            "small heads in one layer, an MLP, RMS norm or rotary positions",
            "give `compile` off",
        )
    if not parts_compile(*about):
        raise AttnlmError(
            "`compile` parts needs a C compiler that works, and none was found",
            "install gcc or clang, set TMPDIR to a folder that programs may be loaded from, "
            "or give `compile` off",
        )
    return "parts"


def _with_kernels(config: Config, device: Device, dataset: TrainingData) -> TrainingConfig:
    """Return the training settings, with the faster kernels if they were left open."""
    a, training = config.model, config.training
    is_plain = (device.name, device.dtype) != ("cpu", "float32") or training.compile == "on"
    matmul, attention = training.matmul, training.attention_kernel
    if attention == "native" and not is_plain and training.compile != "parts":
        raise UsageError(
            "`attention_kernel` native needs `compile` parts", "leave `attention_kernel` out"
        )
    if is_plain:
        return replace(training, matmul="blas", attention_kernel="torch")
    tokens = config.tokens_per_step // (training.processes * torch.get_num_threads())
    if matmul == "auto":
        large = training.compile == "parts" or training.optimizer == "muon" or training.lora
        matmul = faster_matmul(a, dataset.vocab_size, tokens) if large else "blas"
    if attention == "auto":
        attention = faster_attention(a, tokens) if training.compile == "parts" else "torch"
    return replace(training, matmul=matmul, attention_kernel=attention)


def _is_long(config: Config, dataset: TrainingData) -> bool:
    """Return True if code for a GPU can be compiled, and the run is worth the minute it takes."""
    has_triton = importlib.util.find_spec("triton") is not None
    if not has_triton or not _has_compiler(os.environ.get("CC", "gcc"), "clang", "cc"):
        return False
    if config.training.steps is None:
        return (config.training.budget or 0.0) >= _LONG_BUDGET
    return _work(config, dataset) * config.training.steps > _LONG


def _work(config: Config, dataset: TrainingData) -> float:
    """Return about how many floating-point operations a step takes."""
    return 6.0 * parameters_of(config.model, dataset.vocab_size) * config.tokens_per_step


def _chosen_threads(config: Config, device: Device, dataset: TrainingData) -> int:
    """Return the number of threads that makes a step fastest, by a trial on a separate model."""
    training, everything = config.training, torch.get_num_threads()
    work = _work(config, dataset)
    if device.name != "cpu" or training.compile == "on" or training.is_sharded:
        return everything
    if everything == 1 or work >= _LARGE_STEP:
        return everything
    kernels = training.compile, training.matmul, training.attention_kernel
    about = asdict(config.model), dataset.vocab_size, training.optimizer, kernels, training.lora

    def step_by(threads: int) -> Callable[[], object]:
        by_threads = replace(config, training=replace(training, threads=threads))
        return trial(by_threads, device, dataset).step

    with keeping_random_state(device):
        ways = {str(count): step_by(count) for count in (1, everything)}
        return int(fastest("threads", _sizes(config, dataset), ways, about=about, worth=_WORTH))


def trial(
    config: Config, device: Device, dataset: TrainingData, processes: Processes = ALONE
) -> Stepper:
    """Return a stepper for a new model, on which steps can be measured."""
    config = replace(config, training=with_steps(config.training, 2**30))
    state = initial_state(config, dataset.vocab_size, device, processes)
    return Stepper(state, config, dataset, processes)


def _sizes(config: Config, dataset: TrainingData) -> str:
    """Return the sizes that a step's time depends on, in words."""
    work, tokens = _work(config, dataset), config.tokens_per_step // config.training.processes
    return f"{config.model.model}, {quantity(work)} FLOPs, {tokens:,} tokens a step"


def _has_compiler(*commands: str) -> bool:
    """Return True if one of the commands exists; the default commands compile C++."""
    return any(map(shutil.which, commands or (os.environ.get("CXX", "g++"), "clang++", "c++")))
