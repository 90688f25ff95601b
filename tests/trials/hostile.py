"""Files made to do harm: no code runs, memory stays bounded, the refusal is a line."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import attnlm
from tests.trials import opening
from tests.trials.internals import Journal, checkpoint, files, load_recipe, resolve, sampled_hash
from tests.trials.trial import Tally, Trial

# What a case may take beside what the process has already, and seconds.
_MOST_MEMORY = 2**29
_MOST_SECONDS = 20
_WRITTEN = (
    "metrics.jsonl",
    "ticker.jsonl",
    "last.safetensors",
    "best.safetensors",
    "config.json",
)


def _hostile(tally: Tally, folder: Path) -> None:
    """Each bomb in the place of each file, or so many of these; and so many lies that are sealed.

    As promised is a refusal of one line and a hint. A lie with all its hashes right may also be
    believed, where it asks for nothing that a user could not ask for.
    """
    opening.make_all(folder / "whole")
    (folder / "whole" / "recipe.toml").write_text("heads = 2\n")
    (folder / "whole" / "recipe.json").write_text('{"config": {"heads": 2}}')
    places = [p.relative_to(folder / "whole") for p in _places(folder / "whole")]
    bombs = [(bomb, place) for bomb in _BOMBS for place in places]
    for (bomb, place), _ in tally.chosen(bombs, tally.wanted):
        with _copy(folder) as copy:
            bomb(copy / place)
            # What follows the ticker's last line end is taken for a line cut short by a crash.
            fault = _tried(copy, _reader(place), must_refuse=place.name != "ticker.jsonl")
            tally.count(fault, f"{place}, {bomb.__name__[1:]}")
    for name, _ in tally.chosen(_WRITTEN, len(_WRITTEN), len(bombs)):
        with _copy(folder) as copy:
            tally.count(_written_through(copy, name), f"{name} is a link")
    for _, generator in tally.drawn(tally.wanted, len(bombs) + len(_WRITTEN)):
        lie = generator.choice(_LIES)
        with _copy(folder) as copy:
            told = lie(copy, generator)
            fault = _tried(copy, _use_all, must_refuse=False)
            tally.count(fault, told)


def _tried(folder: Path, read: Callable[[Path], object], *, must_refuse: bool) -> str | None:
    """What happens that nothing should when `read` reads what lies in `folder`."""
    began = time.monotonic()
    with opening.bounded_memory(_MOST_MEMORY):
        refused, fault = opening.refusal(lambda: read(folder))
    if (folder / _MARK).exists():
        return "code ran"
    if time.monotonic() - began > _MOST_SECONDS:
        return f"it took {time.monotonic() - began:.0f} s"
    if fault is None and refused is None and must_refuse:
        return "it was not refused"
    return fault


def _places(folder: Path) -> Iterator[Path]:
    """Every file that is read back; of the data sets, that of byte pairs."""
    for part in (f"data/{opening.BPE}", f"checkpoints/{opening.RUN}"):
        yield from opening.read_back(folder / part)
    for name in ("data/latest", "checkpoints/latest", "recipe.toml", "recipe.json"):
        yield folder / name


def _reader(place: Path) -> Callable[[Path], object]:
    if place.name.startswith("recipe"):
        return lambda folder: resolve({}, load_recipe(str(folder / place)))
    opens = opening.open_data if place.parts[0] == "data" else opening.open_the_run
    name = None if place.name == "latest" else place.parts[1]
    return lambda folder: opens(folder, name)


def _use_all(folder: Path) -> None:
    """What sampling, evaluating and resuming read."""
    opening.open_data(folder, opening.BPE)
    opening.open_the_run(folder, opening.RUN)
    run = attnlm.open_run(folder / "checkpoints" / opening.RUN)
    "".join(attnlm.sample(run, tokens=9, prompt="12 apples", seed=1, device="cpu"))
    attnlm.evaluate(run, data_dir=folder / "data", device="cpu")


# --- Bombs: in the place of a file ------------------------------------------------------------

_MARK = "code-ran"


class _Payload:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.folder / _MARK),)


def _root(path: Path) -> Path:
    return next(parent for parent in path.parents if parent.name == "copy")


def _pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(_Payload(_root(path))))


def _torch_file(path: Path) -> None:
    path.unlink()
    torch.save({"model": _Payload(_root(path))}, path)


def _deep_lists(path: Path) -> None:
    path.write_bytes(b"[" * 2**19)


def _deep_objects(path: Path) -> None:
    path.write_bytes(b'{"a":' * 2**17)


def _deep_tables(path: Path) -> None:
    path.write_bytes(b"a = " + b"[" * 2**17)


def _endless_number(path: Path) -> None:
    path.write_bytes(b'{"format": ' + b"9" * 2**19 + b"}")


def _infinite_number(path: Path) -> None:
    path.write_bytes(b'{"format": 1e99999}')


def _many_values(path: Path) -> None:
    path.write_bytes(b"[" + b"[]," * 2**23 + b"[]]")


def _gigantic(path: Path) -> None:
    path.write_bytes(b"")
    os.truncate(path, 2**42)


def _endless_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)
    if path.name.startswith("recipe"):  # one may be given by a pipe
        _gigantic(path.with_name("large"))
        path.unlink()
        path.symlink_to(path.with_name("large"))


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def _foreign_text(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


def _path_outside(path: Path) -> None:
    path.write_bytes(b"../../../../../../../../../../etc\n")


def _absolute_path(path: Path) -> None:
    path.write_bytes(b"/etc\n")


def _parent_folder(path: Path) -> None:
    path.write_bytes(b"..")


def _huge_header(path: Path) -> None:
    path.write_bytes((2**63).to_bytes(8, "little") + b"{}")


def _large_header(path: Path) -> None:
    path.write_bytes((2**27).to_bytes(8, "little") + b'{"a":1,' * 2**16)
    os.truncate(path, 2**28)


def _header(path: Path, **tensors: object) -> None:
    header = json.dumps(tensors).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))


def _overlapping(path: Path) -> None:
    one = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    _header(path, one=one, other={**one, "data_offsets": [8, 24]})


def _out_of_bounds(path: Path) -> None:
    _header(path, one={"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]})


def _overflowing_shape(path: Path) -> None:
    _header(path, one={"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 64]})


_BOMBS = (
    _pickle,
    _torch_file,
    _deep_lists,
    _deep_objects,
    _deep_tables,
    _endless_number,
    _infinite_number,
    _many_values,
    _gigantic,
    _endless_device,
    _pipe,
    _folder,
    _link_to_itself,
    _foreign_text,
    _path_outside,
    _absolute_path,
    _parent_folder,
    _huge_header,
    _large_header,
    _overlapping,
    _out_of_bounds,
    _overflowing_shape,
)


# --- Lies: files whose hashes are right -------------------------------------------------------

_NASTY: tuple[object, ...] = (
    None,
    True,
    [],
    {},
    {"a": 1},
    -1,
    0,
    1,
    2,
    3,
    2**10,
    2**16,
    2**20,
    2**40,
    2**62,
    10**400,
    0.5,
    -1.0,
    1e308,
    float("inf"),
    float("nan"),
    "",
    "..",
    "../../etc",
    "/etc",
    "a\0b",
    "\ud800",
    "x" * 10_000,
    "(a+)+$",
    "char",
    "byte",
    "transformer",
    "bigram",
    "adamw",
    [1] * 1000,
)


def _lie_in_data(folder: Path, generator: Random) -> str:
    name = generator.choice(("meta.json", "tokenizer.json"))
    return _lie_in_json(folder / "data" / opening.BPE / name, generator)


def _lie_in_run(folder: Path, generator: Random) -> str:
    name = generator.choice(("config.json", "config.json", "tokenizer.json"))
    return _lie_in_json(folder / "checkpoints" / opening.RUN / name, generator)


def _lie_in_json(path: Path, generator: Random) -> str:
    """Changes one value, or several; a data set's meta.json agrees with its tokenizer.json."""
    content = files.read_json(path)
    told = [
        _changed(generator.choice(_tables(content)), generator)
        for _ in range(generator.choice((1, 1, 2, 5)))
    ]
    files.write_json(path, content)
    meta = path.with_name("meta.json")
    if path.name == "tokenizer.json" and meta.exists():
        hashes = {"tokenizer_sha256": files.file_hash(path)}
        files.write_json(meta, {**files.read_json(meta), **hashes})
    return f"{path.name}: {', '.join(told)}"


def _tables(content: dict[str, Any]) -> list[dict[str, Any]]:
    return [content, *(value for value in content.values() if isinstance(value, dict))]


def _changed(table: dict[str, Any], generator: Random) -> str:
    key = generator.choice([*table, "more"])
    if generator.random() < 0.1:
        table.pop(key, None)
        return f"no {key}"
    table[key] = generator.choice(_NASTY)
    return f"{key} = {str(table[key])[:40]!r}"


def _lie_in_ids(folder: Path, generator: Random) -> str:
    data = folder / "data" / opening.BPE
    split = generator.choice(("train", "val"))
    path = data / f"{split}.bin"
    if generator.random() < 0.5:
        path.write_bytes(pickle.dumps([_Payload(folder)] * generator.randrange(1, 9)) + b".")
    else:
        path.write_bytes(generator.randbytes(2 * generator.randrange(1, 400)))
    hashes = {
        f"{split}_tokens": path.stat().st_size // 2,
        f"{split}_sha256": files.file_hash(path),
        f"{split}_sampled_sha256": sampled_hash(path),
    }
    files.write_json(data / "meta.json", {**files.read_json(data / "meta.json"), **hashes})
    return f"{split}.bin: other ids"


def _lie_in_checkpoint(folder: Path, generator: Random) -> str:
    """Another name, shape or type of a tensor, or other facts; the digest is right."""
    name = generator.choice(("best.safetensors", "last.safetensors"))
    path = folder / "checkpoints" / opening.RUN / name
    tensors = load_file(str(path))
    facts = _facts(path)
    key = generator.choice(list(tensors))
    match generator.choice(("facts", "facts", "name", "shape", "type", "more", "less", "values")):
        case "facts":
            told = _changed(facts, generator)
            if generator.random() < 0.1:
                facts = generator.choice(_NASTY)
        case "name":
            told = generator.choice(
                ("", "..", key + "/mean", "optimizer." + key, "model.", "x" * 999)
            )
            tensors[told] = tensors.pop(key)
        case "shape":
            told = f"a longer {key}"
            tensors[key] = torch.cat((tensors[key], tensors[key]))
        case "type":
            dtype = generator.choice((torch.float64, torch.int8, torch.bool, torch.float16))
            told = f"{key} of {dtype}"
            tensors[key] = tensors[key].to(dtype)
        case "more":
            told = "a thousand tensors more"
            tensors |= {f"{key}{i}": tensors[key].clone() for i in range(1000)}
        case "less":
            told = f"no {key}"
            del tensors[key]
        case _:
            told = f"{key} no numbers"
            tensors[key] = torch.full_like(tensors[key], generator.choice((float("nan"), 1e38)))
    described = json.dumps(facts)
    metadata = {"facts": described, "digest": checkpoint._digest(described, tensors)}
    save_file(tensors, str(path), metadata)
    return f"{name}: {told}"


def _facts(path: Path) -> Any:
    size = int.from_bytes(path.read_bytes()[:8], "little")
    return json.loads(json.loads(path.read_bytes()[8 : 8 + size])["__metadata__"]["facts"])


def _lie_in_metrics(folder: Path, generator: Random) -> str:
    return _lie_in_journal(attnlm.open_run(_run(folder))._metrics, generator)


def _lie_in_ticker(folder: Path, generator: Random) -> str:
    return _lie_in_journal(attnlm.open_run(_run(folder))._ticker, generator)


def _run(folder: Path) -> Path:
    return folder / "checkpoints" / opening.RUN


def _lie_in_journal(journal: Journal, generator: Random) -> str:
    records = journal.records()
    told = _changed(generator.choice(records), generator)
    journal.replace(records)
    return f"{journal.path.name}: {told}"


_LIES = (
    _lie_in_data,
    _lie_in_run,
    _lie_in_run,
    _lie_in_ids,
    _lie_in_checkpoint,
    _lie_in_metrics,
    _lie_in_ticker,
)


# --- Around a case ----------------------------------------------------------------------------


def _written_through(folder: Path, name: str) -> str | None:
    """What goes wrong where a file of a run is a link to a file elsewhere, and the run goes on."""
    path, elsewhere = folder / "checkpoints" / opening.RUN / name, folder / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    before = elsewhere.read_bytes()
    refused, fault = opening.refusal(
        lambda: attnlm.train(resume=path.parent, data_dir=folder / "data", steps=8)
    )
    if elsewhere.read_bytes() != before:
        return f"{name}: the file that it links to was written to"
    return fault or refused


@contextlib.contextmanager
def _copy(folder: Path) -> Iterator[Path]:
    copy = folder / "copy"
    shutil.copytree(folder / "whole", copy)
    try:
        yield copy
    finally:
        shutil.rmtree(copy)


TRIAL = Trial(
    "hostile",
    "of a file made to do harm no code runs, memory stays bounded, the refusal is a line",
    short=50,
    full=3000,
    run=_hostile,
    skip=lambda: "Windows has no pipes and devices in folders" if os.name == "nt" else None,
)
