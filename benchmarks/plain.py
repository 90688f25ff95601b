"""The plain loop: a small attention model written and trained the way lectures do it.

Separate heads in a list, a mask that is registered, windows stacked from a list, PyTorch's AdamW
with its defaults, one step per call. attnlm is measured against
`python -m benchmarks.plain TEXT --heads 4 --steps 10000`, which prints its loss and speed as JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Head(nn.Module):
    """One head of causal self-attention."""

    mask: Tensor

    def __init__(self, embed_dim: int, head_size: int, block_size: int) -> None:
        super().__init__()
        self.key = nn.Linear(embed_dim, head_size, bias=False)
        self.query = nn.Linear(embed_dim, head_size, bias=False)
        self.value = nn.Linear(embed_dim, head_size, bias=False)
        self.register_buffer("mask", torch.tril(torch.ones(block_size, block_size)))

    def forward(self, x: Tensor) -> Tensor:
        length = x.size(1)
        key, query = self.key(x), self.query(x)
        weights = query @ key.transpose(-2, -1) * key.size(-1) ** -0.5
        weights = weights.masked_fill(self.mask[:length, :length] == 0, float("-inf"))
        mixed: Tensor = F.softmax(weights, dim=-1) @ self.value(x)
        return mixed


class PlainModel(nn.Module):
    """Embedding, learned positions, heads in a list, a linear LM head."""

    def __init__(self, vocab_size: int, embed_dim: int, heads: int, block_size: int) -> None:
        super().__init__()
        self.block_size = block_size
        self.token_embedding = nn.Embedding(vocab_size, embed_dim)
        self.position_embedding = nn.Embedding(block_size, embed_dim)
        self.heads = nn.ModuleList(
            Head(embed_dim, embed_dim // heads, block_size) for _ in range(heads)
        )
        self.lm_head = nn.Linear(embed_dim, vocab_size)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor]:
        batch, length = tokens.shape
        positions = self.position_embedding(torch.arange(length))
        x = self.token_embedding(tokens) + positions
        x = torch.cat([head(x) for head in self.heads], dim=-1)
        logits = self.lm_head(x)
        if targets is None:
            return logits, torch.zeros(())
        loss = F.cross_entropy(logits.view(batch * length, -1), targets.view(batch * length))
        return logits, loss

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int) -> Tensor:
        for _ in range(count):
            logits, _ = self(tokens[:, -self.block_size :])
            probabilities = F.softmax(logits[:, -1, :], dim=-1)
            tokens = torch.cat((tokens, torch.multinomial(probabilities, 1)), dim=1)
        return tokens


def get_batch(data: Tensor, batch_size: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Windows stacked from a list, and the same one token further on."""
    starts = torch.randint(len(data) - block_size, (batch_size,))
    inputs = torch.stack([data[i : i + block_size] for i in starts])
    targets = torch.stack([data[i + 1 : i + block_size + 1] for i in starts])
    return inputs, targets


def train(
    model: PlainModel, data: Tensor, steps: int, batch_size: int, learning_rate: float = 1e-3
) -> float:
    """Makes `steps` updates; returns the steps made per second."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    began = time.perf_counter()
    for _ in range(steps):
        inputs, targets = get_batch(data, batch_size, model.block_size)
        _, loss = model(inputs, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    return steps / (time.perf_counter() - began)


def encode(text: str) -> tuple[Tensor, Tensor, int]:
    """Ids of the first nine tenths of a text and of the rest, and how many ids there are."""
    characters = sorted(set(text))
    ids = {character: i for i, character in enumerate(characters)}
    data = torch.tensor([ids[character] for character in text], dtype=torch.long)
    cut = int(0.9 * len(data))
    return data[:cut], data[cut:], len(characters)


@torch.no_grad()
def validation_loss(model: PlainModel, data: Tensor) -> float:
    """The mean over all windows of the validation split."""
    size = model.block_size
    whole = (len(data) - 1) // size
    total = 0.0
    for first in range(0, whole, 256):
        count = min(256, whole - first)
        part = data[first * size : (first + count) * size + 1]
        _, loss = model(part[:-1].view(count, size), part[1:].view(count, size))
        total += loss.item() * count
    return total / whole


def main() -> None:
    """Train on a text file and sample from the model, as the script of a lecture does.

    The speed is that of the steps, or, without steps, of tokens that are sampled past the context.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("text", type=Path)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=100)
    given = parser.parse_args()
    torch.manual_seed(1)
    train_data, val_data, vocab_size = encode(given.text.read_text(encoding="utf-8"))
    model = PlainModel(vocab_size, embed_dim=32, heads=given.heads, block_size=32)
    figures = {}
    if given.steps:
        train(model, train_data, 5, batch_size=16)
        steps_per_second = train(model, train_data, given.steps, batch_size=16)
        figures["tokens_per_second"] = steps_per_second * 16 * model.block_size
        figures["val_loss"] = validation_loss(model, val_data)
    text = model.generate(torch.zeros(1, 1, dtype=torch.long), model.block_size)
    began = time.perf_counter()
    model.generate(text, given.tokens)
    figures.setdefault("tokens_per_second", given.tokens / (time.perf_counter() - began))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
