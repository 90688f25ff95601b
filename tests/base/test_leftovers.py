"""Temporary files of killed processes, and files that only look like them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from attnlm.base import files
from attnlm.base.errors import AttnlmError
from attnlm.base.files import workspace
from attnlm.base.folders import find_folder, is_locked, locked_for_training, put_back

TWO_DAYS_AGO = time.time() - 2 * 86_400


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Make a folder of another program next to ours."""
    (tmp_path / "victim" / "Documents").mkdir(parents=True)
    (tmp_path / "victim" / "keys").write_text("secret")
    (tmp_path / "runs").mkdir()
    return tmp_path / "victim"


def everything(folder: Path) -> list[tuple[str, int]]:
    """Return all paths below a folder, without following links."""
    found = [
        Path(root, name) for root, *names in os.walk(folder) for part in names for name in part
    ]
    return sorted((str(path), path.lstat().st_ino) for path in found)


def test_files_that_look_like_leftovers_are_kept(victim: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    (runs / ".unfinished-bbbbbbbb").symlink_to("../victim")
    (runs / ".unfinished-novel").mkdir()  # the user's own
    (runs / ".unfinished-novel" / "chapter").touch()
    (runs / ".unfinished-cccccccc").symlink_to("../victim/keys")
    (runs / ".unfinished-aaaaaaaa").mkdir()  # of a process that is running
    before = everything(tmp_path)
    with workspace(runs):
        pass
    assert everything(tmp_path) == before


def test_leftovers_are_removed_without_following_links(victim: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    (runs / ".unfinished-aaaaaaaa" / "new").mkdir(parents=True)
    (runs / ".unfinished-aaaaaaaa" / "linked").symlink_to(victim)
    (runs / ".unfinished-aaaaaaaa" / "new" / "link").symlink_to(victim)
    for path in (*runs.rglob("*"), *runs.iterdir()):
        os.utime(path, (TWO_DAYS_AGO, TWO_DAYS_AGO), follow_symlinks=False)
    before = everything(victim)
    files.write_bytes(runs / "latest", b"")
    (runs / "latest").unlink()
    assert not list(runs.iterdir())
    assert everything(victim) == before


@pytest.mark.parametrize("name", ["tales", None])
@pytest.mark.parametrize("renames", [1, 2])
def test_a_killed_exchange_is_put_back_or_finished(
    renames: int, name: str | None, tmp_path: Path
) -> None:
    aside = tmp_path / ".replaced-0123abcd-tales"
    for folder in (aside, *([tmp_path / "tales"] if renames == 2 else [])):
        folder.mkdir()
        (folder / "meta.json").write_text(folder.name)
    found = find_folder(name, tmp_path, kind="data set")
    assert (found / "meta.json").read_text() == (aside.name if renames == 1 else "tales")
    assert [path.name for path in tmp_path.iterdir()] == ["tales"]


def test_an_exchange_that_another_program_could_have_named_is_left_alone(tmp_path: Path) -> None:
    for name in (".replaced-notes", ".replaced-0123abcd-notes", ".replaced-", ".replaced-x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").touch()
    (tmp_path / ".replaced-0123abcd-tales").touch()
    (tmp_path / "notes").mkdir()
    before = everything(tmp_path)
    with workspace(tmp_path):
        put_back(tmp_path)
    assert everything(tmp_path) == before


def test_a_lock_is_not_taken_through_a_link(victim: Path, tmp_path: Path) -> None:
    (tmp_path / "runs" / ".lock").symlink_to(victim / "keys")
    with (
        pytest.raises(AttnlmError, match=r"cannot lock .*\.lock"),
        locked_for_training(tmp_path / "runs", "wait"),
    ):
        pass
    assert not is_locked(tmp_path / "runs")
    assert (victim / "keys").read_text() == "secret"


def test_a_folder_is_trained_in_by_one_also_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").symlink_to("elsewhere")
    with (
        locked_for_training(tmp_path / "run", "wait"),
        pytest.raises(AttnlmError, match="elsewhere is being trained by another process"),
        locked_for_training(tmp_path / "elsewhere", "wait"),
    ):
        pass
