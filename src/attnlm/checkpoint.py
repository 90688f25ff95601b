"""Tensors and what they belong to in one safetensors file: complete or absent, checked on load."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from attnlm import files
from attnlm.config import ModelConfig
from attnlm.errors import AttnlmError
from attnlm.model import LanguageModel, build_model, model_skeleton
from attnlm.optimizer import Optimizer

_MODEL, _OPTIMIZER = "model.", "optimizer."


def save_checkpoint(
    path: Path,
    model: LanguageModel,
    facts: Mapping[str, Any],
    optimizer: Optimizer | None = None,
) -> None:
    """Writes weights, `facts` (JSON values) and, where given, the optimizer's state.

    The file replaces an older one in one step. A digest of all that it holds is part of it.
    """
    tensors = {_MODEL + name: p.detach() for name, p in model.named_parameters()}
    if optimizer is not None:
        tensors |= {_OPTIMIZER + name: tensor for name, tensor in optimizer.state().items()}
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    described = json.dumps(facts, sort_keys=True)
    metadata = {"facts": described, "digest": _digest(described, tensors)}
    files.write_bytes(path, save(tensors, metadata))


def load_checkpoint(
    path: Path, config: ModelConfig, vocab_size: int
) -> tuple[LanguageModel, dict[str, Any], dict[str, Tensor]]:
    """The model of a checkpoint on the CPU, its facts, and the optimizer's state.

    Raises AttnlmError when the file is missing, damaged, or holds another model. Names and shapes
    are compared before any tensor is read.
    """
    if not path.exists():
        raise AttnlmError(
            f"there is no checkpoint {path}", "the run has not got that far; train it again"
        )
    # safetensors opens a file twice, and a trainer may replace it in between.
    return files.unless_replaced(path, lambda: _load(path, config, vocab_size))


def _load(
    path: Path, config: ModelConfig, vocab_size: int
) -> tuple[LanguageModel, dict[str, Any], dict[str, Tensor]]:
    expected = _expected_shapes(config, vocab_size)
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            found = {n: shape for n, shape in shapes.items() if n.startswith(_MODEL)}
            if found != expected:
                raise AttnlmError(
                    f"{path} does not hold the model that its run describes",
                    "copy the run's folder again from where it came",
                )
            tensors = {name: file.get_tensor(name) for name in shapes}
    except (OSError, SafetensorError, ValueError):
        raise _damaged(path) from None
    described = metadata.get("facts", "")
    if metadata.get("digest") != _digest(described, tensors):
        raise _damaged(path)
    model = build_model(config, vocab_size)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[_MODEL + name])
    state = {n.removeprefix(_OPTIMIZER): t for n, t in tensors.items() if n.startswith(_OPTIMIZER)}
    return model, json.loads(described), state


def _expected_shapes(config: ModelConfig, vocab_size: int) -> dict[str, tuple[int, ...]]:
    model = model_skeleton(config, vocab_size)
    return {_MODEL + name: tuple(p.shape) for name, p in model.named_parameters()}


def _digest(described: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(described.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _damaged(path: Path) -> AttnlmError:
    return AttnlmError(
        f"{path} is damaged: it does not match its own digest",
        "the run's other checkpoint may be whole: try --checkpoint last or best",
    )
