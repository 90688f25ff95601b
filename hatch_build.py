"""Build hook of hatchling: compile the kernels in C, one library for each instruction set.

An install from source uses the machine's C compiler (CC, cc, gcc or clang) if that works, and else
zig, which pip downloads as a build requirement. If compiling fails, attnlm has no kernels.
ATTNLM_WHEEL names the platform tag of a wheel that is built with zig, on any system.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

NATIVE = Path("src", "attnlm", "compute", "native")
FLAGS = ["-O3", "-std=gnu11", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-ffp-contract=fast"]
ZIG = [sys.executable, "-m", "ziglang", "cc", "-fno-sanitize=all", "-s"]
# Platform tags of wheels: zig's name of the system, and the suffix of a shared library.
TARGETS = {
    "manylinux_2_28_x86_64": ("x86_64-linux-gnu.2.28", ".so"),
    "manylinux_2_28_aarch64": ("aarch64-linux-gnu.2.28", ".so"),
    "macosx_11_0_x86_64": ("x86_64-macos.11.0", ".dylib"),
    "macosx_11_0_arm64": ("aarch64-macos.11.0", ".dylib"),
    "win_amd64": ("x86_64-windows-gnu", ".dll"),
}
# Instruction sets, and flags for them. Without the last, clang computes vectors by halves.
X86 = {"sse4.2": "x86-64-v2", "avx2": "x86-64-v3", "avx512": "x86-64-v4 -mprefer-vector-width=512"}


def wanted_tag() -> str:
    """Return the platform tag of the wheel to build; TARGETS may lack that of this machine."""
    system = {"linux": "manylinux_2_28", "darwin": "macosx_11_0", "win32": "win"}.get(sys.platform)
    return os.environ.get("ATTNLM_WHEEL") or f"{system}_{platform.machine().lower()}"


def own_compiler() -> list[str] | None:
    """Return a C compiler of this machine that knows all flags, or None."""
    if "ATTNLM_WHEEL" in os.environ or sys.platform == "win32":
        return None
    for command in map(shlex.split, (os.environ.get("CC", ""), "cc", "gcc", "clang")):
        if command and shutil.which(command[0]):
            with tempfile.TemporaryDirectory() as folder:
                source = Path(folder, "test.c")
                source.write_text("#include <math.h>\n#include <pthread.h>\n")
                if compile_kernels(command, [source], Path(folder), stderr=subprocess.DEVNULL):
                    return command
    return None


def compile_kernels(command: list[str], files: list[Path], folder: Path, **how: Any) -> list[Path]:
    """Compile the libraries, side by side, into a folder; return their paths, or [] on failure."""
    target, suffix = TARGETS[wanted_tag()]
    is_x86, running = target.startswith("x86_64"), {}
    for name, processor in (X86 if is_x86 else {"neon": ""}).items():
        flags = f"-march={processor}".split() if is_x86 else []
        if command == ZIG:
            flags = ["-target", target, *(flag.replace("x86-64-", "x86_64_") for flag in flags)]
        path = folder / f"kernels-{name}{suffix}"
        words = [*command, *FLAGS, *flags, *map(str, files), "-o", path.name, "-lm"]
        running[path] = subprocess.Popen(words, cwd=folder, **how)  # macOS's contain this path
    failed = [path for path, process in running.items() if process.wait()]
    return [] if failed else list(running)


class KernelsHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the kernels to a wheel, or puts them beside their sources for an editable install."""

    def dependencies(self) -> list[str]:
        """Return zig as a build requirement, unless a compiler of this machine is used."""
        return ["ziglang>=0.15"] if wanted_tag() in TARGETS and own_compiler() is None else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the kernels, and tag the wheel with the system that they are for."""
        sources, wheel, made = Path(self.root, NATIVE), os.environ.get("ATTNLM_WHEEL"), []
        self.folder = tempfile.TemporaryDirectory(dir=sources if version == "editable" else None)
        if wanted_tag() in TARGETS:
            files, folder = sorted(sources.glob("*.c")), Path(self.folder.name)
            caches = {f"ZIG_{kind}_CACHE_DIR": str(folder / "zig") for kind in ("GLOBAL", "LOCAL")}
            made = compile_kernels(own_compiler() or ZIG, files, folder, env=caches | os.environ)
        if not made:
            self.app.display_warning("attnlm is installed without its kernels in C")
        elif version == "editable":
            for path in made:
                path.replace(sources / path.name)
        else:
            tag = f"py3-none-{wheel or next(platform_tags())}"
            build_data |= {"pure_python": False, "tag": tag}
            build_data["force_include"] |= {str(p): f"attnlm/compute/native/{p.name}" for p in made}

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary folder."""
        self.folder.cleanup()
