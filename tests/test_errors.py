"""errors.toml: what attnlm says of each wrong command, and of each wrong setting."""

from __future__ import annotations

import functools
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from attnlm.base.errors import UsageError
from attnlm.base.setting_fields import Settings
from attnlm.config.settings import resolve
from tests.kit import command, fails

_TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("errors.toml").read_text("utf-8"))
_FOLDERS: dict[str, dict[str, Any]] = _TABLE["folders"]
_COMMANDS = [(name, *row) for name, folder in _FOLDERS.items() for row in folder["errors"]]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes each folder of errors.toml once: its files, then what its commands make."""

    @functools.cache
    def made(name: str) -> Path:
        path = tmp_path_factory.mktemp("errors")
        for file, content in _FOLDERS[name].get("files", {}).items():
            (path / file).parent.mkdir(parents=True, exist_ok=True)
            text = content if isinstance(content, str) else content[0] * content[1]
            (path / file).write_bytes(text.encode())
        for file, content in _FOLDERS[name].get("bytes", {}).items():
            (path / file).parent.mkdir(parents=True, exist_ok=True)
            (path / file).write_bytes(bytes.fromhex(content))
        for words in _FOLDERS[name].get("commands", []):
            command(*shlex.split(words), cwd=path)
        return path

    return made


def _listed(folder: Path) -> dict[Path, int]:
    """Return the size of each file; a lock is none."""
    return {p: p.stat().st_size for p in folder.rglob("*") if p.name != ".lock"}


@pytest.mark.parametrize(
    ("folder", "words", "code", "error", "hint"),
    _COMMANDS,
    ids=[f"{folder}: {words}" for folder, words, *_ in _COMMANDS],
)
def test_a_wrong_command_says_why_and_what_helps_and_changes_nothing(
    folder: str, words: str, code: int, error: str, hint: str, folders: Any
) -> None:
    path = folders(folder)
    before = _listed(path)
    fails(*shlex.split(words), cwd=path, code=code, says=error, hints=hint)
    assert _listed(path) == before


@pytest.mark.parametrize(
    ("settings", "error", "hint"), _TABLE["settings"]["errors"], ids=lambda value: str(value)
)
def test_wrong_settings_say_why_and_what_helps(settings: Settings, error: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(settings)
    assert error in str(caught.value)
    assert hint in caught.value.hint
