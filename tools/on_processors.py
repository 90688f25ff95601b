"""`python -m tools.on_processors [--short] [NAME…]`: numerical tests on other processors.

With --short, as in CI, without the variants of models that `make test` leaves out. Prints one line
for each environment: what passed, or why it was skipped. Ends with 1 if any failed.
The libraries that PyTorch computes with, and the kernels, are limited to the instructions of older
processors, or the kernels are compiled by zig, as in wheels. ARM64 and Windows are emulated, for
the kernels alone (tools/emulated).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from hatch_build import ZIG
from tools.compile_kernels import compile_copy
from tools.emulated import EMULATED

_ROOT = Path(__file__).parent.parent
_OF_C = (
    "tests/model/test_block.py",
    "tests/generation/test_native_decoder.py",
    "tests/training/test_one_layer.py",
)
_TESTS = (
    *_OF_C,
    "tests/model/test_textbook.py",
    "tests/training/test_golden_losses.py",
    "tests/training/test_replicas.py",
    "tests/training/test_optimizer.py",
    "tests/training/test_training.py::test_a_resumed_run_equals_an_uninterrupted_one",
)
_TESTS_EMULATED = _OF_C
_MARKS = "not slow and not compilers"
_WORKERS = "2"
_FOUND = """
from torch.backends.cpu import get_cpu_capability
from attnlm.compute.native import instruction_set, native_library
print("none" if native_library() is None else instruction_set(), get_cpu_capability())
"""


class Environment(NamedTuple):
    """Limits by environment variables, and their expected effect."""

    limits: tuple[str, ...] = ()
    """The values of _LIMITS, if any."""
    found: str | None = None
    """The instruction set of the kernels; "none" without kernels."""
    capability: str | None = None
    kernels: str = ""
    """The value of ATTNLM_KERNELS."""


_LIMITS = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")
_WITHOUT_KERNELS = Environment(found="none", kernels="none")
ENVIRONMENTS = {
    "this processor": Environment(),
    "AVX2": Environment(("avx2", "AVX2", "AVX2"), "avx2", "AVX2"),
    "SSE": Environment(("default", "SSE4_2", "SSE41"), "sse4.2", "DEFAULT"),
    "no kernels": _WITHOUT_KERNELS,
    "zig": Environment(),
    **dict.fromkeys(EMULATED, _WITHOUT_KERNELS),  # until the plugin puts the emulated ones there
}


def skipped(name: str) -> str | None:
    """Return why nothing can be said about an environment here."""
    if ENVIRONMENTS[name].limits and platform.machine() != "x86_64":
        return f"this is {platform.machine()}"
    if name == "AVX2" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        return "this processor has no AVX-512, so `make test` computes the same"
    if name in ("zig", "Windows") and importlib.util.find_spec("ziglang") is None:
        return "zig is not installed; `make package` installs it"
    emulated = EMULATED.get(name)
    programs = (emulated.compiler[0], emulated.emulator) if emulated else ()
    missing = [program for program in programs if shutil.which(program) is None]
    return f"there is no {' and no '.join(missing)}" if missing else None


def outcome(name: str, folder: Path, *, short: bool = False) -> tuple[bool, str]:
    """Run the tests in an environment; return whether they pass, and lines about them."""
    variables = limited(name, folder)
    tests: Sequence[str] = _TESTS
    if wrong := _not_as_wanted(ENVIRONMENTS[name], variables):
        return False, wrong
    options = ["-m", _MARKS + " and not variants" * short, "-p", "no:cacheprovider", "-n", _WORKERS]
    options += ["--tb=no", "-rfE", "--timeout", "900"]  # an emulator is slow
    if name in EMULATED:
        variables |= {"ATTNLM_KERNELS": "", "ATTNLM_EMULATED": name}
        variables["PYTEST_PLUGINS"] = "tools.emulated"
        options += ["-k", "not does_not_depend_on_the_others"]  # 100,000 tokens
        tests = _TESTS_EMULATED
    command = [sys.executable, "-m", "pytest", *options, *tests]
    done = subprocess.run(command, cwd=_ROOT, env=variables, capture_output=True, text=True)
    if done.returncode > 1:
        return False, f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-300:]!r}"
    *lines, total = done.stdout.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return done.returncode == 0, "\n    ".join([total.strip("= "), *failed])


def limited(name: str, folder: Path) -> dict[str, str]:
    """Return the variables of an environment. A copy of the package, if any, lies in `folder`."""
    one = ENVIRONMENTS[name]
    variables = {**os.environ, "ATTNLM_KERNELS": one.kernels}
    variables.update(zip(_LIMITS, one.limits, strict=False))
    if name == "zig":
        shutil.copytree(_ROOT / "src", folder / "src")
        compile_copy(folder / "src" / "attnlm", ZIG)
        variables["PYTHONPATH"] = str(folder / "src")
    return variables


def _not_as_wanted(one: Environment, variables: dict[str, str]) -> str:
    """Return which limit has no effect: the same code would be tested twice."""
    command = [sys.executable, "-c", _FOUND]
    done = subprocess.run(command, cwd=_ROOT, env=variables, capture_output=True, text=True)
    if done.returncode != 0:
        return f"attnlm fails: {done.stderr.strip().splitlines()[-1]}"
    found, capability = done.stdout.split()
    if one.found is None and found == "none":
        return "there are no kernels"
    if one.found is not None and found != one.found:
        return f"the kernels are those for {found}, not {one.found}"
    if one.capability is not None and capability != one.capability:
        return f"PyTorch takes {capability}, not {one.capability}"
    return ""


def main() -> int:
    """Return 1 if any environment's tests failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.on_processors")
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *ENVIRONMENTS])
    parser.add_argument("--short", action="store_true", help="without more variants of models")
    arguments, failed = parser.parse_args(), False
    (_ROOT / "build").mkdir(exist_ok=True)
    for name in arguments.names or ENVIRONMENTS:
        if reason := skipped(name):
            print(f"{name}: skipped, {reason}", flush=True)
            continue
        with tempfile.TemporaryDirectory(prefix="processors-", dir=_ROOT / "build") as folder:
            passes, lines = outcome(name, Path(folder), short=arguments.short)
        failed |= not passes
        print(f"{name}: {lines}", flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
