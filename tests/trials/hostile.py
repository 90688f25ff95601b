"""Files made to do harm: no code runs, memory stays bounded, the refusal is a line."""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file

import attnlm
from attnlm.base import files
from attnlm.config.recipes import load_recipe
from attnlm.config.settings import resolve
from attnlm.data.dataset import sampled_hash
from tests.trials import small
from tests.trials.places import THINGS
from tests.trials.small import agree, facts_of, seal
from tests.trials.trial import Tally, Trial, place

_MOST_MEMORY = 2**29  # bytes that a case may take beside what the process has already
_MOST_SECONDS = 20
_RUN, _DATA = f"checkpoints/{small.RUN}", f"data/{small.BPE}"
_WRITTEN = ("metrics.jsonl", "ticker.jsonl", "last.safetensors", "best.safetensors", "config.json")


@Trial("hostile", short=50, full=3000)
def _hostile(tally: Tally, folder: Path) -> None:
    """Of a file made to do harm no code runs, memory stays bounded, the refusal is a line.

    Each bomb in the place of each file, or so many of these; and so many lies that are sealed. As
    promised is a refusal of one line and a hint. A lie with all its hashes right may also be
    believed, where it asks for nothing that a user could not ask for.
    """
    whole = folder / "whole"
    small.make_all(whole)
    (whole / "recipe.toml").write_text("heads = 2\n")
    (whole / "recipe.json").write_text('{"config": {"heads": 2}}')
    places = [path.relative_to(whole) for path in _files(whole)]
    # A recipe, which lies in no folder here, may be given by a pipe.
    bombs = [(b, name) for b in _BOMBS for name in places if b != "a pipe" or name.parent.name]
    for (bomb, name), _ in tally.chosen(bombs, tally.wanted):
        with place(folder, like=whole) as copy:
            _put(_BOMBS[bomb], copy / name)
            # What follows the ticker's last line end is taken for a line cut short by a crash.
            fault = _tried(copy, _reader(name), must_refuse=name.name != "ticker.jsonl")
            tally.count(fault, f"{name}, {bomb}")
    for written, _ in tally.chosen(_WRITTEN, len(_WRITTEN), len(bombs)):
        with place(folder, like=whole) as copy:
            tally.count(_written_through(copy, written), f"{written} is a link")
    for _, generator in tally.drawn(tally.wanted, len(bombs) + len(_WRITTEN)):
        lie = generator.choice(_LIES)
        with place(folder, like=whole) as copy:
            told = lie(copy, generator)
            tally.count(_tried(copy, _use_all, must_refuse=False), told)


def _tried(folder: Path, read: Callable[[Path], object], *, must_refuse: bool) -> str | None:
    """Return what happens that nothing should when `read` reads what lies in `folder`."""
    began = time.monotonic()
    with small.bounded_memory(_MOST_MEMORY):
        refused, fault = small.refusal(lambda: read(folder))
    if (folder / _MARK).exists():
        return "code ran"
    if time.monotonic() - began > _MOST_SECONDS:
        return f"it took {time.monotonic() - began:.0f} s"
    if fault is None and refused is None and must_refuse:
        return "it was not refused"
    return fault


def _files(folder: Path) -> Iterator[Path]:
    """Yield every file that is read back; of the data sets, the files of that of byte pairs."""
    for part in (_DATA, _RUN):
        yield from small.read_back(folder / part)
    for name in ("data/latest", "checkpoints/latest", "recipe.toml", "recipe.json"):
        yield folder / name


def _reader(place: Path) -> Callable[[Path], object]:
    if place.name.startswith("recipe"):
        return lambda folder: resolve({}, load_recipe(str(folder / place)))
    opens = small.open_data if place.parts[0] == "data" else small.open_the_run
    name = None if place.name == "latest" else place.parts[1]
    return lambda folder: opens(folder, name)


def _use_all(folder: Path) -> None:
    """Read what sampling, evaluating and resuming read."""
    small.open_data(folder, small.BPE)
    small.open_the_run(folder, small.RUN)
    run = attnlm.open_run(folder / _RUN)
    "".join(attnlm.sample(run, tokens=9, prompt="12 apples", seed=1, device="cpu"))
    attnlm.evaluate(run, data_dir=folder / "data", device="cpu")


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


def _hole(path: Path, size: int, content: bytes = b"") -> None:
    path.write_bytes(content)
    os.truncate(path, size)


_ONE: dict[str, object] = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
_LARGE = (2**27).to_bytes(8, "little") + b'{"a":1,' * 2**16
_BOMBS: dict[str, bytes | Callable[[Path], object]] = {
    "a pickle": lambda path: path.write_bytes(pickle.dumps(_Payload(path))),
    "a file of torch": lambda path: torch.save({"model": _Payload(path)}, path),
    "deep lists": b"[" * 2**19,
    "deep objects": b'{"a":' * 2**17,
    "deep tables": b"a = " + b"[" * 2**17,
    "an endless number": b'{"format": ' + b"9" * 2**19 + b"}",
    "an infinite number": b'{"format": 1e99999}',
    "many values": lambda path: path.write_bytes(b"[" + b"[]," * 2**23 + b"[]]"),
    "terabytes": lambda path: _hole(path, 2**42),
    "foreign text": lambda path: path.symlink_to("/etc/passwd"),
    "a path outside": b"../../../../../../../../../../etc\n",
    "an absolute path": b"/etc\n",
    "the parent folder": b"..",
    "a huge header": (2**63).to_bytes(8, "little") + b"{}",
    "a large header": lambda path: _hole(path, 2**28, _LARGE),
    "overlapping tensors": _header(one=_ONE, other={**_ONE, "data_offsets": [8, 24]}),
    "a tensor out of bounds": _header(one={**_ONE, "shape": [2**40], "data_offsets": [0, 2**42]}),
    "an overflowing shape": _header(one={**_ONE, "shape": [2**62, 2**62], "data_offsets": [0, 64]}),
    **{name: THINGS[name] for name in ("a pipe", "an endless device", "a folder")},
    "a link to itself": THINGS["a link to itself"],
}


def _put(bomb: bytes | Callable[[Path], object], path: Path) -> None:
    if isinstance(bomb, bytes):
        path.write_bytes(bomb)
    else:
        path.unlink()
        bomb(path)


# --- Lies: files whose hashes are right -------------------------------------------------------

NASTY: tuple[object, ...] = (
    *(None, True, [], {}, {"a": 1}, [1] * 1000, 0.5, -1.0, 1e308, float("inf"), float("nan")),
    *(-1, 0, 1, 2, 3, 2**10, 2**16, 2**20, 2**40, 2**62, 10**400),
    *("", "..", "../../etc", "/etc", "a\0b", "\ud800", "x" * 10_000, "(a+)+$"),
    *("char", "byte", "transformer", "bigram", "adamw"),
)


def _lie_in_json(names: tuple[str, ...], folder: Path, generator: Random) -> str:
    """Change one value, or several; let a data set's meta.json agree with its tokenizer.json."""
    path = folder / generator.choice(names)
    content = files.read_json(path)
    tables = [content, *(value for value in content.values() if isinstance(value, dict))]
    changes = range(generator.choice((1, 1, 2, 5)))
    told = [_changed(generator.choice(tables), generator) for _ in changes]
    files.write_json(path, content)
    if path.name == "tokenizer.json" and (meta := path.with_name("meta.json")).exists():
        agree(meta, tokenizer_sha256=files.file_hash(path))
    return f"{path.name}: {', '.join(told)}"


def _changed(table: dict[str, Any], generator: Random) -> str:
    key = generator.choice([*table, "more"])
    if generator.random() < 0.1 and key != "seed":  # without one, `train` draws another
        table.pop(key, None)
        return f"no {key}"
    table[key] = generator.choice(NASTY)
    return f"{key} = {str(table[key])[:40]!r}"


def _lie_in_ids(folder: Path, generator: Random) -> str:
    split = generator.choice(("train", "val"))
    path = folder / _DATA / f"{split}.bin"
    if generator.random() < 0.5:
        path.write_bytes(pickle.dumps([_Payload(path)] * generator.randrange(1, 9)) + b".")
    else:
        path.write_bytes(generator.randbytes(2 * generator.randrange(1, 400)))
    hashes = {
        f"{split}_tokens": path.stat().st_size // 2,
        f"{split}_sha256": files.file_hash(path),
        f"{split}_sampled_sha256": sampled_hash(path),
    }
    agree(path.with_name("meta.json"), **hashes)
    return f"{split}.bin: other ids"


def _lie_in_checkpoint(folder: Path, generator: Random) -> str:
    """Change the facts, a tensor or its name, or add tensors; the digest is right."""
    name = generator.choice(("best.safetensors", "last.safetensors"))
    path = folder / _RUN / name
    tensors = load_file(str(path))
    facts: Any = facts_of(path)
    key = generator.choice(list(tensors))
    match generator.choice(("facts", "facts", "name", "tensor", "tensor", "more", "values")):
        case "facts":
            told = _changed(facts, generator)
            if generator.random() < 0.1:
                facts = generator.choice(NASTY)
        case "name":
            names = ("", "..", f"{key}/mean", f"optimizer.{key}", "model.", "x" * 999)
            tensors[told := generator.choice(names)] = tensors.pop(key)
        case "tensor":
            told = generator.choice(list(CHANGES))
            change_tensor(tensors, key, told)
        case "more":
            told = "a thousand tensors more"
            tensors |= {f"{key}{i}": tensors[key].clone() for i in range(1000)}
        case _:
            told = "no numbers"
            tensors[key] = torch.full_like(tensors[key], generator.choice((float("nan"), 1e38)))
    seal(path, tensors, facts)
    return f"{name}: {key}: {told}"


_TYPES = (
    *(torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
)
CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "empty": lambda old: old[:0],
    "scalar": lambda old: old.flatten()[0],
    "flat": lambda old: old.flatten(),
    "deeper": lambda old: old[None],
    "longer": lambda old: torch.cat((old, old)),
    "shorter": lambda old: old.flatten()[:-1],
    "gone": lambda old: None,
    **{f"of {dtype}": partial(torch.Tensor.to, dtype=dtype) for dtype in _TYPES},
}


def change_tensor(tensors: dict[str, torch.Tensor], name: str, kind: str) -> None:
    """Put what a change of CHANGES makes of the tensor in its place."""
    if (changed := CHANGES[kind](tensors.pop(name))) is not None:
        tensors[name] = changed.clone()


def _lie_in_journal(folder: Path, generator: Random) -> str:
    run = attnlm.open_run(folder / _RUN)
    journal = generator.choice((run._metrics, run._ticker))
    records = journal.records()
    told = _changed(generator.choice(records), generator)
    journal.replace(records)
    return f"{journal.path.name}: {told}"


_LIES: tuple[Callable[[Path, Random], str], ...] = (
    partial(_lie_in_json, (f"{_DATA}/meta.json", f"{_DATA}/tokenizer.json")),
    *[partial(_lie_in_json, (*[f"{_RUN}/config.json"] * 2, f"{_RUN}/tokenizer.json"))] * 2,
    *(_lie_in_ids, _lie_in_checkpoint, _lie_in_journal, _lie_in_journal),
)


def _written_through(folder: Path, name: str) -> str | None:
    """Return what goes wrong if a file of a run is a link to a file elsewhere, and it goes on."""
    path, elsewhere = folder / _RUN / name, folder / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    before = elsewhere.read_bytes()
    refused, fault = small.refusal(
        lambda: attnlm.train(resume=path.parent, data_dir=folder / "data", steps=8)
    )
    if elsewhere.read_bytes() != before:
        return f"{name}: the file that it links to was written to"
    return fault or refused
