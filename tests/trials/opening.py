"""Small data sets and a run to be damaged, and every way in which their files are read back."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attnlm
from tests.trials.internals import choose_device, saved_state

TEXT = "".join(f"{i} apples and {i + 1} pears are {2 * i + 1} fruits.\n" for i in range(60))
SETTINGS: dict[str, Any] = {
    "model": "transformer",
    "layers": 1,
    "heads": 2,
    "embed_dim": 8,
    "block_size": 4,
    "batch_size": 2,
    "steps": 6,
    "eval_every": 2,
    "seed": 1,
    "threads": 1,
    "device": "cpu",
}
CHAR, BPE, RUN = "fruits-char", "fruits-bpe260", "small"


def make_all(folder: Path) -> None:
    """In `folder`: data/ with two data sets, the second of byte pairs, and a run trained on it."""
    folder.mkdir(exist_ok=True)
    text = folder / "fruits.txt"
    text.write_text(TEXT)
    attnlm.prepare(text, data_dir=folder / "data")
    attnlm.prepare(text, data_dir=folder / "data", tokenizer="bpe:260")
    attnlm.train(
        data_dir=folder / "data", checkpoint_dir=folder / "checkpoints", name=RUN, **SETTINGS
    )


def read_back(folder: Path) -> list[Path]:
    """The files of a data set or run that a command reads again: all but its picture."""
    return sorted(path for path in folder.iterdir() if path.suffix != ".png")


def open_data(folder: Path, name: str | None) -> str:
    """A digest of all that a data set of `make_all` says, by its name or as the latest."""
    opened = attnlm.open_dataset(name, data_dir=folder / "data", verify=True)
    facts = {k: v for k, v in vars(opened).items() if k not in ("path", "tokenizer")}
    ids = (facts.pop("train").tobytes(), facts.pop("val").tobytes())
    return _digest(facts, opened.tokenizer.to_json(), *ids)


def open_the_run(folder: Path, name: str | None) -> str:
    """A digest of all that the run of `make_all` says: as if it were sampled from and resumed."""
    run = attnlm.open_run(name, checkpoint_dir=folder / "checkpoints")
    about = [run.config.settings(), run.vocab_size, run.parameters, dict(run.dataset)]
    weights = []
    for which in ("best", "last"):
        model, _ = attnlm.load_model(run, checkpoint=which, device="cpu")
        weights += [p.detach().numpy().tobytes() for p in model.parameters()]
    state = saved_state(run, choose_device("cpu"))
    weights += [tensor.numpy().tobytes() for tensor in state.optimizer.state().values()]
    records = run.metrics_until(state.evaluated_step)
    ticker = open_ticker(folder, name)
    return _digest(about, run.tokenizer.to_json(), state.facts(), records, ticker, *weights)


def open_ticker(folder: Path, name: str | None) -> str:
    """A digest of each line of the run's ticker, one after the other."""
    run = attnlm.open_run(name, checkpoint_dir=folder / "checkpoints")
    said: list[str] = []
    for snapshot in run.ticker():
        assert snapshot.maps is not None
        first = [] if said else run.ticker_passage()
        said.append(_digest(snapshot.step, snapshot.text, snapshot.maps.tobytes(), first))
    return "".join(said)


def refusal(read: Callable[[], object]) -> tuple[str | None, str | None]:
    """The message that `read` refuses with, if it does; and what it does that nothing should."""
    try:
        read()
    except attnlm.AttnlmError as error:
        if not error.message or not error.hint or "\n" in error.message:
            return error.message, "its refusal is not a line and a hint"
        return error.message, None
    except BaseException as error:  # noqa: BLE001 - a panic in Rust is none of Exception's
        return None, f"{type(error).__name__}: {str(error)[:200]}"
    return None, None


@contextlib.contextmanager
def bounded_memory(most: int) -> Iterator[None]:
    """Lets this process take so many more bytes and no more, where the system can count them."""
    if sys.platform != "linux":
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _digest(*parts: object) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else json.dumps(part).encode())
    return digest.hexdigest()
