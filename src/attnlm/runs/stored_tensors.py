"""The tensors that another tool stores of a model, each made of ours when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from attnlm.model.architecture import Architecture
from attnlm.runs.forms import Form, Stored
from attnlm.runs.safetensors_file import Shape


class StoredTensors:
    """The tensors of a form, by their names there: `shapes`, in the form's order, and `tensor`."""

    def __init__(self, form: Form, a: Architecture, weights: Mapping[str, Tensor]) -> None:
        self._architecture, self._weights = a, weights
        self._stored = {stored.name: stored for stored in form.stored(a)}
        self.shapes = {name: self._shape(stored) for name, stored in self._stored.items()}

    def tensor(self, name: str) -> Tensor:
        """In float32; not always contiguous."""
        stored = self._stored[name]
        parts = [self._weight(part) for part in stored.parts]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        if stored.interleaved:
            heads = joined.unflatten(0, (stored.interleaved, 2, -1))
            joined = heads.transpose(1, 2).flatten(0, 2)
        return joined.T if stored.transposed else joined

    def _weight(self, name: str) -> Tensor:
        """A parameter of the model, zeros for a bias or positions that it lacks."""
        return self._weights[name] if name in self._weights else torch.zeros(self._whole(name))

    def _shape(self, stored: Stored) -> Shape:
        rows = sum(self._whole(part)[0] for part in stored.parts)
        columns = self._whole(stored.parts[0])[1:]
        return (*columns, rows) if stored.transposed else (rows, *columns)

    def _whole(self, name: str) -> Shape:
        """The shape of a parameter that the model has, or could have."""
        if name in self._weights:
            return tuple(self._weights[name].shape)
        if name == "position_embedding.weight":
            return self._architecture.block_size, self._architecture.embed_dim or 0
        stem = name.removesuffix(".bias")
        of = f"{stem}.weight" if f"{stem}.weight" in self._weights else f"{stem}.gain"
        return (len(self._weights[of]),)
