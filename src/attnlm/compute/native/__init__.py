"""Loops in C for the CPU at hand, compiled when there is enough for them to do.

What is compiled is not kept: a library is made in a folder of its own, loaded, and removed. Each C
file has a plain form beside it in Python, which tests hold it equal to.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib import resources
from pathlib import Path
from typing import Any

from attnlm.base.caches import may_load_from
from attnlm.base.signals import held

COMPILATION = 0.6
"""About how many seconds it takes: compiling is worth it where it saves more."""

_FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
_LONGEST_COMPILATION, _BETWEEN_LOOKS = 10.0, 0.02  # seconds

_PLACE, _NUMBER, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, dict[str, tuple[list[Any], Any]]] = {
    "one_layer.c": {
        "attention_kept": ([_NUMBER], _NUMBER),
        "attention_scratch": ([_NUMBER], _NUMBER),
        "attend": ([*[_NUMBER] * 3, _REAL, *[_PLACE] * 4], None),
        "attend_backward": ([*[_NUMBER] * 3, _REAL, *[_PLACE] * 6], None),
        "cross_entropy": ([*[_NUMBER] * 3, *[_PLACE] * 3], None),
    },
    "decoding.c": {
        "one_layer_scratch": ([_PLACE, _NUMBER], _NUMBER),
        "one_layer_logits": ([_PLACE, _NUMBER, _NUMBER, ctypes.c_char_p, _PLACE], None),
        "transformer_scratch": ([_PLACE], _NUMBER),
        "transformer_logits": ([_PLACE, *[_NUMBER] * 3, ctypes.c_char_p, _PLACE], None),
    },
    "words.c": {
        "find_words": ([_PLACE, ctypes.c_char_p, _NUMBER, _PLACE, _PLACE], _NUMBER),
        "gather_ids": ([_PLACE, _NUMBER, _PLACE, _PLACE], _NUMBER),
    },
}


@functools.cache
def library(source: str, **constants: int) -> ctypes.CDLL | None:
    """The functions of a C file of this folder, compiled for this machine, with these constants.

    None where no compiler can: neither what CC names, nor cc, gcc or clang; and where nothing may
    be loaded from the temporary folder. None on Windows, which lets nobody remove a library that is
    loaded.
    """
    if sys.platform == "win32" or not _can_load():
        return None
    defined = [f"-D{name}={value}" for name, value in constants.items()]
    named = (os.environ.get("CC"), "cc", "gcc", "clang")
    compilers = dict.fromkeys(filter(None, (shutil.which(name) for name in named if name)))
    # Not every compiler knows the processor by itself.
    for compiler, target in itertools.product(compilers, (["-march=native"], [])):
        with contextlib.suppress(OSError, AttributeError):
            return _compiled([compiler, *_FLAGS, *target, *defined], source)
    return None


def _can_load() -> bool:
    try:
        return may_load_from(tempfile.gettempdir())
    except OSError:  # there is no temporary folder
        return False


def _compiled(command: list[str], source: str) -> ctypes.CDLL:
    """Raises OSError or AttributeError where what is made is no such library.

    A signal ends the compiler and is answered when all that it left is gone.
    """
    with (
        held() as signals,
        resources.as_file(resources.files(__name__)) as sources,
        tempfile.TemporaryDirectory(prefix="attnlm-", ignore_cleanup_errors=True) as folder,
    ):
        made = str(Path(folder, "library.so"))
        process = subprocess.Popen(
            [*command, str(sources / source), "-o", made, "-lm"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": folder},  # for what it would leave when it is ended
            start_new_session=True,  # so that all that it started can be ended with it
        )
        try:
            _wait_for(process, signals)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode != 0:
            raise OSError  # what there is of the library may be cut short: to load it could kill us
        return _declared(ctypes.CDLL(made), source)


def _wait_for(process: subprocess.Popen[bytes], signals: list[int]) -> None:
    """Until it ends, it has taken far too long, or a signal has come."""
    latest = time.monotonic() + _LONGEST_COMPILATION
    while not signals and time.monotonic() < latest:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_BETWEEN_LOOKS)
            return


def _declared(found: ctypes.CDLL, source: str) -> ctypes.CDLL:
    for name, (arguments, result) in _SIGNATURES[source].items():
        function = getattr(found, name)
        function.argtypes, function.restype = arguments, result
    return found
