"""Sharded checkpoints: folders that all processes write while training continues.

The files are safetensors in the layout of PyTorch's distributed checkpoints (DCP). Each process
holds some rows of every tensor. Process K, counted from 1, writes its rows and their offsets to the
files `shard-K-…`. facts.json has the checkpoint's facts (JSON values such as the step), and the
files' hashes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnlm.base import files
from attnlm.base.errors import AttnlmError
from attnlm.base.workspaces import exchange, workspace
from attnlm.compute.processes import Processes, noticing_lost, rows_of
from attnlm.runs.safetensors_file import Shape, TensorFile, read_header

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageWriter

FACTS, _NAME = "facts.json", re.compile(r"shard-\d{5,7}-model-0000[12]-of-0000[12]\.safetensors")
_LARGEST_FACTS = 2**24  # bytes
_Part = tuple[int, int, TensorFile]  # consecutive rows of a tensor in one file: first, end


class ShardedCheckpoints:
    """A writer of checkpoints in the background. All processes must make the same calls."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._group = None if processes.count == 1 else processes.new_group(backend="gloo")
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
            work = self._processes.from_main(work)
            lasting = stack.pop_all()

        def write() -> None:
            group: Any = {"process_group": self._group, "no_dist": self._group is None}
            with lasting:
                for name, (tensors, facts) in checkpoints.items():
                    writer = _writer(Path(work, name), folder / name, tensors, facts)
                    save(dict(tensors), storage_writer=writer, **group)
            when_saved()

        # Ignore the warning that there is only one process.
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled")
        self._writing = self._thread.submit(write)

    def finish(self) -> None:
        """Wait until all checkpoints are written. Raises as `save` does."""
        from torch.distributed.checkpoint.api import CheckpointException

        writing, self._writing = self._writing, None
        with noticing_lost():
            try:
                if writing is not None:
                    writing.result()
            except CheckpointException as failed:
                causes = [cause for cause, _ in failed.failures.values()]
                raise next((c for c in causes if isinstance(c, OSError)), causes[0]) from None


def _writer(
    new: Path, path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> StorageWriter:
    """Return a DCP writer to the folder `new`, which replaces `path` when every process is done."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.futures import Future as Written

    class Writer(HuggingFaceStorageWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            results = super().write_data(plan, planner).wait()
            names = {result.storage_data.relative_path for result in results}
            hashes = {name: files.file_hash(new / name) for name in names}
            hashed: Written[Any] = Written()
            hashed.set_result([dataclasses.replace(r, storage_data=hashes) for r in results])
            return hashed

        def finish(self, metadata: Any, results: Any) -> None:
            hashes = {n: h for some in results for r in some for n, h in r.storage_data.items()}
            content = {"facts": dict(facts), "files": dict(sorted(hashes.items()))}
            files.write_json(new / FACTS, content)
            if os.path.lexists(path):
                exchange(new, path)
            else:
                new.rename(path)

    file_of = {name: 1 if name.startswith("model.") else 2 for name in tensors}
    return Writer(str(new), file_of, save_distributed=True)


def another_model(path: Path) -> AttnlmError:
    """Return the error for a checkpoint whose tensors are not those of the run's model."""
    return AttnlmError(
        f"{path} does not contain the model that config.json describes",
        "copy the run's folder again from its source",
    )


def whole_shape(name: str, weights: Mapping[str, Shape]) -> Shape | None:
    """Return the full shape of the tensor `name`: a weight `model.<parameter>`, or optimizer state
    `optimizer.<parameter>/<what>`. Return None for any other name."""
    return weights.get(f"model.{parameter_of(name)}")


def parameter_of(name: str) -> str:
    """Return a parameter's name, given the name of its weight or of its optimizer state."""
    if name.startswith("optimizer."):
        return name.removeprefix("optimizer.").rpartition("/")[0]
    return name.removeprefix("model.")


def read_folder(
    path: Path, weights: Mapping[str, Shape], rank: int, count: int, numbers: bool
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a checkpoint's facts, and each tensor's rows that belong to process `rank` of `count`.

    Each process checks the hashes of different files. If `numbers` is False, read no rows and check
    no hash. Raises ValueError and SafetensorError for a damaged file, OSError, and AttnlmError if
    facts can't be read or tensors do not match the shapes `weights`.
    """
    content = files.read_json(path / FACTS, _LARGEST_FACTS)
    facts, hashes = content.get("facts"), content.get("files")
    if not isinstance(facts, dict) or not isinstance(hashes, dict):
        raise ValueError("no facts")
    if not all(map(_NAME.fullmatch, hashes)):
        raise ValueError("not a name of ours")
    parts: dict[str, list[_Part]] = defaultdict(list)
    with contextlib.ExitStack() as opening:
        for i, (name, digest) in enumerate(hashes.items()):
            if numbers and i % count == rank and files.file_hash(path / name) != digest:
                raise ValueError("wrong hash")
            opened = opening.enter_context(files.open_regular(path / name))
            file = TensorFile(opened, read_header(opened))
            places = json.loads(file.header.metadata.get("DCP_SHARDING_INFO", ""))
            for tensor, stored in file.header.tensors.items():
                whole = whole_shape(tensor, weights)
                rows, *rest = stored.shape
                if whole is None or stored.dtype != "F32" or tuple(rest) != whole[1:]:
                    raise another_model(path)
                first = _first_row(places, tensor)
                parts[tensor].append((first, first + rows, file))
        if not weights.keys() <= parts.keys():
            raise another_model(path)
        tensors = {}
        for tensor, found in parts.items():
            whole = whole_shape(tensor, weights)
            assert whole is not None
            ours = rows_of(whole[0], rank, count) if numbers else slice(0, 0)
            tensors[tensor] = _joined(tensor, whole, sorted(found, key=lambda p: p[:2]), ours)
    return facts, tensors


def _first_row(places: Any, name: str) -> int:
    """Return the row at which a file's part of a tensor begins. Raises ValueError if rows are
    divided between files."""
    try:
        first, *others = places[name]["saved_offsets"]
    except (KeyError, TypeError):
        raise ValueError("no place") from None
    if type(first) is not int or any(others):
        raise ValueError("no place")
    return first


def _joined(name: str, whole: Shape, parts: list[_Part], ours: slice) -> Tensor:
    """Return the rows `ours` of a tensor. Raises ValueError if any row is missing or duplicated."""
    if [first for first, *_ in parts] + [whole[0]] != [0] + [end for _, end, _ in parts]:
        raise ValueError(f"rows of {name} are missing")
    tensor = torch.empty(ours.stop - ours.start, *whole[1:])
    for first, end, file in parts:
        begin, end = max(first, ours.start), min(end, ours.stop)
        if begin < end:
            values = file.read(name, slice(begin - first, end - first))
            tensor[begin - ours.start : end - ours.start] = values
    return tensor
