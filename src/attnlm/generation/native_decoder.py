"""Decoders of our models made of NumPy arrays: a bigram's table, and compute/native/decoding.c.

Axes: B samples, S tokens of the window, C embed_dim, H heads, K key and value heads, D head size,
V vocabulary, L layers.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from attnlm.compute.native import native_library
from attnlm.compute.native.structs import MLPS, NORMS, CBlock, CLinear, CMemory, CModel
from attnlm.compute.threads import cores
from attnlm.generation.next_token import Array, Ids, NewDecoder
from attnlm.model.architecture import Architecture
from attnlm.model.costs import rotary_angles
from attnlm.model.spec import ModelSpec, is_ours

_Floats = NDArray[np.float32]
Weights = Mapping[str, _Floats]

# As in the C file. A panel holds 32 rows of a linear layer's matrix.
_PANEL = 32

_FEWEST_SHARED = 400_000
"""Several threads compute a step only if its matmuls have at least this many products. With fewer,
synchronizing the threads takes longer than the step."""
_ROWS_OF_SMALL = 64
_MOST_ROWS_OF_LARGE = 512
"""The most tokens that go through all layers together, in a small and in a large model."""
_LARGE_MODEL = 2**23
"""A model with at least this many weights in its linear layers is large: they exceed a processor's
cache, so that threads which share each token save time."""
_MOST_ON_CPU = 30_000_000
"""The most weights with which the decoder in C generates a text faster than a GPU, which waits at
each token for the launches of its kernels (docs/speed.md)."""


def decoders_from_weights(
    spec: ModelSpec, vocab_size: int, read_weights: Callable[[], Weights]
) -> NewDecoder | None:
    """Return decoders, in NumPy or in C, of a model of ours that has these weights, in float32;
    None if there are no kernels."""
    assert is_ours(spec)
    if not spec.width:
        table_VV = read_weights()["table.weight"]
        return lambda _: BigramTable(table_VV)
    if (library := native_library()) is None:
        return None
    model = NativeModel(spec, vocab_size, read_weights(), library)
    return lambda texts: NativeDecoder(model, texts)


def is_fastest_on_cpu(spec: ModelSpec, vocab_size: int) -> bool:
    """Return True if a CPU generates text faster than a GPU."""
    if not is_ours(spec):
        return False
    costs = spec.costs(vocab_size)
    is_small = native_library() is not None and costs.multiplied_weights < _MOST_ON_CPU
    return is_small or not costs.width


class BigramTable:
    """The decoder of a bigram: the row of a token has the logits of the next token."""

    def __init__(self, table_VV: Array) -> None:
        self._table_VV = table_VV

    def logits(self, ids_BS: Ids, known: int) -> Array:
        """Return the next token's logits, (B, V)."""
        rows: Array = self._table_VV[ids_BS[:, -1]]
        return rows


class NativeModel:
    """The weights of a model in the layout of the C file, for any number of decoders."""

    def __init__(
        self, a: Architecture, vocab_size: int, weights: Weights, library: ctypes.CDLL
    ) -> None:
        self.architecture = a
        self.library = library
        heads, kv_heads, size = {
            "softmax": (a.heads, a.num_kv_heads, a.head_dim),
            "none": (0, 0, 0),
        }.get(a.attention, (1, 1, a.width))
        blocks = [
            _c_block(a, size, _with_prefix(weights, f"blocks.{layer}."))
            for layer in range(a.layers)
        ]
        c_blocks = (CBlock * a.layers)(*blocks)
        self.first_block = blocks[0]
        self._kept_alive = (blocks, c_blocks)
        if a.tie_embeddings:
            weights = {**weights, "head.weight": weights["token_embedding.weight"]}
        layers = [lm_head := _linear_layer(weights, "head")]
        for block in blocks:
            layers += block.qkv, block.projection, block.up, block.down
        self.numbers = sum(layer.inputs * layer.outputs for layer in layers)
        self.is_large = self.numbers >= _LARGE_MODEL
        positions = {}
        if a.positions == "learned":
            positions = {"positions": weights["position_embedding.weight"]}
        elif a.positions == "rotary":
            cosines, sines = rotary_angles(a)
            positions = {"cosines": cosines.astype(np.float32), "sines": sines.astype(np.float32)}
        key_at = _rounded_to_panels(heads * size) if a.attention == "softmax" else 0
        self.layout = CModel(
            layers=a.layers,
            width=a.width,
            vocab_size=vocab_size,
            heads=heads,
            kv_heads=kv_heads,
            size=size,
            key_at=key_at,
            value_at=key_at + _rounded_to_panels(kv_heads * size) if key_at else 0,
            norm=NORMS.index(a.norm),
            normed_heads=a.query_key_norm,
            residual=a.residual,
            mlp=MLPS.index(a.mlp),
            epsilon=a.norm_epsilon,
            tokens=weights["token_embedding.weight"],
            blocks=ctypes.addressof(c_blocks),
            last_norm=_norm_arrays(_with_prefix(weights, "norm."), a.lm_head_inputs),
            lm_head=lm_head,
            **positions,
        )


class NativeDecoder:
    """A decoder with a cache for any model that has embeddings, on a CPU in float32.

    Its `threads` share each token, or compute windows of their own if a small model has several.
    """

    def __init__(self, model: NativeModel, num_samples: int, threads: int | None = None) -> None:
        a = model.architecture
        layout = model.layout
        first_block = model.first_block
        capacity = _rounded_to_panels(a.block_size)
        mixed_stride = _rounded_to_panels(layout.heads * layout.size)
        stride = max(_rounded_to_panels(a.width), mixed_stride)
        if threads is None:
            threads = cores() if model.numbers * num_samples >= _FEWEST_SHARED else 1
        divides_windows = num_samples > 1 and not model.is_large
        rows = (
            min(_MOST_ROWS_OF_LARGE, num_samples * a.block_size)
            if model.is_large
            else _ROWS_OF_SMALL
        )
        all_rows = rows * (threads if divides_windows else 1)
        cache_size = a.layers * num_samples * layout.kv_heads * capacity * layout.size
        logits = np.empty((num_samples, _rounded_to_panels(layout.vocab_size)), np.float32)
        self._logits_BV = logits[:, : layout.vocab_size]
        self._out = logits.ctypes.data
        self._samples = num_samples
        self._block_size = a.block_size
        self._model = model  # kept alive: the calls read its memory
        self._memory = CMemory(
            rows=rows,
            capacity=capacity,
            stride=stride,
            mixed_stride=mixed_stride,
            keys=_allocate_floats(cache_size),
            values=_allocate_floats(cache_size),
            x=_allocate_floats(all_rows * stride),
            normed=_allocate_floats(all_rows * stride),
            packed=_allocate_floats(all_rows * first_block.qkv.outputs),
            mixed=_allocate_floats(all_rows * mixed_stride),
            hidden=_allocate_floats(all_rows * first_block.up.outputs),
            query=_allocate_floats(threads * (layout.size + _PANEL)),
            scores=_allocate_floats(threads * capacity),
        )
        crew = model.library.start_crew(threads)
        if not crew:
            raise MemoryError
        weakref.finalize(self, model.library.end_crew, crew)
        self._next_logits = functools.partial(
            model.library.next_logits,
            crew,
            ctypes.addressof(layout),
            ctypes.addressof(self._memory),
            divides_windows,
        )

    def logits(self, ids_BS: Ids, known: int) -> _Floats:
        """Return the next token's logits, (B, V), in memory that the next call uses again.

        The cache must hold the first `known` tokens of the window `ids_BS`. Raises IndexError for
        an id that the vocabulary lacks.
        """
        samples, length = ids_BS.shape
        assert samples == self._samples and length <= self._block_size
        new = ids_BS[:, known:].tobytes()
        if not self._next_logits(samples, length - known, known, new, self._out):
            raise IndexError("an id is outside the vocabulary")
        return self._logits_BV


def _c_block(a: Architecture, size: int, weights: Weights) -> CBlock:
    """Return a block with the given weights; `size` is the width of a head."""
    # A scale of 0 makes all scores 0 and all weights equal.
    scale = 0 if a.attention == "uniform" else max(1, size) ** -0.5
    ones = np.ones(size, np.float32)
    key_gains = weights.get("attention.key_norm.gain", ones)
    are_keys_unchanged = not a.query_key_norm and a.positions != "rotary"
    gate = ["mlp.gate"] if a.mlp == "swiglu" else []
    return CBlock(
        attention_norm=_norm_arrays(_with_prefix(weights, "attention_norm."), a.width),
        mlp_norm=_norm_arrays(_with_prefix(weights, "mlp_norm."), a.width),
        query_gains=weights.get("attention.query_norm.gain", ones) * np.float32(scale),
        key_gains=None if are_keys_unchanged else key_gains,
        qkv=_linear_layer(weights, "attention.query", "attention.key", "attention.value"),
        projection=_linear_layer(weights, "attention.projection"),
        up=_linear_layer(weights, *gate, "mlp.up"),
        down=_linear_layer(weights, "mlp.down"),
    )


def _rounded_to_panels(size: int) -> int:
    """Return `size` rounded up to a multiple of 32, the rows of a panel."""
    return -(-size // _PANEL) * _PANEL


def _allocate_floats(size: int) -> _Floats:
    """Return memory for `size` numbers, and 32 more, since C reads whole vectors at the end."""
    return np.zeros(size + _PANEL, np.float32)


def _with_prefix(weights: Weights, prefix: str) -> dict[str, _Floats]:
    """Return the weights whose names begin with `prefix`, by their names without the prefix."""
    return {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}


def _norm_arrays(weights: Weights, size: int) -> _Floats:
    """Return a norm's gains and biases, (2, C); ones and zeros where the model has none."""
    gain = weights.get("gain", np.ones(size, np.float32))
    return np.stack((gain, weights.get("bias", np.zeros_like(gain))))


def _linear_layer(weights: Weights, *names: str) -> CLinear:
    """Return linear layers of the same input as one layer, or an empty one if the model lacks them.

    The rows of the matrices are copied to panels, (N/32, C, 32).
    """
    if f"{names[0]}.weight" not in weights:
        return CLinear()
    bias_N = _concatenated(weights, "bias", *names)
    matrix_NC = _concatenated(weights, "weight", *names)
    inputs = matrix_NC.shape[1]
    panels = matrix_NC.reshape(-1, _PANEL, inputs).transpose(0, 2, 1).copy()
    return CLinear(inputs=inputs, outputs=len(bias_N), panels=panels, bias=bias_N)


def _concatenated(weights: Weights, kind: str, *names: str) -> _Floats:
    """Concatenate the matrices (N, C) or the biases (N) of linear layers along N.

    Zeros fill up the last panel (32 rows) of each layer, and replace a bias that a layer lacks.
    """
    padded = list[_Floats]()
    for name in names:
        outputs = len(weights[f"{name}.weight"])
        rows = weights.get(f"{name}.{kind}", np.zeros(outputs, np.float32))
        missing = (_rounded_to_panels(outputs) - outputs, *rows.shape[1:])
        padded += [rows, np.zeros(missing, np.float32)]
    return np.concatenate(padded)
