"""A file of JSON lines that grows while a run trains, each line with its own checksum."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from attnlm.base import files
from attnlm.base.errors import AttnlmError
from attnlm.base.records import decoded

Record = dict[str, Any]


@dataclass(frozen=True)
class Journal:
    """Records one to a line, each with a `step` above that of the one before."""

    path: Path
    record: type
    """the dataclass that each line is checked by"""
    hint: str
    """What to do about a damaged file."""
    longest_line: int
    """In bytes."""
    largest: int
    """The whole file, in bytes."""

    def records(self) -> list[Record]:
        """All of them, oldest first. A line cut short by a crash is left out.

        Raises AttnlmError where the file is damaged or can't be read.
        """
        if not self.path.exists():
            return []
        try:
            with files.open_regular(self.path) as file:
                return self._read(file)
        except OSError as error:
            raise AttnlmError(f"can't read {self.path}: {error.strerror}", self.hint) from None

    def _read(self, file: IO[bytes]) -> list[Record]:
        if os.fstat(file.fileno()).st_size > self.largest:
            raise self.damaged()
        records: list[Record] = []
        while (line := file.readline(self.longest_line)).endswith(b"\n"):
            record = self._record(line)
            if records and record["step"] <= records[-1]["step"]:
                raise self.damaged()
            records.append(record)
        if len(line) == self.longest_line:
            raise self.damaged()
        return records

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds a record; afterwards it is on disk."""
        with files.naming(self.path), files.open_regular(self.path, "ab") as file:
            file.write(_line(record))
            file.flush()
            os.fsync(file.fileno())

    def has_room(self, record: Mapping[str, Any]) -> bool:
        """Whether the file can be read back with that record."""
        size, more = self.size(), len(_line(record))
        return more < self.longest_line and size + more <= self.largest

    def size(self) -> int:
        """In bytes, 0 where there is no file."""
        return self.path.stat().st_size if self.path.exists() else 0

    def replace(self, records: list[Record]) -> None:
        """Puts these in the place of all that were there."""
        files.write_bytes(self.path, b"".join(map(_line, records)))

    def damaged(self) -> AttnlmError:
        """What is raised where the file is not what was written."""
        return AttnlmError(f"{self.path} is damaged, or was not written by attnlm", self.hint)

    def _record(self, line: bytes) -> Record:
        try:
            record = files.json_value(line.decode())
            intact = isinstance(record, dict) and record.pop("crc32", None) == _checksum(record)
        except (ValueError, RecursionError):
            intact = False
        if not intact:
            raise self.damaged()
        decoded(self.record, record, self.path, self.hint)
        return dict(record)


def _line(record: Mapping[str, Any]) -> bytes:
    """A record and its own checksum, which finds every changed bit."""
    return (json.dumps({**record, "crc32": _checksum(record)}) + "\n").encode()


def _checksum(record: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(record).encode())
