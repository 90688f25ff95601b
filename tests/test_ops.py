"""Each operation of model/ops: its gradient is its own, and its fast form equals its plain one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.nn import functional as F

from attnlm.model.ops.attention import short_attention
from attnlm.model.ops.gated import swiglu
from attnlm.model.ops.linear import joined_linear
from attnlm.model.ops.loss import cross_entropy
from attnlm.model.ops.norms import normed_and_turned, rms_norm, rotary_angles, rotate
from tests.models import use_plain_ops

Op = Callable[..., Tensor]

B, H, T, D, E = 2, 3, 5, 4, 7
COSINES, SINES = (table.double() for table in rotary_angles(T, D, 10.0))
MAPS = [nn.Linear(D, size).double() for size in (2, 3)]
TARGETS = torch.tensor([[1, 0, 6], [3, 3, 2]])


def turned(x: Tensor, gain: Tensor) -> Tensor:
    angles = COSINES.to(x.dtype), SINES.to(x.dtype)
    return normed_and_turned(x, gain, 1e-6, angles)


def silu_by_hand(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return gate / (1 + torch.exp(-gate)) * up


def attended(causal: bool) -> tuple[Op, Op]:
    return (
        lambda q, k, v: short_attention(q, k, v, causal, 0.3),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3),
    )


OPS: dict[str, tuple[Op, Op, list[tuple[int, ...]]]] = {
    "causal attention": (*attended(True), [(B, H, T, D), (B, H, T, D), (B, H, T, E)]),
    "full attention": (*attended(False), [(B, T, D), (B, T, D), (B, T, E)]),
    "attention to itself": (
        lambda x: short_attention(x, x, x, True, 0.3),
        lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True, scale=0.3),
        [(B, T, D)],
    ),
    "RMS norm": (
        lambda x, gain: rms_norm(x, gain, 1e-6),
        lambda x, gain: x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain,
        [(B, T, D), (D,)],
    ),
    "RMS norm and rotation": (
        turned,
        lambda x, gain: rotate(
            F.rms_norm(x, (D,), gain, 1e-6), COSINES.to(x.dtype), SINES.to(x.dtype)
        ),
        [(B, H, T, D), (D,)],
    ),
    "SwiGLU": (swiglu, silu_by_hand, [(B, T, 2 * E)]),
    "joined maps": (
        lambda x, *_: joined_linear(x, MAPS),
        lambda x, w, b, v, c: torch.cat((x @ w.T + b, x @ v.T + c), -1),
        [(B, T, D)],
    ),
    "cross-entropy": (
        lambda x: cross_entropy(x, TARGETS),
        lambda x: (x.logsumexp(-1) - x.gather(-1, TARGETS[..., None])[..., 0]).mean(),
        [(2, 3, E)],
    ),
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "by hand"])
@pytest.mark.parametrize("name", OPS)
def test_values_and_gradients(name: str, plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if plain:
        use_plain_ops(monkeypatch)
    ours, expected, shapes = OPS[name]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    if name == "joined maps":
        inputs += [p for m in MAPS for p in m.parameters()]
    torch.testing.assert_close(ours(*inputs), expected(*inputs))
    assert gradcheck(ours, inputs)


@pytest.mark.parametrize("size", [1e-8, 1.0, 1e4, 1e15])
@pytest.mark.parametrize("name", [n for n in OPS if n != "joined maps"])
def test_extreme_numbers_in_float32(name: str, size: float) -> None:
    ours, _, shapes = OPS[name]
    exact = [(torch.randn(shape).float() * size).double() for shape in shapes]
    leaves = [x.float().requires_grad_() for x in exact]
    found = ours(*leaves)
    expected = ours(*exact)
    bound = 1e-6 * expected.abs().max().item()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=bound)
    assert all(g.isfinite().all() for g in torch.autograd.grad(found.sum(), leaves))


def test_loss_of_half_precision_is_computed_in_float32() -> None:
    logits = (torch.randn(2, 3, E) * 10).bfloat16()
    assert torch.equal(cross_entropy(logits, TARGETS), cross_entropy(logits.float(), TARGETS))


def test_rotation_makes_products_depend_on_distance_alone() -> None:
    length, size = 300, 6
    query_D, key_D = torch.randn(2, size).double()
    cosines, sines = (table.double() for table in rotary_angles(length, size, 1e4))
    queries = rotate(query_D.expand(length, size), cosines, sines)
    products = queries @ rotate(key_D.expand(length, size), cosines, sines).T
    for distance in (-100, -3, 0, 1, 250):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5, rtol=0)
    assert products[0].std() > 0.01
    torch.testing.assert_close(queries.norm(dim=-1), query_D.norm().expand(length))
