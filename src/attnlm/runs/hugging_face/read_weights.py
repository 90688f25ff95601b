"""The tensors of a Hugging Face folder: found, checked by name, shape and type, then read singly.

They lie in model.safetensors, or in several files that model.safetensors.index.json names.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnlm.base import files
from attnlm.base.errors import AttnlmError, NotFiniteError
from attnlm.base.settings import quoted
from attnlm.model.inspection import check_finite, parameter_shapes
from attnlm.runs.forms import Stored
from attnlm.runs.hugging_face.read_config import Described, read_object
from attnlm.runs.hugging_face.stock_classes import STOCK_CLASSES
from attnlm.runs.safetensors_file import FLOATS, TensorFile, explaining_reads, read_header

_INDEX, _WHOLE = "model.safetensors.index.json", "model.safetensors"
_LARGEST_INDEX = 2**24  # bytes
_MOST_FILES = 2**10
_COPY = "copy the folder again from where it came"
# Masks and angles, which are computed: older versions stored them.
_COMPUTED = re.compile(
    r"transformer\.h\.\d+\.attn\.(masked_)?bias|model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
)


class Weights:
    """The weights of a model by our names. Use it as a context: its files are open meanwhile.

    Raises AttnlmError, before any tensor is read, when files or tensors are missing, left over, or
    of another shape or type than `described` has.
    """

    def __init__(self, folder: Path, described: Described, file: Path | None = None) -> None:
        a, size = described.config.model, described.vocab_size
        self.shapes = parameter_shapes(a, size)
        self.parameters = sum(map(math.prod, self.shapes.values()))
        self._files = [file] if file is not None else _files(folder)
        self._described = described
        stock = next(s for s in STOCK_CLASSES if s.model_type == a.model)
        self._stored = [
            stored
            for stored in stock.stored(a)
            if not described.absent(stored.name) and stored.parts[0] in self.shapes
        ]
        self._place_of = {
            part: (stored, stored.parts.index(part))
            for stored in self._stored
            for part in stored.parts
        }
        self._open = contextlib.ExitStack()
        self._tensors: dict[str, tuple[TensorFile, str]] = {}  # and its name there

    def __enter__(self) -> Weights:
        with contextlib.ExitStack() as opening:
            found: dict[str, tuple[TensorFile, str]] = {}
            for path in self._files:
                tensors = _tensors(path, opening)
                for name in found.keys() & tensors.keys():
                    raise AttnlmError(f"the tensor {name} is in two files", _COPY)
                found |= tensors
            prefix = "transformer." if self._described.config.model.model == "gpt2" else ""
            if prefix and not any(name.startswith(prefix) for name in found):
                # The published files of GPT-2 are of the model without its head.
                found = {n if n == "lm_head.weight" else prefix + n: t for n, t in found.items()}
            self._tensors = {n: t for n, t in found.items() if not _COMPUTED.fullmatch(n)}
            self._check()
            self._open = opening.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    def __getitem__(self, name: str) -> Tensor:
        """One of our parameters in float32. Raises AttnlmError for numbers that are not finite."""
        shape = self.shapes[name]
        if name not in self._place_of:
            return torch.zeros(shape)
        stored, place = self._place_of[name]
        begin = sum(self.shapes[part][0] for part in stored.parts[:place])
        rows = slice(begin, begin + shape[0])
        if stored.transposed:
            part = self._read(stored.name)[:, rows].T
        else:
            part = self._read(stored.name, rows)
        try:
            check_finite(part)
        except NotFiniteError:
            raise AttnlmError(
                f"the tensor {stored.name} has NaN or infinite numbers", _COPY
            ) from None
        return part.to(torch.float32)

    def _read(self, name: str, rows: slice | None = None) -> Tensor:
        file, its_name = self._tensors[name]
        try:
            return file.read(its_name, rows)
        except (OSError, ValueError):
            raise AttnlmError(f"the tensor {name} can't be read", _COPY) from None

    def _check(self) -> None:
        wanted = {stored.name: self._shape(stored) for stored in self._stored}
        if self._described.config.model.tie_embeddings and "lm_head.weight" in self._tensors:
            wanted["lm_head.weight"] = self.shapes["token_embedding.weight"]
        for name in sorted(wanted.keys() - self._tensors.keys()):
            raise AttnlmError(f"the tensor {name} is missing", _COPY)
        for name in sorted(self._tensors.keys() - wanted.keys()):
            raise AttnlmError(
                f"the tensor {quoted(name)} is none of the model that config.json describes",
                "import a model of the GPT-2, Llama or Qwen3 family that was not changed",
            )
        for name, shape in wanted.items():
            file, its_name = self._tensors[name]
            kind, found, *_ = file.header.tensors[its_name]
            if found != shape:
                raise AttnlmError(
                    f"the tensor {name} has shape {found}, and config.json means {shape}",
                    _COPY,
                )
            if kind not in FLOATS:
                raise AttnlmError(
                    f"the tensor {name} is of type {kind}, not of {', '.join(FLOATS)}",
                    "import a folder that is not quantised",
                )
        if "lm_head.weight" in wanted and "lm_head.weight" not in {s.name for s in self._stored}:
            self._check_tied()

    def _check_tied(self) -> None:
        embedding = next(s.name for s in self._stored if s.parts == ("token_embedding.weight",))
        if not torch.equal(self._read("lm_head.weight"), self._read(embedding)):
            raise AttnlmError(
                "config.json ties the LM head to the token embedding, and lm_head.weight differs",
                _COPY,
            )

    def _shape(self, stored: Stored) -> tuple[int, ...]:
        first, *more = self.shapes[stored.parts[0]]
        if stored.parts == ("position_embedding.weight",):
            first = self._described.positions
        rows = first + sum(self.shapes[part][0] for part in stored.parts[1:])
        return (*more, rows) if stored.transposed else (rows, *more)


def _files(folder: Path) -> list[Path]:
    if (folder / _WHOLE).exists():
        return [folder / _WHOLE]
    if not (folder / _INDEX).exists():
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        raise AttnlmError(
            f"{folder} has no {_WHOLE} and no {_INDEX}",
            "its weights are pickled, which could run code: get them as safetensors"
            if pickled
            else "give a folder of Hugging Face's format",
        )
    places: Mapping[str, Any] = read_object(folder / _INDEX, _LARGEST_INDEX).get("weight_map", {})
    names = set()
    if isinstance(places, dict):
        names = {name if isinstance(name, str) else "" for name in places.values()}
    for name in sorted(names):
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,200}\.safetensors", name):
            raise AttnlmError(
                f"{_INDEX} names {quoted(name)}, which is no safetensors file of its folder", _COPY
            )
    if not 0 < len(names) <= _MOST_FILES:
        raise AttnlmError(f"{folder / _INDEX} names {len(names):,} files", _COPY)
    return [folder / name for name in sorted(names)]


def _tensors(path: Path, opening: contextlib.ExitStack) -> dict[str, tuple[TensorFile, str]]:
    """The tensors of a file, none of them read yet."""
    file = opening.enter_context(open_tensors(path))
    return {name: (file, name) for name in file.header.tensors}


@contextlib.contextmanager
def open_tensors(path: Path) -> Iterator[TensorFile]:
    """A safetensors file, of which no tensor is read yet. Raises AttnlmError."""
    with contextlib.ExitStack() as opening:
        with explaining_reads(path, ", or is no safetensors file", _COPY):
            file = opening.enter_context(files.open_regular(path))
            opened = TensorFile(file, read_header(file))
        yield opened
