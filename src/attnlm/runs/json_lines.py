"""Append-only JSON lines files, in which each line has its own checksum."""

from __future__ import annotations

import itertools
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlm.base import files
from attnlm.base.errors import AttnlmError
from attnlm.base.records import decoded

Record = dict[str, Any]


@dataclass(frozen=True)
class Journal:
    """A file of records, one per line, in ascending order of `step`."""

    path: Path
    record: type
    """the dataclass that each line is validated against"""
    hint: str
    """what to do about a damaged file"""
    largest: int
    """the maximum size of the file, in bytes"""

    def records(self) -> list[Record]:
        """Return all records, oldest first, without a last line that a crash truncated.

        Raises AttnlmError if the file is damaged or can't be read.
        """
        if not self.path.exists():
            return []
        *lines, _ = files.read_bytes(self.path, self.largest).split(b"\n")
        records = [self._record(line) for line in lines]
        for earlier, later in itertools.pairwise(records):
            if later["step"] <= earlier["step"]:
                raise self.damaged()
        return records

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record, and flush it to disk."""
        with files.naming(self.path), files.open_regular(self.path, "ab") as file:
            file.write(_line(record))
            file.flush()
            os.fsync(file.fileno())

    def has_room(self, record: Mapping[str, Any]) -> bool:
        """Return True if the file stays within its maximum size with this record."""
        return self.size() + len(_line(record)) <= self.largest

    def size(self) -> int:
        """Return the file's size in bytes, or 0 if the file does not exist."""
        return self.path.stat().st_size if self.path.exists() else 0

    def replace(self, records: list[Record]) -> None:
        """Replace all records with `records`."""
        files.write_bytes(self.path, b"".join(map(_line, records)))

    def damaged(self) -> AttnlmError:
        """Return the error for a damaged file."""
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
    """Return the line of a record, with a checksum that detects any changed bit."""
    return (json.dumps({**record, "crc32": _checksum(record)}) + "\n").encode()


def _checksum(record: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(record).encode())
