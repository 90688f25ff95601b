"""The settings of a training run, with the help of their command-line options."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from attnlm.base.formatting import duration
from attnlm.base.setting_fields import setting

LARGEST_BATCH = 2**20  # windows
_MOST_STEPS = 2**40


def _count_field(help: str, *, default: int | None = None, at_most: int = _MOST_STEPS) -> Any:
    """Return a dataclass field for a setting that counts something, from 1 on."""
    return setting(help, default=default, at_least=1, at_most=at_most)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Settings of a training run. For None, the run chooses a value at its start and records it."""

    sampling: str = setting(
        "order of the windows: epoch shuffles them and uses each once per epoch; random draws them "
        "at random",
        default="epoch",
        choices=("epoch", "random"),
    )
    stride: int | None = _count_field(
        "tokens between the starts of two windows with `sampling` epoch; default: `block_size`"
    )
    steps: int | None = _count_field("number of updates of the weights")
    budget: float | None = setting(
        "seconds for the whole command or call, instead of `steps`: learning rate and evaluations "
        "follow the clock; default: no limit",
        above=0,
        at_most=10**8,
    )
    batch_size: int = _count_field(
        "windows of `block_size` tokens per step", default=32, at_most=LARGEST_BATCH
    )
    micro_batch_size: int | None = _count_field(
        "maximum number of windows to compute at once; gradients are accumulated over the batch; "
        "default: as many as fit into memory",
        at_most=LARGEST_BATCH,
    )
    learning_rate: float = setting(
        "peak learning rate",
        default=0.01,
        at_least=1e-30,
        at_most=100,
    )
    optimizer: str = setting(
        "adamw for all parameters, or muon for the matrices of the blocks and adamw for all others",
        default="adamw",
        choices=("adamw", "muon"),
    )
    beta1: float = setting(
        "AdamW's β1 and Muon's momentum: decay of the mean gradient",
        default=0.9,
        at_least=0,
        below=1,
    )
    beta2: float = setting(
        "AdamW's β2: decay of the mean squared gradient", default=0.999, at_least=0, below=1
    )
    schedule: str = setting(
        "learning rate after the warm-up: constant, or falling linearly or as a cosine",
        default="linear",
        choices=("constant", "linear", "cosine"),
    )
    min_learning_rate: float = setting(
        "learning rate at the end of a linear or cosine schedule",
        default=0.0,
        at_least=0,
        at_most=100,
    )
    cooldown: float = setting(
        "final fraction of the steps, during which the learning rate falls",
        default=1.0,
        at_least=1e-12,
        at_most=1,
    )
    warmup: int = setting(
        "first steps, during which the learning rate rises",
        default=0,
        at_least=0,
        at_most=_MOST_STEPS,
    )
    weight_decay: float = setting(
        "decoupled weight decay: at each step, weights shrink by this times the learning rate",
        default=0.0,
        at_least=0,
        at_most=1000,
    )
    weight_decay_on: str = setting(
        "parameters with weight decay", default="matrices", choices=("matrices", "all")
    )
    loss: str | None = setting(
        "your own training loss, FILE.py:NAME: a function of logits, ids and targets; "
        "default: the mean cross-entropy"
    )
    loss_on: str | None = setting(
        "tokens whose loss counts: those of the answers, or all; default: the answers if the data "
        "set has examples with answers, else all",
        choices=("answers", "all"),
    )
    examples_per_window: int | None = _count_field(
        "most examples in a window, for questions with answers; default: as many as fit"
    )
    gradient_clip: float | None = setting(
        "maximum norm of the gradient; default: no clipping", above=0, at_most=1e38
    )
    eval_every: int | None = _count_field(
        "steps between two evaluations; default: a tenth of the steps"
    )
    eval_tokens: int | None = _count_field(
        "validation tokens per evaluation during training, spread evenly over the split; default: "
        "all, or fewer if all would take too long"
    )
    keep_every: int | None = _count_field(
        "steps between weights that are kept, each in a file of its own that commands take as the "
        "checkpoint of this step; default: keep only the best and the last weights"
    )
    best_by: str | None = setting(
        "what makes an evaluation the best: the lowest loss, or the highest accuracy of whole "
        "answers; default: loss",
        choices=("loss", "accuracy"),
    )
    patience: int | None = _count_field(
        "stop after this many evaluations without improvement; default: do not stop early"
    )
    seed: int | None = setting(
        "random seed of weights, batches and dropout; default: a random one",
        at_least=0,
        at_most=2**63 - 1,
    )
    device: str = setting(
        "where to compute", default="auto", choices=("auto", "cpu", "cuda", "mps")
    )
    dtype: str = setting(
        "precision of matrix products",
        default="auto",
        choices=("auto", "float32", "tf32", "bfloat16"),
    )
    compile: str = setting(
        "what computes the training: the modules of the model, native (its blocks, or a model of "
        "one layer, in C; on a CPU), or torch (torch.compile); auto: native if it is faster, torch "
        "for long runs on a GPU, else modules",
        default="auto",
        choices=("auto", "modules", "native", "torch"),
    )
    threads: int | None = _count_field(
        "CPU threads; default: one for a small step, else all", at_most=1024
    )
    processes: int = _count_field(
        "number of processes; each computes an equal part of each batch", default=1, at_most=2**16
    )

    @property
    def length_text(self) -> str:
        """Return the number of steps (`800`), or the budget of an unfinished run (`2 min`)."""
        if self.steps is None and self.budget is not None:
            return duration(self.budget)
        return f"{self.max_steps:,}"

    @property
    def max_steps(self) -> float:
        """Return the number of steps, or infinity if a budget alone ends the run."""
        return math.inf if self.steps is None else self.steps
