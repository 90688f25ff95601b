"""Loops in C for the CPU at hand, compiled once and kept.

Each C file has a plain form beside it in Python, which tests hold it equal to.
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
from attnlm.base.signals import held
from attnlm.compute.native import cache
from attnlm.compute.native.build import commands, compiled

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
    """The functions of a C file of this folder, compiled for this machine, with these constants.

    `flags` are added to the compiler's own. None where no compiler can: neither what CC names, nor
    cc, gcc or clang; and where nothing may be loaded from any folder of the user's. None on
    Windows, which lets nobody remove a library that is loaded.
    """
    if sys.platform == "win32" or (place := _loadable_place()) is None:
        return None
    more = [*flags, *(f"-D{name}={value}" for name, value in constants.items())]
    for command in commands():
        with contextlib.suppress(OSError, AttributeError):
            return _loaded([*command, *more], source, place)
    return None


def _loadable_place() -> str | None:
    """Where a private folder can be made that programs may be loaded from."""
    with contextlib.suppress(OSError):  # there is no temporary folder
        if may_load_from(tempfile.gettempdir()):
            return tempfile.gettempdir()
    with contextlib.suppress(AttnlmError):
        return str(code_folder("native"))
    return None


def _loaded(command: list[str], source: str, place: str) -> ctypes.CDLL:
    """From the cache, else compiled and kept.

    Just the bytes that were checked are loaded, from a folder that is gone afterwards. A signal
    ends the compiler and is answered when all that it left is gone. Raises OSError or
    AttributeError where what is made is no such library.
    """
    with (
        held() as signals,
        resources.as_file(resources.files(__name__)) as sources,
        tempfile.TemporaryDirectory(
            prefix="attnlm-", dir=place, ignore_cleanup_errors=True
        ) as folder,
    ):
        key = cache.key(command, sources / source)
        kept, made = Path(folder, "kept.so"), Path(folder, "made.so")
        if (content := cache.read(key)) is not None:
            with contextlib.suppress(OSError, AttributeError):
                kept.write_bytes(content)
                return _declared(ctypes.CDLL(str(kept)), source)
        compiled([*command, str(sources / source), "-o", str(made), "-lm"], folder, signals)
        found = _declared(ctypes.CDLL(str(made)), source)
        cache.write(key, made.read_bytes())
        return found


def _declared(found: ctypes.CDLL, source: str) -> ctypes.CDLL:
    for name, (arguments, result) in _SIGNATURES[source].items():
        function = getattr(found, name)
        function.argtypes, function.restype = arguments, result
    return found
