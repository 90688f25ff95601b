"""Linear maps, the loss in pieces and attention, forward and backward, held to plain formulas.

test_textbook.py holds models of all of them to their formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from attnlm.compute.native import native_library
from attnlm.model import layers, loss
from attnlm.model.layers import Dropout, attention, linear, shared_heads
from attnlm.model.loss import cross_entropy, linear_cross_entropy
from tests.models import needs_kernels
from tests.tolerances import assert_computes, assert_near, assert_rounded, with_gradients

# Sizes differ from each other, so that swapped axes fail.
B, T, D, V = 2, 5, 6, 23
TARGETS = torch.tensor([[1, 0, 6, 22, 6], [3, 3, 2, 0, 9]])


def loss_in_pieces(x: Tensor, head: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear_cross_entropy(x, head, bias, TARGETS[: len(x)])


def loss_of_all_logits(x: Tensor, head: Tensor, bias: Tensor | None = None) -> Tensor:
    logits = F.linear(x, head, bias).flatten(0, 1)
    return F.cross_entropy(logits, TARGETS[: len(x)].flatten())


@pytest.fixture(autouse=True)
def _few_logits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setitem(loss.LOGITS_AT_ONCE, "cpu", 3 * V)


@pytest.mark.parametrize("has_bias", [True, False])
def test_losses_of_numbers_of_every_size_are_as_exact_as_float32(has_bias: bool) -> None:
    """Of extreme numbers, the gradients are only finite: they may be differences of large ones."""
    shapes = [(B, T, D), (V, D), (V,)][: 2 + has_bias]
    assert_computes(loss_in_pieces, loss_in_pieces, *map(torch.randn, shapes))
    for size in (1e-8, 1e4, 1e15):
        inputs = [(torch.randn(shape) * size).requires_grad_() for shape in shapes]
        found = with_gradients(loss_in_pieces, *inputs)
        assert all(x.isfinite().all() for x in found.values())
        exact = [x.double() for x in inputs]
        assert_rounded([found["output"]], lambda *x: [loss_in_pieces(*x)], *exact)


def test_a_loss_in_pieces_equals_that_of_all_logits() -> None:
    x, head, bias = torch.randn(B, T, D), torch.randn(V, D), torch.randn(V)
    assert_computes(loss_in_pieces, loss_of_all_logits, x, head, bias)
    hopeless = torch.full((1, 5, 2), 30.0), torch.randn(V, 2) * 100
    assert_computes(loss_in_pieces, loss_of_all_logits, *hopeless)


def test_a_frozen_head_changes_no_other_gradient() -> None:
    x, head = torch.randn(B, T, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    frozen = with_gradients(lambda x: loss_in_pieces(x, head.detach()), x)
    assert_near(frozen["gradient 0"], with_gradients(loss_in_pieces, x, head)["gradient 0"])


def test_a_second_backward_pass_gives_the_same_gradients() -> None:
    x, head = torch.randn(B, T, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    loss = 3 * loss_in_pieces(x, head)
    first, second = (
        [g.clone() for g in torch.autograd.grad(loss, (x, head), retain_graph=True)]
        for _ in range(2)
    )
    assert all(map(torch.equal, first, second))


def test_pieces_in_half_precision_stay_near_float32() -> None:
    """Autocast computes products in bfloat16 and the loss in float32."""
    x, head = torch.randn(B, T, 32, requires_grad=True), torch.randn(V, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = with_gradients(loss_in_pieces, x, head)
    for name, exact in with_gradients(loss_in_pieces, x, head).items():
        assert found[name].dtype == torch.float32
        assert_near(found[name], exact, within=0.02)
    logits = (torch.randn(B, T, V) * 10).bfloat16()
    assert torch.equal(cross_entropy(logits, TARGETS), cross_entropy(logits.float(), TARGETS))


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (300, 64, 96)])
def test_a_linear_map_of_onednn_and_its_gradients_are_pytorchs(
    shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of gradients, and in memory layouts that no product wants."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("PyTorch has no oneDNN here")
    monkeypatch.setattr(layers, "faster_linear", lambda: torch.ops.mkldnn._linear_pointwise)
    monkeypatch.setattr(layers, "FEWEST_BY_ONEDNN", 0)
    tokens, inputs, outputs = shape
    x, weight, bias = (
        torch.randn(2, tokens, inputs),
        torch.randn(outputs, inputs),
        torch.randn(outputs),
    )
    for given in (x, x.transpose(0, 1), x.mT.contiguous().mT):
        assert_computes(linear, F.linear, given, weight.T.contiguous().T, bias)
        assert_computes(linear, F.linear, given, weight)
    x, weight = x.requires_grad_(), weight.requires_grad_()

    def second(op: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        (d_x,) = torch.autograd.grad(op(x, weight).square().sum(), x, create_graph=True)
        return torch.autograd.grad(d_x.square().sum(), (x, weight))

    assert_near(second(linear), second(F.linear))


@pytest.mark.parametrize(
    ("capability", "intel", "is_faster"),
    [("AVX512", 0, True), ("AVX512", 1, False), ("AVX2", 0, False), ("DEFAULT", 0, False)],
)
def test_the_library_of_linear_maps_follows_the_processor(
    capability: str, intel: int, is_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("PyTorch has no oneDNN here")
    choose = layers.faster_linear.__wrapped__
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(layers, "native_library", lambda: SimpleNamespace(is_intel=lambda: intel))
    assert (choose() is not None) == is_faster
    monkeypatch.setattr(layers, "native_library", lambda: None)
    assert choose() is None


@needs_kernels
def test_the_maker_of_the_processor_is_what_the_system_reports() -> None:
    about = Path("/proc/cpuinfo")
    if not about.exists():
        pytest.skip("the system does not describe its processor")
    native = native_library()
    assert native is not None and native.is_intel() == ("GenuineIntel" in about.read_text())


# --- Attention ------------------------------------------------------------------------------------


def explicit_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A softmax over all scores; the last query sees all keys."""
    key, value = shared_heads(query.size(1), key, value)
    scores = query @ key.mT * query.size(-1) ** -0.5
    later = torch.ones_like(scores, dtype=torch.bool).triu(1 + key.size(-2) - query.size(-2))
    return torch.softmax(scores.masked_fill(later, -torch.inf), -1) @ value


@pytest.mark.parametrize("dropout", [None, Dropout(1e-30)])  # which drops nothing
@pytest.mark.parametrize("new", [1, 4, 11])
@pytest.mark.parametrize("in_groups", [False, True])
def test_attention_equals_an_explicit_softmax(
    new: int, dropout: Dropout | None, in_groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's kernel in half precision reads the keys that query heads share; others get copies."""
    monkeypatch.setattr(layers, "reads_groups", lambda query: in_groups)
    query, key = torch.randn(2, 6, new, 5).double(), torch.randn(2, 3, 11, 5).double()
    value = torch.randn(2, 3, 11, 7).double()
    found = attention(query, key, value, dropout=dropout)
    assert_near(found, explicit_attention(query, key, value), within=1e-12)


def test_dropout_drops_weights_and_keeps_the_mean() -> None:
    query = key = torch.zeros(1, 1, 1000, 4)
    mixed = attention(query, key, torch.ones(1, 1, 1000, 1), dropout=Dropout(0.25))
    assert mixed.std() > 0.001
    assert mixed[0, 0, 500:].mean().item() == pytest.approx(1.0, abs=0.02)
