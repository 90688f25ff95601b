"""The forms of a model that compute a training step: (inputs, targets) → loss, gradient added.

The modules compute everything. A faster form shares the weights of the modules; it is chosen once,
by the setting `compile`, and only for a model that is as attnlm builds it.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from attnlm.base.folders import writable_cache
from attnlm.base.own_code import OwnCode
from attnlm.compute.device import Device
from attnlm.compute.native import native_library
from attnlm.config.settings import Config
from attnlm.config.training import TrainingConfig
from attnlm.model.inspection import is_as_built
from attnlm.model.language_model import LanguageModel, Transformer
from attnlm.model.layers import drop_by, faster_linear
from attnlm.model.native_block import has_native_blocks, with_native_blocks
from attnlm.model.own_parts import on_device_of, require_shape
from attnlm.model.spec import ModelSpec
from attnlm.training.cuda_graph import CudaGraph, can_record_gradients
from attnlm.training.one_layer import is_one_layer, one_layer_form

Form = Callable[[Tensor, Tensor], Tensor]
"""Takes inputs and targets, (B, T) each. Returns the mean loss, (), in which an ignored target has
a loss of 0, and adds its gradient to each parameter's `grad`."""
BatchLoss = Callable[[LanguageModel, Tensor, Tensor], Tensor]
"""Returns the mean loss, (), of a model, inputs (B, T) and targets (B, T)."""


def choose_form(
    model: LanguageModel,
    config: Config,
    device: Device,
    windows: int,
    generators: Sequence[torch.Generator],
) -> Form:
    """Return the form that computes `windows` windows at once, by the setting `compile`.

    `generators` are those of dropout, one for each window, or none. The modules compute what a form
    does not know. Parameters and gradients must keep their addresses in memory.
    """
    drop_by(model, generators)
    training = config.training
    loss_of = batch_loss(training)
    if training.compile == "native" and isinstance(model, Transformer):
        one_layer = None if training.loss else one_layer_form(model, windows, device)
        if one_layer is not None:
            return one_layer
        library = native_library()
        if library is not None and has_native_blocks(model.spec) and is_as_built(model):
            model = with_native_blocks(model, library)
    elif training.compile == "torch":
        loss_of = _torch_compiled(loss_of)

    is_own = bool(config.codes)

    def add_gradient(inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        with device.autocast(), on_device_of(inputs_BT) if is_own else contextlib.nullcontext():
            loss = loss_of(model, inputs_BT, targets_BT)
        loss = loss * (targets_BT >= 0).float().mean()
        loss.backward()
        return loss.detach()

    if not can_record_gradients(config, device.name):
        return add_gradient
    graph = CudaGraph[Tensor]()
    return lambda inputs_BT, targets_BT: graph.call(add_gradient, inputs_BT, targets_BT).clone()


def has_native_form(spec: ModelSpec, vocab_size: int, tokens: int) -> bool:
    """Return True if there is a form in C for batches of `tokens` tokens."""
    return has_native_blocks(spec) or is_one_layer(spec, vocab_size, tokens)


def is_native_faster(spec: ModelSpec, vocab_size: int, tokens: int) -> bool:
    """Return True if the form in C is faster than the modules: for one layer always, and for blocks
    unless PyTorch's modules have a faster library for matmuls (docs/speed.md)."""
    has_faster_blocks = has_native_blocks(spec) and faster_linear() is None
    return has_faster_blocks or is_one_layer(spec, vocab_size, tokens)


def batch_loss(training: TrainingConfig) -> BatchLoss:
    """Return the loss that a configuration selects: the model's or the user's own."""
    code = training.loss
    if not isinstance(code, OwnCode):
        return lambda model, inputs_BT, targets_BT: model.loss(inputs_BT, targets_BT)
    own = code.check_call({})

    def own_loss(model: LanguageModel, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        logits_BTV = model(inputs_BT)
        with on_device_of(inputs_BT):
            loss = own(logits_BTV, inputs_BT, targets_BT)
        return require_shape(code, loss, ())

    return own_loss


def prepare_compiler() -> None:
    """Make PyTorch's compiler use a folder of this user as its cache, unless the user has set one.

    The compiler tests its output by `python -c`, which would import from the current folder.

    PyTorch's default is a folder in the temporary folder, which another user could have made. The
    folder is `compiled` in `cache_folder`, or in a new temporary folder if the cache can't be
    written. Each process must call this before it compiles.
    """
    os.environ["PYTHONSAFEPATH"] = "1"
    if not os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        folder = (writable_cache() or Path(tempfile.mkdtemp())) / "compiled"
        folder.mkdir(0o700, exist_ok=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def _torch_compiled(loss: BatchLoss) -> BatchLoss:
    """Return a loss compiled by torch.compile."""
    prepare_compiler()
    # PyTorch compiles the same function for a few models at most, and runs it uncompiled for
    # further models: discard the code of earlier training runs of this process.
    torch._dynamo.reset()
    # PyTorch keeps precompiled headers in the system's temporary folder, not in the compiler's
    # cache: another user may have made the folder.
    headers = "cpp_cache_precompile_headers"  # older versions of PyTorch have no such option
    has_option = headers in torch._inductor.list_options()
    return torch.compile(loss, options={headers: False} if has_option else {})
