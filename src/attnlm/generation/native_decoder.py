"""The decoder in compute/native/decoding.c: the layout of a model's weights, and its memory.

Axes: B samples, S tokens of the window, C embed_dim, H heads, K key and value heads, D head size,
V vocabulary, L layers.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnlm.base.errors import NotFiniteError
from attnlm.compute.native.structs import CBlock, CGeneration, CLinear, CMemory, CModel
from attnlm.compute.threads import flush_subnormals
from attnlm.generation.batch import Batch
from attnlm.model.architecture import Architecture
from attnlm.model.language_model import Transformer
from attnlm.model.ops.block import MLPS, NORMS
from attnlm.model.spec import ModelSpec, Use
from attnlm.model.textbook import with_prefix

_Floats = NDArray[np.float32]

# As in the C file. A panel holds 32 rows of a linear layer's matrix.
_PANEL = 32

_ROWS_OF_SMALL = 64
_MOST_ROWS_OF_LARGE = 512
"""The most tokens that go through all layers together, in a small and in a large model."""
_LARGE_MODEL = 2**23
"""A model with at least this many weights in its linear layers is large: they exceed a processor's
cache, so that several threads save time."""
_LEAST_UNCOPIED_INPUTS = 256
"""A linear layer with at least this many inputs, a multiple of 32, is not copied: C reads it in the
model's memory."""
_SECONDS_PER_CALL = 0.01
_MOST_TOKENS_PER_CALL = 256
"""Limits of one call of `generate` in C, in seconds and in tokens of a sample. The tokens of a call
are yielded together."""
_LARGEST_TABLES = 2**24
"""The most numbers in the result of `_tables`; larger tables are not made."""


class NativeModel:
    """The weights of a model in the layout of the C file, for any number of decoders.

    Matrices whose inputs are a multiple of 32, and at least `_LEAST_UNCOPIED_INPUTS`, are not
    copied: they change when the model does.
    """

    def __init__(self, model: Transformer, native: ctypes.CDLL) -> None:
        a = model.architecture
        weights = model.state_dict()
        self.architecture = a
        self.library = native
        heads, kv_heads, size = {
            "softmax": (a.heads, a.num_kv_heads, a.head_dim),
            "none": (0, 0, 0),
        }.get(a.attention, (1, 1, a.width))
        blocks = [
            _c_block(a, size, with_prefix(weights, f"blocks.{layer}.")) for layer in range(a.layers)
        ]
        c_blocks = (CBlock * a.layers)(*blocks)
        self.first_block = blocks[0]
        self._kept_alive = (blocks, c_blocks)
        layers = [lm_head := _linear_layer(weights, "head")]
        for block in blocks:
            layers += block.qkv, block.projection, block.up, block.down
        self.numbers = sum(layer.inputs * layer.outputs for layer in layers)
        self.is_large = self.numbers >= _LARGE_MODEL
        self.panel_size = _PANEL * max((layer.inputs for layer in layers if layer.rows), default=0)
        positions = {}
        if model.position_embedding is not None:
            positions = {"positions": _numpy(model.position_embedding.weight)}
        elif a.positions == "rotary":  # the second half of the angles is the same as the first
            angles = {"cosines": model.cosines, "sines": model.sines}
            positions = {name: _numpy(table[:, : size // 2]) for name, table in angles.items()}
        key_at = _rounded_to_panels(heads * size) if a.attention == "softmax" else 0
        self.layout = CModel(
            layers=a.layers,
            width=a.width,
            vocab_size=model.vocab_size,
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
            tokens=_numpy(weights["token_embedding.weight"]),
            blocks=ctypes.addressof(c_blocks),
            last_norm=_norm_arrays(with_prefix(weights, "norm."), a.lm_head_inputs),
            lm_head=lm_head,
            **positions,
            **_tables(a, weights, model.vocab_size),
        )


class NativeDecoder:
    """A decoder with a cache for any model that has embeddings, on a CPU in float32."""

    def __init__(self, model: NativeModel, num_samples: int, threads: int = 1) -> None:
        a = model.architecture
        layout = model.layout
        first_block = model.first_block
        capacity = _rounded_to_panels(a.block_size)
        mixed_stride = _rounded_to_panels(layout.heads * layout.size)
        stride = max(_rounded_to_panels(a.width), mixed_stride)
        rows = (
            min(_MOST_ROWS_OF_LARGE, num_samples * a.block_size)
            if model.is_large
            else _ROWS_OF_SMALL
        )
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
            x=_allocate_floats(rows * stride),
            normed=_allocate_floats(rows * stride),
            packed=_allocate_floats(rows * first_block.qkv.outputs),
            mixed=_allocate_floats(rows * mixed_stride),
            hidden=_allocate_floats(rows * first_block.up.outputs),
            query=_allocate_floats(threads * (layout.size + _PANEL)),
            scores=_allocate_floats(threads * capacity),
            panel=_allocate_floats(threads * model.panel_size),
            panel_size=model.panel_size,
        )
        model_address = ctypes.addressof(layout)
        memory_address = ctypes.addressof(self._memory)
        self._next_logits = functools.partial(
            model.library.next_logits, model_address, memory_address, threads
        )
        self._generate = functools.partial(
            model.library.generate, model_address, memory_address, threads, num_samples
        )

    def logits(self, ids_BS: NDArray[np.int64], known: int) -> _Floats:
        """Return the next token's logits, (B, V).

        The cache must hold the first `known` tokens of the window `ids_BS`. Raises IndexError for
        an id that the vocabulary lacks.
        """
        samples, length = ids_BS.shape
        assert samples == self._samples and length <= self._block_size
        new_BT = ids_BS[:, known:] if known else ids_BS
        if not self._next_logits(samples, length - known, known, new_BT.tobytes(), self._out):
            raise IndexError("an id is outside the vocabulary")
        return self._logits_BV.copy()

    def generate(self, batch: Batch) -> Iterator[NDArray[np.int64]]:
        """Yield the next ids of all texts of a batch in blocks (T, B), for all of its steps.

        A block holds the tokens of one call of the C function, which takes some milliseconds.
        Raises IndexError for an id that the vocabulary lacks, NotFiniteError for logits that are
        NaN or infinite.
        """
        a = self._model.architecture
        samples = self._samples
        vocab_size = self._model.layout.vocab_size
        ids_BS = np.zeros((samples, 2 * a.block_size), np.int64)
        length = batch.start.shape[1]
        ids_BS[:, :length] = batch.start
        state = CGeneration(
            block_size=a.block_size,
            kept=tokens_kept_when_full(a),
            columns=ids_BS.shape[1],
            length=length,
            ids=ids_BS,
            fresh=np.empty((samples, a.block_size), np.int64),
            logits=self._out,
            sums=np.empty(vocab_size),
            temperature=batch.config.temperature,
        )
        flush_subnormals()
        count = 1
        steps_left = batch.steps
        while steps_left:
            count = min(count, steps_left)
            out_TB, uniforms_TB = batch.take(count)
            if out_TB.max() >= vocab_size:
                raise IndexError("an id is outside the vocabulary")
            began = time.perf_counter()
            steps = self._generate(
                ctypes.addressof(state), count, uniforms_TB.ctypes.data, out_TB.ctypes.data
            )
            call_seconds = time.perf_counter() - began
            if steps < 0:
                raise IndexError("an id is outside the vocabulary")
            if steps:
                yield out_TB[:steps]
            if steps < count:
                raise NotFiniteError
            steps_left -= count
            if call_seconds < _SECONDS_PER_CALL / 2 and count < _MOST_TOKENS_PER_CALL:
                count *= 2


def tokens_kept_when_full(spec: ModelSpec) -> int:
    """Return how many of the newest tokens stay in a window that has exceeded the context.

    If the context slides, all but the oldest token stay. Otherwise, only half a context stays: the
    cache is filled again once and then serves for many tokens.
    """
    slides = spec.reason_against(Use.SLIDING_WINDOW) is None
    return spec.block_size if slides else max(1, spec.block_size // 2)


_QKV = tuple(f"attention.{name}" for name in ("query", "key", "value"))


def _c_block(a: Architecture, size: int, weights: Mapping[str, Tensor]) -> CBlock:
    """Return a block with the given weights; `size` is the width of a head."""
    # A scale of 0 makes all scores 0 and all weights equal.
    scale = 0 if a.attention == "uniform" else max(1, size) ** -0.5
    ones = torch.ones(size)
    key_gains = weights.get("attention.key_norm.gain", ones)
    are_keys_unchanged = not a.query_key_norm and a.positions != "rotary"
    gate = ["mlp.gate"] if a.mlp == "swiglu" else []
    return CBlock(
        attention_norm=_norm_arrays(with_prefix(weights, "attention_norm."), a.width),
        mlp_norm=_norm_arrays(with_prefix(weights, "mlp_norm."), a.width),
        query_gains=_numpy(weights.get("attention.query_norm.gain", ones) * scale),
        key_gains=None if are_keys_unchanged else _numpy(key_gains),
        qkv=_linear_layer(weights, *_QKV),
        projection=_linear_layer(weights, "attention.projection"),
        up=_linear_layer(weights, *gate, "mlp.up"),
        down=_linear_layer(weights, "mlp.down"),
    )


def _tables(a: Architecture, weights: Mapping[str, Tensor], vocab_size: int) -> dict[str, _Floats]:
    """Return tables of We for every token and Wp for every position, or {} for some models.

    Queries, keys and values are W(e + p) = We + Wp, with weights W; e and p are the embeddings
    of a token and its position. When the context slides, all tokens change their positions. Rows of
    the tables are then added, instead of computing W(e + p) again. The result is {} if the context
    does not slide, if there is a norm, or if tables are too large.
    """
    slides = a.reason_against(Use.SLIDING_WINDOW) is None
    if not slides or a.norm != "none" or a.attention != "softmax":
        return {}
    maps = with_prefix(weights, "blocks.0.")
    bias_N = _concatenated(maps, "bias", *_QKV)
    if (vocab_size + a.block_size) * len(bias_N) > _LARGEST_TABLES:
        return {}
    weight_NC = _concatenated(maps, "weight", *_QKV)
    tokens_VN = weights["token_embedding.weight"] @ weight_NC.T + bias_N
    positions_SN = torch.zeros(a.block_size, len(bias_N))
    if a.positions == "learned":
        positions_SN = weights["position_embedding.weight"] @ weight_NC.T
    return {"token_table": _numpy(tokens_VN), "position_table": _numpy(positions_SN)}


def _rounded_to_panels(size: int) -> int:
    """Return `size` rounded up to a multiple of 32, the rows of a panel."""
    return -(-size // _PANEL) * _PANEL


def _allocate_floats(size: int) -> _Floats:
    """Return memory for `size` numbers, and 32 more, since C reads whole vectors at the end.

    PyTorch allocates the memory. NumPy would request large pages: the system would clear each page
    as a whole, although a short prompt uses a small part.
    """
    space: _Floats = torch.empty(size + _PANEL).numpy()
    return space


def _numpy(tensor: Tensor) -> _Floats:
    array: _Floats = tensor.detach().contiguous().numpy()
    return array


def _norm_arrays(weights: Mapping[str, Tensor], size: int) -> _Floats:
    """Return a norm's gains and biases, (2, C); ones and zeros where the model has none."""
    gain = weights.get("gain", torch.ones(size))
    bias = weights.get("bias", torch.zeros(size))
    return _numpy(torch.stack((gain, bias)))


def _linear_layer(weights: Mapping[str, Tensor], *names: str) -> CLinear:
    """Return linear layers of the same input as one layer, or an empty one if the model lacks them.

    If the number of inputs is a multiple of 32 and at least `_LEAST_UNCOPIED_INPUTS`, the C code
    reads the rows of the matrices where the model stores them. Other rows are copied to panels,
    (N/32, C, 32).
    """
    if f"{names[0]}.weight" not in weights:
        return CLinear()
    matrices = [weights[f"{name}.weight"] for name in names]
    inputs = matrices[0].size(1)
    bias_N = _numpy(_concatenated(weights, "bias", *names))
    size = {"inputs": inputs, "outputs": len(bias_N), "bias": bias_N}
    if inputs < _LEAST_UNCOPIED_INPUTS or inputs % _PANEL:
        panels = _concatenated(weights, "weight", *names).view(-1, _PANEL, inputs).transpose(1, 2)
        return CLinear(**size, panels=_numpy(panels))
    # The addresses of the rows. A row of zeros fills up the last panel of each matrix.
    zeros = np.zeros(inputs, np.float32)
    row_addresses = list[int]()
    arrays = [_numpy(matrix) for matrix in matrices]
    for array in arrays:
        begin = array.ctypes.data
        row_addresses += range(begin, begin + array.nbytes, array.strides[0])
        row_addresses += [zeros.ctypes.data] * (_rounded_to_panels(len(array)) - len(array))
    return CLinear(**size, rows=np.array(row_addresses, np.uintp), arrays=[zeros, *arrays])


def _concatenated(weights: Mapping[str, Tensor], kind: str, *names: str) -> Tensor:
    """Concatenate the matrices (N, C) or the biases (N) of linear layers along N.

    Zeros fill up the last panel (32 rows) of each layer, and replace a bias that a layer lacks.
    """
    padded = []
    for name in names:
        outputs = len(weights[f"{name}.weight"])
        rows = weights.get(f"{name}.{kind}", torch.zeros(outputs))
        padded += [rows, torch.zeros(_rounded_to_panels(outputs) - outputs, *rows.shape[1:])]
    return torch.cat(padded)
