"""A file of JSON lines that grows while a run trains, each line with its own checksum."""

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
    """A file of records, one per line, in ascending order of their `step`."""

    path: Path
    record: type
    """the dataclass that each line is checked by"""
    hint: str
    """what to do about a damaged file"""
    largest: int
    """the whole file, in bytes"""

    def records(self) -> list[Record]:
        """Return all records, oldest first. A line cut short by a crash is left out.

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
        """Add a record; afterwards it is on disk."""
        with files.naming(self.path), files.open_regular(self.path, "ab") as file:
            file.write(_line(record))
            file.flush()
            os.fsync(file.fileno())

    def has_room(self, record: Mapping[str, Any]) -> bool:
        """Return True if the file can be read back with that record."""
        return self.size() + len(_line(record)) <= self.largest

    def size(self) -> int:
        """Return the file's bytes, 0 without a file."""
        return self.path.stat().st_size if self.path.exists() else 0

    def replace(self, records: list[Record]) -> None:
        """Replace all records by these."""
        files.write_bytes(self.path, b"".join(map(_line, records)))

    def damaged(self) -> AttnlmError:
        """Return the error for a file that is not what was written."""
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
