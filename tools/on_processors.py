"""`python -m tools.on_processors [--short] [NAME…]`: numerical tests on other processors.

With --short, as in CI, at most four cases of each test function (tools/four_cases.py).
Prints one line for each environment: what passed, or why it was skipped. Ends with 1 if any failed.
The libraries that PyTorch computes with, and the kernels, are limited to the instructions of older
processors, or the kernels are compiled by zig, as in wheels. ARM64 and
Windows are emulated, for the kernels alone (tools/emulated).
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
import time
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import torch

from hatch_build import ZIG
from tools.compile_kernels import compile_copy
from tools.emulated import EMULATED

_ROOT = Path(__file__).parent.parent
_OF_C = (
    *("model/test_ops", "model/test_block", "generation/test_native_decoder"),
    "training/test_one_layer",
)
_ALL = (
    *_OF_C,
    "model/test_textbook",
    *("training/test_golden_losses", "training/test_replicas", "model/test_tolerances"),
    *("model/test_attention", "training/test_optimizer"),
)
_TESTS = (
    *(f"tests/{name}.py" for name in _OF_C),
    "tests/model/test_textbook.py::test_compiled_parts_give_the_gradients_up_to_rounding",
)
_ALL_TESTS = (
    *(f"tests/{name}.py" for name in _ALL),
    "tests/training/test_training.py::test_a_resumed_run_equals_an_uninterrupted_one",
)
_WORKERS = "2"
_LEFT_OUT = "not sanitizers"  # they say the same everywhere, and take half a minute
_FOUND = """
from torch.backends.cpu import get_cpu_capability
from attnlm.compute.native import native_library
native = native_library()
print(0 if native is None else native.attention_lanes(), get_cpu_capability())
"""


class Environment(NamedTuple):
    """Limits by environment variables, and their expected effect."""

    limits: tuple[str, ...] = ()
    """The values of _LIMITS, if any."""
    lanes: int | None = None
    """The floats in a vector of the kernels; 0 without kernels."""
    capability: str | None = None
    kernels: str = ""
    """The value of ATTNLM_KERNELS."""


_LIMITS = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")
ENVIRONMENTS = {
    "this processor": Environment(),
    "AVX2": Environment(("avx2", "AVX2", "AVX2"), 8, "AVX2"),
    "SSE": Environment(("default", "SSE4_2", "SSE41"), 4, "DEFAULT"),
    "no kernels": Environment(lanes=0, kernels="none"),
    "zig": Environment(),
    "ARM64": Environment(lanes=0, kernels="none"),
    "Windows": Environment(lanes=0, kernels="none"),
}


def skipped(name: str) -> str | None:
    """Return why nothing can be said about an environment here."""
    one = ENVIRONMENTS[name]
    if one.limits and platform.machine() != "x86_64":
        return f"this is {platform.machine()}"
    if name == "AVX2" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        return "this processor has no AVX-512, so `make test` computes the same"
    if name in ("zig", "Windows") and importlib.util.find_spec("ziglang") is None:
        return "zig is not installed; `make package` installs it"
    if name not in EMULATED:
        return None
    programs = EMULATED[name].compiler[0], EMULATED[name].emulator
    missing = [program for program in programs if shutil.which(program) is None]
    return f"there is no {' and no '.join(missing)}" if missing else None


def outcome(name: str, folder: Path, *, short: bool = False) -> tuple[bool, str]:
    """Run the tests in an environment; return whether they pass, and a line about them."""
    one, tests, left_out = ENVIRONMENTS[name], _ALL_TESTS, _LEFT_OUT
    variables = limited(name, folder)
    plugins = ["tools.four_cases"] * short
    if wrong := _not_as_wanted(one, variables):
        return False, wrong
    if name in EMULATED:
        variables |= {"ATTNLM_KERNELS": "", "ATTNLM_EMULATED": name}
        plugins.append("tools.emulated")
        tests = _TESTS
        left_out += " and not does_not_depend_on_the_others"  # 100,000 tokens
    variables["PYTEST_PLUGINS"] = ",".join(plugins)
    options = ["-m", "not slow", "-k", left_out, "-p", "no:cacheprovider", "-n", _WORKERS]
    options += ["--timeout", "900"]  # an emulator is slow
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"--junitxml={folder}/found.xml", *tests],
        cwd=_ROOT,
        env=variables,
        capture_output=True,
        text=True,
    )
    if done.returncode > 1 or not (folder / "found.xml").exists():
        return False, f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-300:]!r}"
    suite = ElementTree.parse(folder / "found.xml").getroot()[0]
    cases = [case for kind in ("failure", "error") for case in suite.iterfind(f"testcase[{kind}]")]
    failed = [f"{case.get('classname')}::{case.get('name')}" for case in cases]
    not_run = int(suite.get("skipped", 0))
    passed = int(suite.get("tests", 0)) - not_run - len(failed)
    line = f"{passed} passed, {len(failed)} failed, {not_run} skipped"
    return done.returncode == 0, "\n    ".join([line, *failed])


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
    lanes, capability = done.stdout.split()
    if one.lanes is None and lanes == "0":
        return "there are no kernels"
    if one.lanes is not None and int(lanes) != one.lanes:
        return f"the kernels have {lanes} lanes, not {one.lanes}"
    if one.capability is not None and capability != one.capability:
        return f"PyTorch takes {capability}, not {one.capability}"
    return ""


def main() -> int:
    """Return 1 if any environment's tests failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.on_processors")
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *ENVIRONMENTS])
    parser.add_argument("--short", action="store_true", help="few cases of each test")
    arguments, failed = parser.parse_args(), False
    (_ROOT / "build").mkdir(exist_ok=True)
    for name in arguments.names or ENVIRONMENTS:
        began = time.perf_counter()
        if reason := skipped(name):
            print(f"{name}: skipped, {reason}", flush=True)
            continue
        with tempfile.TemporaryDirectory(prefix="processors-", dir=_ROOT / "build") as folder:
            passes, line = outcome(name, Path(folder), short=arguments.short)
        failed |= not passes
        first, *more = line.splitlines()
        print(f"{name}: {first}, {time.perf_counter() - began:.0f} s", *more, sep="\n", flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
