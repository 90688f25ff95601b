"""Find the tensors of a Hugging Face folder, check names, shapes and types, and read one at a time.

They are in model.safetensors, or in the files listed in model.safetensors.index.json.
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
from attnlm.runs.safetensors_file import FLOATS, TensorFile, explaining_reads, read_header

_INDEX, _WHOLE = "model.safetensors.index.json", "model.safetensors"
_LARGEST_INDEX = 2**24  # bytes
_MOST_FILES = 2**10
_COPY = "copy the folder again from its source"
# Masks and rotary frequencies, which are computed here: older versions stored them.
_COMPUTED = re.compile(
    r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias"
    r"|model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
)


class Weights:
    """The weights of a model by our names, as a context manager that keeps its files open.

    Raises AttnlmError, before any tensor is read, if files or tensors are missing, unexpected, or
    of another shape or type than `described` says.
    """

    def __init__(self, folder: Path, described: Described, file: Path | None = None) -> None:
        self.shapes = parameter_shapes(described.config.model, described.vocab_size)
        self.parameters = sum(map(math.prod, self.shapes.values()))
        self._described = described
        self._paths = [file] if file is not None else _files(folder)
        self._open = contextlib.ExitStack()
        self._files: dict[str, TensorFile] = {}  # by tensor name
        self._places: dict[str, tuple[Stored, int]] = {}  # by parameter: tensor, index of part

    def __enter__(self) -> Weights:
        with contextlib.ExitStack() as opening:
            for path in self._paths:
                file = opening.enter_context(open_tensors(path))
                for name in file.header.tensors:
                    if name in self._files:
                        raise AttnlmError(f"the tensor {name} is in two files", _COPY)
                    if not _COMPUTED.fullmatch(name):
                        self._files[name] = file
            # The published GPT-2 files lack the prefix, since they hold the model without its head.
            prefix = "transformer."
            has_prefix = any(name.startswith(prefix) for name in self._files)
            for stored in self._described.stored:
                if not has_prefix:
                    stored = stored._replace(name=stored.name.removeprefix(prefix))
                self._places |= {part: (stored, i) for i, part in enumerate(stored.parts)}
            self._check()
            self._open = opening.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    def __getitem__(self, name: str) -> Tensor:
        """Return a parameter in float32. Raises AttnlmError for NaN and infinity."""
        shape = self.shapes[name]
        if name not in self._places:
            return torch.zeros(shape)
        stored, place = self._places[name]
        begin = sum(self.shapes[part][0] for part in stored.parts[:place])
        rows = slice(begin, begin + shape[0])
        file = self._files[stored.name]
        if stored.transposed:
            part = read_tensor(file, stored.name)[:, rows].T
        else:
            part = read_tensor(file, stored.name, rows)
        try:
            check_finite(part)
        except NotFiniteError:
            raise AttnlmError(
                f"the tensor {stored.name} has NaN or infinite numbers", _COPY
            ) from None
        return part.to(torch.float32)

    def _check(self) -> None:
        wanted = {stored.name: self._shape(stored) for stored, _ in self._places.values()}
        head = "lm_head.weight"  # may be stored although it is tied
        is_tied = head not in wanted and head in self._files
        if is_tied and self._described.config.model.tie_embeddings:
            wanted[head] = self.shapes["token_embedding.weight"]
        for name in sorted(wanted.keys() - self._files.keys()):
            raise AttnlmError(f"the tensor {name} is missing", _COPY)
        for name in sorted(self._files.keys() - wanted.keys()):
            raise AttnlmError(
                f"the tensor {quoted(name)} does not belong to the model in config.json",
                "import a GPT-2, Llama, SmolLM, Mistral, Qwen2 or Qwen3 model that was not changed",
            )
        for name, shape in wanted.items():
            kind, found, *_ = self._files[name].header.tensors[name]
            if found != shape:
                raise AttnlmError(
                    f"the tensor {name} has shape {found}, but config.json implies {shape}", _COPY
                )
            check_type(name, kind, "import a folder that is not quantised")
        embedding = self._places["token_embedding.weight"][0].name
        if is_tied and not torch.equal(
            *(read_tensor(self._files[name], name) for name in (head, embedding))
        ):
            raise AttnlmError(
                "config.json ties the LM head to the token embedding, but lm_head.weight differs",
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
            f"{folder} has neither {_WHOLE} nor {_INDEX}",
            "its weights are pickled and could run code: get them as safetensors"
            if pickled
            else "use a folder in Hugging Face's format",
        )
    places: Mapping[str, Any] = read_object(folder / _INDEX, _LARGEST_INDEX).get("weight_map", {})
    names = set()
    if isinstance(places, dict):
        names = {name if isinstance(name, str) else "" for name in places.values()}
    for name in sorted(names):
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,200}\.safetensors", name):
            raise AttnlmError(
                f"{_INDEX} names {quoted(name)}, which is not a safetensors file in its folder",
                _COPY,
            )
    if not 0 < len(names) <= _MOST_FILES:
        raise AttnlmError(f"{folder / _INDEX} names {len(names):,} files", _COPY)
    return [folder / name for name in sorted(names)]


@contextlib.contextmanager
def open_tensors(path: Path) -> Iterator[TensorFile]:
    """Open a safetensors file and read its header. Raises AttnlmError."""
    with contextlib.ExitStack() as opening:
        with explaining_reads(path, " or not a safetensors file", _COPY):
            file = opening.enter_context(files.open_regular(path))
            opened = TensorFile(file, read_header(file))
        yield opened


def check_type(name: str, kind: str, hint: str) -> None:
    """Raise AttnlmError for a tensor whose type is not a supported float."""
    if kind not in FLOATS:
        raise AttnlmError(
            f"the tensor {name} has the type {kind}, not one of {', '.join(FLOATS)}", hint
        )


def read_tensor(file: TensorFile, name: str, rows: slice | None = None) -> Tensor:
    """Return a tensor, or some of its rows. Raises AttnlmError if it can't be read."""
    try:
        return file.read(name, rows)
    except (OSError, ValueError):
        raise AttnlmError(f"cannot read the tensor {name}", _COPY) from None
