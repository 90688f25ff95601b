"""Examine a machine for what attnlm needs: what is present, what is missing, and the remedies."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import attnlm
from attnlm.base.errors import AttnlmError
from attnlm.base.folders import cache_folder, writable_cache
from attnlm.base.formatting import quantity

_PACKAGES = (
    "numpy", "safetensors", "tiktoken", "tokenizers", "typer", "rich", "tqdm", "matplotlib",
    "requests", "filelock",
)  # fmt: skip
_FREE = 10**9  # bytes: a disk with less free space is soon full


@dataclass(frozen=True)
class Finding:
    """A fact about the machine, in one line. A finding with a remedy is a problem."""

    name: str
    text: str
    remedy: str = ""
    is_fatal: bool = False
    """True if attnlm can't train because of the problem."""


def doctor() -> Iterator[Finding]:
    """Examine versions, folders, devices, memory and kernels in C; yield a finding for each.

        problems = [finding for finding in attnlm.doctor() if finding.remedy]

    An examination that fails yields a finding.
    """
    for name, examine, remedy in (
        ("packages", _check_packages, ""),
        ("folders", _check_folders, ""),
        ("PyTorch", _check_torch, "install torch again, as pytorch.org says for this system"),
    ):
        try:
            yield from examine()
        except AttnlmError as error:
            yield Finding(name, error.message, error.hint)
        except Exception as error:  # noqa: BLE001 - a machine may be broken in any way
            text = f"check failed: {type(error).__name__}: {''.join(str(error).splitlines()[:1])}"
            yield Finding(name, text, remedy, is_fatal=bool(remedy))


def _check_packages() -> Iterator[Finding]:
    yield Finding("attnlm", f"{attnlm.__version__}, in {Path(attnlm.__file__).parent}")
    yield Finding("Python", f"{platform.python_version()}, {platform.platform()}")
    installed = {dist.name: dist.version for dist in importlib.metadata.distributions()}
    versions = [f"{package} {installed.get(package, 'is missing')}" for package in _PACKAGES]
    remedy = "" if installed.keys() >= set(_PACKAGES) else "install attnlm again"
    yield Finding("packages", ", ".join(versions), remedy, is_fatal=bool(remedy))


def _check_folders() -> Iterator[Finding]:
    here, cache = Path.cwd(), writable_cache()
    if not os.access(here, os.W_OK):
        yield Finding("folder", f"{here} is not writable", "change to another folder")
    if cache is None:
        another = "set ATTNLM_CACHE_DIR to a folder that is"
        yield Finding("cache", f"{cache_folder() or 'no home folder'} is not writable", another)
    for name, folder in (("folder", here), ("temporary", tempfile.gettempdir()), ("cache", cache)):
        if folder is not None:
            free = shutil.disk_usage(folder).free
            remedy = "free some space: training fills it" if free < _FREE else ""
            yield Finding(name, f"{folder}, {quantity(free, 'B')} free", remedy)


def _check_torch() -> Iterator[Finding]:
    import torch

    from attnlm.compute.device import choose_device, machine_memory, try_devices
    from attnlm.compute.native import instruction_set, instruction_sets, native_library

    yield Finding("PyTorch", f"{torch.__version__}, CUDA {torch.version.cuda or 'is not built in'}")
    yield Finding("device", f"{choose_device().name}, the first that can train")
    for name, problem in try_devices().items():
        remedy = ""
        if problem is not None and "small trial" in problem:
            remedy = f"{name} computes wrongly: use `device` cpu, or another PyTorch or driver"
        elif problem is not None and name == "cuda" and shutil.which("nvidia-smi"):
            remedy = "there is an NVIDIA GPU: update its driver, or install PyTorch with CUDA"
        yield Finding(name, problem or "works", remedy)
    memory = machine_memory()
    yield Finding("memory", "unknown" if memory is None else quantity(memory, "B"))
    kernels, possible, remedy = instruction_set(), instruction_sets(), ""
    if native_library() is None and possible != ("none",):
        again = "install attnlm again, from a wheel, or with a network, gcc or clang"
        other = "unset ATTNLM_KERNELS" if kernels == "none" else again
        remedy = f"training is slower without kernels: {other}"
    yield Finding("kernels", f"{kernels}, from {', '.join(possible)}", remedy)
