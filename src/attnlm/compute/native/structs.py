"""The structs that the C files share with Python: CLinear is `struct linear`.

`check_layouts` compares each struct with the C compiler's layout, so that a difference is an error
instead of corrupted memory.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

_INTEGER = ctypes.c_int64
_POINTER = ctypes.c_void_p
# The numbers of norms and MLPs in layout.h.
NORMS = ("none", "rms", "layer")
MLPS = ("none", "swiglu", "gelu", "relu2")

_TYPES = (np.float32, np.float64, np.int64, np.uintp)


class Struct(ctypes.Structure):
    """A struct of a C file. It keeps the arrays that it points to alive."""

    def __init__(self, **values: Any) -> None:
        super().__init__()
        self._kept = values
        for name, value in values.items():
            if isinstance(value, np.ndarray):
                assert value.dtype in _TYPES and value.flags.c_contiguous
                value = value.ctypes.data
            setattr(self, name, value)


def _fields(kind: Any, *names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names]


class CLinear(Struct):
    """A linear layer (linear.h)."""

    _fields_ = (
        *_fields(_INTEGER, "inputs", "outputs"),
        *_fields(_POINTER, "panels", "bias"),
    )


class CBlock(Struct):
    """The weights of a block (decoding.c)."""

    _fields_ = (
        *_fields(_POINTER, "attention_norm", "mlp_norm", "query_gains", "key_gains"),
        *_fields(CLinear, "qkv", "projection", "up", "down"),
    )


class CModel(Struct):
    """The settings and the weights of a model (decoding.c)."""

    _fields_ = (
        *_fields(_INTEGER, "layers", "width", "vocab_size", "heads", "kv_heads", "size"),
        *_fields(_INTEGER, "key_at", "value_at", "norm", "normed_heads", "residual", "mlp"),
        ("epsilon", ctypes.c_float),
        *_fields(_POINTER, "tokens", "positions", "cosines", "sines", "blocks", "last_norm"),
        ("lm_head", CLinear),
    )


class CMemory(Struct):
    """The memory of a decoder (decoding.c)."""

    _fields_ = (
        *_fields(_INTEGER, "rows", "capacity", "stride", "mixed_stride"),
        *_fields(_POINTER, "keys", "values", "x", "normed", "packed", "mixed", "hidden"),
        *_fields(_POINTER, "query", "scores"),
    )


class CWeights(Struct):
    """The weights of a block, or their gradients (block.c)."""

    _fields_ = (
        *_fields(_POINTER, "attention_gain", "attention_shift", "mlp_gain", "mlp_shift"),
        *_fields(_POINTER, "query_gain", "key_gain"),
        *_fields(_POINTER, "query", "key", "value", "projection", "gate", "up", "down"),
        *_fields(_POINTER, "query_bias", "key_bias", "value_bias", "projection_bias"),
        *_fields(_POINTER, "gate_bias", "up_bias", "down_bias"),
    )


class CPass(Struct):
    """A pass through a block (block.c)."""

    _fields_ = (
        *_fields(_INTEGER, "windows", "length", "width", "heads", "kv_heads", "size", "hidden"),
        *_fields(_INTEGER, "norm", "mlp"),
        *_fields(ctypes.c_float, "epsilon", "qk_epsilon"),
        *_fields(CWeights, "weights", "gradients"),
        *_fields(_POINTER, "cosines", "sines", "attention_factors", "mlp_factors", "x", "out"),
        *_fields(_POINTER, "saved", "scratch", "d_out", "d_x"),
    )


class _Layout(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("offset", _INTEGER), ("size", _INTEGER))


_STRUCTS: dict[str, tuple[type[Struct], ...]] = {
    "decoding_layouts": (CLinear, CBlock, CModel, CMemory),
    "block_layouts": (CWeights, CPass),
}


def check_layouts(library: ctypes.CDLL) -> None:
    """Raise ValueError if a struct's size, or a field's offset or size, differs in the library."""
    for table, structs in _STRUCTS.items():
        layouts = {}
        for struct in structs:
            name = struct.__name__.removeprefix("C").lower()
            layouts[name] = (0, ctypes.sizeof(struct))
            for field, *_ in struct._fields_:
                layout = getattr(struct, field)
                layouts[f"{name}.{field}"] = (layout.offset, layout.size)
        in_c = {}
        entries = (_Layout * (len(layouts) + 1)).in_dll(library, table)
        for entry in entries:
            if entry.name is None:
                break
            in_c[entry.name.decode()] = entry.offset, entry.size
        for name in layouts.keys() | in_c.keys():
            if layouts.get(name) != in_c.get(name):
                raise ValueError(f"struct {name} is {in_c.get(name)} in C, not {layouts.get(name)}")
