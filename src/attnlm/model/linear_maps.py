"""The linear maps of a block: their names, shapes and places, and their adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnlm.model.architecture import Architecture

Shape = tuple[int, int]

_PLACES = {
    **dict.fromkeys(("query", "key", "value", "projection"), "attention"),
    **dict.fromkeys(("gate", "up", "down"), "mlp"),
}
MAP_NAMES = tuple(_PLACES)
"""The linear maps of a block, in the order of computation."""


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters (Hu et al., 2021) of the linear maps named in `on`.

    Each block has such maps. A map multiplies by W + alpha/rank · B A. A (`lora_down`) has shape
    (rank, inputs), and B (`lora_up`) has shape (outputs, rank).
    """

    rank: int
    alpha: float
    on: tuple[str, ...]

    @property
    def scale(self) -> float:
        """Return the factor that multiplies B A."""
        return self.alpha / self.rank


def map_shapes(a: Architecture) -> dict[str, Shape]:
    """Return the shape (outputs, inputs) of each linear map of a block."""
    width = a.width
    shapes = dict[str, Shape]()
    if a.attention == "softmax":
        heads = a.heads * a.head_dim
        kv_heads = a.num_kv_heads * a.head_dim
        shapes |= {"query": (heads, width), "key": (kv_heads, width), "value": (kv_heads, width)}
        shapes |= {"projection": (width, heads)} if a.projection else {}
    if a.mlp != "none":
        shapes |= {"gate": (a.mlp_dim, width)} if a.mlp == "swiglu" else {}
        shapes |= {"up": (a.mlp_dim, width), "down": (width, a.mlp_dim)}
    return shapes


def map_path(layer: int, name: str) -> str:
    """Return the path of a map's module, such as `blocks.0.attention.query`."""
    return f"blocks.{layer}.{_PLACES[name]}.{name}"


def map_name(path: str) -> str:
    """Return the name of the map that has this path."""
    return path.rpartition(".")[2]
