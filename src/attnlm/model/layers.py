"""The layers of a model: linear maps, norms, dropout, attention with its cache, and the MLP.

Axes: B batch, T new tokens, S all tokens (cached and new), C embed_dim, H heads,
K key and value heads, D head size, E value size, F hidden units of the MLP, N outputs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from attnlm.compute.native import native_library
from attnlm.model.costs import rotary_angles

if TYPE_CHECKING:
    from attnlm.model.architecture import Architecture

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of rotary positions, each (T, D)."""


class Linear(nn.Linear):
    """A linear map x Wᵀ + b.

    Weights are initialised from N(0, std²) and biases to zeros. If `std` is None, both are
    initialised as in nn.Linear.
    """

    def __init__(
        self, inputs: int, outputs: int, bias: bool = True, std: float | None = None
    ) -> None:
        self._std = std
        super().__init__(inputs, outputs, bias)

    def reset_parameters(self) -> None:
        """Draw the initial weights."""
        if self._std is None:
            super().reset_parameters()
            return
        nn.init.normal_(self.weight, std=self._std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., inputs) → (..., outputs)."""
        return linear(x, self.weight, self.bias)


FEWEST_BY_ONEDNN = 2**20
"""With fewer multiplications, a call to oneDNN (a dozen microseconds) costs more than it saves."""


def linear(x: Tensor, weight_NC: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Return x Wᵀ + b, (..., C) → (..., N), by the faster library.

    PyTorch's library for matmuls on x86 is MKL, which does not use AVX-512 on processors that are
    not Intel's. There oneDNN, its other library, takes half the time.
    """
    if (
        not torch.compiler.is_compiling()
        and x.is_cpu
        and x.dtype == weight_NC.dtype == torch.float32
        and x.numel() * len(weight_NC) >= FEWEST_BY_ONEDNN
        and faster_linear() is not None
        and not torch.is_autocast_enabled("cpu")
    ):
        out: Tensor = _OneDNNLinear.apply(x, weight_NC, bias_N)  # type: ignore[no-untyped-call]
        return out
    return F.linear(x, weight_NC, bias_N)


@functools.cache
def faster_linear() -> Callable[..., Tensor] | None:
    """Return oneDNN's linear map if it is faster than PyTorch's on this processor, else None."""
    by_onednn = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    native = native_library()
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    if by_onednn is None or native is None or native.is_intel() or not has_avx512:
        return None
    x, weight = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3)
    with contextlib.suppress(RuntimeError):
        if torch.equal(by_onednn(x, weight, None, "none", [], ""), F.linear(x, weight)):
            return by_onednn  # type: ignore[no-any-return]
    return None


class _OneDNNLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NC: Tensor, bias_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_NC)
        by_onednn = faster_linear()
        assert by_onednn is not None
        out_MN = by_onednn(x.flatten(0, -2), weight_NC, bias_N, "none", [], "")
        return out_MN.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_NC = ctx.saved_tensors
        grad_MN = grad.flatten(0, -2)
        to_x, to_weight, to_bias = ctx.needs_input_grad
        return (
            linear(grad_MN, weight_NC.T).view(x.shape) if to_x else None,
            linear(grad_MN.T, x.flatten(0, -2).T) if to_weight else None,
            grad_MN.sum(0) if to_bias else None,
        )


class RMSNorm(nn.Module):
    """RMS norm, x / √(mean x² + ε) · gain (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.gain = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (..., C) → (..., C)."""
        return F.rms_norm(x, self.gain.shape, self.gain.to(x.dtype), self.epsilon)


class LayerNorm(nn.Module):
    """Layer norm, (x − mean) / √(variance + ε) · gain + bias (Ba et al., 2016)."""

    def __init__(self, size: int, epsilon: float, *, bias: bool) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.gain = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (..., C) → (..., C)."""
        return F.layer_norm(x, self.gain.shape, self.gain, self.bias, self.epsilon)


def build_norm(a: Architecture, size: int) -> RMSNorm | LayerNorm | None:
    """Return the architecture's norm over `size` features, if it has a norm, else None."""
    if a.norm == "rms":
        return RMSNorm(size, a.norm_epsilon)
    return LayerNorm(size, a.norm_epsilon, bias=a.bias) if a.norm == "layer" else None


class Dropout(nn.Dropout):
    """Zero numbers with probability p and divide the others by 1 − p (Srivastava et al., 2014)."""

    generators: Sequence[torch.Generator] = ()
    """one for each sequence of a batch, so that draws do not depend on how a batch is divided among
    processes and threads; empty for PyTorch's own generator"""

    @property
    def is_active(self) -> bool:
        """Return True if the layer drops numbers."""
        return self.training and self.p > 0

    def forward(self, x: Tensor) -> Tensor:
        """Apply dropout, (B, ...) → (B, ...)."""
        factors = self.factors(x) if self.generators else None
        return super().forward(x) if factors is None else x * factors

    def factors(self, x: Tensor) -> Tensor | None:
        """Return the factors by which the layer multiplies x; None if it drops nothing."""
        if not self.is_active:
            return None
        kept = torch.empty_like(x)
        if not self.generators:
            return F.dropout(kept.fill_(1), self.p)
        for sequence, generator in zip(kept, self.generators, strict=True):
            sequence.bernoulli_(1 - self.p, generator=generator)
        return kept.div_(1 - self.p)


def drop_by(model: nn.Module, generators: Sequence[torch.Generator]) -> None:
    """Let each dropout of a model use generator i for sequence i of a batch."""
    for module in model.modules():
        if isinstance(module, Dropout):
            module.generators = generators


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    dropout: Callable[[Tensor], Tensor] | None = None,
    scores: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Return softmax(mask(q kᵀ / √D)) v (Vaswani et al., 2017).

    query (B, H, T, D), key (B, K, S, D), value (B, K, S, E) → (B, H, T, E). Each key and value
    head serves H / K query heads (Ainslie et al., 2023). The causal mask is aligned to the last
    key: query t sees keys up to S − T + t. The queries can therefore be the newest tokens only, and
    the keys of older tokens can come from a cache.
    `dropout` changes the attention weights, (B, H, T, S). `scores` computes other scores than
    q kᵀ / √D from queries and keys: (B, H, T, D), (B, H, S, D) → (B, H, T, S).
    """
    assert query.size(-2) <= key.size(-2), "a causal query without a key of its own"
    if dropout is None and scores is None:
        return _fused_attention(query, key, value)
    key, value = shared_heads(query.size(-3), key, value)
    if scores is None:
        scores_BHTS = query @ key.mT * query.size(-1) ** -0.5
    else:
        scores_BHTS = scores(query, key)
    later = torch.ones_like(scores_BHTS[0, 0], dtype=torch.bool)
    later = later.triu(key.size(-2) - query.size(-2) + 1)
    p_BHTS = torch.softmax(scores_BHTS.masked_fill(later, -torch.inf), -1)
    return (p_BHTS if dropout is None else dropout(p_BHTS)) @ value


def _fused_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the same by PyTorch's kernels, which do not keep all scores in memory."""
    new = query.size(-2)
    total = key.size(-2)
    mask = None
    if 1 < new < total:
        mask = torch.ones(new, total, dtype=torch.bool, device=query.device).tril(total - new)
    in_groups = key.size(-3) < query.size(-3) and mask is None and reads_groups(query)
    if not in_groups:
        key, value = shared_heads(query.size(-3), key, value)
    return F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=1 < new == total, enable_gqa=in_groups
    )


def shared_heads(heads: int, *kv: Tensor) -> tuple[Tensor, ...]:
    """Return keys or values (B, K, S, D) repeated for all query heads, (B, H, S, D)."""
    return tuple(
        x if x.size(-3) == heads else x.repeat_interleave(heads // x.size(-3), dim=-3) for x in kv
    )


def reads_groups(query: Tensor) -> bool:
    """Return True if query heads that share keys and values should read them in place, not copies.

    On CUDA, only PyTorch's flash kernel can read them in place, and it needs half precision. On a
    CPU, copies are faster.
    """
    is_half = query.dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled("cuda")
    return query.is_cuda and is_half


def rotation_of(a: Architecture, dtype: torch.dtype = torch.float32) -> Rotation:
    """Return cosines and sines (T, D) of all rotary positions of a model.

    Each feature in the first half of a head is paired with one in the second, as in Llama and Qwen.
    """
    if torch.get_default_device().type == "meta":  # a model's skeleton has no numbers
        return torch.empty(a.block_size, a.head_dim), torch.empty(a.block_size, a.head_dim)
    cosines, sines = map(torch.from_numpy, rotary_angles(a))
    return cosines.to(dtype).repeat(1, 2), sines.to(dtype).repeat(1, 2)


def rotate(x: Tensor, cosines_TD: Tensor, sines_TD: Tensor) -> Tensor:
    """Return x, (..., T, D), with each pair of features rotated by its angle at each position."""
    cosines_TD = cosines_TD.to(x.dtype)
    sines_TD = sines_TD.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return x * cosines_TD + torch.cat((-second, first), dim=-1) * sines_TD


class LayerCache:
    """The keys and values of one attention layer, for at most `capacity` tokens."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._stored: tuple[Tensor, ...] = ()

    def append(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Append tensors of new tokens, (..., T, size); return tensors of all, (..., S, size)."""
        if not self._stored:
            self._stored = tuple(n.new_empty(*n.shape[:-2], self.capacity, n.size(-1)) for n in new)
        start = self.length
        self.length += new[0].size(-2)
        for stored, n in zip(self._stored, new, strict=True):
            stored[..., start : self.length, :] = n
        return tuple(stored[..., : self.length, :] for stored in self._stored)


class SelfAttention(nn.Module):
    """Causal self-attention with H heads of any size D, all computed together.

    D = C/H gives the usual, narrow heads, and D = C gives wide heads. The outputs of the heads are
    concatenated (width H·D) and, with a projection, mapped to width C. Queries and keys may be
    normalised (Henry et al., 2020) and rotated according to their positions, as in Qwen3.
    """

    scores: nn.Module | None
    """the user's own scores of queries and keys; see `attention`"""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.scores = None
        self.heads = a.heads
        self.kv_heads = a.num_kv_heads
        self.head_size = a.head_dim
        # With a residual stream, dropout applies to the attention's output instead, so that
        # attention kernels without dropout can be used.
        self.dropout = Dropout(a.dropout) if a.dropout and not a.residual else None
        width = a.heads * a.head_dim
        kv_width = a.num_kv_heads * a.head_dim
        std = a.width**-0.5
        # One-layer rungs do not normalise the embeddings: larger initial scores lead to a dead head
        # with some seeds.
        sharp = std if a.residual else 0.35 * std
        self.query = Linear(a.width, width, bias=a.qkv_bias, std=sharp)
        self.key = Linear(a.width, kv_width, bias=a.qkv_bias, std=sharp)
        self.value = Linear(a.width, kv_width, bias=a.qkv_bias, std=std)
        self.query_norm = RMSNorm(a.head_dim, a.norm_epsilon) if a.query_key_norm else None
        self.key_norm = RMSNorm(a.head_dim, a.norm_epsilon) if a.query_key_norm else None
        self.projection = Linear(width, a.width, bias=a.bias) if a.projection else None
        if self.projection is not None and a.residual:
            for parameter in self.projection.parameters():
                nn.init.zeros_(parameter)

    def forward(
        self,
        x_BTC: Tensor,
        rotation: Rotation | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Map (B, T, C) → (B, T, C), or (B, T, H·D) without a projection."""
        query, key, value = (
            x_BTN.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for x_BTN in (self.query(x_BTC), self.key(x_BTC), self.value(x_BTC))
        )
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if rotation is not None:
            query, key = rotate(query, *rotation), rotate(key, *rotation)
        if cache is not None:
            key, value = cache.append(key, value)
        dropout = self.dropout if self.dropout is not None and self.dropout.is_active else None
        mixed_BHTD = attention(query, key, value, dropout=dropout, scores=self.scores)
        mixed = mixed_BHTD.transpose(1, 2).flatten(2)
        return mixed if self.projection is None else self.projection(mixed)


class ParameterFreeAttention(nn.Module):
    """Attention whose queries, keys and values are the embeddings: it has no parameters.

    If `uniform`, all scores are 0: each token becomes the mean of itself and all tokens before it.
    """

    def __init__(self, *, uniform: bool) -> None:
        super().__init__()
        self.uniform = uniform

    def forward(
        self,
        x_BTC: Tensor,
        rotation: None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Map (B, T, C) → (B, T, C)."""
        value = x_BTC.unsqueeze(1)
        query = key = torch.zeros_like(value) if self.uniform else value
        if cache is not None:
            key, value = cache.append(key, value)
        return attention(query, key, value).squeeze(1)


class MLP(nn.Module):
    """An MLP, down(f(up(x))), where f is GELU in GPT-2's tanh approximation,
    or ReLU² (So et al., 2021).

    With SwiGLU (Shazeer, 2020), the MLP is down(silu(gate(x)) · up(x)).
    """

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.kind = a.mlp
        std = a.width**-0.5
        down = Linear(a.mlp_dim, a.width, bias=a.bias)
        self.gate = Linear(a.width, a.mlp_dim, bias=a.bias, std=std) if a.mlp == "swiglu" else None
        self.up = Linear(a.width, a.mlp_dim, bias=a.bias, std=std)
        self.down = down
        if a.residual:
            for parameter in self.down.parameters():
                nn.init.zeros_(parameter)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Map (B, T, C) → (B, T, C)."""
        if self.gate is not None:
            hidden_BTF = F.silu(self.gate(x_BTC)) * self.up(x_BTC)
        elif self.kind == "gelu":
            hidden_BTF = F.gelu(self.up(x_BTC), approximate="tanh")
        else:
            hidden_BTF = F.relu(self.up(x_BTC)).square()
        down: Tensor = self.down(hidden_BTF)
        return down
