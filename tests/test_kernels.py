"""Each form of kernels.py gives the numbers and the gradients of the plain one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from attnlm.model import kernels
from attnlm.model.attention import rotary_angles, rotate, split_heads

B, T, H, D, E = 2, 7, 3, 4, 5


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def assert_equal_with_gradients(
    ours: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: Tensor
) -> None:
    results = []
    weight = None
    for form in (ours, plain):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = form(*leaves)
        weight = torch.randn_like(out) if weight is None else weight
        results.append([out, *torch.autograd.grad((out * weight).sum(), leaves)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lead", [(B, H), (B,)], ids=str)
def test_attention(causal: bool, lead: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    assert_equal_with_gradients(
        lambda q, k, v: kernels.attention(q, k, v, causal, 0.3),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3),
        normal(*lead, T, D),
        normal(*lead, T, D),
        normal(*lead, T, E),
    )


def test_attention_of_the_embeddings_to_themselves_adds_up_three_gradients() -> None:
    torch.manual_seed(0)
    assert_equal_with_gradients(
        lambda x: kernels.attention(x, x, x, True, 0.3),
        lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True, scale=0.3),
        normal(B, T, D),
    )


def test_rms_norm() -> None:
    torch.manual_seed(0)
    assert_equal_with_gradients(
        lambda x, gain: kernels.rms_norm(x, gain, 0.01),
        lambda x, gain: F.rms_norm(x, gain.shape, gain, 0.01),
        normal(B, T, D),
        normal(D),
    )


def test_swiglu() -> None:
    torch.manual_seed(0)
    assert_equal_with_gradients(
        kernels.swiglu,
        lambda x: F.silu(x[..., :E]) * x[..., E:],
        normal(B, T, 2 * E),
    )


def test_rotary_heads() -> None:
    torch.manual_seed(0)
    cosines, sines = (x.double() for x in rotary_angles(T, D))

    def plain(packed: Tensor, gains: Tensor) -> Tensor:
        query, key, value = split_heads(packed, D)
        turned = [
            rotate(F.rms_norm(x, (D,), gain, 0.01), cosines, sines)
            for x, gain in zip((query, key), gains, strict=True)
        ]
        return torch.stack((*turned, value))

    assert_equal_with_gradients(
        lambda packed, gains: kernels.rotary_heads(packed, gains, (cosines, sines), 0.01),
        plain,
        normal(B, T, 3 * H * D),
        normal(2, D),
    )
