"""The types that numbers have in a GGUF file: float32, float16, or eight bits and a scale."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnlm.base.errors import AttnlmError
from attnlm.runs.safetensors_file import Shape

_LARGEST = {"F16": 65_504.0, "Q8_0": 127 * 65_504.0}  # of Q8_0 the scale is a float16
_BLOCK = 32  # numbers with one scale


def type_of(name: str, shape: Shape, asked: str) -> str:
    """The type of a tensor in a file of type `asked`, as llama.cpp's own converter chooses it.

    Vectors and positions stay float32. What has rows that blocks of 32 don't fill is float16
    instead of Q8_0.
    """
    if asked == "f32" or len(shape) == 1 or name == "position_embd.weight":
        return "F32"
    return "F16" if asked == "f16" or shape[-1] % _BLOCK else "Q8_0"


def converted(name: str, numbers: NDArray[np.float32], to: str) -> NDArray[Any]:
    """The numbers in a type, as their bytes lie in the file.

    Raises AttnlmError for numbers that the type can't hold.
    """
    from gguf import GGMLQuantizationType, quantize

    if to in _LARGEST and (largest := float(np.abs(numbers).max())) > _LARGEST[to]:
        raise AttnlmError(
            f"the tensor {name} has {largest:g}, more than {to} can hold", "give `type` f32"
        )
    result: NDArray[Any] = quantize(numbers, GGMLQuantizationType[to])
    return result
