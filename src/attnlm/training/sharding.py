"""Sharding: each process holds some rows of every parameter (FSDP2; Zhao et al., 2023).

Before a block is computed, its rows are gathered from all processes. Its gradients are averaged
over the processes, and each process keeps the gradients of its own rows.
"""

from __future__ import annotations

import functools
import logging
import math
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnlm.compute.device import Device
from attnlm.compute.processes import Processes, reporting_lost_processes
from attnlm.config.training import TrainingConfig
from attnlm.model.attention import SelfAttention
from attnlm.model.inspection import uninitialised_model
from attnlm.model.language_model import LanguageModel
from attnlm.model.mlp import MLP
from attnlm.model.spec import ModelSpec
from attnlm.training.optimizer import (
    AdamW,
    Muon,
    Optimizer,
    ParameterGroup,
    Span,
    make_spans,
    orthogonalize,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def sharded_model(
    spec: ModelSpec, vocab_size: int, device: Device, processes: Processes
) -> LanguageModel:
    """Return this process's rows of the model that `spec.build` makes from the same random state.

    While the model is made, the process has at most one whole block in memory at any time, in
    addition to the whole embeddings and LM head.
    """
    from torch.distributed.fsdp import (
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    # Hide a warning that a block's output is a view: no code writes into a block's output.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    half = torch.bfloat16 if device.dtype == "bfloat16" else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    mesh = processes.mesh(device.name)

    def wrap_block(block: Any) -> Any:
        for module in block.modules():
            if isinstance(module, SelfAttention | MLP):
                module.joins_weights = False  # copies of gathered weights would stay in memory
        return fully_shard(block, mesh=mesh, mp_policy=policy)

    model: LanguageModel = wrap_block(spec.build(vocab_size, wrap_block))
    register_fsdp_forward_method(model, "loss")
    return model


def from_shard(shard: Tensor, shape: torch.Size, mesh: DeviceMesh, dim: int = 0) -> DTensor:
    """Return a tensor of this shape, sharded along `dim` over `mesh`; this process has `shard`."""
    from torch.distributed.tensor import DTensor, Shard

    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    placements = [Shard(dim)]
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=shape, stride=stride)


def whole_model(model: LanguageModel, processes: Processes) -> LanguageModel | None:
    """Return the whole model on the CPU in rank 0, else None. All processes must call this."""
    whole = uninitialised_model(model.spec, model.vocab_size) if processes.is_main else None
    into = {} if whole is None else dict(whole.named_parameters())
    model.reshard()  # type: ignore[operator]  # an evaluation leaves root weights gathered
    with torch.no_grad(), reporting_lost_processes():
        for name, parameter in model.named_parameters():
            values = parameter.full_tensor()  # type: ignore[attr-defined]
            if name in into:
                into[name].copy_(values)
    return whole


class ShardedOptimizer(Optimizer):
    """The optimizer of a sharded model: each process updates its rows of every parameter.

    AdamW needs only these rows. Muon needs whole matrices: each is gathered by one process.
    """

    def __init__(self, model: LanguageModel, config: TrainingConfig, processes: Processes) -> None:
        self._processes = processes
        super().__init__(make_spans(model, config, lambda p: p.to_local()), config)  # type: ignore[attr-defined]
        parameters = dict(model.named_parameters())
        self.shapes = {name: parameter.shape for name, parameter in parameters.items()}
        """The shapes of the whole parameters."""
        mesh = processes.mesh(self.gradient.device.type)
        for span in self._spans:
            gradient = self.gradient[span.place].view(span.values.shape)
            parameters[span.name].grad = from_shard(gradient, self.shapes[span.name], mesh)

    def _make_rules(
        self, group: ParameterGroup, spans: list[Span], decay: float
    ) -> Iterator[AdamW | Muon]:
        if not group.by_muon:
            vectors = (self.gradient, self._mean, self._square)
            pieces = [
                (span.values.view(-1), *(vector[span.place] for vector in vectors))
                for span in spans
                if span.values.numel()
            ]
            if pieces:
                yield AdamW(pieces, decay, self._config)
            return
        own = slice(spans[0].place.start, spans[-1].place.stop)
        shape = (len(spans), *spans[0].values.shape)
        gradient = self.gradient[own].view(shape)
        mean = self._mean[own].view(shape)
        orthogonalized = functools.partial(_orthogonalize_rows, group.shape[0], self._processes)
        values = [span.values for span in spans]
        yield Muon(values, gradient, mean, decay, self._config, group.shape, orthogonalized)

    def _norm(self) -> Tensor:
        square: Tensor = torch.linalg.vector_norm(self.gradient).square()
        self._processes.all_reduce(square)
        return square.sqrt()


def _orthogonalize_rows(
    rows: int, processes: Processes, shards_Nrc: Tensor, dtype: torch.dtype
) -> Tensor:
    """Orthogonalize N matrices; this process has r rows of each: (N, r, C) → (N, r, C).

    Each process gathers and orthogonalizes some of the matrices.
    """
    from torch.distributed.tensor import Shard

    # Hide a warning that gloo sends all matrices to all processes.
    logging.getLogger("torch.distributed.tensor._collective_utils").setLevel(logging.ERROR)
    mesh = processes.mesh(shards_Nrc.device.type)
    shape = torch.Size((len(shards_Nrc), rows, shards_Nrc.size(2)))
    by_matrix = from_shard(shards_Nrc, shape, mesh, dim=1).redistribute(placements=[Shard(0)])
    whole_nRC = by_matrix.to_local()
    if len(whole_nRC):
        whole_nRC = orthogonalize(whole_nRC, dtype)
    made = from_shard(whole_nRC, shape, mesh).redistribute(placements=[Shard(1)])
    return made.to_local()
