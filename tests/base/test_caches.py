"""The cache of compiled code: a folder that nobody else may write to, or none."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from attnlm.base import caches
from attnlm.base.caches import code_folder, is_safe_parent
from attnlm.base.errors import AttnlmError
from attnlm.compute.device import choose_device
from attnlm.config.settings import resolve
from attnlm.model.ops import Kernels
from attnlm.training.state import initial_state
from attnlm.training.step import Replica

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has other permissions")


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The cache and the temporary folder."""
    cache, temporary = tmp_path / "cache", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("ATTNLM_CACHE_DIR", str(cache))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return cache, temporary


def test_the_cache_is_private_to_the_user(places: tuple[Path, Path]) -> None:
    assert code_folder() == code_folder() == places[0] / "compiled"
    assert (places[0] / "compiled").stat().st_mode & 0o777 == 0o700


def make_writable(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def make_link(folder: Path) -> None:
    folder.symlink_to(folder.parent, target_is_directory=True)


@pytest.mark.parametrize("make", [make_writable, make_link, Path.touch])
def test_folders_that_others_can_write_are_not_used(
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


def test_another_users_folder_is_not_used(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (places[0] / "compiled").mkdir(0o700, parents=True)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(AttnlmError):
        code_folder()


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
@pytest.mark.parametrize("above", ["", "above"])
def test_a_cache_that_others_can_replace_is_not_used(
    mode: int, above: str, places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner of a folder above it could rename it once it was checked, unless that is sticky."""
    cache, temporary = places
    shared = cache.with_name("shared")
    monkeypatch.setenv("ATTNLM_CACHE_DIR", str(shared / above / "cache"))
    code_folder()
    shared.chmod(mode)
    kept = shared / above / "cache"
    assert code_folder().parent == (kept if mode & stat.S_ISVTX else temporary)
    (temporary.parent / "link").symlink_to(shared, target_is_directory=True)
    monkeypatch.setenv("ATTNLM_CACHE_DIR", str(temporary.parent / "link" / above / "cache"))
    assert code_folder().parent == (kept if mode & stat.S_ISVTX else temporary)


def test_a_folder_in_a_folder_of_another_user_is_not_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs" / "ours").mkdir(parents=True)
    assert is_safe_parent(tmp_path / "theirs" / "ours")
    if os.geteuid() == 0:
        os.chown(tmp_path / "theirs", 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert not is_safe_parent(tmp_path / "theirs" / "ours")


def test_the_folder_is_temporary_without_an_executable_cache(
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
def test_every_compiling_process_uses_the_cache(
    named: str, places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks other than 0, which receive the resolved configuration, keep their code there too."""
    found: list[str] = []
    kept = places[0] / "compiled"

    def compiled(function: object, *, options: dict[str, object]) -> object:
        # PyTorch keeps precompiled headers in the temporary folder, under a name that all know.
        assert not any(options.values()) and options.keys() <= {"cpp_cache_precompile_headers"}
        assert options or "cpp_cache_precompile_headers" not in torch._inductor.list_options()
        found.append(os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""))
        return function

    monkeypatch.chdir(places[1])
    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", named)
    config = resolve({"model": "bigram", "compile": "on", "steps": 1, "threads": 1, "seed": 1})
    state = initial_state(config, 10, choose_device("cpu"))
    Replica(state.model, state.optimizer.gradient, config, state.device, Kernels(), windows=1)
    assert [Path(path).absolute() for path in found] == [Path(named or kept).absolute()]
