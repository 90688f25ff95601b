"""The user's own modules in a model of ours: made, called, and their outputs checked.

Axes are as in layers.py.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.own_code import OwnCode, OwnCodeError
from attnlm.base.setting_fields import Settings
from attnlm.model.own_arguments import code_arguments, resolved_arguments

if TYPE_CHECKING:
    from attnlm.model.architecture import Architecture


class OwnPart(nn.Module):
    """A part of the user's: attention or MLP, (B, T, C) → (B, T, C), or scores.

    Scores are queries and keys, (B, H, T, D) each → (B, H, T, T), before mask and softmax.
    """

    def __init__(self, code: OwnCode, module: nn.Module, is_scores: bool) -> None:
        super().__init__()
        self.module = module
        self._code = code
        self._is_scores = is_scores

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        """Return the module's output, the first if it has several. `others` are keys or, for
        attention, rotation and cache, of which it knows nothing."""
        inputs = (x, others[0]) if self._is_scores else (x,)
        with on_device_of(x):
            y = self.module(*inputs)
        y = y[0] if isinstance(y, tuple) else y
        width = inputs[-1].size(2) if self._is_scores else x.size(-1)
        return require_shape(self._code, y, (*x.shape[:-1], width))


def own_part(a: Architecture, kind: str, layer: int) -> OwnPart:
    """Return a new part of the user's for a layer: attention, scores or mlp.

    Raises UsageError if it does not take what it will get.
    """
    code = a.codes[kind]
    sizes = {"embed_dim": a.width, "heads": a.heads, "block_size": a.block_size, "layer": layer}
    if kind == "scores":
        sizes["head_size"] = a.head_dim
    module = build_module(code, sizes, resolved_arguments(a.codes, a.arguments))
    inputs = ("query", "key") if kind == "scores" else ("x",)
    try:
        inspect.signature(module.forward).bind(*inputs)
    except TypeError as error:
        raise UsageError(
            f"{code} does not fit `{kind}`: forward({', '.join(inputs)}): {error}",
            "`scores` get query and key, `attention` and `mlp` get x: choose among them",
        ) from None
    return OwnPart(code, module, kind == "scores")


def build_module(code: OwnCode, sizes: Mapping[str, Any], arguments: Settings) -> nn.Module:
    """Call own code with those of `sizes` and `arguments` that it names, and return its module.

    Raises UsageError for an argument that attnlm does not give, and AttnlmError if the code does
    not return a module.
    """
    called = code.check_call(arguments)
    parameters = code_arguments(code)
    for name, parameter in parameters.items():
        is_variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not is_variable and name not in sizes:
            raise UsageError(
                f"{code} needs the argument {name}, which attnlm does not give",
                f"give it a default, or use some of {', '.join(sizes)}",
            )
    values = {**arguments, **sizes}
    with contextlib.redirect_stdout(sys.stderr):  # results alone go to stdout
        module = called(**{name: values[name] for name in parameters if name in values})
    if not isinstance(module, nn.Module):
        raise AttnlmError(
            f"{code} returns {type(module).__name__}, not a module", "return a torch.nn.Module"
        )
    owner = object()  # of parameters: other runs would train those that several modules share
    for name, tensor in module.named_parameters():
        if tensor.dtype != torch.float32:
            raise AttnlmError(
                f"{code}: the parameter {name} is of type {tensor.dtype}",
                "make it torch.float32; use a buffer for what is not trained",
            )
        if vars(tensor).setdefault("attnlm_owner", owner) is not owner:
            raise AttnlmError(
                f"{code}: the parameter {name} exists before the module, and others share it",
                "make it in the constructor",
            )
    for name, buffer in module.named_buffers():
        first = vars(buffer).setdefault("attnlm_first", None)
        if first is None:
            vars(buffer)["attnlm_first"] = buffer.detach().clone()
        elif not torch.equal(first, buffer):
            raise AttnlmError(
                f"{code}: the buffer {name} exists before the module, and another one changed it",
                "make it in the constructor",
            )
    return module


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context in which own code makes new tensors on the device of x.

    Own code often names no device, as in `torch.arange(T)`, which then works on a GPU too.
    torch.compile would not compile code inside of the context: the training step has it outside.
    """
    if x.is_cpu or x.is_meta or torch.compiler.is_compiling():
        return contextlib.nullcontext()
    return x.device


def require_shape(code: OwnCode, output: object, shape: tuple[int, ...]) -> Tensor:
    """Return the output of own code. Raises OwnCodeError unless it is a tensor of this shape."""
    if isinstance(output, Tensor) and output.shape == shape:
        return output
    actual = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    raise OwnCodeError(
        f"{code} returns {actual}, and the model needs {shape}", "change what it returns"
    )
