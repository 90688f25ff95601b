"""Parts and models as users write them, for the tests of own code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attnlm.base import own_code

PARTS = '''
import math

import torch
from torch import nn
from torch.nn import functional as F


class Head(nn.Module):
    """Attention as a lecture writes it, with a temperature and a buffer for the mask."""

    def __init__(self, embed_dim, heads, block_size, start=1.0, dropout=0.0, name="plain"):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (
            nn.Linear(embed_dim, embed_dim, bias=False) for _ in range(3)
        )
        self.mix = nn.Linear(embed_dim, embed_dim)
        self.start = nn.Parameter(torch.tensor(float(start)))
        self.fixed = nn.Parameter(torch.full((3,), 0.5), requires_grad=False)
        self.drop = nn.Dropout(dropout)
        self.register_buffer("mask", torch.ones(block_size, block_size).tril())

    def forward(self, x):
        B, T, C = x.shape
        split = [f(x).view(B, T, self.heads, -1).transpose(1, 2)
                 for f in (self.query, self.key, self.value)]
        scores = split[0] @ split[1].mT / math.sqrt(C // self.heads) * self.start
        scores = scores.masked_fill(self.mask[:T, :T] == 0, float("-inf"))
        weights = self.drop(F.softmax(scores, dim=-1))
        return self.mix((weights @ split[2]).transpose(1, 2).reshape(B, T, C)) * self.fixed.sum()


class Fused(nn.Module):
    def __init__(self, embed_dim):
        super().__init__()
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim)

    def forward(self, x):
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0], None


class Convolution(nn.Module):
    def __init__(self, embed_dim, layer, size: int = 3):
        super().__init__()
        self.layer, self.size = layer, size
        self.conv = nn.Conv1d(embed_dim, embed_dim, size)

    def forward(self, x):
        return self.conv(F.pad(x.mT, (self.size - 1, 0))).mT


class Wide(nn.Module):
    def __init__(self, embed_dim, times=2):
        super().__init__()
        self.up = nn.Linear(embed_dim, times * embed_dim)

    def forward(self, x):
        return self.up(x).relu()


class Gate(nn.Module):
    def __init__(self, embed_dim):
        super().__init__()
        self.gate, self.up = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)

    def forward(self, x):
        return self.gate(x).sigmoid() * self.up(x)


class Scores(nn.Module):
    def forward(self, q, k):
        return q @ k.mT / math.sqrt(q.size(-1))


class ALiBi(Scores):
    def __init__(self, heads):
        super().__init__()
        self.slopes = [2 ** (-8 * (h + 1) / heads) for h in range(heads)]

    def forward(self, q, k):
        T, S = q.size(2), k.size(2)
        back = torch.arange(S)[None] - torch.arange(S - T, S)[:, None]
        return super().forward(q, k) + torch.tensor(self.slopes).view(-1, 1, 1) * back


class Kept(Head):
    """With buffers that training changes or that are drawn, and a frozen drawn parameter."""

    def __init__(self, embed_dim, heads, block_size):
        super().__init__(embed_dim, heads, block_size)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("order", torch.randperm(embed_dim))
        self.register_buffer("blind", torch.full((block_size, block_size), -torch.inf).triu(1))
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.randn(3)))
        self.register_buffer("coins", torch.rand(3) < 0.5)
        self.fixed.data.uniform_()

    def forward(self, x):
        before = self.seen
        if self.training:
            self.seen = self.seen + x.detach().mean()
            self.steps += 1
        turned = torch.view_as_real(self.turns).sum()
        return super().forward(x)[..., self.order] + before.sum() + self.steps + turned


def soft(logits, ids, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1)
'''

MODELS = '''
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F


class Logits(nn.Module):
    """Logits (B, T, V), with tied weights."""

    def __init__(self, vocab_size, block_size, width: int = 12):
        super().__init__()
        self.table = nn.Embedding(vocab_size, width)
        self.places = nn.Embedding(block_size, width)
        self.past = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.table.weight

    def hidden(self, ids):
        x = self.table(ids) + self.places(torch.arange(ids.size(1)))
        T = ids.size(1)
        weights = torch.softmax(torch.full((T, T), float("-inf")).triu(1), -1)
        return x + weights @ self.past(x).tanh()

    def forward(self, ids):
        return self.head(self.hidden(ids))


class Pair(Logits):
    def forward(self, idx, targets=None):
        logits = super().forward(idx)
        loss = None if targets is None else F.cross_entropy(logits.mT, targets)
        return logits, loss


class Flat(Logits):
    """As R1 and R2: logits (B·T, V) if there are targets."""

    def forward(self, idx, targets=None):
        logits = super().forward(idx)
        if targets is None:
            return logits, None
        logits = logits.flatten(0, 1)
        return logits, F.cross_entropy(logits, targets.view(-1))


class Last(Logits):
    """As nanoGPT: the last position only, unless there are targets."""

    def forward(self, idx, targets=None):
        x = self.hidden(idx)
        if targets is None:
            return self.head(x[:, [-1], :]), None
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.view(-1))


class Output(Logits):
    def forward(self, input_ids):
        return SimpleNamespace(logits=super().forward(input_ids))


class Recurrent(nn.Module):
    def __init__(self, vocab_size, width=12, dropout=0.2):
        super().__init__()
        self.table = nn.Embedding(vocab_size, width)
        self.cells = nn.GRU(width, width, batch_first=True)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, ids):
        return self.head(self.drop(self.cells(self.table(ids))[0]))


@dataclass  # which looks for the module of its class
class Sizes:
    vocab: int
    width: int = 12


def lecture(vocab_size, block_size, width=12):
    sizes = Sizes(vocab_size, width)
    return Logits(sizes.vocab, block_size, sizes.width)
'''

LEAK = """
from torch import nn

class Leak(nn.Module):
    def forward(self, x):
        return x + x.flip(1)
"""

SMALL: dict[str, Any] = {"steps": 4, "eval_every": 2, "batch_size": 4, "block_size": 12, "seed": 1}
SMALL |= {"threads": 1, "device": "cpu"}


def written(folder: Path) -> Path:
    """Write parts.py and models.py to a folder."""
    folder.mkdir(exist_ok=True)
    (folder / "parts.py").write_text(PARTS)
    (folder / "models.py").write_text(MODELS)
    return folder


def become_another_user(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Forget each file that was named, accepted or run, as in a new process of another user."""
    patch.setenv("ATTNLM_CONFIG_DIR", str(folder / "config"))
    become_a_new_process(patch)


def become_a_new_process(patch: pytest.MonkeyPatch) -> None:
    """Forget each file that was named, accepted or run in this process."""
    patch.setattr(own_code, "_SOURCES", {})
