"""What a training costs: memory, operations and time, and how they grow."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from attnlm.base.errors import UsageError
from attnlm.config.settings import Config
from attnlm.config.training import TrainingConfig
from attnlm.model.architecture import Architecture, settings_of
from attnlm.model.inspection import count_parameters, model_skeleton
from attnlm.model.sizes import block_shapes, forward_flops, training_flops
from attnlm.training.memory import MemoryEstimate, estimate_memory

TOKENS_PER_PARAMETER = 20
"""About as many as make the best of a number of operations (Hoffmann et al., 2022)."""
_PF_DAY = 86_400 * 10**15


@dataclass(frozen=True)
class Plan:
    """What a configuration costs on a device, in so many processes."""

    config: Config
    vocab_size: int
    val_tokens: int
    device: str
    budget: int | None
    """Tokens to train on; None for so many per parameter."""
    step_seconds: float
    peak: float | None = None
    """FLOP/s that each process' device is said to reach; None where steps were measured."""
    share: float | None = None
    """How much of it the model's operations are said to use."""

    @functools.cached_property
    def parameters(self) -> int:
        return count_parameters(model_skeleton(self.config.model, self.vocab_size))

    @property
    def parameters_without_embeddings(self) -> int:
        """Without those of tokens and positions."""
        named = model_skeleton(self.config.model, self.vocab_size).named_parameters()
        return sum(p.numel() for name, p in named if "_embedding." not in name)

    @functools.cached_property
    def memory(self) -> MemoryEstimate:
        """Of each process."""
        return estimate_memory(
            self.config, self.vocab_size, self.parameters, self.val_tokens, self.device
        )

    @property
    def forward_flops(self) -> int:
        """Of one token."""
        return forward_flops(self.config.model, self.vocab_size)

    @property
    def training_flops(self) -> int:
        """Of one token, forward and backward."""
        return training_flops(self.config.model, self.vocab_size, self.config.training.adapters)

    @property
    def update_flops(self) -> int:
        """Of the optimizer in each step: Muon's products; AdamW has none."""
        model = self.config.model
        if self.config.training.optimizer != "muon":
            return 0
        return model.layers * sum(_muon_flops(*shape) for shape in block_shapes(model))

    @property
    def tokens_per_step(self) -> int:
        """Of all processes together."""
        return self.config.tokens_per_step

    @property
    def step_flops(self) -> int:
        """Of one process in one step; each makes the whole update, or its part where sharded."""
        training = self.config.training
        shared = self.training_flops * self.tokens_per_step // training.processes
        return shared + self.update_flops // (training.processes if training.is_sharded else 1)

    @property
    def flops_per_second(self) -> float:
        """Of each process."""
        return self.step_flops / self.step_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.step_seconds

    @property
    def tokens(self) -> int:
        return self.budget or TOKENS_PER_PARAMETER * self.parameters

    @property
    def steps(self) -> int:
        return math.ceil(self.tokens / self.tokens_per_step)

    @property
    def seconds(self) -> float:
        """Of the steps alone."""
        return self.steps * self.step_seconds

    @property
    def flops(self) -> int:
        """Of the model, which is what compute is compared by."""
        return self.steps * self.tokens_per_step * self.training_flops

    @property
    def pf_days(self) -> float:
        """In days of 10¹⁵ FLOP/s."""
        return self.flops / _PF_DAY

    @property
    def device_hours(self) -> float:
        return self.seconds * self.config.training.processes / 3600

    def grown(self) -> Iterator[tuple[str, Plan]]:
        """The same with one size doubled, in which products are as fast."""
        for name, config in _doubled(self.config):
            grown = replace(self, config=config)
            yield name, replace(grown, step_seconds=self.step_seconds * _times(grown, self))

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "settings": self.config.settings(),
            "vocab_size": self.vocab_size,
            "device": self.device,
            **self._figures(),
            "parameters_without_embeddings": self.parameters_without_embeddings,
            "forward_flops_per_token": self.forward_flops,
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
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "flops_per_second": self.flops_per_second,
            "tokens": self.tokens,
            "steps": self.steps,
            "seconds": self.seconds,
            "flops": self.flops,
            "pf_days": self.pf_days,
            "device_hours": self.device_hours,
        }


def _doubled(config: Config) -> Iterator[tuple[str, Config]]:
    a, training = config.model, config.training
    for name, change in (
        ("width × 2", _wider),
        ("depth × 2", _deeper),
        ("context × 2", lambda a: {"block_size": 2 * a.block_size}),
    ):
        try:
            changed = change(a)
            if changed:
                yield name, replace(config, model=replace(a, **changed))
        except UsageError:  # larger than anything is meant to be
            continue
    name, twice = "processes × 2", 2 * training.processes
    doubled: TrainingConfig = replace(training, processes=twice)
    if training.batch_size % twice:
        name, doubled = f"{name}, batch × 2", replace(doubled, batch_size=2 * training.batch_size)
    yield name, replace(config, training=doubled)


def _wider(a: Architecture) -> dict[str, Any]:
    """Twice as many heads of their size, or twice as large a head where there is one."""
    if a.embed_dim is None:
        return {}
    names = ["embed_dim", "mlp_width"]
    names += ["heads", "kv_heads"] if a.heads > 1 and not a.wide_heads else ["head_size"]
    sizes = {name: getattr(a, name) for name in names}
    return {name: 2 * size for name, size in sizes.items() if size is not None}


def _deeper(a: Architecture) -> dict[str, Any]:
    return {"layers": 2 * a.layers} if "layers" in settings_of(a.model) else {}


def _muon_flops(rows: int, columns: int) -> int:
    """Of one matrix: x xᵀ, its square and a product with x, in each of five iterations."""
    small, large = min(rows, columns), max(rows, columns)
    return 5 * (4 * small * small * large + 2 * small**3)


def _times(grown: Plan, base: Plan) -> float:
    """How many times as long a step takes, by its products; without any, by its tokens."""
    sizes = [
        plan.step_flops or plan.tokens_per_step // plan.config.training.processes
        for plan in (grown, base)
    ]
    return sizes[0] / sizes[1]
