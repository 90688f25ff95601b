"""The C files, compiled in ways that only tests need, with the flags of hatch_build.py."""

from __future__ import annotations

import subprocess
from pathlib import Path

from attnlm.compute import native
from hatch_build import FLAGS, compile_kernels, own_compiler

SOURCES = sorted(Path(native.__file__).parent.glob("*.c"))


def compile_native(compiler: str, path: Path, *flags: str) -> None:
    """Compile the C files into one shared library; later flags override the build's."""
    command = [compiler, *FLAGS, *flags, *map(str, SOURCES), "-o", str(path), "-lm"]
    subprocess.run(command, check=True)


def compile_copy(package: Path, command: list[str] | None = None) -> None:
    """Compile the kernels of a copy of the package again; by default, with this machine's compiler.

    Raises RuntimeError if that fails.
    """
    folder, command = package / "compute" / "native", command or own_compiler()
    if command is None or not compile_kernels(command, sorted(folder.glob("*.c")), folder):
        raise RuntimeError("the kernels cannot be compiled")
