"""The loss of a batch as a function: the model's or the user's own, compiled or not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attnlm.base.caches import prepare_compiler
from attnlm.base.own_code import OwnCode
from attnlm.config.training import TrainingConfig
from attnlm.model.language_model import LanguageModel, on_device_of, require_shape

BatchLoss = Callable[[LanguageModel, Tensor, Tensor], Tensor]
"""Returns the mean loss, (), of a model, inputs (B, T) and targets (B, T)."""


def choose_loss(training: TrainingConfig) -> BatchLoss:
    """Return the loss that a configuration selects."""
    loss = _own_loss(training.loss) if isinstance(training.loss, OwnCode) else _model_loss
    return _torch_compiled(loss) if training.compile == "on" else loss


def _model_loss(model: LanguageModel, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
    return model.loss(inputs_BT, targets_BT)


def _own_loss(code: OwnCode) -> BatchLoss:
    """Return the user's own loss as a function of model, inputs and targets."""
    own = code.check_call({})

    def own_loss(model: LanguageModel, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        logits_BTV = model(inputs_BT)
        with on_device_of(inputs_BT):
            loss = own(logits_BTV, inputs_BT, targets_BT)
        return require_shape(code, loss, ())

    return own_loss


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
