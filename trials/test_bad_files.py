"""Bad files: damaged ones are refused by name, and those made to do harm can't do it."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

import attnlm
from attnlm.compute.device import choose_device
from attnlm.config.recipes import load_sizes
from attnlm.config.settings import resolve
from attnlm.training.state import load_or_init_state
from trials import kit


def _read_data(folder: Path, name: str | None) -> list[object]:
    """Return all of a data set, opened by its name or as the latest."""
    opened = attnlm.open_dataset(name, data_dir=folder / "data", verify=True)
    facts = {k: v for k, v in vars(opened).items() if k not in ("path", "tokenizer")}
    ids = [facts.pop(split).tobytes() for split in ("train", "val")]
    return [facts, opened.tokenizer.to_json(), *ids]


def _read_run(folder: Path, name: str | None) -> list[object]:
    """Return all that sampling from the run and resuming it read."""
    run = attnlm.open_run(name, checkpoint_dir=folder / "checkpoints")
    state = load_or_init_state(run, choose_device("cpu"), fresh=False)
    tensors = list(state.optimizer.state().values())
    for which in ("best", "last"):
        tensors += attnlm.load_model(run, checkpoint=which, device="cpu")[0].state_dict().values()
    facts = [run.config.settings(), run.vocab_size, run.parameters, vars(run.dataset)]
    metrics = [vars(record) for record in run.evaluations_until(state.evaluated_step)]
    weights = [tensor.numpy().tobytes() for tensor in tensors]
    ticker = _read_ticker(folder, name)
    return [facts, run.tokenizer.to_json(), state.content(), metrics, ticker, weights]


def _read_ticker(folder: Path, name: str | None) -> list[object]:
    """Return the run's passage, and then the lines of its ticker."""
    run = attnlm.open_run(name, checkpoint_dir=folder / "checkpoints")
    lines = [(line.step, line.text, np.asarray(line.maps).tobytes()) for line in run.ticker()]
    return [run.ticker_passage(), *lines] if lines else []


def _reader(file: Path) -> Callable[[Path], Any]:
    """Return what reads a file of kit.FILES again in a folder."""
    if file.name.startswith("recipe"):
        return lambda folder: resolve({}, load_sizes(str(folder / file))[0])
    name = None if file.name == "latest" else file.parts[1]
    return partial(_read_data if file.parts[0] == "data" else _read_run, name=name)


def _refusal(read: Callable[[Path], Any], folder: Path) -> tuple[Any, str | None]:
    """Return what `read` finds, or None and the line, with a hint, that refuses it."""
    try:
        return read(folder), None
    except attnlm.AttnlmError as error:
        assert error.message and error.hint and "\n" not in error.message, vars(error)
        return None, error.message


# People edit configurations and recipes. A flipped bit in `latest` could name another run.
_DAMAGED = [path for path in kit.FILES if not path.name.startswith(("config", "recipe"))]


@pytest.mark.parametrize("case", range(70))
@pytest.mark.parametrize("file", _DAMAGED, ids=str)
@kit.forked
def test_a_flipped_bit_or_a_cut_is_refused_by_name(
    file: Path, case: int, project_copy: Path, generator: Random
) -> None:
    """Or all that is read back is the same: a digit of a hash in capitals, another line's end.

    Of a ticker only the beginning may be read, since a line that a crash cut short is left out.
    """
    is_ticker = file.name == "ticker.jsonl"
    read = partial(_read_ticker, name=file.parts[1]) if is_ticker else _reader(file)
    path = project_copy / file
    whole, before = path.read_bytes(), read(project_copy)
    for _ in range(20):
        content, bit = bytearray(whole), generator.choice((0, 1 << generator.randrange(8)))
        place = generator.randrange(generator.choice((len(whole), min(len(whole), 4096))))
        if not bit or file.suffix == ".jsonl":  # whose lines have no hash
            del content[place:]
        else:
            content[place] ^= bit
        path.write_bytes(content)
        found, refused = _refusal(read, project_copy)
        if refused is None:
            assert found == (before[: len(found)] if is_ticker else before), (place, bit)
        else:
            assert file.name in refused, (place, bit)


class _Payload:
    """Code that runs when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, ("code-ran",)


def _header(**tensors: object) -> bytes:
    header = json.dumps(tensors).encode()
    return len(header).to_bytes(8, "little") + header + bytes(64)


_ONE: dict[str, object] = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
# What is written in the place of a file, or makes it.
_BOMBS: dict[str, bytes | Callable[[Path], object]] = {
    "pickle": lambda path: path.write_bytes(pickle.dumps(_Payload())),
    "file of torch": lambda path: torch.save({"model": _Payload()}, path),
    "deep lists": b"[" * 2**19,
    "deep objects": b'{"a":' * 2**17,
    "foreign text": lambda path: path.symlink_to("/etc/passwd"),
    "path outside": b"../../../../../../../../../../etc\n",
    "absolute path": b"/etc\n",
    "parent folder": b"..",
    "huge header": (2**63).to_bytes(8, "little") + b"{}",
    "overlapping tensors": _header(one=_ONE, other={**_ONE, "data_offsets": [8, 24]}),
    "tensor out of bounds": _header(one={**_ONE, "shape": [2**40], "data_offsets": [0, 2**42]}),
    "overflowing shape": _header(one={**_ONE, "shape": [2**62, 2**62], "data_offsets": [0, 64]}),
    "folder": Path.mkdir,
    "link to itself": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("file", kit.FILES, ids=str)
@pytest.mark.parametrize("bomb", _BOMBS)
@kit.forked
def test_a_bomb_is_refused_and_runs_no_code(bomb: str, file: Path, project_copy: Path) -> None:
    os.chdir(project_copy)
    path, content = project_copy / file, _BOMBS[bomb]
    path.unlink()
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content(path)
    _, refused = _refusal(_reader(file), project_copy)
    assert not Path("code-ran").exists()
    # What follows the ticker's last line end is taken for a line cut short by a crash, and the
    # newest run is used if `latest` names none.
    assert refused is not None or file.name in ("ticker.jsonl", "latest")


@pytest.mark.parametrize("file", [file for file in kit.FILES if file.parent == kit.RUN], ids=str)
@kit.forked
def test_a_run_goes_on_without_writing_through_a_link(file: Path, project_copy: Path) -> None:
    path, elsewhere = project_copy / file, project_copy / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    before = elsewhere.read_bytes()
    attnlm.train(resume=path.parent, data_dir=project_copy / "data", steps=8)
    assert elsewhere.read_bytes() == before
