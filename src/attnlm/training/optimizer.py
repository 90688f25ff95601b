"""The optimizer of a training run: gradients, their running means, and updates by AdamW and Muon.

torch.optim is not used, since importing it takes longer than a small run: the import loads
PyTorch's compiler.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnlm.compute.processes import Processes
from attnlm.compute.threads import compute_all
from attnlm.config.training import TrainingConfig
from attnlm.model.inspection import stored_buffers
from attnlm.model.language_model import LanguageModel
from attnlm.model.layers import linear
from attnlm.training.cuda_graph import CudaGraph, can_record_updates
from attnlm.training.learning_rate import learning_rate

# A CPU updates parameters in pieces of at most this many elements, which fit its caches. Threads
# divide the pieces among themselves.
_MUON_AT_ONCE = 2**17
_ADAMW_AT_ONCE = 2**18
# The most other numbers that processes sum in the same call as the gradients.
_ROOM = 8


class ParameterGroup(NamedTuple):
    """A group of parameters. In memory, groups are sorted by these fields: AdamW's come first."""

    shape: tuple[int, ...]
    """The shape of the matrices that Muon stacks; () for AdamW."""
    decays: bool

    @property
    def by_muon(self) -> bool:
        """Return True if Muon updates the parameters, and False if AdamW does."""
        return self.shape != ()


class Span(NamedTuple):
    """A parameter and its slice, `place`, of each flat vector of the optimizer."""

    group: ParameterGroup
    name: str
    values: Tensor
    place: slice


def _make_spans(model: LanguageModel, config: TrainingConfig) -> list[Span]:
    """Return the spans of the trained parameters, sorted by their groups.

    If `optimizer` is muon, Muon takes the matrices inside blocks.
    """
    spans = []
    for name, parameter in model.named_parameters():
        decays = parameter.ndim > 1 or config.weight_decay_on == "all"
        by_muon = config.optimizer == "muon" and model.is_matrix(name, parameter)
        by_muon = by_muon and parameter.numel() > 0
        if parameter.requires_grad:
            group = ParameterGroup(tuple(parameter.shape[-2:]) if by_muon else (), decays)
            spans.append(Span(group, name, parameter.data, slice(0, 0)))
    spans.sort(key=lambda span: span.group)
    ends = list(itertools.accumulate(span.values.numel() for span in spans))
    begins = [0, *ends[:-1]]
    return [
        span._replace(place=slice(begin, end))
        for span, begin, end in zip(spans, begins, ends, strict=True)
    ]


def flatten_parameters(model: LanguageModel, config: TrainingConfig) -> tuple[Tensor, list[Span]]:
    """Move all parameters into one vector; return the vector and each parameter's span.

    Rounding in matmuls depends on the alignment of the operands. An evaluation therefore repeats a
    training run's numbers only if the parameters have the same layout in memory as in that run.
    """
    spans = _make_spans(model, config)
    flat = torch.cat([span.values.flatten() for span in spans])
    flat_spans = [span._replace(values=flat[span.place].view(span.values.shape)) for span in spans]
    for span in flat_spans:
        model.get_parameter(span.name).data = span.values
    return flat, flat_spans


Rate = float | Tensor
"""A learning rate: on a CUDA device a tensor, (), which a recorded update can read again."""


class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019), for vectors of one length."""

    def __init__(
        self, vectors: Sequence[Tensor], weight_decay: float, config: TrainingConfig
    ) -> None:
        """Take the values, their gradient, its running mean and the running mean of its square."""
        self._vectors = [[vector] for vector in vectors]
        self._options: dict[str, Any] = {
            "beta1": config.beta1,
            "beta2": config.beta2,
            "weight_decay": weight_decay,
            "eps": 1e-8,
            "amsgrad": False,
            "maximize": False,
        }
        self.work = 100.0 * len(vectors[0])  # bound by memory

    def update(self, rate: Rate, count: Tensor) -> None:
        """Make the next update. `count`, (), is the number of updates including this one."""
        # torch.optim.AdamW(fused=True) calls this: one pass over memory.
        update: Any = torch._fused_adamw_  # its types do not allow a dictionary of options
        update(*self._vectors, [], [count], lr=rate, **self._options)


class Muon:
    """Momentum, orthogonalized before each update of a matrix (Jordan et al., 2024).

    Updates N matrices, (N, R, C), of which gradient and mean are stacked. Updates are multiplied by
    0.2 √max(R, C), which makes them as large as AdamW's, so that both rules can use the same
    learning rate and weight decay (Liu et al., 2025, "Muon is scalable for LLM training").
    """

    def __init__(
        self,
        values: Sequence[Tensor],
        gradient: Tensor,
        mean: Tensor,
        weight_decay: float,
        config: TrainingConfig,
    ) -> None:
        self._values = list(values)
        self._gradient = gradient
        self._mean = mean
        self._weight_decay = weight_decay
        self._momentum = config.beta1
        shape = gradient.shape[1:]
        self._scale = 0.2 * math.sqrt(max(shape))
        self.work = 30.0 * gradient.numel() * min(shape)
        # On most CPUs matmuls in bfloat16 are slow.
        half = config.dtype == "bfloat16" and gradient.is_cuda
        self._dtype = torch.bfloat16 if half else gradient.dtype

    def update(self, rate: Rate, count: Tensor) -> None:
        """Make the next update. The rule does not depend on the number of updates, `count`."""
        self._mean.lerp_(self._gradient, 1 - self._momentum)
        # Nesterov: one step further along the momentum.
        direction = self._gradient.lerp(self._mean, self._momentum)
        changes = orthogonalize(direction, self._dtype)
        if self._weight_decay:
            torch._foreach_mul_(self._values, 1 - rate * self._weight_decay)
        if isinstance(rate, Tensor):
            torch._foreach_add_(self._values, (changes * (-self._scale * rate)).unbind())
        else:
            torch._foreach_add_(self._values, changes.unbind(), alpha=-self._scale * rate)


def orthogonalize(matrices_NRC: Tensor, dtype: torch.dtype) -> Tensor:
    """Return N matrices, (N, R, C), with singular values set to about 1.

    Computes Newton-Schulz iterations in `dtype`. With Jordan's coefficients, a few are enough, but
    the result is not exact: its singular values are between 0.7 and 1.2.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices_NRC.to(dtype)
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = _products(x, x)
        polynomial = _products(gram, gram).mul_(c).add_(gram, alpha=b)  # symmetric
        x = _products(polynomial, x.mT).add_(x, alpha=a)
    return (x.mT if tall else x).to(matrices_NRC.dtype)


def _products(x_NRC: Tensor, y_NSC: Tensor) -> Tensor:
    """Return x yᵀ for each pair of matrices, (N, R, S)."""
    if x_NRC.is_cuda:
        return torch.bmm(x_NRC, y_NSC.mT)
    return torch.stack([linear(x, y) for x, y in zip(x_NRC, y_NSC, strict=True)])


class Optimizer:
    """Gradients, their running means, and updates by AdamW and Muon.

    Weights, gradients and means are flat vectors. The model's parameters become views of the first.
    The Span of a parameter says which slice of a vector belongs to the parameter. All parameters of
    a group are contiguous in memory, so that an update takes a handful of operations for any number
    of parameters. Weight decay applies to matrices (embeddings and LM head included) or, if the
    configuration says so, to all parameters.
    """

    def __init__(self, model: LanguageModel, config: TrainingConfig) -> None:
        self._config = config
        self._model = model
        self._values, self._spans = flatten_parameters(model, config)
        new_zeros = self._values.new_zeros
        count = len(self._values)
        by_adamw = sum(span.values.numel() for span in self._spans if not span.group.by_muon)
        self._gradient_and_numbers = new_zeros(count + _ROOM)
        self.gradient = self._gradient_and_numbers[:count]
        self._point_gradients(model, self.gradient)
        self._mean = new_zeros(count)
        self._square = new_zeros(by_adamw)
        self._rules: list[AdamW | Muon] = []
        for group, members in itertools.groupby(self._spans, key=lambda span: span.group):
            decay = config.weight_decay if group.decays else 0.0
            self._rules += self._make_rules(group, list(members), decay)
        self._norm_before_clipping: Tensor | None = None
        """the norm of the newest step's gradient before clipping"""
        self._count = torch.zeros((), device=self.gradient.device)
        self._rate = torch.zeros((), device=self.gradient.device)
        self._graph: CudaGraph[None] | None = None
        if can_record_updates(config, self.gradient.device.type):
            self._graph = CudaGraph()

    def _make_rules(
        self, group: ParameterGroup, spans: list[Span], decay: float
    ) -> Iterator[AdamW | Muon]:
        """Yield the update rules of `spans`, all parameters of `group`."""
        whole = slice(spans[0].place.start, spans[-1].place.stop)
        values = self._values[whole]
        gradient = self.gradient[whole]
        mean = self._mean[whole]
        on_cpu = values.device.type == "cpu"
        if not group.by_muon:
            size = _ADAMW_AT_ONCE if on_cpu else len(values)
            vectors = (values, gradient, mean, self._square[whole])
            for piece in zip(*(vector.split(size) for vector in vectors), strict=True):
                yield AdamW(piece, decay, self._config)
            return
        size = max(1, _MUON_AT_ONCE // math.prod(group.shape)) if on_cpu else len(spans)
        stacks = (v.view(-1, *group.shape).split(size) for v in (values, gradient, mean))
        for matrices, gradients, means in zip(*stacks, strict=True):
            yield Muon(matrices.unbind(), gradients, means, decay, self._config)

    def _point_gradients(self, model: nn.Module, gradient: Tensor) -> None:
        for span in self._spans:
            model.get_parameter(span.name).grad = gradient[span.place].view(span.values.shape)

    def replica(self, model: nn.Module) -> tuple[Any, Tensor]:
        """Return a copy of the model that uses the same weights, and the copy's gradient vector."""
        shared: dict[int, Any] = {id(p): p for p in model.parameters() if not p.requires_grad}
        copied = copy.deepcopy(model, shared)
        gradient = torch.zeros_like(self._values)
        for span in self._spans:
            copied.get_parameter(span.name).data = span.values
        self._point_gradients(copied, gradient)
        return copied, gradient

    def all_reduce(self, processes: Processes, numbers: Sequence[Tensor | float]) -> Tensor:
        """Return the sums of `numbers` over all processes.

        The same call sums the gradients, in place.
        """
        numbers_behind = self._gradient_and_numbers[len(self.gradient) :][: len(numbers)]
        for i, number in enumerate(numbers):
            numbers_behind[i] = number
        processes.all_reduce(self._gradient_and_numbers)
        return numbers_behind

    def _norm(self) -> Tensor:
        """Return the norm of the gradient of all parameters together."""
        norm: Tensor = torch.linalg.vector_norm(self.gradient)
        return norm

    def norm(self) -> Tensor | None:
        """Return the norm of the newest step's gradient before clipping; None before a step."""
        is_clipped = self._config.gradient_clip is not None
        return self._norm_before_clipping if is_clipped else self._norm()

    def update(
        self,
        made: int,
        *,
        total_steps: float | None = None,
        pool: ThreadPoolExecutor | None = None,
        threads: int = 1,
    ) -> None:
        """Make the next update, after `made` earlier ones.

        `total_steps` is the number of steps of the run; if it is None, the number in the
        configuration is used. `threads` threads divide the work: the calling thread and others
        from `pool`. The result does not depend on the number of threads.
        """
        rate = learning_rate(made + 1, self._config, total_steps)
        self._count.fill_(made + 1)
        if self.gradient.is_cuda:
            self._rate.fill_(rate)
            if self._graph is None:
                self._update_on_gpu()
            else:
                self._graph.call(self._update_on_gpu)
            return
        self._clip()
        if pool is None or threads == 1:
            self._apply(self._rules, rate)
        else:
            # Give each rule, most work first, to the thread that has the least work so far.
            jobs: list[list[AdamW | Muon]] = [[] for _ in range(threads)]
            for rule in sorted(self._rules, key=lambda rule: -rule.work):
                min(jobs, key=lambda rules: sum(rule.work for rule in rules)).append(rule)
            compute_all(
                [functools.partial(self._apply, rules, rate) for rules in jobs if rules], pool
            )

    def _update_on_gpu(self) -> None:
        """Make the next update with the numbers in `_rate` and `_count`."""
        self._clip()
        self._apply(self._rules, self._rate)

    def _apply(self, rules: Sequence[AdamW | Muon], rate: Rate) -> None:
        for rule in rules:
            rule.update(rate, self._count)

    def _clip(self) -> None:
        """Scale the gradient down to the norm `gradient_clip`, if that is set."""
        clip = self._config.gradient_clip
        if clip is not None:
            self._norm_before_clipping = self._norm()
            self.gradient.mul_((clip / (self._norm_before_clipping + 1e-6)).clamp(max=1.0))

    def is_finite(self) -> bool:
        """Return True if weights and running means are finite numbers."""
        tensors = (self._mean, self._square, *(span.values for span in self._spans))
        return all(bool(tensor.isfinite().all()) for tensor in tensors)

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters by name."""
        trained = {span.name: span.values for span in self._spans}
        named = self._model.named_parameters()
        return trained | {name: p.data for name, p in named if not p.requires_grad}

    def weights(self) -> dict[str, Tensor]:
        """Return the parameters by name, and the buffers of own code, which may be new ones."""
        return self.parameters() | stored_buffers(self._model)

    def state(self) -> dict[str, Tensor]:
        """Return views of the running means, named `<parameter>/mean` and `<parameter>/square`."""
        views = {}
        for span in self._spans:
            shape = span.values.shape
            views[f"{span.name}/mean"] = self._mean[span.place].view(shape)
            if not span.group.by_muon:
                views[f"{span.name}/square"] = self._square[span.place].view(shape)
        return views
