"""Files that are replaced as a whole or not at all, and the folder for compiled code."""

from __future__ import annotations

import errno
import os
import stat
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from attnlm.base.errors import AttnlmError
from attnlm.base.files import (
    append_bytes,
    explaining_os_errors,
    open_replacement,
    read_json,
    write_bytes,
    write_json,
)
from attnlm.compute.device import choose_device
from attnlm.config.settings import resolve
from attnlm.training.forms import choose_form
from attnlm.training.state import initial_state


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_bytes(path, b"old")
    with pytest.raises(ZeroDivisionError), open_replacement(path) as file:
        file.write(b"half of the ne")
        raise ZeroDivisionError
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    missing = tmp_path / "missing" / "file"
    with pytest.raises(OSError, match="No such file") as caught:
        write_bytes(missing, b"new")
    assert caught.value.filename == str(missing)  # and not its temporary copy


def test_a_written_file_can_be_read_by_others(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    write_bytes(tmp_path / "ours", b"")
    plain, ours = ((tmp_path / name).stat().st_mode for name in ("plain", "ours"))
    assert stat.S_IMODE(plain) == stat.S_IMODE(ours)


def test_json_is_refused_when_a_single_bit_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"steps": 100, "name": "a run"})
    whole = path.read_bytes()
    for place in range(len(whole) - 1):  # but for the last line's end, which JSON does not see
        for bit in (1, 4, 32):
            changed = bytearray(whole)
            changed[place] ^= bit
            path.write_bytes(changed)
            try:
                got = read_json(path, sealed=True)
            except AttnlmError as error:
                assert str(path) in error.message
            else:
                assert got == {"steps": 100, "name": "a run"}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is not valid JSON: Expecting value: line 1 column 1"),
        (b"[1]", "is not a JSON object"),
        (b'{\n  "a": 1\n  "b": 2\n}', "is not valid JSON: .* delimiter: line 3 column 3"),
        (b"{}\xff", "is not valid JSON: 'utf-8' codec can't decode byte 0xff in position 2"),
        (b"[" * 100_000, "is not valid JSON: "),
        (b'{"a": 1}', "was changed after attnlm wrote it: it does not match its own hash"),
    ],
)
def test_invalid_and_modified_json_is_refused(content: bytes, says: str, tmp_path: Path) -> None:
    """A hand-edited file is not called damaged; the error says where it is wrong."""
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(AttnlmError, match=rf"x\.json {says}"):
        read_json(tmp_path / "x.json", sealed=True)
    with pytest.raises(AttnlmError, match="cannot read"):
        read_json(tmp_path / "missing.json", sealed=True)


@pytest.mark.skipif(sys.platform == "win32", reason="symlinks need a privilege")
def test_a_link_is_replaced_and_nothing_is_written_through_it(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"of the user\n")
    (tmp_path / "link").symlink_to("there")
    with pytest.raises(OSError, match="it is a link"):
        append_bytes(tmp_path / "link", b"line\n")
    write_bytes(tmp_path / "link", b"other content")
    assert (tmp_path / "there").read_bytes() == b"of the user\n"
    assert not (tmp_path / "link").is_symlink()


def test_a_file_is_on_disk_before_it_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened = []
    flush, replace = os.fsync, Path.replace

    def recorded_flush(descriptor: int) -> None:
        happened.append(f"flushed {os.fstat(descriptor).st_size}")
        flush(descriptor)

    def recorded_replace(path: Path, target: Path) -> Path:
        happened.append("replaced")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", recorded_flush)
    monkeypatch.setattr(Path, "replace", recorded_replace)
    write_bytes(tmp_path / "x", b"content")
    assert happened[:2] == ["flushed 7", "replaced"]
    assert len(happened) == 3  # and the folder that names it


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (errno.ENOSPC, "free some space, or name another"),
        (errno.ENOENT, "check that the path still exists, or name another"),
        (errno.EROFS, "check the permissions, or name another"),
        (errno.EIO, "check the path, its permissions and free space, or name another"),
    ],
)
def test_the_hint_fits_what_the_system_says(number: int, hint: str, tmp_path: Path) -> None:
    with (
        pytest.raises(AttnlmError) as caught,
        explaining_os_errors(tmp_path, ", or name another"),
        open_replacement(tmp_path / "x"),
    ):
        raise OSError(number, os.strerror(number))
    assert caught.value.hint == hint and str(tmp_path / "x") in caught.value.message


@pytest.mark.parametrize("named", ["", "elsewhere"])
@pytest.mark.parametrize("cache", ["cache", "/dev/null/cache"])
def test_every_compiling_process_uses_the_cache(
    named: str, cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks other than 0, which receive the resolved configuration, keep their code there too."""
    found: list[Path] = []

    def compiled(function: object, *, options: dict[str, object]) -> object:
        # PyTorch keeps precompiled headers in the temporary folder, under a name that all know.
        assert not any(options.values()) and options.keys() <= {"cpp_cache_precompile_headers"}
        assert options or "cpp_cache_precompile_headers" not in torch._inductor.list_options()
        found.append(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]))
        return function

    monkeypatch.setenv("ATTNLM_CACHE_DIR", str(tmp_path / cache))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", named)
    config = resolve({"model": "bigram", "compile": "torch", "steps": 1, "threads": 1, "seed": 1})
    state = initial_state(config, 10, choose_device("cpu"))
    choose_form(state.model, config, state.device, 1, ())
    if named:
        assert found == [Path(named)]
    else:
        is_temporary = cache.startswith("/dev")
        assert found[0].parents[is_temporary] == (tmp_path if is_temporary else tmp_path / cache)
        assert found[0].stat().st_mode & 0o777 == 0o700
