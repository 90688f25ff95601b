"""The optimizer of a training run: gradients, their running means, and updates by AdamW and Muon.

torch.optim is not used, since importing it takes longer than a small run: the import loads
PyTorch's compiler.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnlm.compute.processes import Processes
from attnlm.compute.threads import computing
from attnlm.config.training import TrainingConfig
from attnlm.model.building import stored_buffers
from attnlm.model.language_model import LanguageModel
from attnlm.model.layers import linear
from attnlm.training.cuda_graph import CudaGraph, can_record_updates

# A CPU updates parameters in pieces of at most this many elements, which fit its caches. Threads
# divide the pieces among themselves.
_MUON_AT_ONCE = 2**17
_ADAMW_AT_ONCE = 2**18
# The most other numbers that processes sum in the same call as the gradients.
_ROOM = 8


class Span(NamedTuple):
    """A parameter and its slice, `place`, of each flat vector of the optimizer.

    Parameters of the same `shape` and `decays` are a group and lie side by side, AdamW's first.
    """

    shape: tuple[int, ...]
    """the shape of the matrices that Muon stacks; () for AdamW"""
    decays: bool
    name: str
    values: Tensor
    place: slice

    @property
    def group(self) -> tuple[tuple[int, ...], bool]:
        return self.shape, self.decays


def flatten_parameters(model: LanguageModel, config: TrainingConfig) -> tuple[Tensor, list[Span]]:
    """Move the trained parameters into one vector; return the vector and each parameter's span.

    If `optimizer` is muon, Muon takes the matrices inside blocks.

    Rounding in matmuls depends on the alignment of the operands. An evaluation therefore repeats a
    training run's numbers only if the parameters have the same layout in memory as in that run.
    """
    spans = []
    for name, parameter in model.named_parameters():
        decays = parameter.ndim > 1 or config.weight_decay_on == "all"
        by_muon = config.optimizer == "muon" and model.is_matrix(name, parameter)
        shape = tuple(parameter.shape[-2:]) if by_muon and parameter.numel() else ()
        if parameter.requires_grad:
            spans.append(Span(shape, decays, name, parameter.data, slice(0)))
    spans.sort(key=lambda span: span.group)
    flat = torch.cat([span.values.flatten() for span in spans])
    end = 0
    for number, span in enumerate(spans):
        place = slice(end, end := end + span.values.numel())
        values = flat[place].view(span.values.shape)
        model.get_parameter(span.name).data = values
        spans[number] = span._replace(values=values, place=place)
    return flat, spans


Rate = float | Tensor
"""A learning rate: on a CUDA device a tensor, (), which a recorded update can read again."""
Rule = Callable[[Rate], None]
"""Makes the next update of some parameters."""


def adamw(
    vectors: Sequence[Tensor], count: Tensor, weight_decay: float, config: TrainingConfig
) -> Rule:
    """Return Adam with decoupled weight decay (Loshchilov and Hutter, 2019) for one vector.

    `vectors` are the values, their gradient, its running mean and the running mean of its square.
    `count`, (), is the number of updates including the next one.
    """
    # torch.optim.AdamW(fused=True) calls this: one pass over memory.
    update: Any = functools.partial(
        torch._fused_adamw_,
        *([vector] for vector in vectors),
        [],
        [count],
        beta1=config.beta1,
        beta2=config.beta2,
        weight_decay=weight_decay,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
    )
    return lambda rate: update(lr=rate)


def muon(tensors: Sequence[Tensor], weight_decay: float, config: TrainingConfig) -> Rule:
    """Return Muon for N matrices (Jordan et al., 2024): momentum, orthogonalized before updates.

    `tensors` are the matrices, their gradients and the running means of these, (N, R, C) each.
    Updates are multiplied by 0.2 √max(R, C), which makes them as large as AdamW's, so that both
    rules can use the same learning rate and weight decay (Liu et al., 2025, "Muon is scalable for
    LLM training").
    """
    values_NRC, gradient_NRC, mean_NRC = tensors
    values = values_NRC.unbind()
    scale = 0.2 * math.sqrt(max(gradient_NRC.shape[1:]))
    # On most CPUs matmuls in bfloat16 are slow.
    half = config.dtype == "bfloat16" and gradient_NRC.is_cuda
    dtype = torch.bfloat16 if half else gradient_NRC.dtype

    def update(rate: Rate) -> None:
        mean_NRC.lerp_(gradient_NRC, 1 - config.beta1)
        # Nesterov: one step further along the momentum.
        direction = gradient_NRC.lerp(mean_NRC, config.beta1)
        changes = orthogonalize(direction, dtype)
        if weight_decay:
            torch._foreach_mul_(values, 1 - rate * weight_decay)
        if isinstance(rate, Tensor):
            torch._foreach_add_(values, (changes * (-scale * rate)).unbind())
        else:
            torch._foreach_add_(values, changes.unbind(), alpha=-scale * rate)

    return update


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
        by_adamw = sum(span.values.numel() for span in self._spans if not span.shape)
        self._gradient_and_numbers = new_zeros(count + _ROOM)
        self.gradient = self._gradient_and_numbers[:count]
        self._point_gradients(model, self.gradient)
        self._mean = new_zeros(count)
        self._square = new_zeros(by_adamw)
        self._norm_before_clipping: Tensor | None = None
        """the norm of the newest step's gradient before clipping"""
        device = self._values.device
        self._count = torch.zeros((), device=device)
        self._rate = torch.zeros((), device=device)
        self._rules: list[Rule] = []
        for _, members in itertools.groupby(self._spans, key=lambda span: span.group):
            self._rules += self._rules_of(list(members))
        self._rules.reverse()  # Muon's take longer, so that threads begin with them
        self._graph: CudaGraph[None] | None = None
        if can_record_updates(config, device.type):
            self._graph = CudaGraph()

    def _rules_of(self, spans: list[Span]) -> Iterator[Rule]:
        """Yield the update rules of all parameters of a group. Threads divide them."""
        shape, decays = spans[0].group
        decay = self._config.weight_decay if decays else 0.0
        whole = slice(spans[0].place.start, spans[-1].place.stop)
        vectors = [vector[whole] for vector in (self._values, self.gradient, self._mean)]
        is_on_cpu = self._values.device.type == "cpu"
        if shape:
            vectors = [vector.view(-1, *shape) for vector in vectors]
            size = max(1, _MUON_AT_ONCE // math.prod(shape)) if is_on_cpu else len(spans)
        else:
            vectors.append(self._square[whole])
            size = _ADAMW_AT_ONCE if is_on_cpu else len(vectors[0])
        for pieces in zip(*(vector.split(size) for vector in vectors), strict=True):
            if shape:
                yield muon(pieces, decay, self._config)
            else:
                yield adamw(pieces, self._count, decay, self._config)

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

    def norm(self) -> Tensor | None:
        """Return the norm of the newest step's gradient before clipping; None before a step."""
        if self._config.gradient_clip is not None:
            return self._norm_before_clipping
        norm: Tensor = torch.linalg.vector_norm(self.gradient)
        return norm

    def update(self, made: int, rate: float, pool: ThreadPoolExecutor | None = None) -> None:
        """Make the next update, after `made` earlier ones, with a learning rate.

        The calling thread and those of the `pool` divide the work. The result does not depend on
        the number of threads.
        """
        self._count.fill_(made + 1)
        if not self.gradient.is_cuda:
            self._update(rate, pool)
        elif self._graph is None:
            self._update(self._rate.fill_(rate))
        else:
            self._graph.call(self._update, self._rate.fill_(rate))

    def _update(self, rate: Rate, pool: ThreadPoolExecutor | None = None) -> None:
        """Scale the gradient down to the norm `gradient_clip`, if that is set; apply all rules."""
        clip = self._config.gradient_clip
        if clip is not None:
            self._norm_before_clipping = torch.linalg.vector_norm(self.gradient)
            self.gradient.mul_((clip / (self._norm_before_clipping + 1e-6)).clamp(max=1.0))
        if pool is None:
            for rule in self._rules:
                rule(rate)
        else:
            jobs = [functools.partial(rule, rate) for rule in self._rules]
            with computing(jobs[1:], pool) as others:
                jobs[0]()
                others()

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
            if not span.shape:
                views[f"{span.name}/square"] = self._square[span.place].view(shape)
        return views
