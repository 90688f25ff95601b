"""Choose what a configuration leaves open: seed, form of the model, micro-batch, threads.

For a recipe of several sizes, choose the size that suits the budget, the machine and the text.
"""

from __future__ import annotations

import importlib.util
import math
import os
import secrets
import shutil
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import Note, OnEvent, ignore
from attnlm.compute.device import Device, choose_device, use_precision
from attnlm.compute.native import native_library
from attnlm.compute.threads import torch_settings_restored
from attnlm.config.settings import Config, Request, resolve
from attnlm.data.batches import check_splits
from attnlm.data.dataset import Dataset, id_dtype
from attnlm.model.own_arguments import with_defaults
from attnlm.model.spec import parameter_count
from attnlm.training.cuda_graph import FIRST_CALLS
from attnlm.training.forms import has_native_form, is_native_faster
from attnlm.training.memory import affordable_micro_batch, check_memory
from attnlm.training.random_state import keeping_random_state
from attnlm.training.schedule import affordable_eval_tokens, budget_end
from attnlm.training.state import initial_state
from attnlm.training.step import Stepper, split_batch, try_divisions

# Floating-point operations of a long run: a large GPU takes about a minute without compilation.
_LONG = 5e15
_LONG_BUDGET = 120.0  # seconds
# Floating-point operations of a step below which a device computes faster than the next: one thread
# than several, which wait for each other once per step, and the CPU than a GPU, whose start takes
# longer than such a run (docs/speed.md).
_SMALL_FOR_THREADS = 1e8
_SMALL_FOR_GPU = 2e7
_WINDOWS = 64  # of random tokens in place of a data set


def choose_training_device(config: Config, dataset: Dataset) -> Device:
    """Return the device to train on. If the settings leave the device open, small steps are
    computed on the CPU, even if there is a GPU."""
    training = config.training
    device = choose_device(training.device, training.dtype)
    is_open = training.device == training.dtype == "auto" and training.processes == 1
    is_small = training.compile != "torch" and _step_flops(config, dataset) < _SMALL_FOR_GPU
    if device.name == "cpu" or not is_open or not is_small:
        return device
    return replace(choose_device("cpu"), reason=f"a step is too small for {device.name}")


def complete_config(
    request: Request, dataset: Dataset, began: float, on_event: OnEvent
) -> tuple[Config, Device]:
    """Return the complete configuration of a new run, and the device to train on."""
    config = request.config
    if len(request.sizes) > 1:
        config = affordable_size(request, dataset, began, on_event)
        config = replace(config, spec=with_defaults(config.spec))
    model = config.spec.name
    for key in request.ignored(config):
        on_event(Note(f"ignoring the recipe's {key}: it does not apply to this {model}"))
    tokenizer = request.sizes[0].get("tokenizer", dataset.tokenizer.name)
    if tokenizer != dataset.tokenizer.name:
        made_for = f"the recipe was made for `tokenizer` {tokenizer}"
        other = f"{dataset.name} was prepared with {dataset.tokenizer.name}"
        on_event(Note(f"{made_for}, but {other}"))
    config = _with_loss_on(config, dataset)
    device = choose_training_device(config, dataset)
    config = autotune(config, device, dataset, on_event)
    examples = dataset.train_examples
    if examples and (cut := examples.is_longer(config.spec.block_size).sum()):
        on_event(
            Note(
                f"{cut:,} of {len(examples):,} training examples are longer than the context and "
                f"are cut: a model with `block_size` {examples.longest - 1} holds the longest"
            )
        )
    if config.training.eval_tokens is None:
        affordable = affordable_eval_tokens(config, dataset.vocab_size, dataset.val_tokens)
        config = config.with_training(eval_tokens=affordable)
    return config, device


def _with_loss_on(config: Config, dataset: Dataset) -> Config:
    """Return the configuration with `loss_on` for this data set. Raises UsageError."""
    training = config.training
    if dataset.examples is not None:
        return config.with_training(loss_on=training.loss_on or "answers")
    for name in ("loss_on", "best_by", "examples_per_window"):
        if getattr(training, name) not in (None, "all", "loss"):
            raise UsageError(
                f"`{name}` {getattr(training, name)} needs questions with answers, which "
                f"{dataset.name} lacks",
                "prepare a task, such as addition, or records with `prompt_column`",
            )
    return config


def autotune(
    config: Config,
    device: Device,
    dataset: Dataset,
    on_event: OnEvent = ignore,
    *,
    is_resumed: bool = False,
) -> Config:
    """Choose what a configuration leaves open, and return the complete configuration.

    The run records the choices, so that the run can be repeated. The micro-batch of a resumed run
    stays as it is. Raises AttnlmError if the data are too short for the context, or the run can't
    fit into memory.
    """
    form = _choose_form(config, device, dataset)
    config = config.with_training(device=device.name, dtype=device.dtype, compile=form)
    if config.training.seed is None:
        config = config.with_training(seed=secrets.randbits(31))
    is_open = config.training.micro_batch_size is None and not is_resumed
    if is_open:
        size = affordable_micro_batch(config, dataset.vocab_size, device)
        config = config.with_training(micro_batch_size=size)
    check_fits(config, dataset, device)
    if config.training.threads is None:
        is_divided = device.name == "cpu" and config.training.compile != "torch"
        is_small = is_divided and _step_flops(config, dataset) < _SMALL_FOR_THREADS
        config = config.with_training(threads=1 if is_small else torch.get_num_threads())
    if config.codes and (why_whole := _why_whole(config, dataset, device)):
        if is_open:
            config = config.with_training(micro_batch_size=None)
        threads = (config.training.threads or 1) if device.name == "cpu" else 1
        if split_batch(config.training, threads).windows < config.training.batch_size:
            whole = "each batch is computed whole, not divided among threads"
            on_event(Note(f"{why_whole}: {whole}"))
    return config


def _why_whole(config: Config, dataset: Dataset, device: Device) -> str:
    """Return why own code needs whole batches; "" if it does not. Raises AttnlmError if it does,
    and processes or memory forbid it."""
    processes = config.training.processes
    with keeping_random_state(device):
        model = initial_state(config, dataset.vocab_size, device).model
    why_whole = try_divisions(config, model, device, dataset).why_whole
    if why_whole:
        if processes > 1:
            raise UsageError(
                f"{why_whole}, and `processes` {processes} divide it",
                "use `processes` 1",
            )
        whole = config.with_training(micro_batch_size=None, threads=1)
        check_memory(whole, dataset.vocab_size, device)
    return why_whole


def check_fits(config: Config, dataset: Dataset, device: Device) -> None:
    """Raise AttnlmError if the data are too short for the context, or the memory is too small."""
    check_context(config, dataset)
    check_memory(config, dataset.vocab_size, device)


def check_context(config: Config, dataset: Dataset, *, is_fixed: bool = False) -> None:
    """Raise AttnlmError if the data are too short for the context, or it ends before all answers.

    Set `is_fixed` if the weights of another run fix the context.
    """
    length = config.spec.block_size
    check_splits(dataset, length, is_fixed=is_fixed)
    examples = {"training": dataset.train_examples, "validation": dataset.val_examples}
    for name, split in examples.items():
        if split and config.training.loss_on != "all" and not split.has_answers(length):
            raise AttnlmError(
                f"`block_size` {length} ends before every answer of the {name} split",
                "shorten the questions, or start from a run that has a larger `block_size`"
                if is_fixed
                else f"use `block_size` {split.longest - 1}",
            )


def _choose_form(config: Config, device: Device, dataset: Dataset) -> str:
    """Return `compile`, or what auto chooses. Raises AttnlmError if the form is missing."""
    if config.training.compile != "auto":
        if missing := missing_form(config, device, dataset.vocab_size):
            raise missing
        return config.training.compile
    if device.name == "cuda" and _is_long(config, dataset) and _can_compile_for_gpu():
        return "torch"
    native = config.with_training(compile="native")
    is_faster = is_native_faster(config.spec, dataset.vocab_size, config.tokens_per_step)
    if is_faster and not missing_form(native, device, dataset.vocab_size):
        return "native"
    return "modules"


def missing_form(config: Config, device: Device, vocab_size: int) -> AttnlmError | None:
    """Return why the form `compile` of the model is missing here; None if it is not."""
    form = config.training.compile
    hint = "use `compile` modules"
    if form == "torch" and device.name == "cpu" and not has_compiler():
        return AttnlmError(
            "`compile` torch needs a C++ compiler, but none was found",
            f"install g++ or clang++, or {hint}",
        )
    if form != "native":
        return None
    has_form = has_native_form(config.spec, vocab_size, config.tokens_per_step)
    if (device.name, device.dtype) != ("cpu", "float32") or not has_form:
        return UsageError(
            "`compile` native needs float32 on a CPU, and a model of one layer with small heads, "
            "or of softmax attention with a projection and residual connections",
            hint,
        )
    if native_library() is None:
        return AttnlmError(
            "`compile` native needs attnlm's kernels in C, which are missing or switched off",
            f"{hint}, or run attnlm doctor, which says why",
        )
    return None


def has_compiler(*commands: str) -> bool:
    """Return True if one of the commands exists. By default, look for C++ compilers."""
    return any(map(shutil.which, commands or (os.environ.get("CXX", "g++"), "clang++", "c++")))


def _can_compile_for_gpu() -> bool:
    has_triton = importlib.util.find_spec("triton") is not None
    return has_triton and has_compiler(os.environ.get("CC", "gcc"), "clang", "cc")


def _is_long(config: Config, dataset: Dataset) -> bool:
    """Return True if compilation for a GPU, which takes 10 to 20 seconds, pays off."""
    training = config.training
    if training.steps is None and training.budget is not None:
        return training.budget >= _LONG_BUDGET
    return _step_flops(config, dataset) * training.max_steps > _LONG


def _step_flops(config: Config, dataset: Dataset) -> float:
    """Return the approximate number of floating-point operations of a step."""
    return 6.0 * parameter_count(config.spec, dataset.vocab_size) * config.tokens_per_step


def time_step(
    config: Config, device: Device, dataset: Dataset, least: float
) -> tuple[float, int | None]:
    """Return the seconds of a step of a complete configuration, and the micro-batch that fits.

    The first steps, which are slower, do not count. The mean is of as many steps as take `least`
    seconds, and of one at least. Raises StepNotFiniteError.
    """
    config = config.with_training(steps=2**30, budget=None)
    with keeping_random_state(device):
        use_precision(device)
        stepper = Stepper(initial_state(config, dataset.vocab_size, device), config, dataset)
        for _ in range(FIRST_CALLS if device.name == "cuda" else 1):
            stepper.step().item()
        began = time.perf_counter()
        count, seconds = 0, 0.0
        while seconds < max(least, 1e-9):
            stepper.step().item()
            count, seconds = count + 1, time.perf_counter() - began
        return seconds / count, stepper.config.training.micro_batch_size


def random_dataset(vocab_size: int, block_size: int, tokenizer: str | None = None) -> Dataset:
    """Return random tokens, with what a training needs to know of a data set."""
    length = _WINDOWS * block_size + 1
    ids: Any = np.random.default_rng(0).integers(vocab_size, size=length)
    made_up = SimpleNamespace(
        name="a vocabulary",
        vocab_size=vocab_size,
        tokenizer=SimpleNamespace(name=tokenizer),
        train=ids.astype(id_dtype(vocab_size)),
        val_tokens=length,
        largest_block_size=length - 1,
        examples=None,
        train_examples=None,
        val_examples=None,
    )
    return cast(Dataset, made_up)


# --- The size of the model, within a budget ------------------------------------------------------

# Measured on several texts and budgets: docs/speed.md has the figures.
_TOKENS_PER_WEIGHT = 1.5
"""The fewest tokens per weight that a model should see. With fewer tokens, a model learns no more
than a model of the next smaller size does."""
_DROPOUT = ((6.0, 0.0), (12.0, 0.1), (math.inf, 0.2))
"""Pairs (most epochs, dropout). A run gets the dropout of the first pair that allows its epochs."""
_MOST_EPOCHS = 40.0
"""After this many epochs, models only overfit."""
_TRIAL_SHARE = 0.03
"""The fraction of the budget for the trials of all sizes together."""


def affordable_size(request: Request, dataset: Dataset, began: float, on_event: OnEvent) -> Config:
    """Return the configuration of a recipe's largest size that sees enough tokens in the budget.

    The sizes are timed briefly in ascending order, up to the first that is too large for the data,
    the memory or the budget, which counts from `began`. Raises AttnlmError if the first size is too
    large for the data or the memory.
    """
    on_event(Note("measuring how large a model fits into the budget"))
    first, settings, sizes = request
    budget = first.training.budget or 0.0
    ends = budget_end(budget, began)
    chosen, epochs = None, 0.0
    for size in sizes:
        config = resolve(settings, size)
        try:
            seconds = seconds_per_token(config, dataset, _TRIAL_SHARE * budget / len(sizes))
        except (AttnlmError, torch.OutOfMemoryError):
            if chosen is None:
                raise
            break
        fitting = (ends - time.perf_counter()) / seconds / dataset.train_tokens
        seen = min(fitting, _MOST_EPOCHS) * dataset.train_tokens
        weights = config.spec.costs(dataset.vocab_size).multiplied_weights
        if chosen is not None and seen < _TOKENS_PER_WEIGHT * weights:
            break
        chosen, epochs = size, fitting
    dropout = next(share for most, share in _DROPOUT if epochs <= most)
    config = resolve(settings, chosen)
    if "dropout" in config.spec.settings():  # a recipe's own dropout overrides this rule
        config = resolve(settings, {"dropout": dropout, **(chosen or {})})
    costs = config.spec.costs(vocab_size=0)
    on_event(
        Note(
            f"{costs.layers} × {costs.width}, context {config.spec.block_size}, dropout "
            f"{config.spec.settings().get('dropout', 0.0):g}: "
            f"about {min(epochs, _MOST_EPOCHS):.2g} epochs"
        )
    )
    if 2 * epochs > _MOST_EPOCHS:  # the machine may become faster
        steps = math.ceil(_MOST_EPOCHS * dataset.train_tokens / config.tokens_per_step)
        config = config.with_training(steps=steps)
    return config


def seconds_per_token(config: Config, dataset: Dataset, least: float) -> float:
    """Return the seconds per token of training with a configuration that is not complete."""
    device = choose_training_device(config, dataset)
    if device.name == "cuda" and config.training.compile == "auto":
        config = config.with_training(compile="modules")  # to compile every size would take minutes
    with torch_settings_restored():
        seconds, _ = time_step(autotune(config, device, dataset), device, dataset, least)
        return seconds / config.tokens_per_step
