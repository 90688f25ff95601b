"""What a ladder or an exam trains, kept in its folder, from which it can be resumed."""

from __future__ import annotations

import abc
import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any, ClassVar, Self

import attnlm
from attnlm.base import files
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import Note, OnEvent
from attnlm.base.files import move_to_free, numbered_paths, workspace
from attnlm.base.folders import check_name, command_for, locked_for_training
from attnlm.base.heads import head_code
from attnlm.base.own_code import OwnCode
from attnlm.base.setting_fields import read_record
from attnlm.model.own_arguments import CODE

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Plan(abc.ABC):
    """What a ladder or an exam trains, kept in its folder, from which it can be resumed."""

    KIND: ClassVar[str]
    """ladder or exam"""
    FILE: ClassVar[str]
    """the name of the plan's file in the folder"""
    codes: Mapping[str, Any] = field(default_factory=dict)
    """the own code (OwnCode) that is trained, by its name in variants"""

    @abc.abstractmethod
    def check(self) -> None:
        """Raise UsageError for what cannot be trained."""

    def places(self, path: Path) -> list[Path]:
        """Return the folders that must not exist if `path` becomes the folder of this plan."""
        return [path]

    def write(self, folder: Path) -> None:
        """Write the plan to its folder, with copies of the files of own code."""
        codes = {name: code.sha256 for name, code in self.codes.items()}
        about = {"format": _FORMAT, "attnlm": attnlm.__version__}
        files.write_json(folder / self.FILE, {**about, **asdict(self), "codes": codes})
        for code in self.codes.values():
            (folder / CODE).mkdir(exist_ok=True)
            files.write_bytes(folder / CODE / code.file, code.content())

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return the plan in a folder. Raises AttnlmError, which names a wrong value."""
        path, hint = folder / cls.FILE, f"start a new {cls.KIND} with another `name`"
        plan = read_record(cls, path, format=_FORMAT, hint=hint)
        codes = {}
        for name, sha256 in plan.codes.items():
            file, _, called = (head_code(name) or name).rpartition(":")
            copy = folder / CODE / PurePath(file).name
            codes[name] = OwnCode(f"{copy.name}:{called}", copy, str(sha256))
        plan = replace(plan, codes=codes)
        try:
            plan.check()
        except UsageError as error:
            raise AttnlmError(f"{path} is not valid: {error.message}", hint) from None
        return plan

    def create_folder(self, root: Path, name: str | None) -> Path:
        """Create the folder of a new ladder or exam, which never lacks the plan; return its path.

        The default name is `<kind>-001` and so on. Raises AttnlmError if one of `places` exists.
        """
        if name is not None:
            check_name(name)
        with workspace(root) as work:
            new = work / "new"
            new.mkdir()
            self.write(new)
            for path in numbered_paths(root, self.KIND) if name is None else [root / name]:
                existing = [place for place in self.places(path) if os.path.lexists(place)]
                if not existing:
                    return move_to_free(new, [path])
        hint = f"choose another `name` for the {self.KIND}"
        if (existing[0] / self.FILE).exists():
            resume = command_for(f"attnlm {self.KIND} --resume", existing[0])
            hint = f"resume it: {resume}, or {hint}"
        raise AttnlmError(f"{existing[0]} exists, and runs are never overwritten", hint)

    @contextlib.contextmanager
    def training(self, path: Path, on_event: OnEvent) -> Iterator[None]:
        """Hold the lock of the plan's folder, and say how to resume what Ctrl-C interrupts."""
        hint = f"wait until that process ends, or stop it, or start another {self.KIND}"
        with locked_for_training(path, hint):
            try:
                yield
            except KeyboardInterrupt:
                resume = command_for(f"attnlm {self.KIND} --resume", path)
                on_event(Note(f"stopped; the models trained so far are saved: {resume}"))
                raise
