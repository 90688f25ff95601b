"""Settings of PyTorch that belong to the program around attnlm, such as a notebook's."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_lock = threading.Lock()
_inside = 0
"""the calls that compute now, of all threads"""
_dtype: Any = None
"""the program's default dtype, during these calls"""


@contextlib.contextmanager
def usual_torch_settings() -> Iterator[None]:
    """PyTorch as it is when it is imported: float32 on the CPU, with gradients, without autocast.

    The settings of the program are restored afterwards. The default dtype is one for all threads:
    it is restored when the last of them leaves. Nothing happens before torch is imported.
    """
    global _inside, _dtype
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        for device in ("cpu", "cuda", "mps"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        with _lock:
            if _inside == 0:
                _dtype = torch.get_default_dtype()
            _inside += 1
            torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            with _lock:
                _inside -= 1
                if _inside == 0:
                    torch.set_default_dtype(_dtype)


@functools.cache
def with_usual_torch_settings(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that computes with them, also each item of an iterator that it returns."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        with usual_torch_settings():
            result = function(*args, **kwargs)
        return _each(result) if isinstance(result, Iterator) else result  # type: ignore[return-value]

    # attnlm.NAME is this function: pickle finds it there.
    called.__module__, called.__qualname__ = "attnlm", function.__name__
    return called


def _each(items: Iterator[Any]) -> Iterator[Any]:
    while True:
        with usual_torch_settings():
            try:
                item = next(items)
            except StopIteration:
                return
        yield item
