"""The settings of a training run. Each field's line of help is also the help of its option."""

from __future__ import annotations

from dataclasses import dataclass

from attnlm.base.readable import duration
from attnlm.base.settings import setting
from attnlm.model.sizes import LoRA

LARGEST_BATCH = 2**20  # windows
_MOST_STEPS = 2**40


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Settings of a training run. For None, the run chooses a value at its start and records it."""

    sampling: str = setting(
        "windows: a shuffled pass each epoch, or drawn at random",
        default="epoch",
        choices=("epoch", "random"),
    )
    stride: int | None = setting(
        "tokens from one window's start to the next (epoch); default: block_size",
        at_least=1,
        at_most=_MOST_STEPS,
    )
    steps: int | None = setting("number of updates", at_least=1, at_most=_MOST_STEPS)
    budget: float | None = setting(
        "seconds to train for, in place of steps: learning rate and evaluations follow the clock",
        above=0,
        at_most=10**8,
    )
    batch_size: int = setting("windows per step", default=32, at_least=1, at_most=LARGEST_BATCH)
    micro_batch_size: int | None = setting(
        "most windows to compute at once; their gradients are accumulated; default: as many as fit "
        "into memory",
        at_least=1,
        at_most=LARGEST_BATCH,
    )
    learning_rate: float = setting(
        "highest learning rate, whose default depends on the model and the optimizer",
        default=0.01,
        above=0,
        at_most=100,
    )
    optimizer: str = setting(
        "adamw, or muon for matrices inside the model and adamw for the rest",
        default="adamw",
        choices=("adamw", "muon"),
    )
    beta1: float = setting(
        "decay of the mean gradient: AdamW's β1, Muon's momentum", default=0.9, at_least=0, below=1
    )
    beta2: float = setting(
        "AdamW's β2: decay of the mean squared gradient", default=0.999, at_least=0, below=1
    )
    schedule: str = setting(
        "learning rate after the warm-up: constant, or falling linearly or along a cosine",
        default="linear",
        choices=("constant", "linear", "cosine"),
    )
    min_learning_rate: float = setting(
        "lowest learning rate, at the end of a linear or cosine schedule",
        default=0.0,
        at_least=0,
        at_most=100,
    )
    cooldown: float = setting(
        "final fraction of the steps, in which the learning rate decays",
        default=1.0,
        above=0,
        at_most=1,
    )
    warmup: int = setting(
        "steps of learning rate warm-up", default=0, at_least=0, at_most=_MOST_STEPS
    )
    weight_decay: float = setting(
        "decoupled weight decay, per unit of learning rate", default=0.0, at_least=0, at_most=1000
    )
    weight_decay_on: str = setting(
        "which parameters decay", default="matrices", choices=("matrices", "all")
    )
    gradient_clip: float | None = setting(
        "maximum norm of the whole gradient; default: no clipping", above=0, at_most=1e38
    )
    eval_every: int | None = setting(
        "steps from one evaluation to the next; default: a tenth of the steps",
        at_least=1,
        at_most=_MOST_STEPS,
    )
    eval_tokens: int | None = setting(
        "tokens of the validation split that evaluations take while training, spread evenly over "
        "it; default: all, or where these cost too much, as many as are affordable",
        at_least=1,
        at_most=_MOST_STEPS,
    )
    patience: int | None = setting(
        "stop after this many evaluations without improvement", at_least=1, at_most=_MOST_STEPS
    )
    seed: int | None = setting(
        "random seed of weights, batches and dropout; default: drawn", at_least=0, at_most=2**63 - 1
    )
    device: str = setting(
        "where to compute", default="auto", choices=("auto", "cpu", "cuda", "mps")
    )
    dtype: str = setting(
        "precision of the products",
        default="auto",
        choices=("auto", "float32", "tf32", "bfloat16"),
    )
    compile: str = setting(
        "on: torch.compile; parts: operations in C, on a CPU; auto: parts where possible, "
        "on for long training runs on a GPU",
        default="auto",
        choices=("auto", "parts", "on", "off"),
    )
    matmul: str = setting(
        "library for large matmuls on a CPU; auto measures which is faster",
        default="auto",
        choices=("auto", "blas", "onednn"),
    )
    attention_kernel: str = setting(
        "causal attention on a CPU, by PyTorch or, with compile parts, in C (native); auto "
        "measures which is faster",
        default="auto",
        choices=("auto", "torch", "native"),
    )
    threads: int | None = setting(
        "CPU threads; default: what a short trial finds fastest", at_least=1, at_most=1024
    )
    processes: int = setting(
        "processes that divide each batch among them", default=1, at_least=1, at_most=2**16
    )
    shard: bool = setting(
        "divide weights and the optimizer's state among the processes too", default=False
    )
    recompute: bool = setting(
        "recompute activations in the backward pass: less memory, more time", default=False
    )
    lora: int | None = setting(
        "train low-rank adapters of this rank, and nothing else", at_least=1, at_most=2**12
    )
    lora_alpha: float | None = setting(
        "adapters are scaled by alpha / rank; default: twice the rank",
        above=0,
        at_most=2**20,
    )
    lora_on: str | None = setting(
        "maps that have adapters, separated by commas: query, key, value, projection, gate, up, "
        "down, or all; default: query,value, or without attention up,down"
    )

    @property
    def length(self) -> str:
        """Return the number of steps, as `800`, or `2 min` for an unfinished run with a budget."""
        if self.steps is None:
            return "?" if self.budget is None else duration(self.budget)
        return f"{self.steps:,}"

    @property
    def is_sharded(self) -> bool:
        """Return True if each process holds only some rows of the weights."""
        return self.shard and self.processes > 1

    @property
    def adapters(self) -> LoRA | None:
        """Return the low-rank adapters to train. None means that all weights are trained."""
        if self.lora is None:
            return None
        assert self.lora_alpha is not None and self.lora_on is not None
        return LoRA(self.lora, self.lora_alpha, tuple(self.lora_on.split(",")))
