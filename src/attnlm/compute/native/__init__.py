"""Kernels in C, compiled once for this machine and cached.

Tests compare each C file with a reference implementation in Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

from attnlm.base.caches import code_folder, may_load_from
from attnlm.base.errors import AttnlmError
from attnlm.compute.native import build

_PLACE, _NUMBER, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, dict[str, tuple[list[Any], Any]]] = {
    "attention.c": {
        "attention_lanes": ([], _NUMBER),
        "attention_scratch": ([_NUMBER] * 2, _NUMBER),
        "attend": ([*[_NUMBER] * 6, _REAL, *[_PLACE] * 6], None),
        "attend_backward": ([*[_NUMBER] * 6, _REAL, *[_PLACE] * 10], None),
    },
    "one_layer.c": {
        "attention_kept": ([_NUMBER], _NUMBER),
        "attention_scratch": ([_NUMBER], _NUMBER),
        "attend": ([*[_NUMBER] * 3, _REAL, *[_PLACE] * 4], None),
        "attend_backward": ([*[_NUMBER] * 3, _REAL, *[_PLACE] * 6], None),
    },
    "pointwise.c": {
        "gelu": ([*[_NUMBER] * 2, *[_PLACE] * 2], None),
        "gelu_backward": ([*[_NUMBER] * 2, *[_PLACE] * 3], None),
        "swiglu": ([*[_NUMBER] * 2, *[_PLACE] * 2], None),
        "swiglu_backward": ([*[_NUMBER] * 2, *[_PLACE] * 3], None),
        "rms_norm": ([*[_NUMBER] * 2, _REAL, *[_PLACE] * 4], None),
        "rms_norm_backward": ([*[_NUMBER] * 2, *[_PLACE] * 6], None),
        "cross_entropy": ([*[_NUMBER] * 3, _REAL, *[_PLACE] * 5], None),
        "place_heads": ([*[_NUMBER] * 5, _REAL, *[_PLACE] * 6], None),
        "place_heads_backward": ([*[_NUMBER] * 5, *[_PLACE] * 8], None),
    },
    "decoding.c": {
        "next_logits": (
            [*[_PLACE] * 2, *[_NUMBER] * 4, ctypes.c_char_p, _PLACE],
            ctypes.c_int,
        ),
        "generate": ([*[_PLACE] * 2, *[_NUMBER] * 2, _PLACE, _NUMBER, *[_PLACE] * 2], _NUMBER),
    },
    "words.c": {
        "find_words": ([_PLACE, ctypes.c_char_p, _NUMBER, _PLACE, _PLACE], _NUMBER),
        "gather_ids": ([_PLACE, _NUMBER, _PLACE, _PLACE], _NUMBER),
    },
}


@functools.cache
def library(source: str, *flags: str, **constants: int) -> ctypes.CDLL | None:
    """Return the functions of a C file in this folder, compiled with these flags and constants.

    The compilers that are tried are the one that CC names, cc, gcc and clang. Return None if none
    of them works, if the user has no folder from which code may be loaded, or on Windows, where a
    loaded library can't be removed.
    """
    if sys.platform == "win32" or (place := _loadable_place()) is None:
        return None
    more = [*flags, *(f"-D{name}={value}" for name, value in constants.items())]
    for command in build.commands():
        with contextlib.suppress(OSError, AttributeError):
            return _loaded([*command, *more], source, place)
    return None


def _loadable_place() -> str | None:
    """Return a folder that temporary folders can be made in and code loaded from, or None."""
    with contextlib.suppress(OSError):  # the system has no temporary folder
        if may_load_from(tempfile.gettempdir()):
            return tempfile.gettempdir()
    with contextlib.suppress(AttnlmError):
        return str(code_folder("native"))
    return None


def _loaded(command: list[str], source: str, place: str) -> ctypes.CDLL:
    """Load a cached library, or compile and cache it.

    Cached bytes are checked, and copied to a temporary folder before they are loaded. Raises
    OSError or AttributeError if compiling fails or the result lacks a function of `source`.
    """
    with (
        resources.as_file(resources.files(__name__)) as sources,
        tempfile.TemporaryDirectory(
            prefix="attnlm-", dir=place, ignore_cleanup_errors=True
        ) as folder,
    ):
        key = build.key(command, sources / source)
        made = Path(folder, "made.so")
        if (content := build.kept(key)) is not None:
            with contextlib.suppress(OSError, AttributeError):
                Path(folder, "kept.so").write_bytes(content)
                return _declared(ctypes.CDLL(f"{folder}/kept.so"), source)
        build.run_compiler([*command, str(sources / source), "-o", str(made), "-lm"], folder)
        found = _declared(ctypes.CDLL(str(made)), source)
        build.keep(key, made.read_bytes())
        return found


def _declared(found: ctypes.CDLL, source: str) -> ctypes.CDLL:
    for name, (arguments, result) in _SIGNATURES[source].items():
        function = getattr(found, name)
        function.argtypes, function.restype = arguments, result
    return found
