"""A pytest plugin, `-p tests.arm64`: the C files run on an emulated ARM64 processor.

Python and PyTorch stay on this one, so that each test compares both processors. The C files are
compiled with serve.c into a program that qemu runs. The program gets the pages of memory that it
touches through a pipe.
"""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from attnlm.compute import native
from attnlm.compute.native import _SIGNATURES
from hatch_build import FLAGS
from tests.kernels import SOURCES

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
_PAGE, _CHANGED, _RESULT = range(3)  # as in serve.c
_SIZE, _INTEGERS = 4096, 20


class _Library:
    """The kernels, as ctypes would give them."""

    def __init__(self, folder: Path) -> None:
        names = " ".join(f"F({name})" for name in _SIGNATURES)
        program = str(folder / "kernels")
        options = [word for word in FLAGS if word not in ("-shared", "-fPIC")]
        files = [*map(str, SOURCES), str(Path(__file__).with_name("serve.c"))]
        command = [COMPILER, *options, "-static", f"-DFUNCTIONS={names}", *files, "-o", program]
        subprocess.run([*command, "-lm"], check=True, stderr=subprocess.DEVNULL)
        self._process = subprocess.Popen(
            [EMULATOR, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._memory = os.open("/proc/self/mem", os.O_RDWR)
        self._lock = threading.Lock()
        for number, (name, (arguments, result)) in enumerate(_SIGNATURES.items()):
            setattr(self, name, self._function(number, arguments, result))

    def _function(self, number: int, arguments: list[Any], kind: Any) -> Callable[..., int | None]:
        def call(*given: Any) -> int | None:
            assert len(given) == len(arguments)
            integers, real = [], 0.0
            for value, wanted in zip(given, arguments, strict=True):
                if wanted is ctypes.c_float:
                    real = value
                else:
                    integers.append(_integer(value))
            integers += [0] * (_INTEGERS - len(integers))
            with self._lock:
                try:
                    result = self._served(struct.pack("<21qd", number, *integers, real))
                except OSError:  # an address at which nothing lies
                    self._process.kill()
                    raise
            return None if kind is None else kind(result).value

        return call

    def _served(self, call: bytes) -> int:
        """Asks for a call, and lends it memory until it returns."""
        self._write(call)
        while True:
            kind, value = struct.unpack("<2q", self._read(16))
            if kind == _RESULT:
                return int(value)
            if kind == _PAGE:
                self._write(os.pread(self._memory, _SIZE, value))
            else:
                before, after = (np.frombuffer(self._read(_SIZE), np.uint8) for _ in range(2))
                changed = np.flatnonzero(np.diff(before != after, prepend=False, append=False))
                for begin, end in changed.reshape(
                    -1, 2
                ):  # the rest may be changed by other threads
                    os.pwrite(self._memory, after[begin:end].tobytes(), value + int(begin))

    def _write(self, content: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(content)
        self._process.stdin.flush()

    def _read(self, size: int) -> bytes:
        assert self._process.stdout is not None
        found = self._process.stdout.read(size)
        if len(found) != size:
            raise RuntimeError(f"the emulated program ended with {self._process.wait()}")
        return found

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()
        os.close(self._memory)


def _integer(value: Any) -> int:
    """Return an argument as a register holds it; what it points at lives during the call."""
    if isinstance(value, bytes):
        return ctypes.cast(ctypes.c_char_p(value), ctypes.c_void_p).value or 0
    if isinstance(value, ctypes.Array | ctypes.Structure):
        return ctypes.addressof(value)
    return value or 0


_folder = tempfile.TemporaryDirectory(prefix="attnlm-arm64-")
_libraries: list[_Library] = []


def pytest_configure() -> None:
    """Take the place of the kernels of this processor."""
    _libraries.append(library := _Library(Path(_folder.name)))
    native.instruction_sets = lambda: ("neon",)
    native._machine_sets = native.instruction_sets
    native.load = lambda name: library  # type: ignore[assignment]


def pytest_unconfigure() -> None:
    """End the emulated program."""
    for library in _libraries:
        library.end()
    _folder.cleanup()
