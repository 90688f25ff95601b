"""A model as in a lecture: heads in a list, and logits flattened with the targets.

attnlm check examples/lecture.py:LectureModel
attnlm train --model examples/lecture.py:LectureModel --set heads=4
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Head(nn.Module):
    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, size) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        past = torch.ones(x.size(1), x.size(1), device=x.device).tril()
        scores = (q @ k.mT * k.size(-1) ** -0.5).masked_fill(past == 0, -torch.inf)
        return F.softmax(scores, dim=-1) @ v


class LectureModel(nn.Module):
    def __init__(self, vocab_size: int, block_size: int, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.places = nn.Embedding(block_size, width)
        self.heads = nn.ModuleList(Head(width, width // heads) for _ in range(heads))
        self.output = nn.Linear(width, vocab_size)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.tokens(ids) + self.places.weight[: ids.size(1)]
        logits = self.output(torch.cat([head(x) for head in self.heads], dim=-1))
        if targets is None:
            return logits, None
        logits, targets = logits.flatten(0, 1), targets.flatten()  # (B·T, V) and (B·T)
        return logits, F.cross_entropy(logits, targets)
