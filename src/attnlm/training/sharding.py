"""A model of which each process has a part: PyTorch's FSDP2 (Zhao et al., 2023).

Rows of every parameter are divided among the processes. A block's are gathered when it is computed,
and its gradients are averaged and divided again.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnlm.compute.device import Device
from attnlm.compute.processes import Processes, noticing_lost
from attnlm.model.architecture import Architecture
from attnlm.model.attention import SelfAttention
from attnlm.model.inspection import empty_model
from attnlm.model.language_model import MLP, LanguageModel, build_model

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def sharded_model(
    architecture: Architecture, vocab_size: int, device: Device, processes: Processes
) -> LanguageModel:
    """This process' part of the model that `build_model` gives from the same random state.

    No more than one block, embeddings and head are whole at any time.
    """
    from torch.distributed.fsdp import (
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    # That a block's output is a view; nobody writes into one.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    half = torch.bfloat16 if device.dtype == "bfloat16" else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    mesh = processes.mesh(device.name)

    def placed(module: Any) -> Any:
        for part in module.modules():
            if isinstance(part, SelfAttention | MLP):
                part.joins_weights = False  # copies of gathered weights would stay
        return fully_shard(module, mesh=mesh, mp_policy=policy)

    model: LanguageModel = placed(build_model(architecture, vocab_size, placed))
    register_fsdp_forward_method(model, "loss")
    return model


def local_part(parameter: Tensor) -> Tensor:
    """What this process has of a sharded parameter: some of its rows."""
    part: Tensor = parameter.to_local()  # type: ignore[attr-defined]
    return part


def part_of_whole(part: Tensor, shape: torch.Size, mesh: DeviceMesh) -> Tensor:
    """As a tensor of that shape, the rows of which are divided among a mesh's processes."""
    from torch.distributed.tensor import DTensor, Shard

    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def whole_model(model: LanguageModel, processes: Processes) -> LanguageModel | None:
    """All of it, on the main process' CPU; None in the others, which have to ask for it too."""
    whole = empty_model(model.architecture, model.vocab_size) if processes.is_main else None
    into = {} if whole is None else dict(whole.named_parameters())
    # PyTorch's collectives below have less patience.
    processes.add_up(torch.zeros(()), "making a whole model")
    model.reshard()  # type: ignore[operator]  # an evaluation leaves the root's gathered
    with torch.no_grad(), noticing_lost():
        for name, parameter in model.named_parameters():
            values = parameter.full_tensor()  # type: ignore[attr-defined]
            if name in into:
                into[name].copy_(values)
    return whole
