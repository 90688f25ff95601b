"""The gradient that is written out equals autograd's, through PyTorch's own attention."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from attnlm.compute.device import Device
from attnlm.config.settings import resolve
from attnlm.config.variants import variant
from attnlm.model.language_model import LanguageModel, Transformer, build_model
from attnlm.model.ops import Kernels
from attnlm.training.one_layer import NativeOneLayer, OneLayer, native_parts, one_layer_form
from tests.models import COMPILED, gradients, small_model
from tests.tolerances import assert_near, assert_rounded

CPU = Device("cpu", "float32", "")


def a_model(name: str, vocab_size: int) -> Transformer:
    """In float64, with gradients that are there already."""
    torch.manual_seed(0)
    model = build_model(resolve({"block_size": 5, **variant(name)}).model, vocab_size).double()
    assert isinstance(model, Transformer)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
        parameter.grad = torch.randn_like(parameter)
    return model


def some_batch(model: LanguageModel, batch_size: int) -> tuple[Tensor, Tensor]:
    shape = (2, batch_size, model.architecture.block_size)
    inputs, targets = torch.randint(model.vocab_size, shape)
    return inputs, targets


def with_autograds(
    model: Transformer, inputs: Tensor, targets: Tensor, before: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the loss, and the sums of earlier gradients and of its own."""
    loss = model.loss(inputs, targets)
    return {"loss": loss} | {n: before[n] + g for n, g in gradients(model, loss).items()}


def assert_adds_autograds(
    form: OneLayer, model: Transformer, exact: Transformer, batch_size: int
) -> None:
    """Assert that `form` adds to gradients of `model` those of `exact`, its equal in float64."""
    for _ in range(2):  # the second time its memory is full of the first
        inputs, targets = some_batch(model, batch_size)
        before = {
            n: p.grad.to(torch.float64, copy=True)
            for n, p in model.named_parameters()
            if p.grad is not None
        }
        alone = form.loss(inputs, targets)
        found = {"loss": form(inputs, targets)}
        assert alone == found["loss"]
        found |= {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

        if model is exact:
            assert_near(found, with_autograds(exact, inputs, targets, before), within=1e-12)
        else:
            assert_rounded(found, with_autograds, exact, inputs, targets, before)


PROJECTED = "projection=true:qkv_bias=true"
BARE = (
    "transformer:layers=1:heads=2:embed_dim=8:positions=learned:norm=none:mlp=none:residual=false:"
    "query_key_norm=false:head_bias=true"
)


@pytest.mark.parametrize(
    "name",
    [
        "single-head:embed_dim=7",
        "single-head:embed_dim=7:head_size=3",
        "multi-head:embed_dim=12:heads=3",
        f"multi-head:embed_dim=6:heads=3:head_size=5:{PROJECTED}",
        "wide-head:embed_dim=6:heads=2:block_size=37",
        BARE,
    ],
)
def test_loss_and_gradients_are_autograds(name: str) -> None:
    model = a_model(name, vocab_size=11)
    assert_adds_autograds(OneLayer(model, 3), model, model, 3)


@pytest.mark.parametrize(
    ("heads", "size", "vocab_size", "batch_size", "length"),
    [(1, 1, 2, 1, 5), (3, 3, 31, 4, 9), (2, 8, 33, 3, 17), (1, 13, 65, 5, 37), (2, 32, 33, 1, 70)],
)
def test_compiled_loss_and_gradients_are_autograds(
    heads: int, size: int, vocab_size: int, batch_size: int, length: int
) -> None:
    name = f"multi-head:heads={heads}:head_size={size}:embed_dim=7:block_size={length}"
    name += f":{PROJECTED}" if heads > 1 else ""
    model, exact = a_model(name, vocab_size).float(), a_model(name, vocab_size)
    if native_parts(model.architecture) is None:
        pytest.skip("there is no C compiler")
    form = one_layer_form(model, batch_size, CPU, COMPILED)
    assert type(form) is NativeOneLayer
    assert_adds_autograds(form, model, exact, batch_size)


@pytest.mark.parametrize("kernels", [Kernels(), COMPILED])
def test_a_loss_of_hopeless_logits_is_finite(kernels: Kernels) -> None:
    model = a_model("single-head:embed_dim=7", vocab_size=11).float()
    with torch.no_grad():
        model.head.bias[:] = torch.linspace(-3000, 3000, 11)
    form = one_layer_form(model, 4, CPU, kernels)
    assert form is not None
    inputs, targets = some_batch(model, 4)
    found, exact = form(inputs, targets), copy.deepcopy(model).double()
    assert_rounded([found], lambda: [exact.loss(inputs, targets)])


def test_larger_heads_than_a_row_has_room_for_are_not_compiled() -> None:
    """A run's configuration may ask for what no training would: C would write past its arrays."""
    model = a_model("single-head:embed_dim=33", vocab_size=11).float()
    assert native_parts(model.architecture) is None
    assert type(one_layer_form(model, 4, CPU, COMPILED)) is OneLayer


@pytest.mark.parametrize(
    "part",
    [
        *("kv_heads=1", "dropout=0.1", "norm=layer", "residual=true", "mlp=gelu", "layers=2"),
        *("query_key_norm=true", "positions=none", "positions=rotary", "tie_embeddings=true"),
        *("head_bias=false", "block_size=257"),
    ],
)
def test_other_parts_are_left_to_autograd(part: str) -> None:
    assert one_layer_form(a_model(BARE, 11).float(), 4, CPU, COMPILED) is not None
    model = a_model(f"{BARE}:{part}", 11).float()
    assert one_layer_form(model, 4, CPU, COMPILED) is None


def test_other_precisions_vocabularies_and_models_are_left_to_autograd() -> None:
    model = a_model(BARE, vocab_size=11).float()
    assert one_layer_form(model, 3, CPU, Kernels()) is not None
    assert one_layer_form(model, 2, CPU, Kernels()) is None  # 10 tokens in a batch, 11 in all
    assert one_layer_form(model, 3, Device("cpu", "bfloat16", ""), Kernels()) is None
    assert one_layer_form(model.double(), 3, CPU, Kernels()) is None
    assert (
        one_layer_form(model.float().to("meta"), 3, Device("cuda", "float32", ""), Kernels())
        is None
    )
    assert one_layer_form(small_model("bigram").float(), 4, CPU, Kernels()) is None
    assert one_layer_form(small_model("average").float(), 4, CPU, Kernels()) is None
