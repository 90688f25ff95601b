"""Each operation of model/ops: its gradient is its own, and both its forms give the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from attnlm.compute.native import native_library
from attnlm.compute.threads import threads_of_torch
from attnlm.model.layers import Linear, joined_linear
from attnlm.model.ops import Kernels, attention, loss, use_kernels
from attnlm.model.ops import linear as linear_ops
from attnlm.model.ops.attention import shared_heads
from attnlm.model.ops.heads import rotary_angles, rotate, split_heads
from attnlm.model.ops.linear import linear, onednn_linear
from attnlm.model.ops.loss import cross_entropy, linear_cross_entropy
from attnlm.model.ops.pointwise import gelu, rms_norm, swiglu
from tests.models import COMPILED, needs_kernels
from tests.tolerances import assert_rounded

Op = Callable[..., Tensor]

B, H, K, T, D, E, V = 2, 4, 2, 5, 6, 37, 23
COSINES, SINES = (table.double() for table in rotary_angles(T, D, 10.0))
MAPS = [Linear(D, size).double() for size in (2, 3)]
TARGETS = torch.tensor([[1, 0, 6, 22, 6], [3, 3, 2, 0, 9]])


def heads(packed: Tensor, *gains: Tensor) -> Tensor:
    rotation = COSINES.to(packed.dtype), SINES.to(packed.dtype)
    normed = (gains[0], gains[1], 1e-6) if gains else None
    return torch.cat(split_heads(packed, H, K, normed, rotation), 1)


def plain_heads(packed: Tensor, *gains: Tensor) -> Tensor:
    split = packed.unflatten(-1, (H + 2 * K, D)).transpose(1, 2)
    placed = split[:, : H + K]
    if gains:
        each = torch.cat((gains[0].expand(H, D), gains[1].expand(K, D)))[:, None]
        placed = placed / (placed.square().mean(-1, keepdim=True) + 1e-6).sqrt() * each
    placed = rotate(placed, COSINES.to(packed.dtype), SINES.to(packed.dtype))
    return torch.cat((placed, split[:, H + K :]), 1)


def plain_gelu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def silu_times_up(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return gate / (1 + torch.exp(-gate)) * up


OPS: dict[str, tuple[Op, Op, list[tuple[int, ...]]]] = {
    "RMS norm": (
        lambda x, gain: rms_norm(x, gain, 1e-6),
        lambda x, gain: x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain,
        [(B, T, E), (E,)],
    ),
    "heads": (heads, plain_heads, [(B, T, (H + 2 * K) * D), (D,), (D,)]),
    "turned heads": (heads, plain_heads, [(B, T, (H + 2 * K) * D)]),
    "GELU": (gelu, plain_gelu, [(B, T, E)]),
    "SwiGLU": (swiglu, silu_times_up, [(B, T, 2 * E)]),
    "joined maps": (
        lambda x, *_: joined_linear(x, MAPS),
        lambda x, w, b, v, c: torch.cat((x @ w.T + b, x @ v.T + c), -1),
        [(B, T, D)],
    ),
    "cross-entropy": (
        lambda x: cross_entropy(x, TARGETS),
        lambda x: (x.logsumexp(-1) - x.gather(-1, TARGETS[..., None])[..., 0]).mean(),
        [(B, T, V)],
    ),
    "head and cross-entropy": (
        lambda x, w, b: linear_cross_entropy(x, w, b, TARGETS),
        lambda x, w, b: cross_entropy(x @ w.T + b, TARGETS),
        [(B, T, D), (V, D), (V,)],
    ),
    "head without bias": (
        lambda x, w: linear_cross_entropy(x, w, None, TARGETS),
        lambda x, w: cross_entropy(x @ w.T, TARGETS),
        [(B, T, D), (V, D)],
    ),
}


@pytest.fixture(autouse=True)
def _few_logits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setitem(loss.LOGITS_AT_ONCE, "cpu", 3 * V)


@pytest.mark.parametrize("name", OPS)
def test_values_and_gradients_of_an_op_equal_its_reference(name: str) -> None:
    ours, expected, shapes = OPS[name]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    if name == "joined maps":
        inputs += [p for m in MAPS for p in m.parameters()]
    torch.testing.assert_close(ours(*inputs), expected(*inputs))
    assert gradcheck(ours, inputs)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_kernels)])
def test_a_frozen_head_has_no_gradient_and_its_input_the_same(compiled: bool) -> None:
    hopeless = torch.full((1, 5, 2), 30.0), torch.randn(V, 2) * 100
    for given, weight in ((torch.randn(B, T, D), torch.randn(V, D)), hopeless):
        for frozen in (False, True):
            x, head = given.clone().requires_grad_(), weight.clone().requires_grad_(not frozen)
            with use_kernels(COMPILED if compiled else Kernels()):
                loss = linear_cross_entropy(x, head, None, TARGETS[: len(x)])
                loss.backward()
            assert (head.grad is None) == frozen and x.grad is not None
            assert_rounded((loss, x.grad), _loss_and_gradient, given, weight)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_kernels)])
def test_a_second_backward_pass_gives_the_same_gradients(compiled: bool) -> None:
    x = torch.randn(B, T, D, requires_grad=True)
    head = torch.randn(V, D, requires_grad=True)
    with use_kernels(COMPILED if compiled else Kernels()):
        loss = 3 * linear_cross_entropy(x, head, None, TARGETS)
        first, second = (
            [g.clone() for g in torch.autograd.grad(loss, (x, head), retain_graph=True)]
            for _ in range(2)
        )
    assert all(map(torch.equal, first, second))


def _loss_and_gradient(x: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """Return the reference loss in float64, from all logits together."""
    x = x.detach().double().requires_grad_()
    found = cross_entropy(x @ head.double().T, TARGETS[: len(x)])
    return found, torch.autograd.grad(found, x)[0]


@pytest.mark.parametrize("matmul", ["blas", "onednn"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (130, 64, 33)])
def test_matmuls_of_both_libraries_are_exact(
    shape: tuple[int, int, int], matmul: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if matmul == "onednn" and onednn_linear() is None:
        pytest.skip("PyTorch has no oneDNN here")
    monkeypatch.setattr("attnlm.model.ops.linear.FEWEST_BY_ONEDNN", 0)
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


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_kernels)])
@pytest.mark.parametrize("size", [1e-8, 1.0, 1e4, 1e15])
@pytest.mark.parametrize("name", [n for n in OPS if n != "joined maps"])
def test_extreme_numbers_stay_finite_in_float32(name: str, size: float, compiled: bool) -> None:
    ours, _, shapes = OPS[name]
    exact = [(torch.randn(shape).float() * size).double().requires_grad_() for shape in shapes]
    leaves = [x.detach().float().requires_grad_() for x in exact]
    with use_kernels(COMPILED if compiled else Kernels()):
        found = ours(*leaves)
    assert_rounded([found], lambda: [ours(*exact)])
    gradients = torch.autograd.grad(found.sum(), leaves)
    assert all(g.isfinite().all() for g in gradients)
    if size == 1.0:
        assert_rounded(gradients, lambda: torch.autograd.grad(ours(*exact).sum(), exact))


def _of_squares(op: Op, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(op(*inputs).square().sum(), inputs)


@needs_kernels
@pytest.mark.parametrize("length", [1, 2, 255, 256, 257])
@pytest.mark.parametrize("width", [1, 15, 16, 17, 64])
def test_operations_in_c_of_odd_sizes_equal_pytorch(length: int, width: int) -> None:
    cases: list[tuple[Op, list[tuple[int, ...]]]] = [
        (lambda x, gain: rms_norm(x, gain, 1e-6), [(1, length, width), (width,)]),
        (gelu, [(1, length, width)]),
        (swiglu, [(1, length, 2 * width)]),
    ]
    for op, shapes in cases:
        exact = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
        leaves = [x.detach().float().requires_grad_() for x in exact]
        with use_kernels(COMPILED):
            found = _of_squares(op, leaves)
        assert_rounded(found, _of_squares, op, exact)


def test_pieces_in_half_precision_stay_near_float32() -> None:
    """Autocast computes products in bfloat16 and the loss in float32."""
    x, head = torch.randn(B, T, 32, requires_grad=True), torch.randn(V, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_cross_entropy(x, head, None, TARGETS)
    expected = linear_cross_entropy(x, head, None, TARGETS)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.0)
    for one, other in zip(
        torch.autograd.grad(found, (x, head)), torch.autograd.grad(expected, (x, head)), strict=True
    ):
        assert one.dtype == torch.float32
        assert (one - other).norm() < 0.02 * other.norm()
    logits = (torch.randn(B, T, V) * 10).bfloat16()
    assert torch.equal(cross_entropy(logits, TARGETS), cross_entropy(logits.float(), TARGETS))


def test_rotation_makes_products_depend_on_distance_alone() -> None:
    length, size = 300, 6
    query_D, key_D = torch.randn(2, size).double()
    cosines, sines = (table.double() for table in rotary_angles(length, size, 1e4))
    queries = rotate(query_D.expand(length, size), cosines, sines)
    products = queries @ rotate(key_D.expand(length, size), cosines, sines).T
    for distance in (-100, -3, 0, 1, 250):
        diagonal = products.diagonal(distance)
        bound = 1e-6 * (query_D.norm() * key_D.norm()).item()  # the tables are in float32
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=bound, rtol=0)
    assert products[0].std() > 0.01
    torch.testing.assert_close(queries.norm(dim=-1), query_D.norm().expand(length))


@needs_kernels
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(3, 5, 7), (300, 64, 96)])
def test_a_linear_map_and_its_gradients_are_pytorchs(
    tokens: int, inputs: int, outputs: int
) -> None:
    x = torch.randn(2, tokens, inputs).transpose(0, 1)  # as no product wants it
    given = [x, torch.randn(outputs, inputs), torch.randn(outputs)]
    d_out = torch.randn(tokens, 2, outputs)

    def found(op: Op, dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in given]
        out = op(*leaves)
        return [out, *torch.autograd.grad(out, leaves, d_out.to(dtype))]

    with use_kernels(COMPILED):
        ours = found(linear, torch.float32)
    assert_rounded(ours, lambda: found(torch.nn.functional.linear, torch.float64))


def _explicit_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    key, value = shared_heads(query.size(1), key, value)
    scores = query @ key.mT * scale
    later = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(later, -torch.inf), -1) @ value


@needs_kernels
@pytest.mark.parametrize(
    ("windows", "heads", "kv_heads", "tokens", "size", "spread"),
    [
        (1, 1, 1, 1, 1, 1.0),
        (2, 4, 2, 65, 8, 1.0),
        (1, 6, 2, 130, 24, 1.0),
        (3, 2, 1, 64, 33, 30.0),
        (1, 1, 1, 300, 128, 3.0),
    ],
)
def test_attention_in_c_equals_pytorch(
    windows: int, heads: int, kv_heads: int, tokens: int, size: int, spread: float
) -> None:
    """Views and other memory layouts give the same results, with any number of threads."""
    packed = torch.randn(windows, tokens, (heads + 2 * kv_heads) * size) * spread**0.5
    parts = packed.unflatten(-1, (-1, size)).transpose(1, 2).split([heads, kv_heads, kv_heads], 1)
    scale = 1.3 * size**-0.5
    d_out = torch.randn(size, windows, tokens, heads).permute(1, 3, 2, 0)
    exact = [part.double().requires_grad_() for part in parts]

    def expected() -> list[Tensor]:
        out = _explicit_attention(exact[0], exact[1], exact[2], scale)
        return [out, *torch.autograd.grad(out, exact, d_out.double())]

    for layout in (parts, [part.mT.contiguous().mT for part in parts]):
        runs = []
        for threads in (1, 2):
            leaves = [part.detach().requires_grad_() for part in layout]
            with threads_of_torch(threads), pytest.MonkeyPatch.context() as patch:
                patch.setattr(attention, "_LEAST_SHARED_WORK", 0)
                out = attention.NativeAttention.apply(*leaves, scale, native_library())  # type: ignore[no-untyped-call]
                runs.append([out, *torch.autograd.grad(out, leaves, d_out)])
        assert all(map(torch.equal, *runs))
        assert_rounded(runs[0], expected)


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
            found = attention.fused_attention(query, key, value)
        given = query.double(), key.double(), value.double()
        assert_rounded([found], lambda q, k, v: [_explicit_attention(q, k, v, 8**-0.5)], *given)
        taken = found.grad_fn is not None and found.grad_fn.name() == "NativeAttentionBackward"
        assert taken == expected


@needs_kernels
def test_nan_propagates_to_later_tokens_only() -> None:
    key = torch.randn(1, 1, 130, 4)
    query, value = key.clone().requires_grad_(), key.clone()
    key[0, 0, 66, 1] = torch.nan
    out = attention.NativeAttention.apply(query, key, value, 1.0, native_library())  # type: ignore[no-untyped-call]
    (gradient,) = torch.autograd.grad(out.sum(), query)
    for found in (out, gradient):
        assert found[0, 0, :64].isfinite().all() and found[0, 0, 66:].isnan().all()
