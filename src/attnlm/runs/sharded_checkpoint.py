"""Checkpoints in a folder, of which each process writes its part, beside the training.

The files are safetensors, as PyTorch's distributed checkpoints (DCP) lay them out: `shard-K` holds
rows of every tensor, and where they begin. facts.json has what belongs to them, and their hashes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from attnlm.base import files
from attnlm.base.workspaces import exchange, workspace
from attnlm.compute.processes import Processes, noticing_lost, rows_of
from attnlm.runs.safetensors_file import LARGEST_HEADER, Shape, TensorFile, read_header

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.storage import StorageWriter

FACTS, _NAME = "facts.json", re.compile(r"shard-\d{5,7}-model-0000[12]-of-0000[12]\.safetensors")
_LARGEST_FACTS = 2**24  # bytes


class ShardedCheckpoints:
    """Writes checkpoints while the training goes on. All processes have to call it alike."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._groups: dict[Path, ProcessGroup | None] = {}
        self._under_way: dict[Path, Future[Any]] = {}

    def save(
        self,
        path: Path,
        tensors: Mapping[str, Tensor],
        facts: Mapping[str, Any],
        when_saved: Callable[[], None] = lambda: None,
        *,
        after: Path | None = None,
    ) -> None:
        """Begins to write the tensors, which nobody changes any more; weights are `model.…`.

        A checkpoint of that path that is under way is waited for first. The new one takes its place
        when the one of the path `after`, if it is under way, has taken its own. Raises OSError
        where the older one could not be written, and LostProcessError.
        """
        from torch.distributed.checkpoint.state_dict_saver import async_save

        self._wait(path)
        alone = self._processes.count == 1
        if path not in self._groups:
            self._groups[path] = None if alone else self._processes.new_group(backend="gloo")
        with contextlib.ExitStack() as stack:
            new = ""
            if self._processes.is_main:
                new = str(stack.enter_context(workspace(path.parent)) / path.name)
            new = self._processes.from_main(new)
            earlier = None if after is None else self._under_way.get(after)
            writer = _writer(Path(new), path, tensors, facts, earlier)
            # That there is one process only is no news.
            warnings.filterwarnings("ignore", message=".*torch.distributed is disabled")
            with noticing_lost():
                under_way = async_save(
                    dict(tensors),
                    storage_writer=writer,
                    process_group=self._groups[path],
                    no_dist=alone,
                )
            assert isinstance(under_way, Future)
            lasting = stack.pop_all()
        # A future's callbacks may come after those who wait for it have gone on.
        self._under_way[path] = finished = Future[None]()

        def done(saved: Future[Any]) -> None:
            lasting.close()
            if failure := saved.exception():
                finished.set_exception(failure)
            else:
                when_saved()
                finished.set_result(None)

        under_way.add_done_callback(done)

    def finish(self) -> None:
        """Waits until all is written. Raises as `save` does."""
        for path in list(self._under_way):
            self._wait(path)

    def _wait(self, path: Path) -> None:
        from torch.distributed.checkpoint.api import CheckpointException

        if path in self._under_way:
            try:
                with noticing_lost():
                    self._under_way.pop(path).result()
            except CheckpointException as failed:
                causes = [cause for cause, _ in failed.failures.values()]
                why = next((c for c in causes if isinstance(c, OSError)), causes[0])
                with noticing_lost():
                    raise why from None


def _writer(
    new: Path,
    path: Path,
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    earlier: Future[Any] | None,
) -> StorageWriter:
    """Writes to `new`, which it puts in the place of `path` when all have written, and what is
    `earlier` is in its own place."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.futures import Future as Written

    class Writer(HuggingFaceStorageWriter):
        def stage(self, state_dict: Any) -> Any:
            return state_dict  # copies already

        def write_data(self, plan: Any, planner: Any) -> Any:
            results = super().write_data(plan, planner).wait()
            names = {result.storage_data.relative_path for result in results}
            hashes = {name: files.file_hash(new / name) for name in names}
            hashed: Written[Any] = Written()
            hashed.set_result(
                [
                    dataclasses.replace(
                        result,
                        storage_data=(name := result.storage_data.relative_path, hashes[name]),
                    )
                    for result in results
                ]
            )
            return hashed

        def finish(self, metadata: Any, results: Any) -> None:
            hashes = dict(result.storage_data for some in results for result in some)
            content = {"facts": dict(facts), "files": dict(sorted(hashes.items()))}
            files.write_json(new / FACTS, content)
            if earlier is not None:
                earlier.result()
            if os.path.lexists(path):
                exchange(new, path)
            else:
                new.rename(path)

    file_of = {name: 1 if name.startswith("model.") else 2 for name in tensors}
    return Writer(str(new), file_of, save_distributed=True)


def whole_shape(name: str, weights: Mapping[str, Shape]) -> Shape | None:
    """The shape that a checkpoint's tensor must have: one of the weights, or what an optimizer
    remembers of it, `optimizer.<parameter>/<what>`. None where it is neither."""
    return weights.get(f"model.{parameter_of(name)}")


def parameter_of(name: str) -> str:
    """The parameter that a checkpoint's tensor is, or is remembered of."""
    if name.startswith("optimizer."):
        return name.removeprefix("optimizer.").rpartition("/")[0]
    return name.removeprefix("model.")


def read_folder(
    path: Path, weights: Mapping[str, Shape], rank: int, count: int, numbers: bool
) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """The facts, and the rows of all tensors that process `rank` of `count` has: all for 0 of 1.

    None where they are not of a model of these weights. Each of the processes checks the hashes of
    some of the files. Without `numbers` they have no rows, and no hash is checked. Raises
    ValueError where a file is damaged, OSError, and AttnlmError for facts that can't be read.
    """
    content = files.read_json(path / FACTS, _LARGEST_FACTS)
    facts, hashes = content.get("facts"), content.get("files")
    if not isinstance(facts, dict) or not isinstance(hashes, dict):
        raise ValueError("no facts")
    if not all(map(_NAME.fullmatch, hashes)):
        raise ValueError("not a name of ours")
    if sum(_checked_size(path / name) for name in hashes) < 4 * sum(
        map(math.prod, weights.values())
    ):
        raise ValueError("too small for such a model")
    parts = _Parts(weights, rank, count, numbers)
    for i, (name, digest) in enumerate(hashes.items()):
        if numbers and i % count == rank and files.file_hash(path / name) != digest:
            raise ValueError("wrong hash")
        if not parts.take(path / name):
            return None
    parts.check_complete()
    return (facts, parts.tensors) if weights.keys() <= parts.tensors.keys() else None


def _checked_size(path: Path) -> int:
    """Bytes of a file, the header of which is no larger than a checkpoint's."""
    with files.open_regular(path) as file:
        header, size = int.from_bytes(file.read(8), "little"), os.fstat(file.fileno()).st_size
    if header > min(size, LARGEST_HEADER):
        raise ValueError("too large a header")
    return size


def _place(places: Any, name: str) -> list[int]:
    """Where rows of a tensor begin, in each direction."""
    try:
        place = list(places[name]["saved_offsets"])
    except (KeyError, TypeError):
        raise ValueError("no place") from None
    if not place or not all(type(offset) is int for offset in place):
        raise ValueError("no place")
    return place


class _Parts:
    """Rows of tensors, gathered from files."""

    def __init__(self, weights: Mapping[str, Shape], rank: int, count: int, numbers: bool) -> None:
        self._weights, self._rank, self._count = weights, rank, count
        self._numbers = numbers
        self._found: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self.tensors: dict[str, Tensor] = {}

    def take(self, path: Path) -> bool:
        """The rows of a file that are wanted; False where it is another model's."""
        with files.open_regular(path) as opened:
            file = TensorFile(opened, read_header(opened))
            places = json.loads(file.header.metadata.get("DCP_SHARDING_INFO", ""))
            for name, part in file.header.tensors.items():
                whole = whole_shape(name, self._weights)
                rows, *rest = part.shape
                first, *others = _place(places, name)
                if whole is None or part.dtype != "F32" or tuple(rest) != whole[1:]:
                    return False
                if any(others) or not 0 <= first <= first + rows <= whole[0]:
                    raise ValueError("not rows of this tensor")
                self._found[name].append((first, first + rows))
                self._copy(name, whole, file, first, rows)
        return True

    def _copy(self, name: str, whole: Shape, file: TensorFile, first: int, rows: int) -> None:
        ours = rows_of(whole[0], self._rank, self._count) if self._numbers else slice(0, 0)
        if name not in self.tensors:
            import torch

            self.tensors[name] = torch.empty(ours.stop - ours.start, *whole[1:])
        begin, end = max(first, ours.start), min(first + rows, ours.stop)
        if begin < end:
            values = file.read(name, slice(begin - first, end - first))
            self.tensors[name][begin - ours.start : end - ours.start] = values

    def check_complete(self) -> None:
        """Raises ValueError where rows of a tensor are missing, or there twice."""
        for name, found in self._found.items():
            whole, end = whole_shape(name, self._weights), 0
            for first, last in sorted(found):
                if first != end:
                    raise ValueError(f"rows of {name} are missing")
                end = last
            if whole is None or end != whole[0]:
                raise ValueError(f"rows of {name} are missing")
