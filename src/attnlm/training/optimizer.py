"""The optimizer of a training: gradients of all parameters, what is remembered of them, updates."""

from __future__ import annotations

import copy
import functools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnlm.compute.threads import compute_all
from attnlm.config.training import TrainingConfig
from attnlm.model.ops import using
from attnlm.training.kernels import kernels_of
from attnlm.training.schedule import learning_rate_factor
from attnlm.training.update_rules import AdamW, Muon, Place, place_of

# On a CPU so many numbers are updated together: they stay in its caches, and threads share them.
_MUON_AT_ONCE, _ADAMW_AT_ONCE = 2**17, 2**18
# Numbers that processes exchange beside the gradients.
_ROOM = 8


class Span(NamedTuple):
    """Where a parameter, or this process' part of it, lies in the vectors of all of them."""

    name: str
    values: Tensor
    place: Place
    part: slice


def placed_spans(
    model: nn.Module, config: TrainingConfig, local: Callable[[Tensor], Tensor]
) -> list[Span]:
    """The parameters that are trained side by side, those of one place together; `local` is what
    is here of one."""
    named = [
        (name, p, place_of(name, p, config))
        for name, p in model.named_parameters()
        if p.requires_grad
    ]
    spans: list[Span] = []
    end = 0
    for name, parameter, place in sorted(named, key=lambda found: found[2]):
        values = local(parameter.data)
        spans.append(Span(name, values, place, slice(end, end := end + values.numel())))
    return spans


def lay_side_by_side(model: nn.Module, config: TrainingConfig) -> tuple[Tensor, list[Span]]:
    """One long vector of all parameters, which become views of it, and where each one lies.

    Products round by where in memory they are: what is to give the numbers of a training lies so.
    """
    spans = placed_spans(model, config, lambda values: values)
    flat = torch.cat([span.values.flatten() for span in spans])
    parameters, laid = dict(model.named_parameters()), []
    for span in spans:
        values = flat[span.part].view(span.values.shape)
        parameters[span.name].data = values
        laid.append(span._replace(values=values))
    return flat, laid


class Optimizer(ABC):
    """Gradients, what is remembered of them, and the updates that follow.

    Each of these is one long vector, of which every parameter has a part. Weight decay falls on
    matrices (embeddings and head among them) or, as the configuration says, on all parameters.
    """

    def __init__(self, spans: Sequence[Span], config: TrainingConfig) -> None:
        self._config, self._spans, self._kernels = config, spans, kernels_of(config)
        self._weights = [span.values for span in spans]
        first, count = spans[0].values, spans[-1].part.stop
        by_adamw = sum(span.values.numel() for span in spans if not span.place.by_muon)
        self._exchanged = first.new_zeros(count + _ROOM)
        self.gradient = self._exchanged[:-_ROOM]
        self._mean, self._square = first.new_zeros(count), first.new_zeros(by_adamw)
        self._groups: list[AdamW | Muon] = []
        self.wants_norm = False
        """True to note the gradient's norm in the next step; clipping always notes it."""
        self.norm: Tensor | None = None
        """The norm of the newest step's gradient before clipping, None if it was not noted."""
        self.norm_seconds = 0.0
        """The time that the newest step took for a norm which clipping did not need."""
        self._turns: dict[int, list[list[AdamW | Muon]]] = {}

    def _places(self) -> Iterator[tuple[Place, list[Span], slice]]:
        """The spans of each place, and where they lie together."""
        for place, group in groupby(self._spans, key=lambda span: span.place):
            spans = list(group)
            yield place, spans, slice(spans[0].part.start, spans[-1].part.stop)

    def _decay(self, place: Place) -> float:
        return self._config.weight_decay if place.decays else 0.0

    @abstractmethod
    def exchanged(self) -> tuple[Tensor, Tensor]:
        """What processes add up at each step, and the end of it, which is for other numbers."""

    def add_up(self, others: Sequence[Tensor]) -> None:
        """Adds the gradients of replicas, which are set to 0."""
        for gradient in others:
            self.gradient.add_(gradient)
            gradient.zero_()

    @abstractmethod
    def average(self, pieces: int) -> None:
        """Makes the sum of the gradients of so many pieces of a batch their mean."""

    @abstractmethod
    def _norm(self) -> Tensor:
        """Of the whole gradient."""

    def follow(self, config: TrainingConfig) -> None:
        """Takes the learning rate from that configuration from now on."""
        self._config = config

    def step(self, step: int, pool: ThreadPoolExecutor | None = None, threads: int = 1) -> None:
        """The update after step 0, 1, …, from the gradients, which it then sets to 0.

        `threads` of `pool` and this one share it out, which changes nothing in the result.
        """
        clip = self._config.gradient_clip
        self.norm, self.norm_seconds = None, 0.0
        if clip is not None:
            self.norm = self._norm()
            self.gradient.mul_((clip / (self.norm + 1e-6)).clamp(max=1.0))
        elif self.wants_norm:
            began = time.perf_counter()
            self.norm = self._norm()
            self.norm_seconds = time.perf_counter() - began
        rate = self._config.learning_rate * learning_rate_factor(step, self._config)

        def update(groups: Sequence[AdamW | Muon]) -> None:
            with using(self._kernels):
                for group in groups:
                    group.update(rate, step)

        if pool is None or threads == 1:
            update(self._groups)
        else:
            if threads not in self._turns:
                self._turns[threads] = self._shared_out(threads)
            jobs = [functools.partial(update, groups) for groups in self._turns[threads]]
            compute_all(jobs, pool)
        self.gradient.zero_()

    def _shared_out(self, threads: int) -> list[list[AdamW | Muon]]:
        """The groups for each thread: the most work first, always to whoever has least."""
        shares: list[list[AdamW | Muon]] = [[] for _ in range(threads)]
        work = [0.0] * threads
        for group in sorted(self._groups, key=lambda group: -group.work):
            least = work.index(min(work))
            shares[least].append(group)
            work[least] += group.work
        return [share for share in shares if share]

    def not_finite(self) -> list[str]:
        """Which of gradient (as its running means remember it) and weights are NaN or infinite."""
        kinds = {"gradient": [self._mean, self._square], "weights": self._weights}
        return [
            kind
            for kind, tensors in kinds.items()
            if not all(bool(tensor.isfinite().all()) for tensor in tensors)
        ]

    def weights(self) -> dict[str, Tensor]:
        """The parameters that it updates."""
        return {span.name: span.values for span in self._spans}

    def state(self) -> dict[str, Tensor]:
        """Views of what it remembers from step to step, named `<parameter>/<what>`."""
        views = {}
        for span in self._spans:
            kinds = {"mean": self._mean}
            if not span.place.by_muon:
                kinds["square"] = self._square
            for kind, vector in kinds.items():
                views[f"{span.name}/{kind}"] = vector[span.part].view(span.values.shape)
        return views

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes back what `state` gave. Raises KeyError when a tensor is missing."""
        for name, view in self.state().items():
            view.copy_(tensors[name])


class FlatOptimizer(Optimizer):
    """Of a model whose weights are all here, which it lays side by side in memory.

    Each kind of parameter is then one long vector, as are its gradients, and takes a handful of
    operations however many parameters there are. The model's own parameters become views of it.
    """

    def __init__(self, model: nn.Module, config: TrainingConfig) -> None:
        self._values, spans = lay_side_by_side(model, config)
        super().__init__(spans, config)
        self._weights = [self._values]
        self._point_gradients(model, self.gradient)
        for place, _, part in self._places():
            vectors = [v[part] for v in (self._values, self.gradient, self._mean)]
            if place.shape is None:
                for v, g, m, s in _cut([*vectors, self._square[part]], _ADAMW_AT_ONCE):
                    group = AdamW([v], [g], [m], [s], self._decay(place), config)
                    self._groups.append(group)
                continue
            stacks = [v.view(-1, *place.shape) for v in vectors]
            for values, gradient, mean in _cut(stacks, _MUON_AT_ONCE // math.prod(place.shape)):
                about = self._decay(place), config, place.shape
                self._groups.append(Muon(values.unbind(), gradient, mean, *about))

    def _point_gradients(self, model: nn.Module, gradient: Tensor) -> None:
        parameters = dict(model.named_parameters())
        for span in self._spans:
            parameters[span.name].grad = gradient[span.part].view(span.values.shape)

    def replica(self, model: nn.Module) -> tuple[Any, Tensor]:
        """The model again, on the same weights in memory, and the vector of its own gradients."""
        frozen: dict[int, Any] = {id(p): p for p in model.parameters() if not p.requires_grad}
        copied, gradient = copy.deepcopy(model, frozen), torch.zeros_like(self._values)
        parameters = dict(copied.named_parameters())
        for span in self._spans:
            parameters[span.name].data = span.values
        self._point_gradients(copied, gradient)
        return copied, gradient

    def exchanged(self) -> tuple[Tensor, Tensor]:
        return self._exchanged, self._exchanged[-_ROOM:]

    def average(self, pieces: int) -> None:
        if pieces > 1:
            self.gradient.mul_(1 / pieces)

    def _norm(self) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(self.gradient)
        return norm

    def vectors(self) -> list[Tensor]:
        """All that an update changes: weights, and what is remembered of gradients."""
        return [self._values, self._mean, self._square]


def _cut(tensors: Sequence[Tensor], size: int) -> Iterator[Sequence[Tensor]]:
    """Pieces of tensors of one length, each `size` long; whole ones on a GPU."""
    length = len(tensors[0])
    size = length if tensors[0].device.type != "cpu" else max(1, size)
    for begin in range(0, length, max(1, size)):
        yield [tensor[begin : begin + size] for tensor in tensors]
