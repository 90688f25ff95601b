"""Small data sets and runs, whose files may be damaged, and every way to read and compare them."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors import safe_open

import attnlm
from attnlm.compute.device import choose_device
from attnlm.runs.run import Run
from attnlm.training.state import load_or_init_state
from attnlm.training.step import Stepper
from tests import models

CHAR, BPE, RUN = "fruits-char", "fruits-bpe260", "small"
TEXT = "".join(f"{i} apples and {i + 1} pears are {2 * i + 1} fruits.\n" for i in range(60))
SMALL: dict[str, Any] = {
    "embed_dim": 16,
    "block_size": 8,
    "batch_size": 4,
    "steps": 12,
    "eval_every": 4,
    "seed": 1,
    "threads": 1,
    "device": "cpu",
}


def prepared(folder: Path, tokenizer: str = "char") -> Path:
    """Prepare TEXT in `folder`; return the path of the data set."""
    folder.mkdir(parents=True, exist_ok=True)
    return models.prepared(folder, TEXT, tokenizer=tokenizer).path


def settings_of(rung: str, **settings: Any) -> dict[str, Any]:
    """Return SMALL for a rung, without what the rung has no use for."""
    chosen = {**SMALL, "model": rung, **settings}
    if rung == "bigram":
        del chosen["embed_dim"]
    return chosen


@contextlib.contextmanager
def around_steps(
    before: Callable[[Any], object] = lambda stepper: None,
    after: Callable[[Any], object] = lambda stepper: None,
) -> Iterator[None]:
    """Call `before` and `after` with the Stepper around each training step of this process."""
    original = Stepper.step

    def step(self: Stepper) -> torch.Tensor:
        before(self)
        loss = original(self)
        after(self)
        return loss

    with mock.patch.object(Stepper, "step", step):
        yield


def facts_of(checkpoint: Path) -> dict[str, Any]:
    """Return what a checkpoint holds beside tensors."""
    with safe_open(str(checkpoint), framework="pt") as file:
        return dict(json.loads(file.metadata()["facts"]))


def same_run(one: Run, other: Run) -> str | None:
    """Return how two runs differ, apart from the time they took, or None."""
    if models.timeless(one.path) != models.timeless(other.path):
        return "other metrics"
    if (one.path / "ticker.jsonl").read_bytes() != (other.path / "ticker.jsonl").read_bytes():
        return "another ticker"
    for which in ("best", "last"):
        ours, theirs = (run.checkpoint(which).path for run in (one, other))
        if facts_of(ours) != facts_of(theirs):
            return f"other facts in {which}"
        if ours.read_bytes() != theirs.read_bytes():
            return f"other bytes in {which}"
    return None


def make_all(folder: Path) -> None:
    """Make in `folder` data/ with two data sets, one of byte pairs, and a run trained on this."""
    prepared(folder)
    sizes = {"layers": 1, "heads": 2, "embed_dim": 8, "block_size": 4, "batch_size": 2}
    attnlm.train(
        prepared(folder, tokenizer="bpe:260"),
        checkpoint_dir=folder / "checkpoints",
        name=RUN,
        **settings_of("transformer", **sizes, steps=6, eval_every=2),
    )


def read_back(folder: Path) -> list[Path]:
    """Return the files of a data set or run that a command reads again."""
    return sorted(path for path in folder.iterdir() if path.name not in ("curve.png", ".lock"))


def open_data(folder: Path, name: str | None) -> str:
    """Return a digest of a data set of `make_all`, opened by its name or as the latest."""
    opened = attnlm.open_dataset(name, data_dir=folder / "data", verify=True)
    facts = {k: v for k, v in vars(opened).items() if k not in ("path", "tokenizer")}
    ids = (facts.pop("train").tobytes(), facts.pop("val").tobytes())
    return _digest(facts, opened.tokenizer.to_json(), *ids)


def open_the_run(folder: Path, name: str | None) -> str:
    """Return a digest of all that sampling from the run and resuming it read."""
    run = attnlm.open_run(name, checkpoint_dir=folder / "checkpoints")
    about = [run.config.settings(), run.vocab_size, run.parameters, vars(run.dataset)]
    weights = []
    for which in ("best", "last"):
        model, _ = attnlm.load_model(run, checkpoint=which, device="cpu")
        weights += [p.detach().numpy().tobytes() for p in model.parameters()]
    state = load_or_init_state(run, choose_device("cpu"), fresh=False)
    weights += [tensor.numpy().tobytes() for tensor in state.optimizer.state().values()]
    records = run.evaluations_until(state.evaluated_step)
    ticker = open_ticker(folder, name)
    metrics = [vars(record) for record in records]
    return _digest(about, run.tokenizer.to_json(), state.content(), metrics, ticker, *weights)


def open_ticker(folder: Path, name: str | None) -> str:
    """Return the digests of the lines of the run's ticker, one after the other."""
    run = attnlm.open_run(name, checkpoint_dir=folder / "checkpoints")
    found: list[str] = []
    for snapshot in run.ticker():
        assert snapshot.maps is not None
        first = [] if found else run.ticker_passage()
        found.append(_digest(snapshot.step, snapshot.text, snapshot.maps.tobytes(), first))
    return "".join(found)


def refusal(read: Callable[[], object]) -> tuple[str | None, str | None]:
    """Return the message with which `read` refuses, if it does, and what is wrong with its end."""
    try:
        read()
    except attnlm.AttnlmError as error:
        if not error.message or not error.hint or "\n" in error.message:
            return error.message, "its refusal is not a line and a hint"
        return error.message, None
    except BaseException as error:  # noqa: BLE001 - a panic in Rust is none of Exception's
        return None, f"{type(error).__name__}: {str(error)[:200]}"
    return None, None


def _digest(*parts: object) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else json.dumps(part).encode())
    return digest.hexdigest()
