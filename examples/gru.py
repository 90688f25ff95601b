"""A recurrent network (Cho et al., 2014), as a baseline without attention: a whole model.

attnlm check examples/gru.py:Gru
attnlm train --model examples/gru.py:Gru --set width=128
"""

from torch import Tensor, nn


class Gru(nn.Module):
    """Map ids (B, T) to logits (B, T, V)."""

    def __init__(self, vocab_size: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.gru(self.embedding(ids))
        return self.head(states)
