"""Which sizes and parts of an architecture fit each other; UsageError names what would fit."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import TYPE_CHECKING

from attnlm.base.errors import UsageError

if TYPE_CHECKING:
    from attnlm.model.architecture import Architecture

_LARGEST_ROTARY_TABLE = 2**24  # numbers
_WIDEST_HEADS = 2**24  # all of a layer's together: a matrix's bytes fit into 64 bits


def _check_heads(a: Architecture, width: int) -> None:
    if a.attention != "softmax":
        return
    if a.head_size is None and not a.wide_heads and width % a.heads:
        narrowest = 2 if a.positions == "rotary" else 1
        step = narrowest * a.heads
        heads = _nearest(a.heads, [n for n in range(1, width + 1) if width % (n * narrowest) == 0])
        raise UsageError(
            f"`embed_dim` {width} can't be divided into `heads` {a.heads}",
            (f"give `heads` {heads}, or `embed_dim` " if heads else "give `embed_dim` ")
            + _nearest(width, range(step, width + step + 1, step)),
        )
    if a.heads * a.head_dim > _WIDEST_HEADS:
        raise UsageError(
            f"`heads` {a.heads} of {a.head_dim} are too wide together",
            f"give `heads` {max(1, _WIDEST_HEADS // a.head_dim)} or fewer",
        )
    if a.heads % a.num_kv_heads:
        raise UsageError(
            f"`heads` {a.heads} can't share `kv_heads` {a.kv_heads} evenly",
            "give `kv_heads` "
            + _nearest(a.num_kv_heads, [n for n in range(1, a.heads + 1) if a.heads % n == 0]),
        )
    if a.body_dim == width:
        return
    for part, is_there in {
        "a residual stream": a.residual,
        "an MLP": a.mlp != "none",
        "a second layer": a.layers > 1,
        "a shared embedding matrix": a.tie_embeddings,
        "a norm": a.norm != "none",
    }.items():
        if is_there:
            raise UsageError(
                f"{part} needs `heads` × `head_size` = `embed_dim` without a `projection`",
                "give a `projection`",
            )


def _nearest(wanted: int, possible: Sequence[int]) -> str:
    """Of ascending numbers the one just below `wanted` and the one just above: `4 or 8`."""
    above = bisect.bisect(possible, wanted)
    return " or ".join(map(str, possible[max(0, above - 1) : above + 1]))


def _check_rotary(a: Architecture, width: int) -> None:
    if a.positions != "rotary":
        return
    if a.attention != "softmax":
        raise UsageError(
            f"rotary positions turn queries and keys, and `attention` {a.attention} has none",
            "give `positions` learned or none",
        )
    if a.head_dim % 2:
        raise UsageError(
            f"rotary positions turn pairs of numbers, and `head_size` {a.head_dim} is odd",
            f"give `head_size` {a.head_dim + 1}",
        )
    if a.block_size * a.head_dim > _LARGEST_ROTARY_TABLE:
        raise UsageError(
            f"a table of rotary positions for `block_size` {a.block_size} and heads of "
            f"{a.head_dim} is too large",
            f"give `block_size` {max(1, _LARGEST_ROTARY_TABLE // a.head_dim)} or less",
        )


def _check_blocks(a: Architecture, width: int) -> None:
    if a.attention == "none" and a.mlp == "none":
        raise UsageError(
            "a block with `attention` none and `mlp` none does nothing",
            "give `attention` softmax, or an `mlp`",
        )


CHECKS = (_check_blocks, _check_heads, _check_rotary)
