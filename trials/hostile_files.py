"""Files made to do harm: no code runs, no link is written through, the refusal is a line."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import attnlm
from attnlm.config.recipes import load_recipe
from attnlm.config.settings import resolve
from trials import small_projects
from trials.trial import Tally, Trial, place

_RUN, _DATA = f"checkpoints/{small_projects.RUN}", f"data/{small_projects.BPE}"
_WRITTEN = ("metrics.jsonl", "ticker.jsonl", "last.safetensors", "best.safetensors", "config.json")


@Trial("hostile", short=50, full=500)
def _hostile(tally: Tally, folder: Path) -> None:
    """Of a file made to do harm no code runs, no link is written through, the refusal is a line.

    Each bomb in the place of each file, or so many of these, must be refused with one line and a
    hint.
    """
    whole = folder / "whole"
    small_projects.make_all(whole)
    (whole / "recipe.toml").write_text("heads = 2\n")
    (whole / "recipe.json").write_text('{"config": {"heads": 2}}')
    places = [path.relative_to(whole) for path in _files(whole)]
    bombs = [(bomb, name) for bomb in _BOMBS for name in places]
    for (bomb, name), _ in tally.chosen(bombs, tally.wanted):
        with place(folder, like=whole) as copy:
            _put(_BOMBS[bomb], copy / name)
            # What follows the ticker's last line end is taken for a line cut short by a crash, and
            # the newest run is used if `latest` names none.
            may_pass = name.name in ("ticker.jsonl", "latest")
            fault = _tried(copy, _reader(name), must_refuse=not may_pass)
            tally.count(fault, f"{name}, {bomb}")
    for written, _ in tally.chosen(_WRITTEN, len(_WRITTEN), len(bombs)):
        with place(folder, like=whole) as copy:
            tally.count(_written_through(copy, written), f"{written} is a link")


def _tried(folder: Path, read: Callable[[Path], object], *, must_refuse: bool) -> str | None:
    """Return what happens that nothing should when `read` reads what lies in `folder`."""
    refused, fault = small_projects.refusal(lambda: read(folder))
    if (folder / _MARK).exists():
        return "code ran"
    if fault is None and refused is None and must_refuse:
        return "it was not refused"
    return fault


def _files(folder: Path) -> Iterator[Path]:
    """Yield each file that is read back; of the data sets, only that of byte pairs."""
    for part in (_DATA, _RUN):
        yield from small_projects.read_back(folder / part)
    for name in ("data/latest", "checkpoints/latest", "recipe.toml", "recipe.json"):
        yield folder / name


def _reader(place: Path) -> Callable[[Path], object]:
    if place.name.startswith("recipe"):
        return lambda folder: resolve({}, load_recipe(str(folder / place)))
    opens = small_projects.open_data if place.parts[0] == "data" else small_projects.open_the_run
    name = None if place.name == "latest" else place.parts[1]
    return lambda folder: opens(folder, name)


# --- Bombs: in the place of a file ------------------------------------------------------------

_MARK = "code-ran"


class _Payload:
    def __init__(self, path: Path) -> None:
        self.folder = next(parent for parent in path.parents if parent.name == "case")

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.folder / _MARK),)


def _header(**tensors: object) -> bytes:
    header = json.dumps(tensors).encode()
    return len(header).to_bytes(8, "little") + header + bytes(64)


_ONE: dict[str, object] = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
_BOMBS: dict[str, bytes | Callable[[Path], object]] = {
    "a pickle": lambda path: path.write_bytes(pickle.dumps(_Payload(path))),
    "a file of torch": lambda path: torch.save({"model": _Payload(path)}, path),
    "deep lists": b"[" * 2**19,
    "deep objects": b'{"a":' * 2**17,
    "foreign text": lambda path: path.symlink_to("/etc/passwd"),
    "a path outside": b"../../../../../../../../../../etc\n",
    "an absolute path": b"/etc\n",
    "the parent folder": b"..",
    "a huge header": (2**63).to_bytes(8, "little") + b"{}",
    "overlapping tensors": _header(one=_ONE, other={**_ONE, "data_offsets": [8, 24]}),
    "a tensor out of bounds": _header(one={**_ONE, "shape": [2**40], "data_offsets": [0, 2**42]}),
    "an overflowing shape": _header(one={**_ONE, "shape": [2**62, 2**62], "data_offsets": [0, 64]}),
    "a folder": Path.mkdir,
    "a link to itself": lambda path: path.symlink_to(path.name),
}


def _put(bomb: bytes | Callable[[Path], object], path: Path) -> None:
    if isinstance(bomb, bytes):
        path.write_bytes(bomb)
    else:
        path.unlink()
        bomb(path)


def _written_through(folder: Path, name: str) -> str | None:
    """Return what goes wrong if a file of a run is a link to a file elsewhere, and it goes on."""
    path, elsewhere = folder / _RUN / name, folder / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    before = elsewhere.read_bytes()
    refused, fault = small_projects.refusal(
        lambda: attnlm.train(resume=path.parent, data_dir=folder / "data", steps=8)
    )
    if elsewhere.read_bytes() != before:
        return f"{name}: the file that it links to was written to"
    return fault or refused
