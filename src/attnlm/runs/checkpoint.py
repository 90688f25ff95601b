"""Checkpoints: weights, optimizer state, and facts (JSON values such as the step).

They are written atomically, and checked when loaded. A checkpoint is one safetensors file. A run
with the setting `shard` writes a folder instead, to which all processes write while training
continues. Its files are safetensors in the layout of PyTorch's distributed checkpoints (DCP). Each
process holds some rows of every tensor. Process K, counted from 1, writes its rows and their
offsets to the files `shard-K-…`. facts.json has the facts and the files' hashes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from attnlm.base import files
from attnlm.base.atomic_folders import exchange_folders, workspace
from attnlm.base.errors import AttnlmError
from attnlm.base.formatting import listed
from attnlm.base.setting_fields import quoted
from attnlm.compute.processes import Processes, reporting_lost_processes, rows_of_rank
from attnlm.model.inspection import check_finite
from attnlm.model.spec import ModelSpec
from attnlm.runs.safetensors_file import (
    Shape,
    StoredTensor,
    TensorFile,
    explaining_read_errors,
    write_tensors,
)

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageWriter

_Value = TypeVar("_Value")
_StoredRows = tuple[int, int, TensorFile]  # consecutive rows of a tensor in one file: first, end

FACTS = "facts.json"
_MODEL = "model."
_OPTIMIZER = "optimizer."


@dataclass(frozen=True)
class CheckpointHeader:
    """The facts and the digest of a checkpoint, whose tensors have not been read.

    The names, shapes and types of all tensors match the model.
    """

    facts: Mapping[str, Any]
    digest: str = ""
    """the digest stored in the file, which `load_checkpoint` checks; "" for a folder"""


def named_tensors(weights: Mapping[str, _Value], state: Mapping[str, _Value]) -> dict[str, _Value]:
    """Return tensors, or shapes, by their names in a checkpoint: `model.<name>` for weights, and
    `optimizer.<name>` for the optimizer's state."""
    named = {_MODEL + name: tensor for name, tensor in weights.items()}
    return named | {_OPTIMIZER + name: tensor for name, tensor in state.items()}


def parameter_name(name: str) -> str:
    """Return a parameter's name, given its name in a checkpoint: `model.<parameter>`, or
    `optimizer.<parameter>/<what>` for its optimizer state."""
    if name.startswith(_OPTIMIZER):
        return name.removeprefix(_OPTIMIZER).rpartition("/")[0]
    return name.removeprefix(_MODEL)


# --- Reading --------------------------------------------------------------------------------------


def load_checkpoint(
    path: Path,
    spec: ModelSpec,
    vocab_size: int,
    rank: int = 0,
    count: int = 1,
) -> tuple[Mapping[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """Return a checkpoint's facts, weights and optimizer state.

    If `count` is above 1, return only the rows of each tensor that belong to process `rank` of
    `count` (see `rows_of_rank`).

    Raises AttnlmError if the file is missing, damaged or of another model. Raises NotFiniteError if
    weights are NaN or infinite; training never saves such weights.
    """
    header, tensors = _read_checkpoint(path, _stored_shapes(spec, vocab_size), rank, count)
    if path.suffix and count > 1:  # a file is always read and checked whole
        tensors = {n: t[rows_of_rank(len(t), rank, count)].clone() for n, t in tensors.items()}
    weights, state = (
        {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        for prefix in (_MODEL, _OPTIMIZER)
    )
    parameters = weights.keys() - spec.buffer_shapes(vocab_size).keys()  # a mask may have -inf
    check_finite(*(weights[name] for name in parameters))
    return header.facts, weights, state


def load_header(path: Path, spec: ModelSpec, vocab_size: int) -> CheckpointHeader:
    """Return a checkpoint's header without reading the tensors or checking the digest."""
    return _read_checkpoint(path, _stored_shapes(spec, vocab_size), with_tensors=False)[0]


def _stored_shapes(spec: ModelSpec, vocab_size: int) -> Mapping[str, Shape]:
    """Return the shapes of the parameters and buffers in a checkpoint."""
    return {**spec.parameter_shapes(vocab_size), **spec.buffer_shapes(vocab_size)}


def _read_checkpoint(
    path: Path,
    shapes: Mapping[str, Shape],
    rank: int = 0,
    count: int = 1,
    *,
    with_tensors: bool = True,
) -> tuple[CheckpointHeader, dict[str, Tensor]]:
    """Return a checkpoint's header and tensors.

    If `with_tensors` is False, return no tensors, and check no digest and no hash.
    """
    if not path.exists():
        raise AttnlmError(
            f"checkpoint not found: {path}",
            "the run stopped before its first checkpoint; train it again",
        )

    hint = "try the run's other checkpoint: `checkpoint` last or best"
    with explaining_read_errors(path, ": it does not match its own digest", hint):
        if path.suffix:
            return _read_file(path, shapes, with_tensors)
        return _read_folder(path, shapes, rank, count, with_tensors)


def _read_file(
    path: Path, shapes: Mapping[str, Shape], with_tensors: bool
) -> tuple[CheckpointHeader, dict[str, Tensor]]:
    with path.open("rb") as opened:
        file = TensorFile.of(opened)
        stored = file.tensors
        metadata = file.metadata
        _check_shapes(path, shapes, stored)
        _check_complete(path, shapes, stored)
        facts = json.loads(metadata.get("facts", ""))
        header = CheckpointHeader(facts, metadata.get("digest", ""))
        if not with_tensors:
            return header, {}
        tensors = {name: file.read(name) for name in stored}
    if header.digest != _content_digest(metadata["facts"], tensors):
        raise ValueError("another digest")
    return header, tensors


def _read_folder(
    path: Path, shapes: Mapping[str, Shape], rank: int, count: int, with_tensors: bool
) -> tuple[CheckpointHeader, dict[str, Tensor]]:
    """Return the facts, and each tensor's rows that belong to process `rank` of `count`.

    Each process checks the hashes of different files.
    """
    content = files.read_sealed(path / FACTS)
    hashes = content["files"]
    if any(name != Path(name).name for name in hashes):
        raise ValueError("a file of another folder")
    pieces: dict[str, list[_StoredRows]] = defaultdict(list)
    with contextlib.ExitStack() as opening:
        for i, (name, digest) in enumerate(hashes.items()):
            if with_tensors and i % count == rank and files.file_hash(path / name) != digest:
                raise ValueError("wrong hash")
            opened = opening.enter_context((path / name).open("rb"))
            file = TensorFile.of(opened)
            _check_shapes(path, shapes, file.tensors, all_rows=False)
            places = json.loads(file.metadata.get("DCP_SHARDING_INFO", ""))
            for tensor, stored in file.tensors.items():
                first = places[tensor]["saved_offsets"][0]
                pieces[tensor].append((first, first + stored.shape[0], file))
        _check_complete(path, shapes, pieces)
        tensors = {}
        for tensor, stored_rows in pieces.items() if with_tensors else ():
            shape = shapes[parameter_name(tensor)]
            rows = rows_of_rank(shape[0], rank, count)
            in_order = sorted(stored_rows, key=lambda stored: stored[:2])
            tensors[tensor] = _join_rows(tensor, shape, in_order, rows)
    return CheckpointHeader(content["facts"]), tensors


def _join_rows(name: str, shape: Shape, pieces: list[_StoredRows], rows: slice) -> Tensor:
    """Return the rows `rows` of a tensor. Raises ValueError if any row is missing or duplicated."""
    if [first for first, *_ in pieces] + [shape[0]] != [0] + [end for _, end, _ in pieces]:
        raise ValueError(f"rows of {name} are missing")
    tensor = torch.empty(rows.stop - rows.start, *shape[1:])
    for first, last, file in pieces:
        begin = max(first, rows.start)
        end = min(last, rows.stop)
        if begin < end:
            values = file.read(name, slice(begin - first, end - first))
            tensor[begin - rows.start : end - rows.start] = values
    return tensor


def _check_shapes(
    path: Path,
    shapes: Mapping[str, Shape],
    stored: Mapping[str, StoredTensor],
    *,
    all_rows: bool = True,
) -> None:
    """Raise AttnlmError, which names tensors, unless all tensors of a file belong to the model.

    The tensors must be parameters with these shapes, or their optimizer state, in float32. If
    `all_rows` is False, each may have any number of rows.
    """
    differing = []
    for name, tensor in stored.items():
        expected = shapes.get(parameter_name(name))
        shown = quoted(name.removeprefix(_MODEL))[1:-1]
        shape = tensor.shape
        if expected and shape and not all_rows:
            shape = (expected[0], *shape[1:])
        if expected is None:
            differing.append(f"{shown} is not a tensor of this model")
        elif shape != expected:
            differing.append(f"{shown} has the shape {shape}, not {expected}")
        elif tensor.dtype != "F32":
            differing.append(f"{shown} has the type {tensor.dtype}, not F32")
    _refuse(path, differing)


def _check_complete(path: Path, shapes: Mapping[str, Shape], stored: Collection[str]) -> None:
    """Raise AttnlmError, which names tensors, unless every parameter of the model is stored."""
    _refuse(path, [f"{name} is missing" for name in shapes if _MODEL + name not in stored])


def _refuse(path: Path, differing: Sequence[str]) -> None:
    if differing:
        raise AttnlmError(
            f"{path} does not contain the model that config.json describes: {listed(differing, 3)}",
            "undo changes to config.json, or copy the run's folder again from its source",
        )


def _content_digest(facts_json: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(facts_json.encode())
    for name in sorted(tensors):
        _add_tensor(digest, name, tensors[name])
    return digest.hexdigest()


def _add_tensor(digest: hashlib._Hash, name: str, tensor: Tensor) -> None:
    digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)


# --- Writing --------------------------------------------------------------------------------------


def save_checkpoint(
    path: Path,
    weights: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    optimizer: Mapping[str, Tensor] | None = None,
) -> None:
    """Write weights by name, `facts` (JSON values) and, if given, the optimizer's state to a file.

    An older file is replaced atomically. The file contains a digest of its content. Equal content
    gives equal bytes.
    """
    tensors = named_tensors(weights, optimizer or {})
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    save_one_by_one(path, shapes, lambda name: tensors[name].detach().cpu(), facts)


def save_one_by_one(
    path: Path,
    shapes: Mapping[str, Shape],
    tensor: Callable[[str], Tensor],
    facts: Mapping[str, Any],
) -> None:
    """Write a checkpoint, holding one tensor in memory at a time.

    `tensor(name)` returns a tensor in float32 with the shape `shapes[name]`. The names are those of
    `named_tensors`.
    """
    facts_json = json.dumps(facts, sort_keys=True)
    digest = hashlib.sha256(facts_json.encode())

    def read_and_digest(name: str) -> Tensor:
        values = tensor(name)
        _add_tensor(digest, name, values)
        return values

    write_tensors(
        path, shapes, read_and_digest, lambda: {"facts": facts_json, "digest": digest.hexdigest()}
    )


class ShardedCheckpoints:
    """A writer of checkpoints in the background. All processes must make the same calls."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._group = None if processes.count == 1 else torch.distributed.new_group(backend="gloo")
        self._thread = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None

    def save(
        self,
        folder: Path,
        checkpoints: Mapping[str, tuple[Mapping[str, Tensor], Mapping[str, Any]]],
        when_saved: Callable[[], None] = lambda: None,
    ) -> None:
        """Start to write checkpoints to `folder`, one after the other, in a thread.

        `checkpoints` maps a checkpoint's name to its tensors and facts. Weights are named
        `model.…`. The tensors must not change after the call. The thread calls `when_saved`
        when all checkpoints are written.

        Before that, wait until the checkpoints of the previous call are written. Raises OSError if
        those could not be written, LostProcessError if another process was lost.
        """
        from torch.distributed.checkpoint.state_dict_saver import save

        self.finish()
        with contextlib.ExitStack() as stack:
            work = str(stack.enter_context(workspace(folder))) if self._processes.is_main else ""
            work = self._processes.broadcast_object(work)
            open_workspace = stack.pop_all()

        def write() -> None:
            group: Any = {"process_group": self._group, "no_dist": self._group is None}
            with open_workspace:
                for name, (tensors, facts) in checkpoints.items():
                    writer = _dcp_writer(Path(work, name), folder / name, tensors, facts)
                    save(dict(tensors), storage_writer=writer, **group)
            when_saved()

        # Ignore the warning that there is only one process.
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled")
        self._writing = self._thread.submit(write)

    def finish(self) -> None:
        """Wait until all checkpoints are written. Raises as `save` does."""
        from torch.distributed.checkpoint.api import CheckpointException

        writing, self._writing = self._writing, None
        with reporting_lost_processes():
            try:
                if writing is not None:
                    writing.result()
            except CheckpointException as failed:
                causes = [cause for cause, _ in failed.failures.values()]
                raise next((c for c in causes if isinstance(c, OSError)), causes[0]) from None


def _dcp_writer(
    new: Path, path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> StorageWriter:
    """Return a DCP writer to the folder `new`, which replaces `path` when every process is done."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.futures import Future as TorchFuture

    class Writer(HuggingFaceStorageWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            results = super().write_data(plan, planner).wait()
            names = {result.storage_data.relative_path for result in results}
            hashes = {name: files.file_hash(new / name) for name in names}
            hashed: TorchFuture[Any] = TorchFuture()
            hashed.set_result([dataclasses.replace(r, storage_data=hashes) for r in results])
            return hashed

        def finish(self, metadata: Any, results: Any) -> None:
            hashes: dict[str, str] = {}
            for results_of_process in results:
                for result in results_of_process:
                    hashes |= result.storage_data
            content = {"facts": dict(facts), "files": dict(sorted(hashes.items()))}
            files.write_json(new / FACTS, content)
            if os.path.lexists(path):
                exchange_folders(new, path)
            else:
                new.rename(path)

    file_of = {name: 1 if name.startswith(_MODEL) else 2 for name in tensors}
    return Writer(str(new), file_of, save_distributed=True)
