"""Decoders by native/decoding.c: weights are laid out for it, and each step is one call."""

from __future__ import annotations

import ctypes

import numpy as np

from attnlm.generation.decoding_numpy import Array, Ids, OneLayerDecoder, as_array, blocks_of
from attnlm.model.models import AttentionModel, Block, Transformer

_PANEL = 32


class _Laid(ctypes.Structure):
    """A struct of the C file; the arrays that it points at live as long as it does."""

    def __init__(self, **values: int | Array) -> None:
        super().__init__()
        self._arrays: list[Array] = []
        for name, value in values.items():
            self.point(name, value) if isinstance(value, np.ndarray) else setattr(self, name, value)

    def point(self, name: str, array: Array) -> None:
        """Lets a field point at an array's numbers."""
        array = np.ascontiguousarray(array, np.float32)
        self._arrays.append(array)
        setattr(self, name, array.ctypes.data)


_Field = tuple[str, type[ctypes.c_int64] | type[ctypes.c_void_p]]


def _numbers(*names: str) -> list[_Field]:
    return [(name, ctypes.c_int64) for name in names]


def _pointers(*names: str) -> list[_Field]:
    return [(name, ctypes.c_void_p) for name in names]


class _OneLayer(_Laid):
    _fields_ = (
        *_numbers("heads", "size", "vocab_size"),
        *_pointers("token_queries", "position_queries"),
        *_pointers("token_keys_values", "position_keys_values"),
        *_pointers("head", "bias", "scratch"),
    )


class _Block(_Laid):
    _fields_ = (*_pointers("qkv", "gains", "projection", "gate_up", "down", "keys", "values"),)


class _Transformer(_Laid):
    _fields_ = (
        *_numbers("layers", "width", "heads", "size", "hidden", "block_size", "vocab_size"),
        *_pointers("embedding", "head", "cosines", "sines", "blocks", "scratch"),
    )


class _Logits:
    """Where the C functions write, (B, V) filled up to whole panels."""

    def __init__(self, num_samples: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._panels = np.empty((num_samples, -(-vocab_size // _PANEL) * _PANEL), np.float32)
        self.place = self._panels.ctypes.data

    def copy(self) -> Array:
        copied: Array = self._panels[:, : self._vocab_size].copy()
        return copied


class NativeOneLayer:
    """One attention layer from its tables, in float32."""

    def __init__(self, model: AttentionModel, num_samples: int, compiled: ctypes.CDLL) -> None:
        tables = OneLayerDecoder(model)
        heads, size = tables.token_queries.shape[1:]
        self._laid = _OneLayer(
            heads=heads,
            size=size,
            vocab_size=model.vocab_size,
            token_queries=tables.token_queries,
            position_queries=tables.position_queries,
            token_keys_values=_keys_beside_values(tables.token_keys_values, size),
            position_keys_values=_keys_beside_values(tables.position_keys_values, size),
            head=_panels(tables.head),
            bias=_panels(tables.bias[:, None]),
        )
        self._place = ctypes.addressof(self._laid)
        scratch = compiled.one_layer_scratch(self._place, model.config.block_size)
        self._laid.point("scratch", np.empty(scratch, np.float32))
        self._call = compiled.one_layer_logits
        self._found = _Logits(num_samples, model.vocab_size)

    def logits(self, ids_BS: Ids, known: int) -> Array:
        """(B, V) for the token after a window, whose first `known` tokens were there before."""
        self._call(self._place, *ids_BS.shape, ids_BS.tobytes(), self._found.place)
        return self._found.copy()


class NativeTransformer:
    """The transformer with a cache, in float32."""

    def __init__(self, model: Transformer, num_samples: int, compiled: ctypes.CDLL) -> None:
        config, blocks = model.config, list(blocks_of(model))
        heads, size, length = config.num_heads, config.head_dim, config.block_size
        head = as_array(model.head.weight) * as_array(model.norm.gain)
        cache = (num_samples, heads, length * size)
        self._blocks = [_laid_block(block, cache) for block in blocks]
        self._row = (_Block * len(blocks))(*self._blocks)
        self._laid = _Transformer(
            layers=len(blocks),
            width=head.shape[1],
            heads=heads,
            size=size,
            hidden=blocks[0].mlp.gate_up.shape[1],
            block_size=length,
            vocab_size=model.vocab_size,
            embedding=as_array(model.token_embedding.weight),
            head=_panels(head),
            cosines=as_array(model.cosines)[:, : size // 2],
            sines=as_array(model.sines)[:, : size // 2],
            blocks=ctypes.addressof(self._row),
        )
        self._place = ctypes.addressof(self._laid)
        scratch = compiled.transformer_scratch(self._place)
        self._laid.point("scratch", np.empty(scratch, np.float32))
        self._call, self._found = (
            compiled.transformer_logits,
            _Logits(num_samples, model.vocab_size),
        )

    def logits(self, ids_BS: Ids, known: int) -> Array:
        """(B, V) for the token after a window, whose first `known` tokens were there before."""
        new_BT = ids_BS[:, known:]
        self._call(self._place, *new_BT.shape, known, new_BT.tobytes(), self._found.place)
        return self._found.copy()


def _keys_beside_values(tables_NHE: Array, size: int) -> Array:
    """(N, H, 2·D + 1) as OneLayerDecoder has it → (N, 2, H, D)."""
    return np.stack((tables_NHE[..., :size], tables_NHE[..., size : 2 * size]), axis=1)


def _laid_block(block: Block, cache: tuple[int, ...]) -> _Block:
    attention, mlp = block.attention, block.mlp
    assert attention.projection is not None
    assert attention.query_gain is not None and attention.key_gain is not None
    scale = attention.head_size**-0.5
    return _Block(
        qkv=_panels(as_array(attention.qkv.flatten(0, 1)) * as_array(block.attention_norm.gain)),
        gains=np.stack([as_array(attention.query_gain) * scale, as_array(attention.key_gain)]),
        projection=_panels(as_array(attention.projection.weight)),
        gate_up=_panels(as_array(mlp.gate_up.flatten(0, 1)) * as_array(block.mlp_norm.gain)),
        down=_panels(as_array(mlp.down.weight)),
        keys=np.zeros(cache, np.float32),
        values=np.zeros(cache, np.float32),
    )


def _panels(matrix_RC: Array) -> Array:
    """As the C file wants a matrix: (R/32, C, 32), filled up with rows of zeros."""
    rows, inputs = matrix_RC.shape
    filled = np.zeros((-(-rows // _PANEL) * _PANEL, inputs), np.float32)
    filled[:rows] = matrix_RC
    return filled.reshape(-1, _PANEL, inputs).transpose(0, 2, 1)
