"""Each operation of model/ops computes the same in C and in PyTorch, forward and backward.

test_textbook.py holds models of all of them to their formulas.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from attnlm.compute.native import native_library
from attnlm.compute.threads import threads_of_torch
from attnlm.model.attention import attention
from attnlm.model.ops import Kernels, loss, use_kernels
from attnlm.model.ops import attention as attention_ops
from attnlm.model.ops import linear as linear_ops
from attnlm.model.ops.attention import NativeAttention, fused_attention, shared_heads
from attnlm.model.ops.heads import rotary_angles, split_heads
from attnlm.model.ops.linear import linear, onednn_linear
from attnlm.model.ops.loss import cross_entropy, linear_cross_entropy
from attnlm.model.ops.pointwise import gelu, rms_norm, swiglu
from tests.models import COMPILED, needs_kernels
from tests.tolerances import assert_computes, assert_near, assert_rounded, with_gradients

Op = Callable[..., Tensor]
in_each_form = pytest.mark.parametrize(
    "kernels", [Kernels(), pytest.param(COMPILED, marks=needs_kernels)], ids=["PyTorch", "C"]
)

# Sizes differ from each other, so that swapped axes fail.
B, H, K, T, D, E, V = 2, 4, 2, 5, 6, 37, 23
COSINES, SINES = (table.double() for table in rotary_angles(T, D, 10.0))
TARGETS = torch.tensor([[1, 0, 6, 22, 6], [3, 3, 2, 0, 9]])


def heads(packed: Tensor, *gains: Tensor) -> Tensor:
    rotation = COSINES.to(packed.dtype), SINES.to(packed.dtype)
    normed = (gains[0], gains[1], 1e-6) if gains else None
    return torch.cat(split_heads(packed, H, K, normed, rotation), 1)


def norm(x: Tensor, gain: Tensor) -> Tensor:
    return rms_norm(x, gain, 1e-6)


def loss_in_pieces(x: Tensor, head: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear_cross_entropy(x, head, bias, TARGETS[: len(x)])


def loss_of_all_logits(x: Tensor, head: Tensor, bias: Tensor | None = None) -> Tensor:
    logits = F.linear(x, head, bias).flatten(0, 1)
    return F.cross_entropy(logits, TARGETS[: len(x)].flatten())


OPS: dict[str, tuple[Op, list[tuple[int, ...]]]] = {
    "RMS norm": (norm, [(B, T, E), (E,)]),
    "heads": (heads, [(B, T, (H + 2 * K) * D), (D,), (D,)]),
    "turned heads": (heads, [(B, T, (H + 2 * K) * D)]),
    "GELU": (gelu, [(B, T, E)]),
    "SwiGLU": (swiglu, [(B, T, 2 * E)]),
    "cross-entropy": (lambda x: cross_entropy(x, TARGETS), [(B, T, V)]),
    "head and cross-entropy": (loss_in_pieces, [(B, T, D), (V, D), (V,)]),
    "head without bias": (loss_in_pieces, [(B, T, D), (V, D)]),
}


@pytest.fixture(autouse=True)
def _few_logits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setitem(loss.LOGITS_AT_ONCE, "cpu", 3 * V)


@in_each_form
@pytest.mark.parametrize("name", OPS)
def test_numbers_of_every_size_are_as_exact_as_float32(name: str, kernels: Kernels) -> None:
    """Of extreme numbers, the gradients are only finite: they may be differences of large ones."""
    op, shapes = OPS[name]
    with use_kernels(kernels):
        assert_computes(op, op, *map(torch.randn, shapes))
        for size in (1e-8, 1e4, 1e15):
            inputs = [(torch.randn(shape) * size).requires_grad_() for shape in shapes]
            found = with_gradients(op, *inputs)
            assert all(x.isfinite().all() for x in found.values())
            assert_rounded([found["output"]], lambda *x: [op(*x)], *(x.double() for x in inputs))


@needs_kernels
@pytest.mark.parametrize(
    ("length", "width"), [(1, 1), (257, 1), (2, 15), (256, 16), (1, 17), (255, 17), (257, 64)]
)
def test_operations_in_c_of_odd_sizes_equal_pytorch(length: int, width: int) -> None:
    x, gain = torch.randn(1, length, width), torch.randn(width)
    with use_kernels(COMPILED):
        assert_computes(norm, norm, x, gain)
        assert_computes(gelu, gelu, x)
        assert_computes(swiglu, swiglu, torch.randn(1, length, 2 * width))


@in_each_form
def test_a_loss_in_pieces_equals_that_of_all_logits(kernels: Kernels) -> None:
    x, head, bias = torch.randn(B, T, D), torch.randn(V, D), torch.randn(V)
    with use_kernels(kernels):
        assert_computes(loss_in_pieces, loss_of_all_logits, x, head, bias)
        hopeless = torch.full((1, 5, 2), 30.0), torch.randn(V, 2) * 100
        assert_computes(loss_in_pieces, loss_of_all_logits, *hopeless)


@in_each_form
def test_a_frozen_head_changes_no_other_gradient(kernels: Kernels) -> None:
    x, head = torch.randn(B, T, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    with use_kernels(kernels):
        frozen = with_gradients(lambda x: loss_in_pieces(x, head.detach()), x)
        assert_near(frozen["gradient 0"], with_gradients(loss_in_pieces, x, head)["gradient 0"])


@in_each_form
def test_a_second_backward_pass_gives_the_same_gradients(kernels: Kernels) -> None:
    x, head = torch.randn(B, T, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    with use_kernels(kernels):
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


@pytest.mark.parametrize("matmul", ["blas", "onednn"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (130, 64, 33)])
def test_matmuls_of_both_libraries_are_exact(
    shape: tuple[int, int, int], matmul: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if matmul == "onednn" and onednn_linear() is None:
        pytest.skip("PyTorch has no oneDNN here")
    monkeypatch.setattr(linear_ops, "FEWEST_BY_ONEDNN", 0)
    rows, inputs, outputs = shape
    x, weight, bias = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)

    def exact() -> list[Tensor]:
        out = x.double() @ weight.double().T
        return [out, out + bias.double()]

    for one in (x, x.T.contiguous().T):
        for other in (weight, weight.T.contiguous().T):
            with use_kernels(Kernels(matmul=matmul)):
                found = linear_ops.matmul(one, other), linear_ops.matmul(one, other, bias)
            assert_rounded(found, exact)


@needs_kernels
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(3, 5, 7), (300, 64, 96)])
def test_a_linear_map_and_its_gradients_are_pytorchs(
    tokens: int, inputs: int, outputs: int
) -> None:
    x = torch.randn(2, tokens, inputs).transpose(0, 1)  # as no product wants it
    with use_kernels(COMPILED):
        assert_computes(linear, F.linear, x, torch.randn(outputs, inputs), torch.randn(outputs))


# --- Attention ------------------------------------------------------------------------------------


def explicit_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A softmax over all scores; the last query sees all keys."""
    key, value = shared_heads(query.size(1), key, value)
    scores = query @ key.mT * query.size(-1) ** -0.5
    later = torch.ones_like(scores, dtype=torch.bool).triu(1 + key.size(-2) - query.size(-2))
    return torch.softmax(scores.masked_fill(later, -torch.inf), -1) @ value


@pytest.mark.parametrize("dropout", [0.0, 1e-30])  # of the latter nothing is dropped
@pytest.mark.parametrize("new", [1, 4, 11])
@pytest.mark.parametrize("in_groups", [False, True])
def test_attention_equals_an_explicit_softmax(
    new: int, dropout: float, in_groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's kernel in half precision reads the keys that query heads share; others get copies."""
    monkeypatch.setattr(attention_ops, "reads_groups", lambda query: in_groups)
    query, key = torch.randn(2, 6, new, 5).double(), torch.randn(2, 3, 11, 5).double()
    value = torch.randn(2, 3, 11, 7).double()
    found = attention(query, key, value, dropout=dropout)
    assert_near(found, explicit_attention(query, key, value), within=1e-12)


def test_dropout_drops_weights_and_keeps_the_mean() -> None:
    query = key = torch.zeros(1, 1, 1000, 4)
    mixed = attention(query, key, torch.ones(1, 1, 1000, 1), dropout=0.25)
    assert mixed.std() > 0.001
    assert mixed[0, 0, 500:].mean().item() == pytest.approx(1.0, abs=0.02)


def attention_in_c(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scale = query.size(-1) ** -0.5
    out: Tensor = NativeAttention.apply(query, key, value, scale, native_library())  # type: ignore[no-untyped-call]
    return out


@needs_kernels
@pytest.mark.parametrize(
    ("windows", "heads", "kv_heads", "tokens", "size", "spread"),
    [
        (1, 1, 1, 1, 1, 1.0),
        (2, 4, 2, 65, 8, 1.0),
        (1, 6, 2, 200, 24, 1.0),  # so much work that threads share it
        (3, 2, 1, 64, 33, 30.0),
        (1, 1, 1, 300, 128, 3.0),
    ],
)
def test_attention_in_c_equals_pytorch(
    windows: int, heads: int, kv_heads: int, tokens: int, size: int, spread: float
) -> None:
    """Other memory layouts give the same results, with any number of threads."""
    packed = torch.randn(windows, tokens, (heads + 2 * kv_heads) * size) * spread**0.5
    parts = packed.unflatten(-1, (-1, size)).transpose(1, 2).split([heads, kv_heads, kv_heads], 1)
    for qkv in (parts, [part.mT.contiguous().mT for part in parts]):
        assert_computes(attention_in_c, explicit_attention, *qkv)
        leaves = [part.clone().requires_grad_() for part in qkv]
        alone = with_gradients(attention_in_c, *leaves)
        with threads_of_torch(2):
            shared = with_gradients(attention_in_c, *leaves)
        assert all(torch.equal(shared[name], alone[name]) for name in alone)


@needs_kernels
def test_attention_in_c_is_used_if_chosen_and_supported() -> None:
    query, key = torch.randn(2, 4, 100, 8, requires_grad=True), torch.randn(2, 2, 100, 8)
    for value, kernels, expected in (
        (key, COMPILED, True),
        (key, Kernels(native_ops=True), False),
        (key, Kernels(attention="native"), False),
        (key[..., :5], COMPILED, False),
    ):
        with use_kernels(kernels):
            found = fused_attention(query, key, value)
        exact = explicit_attention(query.double(), key.double(), value.double())
        assert_near(found, exact, within=1e-6)
        assert found.grad_fn is not None
        assert (found.grad_fn.name() == "NativeAttentionBackward") == expected


@needs_kernels
def test_nan_propagates_to_later_tokens_only() -> None:
    key = torch.randn(1, 1, 130, 4)
    query, value = key.clone().requires_grad_(), key.clone()
    key[0, 0, 66, 1] = torch.nan
    out = attention_in_c(query, key, value)
    (gradient,) = torch.autograd.grad(out.sum(), query)
    for found in (out, gradient):
        assert found[0, 0, :64].isfinite().all() and found[0, 0, 66:].isnan().all()
