"""How rows are divided among processes."""

from __future__ import annotations


def rows_of(rows: int, rank: int, count: int) -> slice:
    """Which of so many rows process `rank` of `count` has: as torch.chunk cuts, of equal size, of
    which the last processes have fewer, or none."""
    size = -(-rows // count)
    return slice(min(rows, rank * size), min(rows, (rank + 1) * size))
