"""A pytest plugin, `-p tools.emulated`: the kernels run on another processor or system, emulated.

ATTNLM_EMULATED names it: ARM64 (qemu) or Windows (Wine). Python and PyTorch stay on this one, so
that each test compares both. The C files are compiled with serve.c into a program that the emulator
runs. The program gets the pages of memory that it touches through a pipe.
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
from typing import Any, NamedTuple

import numpy as np

from attnlm.compute import native
from attnlm.compute.native import _SIGNATURES
from hatch_build import FLAGS, ZIG
from tools.compile_kernels import SOURCES

_PAGE, _CHANGED, _RESULT = range(3)  # as in serve.c
_OF_THE_SYSTEM, _ARGUMENTS = 4096, 20


class Emulated(NamedTuple):
    """A processor or system: its compiler, its emulator, and the bytes that serve.c asks for."""

    compiler: tuple[str, ...]
    emulator: str
    page: int
    instruction_set: str


EMULATED = {
    "ARM64": Emulated(("aarch64-linux-gnu-gcc", "-static"), "qemu-aarch64", 4096, "neon"),
    "Windows": Emulated(
        (*ZIG, "-target", "x86_64-windows-gnu", "-march=x86_64_v3"), "wine", 65536, "avx2"
    ),
}


class _Library:
    """The kernels, as ctypes would give them."""

    def __init__(self, emulated: Emulated, folder: Path) -> None:
        names = " ".join(f"F({name})" for name in _SIGNATURES)
        self._size, program = emulated.page, str(folder / "kernels.exe")
        options = [word for word in FLAGS if word not in ("-shared", "-fPIC")]
        files = [*map(str, SOURCES), str(Path(__file__).with_name("serve.c"))]
        command = [*emulated.compiler, *options, f"-DFUNCTIONS={names}", *files, "-o", program]
        subprocess.run([*command, "-lm"], check=True, stderr=subprocess.DEVNULL)
        variables = {**os.environ, "WINEPREFIX": str(folder / "wine"), "WINEDEBUG": "-all"}
        self._process = subprocess.Popen(
            [emulated.emulator, program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=variables,
        )
        self._memory = os.open("/proc/self/mem", os.O_RDWR)
        self._lock = threading.Lock()
        for number, (name, (arguments, result)) in enumerate(_SIGNATURES.items()):
            setattr(self, name, self._function(number, arguments, result))

    def _function(self, number: int, arguments: list[Any], kind: Any) -> Callable[..., int | None]:
        reals = [place for place, wanted in enumerate(arguments) if wanted is ctypes.c_float]

        def call(*given: Any) -> int | None:
            assert len(given) == len(arguments)
            values = [
                _bits(value) if place in reals else _integer(value)
                for place, value in enumerate(given)
            ]
            values += [0] * (_ARGUMENTS - len(values))
            frame = struct.pack(f"<{2 + _ARGUMENTS}q", number, *(reals or [-1]), *values)
            with self._lock:
                try:
                    result = self._served(frame)
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
                self._write(self._lent(value))
            else:
                before, after = (np.frombuffer(self._read(self._size), np.uint8) for _ in range(2))
                changed = np.flatnonzero(np.diff(before != after, prepend=False, append=False))
                # Other threads may change the other bytes.
                for begin, end in changed.reshape(-1, 2):
                    os.pwrite(self._memory, after[begin:end].tobytes(), value + int(begin))

    def _lent(self, address: int) -> bytes:
        """Return the page at an address. Raises OSError if nothing lies at the address.

        A page of the emulated system may have pages of this system at which nothing lies.
        """
        os.pread(self._memory, 1, address)
        first, pages = address // self._size * self._size, []
        for at in range(first, first + self._size, _OF_THE_SYSTEM):
            try:
                pages.append(os.pread(self._memory, _OF_THE_SYSTEM, at))
            except OSError:
                pages.append(bytes(_OF_THE_SYSTEM))
        return b"".join(pages)

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
    if hasattr(value, "_obj"):  # of ctypes.byref
        return ctypes.addressof(value._obj)
    return value or 0


def _bits(value: float) -> int:
    bits: int
    (bits,) = struct.unpack("<q", struct.pack("<fi", value, 0))
    return bits


_folder = tempfile.TemporaryDirectory(prefix="attnlm-emulated-", ignore_cleanup_errors=True)
_libraries: list[_Library] = []


def pytest_configure() -> None:
    """Take the place of the kernels of this processor."""
    emulated = EMULATED[os.environ["ATTNLM_EMULATED"]]
    _libraries.append(library := _Library(emulated, Path(_folder.name)))
    native.instruction_sets = lambda: (emulated.instruction_set,)
    native.load = lambda name: library  # type: ignore[assignment]


def pytest_unconfigure() -> None:
    """End the emulated program."""
    for library in _libraries:
        library.end()
    _folder.cleanup()
