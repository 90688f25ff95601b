"""Names of weights in checkpoints of attnlm 0.1, which kept several maps in one tensor.

Queries, keys and values were one tensor, as were the gate and up maps of an MLP, and the one layer
of a rung was called `body`.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from attnlm.runs.tensor_file import Shape

# What is a part of a larger tensor now: its name then, which part it was, of how many.
_PARTS = {
    "attention.query.weight": ("attention.qkv", 0, 3),
    "attention.key.weight": ("attention.qkv", 1, 3),
    "attention.value.weight": ("attention.qkv", 2, 3),
    "attention.query.bias": ("attention.qkv_bias", 0, 3),
    "attention.key.bias": ("attention.qkv_bias", 1, 3),
    "attention.value.bias": ("attention.qkv_bias", 2, 3),
    "mlp.gate.weight": ("mlp.gate_up", 0, 2),
    "mlp.up.weight": ("mlp.gate_up", 1, 2),
}
_RENAMED = {
    "attention.query_norm.gain": "attention.query_gain",
    "attention.key_norm.gain": "attention.key_gain",
}


def older_shapes(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """The names and shapes that a model's parameters had in older files."""
    older: dict[str, Shape] = {}
    for name, shape in shapes.items():
        old, _, parts = _older(name, shapes)
        # Biases lay one after the other, matrices were stacked.
        joined = (parts, *shape) if len(shape) > 1 else (parts * shape[0],)
        older[old] = joined if parts > 1 else shape
    return older


def from_older(tensors: Mapping[str, Tensor], shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
    """The tensors of an older file, `<parameter>` or `<parameter>/<what>`, by today's names."""
    renamed = {}
    for name, shape in shapes.items():
        old, part, parts = _older(name, shapes)
        for suffix in {n[len(old) :] for n in tensors if n == old or n.startswith(f"{old}/")}:
            tensor = tensors[old + suffix]
            renamed[name + suffix] = tensor.chunk(parts)[part].reshape(shape)
    return renamed


def _older(name: str, shapes: Mapping[str, Shape]) -> tuple[str, int, int]:
    """What a parameter was called, or was a part of: which one of how many."""
    block, dot, rest = name.rpartition("blocks.")
    if not dot:
        return name, 0, 1
    number, _, local = rest.partition(".")
    old, part, parts = _PARTS.get(local, (_RENAMED.get(local, local), 0, 1))
    if "norm.gain" in shapes:
        return f"{block}blocks.{number}.{old}", part, parts
    return block + old.replace("attention.", "body."), part, parts
