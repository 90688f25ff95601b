"""The library of heads: each computes what its paper says, is causal, and is used by its name."""

from __future__ import annotations

import hashlib
import json
import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attnlm
from attnlm.base import own_code
from attnlm.base.own_code import CodeNotAcceptedError, OwnCode, named_code
from attnlm.model.own_parts import build_module
from tests.kit import command
from tests.tolerances import assert_near

C, H, D, T = 12, 2, 6, 7
SIZES = {"embed_dim": C, "heads": H, "head_size": D, "block_size": T, "layer": 1}


def made(name: str) -> Any:
    """A head with random weights."""
    torch.manual_seed(0)
    head = build_module(named_code(name), SIZES, {})
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.5)
    return head


def distances() -> Tensor:
    place = torch.arange(T)
    return place[:, None] - place


# --- Scores ---------------------------------------------------------------------------------------


def _t5_bias(head: Any, q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / D**0.5 + head.bias[distances().clamp(0)].permute(2, 0, 1)


def _gaussian_windows(head: Any, q: Tensor, k: Tensor) -> Tensor:
    w, b = head.log_narrowness.exp(), -head.log_offset.exp()
    return q @ k.mT / D**0.5 - (w * distances() ** 2 + b).abs()


SCORES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "alibi": lambda _, q, k: (
        q @ k.mT / D**0.5 - torch.tensor([2**-4, 2**-8])[:, None, None] * distances()
    ),
    "t5-bias": _t5_bias,
    "soft-capping": lambda _, q, k: 50 * torch.tanh(q @ k.mT / D**0.5 / 50),
    "cosine-attention": lambda head, q, k: (
        head.scale * F.cosine_similarity(q[..., :, None, :], k[..., None, :, :], dim=-1)
    ),
    "gaussian-windows": _gaussian_windows,
}


@pytest.mark.parametrize("name", SCORES)
def test_scores_are_what_the_paper_says(name: str) -> None:
    head = made(name)
    q, k = torch.randn(2, 3, H, T, D)
    later = distances() < 0
    found, wanted = (
        scores.masked_fill(later, 0) for scores in (head(q, k), SCORES[name](head, q, k))
    )
    assert_near(found, wanted)


def test_t5s_far_distances_share_biases() -> None:
    buckets = made("t5-bias").bucket(torch.tensor([15, 16, 18, 19, 32, 63, 64, 127, 128, 9999]))
    assert buckets.tolist() == [15, 16, 16, 17, 21, 26, 26, 31, 31, 31]


# --- Attention: each output of a head by a loop over its tokens -----------------------------------

Read = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values of one head, each (T, D)."""


def reads(head: Any, x: Tensor, inputs: tuple[Tensor, ...] = ()) -> list[Read]:
    """What each head reads from a text x, (T, C)."""
    inputs = inputs or (x, x, x)
    modules = (head.query, head.key, head.value)
    parts = [f(y).chunk(H, -1) for f, y in zip(modules, inputs, strict=True)]
    return list(zip(*parts, strict=True))


def projected(head: Any, mixed: list[Tensor]) -> Tensor:
    return head.project(torch.cat(mixed, -1))


def usual(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Softmax attention of one head, token by token."""
    rows = []
    for t in range(T):
        scores = k[: t + 1] @ q[t] / D**0.5 + (0 if bias is None else bias[t, : t + 1])
        rows.append(scores.softmax(0) @ v[: t + 1])
    return torch.stack(rows)


def _talking_heads(head: Any, x: Tensor) -> Tensor:
    every = reads(head, x)
    scores = torch.stack([q @ k.T / D**0.5 for q, k, _ in every])
    later = distances() < 0
    weights = [
        sum(scores[h] * head.before[h, g] for h in range(H)).masked_fill(later, -1e9).softmax(-1)
        for g in range(H)
    ]
    return projected(
        head,
        [sum(weights[h] * head.after[h, g] for h in range(H)) @ every[g][2] for g in range(H)],
    )


def _gated_attention(head: Any, x: Tensor) -> Tensor:
    mixed = torch.cat([usual(*one) for one in reads(head, x)], -1)
    return head.project(torch.sigmoid(head.gate(x)) * mixed)


def _linear_attention(head: Any, x: Tensor) -> Tensor:
    mixed = []
    for q, k, v in reads(head, x):
        weights = ((F.elu(q) + 1) @ (F.elu(k) + 1).T).tril()
        mixed.append(weights / weights.sum(-1, keepdim=True) @ v)
    return projected(head, mixed)


def _differential_attention(head: Any, x: Tensor) -> Tensor:
    first = 0.8 - 0.6 * math.exp(-0.3)  # of the second layer
    (q1, k1), (q2, k2) = head.factors
    factor = torch.exp(q1 @ k1) - torch.exp(q2 @ k2) + first
    later = distances() < 0
    mixed = []
    for q, k, v in reads(head, x):
        signal, noise = (
            (a @ b.T / 3**0.5).masked_fill(later, -1e9).softmax(-1)
            for a, b in zip(q.chunk(2, -1), k.chunk(2, -1), strict=True)
        )
        y = (signal - factor * noise) @ v
        y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * head.norm.weight
        mixed.append((1 - first) * y)
    return projected(head, mixed)


def _token_shift(head: Any, x: Tensor) -> Tensor:
    before = torch.cat([torch.zeros(1, C), x[:-1]])
    inputs = tuple(share * x + (1 - share) * before for share in head.share)
    return projected(head, [usual(*one) for one in reads(head, x, inputs)])


def _canon(head: Any, x: Tensor) -> Tensor:
    y = x.clone()
    for t in range(T):
        for back in range(min(4, t + 1)):
            y[t] += head.convolution.weight[:, 0, 3 - back] * x[t - back]
    return projected(head, [usual(*one) for one in reads(head, y)])


def _causal_convolution(head: Any, x: Tensor) -> Tensor:
    y = head.convolution.bias.repeat(T, 1)
    for t in range(T):
        for back in range(min(4, t + 1)):
            y[t] += head.convolution.weight[:, :, 3 - back] @ x[t - back]
    return y


def _sigmoid_attention(head: Any, x: Tensor) -> Tensor:
    weights = [(q @ k.T / D**0.5 - math.log(T)).sigmoid().tril() for q, k, _ in reads(head, x)]
    return projected(head, [w @ v for w, (_, _, v) in zip(weights, reads(head, x), strict=True)])


def _forgetting(head: Any, x: Tensor) -> Tensor:
    gates = torch.sigmoid(head.forget(x))  # (T, H)
    mixed = []
    for h, one in enumerate(reads(head, x)):
        bias = torch.zeros(T, T)
        for i in range(T):
            for j in range(i):
                bias[i, j] = gates[j + 1 : i + 1, h].log().sum()
        mixed.append(usual(*one, bias))
    return projected(head, mixed)


def _sinks(head: Any, x: Tensor) -> Tensor:
    mixed = []
    for sink, (q, k, v) in zip(head.sink.flatten(), reads(head, x), strict=True):
        weights = (q @ k.T / D**0.5).exp().tril()
        mixed.append(weights @ v / (weights.sum(-1, keepdim=True) + sink.exp()))
    return projected(head, mixed)


def _retention(head: Any, x: Tensor) -> Tensor:
    mixed = []
    for h, (q, k, v) in enumerate(reads(head, x)):
        state = torch.zeros(D // 2, D, dtype=torch.complex64)
        angles = 10000.0 ** (-torch.arange(D // 2) / (D // 2))
        rows = []
        for t in range(T):  # the recurrent form
            turn = torch.exp(1j * t * angles)
            queried, stored = (torch.complex(*y[t].view(-1, 2).T) * turn for y in (q, k))
            state = (1 - 2 ** (-5 - h)) * state + stored.conj()[:, None] * v[t]
            rows.append((queried @ state).real / D**0.5)
        y = F.layer_norm(torch.stack(rows), (D,))
        each = slice(h * D, (h + 1) * D)
        mixed.append(y * head.norm.weight[each] + head.norm.bias[each])
    gate = head.gate(x)
    return head.project(gate * torch.sigmoid(gate) * torch.cat(mixed, -1))


def _gru(head: Any, x: Tensor) -> Tensor:
    gru, state, rows = head.gru, torch.zeros(C), []
    for token in x:
        of_token = F.linear(token, gru.weight_ih_l0, gru.bias_ih_l0).chunk(3)
        of_state = F.linear(state, gru.weight_hh_l0, gru.bias_hh_l0).chunk(3)
        reset, keep = ((of_token[i] + of_state[i]).sigmoid() for i in (0, 1))
        new = torch.tanh(of_token[2] + reset * of_state[2])
        state = (1 - keep) * new + keep * state
        rows.append(state)
    return torch.stack(rows)


def _echo(head: Any, x: Tensor) -> Tensor:
    before = torch.cat([torch.zeros(1, C), x[:-1]])
    return torch.cat([usual(*one) for one in reads(head, x, (x, before, x))], -1)


ATTENTION: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "talking-heads": _talking_heads,
    "gated-attention": _gated_attention,
    "linear-attention": _linear_attention,
    "differential-attention": _differential_attention,
    "token-shift": _token_shift,
    "canon": _canon,
    "causal-convolution": _causal_convolution,
    "sigmoid-attention": _sigmoid_attention,
    "forgetting": _forgetting,
    "sinks": _sinks,
    "retention": _retention,
    "gru": _gru,
    "echo": _echo,
}


@pytest.mark.parametrize("name", ATTENTION)
@torch.no_grad()
def test_attention_is_what_the_paper_says(name: str) -> None:
    head = made(name)
    x_BTC = torch.randn(2, T, C)
    wanted = torch.stack([ATTENTION[name](head, x) for x in x_BTC])
    assert_near(head(x_BTC), wanted)


# --- Every head, by its name ----------------------------------------------------------------------

HEADS = {entry.name: entry for entry in attnlm.list_heads()}


def test_every_head_has_a_test_and_a_short_file() -> None:
    assert HEADS.keys() == {*SCORES, *ATTENTION} and len(HEADS) >= 16
    lengths = [len(named_code(name).content().splitlines()) for name in HEADS]
    assert max(lengths) <= 40 and sum(lengths) <= 640


@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_causal_and_all_of_it_learns(name: str, tmp_path: Path) -> None:
    kind, *others = shlex.split(HEADS[name].command)[2:]
    part, settings = kind.removeprefix("--"), ["--block-size", 16, *others[1:]]
    said = command("check", name, "--part", part, "--json", *settings, cwd=tmp_path).stdout
    found = {finding["name"]: finding for finding in json.loads(said)["findings"]}
    assert {n: f["remedy"] for n, f in found.items() if f["remedy"]} == {}
    assert others[0] == name and found["causality"]["text"] == "logits depend on no later token"
    got, wanted = found["gradients"]["text"].split()[0:3:2]
    assert got == wanted


def test_a_run_keeps_the_head_and_opens_for_everyone(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ("--steps", 2, "--batch-size", 4, "--block-size", 16, "--seed", 1)
    command("train", "--scores", "alibi", "--positions", "none", *small, cwd=project)
    run = attnlm.open_run(checkpoint_dir=project / "checkpoints")
    (code,) = run.config.codes
    assert (code, code.path.parent) == ("alibi.py:Alibi", run.path / "code")
    assert code.content() == named_code("alibi").content()
    monkeypatch.setattr(own_code, "_SOURCES", {})  # nothing was named in this process
    monkeypatch.setenv("ATTNLM_CONFIG_DIR", str(project / "another user"))
    code.check_call({})  # a head of the library, wherever its file stands
    altered = code.content() + b"# altered"
    (project / "alibi.py").write_bytes(altered)
    other = OwnCode(code, project / "alibi.py", hashlib.sha256(altered).hexdigest())
    with pytest.raises(CodeNotAcceptedError):
        other.check_call({})
