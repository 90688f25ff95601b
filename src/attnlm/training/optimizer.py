"""AdamW, Muon, and the learning rate as a function of the step.

Not torch.optim's: importing that loads PyTorch's compiler, which takes longer than a small run.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnlm.compute.workers import compute_all
from attnlm.config.settings import TrainingConfig
from attnlm.training.schedule import learning_rate_factor

Span = tuple[str, nn.Parameter, slice]

# On a CPU so many numbers are updated together: they stay in its caches, and threads share them.
_MUON_AT_ONCE, _ADAMW_AT_ONCE = 2**17, 2**18
# Numbers that processes exchange beside the gradients.
_ROOM = 8


def lay_side_by_side(model: nn.Module, config: TrainingConfig) -> tuple[Tensor, list[Span]]:
    """One long vector of all parameters, which become views of it, and where each one lies.

    Products round by where in memory they are: what is to give the numbers of a training lies so.
    """
    named = sorted(model.named_parameters(), key=lambda pair: _place(pair[0], pair[1], config))
    flat = torch.cat([p.detach().flatten() for _, p in named])
    spans: list[Span] = []
    end = 0
    for name, parameter in named:
        span = slice(end, end := end + parameter.numel())
        parameter.data = flat[span].view(parameter.shape)
        spans.append((name, parameter, span))
    return flat, spans


class Optimizer:
    """Updates all parameters of a model, which it lays side by side in memory.

    Each kind of parameter is then one long vector, as are its gradients, and takes a handful of
    operations however many parameters there are. The model's own parameters become views of it.

    Muon takes the matrices inside the model; embeddings, head, norms and biases are AdamW's.
    Weight decay falls on matrices (embeddings and head among them) or, as the configuration says,
    on all parameters.
    """

    def __init__(self, model: nn.Module, config: TrainingConfig) -> None:
        self._config = config

        # Parameters of one shape stand together: Muon takes them as one stack.
        def place_of(span: Span) -> _Place:
            return _place(span[0], span[1], config)

        self._values, self._spans = flat, spans = lay_side_by_side(model, config)
        self._exchanged = flat.new_zeros(len(flat) + _ROOM)
        self.gradient = self._exchanged[:-_ROOM]
        self._mean = torch.zeros_like(flat)
        by_adamw = sum(span[1].numel() for span in spans if not place_of(span).by_muon)
        self._square = torch.zeros_like(flat[:by_adamw])
        self._groups: list[_AdamW | _Muon] = []
        end = 0
        for place, group in groupby(spans, key=place_of):
            begin = end
            for _, parameter, span in group:
                end = span.stop
                parameter.grad = self.gradient[span].view(parameter.shape)
            values, gradient, mean = (v[begin:end] for v in (flat, self.gradient, self._mean))
            decay = config.weight_decay if place.decays else 0.0
            if place.shape is None:
                vectors = [values, gradient, mean, self._square[begin:end]]
                for values, gradient, mean, square in _cut(vectors, _ADAMW_AT_ONCE):
                    self._groups.append(_AdamW(values, gradient, mean, square, decay, config))
            else:
                stacks = [v.view(-1, *place.shape) for v in (values, gradient, mean)]
                for values, gradient, mean in _cut(stacks, _MUON_AT_ONCE // math.prod(place.shape)):
                    self._groups.append(_Muon(values, gradient, mean, decay, config))
        self._turns = functools.cache(self._shared_out)

    def replica(self, model: nn.Module) -> tuple[Any, Tensor]:
        """The model again, on the same weights in memory, and the vector of its own gradients."""
        copied, gradient = copy.deepcopy(model), torch.zeros_like(self._values)
        parameters = dict(copied.named_parameters())
        for name, parameter, span in self._spans:
            parameters[name].data = parameter.data
            parameters[name].grad = gradient[span].view(parameter.shape)
        return copied, gradient

    def exchanged(self) -> tuple[Tensor, Tensor]:
        """What processes add up at each step: the gradients with some more numbers behind them, and
        these alone."""
        return self._exchanged, self._exchanged[-_ROOM:]

    def add_up(self, others: Sequence[Tensor]) -> None:
        """Adds the gradients of replicas, which are set to 0."""
        for gradient in others:
            self.gradient.add_(gradient)
            gradient.zero_()

    def average(self, count: int) -> None:
        """Makes sums of `count` gradients their mean."""
        if count > 1:
            self.gradient.mul_(1 / count)

    def vectors(self) -> list[Tensor]:
        """All that an update changes: weights, and what is remembered of gradients."""
        return [self._values, self._mean, self._square]

    def follow(self, config: TrainingConfig) -> None:
        """Takes the learning rate from that configuration from now on."""
        self._config = config

    def step(self, step: int, pool: ThreadPoolExecutor | None = None, threads: int = 1) -> None:
        """The update after step 0, 1, …, from the gradients, which it then sets to 0.

        `threads` of `pool` and this one share it out, which changes nothing in the result.
        """
        if self._config.gradient_clip is not None:
            norm = self.gradient.norm()
            self.gradient.mul_((self._config.gradient_clip / (norm + 1e-6)).clamp(max=1.0))
        rate = self._config.learning_rate * learning_rate_factor(step, self._config)

        def update(groups: Sequence[_AdamW | _Muon]) -> None:
            for group in groups:
                group.update(rate, step)

        if pool is None or threads == 1:
            update(self._groups)
        else:
            jobs = [functools.partial(update, groups) for groups in self._turns(threads)]
            compute_all(jobs, pool)
        self.gradient.zero_()

    def _shared_out(self, threads: int) -> list[list[_AdamW | _Muon]]:
        """The groups for each thread: the most work first, always to whoever has least."""
        shares: list[list[_AdamW | _Muon]] = [[] for _ in range(threads)]
        work = [0.0] * threads
        for group in sorted(self._groups, key=lambda group: -group.work):
            least = work.index(min(work))
            shares[least].append(group)
            work[least] += group.work
        return [share for share in shares if share]

    def not_finite(self) -> list[str]:
        """Which of gradient (as its running means remember it) and weights are NaN or infinite."""
        remembered = self._mean, self._square
        kinds = {"gradient": remembered, "weights": (self._values,)}
        return [
            kind
            for kind, vectors in kinds.items()
            if not all(bool(vector.isfinite().all()) for vector in vectors)
        ]

    def state(self) -> dict[str, Tensor]:
        """Views of what it remembers from step to step, named `<parameter>/<what>`."""
        views = {}
        for name, parameter, span in self._spans:
            views[f"{name}/mean"] = self._mean[span].view(parameter.shape)
            if span.stop <= len(self._square):
                views[f"{name}/square"] = self._square[span].view(parameter.shape)
        return views

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes back what `state` gave. Raises KeyError when a tensor is missing."""
        for name, view in self.state().items():
            view.copy_(tensors[name])


class _Place(NamedTuple):
    """Which group a parameter belongs to, AdamW's first; groups lie in this order in memory."""

    by_muon: bool
    decays: bool
    shape: tuple[int, int] | None


def _place(name: str, parameter: Tensor, config: TrainingConfig) -> _Place:
    decays = parameter.ndim > 1 or config.weight_decay_on == "all"
    outside = name.split(".")[0] in ("token_embedding", "position_embedding", "head", "table")
    if config.optimizer != "muon" or outside or parameter.ndim < 2:
        return _Place(False, decays, None)
    return _Place(True, decays, (parameter.size(-2), parameter.size(-1)))


def _cut(tensors: Sequence[Tensor], size: int) -> Iterator[Sequence[Tensor]]:
    """Pieces of tensors of one length, each `size` long; whole ones on a GPU."""
    length = len(tensors[0])
    size = length if tensors[0].device.type != "cpu" else max(1, size)
    for begin in range(0, length, max(1, size)):
        yield [tensor[begin : begin + size] for tensor in tensors]


class _AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019)."""

    def __init__(
        self,
        values: Tensor,
        gradient: Tensor,
        mean: Tensor,
        square: Tensor,
        weight_decay: float,
        config: TrainingConfig,
    ) -> None:
        self._vectors = [values], [gradient], [mean], [square]
        self._weight_decay, self._betas = weight_decay, (config.beta1, config.beta2)
        self.work = 100.0 * values.numel()  # about, in products: it waits for memory
        self._made = torch.zeros((), device=values.device)

    def update(self, rate: float, step: int) -> None:
        # What torch.optim.AdamW(fused=True) calls: one pass over the five vectors.
        torch._fused_adamw_(
            *self._vectors,
            [],
            [self._made.fill_(step + 1)],
            lr=rate,
            beta1=self._betas[0],
            beta2=self._betas[1],
            weight_decay=self._weight_decay,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )


class _Muon:
    """Momentum whose matrices are made orthogonal before the update (Jordan et al., 2024).

    Of matrices of one shape, stacked (N, rows, columns). Updates are scaled by
    0.2 √max(rows, columns), which gives them the size of AdamW's, so that both take the same
    learning rate and weight decay (Liu et al., 2025, "Muon is scalable for LLM training").
    """

    def __init__(
        self,
        values: Tensor,
        gradient: Tensor,
        mean: Tensor,
        weight_decay: float,
        config: TrainingConfig,
    ) -> None:
        self._values, self._gradient, self._mean = values, gradient, mean
        self._weight_decay, self._momentum = weight_decay, config.beta1
        self._scale = 0.2 * math.sqrt(max(values.shape[-2:]))
        self.work = 30.0 * values.numel() * min(values.shape[-2:])
        # On a CPU products in bfloat16 are mostly slow.
        half = config.dtype == "bfloat16" and values.is_cuda
        self._dtype = torch.bfloat16 if half else values.dtype

    def update(self, rate: float, step: int) -> None:
        self._mean.lerp_(self._gradient, 1 - self._momentum)
        # Nesterov: one step further along the momentum.
        direction = self._gradient.lerp(self._mean, self._momentum)
        if self._weight_decay:
            self._values.mul_(1 - rate * self._weight_decay)
        self._values.add_(orthogonalize(direction, self._dtype), alpha=-rate * self._scale)


def orthogonalize(matrices_NRC: Tensor, dtype: torch.dtype) -> Tensor:
    """Sets the singular values of N matrices to about 1 by Newton-Schulz iterations, (N, R, C).

    In `dtype`. Coefficients are Jordan's: they trade exactness (values end between 0.7 and 1.2) for
    few steps.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices_NRC.to(dtype)
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return (x.mT if tall else x).to(matrices_NRC.dtype)
