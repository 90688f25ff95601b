"""What is kept of a large text's preparation that was stopped, so that the next one goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnlm.base.errors import AttnlmError
from attnlm.base.files import file_hash, read_json, write_json
from attnlm.base.folders import delete_folder
from attnlm.base.locks import is_ours, locked
from attnlm.data.shards import MOST_SHARDS, file_name

_PREFIX = ".partial-"
_NAME = re.compile(r"\.partial-[0-9a-f]{16}")
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

    def may_precede(self, next_: Shard) -> bool:
        """Whether the numbers of the shard after this one can be those."""
        characters = next_.characters - self.characters
        utf8_bytes = next_.utf8_bytes - self.utf8_bytes
        if characters == 0:  # in the same piece
            return utf8_bytes == 0 and next_.handed == self.handed + next_.tokens
        return 0 < characters <= utf8_bytes <= 4 * characters and next_.handed <= next_.tokens


class DamagedLogError(AttnlmError):
    """What an earlier process wrote is not of this text."""


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

    def take_over(self, shard_tokens: int, item_bytes: int, characters: Mapping[str, int]) -> None:
        """Takes over the full shards that an earlier process wrote, and removes all else.

        Of each split, which has so many `characters`, these are the shards before the first that is
        not what the log says.
        """
        with contextlib.suppress(AttnlmError):  # there is no log, or it is damaged
            written = read_json(self.folder / _LOG, _MAX_LOG)
            for split, shards in self.shards.items():
                limits = shard_tokens, item_bytes, characters[split]
                shards += self._sound(split, written.get(split), *limits)
        kept = {file_name(split, i) for split, s in self.shards.items() for i in range(len(s))}
        _remove_others(self.folder, kept | {_LOG} if kept else set())

    def _sound(
        self, split: str, listed: object, tokens: int, item_bytes: int, characters: int
    ) -> Iterator[Shard]:
        """The shards in a list of anything that are on disk, before the first that can't be."""
        before = Shard("", 0, 0, 0, 0)
        for i, values in enumerate(listed if isinstance(listed, list) else []):
            shard = _shard(values)
            if shard is None or shard.tokens != tokens or i >= MOST_SHARDS:
                return
            if not before.may_precede(shard) or shard.characters > characters:
                return
            path = self.folder / file_name(split, i)
            try:
                size = path.lstat().st_size
                is_whole = is_ours(path) and size == tokens * item_bytes
                if not is_whole or file_hash(path) != shard.sha256:
                    return
            except OSError:
                return
            yield shard
            before = shard

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


def kept_folders(data_dir: Path) -> dict[Path, int]:
    """The folders of preparations that were stopped and that no process goes on with, in bytes."""
    found = {}
    for folder in sorted(data_dir.glob(f"{_PREFIX}*")):
        with contextlib.suppress(OSError):  # somebody has it, or it is gone by now
            if _NAME.fullmatch(folder.name) and is_ours(folder) and folder.is_dir():
                with locked(folder):
                    found[folder] = sum(path.lstat().st_size for path in folder.iterdir())
    return found


def _shard(values: object) -> Shard | None:
    """A shard as it is logged; None where `values` is something else."""
    if not isinstance(values, dict):
        return None
    try:
        shard = Shard(**values)
    except TypeError:  # other keys
        return None
    numbers = shard.tokens, shard.characters, shard.utf8_bytes, shard.handed
    return shard if all(type(n) is int and n >= 0 for n in numbers) else None


def _remove_others(folder: Path, kept: set[str]) -> None:
    """Removes what is in a folder but for the names in `kept`; links are not followed."""
    with os.scandir(folder) as entries:
        others = [entry for entry in entries if entry.name not in kept]
    for entry in others:
        if entry.is_dir(follow_symlinks=False):
            delete_folder(Path(entry.path))
        else:
            Path(entry.path).unlink()
