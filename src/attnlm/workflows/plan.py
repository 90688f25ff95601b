"""The memory, operations and time that a training run will need, and larger runs would need."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from attnlm.base.errors import UsageError
from attnlm.base.events import Note, OnEvent, ignore
from attnlm.base.setting_fields import quoted
from attnlm.compute.device import choose_device
from attnlm.compute.processes import Processes, join_processes
from attnlm.compute.threads import torch_settings_restored
from attnlm.config.new_run import resolve_typed
from attnlm.config.recipes import load_recipe
from attnlm.config.settings import Config
from attnlm.config.training import TrainingConfig
from attnlm.data.dataset import Dataset, id_dtype, open_dataset
from attnlm.model.architecture import require_architecture
from attnlm.model.costs import Costs
from attnlm.model.presets import PRESETS
from attnlm.model.spec import Use
from attnlm.runs.load_model import check_tokenizer
from attnlm.runs.run import Run, open_run
from attnlm.training.cuda_graph import FIRST_CALLS
from attnlm.training.memory import MemoryEstimate, estimate_memory
from attnlm.training.state import keeping_random_state
from attnlm.workflows.autotune import autotune, make_trial_stepper
from attnlm.workflows.job import check_launched

TOKENS_PER_PARAMETER = 20
"""The compute-optimal number of tokens per parameter (Hoffmann et al., 2022)."""
USUAL_SHARE = 0.4
"""The fraction of a GPU's peak that large training runs reached, 0.38 to 0.46 (Chowdhery et al.,
2022; Grattafiori et al., 2024)."""
_PF_DAY = 86_400 * 10**15

# Warm-up steps and timed steps of a measurement. More steps are timed if the timed steps take less
# than a second together, fewer if they take more than a minute.
_FIRST = 2
_STEPS = 10
_SHORTEST = 1.0
_LONGEST = 60.0
# Sizes of random data in place of a data set: enough tokens for every evaluation.
_VAL_TOKENS = 2**20
_MADE_UP_WINDOWS = 64
_LIMITS = {"vocab_size": (1, 2**32), "tokens": (1, 10**18), "peak": (1e6, 1e21), "share": (1e-6, 1)}
_FIGURES = (
    "step_seconds", "tokens_per_second", "flops_per_second", "tokens", "steps", "seconds",
    "flops", "pf_days", "device_hours",
)  # fmt: skip


@dataclass(frozen=True)
class StepCosts:
    """The operations of a training step, which do not depend on the machine."""

    config: Config
    vocab_size: int

    @functools.cached_property
    def costs(self) -> Costs:
        """Return the costs of one token."""
        return self.config.spec.costs(self.vocab_size)

    @property
    def training_flops(self) -> int:
        """Return the operations of the forward and backward passes for one token."""
        return self.costs.training_flops

    @property
    def update_flops(self) -> int:
        """Return the operations of the optimizer in a step: Muon's matmuls; AdamW has none."""
        if self.config.training.optimizer != "muon":
            return 0
        flops = 0
        for shape in self.costs.matrices.values():
            small, large = sorted(shape)
            flops += 5 * (4 * small * small * large + 2 * small**3)  # 5 times 3 matmuls
        return self.costs.layers * flops

    @property
    def step_flops(self) -> int:
        """Return the operations of one process in a step: each computes the whole update."""
        processes = self.config.training.processes
        return self.training_flops * self.config.tokens_per_step // processes + self.update_flops

    @property
    def work(self) -> int:
        """Return the operations of one process in a step; without matmuls, its tokens."""
        return self.step_flops or self.config.tokens_per_step // self.config.training.processes


@dataclass(frozen=True)
class Plan(StepCosts):
    """Costs of training a configuration on a device."""

    val_tokens: int
    device: str
    budget: int | None
    """The number of tokens to train on; None for 20 per parameter."""
    pace: float
    """The FLOP/s of one process, or its tokens per second for a model without matmuls."""
    peak: float | None = None
    """The FLOP/s of each process's device; None if steps were measured."""
    share: float | None = None
    """The fraction of `peak` that training is assumed to reach."""

    @functools.cached_property
    def parameters(self) -> int:
        return sum(self._sizes.values())

    @property
    def parameters_without_embeddings(self) -> int:
        """Return the number of parameters except the embeddings of tokens and positions."""
        return sum(size for name, size in self._sizes.items() if "_embedding." not in name)

    @functools.cached_property
    def _sizes(self) -> dict[str, int]:
        shapes = self.config.spec.parameter_shapes(self.vocab_size)
        return {name: math.prod(shape) for name, shape in shapes.items()}

    @functools.cached_property
    def memory(self) -> MemoryEstimate:
        """Return the estimated memory of one process."""
        return estimate_memory(
            self.config, self.vocab_size, self.parameters, self.val_tokens, self.device
        )

    @property
    def step_seconds(self) -> float:
        return self.work / self.pace

    @property
    def flops_per_second(self) -> float:
        """Return the FLOP/s of one process."""
        return self.step_flops / self.step_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.config.tokens_per_step / self.step_seconds

    @property
    def tokens(self) -> int:
        return self.budget or TOKENS_PER_PARAMETER * self.parameters

    @property
    def steps(self) -> int:
        return math.ceil(self.tokens / self.config.tokens_per_step)

    @property
    def seconds(self) -> float:
        """Return the seconds of all steps, without evaluations and checkpoints."""
        return self.steps * self.step_seconds

    @property
    def flops(self) -> int:
        """Return the operations of the model in all steps, without the optimizer's."""
        return self.steps * self.config.tokens_per_step * self.training_flops

    @property
    def pf_days(self) -> float:
        """Return `flops` in PF-days (one PF-day is a day at 10¹⁵ FLOP/s)."""
        return self.flops / _PF_DAY

    @property
    def device_hours(self) -> float:
        return self.seconds * self.config.training.processes / 3600

    def grown(self) -> Iterator[tuple[str, Plan]]:
        """Yield (name, plan) for each size in turn: the plan with this size doubled.

        Each process is assumed to reach the same FLOP/s as with the size not doubled.
        """
        config = self.config
        if config.spec.reason_against(Use.GROWTH) is not None:
            return
        a = require_architecture(config.spec, Use.GROWTH)
        training = config.training
        # Twice as wide: twice the heads, or a single head of twice the size.
        heads = ("heads", "kv_heads") if a.heads > 1 and not a.wide_heads else ("head_size",)
        sizes = {"width × 2": ("embed_dim", "mlp_width", *heads) if a.embed_dim else ()}
        sizes["depth × 2"] = ("layers",) if "layers" in PRESETS[a.model].settings else ()
        sizes["context × 2"] = ("block_size",)
        for name, names in sizes.items():
            values = {size: getattr(a, size) for size in names}
            changed = {size: 2 * value for size, value in values.items() if value is not None}
            with contextlib.suppress(UsageError):  # larger than the limits of a setting
                if changed:
                    yield name, replace(self, config=replace(config, spec=replace(a, **changed)))
        twice = 2 * training.processes
        more = {"batch_size": 2 * training.batch_size} if training.batch_size % twice else {}
        name = "processes × 2" + (", batch × 2" if more else "")
        yield name, replace(self, config=config.with_training(processes=twice, **more))

    def facts(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return {
            "settings": self.config.settings(),
            "vocab_size": self.vocab_size,
            "device": self.device,
            **self._figures(),
            "parameters_without_embeddings": self.parameters_without_embeddings,
            "forward_flops_per_token": self.costs.forward_flops,
            "update_flops_per_step": self.update_flops,
            "memory_by_part": asdict(self.memory),
            "peak": self.peak,
            "share": self.share,
            "growth": {name: grown._figures() for name, grown in self.grown()},
        }

    def _figures(self) -> dict[str, Any]:
        return {
            "parameters": self.parameters,
            "training_flops_per_token": self.training_flops,
            "memory": self.memory.total,
            **{name: getattr(self, name) for name in _FIGURES},
        }


def plan(
    dataset: str | Path | Dataset | None = None,
    *,
    recipe: str | Path | Mapping[str, Any] | None = None,
    vocab_size: int | None = None,
    tokens: int | None = None,
    peak: float | None = None,
    share: float | None = None,
    start_from: str | Path | Run | None = None,
    checkpoint_dir: str | Path = "checkpoints",
    data_dir: str | Path = "data",
    on_event: OnEvent | None = None,
    **settings: Any,
) -> Plan:
    """Return the costs of the training that `train` would do with the same arguments.

    If `vocab_size` is given, random tokens replace the data set. If `peak` is None, all processes
    that were started measure the time of a step over ten steps on this machine. If `peak` is given,
    nothing is measured: each process is assumed to reach the fraction `share` of `peak` FLOP/s.
    `tokens` is the number of tokens to train on. By default, it follows from `steps` if
    `steps` is given; else it is 20 per parameter. If `start_from` is given, the model is that
    run's, whose weights are not read.

    Raises AttnlmError for the same reasons as `train`.
    """
    if dataset is not None and vocab_size is not None:
        raise UsageError("a data set and `vocab_size` cannot be combined", "use only one")
    if tokens is not None and "steps" in settings:
        raise UsageError("`tokens` and `steps` cannot be combined", "use only one")
    if share is not None and peak is None:
        raise UsageError("`share` needs a `peak`", "set `peak` in FLOP/s, such as 989e12")
    limited = {"vocab_size": vocab_size, "tokens": tokens, "peak": peak, "share": share}
    for name, value in limited.items():
        least, most = _LIMITS[name]
        if value is not None and not least <= value <= most:
            raise UsageError(
                f"invalid value for `{name}`: {quoted(value)}",
                f"it must be between {least:g} and {most:g}",
            )
    with join_processes() as processes:
        if processes.count > 1:
            settings = {"processes": processes.count, **settings}
        parent = None
        if start_from is not None:
            parent = open_run(start_from, checkpoint_dir=checkpoint_dir)
        known = {} if recipe is None else load_recipe(recipe)
        config = resolve_typed(settings, known, parent)
        opened = _open_data(dataset, vocab_size, config, parent, data_dir)
        if tokens is None and "steps" in settings:
            tokens = int(config.training.max_steps) * config.tokens_per_step
        if peak is None:
            check_launched(config.training, processes)
            config, seconds = _measure_step(config, opened, processes, on_event or ignore)
            return Plan(
                config,
                opened.vocab_size,
                val_tokens=opened.val_tokens,
                device=config.training.device,
                budget=tokens,
                pace=StepCosts(config, opened.vocab_size).work / seconds,
            )
    device = config.training.device
    share = USUAL_SHARE if share is None else share
    stated = Plan(
        config,
        opened.vocab_size,
        val_tokens=opened.val_tokens,
        device=choose_device().name if device == "auto" else device,
        budget=tokens,
        pace=peak * share,
        peak=peak,
        share=share,
    )
    if not stated.step_flops:
        raise UsageError(
            f"{config.spec.name} has no matmuls, so `peak` does not determine its time",
            "leave `peak` out, to measure steps instead",
        )
    return stated


def _open_data(
    dataset: str | Path | Dataset | None,
    vocab_size: int | None,
    config: Config,
    parent: Run | None,
    data_dir: str | Path,
) -> Dataset:
    if vocab_size is not None:
        length = _MADE_UP_WINDOWS * config.spec.block_size + 1
        ids: Any = np.random.default_rng(0).integers(vocab_size, size=length)
        sizes = {"vocab_size": vocab_size, "val_tokens": _VAL_TOKENS}
        examples = {"train_examples": None, "val_examples": None}
        made_up = SimpleNamespace(train=ids.astype(id_dtype(vocab_size)), **examples, **sizes)
        return cast(Dataset, made_up)
    opened = open_dataset(dataset, data_dir=data_dir)
    if parent is not None:
        check_tokenizer(parent, opened)
    return opened


def _measure_step(
    config: Config, data: Dataset, processes: Processes, on_event: OnEvent
) -> tuple[Config, float]:
    """Return the configuration completed by `autotune`, and the mean seconds of a step.

    The mean is of ten steps, or of more steps if ten take less than 1 s, or of fewer if they take
    more than 60 s.
    """
    device = choose_device(config.training.device, config.training.dtype)
    with torch_settings_restored(), keeping_random_state(device):
        if processes.is_main:
            on_event(Note("measuring ten steps"))
            seeded = config.with_training(seed=config.training.seed or 0)
            config = autotune(seeded, device, data)
        training = processes.broadcast_object(asdict(config.training))
        config = replace(config, training=TrainingConfig(**training))
        stepper = make_trial_stepper(config, device, data, processes)
        for _ in range(FIRST_CALLS if device.name == "cuda" else _FIRST):
            began = time.perf_counter()
            stepper.step().item()
            once = time.perf_counter() - began
        count = max(1, min(max(_STEPS, math.ceil(_SHORTEST / once)), int(_LONGEST / once)))
        count = int(processes.broadcast_object(count))
        began = time.perf_counter()
        for _ in range(count):
            loss = stepper.step()
        loss.item()
        return config, (time.perf_counter() - began) / count
