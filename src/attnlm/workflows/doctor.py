"""Examine a machine for what attnlm needs: what is present, what is missing, and the remedies."""

from __future__ import annotations

import importlib.metadata
import locale
import os
import platform
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import attnlm
from attnlm.base.caches import cache_folder
from attnlm.base.errors import AttnlmError
from attnlm.base.events import Note, OnEvent, ignore
from attnlm.base.folders import folder_size
from attnlm.base.formatting import quantity
from attnlm.text.corpus import TINY_SHAKESPEARE_URL

_PACKAGES = ("numpy", "safetensors", "tiktoken", "tokenizers", "typer", "matplotlib", "requests")
_PATIENCE = 3.0  # seconds for the network
_FREE = 10**9  # bytes: a disk with less free space is soon full


@dataclass(frozen=True)
class Finding:
    """A fact about the machine, in one line. A finding with a remedy is a problem."""

    name: str
    text: str
    remedy: str = ""
    is_fatal: bool = False
    """True if attnlm can't train because of the problem."""


def doctor(*, offline: bool = False, on_event: OnEvent | None = None) -> Iterator[Finding]:
    """Examine this machine in about six seconds, and yield a finding for each thing examined.

        problems = [finding for finding in attnlm.doctor(offline=True) if finding.remedy]

    Examines versions, devices, threads, kernels, caches, disk, network (not if `offline`), locale,
    the speed of ten steps, and whether the kernels that rules choose are the faster ones here.
    `on_event` receives a Note before the ten steps. An examination that fails yields a finding.
    """
    yield from _run_examination("versions", _check_versions)
    remedy = "uninstall torch, then install it again, as pytorch.org says for this system"
    torch = list(_run_examination("PyTorch", _check_torch, remedy))
    yield from torch
    is_there = not any(finding.is_fatal for finding in torch)
    if is_there:
        yield from _run_examination("device", _check_devices)
        yield from _run_examination("threads", _check_threads)
        yield from _run_examination("kernels", _check_kernels)
    yield from _run_examination("caches", _check_caches)
    yield from _run_examination("disk", _check_disk)
    if not offline:
        yield from _run_examination("network", _check_network)
    yield from _run_examination("locale", _check_locale)
    if is_there:
        (on_event or ignore)(Note("training a small transformer for ten steps"))
        yield from _run_examination("speed", _check_speed)
        yield from _run_examination("choices", _check_kernel_choices)


def _run_examination(
    name: str, examine: Callable[[], Iterator[Finding]], remedy: str = ""
) -> Iterator[Finding]:
    """Yield the findings, or a finding that the examination failed: a fatal one with a `remedy`."""
    try:
        yield from examine()
    except AttnlmError as error:
        yield Finding(name, error.message, error.hint)
    except Exception as error:  # noqa: BLE001 - a machine may be broken in any way
        message = next(iter(str(error).splitlines()), "")
        text = f"check failed: {type(error).__name__}: {message}"
        yield Finding(name, text, remedy, is_fatal=bool(remedy))


def _check_versions() -> Iterator[Finding]:
    yield Finding("attnlm", f"{attnlm.__version__}, in {Path(attnlm.__file__).parent}")
    yield Finding("Python", f"{platform.python_version()}, {platform.platform()}")
    installed = {dist.name: dist.version for dist in importlib.metadata.distributions()}
    versions = [f"{package} {installed.get(package, 'is missing')}" for package in _PACKAGES]
    remedy = "" if installed.keys() >= set(_PACKAGES) else "install attnlm again"
    yield Finding("packages", ", ".join(versions), remedy, is_fatal=bool(remedy))


def _check_torch() -> Iterator[Finding]:
    import torch

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    yield Finding("PyTorch", f"{torch.__version__}, built {built}")


def _check_devices() -> Iterator[Finding]:
    import torch

    from attnlm.compute.device import choose_device, try_devices

    tried = try_devices()
    chosen = choose_device()
    yield Finding("device", f"{chosen.name}, {chosen.dtype}: the first to pass a small trial")
    is_there = Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi") is not None
    for name, problem in tried.items():
        remedy = ""
        if problem is not None and "small trial" in problem:
            other = "use `device` cpu, and look for a newer PyTorch or driver"
            remedy = f"{other}: {name} computes wrongly"
        elif problem is not None and name == "cuda" and is_there:
            remedy = "there is an NVIDIA GPU: update its driver, or unset CUDA_VISIBLE_DEVICES"
            if torch.version.cuda is None:
                remedy = "there is an NVIDIA GPU: install PyTorch with CUDA, from pytorch.org"
        yield Finding(name, problem or "works", remedy)


def _check_threads() -> Iterator[Finding]:
    import torch

    cores = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    threads = torch.get_num_threads()
    named = os.environ.get("OMP_NUM_THREADS")
    text = f"PyTorch uses {threads}; this process may use {allowed} of {cores} processors"
    remedy = ""
    if threads > allowed:
        remedy = f"more threads than processors slow each other down: set OMP_NUM_THREADS={allowed}"
    elif named is not None and threads < allowed // 2:
        remedy = f"OMP_NUM_THREADS is {named}: unset it to use all processors"
    yield Finding("threads", text, remedy)


def _check_kernels() -> Iterator[Finding]:
    from attnlm.compute.native import instruction_set, instruction_sets, native_library

    name = instruction_set()
    possible = instruction_sets()
    remedy = ""
    if possible == ("none",):
        text = "there are no kernels in C for this kind of processor: training is slower"
    elif name == "none":
        text = "switched off by ATTNLM_KERNELS"
        remedy = "unset ATTNLM_KERNELS: small models then train and sample several times as fast"
    elif native_library() is None:
        text = f"the kernels for {name} are missing or cannot be loaded: training is slower"
        remedy = "install attnlm again, from a wheel, or from source with a network or gcc or clang"
    else:
        text = f"{name}, from {', '.join(possible)}"
    yield Finding("kernels", text, remedy)


def _check_caches() -> Iterator[Finding]:
    folder = cache_folder()
    if folder is None:
        yield Finding("cache", "no home folder", "set ATTNLM_CACHE_DIR to a folder of yours")
        return
    parts = [
        f"{path.name} {quantity(folder_size(path) if path.is_dir() else path.stat().st_size, 'B')}"
        for path in (sorted(folder.iterdir()) if folder.is_dir() else ())
    ]
    remedy = _if_not_writable(folder, "set ATTNLM_CACHE_DIR to one that is")
    yield Finding("cache", f"{folder}: {', '.join(parts) or 'empty'}", remedy)


def _if_not_writable(folder: Path, remedy: str) -> str:
    """Return the remedy unless a file can be created in the folder, which is created if missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError:
        return f"this folder is not writable: {remedy}"


def _check_disk() -> Iterator[Finding]:
    for name, folder in (("disk here", Path.cwd()), ("disk (temp)", Path(tempfile.gettempdir()))):
        free = shutil.disk_usage(folder).free
        remedy = _if_not_writable(folder, "change to one that is, or set TMPDIR")
        if free < _FREE and not remedy:
            remedy = "free some space: a new checkpoint is written before the old one is deleted"
        yield Finding(name, f"{folder}, {quantity(free, 'B')} free", remedy)


def _check_network() -> Iterator[Finding]:
    import requests

    host = urlsplit(os.environ.get("ATTNLM_TINYSHAKESPEARE_URL") or TINY_SHAKESPEARE_URL)
    answers: list[str] = []

    def ask() -> None:
        try:
            requests.head(f"{host.scheme}://{host.netloc}/", timeout=_PATIENCE)
            answers.append("")
        except (requests.RequestException, OSError, ValueError) as error:
            answers.append(type(error).__name__)

    # The timeout of requests does not limit the lookup of the host's name.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_PATIENCE)
    if answers == [""]:
        yield Finding("network", f"{host.hostname} is reachable")
        return
    why = f" ({answers[0]})" if answers else f" in {_PATIENCE:g} s"
    remedy = "attnlm works without it: use `attnlm prepare tales`, or your own file"
    yield Finding("network", f"{host.hostname} is not reachable{why}", remedy)


def _check_locale() -> Iterator[Finding]:
    encoding = locale.getpreferredencoding(False)
    files = sys.getfilesystemencoding()
    is_unicode = {name.lower().replace("-", "") for name in (encoding, files)} == {"utf8"}
    remedy = "" if is_unicode else "file names may be shown wrongly: set LC_ALL=C.UTF-8"
    yield Finding("locale", f"{encoding}, file names {files}; output is always UTF-8", remedy)


def _check_kernel_choices() -> Iterator[Finding]:
    from attnlm.workflows.speed_check import compare_kernels

    for name, text, remedy in compare_kernels():
        yield Finding(name, text, remedy)


def _check_speed() -> Iterator[Finding]:
    from attnlm.workflows.speed_check import check_speed

    yield Finding("speed", *check_speed())
