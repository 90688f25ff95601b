"""Devices and precisions, chosen by small trials."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.suggestions import suggestion
from attnlm.compute.processes import local_count

if TYPE_CHECKING:
    import torch

# Parameters of mallopt(3), in bytes.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
DEVICES = ("auto", "cpu", "cuda", "mps")


@dataclass(frozen=True)
class Device:
    """A device that works, the precision of its matmuls, and why it was chosen."""

    name: str
    dtype: str
    reason: str = ""

    @property
    def torch(self) -> torch.device:
        import torch

        return torch.device(self.name)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which matmuls of float32 weights compute in bfloat16.

        If `dtype` is not bfloat16, the context does nothing.
        """
        if self.dtype != "bfloat16":
            return contextlib.nullcontext()
        import torch

        return torch.autocast(self.name, dtype=torch.bfloat16)


def choose_device(device: str = "auto", dtype: str = "auto") -> Device:
    """Return the requested device, or the first of cuda, mps and cpu that can train.

    Raises AttnlmError if the requested device is missing, fails a small trial, or lacks the
    requested precision; UsageError if `device` is not one of DEVICES.
    """
    if device not in DEVICES:
        hint = suggestion(str(device), DEVICES, f"choose from {', '.join(DEVICES)}")
        raise UsageError(f"invalid value for `device`: {device!r}", hint)
    import torch

    failures = []
    for name in ("cuda", "mps") if device == "auto" else (device,):
        problem = _reason_against(name)
        if problem is None:
            count = local_count()
            # NCCL refuses processes that share a GPU.
            if name == "cuda" and count > (gpus := max(1, torch.cuda.device_count())):
                raise AttnlmError(
                    f"{count} processes cannot share {gpus} GPU{'s' if gpus > 1 else ''}",
                    "start one process per GPU, or use `device` cpu",
                )
            reason = "requested"
            if device == "auto":
                reason = torch.cuda.get_device_name() if name == "cuda" else "Apple GPU"
            return Device(name, _choose_dtype(name, dtype), reason)
        failures.append(f"{name}: {problem}")
    if device != "auto":
        raise AttnlmError(
            f"`device` {device} cannot be used: {problem}", "leave it out, or use cpu"
        )
    return Device("cpu", _choose_dtype("cpu", dtype), "; ".join(failures))


def has_gpu_driver() -> bool:
    """Return False if PyTorch, which takes seconds to import, would find no GPU."""
    if sys.platform == "linux":
        drivers = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # NVIDIA's, that of Windows, AMD's
        return any(map(os.path.exists, drivers))
    return True


def try_devices() -> dict[str, str | None]:
    """Return for each device why the device can't train, or None if a small trial succeeded."""
    return {device: _reason_against(device) for device in DEVICES if device != "auto"}


def use_precision(device: Device) -> None:
    """Let CUDA's float32 matmuls use TF32 if `device.dtype` is tf32, else full precision."""
    if device.name == "cuda":
        import torch

        torch.set_float32_matmul_precision("high" if device.dtype == "tf32" else "highest")


def _reason_against(device: str) -> str | None:
    """Return in a few words why a device can't train, or None if a small trial succeeded."""
    import torch
    from torch.nn import functional as F

    if device == "cuda" and not torch.cuda.is_available():
        return "not available"
    if device == "mps" and not torch.backends.mps.is_available():
        return "not available"
    try:
        with torch.inference_mode(False), torch.enable_grad():  # whatever the caller's mode
            weight = torch.ones(8, 8, device=device, requires_grad=True)
            tokens = torch.arange(8, device=device)
            F.cross_entropy(F.embedding(tokens, weight) @ weight, tokens).backward()
        gradient = weight.grad
        if gradient is None or not bool(gradient.isfinite().all()):
            return "a small trial gave wrong numbers"
    except (RuntimeError, AssertionError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return f"a small trial failed ({reason})"
    return None


def _choose_dtype(device: str, dtype: str) -> str:
    import torch

    # GPUs before Ampere emulate bfloat16, which is slower than float32.
    ampere = device == "cuda" and torch.cuda.get_device_capability() >= (8, 0)
    if dtype == "tf32" and not ampere:
        raise AttnlmError(
            f"`dtype` tf32 needs an NVIDIA GPU (Ampere or later), but the device is {device}",
            "leave `dtype` out",
        )
    if dtype != "auto":
        return dtype
    return "bfloat16" if ampere else "float32"


@functools.cache
def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the tensors of the next step.

    By default, glibc returns large blocks of memory to the system. Using the memory again causes
    page faults, in which the system clears the memory. The page faults took a tenth of the time of
    a step. On systems without glibc, this function does nothing.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, 2**25)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def machine_memory() -> int | None:
    """Return the machine's memory in bytes, or None when the system does not report it."""
    if sys.platform == "win32":
        return None
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
