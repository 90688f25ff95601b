"""Where compiled code is kept: a folder that nobody else may write to, or none."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from attnlm.base import caches
from attnlm.base.caches import code_folder
from attnlm.base.errors import AttnlmError
from attnlm.compute.device import choose_device
from attnlm.config.settings import resolve
from attnlm.training.state import initial_state
from attnlm.training.step import Share

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has other permissions")


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The cache and the temporary folder."""
    cache, temporary = tmp_path / "cache", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("ATTNLM_CACHE_DIR", str(cache))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return cache, temporary


def test_it_is_in_the_cache_and_ours_alone(places: tuple[Path, Path]) -> None:
    assert code_folder() == code_folder() == places[0] / "compiled"
    assert (places[0] / "compiled").stat().st_mode & 0o777 == 0o700


def make_writable(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def make_link(folder: Path) -> None:
    folder.symlink_to(folder.parent, target_is_directory=True)


@pytest.mark.parametrize("make", [make_writable, make_link, Path.touch])
def test_what_others_may_have_made_is_not_taken(
    make: Callable[[Path], None], places: tuple[Path, Path]
) -> None:
    cache, temporary = places
    cache.mkdir()
    make(cache / "compiled")
    own = temporary / f"attnlm-compiled-{os.getuid()}"
    assert code_folder() == own and own.stat().st_mode & 0o777 == 0o700
    own.rmdir()
    make(own)
    with pytest.raises(AttnlmError) as raised:
        code_folder()
    assert "TORCHINDUCTOR_CACHE_DIR" in raised.value.hint


def test_another_users_folder_is_not_taken(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (places[0] / "compiled").mkdir(0o700, parents=True)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(AttnlmError):
        code_folder()


def test_without_a_cache_or_where_it_holds_no_programs_it_is_temporary(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, temporary = places
    monkeypatch.setattr(caches, "may_load_from", lambda folder: temporary in Path(folder).parents)
    assert code_folder().parent == temporary
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("ATTNLM_CACHE_DIR", "/dev/null/cache")
    assert code_folder().parent == temporary


@pytest.mark.parametrize("named", ["", "elsewhere"])
def test_every_process_that_compiles_keeps_its_code_there(
    named: str, places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that are told the settled configuration, as all but the first of several are."""
    found: list[str] = []

    def compiled(function: object) -> object:
        found.append(os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""))
        return function

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", named)
    config = resolve({"model": "bigram", "compile": "on", "steps": 1, "threads": 1, "seed": 1})
    state = initial_state(config, 10, choose_device("cpu"))
    Share(state, config, 1, first=True)
    assert found == [named or str(places[0] / "compiled")]
