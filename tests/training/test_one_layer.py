"""The gradient that is written out equals autograd's, through PyTorch's own attention."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from attnlm.compute.device import Device
from attnlm.config.settings import resolve
from attnlm.config.training import TrainingConfig
from attnlm.config.variants import variant
from attnlm.model.language_model import LanguageModel, Transformer
from attnlm.training.one_layer import one_layer_form
from attnlm.training.validation import Split, validation_loss
from tests.models import (
    CHANGES,
    Tempered,
    gradients,
    needs_kernels,
    parts_of,
    self_attention,
    small_model,
)
from tests.tolerances import assert_rounded

CPU = Device("cpu", "float32", "")


def a_model(name: str, vocab_size: int) -> Transformer:
    """Return a model in float64 that has gradients already."""
    torch.manual_seed(0)
    model = parts_of(resolve({"block_size": 5, **variant(name)})).build(vocab_size).double()
    assert isinstance(model, Transformer)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
        parameter.grad = torch.randn_like(parameter)
    return model


def some_batch(model: LanguageModel, batch_size: int) -> tuple[Tensor, Tensor]:
    shape = (2, batch_size, model.block_size)
    inputs, targets = torch.randint(model.vocab_size, shape)
    return inputs, targets


def with_autograds(
    model: Transformer, inputs: Tensor, targets: Tensor, before: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the loss, and the sums of earlier gradients and of its own."""
    loss = model.loss(inputs, targets)
    return {"loss": loss} | {n: before[n] + g for n, g in gradients(model, loss).items()}


def gradients_of(model: Transformer) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


PROJECTED = "projection=true:qkv_bias=true"
BARE = (
    "transformer:layers=1:heads=2:embed_dim=8:positions=learned:norm=none:mlp=none:residual=false:"
    "query_key_norm=false:head_bias=true"
)


@needs_kernels
@pytest.mark.parametrize(
    ("name", "vocab_size", "batch_size"),
    [
        ("single-head:head_size=1", 2, 1),
        (f"multi-head:heads=3:head_size=3:block_size=9:{PROJECTED}", 31, 4),
        (f"multi-head:heads=2:head_size=8:block_size=17:{PROJECTED}", 33, 3),
        ("single-head:head_size=13:block_size=37", 65, 5),
        (f"multi-head:heads=2:head_size=32:block_size=70:{PROJECTED}", 33, 1),
        ("single-head:head_size=45:block_size=20", 21, 3),
        (f"multi-head:heads=2:head_size=70:block_size=300:{PROJECTED}", 33, 1),
        (f"multi-head:heads=2:head_size=64:block_size=33:{PROJECTED}", 33, 2),
        ("wide-head:heads=2:block_size=37", 11, 3),
        (BARE, 11, 3),
    ],
)
def test_loss_and_gradients_are_autograds(name: str, vocab_size: int, batch_size: int) -> None:
    name = name if name == BARE else f"{name}:embed_dim=7"
    exact = a_model(name, vocab_size)
    model = copy.deepcopy(exact).float()
    for parameter, double in zip(model.parameters(), exact.parameters(), strict=True):
        assert double.grad is not None
        parameter.grad = double.grad.float()
    form = one_layer_form(model, batch_size, CPU)
    assert form is not None
    for _ in range(2):  # the second time its memory is full of the first
        inputs, targets = some_batch(model, batch_size)
        before = {n: g.to(torch.float64, copy=True) for n, g in gradients_of(model).items()}
        alone = form.loss(inputs, targets)
        found = {"loss": form(inputs, targets)}
        assert alone == found["loss"]
        found |= gradients_of(model)
        assert_rounded(found, with_autograds, exact, inputs, targets, before)


@needs_kernels
def test_a_loss_of_hopeless_logits_is_finite() -> None:
    model = a_model("single-head:embed_dim=7", vocab_size=11).float()
    with torch.no_grad():
        model.head.bias[:] = torch.linspace(-3000, 3000, 11)
    form = one_layer_form(model, 4, CPU)
    assert form is not None
    inputs, targets = some_batch(model, 4)
    found, exact = form(inputs, targets), copy.deepcopy(model).double()
    assert_rounded([found], lambda: [exact.loss(inputs, targets)])


@needs_kernels
@pytest.mark.parametrize(
    "part",
    [
        *("kv_heads=1", "dropout=0.1", "norm=layer", "residual=true", "mlp=gelu", "layers=2"),
        *("query_key_norm=true", "positions=none", "positions=rotary", "tie_embeddings=true"),
        "head_bias=false",
    ],
)
def test_other_parts_are_left_to_autograd(part: str) -> None:
    assert one_layer_form(a_model(BARE, 11).float(), 4, CPU) is not None
    rung, *parts = BARE.split(":")
    changed = {text.partition("=")[0] for text in part.split(":")}
    kept = [text for text in parts if text.partition("=")[0] not in changed]
    model = a_model(":".join([rung, *kept, part]), 11).float()
    assert one_layer_form(model, 4, CPU) is None


@needs_kernels
def test_other_precisions_vocabularies_and_models_are_left_to_autograd() -> None:
    model = a_model(BARE, vocab_size=11).float()
    assert one_layer_form(model, 3, CPU) is not None
    assert one_layer_form(model, 2, CPU) is None  # 10 tokens in a batch, 11 in all
    assert one_layer_form(model, 3, Device("cpu", "bfloat16", "")) is None
    assert one_layer_form(model.double(), 3, CPU) is None
    gpu = Device("cuda", "float32", "")
    assert one_layer_form(model.float().to("meta"), 3, gpu) is None
    for other in ("bigram", "average"):
        assert one_layer_form(small_model(other).float(), 4, CPU) is None


@needs_kernels
def test_a_model_changed_from_outside_is_left_to_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    place, other = CHANGES["a class with one more parameter"]
    monkeypatch.setattr(f"attnlm.model.{place}", other)
    model = a_model(BARE, 11).float()
    assert one_layer_form(model, 4, CPU) is None
    tokens = np.arange(200, dtype=np.uint16) * 7 % 11
    losses = [
        validation_loss(model, Split(tokens), TrainingConfig(device="cpu", compile=form)).loss
        for form in ("modules", "native")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    attention = self_attention(model)
    model.loss(*torch.from_numpy(tokens[:10].astype(np.int64)).view(2, 1, 5)).backward()
    assert isinstance(attention, Tempered) and attention.factor.grad is not None
