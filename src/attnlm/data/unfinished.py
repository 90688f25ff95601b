"""What is kept of a large text's preparation that was stopped, so that the next one goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnlm.base.errors import AttnlmError
from attnlm.base.files import read_json, write_json
from attnlm.base.locks import is_ours, locked
from attnlm.data.shards import file_name

_PREFIX = ".partial-"
_LOG = "progress.json"
_MAX_LOG = 2**24  # bytes


@dataclass(frozen=True)
class Shard:
    """A file of ids that was written, and where in the split's text the next one begins.

    That is in the piece which has `characters` and `utf8_bytes` before it, behind its first
    `handed` ids.
    """

    sha256: str
    tokens: int
    characters: int
    utf8_bytes: int
    handed: int


@dataclass
class Log:
    """The shards that are written to a folder, of each split in order."""

    folder: Path
    shards: dict[str, list[Shard]] = field(default_factory=lambda: {"train": [], "val": []})

    def add(self, split: str, shard: Shard) -> None:
        """Remembers a shard, which is on disk by now."""
        self.shards[split].append(shard)
        as_json = {key: list(map(dataclasses.asdict, s)) for key, s in self.shards.items()}
        write_json(self.folder / _LOG, as_json)

    def read(self, item_bytes: int) -> None:
        """Takes over what an earlier process wrote, as far as the files are there."""
        try:
            written = read_json(self.folder / _LOG, _MAX_LOG)
        except AttnlmError:  # there is none, or it is damaged
            return
        for split in self.shards:
            for i, shard in enumerate(Shard(**values) for values in written[split]):
                path = self.folder / file_name(split, i)
                if not path.is_file() or path.stat().st_size != shard.tokens * item_bytes:
                    return
                self.shards[split].append(shard)

    def finish(self, folder: Path) -> None:
        """Moves the folder, which is a whole data set by now, to its place at `folder`."""
        self.folder.rename(folder)
        (folder / _LOG).unlink(missing_ok=True)


@contextlib.contextmanager
def kept_folder(data_dir: Path, facts: dict[str, Any]) -> Iterator[Path]:
    """The hidden folder in `data_dir` for a preparation that `facts` decide, locked meanwhile.

    Whoever prepares the same, after this process has ended in any way, gets the same folder. Raises
    AttnlmError while another process has it.
    """
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    folder = data_dir / f"{_PREFIX}{key}"
    folder.mkdir(exist_ok=True)
    with contextlib.ExitStack() as lock:
        try:
            lock.enter_context(locked(folder))
        except BlockingIOError:
            raise AttnlmError(
                "another process is preparing the same text", "wait until it has ended"
            ) from None
        try:
            yield folder
        finally:
            with contextlib.suppress(OSError):  # it is moved by now, or has something in it
                folder.rmdir()


def kept_folders(data_dir: Path) -> list[Path]:
    """The folders of preparations that were stopped, of which no process goes on with any."""
    found = []
    for folder in sorted(data_dir.glob(f"{_PREFIX}*")):
        with contextlib.suppress(OSError):  # somebody has it, or it is gone by now
            if is_ours(folder):
                with locked(folder):
                    found.append(folder)
    return found
