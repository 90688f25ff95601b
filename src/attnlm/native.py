"""Loops in C for the CPU at hand, compiled when there is enough for them to do.

What is compiled is not kept: the library is made in a folder of its own, loaded, and removed.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

COMPILATION = 0.6
"""About how many seconds it takes: compiling is worth it where it saves more."""

_FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
_LONGEST_COMPILATION = 60.0  # seconds


@functools.cache
def library() -> ctypes.CDLL | None:
    """The functions of native.c, compiled for this machine; None where no compiler can."""
    named = (os.environ.get("CC", "cc"), "gcc", "clang")
    compiler = next(filter(None, map(shutil.which, named)), None)
    if compiler is None:
        return None
    source = resources.files("attnlm").joinpath("native.c").read_bytes()
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            made = str(Path(folder, "native.so"))
            for target in (["-march=native"], []):  # not every compiler knows the first
                command = [compiler, *_FLAGS, *target, "-x", "c", "-", "-o", made, "-lm"]
                done = subprocess.run(
                    command, input=source, capture_output=True, timeout=_LONGEST_COMPILATION
                )
                if done.returncode == 0:
                    return _declared(ctypes.CDLL(made))
    except (OSError, subprocess.TimeoutExpired):
        pass
    return None


def _declared(found: ctypes.CDLL) -> ctypes.CDLL:
    place, number, real, ids = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_char_p
    signatures: tuple[tuple[Any, list[Any], Any], ...] = (
        (found.one_layer_logits, [place, number, number, ids, place], None),
        (found.one_layer_scratch, [place, number], number),
        (found.transformer_logits, [place, number, number, number, ids, place], None),
        (found.transformer_scratch, [place], number),
        (found.attend, [*[number] * 4, real, *[place] * 4], None),
        (found.attend_backward, [*[number] * 4, real, *[place] * 6], None),
        (found.attention_scratch, [number, number], number),
    )
    for function, arguments, result in signatures:
        function.argtypes, function.restype = arguments, result
    return found
