"""Kernels in C. The package contains a compiled library for each instruction set.

hatch_build.py compiles the libraries when the package is built. Nothing is compiled, and nothing is
written, at run time. Tests compare each C file with a reference implementation in Python.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
from pathlib import Path
from typing import Any

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.compute.native.structs import check_layouts

VARIABLE = "ATTNLM_KERNELS"
"""The environment variable that names the instruction set to use, or none."""

# From the baseline to the most capable.
_X86 = ("sse4.2", "avx2", "avx512")
_ARM = ("neon",)
_FOLDER = Path(__file__).parent
_SUFFIX = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")

_POINTER = ctypes.c_void_p
_NUMBER = ctypes.c_int64
_REAL = ctypes.c_float
_SIGNATURES: dict[str, tuple[list[Any], Any]] = {
    "block_saved": ([_POINTER], _NUMBER),
    "block_scratch": ([_NUMBER, _POINTER], _NUMBER),
    "run_block_pass": ([_NUMBER, _POINTER], None),
    "attention_scratch": ([_NUMBER] * 2, _NUMBER),
    "attend_packed": ([*[_NUMBER] * 4, *[_POINTER] * 6], None),
    "cross_entropy": ([*[_NUMBER] * 3, _REAL, *[_POINTER] * 3], None),
    "start_crew": ([_NUMBER], _POINTER),
    "end_crew": ([_POINTER], None),
    "next_logits": (
        [*[_POINTER] * 3, ctypes.c_int, *[_NUMBER] * 3, ctypes.c_char_p, _POINTER],
        ctypes.c_int,
    ),
    "is_intel": ([], _NUMBER),
    "vector_bits": ([], _NUMBER),
}


def native_library() -> ctypes.CDLL | None:
    """Return the kernels for this processor, or None if they cannot be loaded.

    Raises UsageError if $ATTNLM_KERNELS names no instruction set of this processor.
    """
    return load(instruction_set())


@functools.cache
def instruction_set() -> str:
    """Return the instruction set to use: $ATTNLM_KERNELS or the most capable, "none" for none.

    Raises UsageError if $ATTNLM_KERNELS names no instruction set of this processor.
    """
    possible = instruction_sets()
    named = os.environ.get(VARIABLE)
    if named and named not in ("none", *possible):
        raise UsageError(
            f"{VARIABLE} is {named}, which is not an instruction set of this processor",
            f"use one of {', '.join(dict.fromkeys(('none', *possible)))}, or unset {VARIABLE}",
        )
    return named or possible[-1]


def instruction_sets() -> tuple[str, ...]:
    """Return the instruction sets that this processor has and kernels exist for, the best last.

    The variable ATEN_CPU_CAPABILITY, with which PyTorch's users limit them, limits these too.
    Return ("none",) on other processors.
    """
    machine = platform.machine().lower()
    known = {"x86_64": _X86, "amd64": _X86, "aarch64": _ARM, "arm64": _ARM}
    possible = known.get(machine, ("none",))
    library = next(filter(None, map(load, _X86)), None) if possible is _X86 else None
    if library is None:
        return possible[:1]
    most = {"default": 1, "avx2": 2}.get(os.environ.get("ATEN_CPU_CAPABILITY", ""), 3)
    return _X86[: min(most, {256: 2, 512: 3}.get(library.vector_bits(), 1))]


@functools.cache
def load(name: str) -> ctypes.CDLL | None:
    """Return the kernels for an instruction set, or None if they are missing or cannot be loaded.

    Raises AttnlmError if they belong to another version of the package.
    """
    try:
        library = ctypes.CDLL(str(_FOLDER / f"kernels-{name}{_SUFFIX}"))
    except OSError:
        return None
    try:
        for symbol, (arguments, result) in _SIGNATURES.items():
            function = getattr(library, symbol)
            function.argtypes = arguments
            function.restype = result
        check_layouts(library)
    except (AttributeError, ValueError) as error:
        raise AttnlmError(
            f"the kernels in C belong to another version of attnlm ({error})",
            "install attnlm again",
        ) from error
    return library
