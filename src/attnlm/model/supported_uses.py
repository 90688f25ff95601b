"""What each use of a model needs of an Architecture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnlm.model.costs import map_shapes
from attnlm.model.spec import Use

if TYPE_CHECKING:
    from attnlm.model.architecture import Architecture

# Code that computes a model without calling its modules. It refuses a model with a part that it
# does not know: a part whose field names the code in `known_to`, or has its default, is known.
USES_WITHOUT_MODULES = frozenset(
    {
        *(Use.TRACE, Use.PAGE, Use.PAGE_TRAINING, Use.NATIVE_DECODER),
        *(Use.NATIVE_BLOCKS, Use.ONE_LAYER),
    }
)

# One-layer form: the C code keeps a query's sums in vectors of at most 64 numbers, and all maps
# of a window in memory.
_ONE_LAYER_HEAD, _ONE_LAYER_CONTEXT = 64, 256


def needed_for(use: Use, a: Architecture) -> dict[str, bool]:
    """Return what a use needs, in words, and whether the architecture has it."""
    softmax = a.attention == "softmax"
    blocks = {"blocks": a.embed_dim is not None}
    match use:
        case Use.RECOMPUTE | Use.NATIVE_DECODER:
            return blocks
        case Use.PAGE_TRAINING:
            return {
                "RMS norm or no norm": a.norm != "layer",
                "a SwiGLU MLP or no MLP": a.mlp in ("swiglu", "none"),
                "no dropout": not a.dropout,
            }
        case Use.MUON:
            return {"matrices inside its blocks": bool(map_shapes(a))}
        case Use.ATTENTION_MAPS:
            return {"attention": a.maps_per_layer > 0}
        case Use.NATIVE_BLOCKS:
            return {
                "softmax attention": softmax,
                "residual connections": a.residual,
                "a projection": a.projection,
            }
        case Use.ONE_LAYER:
            return blocks | {
                "a bias in the LM head": a.head_bias,
                "as many key/value heads as heads": a.num_kv_heads == a.heads,
                "heads of at most 64 features": a.head_dim <= _ONE_LAYER_HEAD,
                "at most 256 tokens of context": a.block_size <= _ONE_LAYER_CONTEXT,
            }
        case Use.SLIDING_WINDOW:
            return {
                "one layer": a.layers == 1,
                "positions that are not rotary": a.positions != "rotary",
                "no MLP": a.mlp == "none",
            }
    return {}
