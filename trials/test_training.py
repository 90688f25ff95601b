"""Training: stopped after any step, spoiled by NaN, met by another process, and its memory."""

from __future__ import annotations

import itertools
import multiprocessing
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import attnlm
from attnlm.compute.native import native_library
from attnlm.config.settings import resolve
from attnlm.model.architecture import RUNGS
from attnlm.training.events import Evaluated, Started, Stepped
from attnlm.training.forms import has_native_form
from attnlm.training.memory import FACTOR
from attnlm.workflows.autotune import has_compiler
from tests.models import assert_same_run
from trials import kit


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the runs that nobody disturbs, once they are needed."""
    return tmp_path_factory.mktemp("whole")


def _assert_undisturbed(path: Path, way: dict[str, Any], project: Path, whole: Path) -> None:
    """Resume a run; assert that it has the bytes of a run of its settings never disturbed."""
    if not (whole / _name(way)).exists():
        kit.train(project, whole, name=_name(way), **way)
    assert_same_run(attnlm.open_run(whole / _name(way)), attnlm.train(resume=path))


def _name(value: Any) -> str:
    return "-".join(map(str, value.values())) if isinstance(value, dict) else str(value)


def _ways() -> Iterator[dict[str, Any]]:
    """Yield every rung with every optimizer and sampling, and with dropout if it has it.

    Without dropout, rungs of one layer have another, faster way to step, and a third one in C.
    """
    for rung, sampling in itertools.product(RUNGS, ("epoch", "random")):
        is_plain = rung in ("bigram", "average", "dot-product")
        for optimizer in ("adamw",) if is_plain else ("adamw", "muon"):
            way = {"model": rung, "sampling": sampling, "optimizer": optimizer}
            yield way if is_plain else {**way, "dropout": 0.2}
            config = resolve(kit.settings_of(**way))
            if has_native_form(config.spec, len(set(kit.TEXT)), config.tokens_per_step):
                yield way
                if native_library() is not None:
                    yield {**way, "compile": "native"}


_STOPS = list(itertools.product(_ways(), range(1, 12)))
if has_compiler():
    compiled = {"model": "transformer", "dropout": 0.2, "compile": "torch", "optimizer": "muon"}
    _STOPS += [(compiled, stop) for stop in (1, 6, 11)]


@pytest.mark.parametrize(("way", "stop"), _STOPS, ids=_name)
@kit.forked
def test_a_resumed_run_has_the_same_bytes_as_one_never_stopped(
    way: dict[str, Any], stop: int, project: Path, whole: Path, place: Path
) -> None:
    def stop_it(stepper: Any) -> None:
        if stepper.state.step == stop:
            signal.raise_signal(signal.SIGTERM)

    with kit.around_steps(after=stop_it), pytest.raises(KeyboardInterrupt):
        kit.train(project, place, **way)
    assert attnlm.open_run(place / "run").checkpoint("last").step == stop
    _assert_undisturbed(place / "run", way, project, whole)


@pytest.mark.parametrize("spoiled", ["loss", "gradient", "weights"])
@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("repeat", range(10))
@kit.forked
def test_a_number_that_is_not_finite_stops_the_run_and_is_never_saved(
    rung: str, spoiled: str, repeat: int, project: Path, place: Path, generator: Random
) -> None:
    """The error names the step, and the checkpoint that is left. Now and then Ctrl-C comes, too."""
    value = generator.choice((float("nan"), float("inf"), -float("inf")))
    step, is_stopped = generator.randrange(1, 13), generator.random() < 0.3

    def spoil(vector: torch.Tensor) -> None:
        vector[generator.randrange(len(vector))] = value

    def before(stepper: Any) -> None:
        form, draws = stepper._replicas[0]

        def spoiling(*batch: Any) -> torch.Tensor:
            loss: torch.Tensor = form(*batch)
            if spoiled == "gradient":
                spoil(stepper.state.optimizer.gradient)
            return loss + value if spoiled == "loss" else loss

        if stepper.state.step + 1 == step and spoiled != "weights":
            stepper._replicas[0] = spoiling, draws

    def after(stepper: Any) -> None:
        if stepper.state.step == step and spoiled == "weights":
            spoil(next(iter(stepper.state.optimizer.weights().values())))
        if stepper.state.step == step and is_stopped:
            signal.raise_signal(signal.SIGINT)

    with kit.around_steps(before, after), pytest.raises(attnlm.AttnlmError) as raised:
        kit.train(project, place, model=rung)
    error = raised.value
    when = re.search(r"\((?:at step (\d+)|between steps (\d+) and (\d+))\)$", error.message)
    assert when is not None, error.message
    first, *_, last = [int(number) for number in when.groups() * 2 if number]
    assert first <= step <= last
    assert "lower `learning_rate`" in error.hint

    run = attnlm.open_run(place / "run")
    saved = run.checkpoint("last").step
    assert (step - 1) // kit.SMALL["eval_every"] * kit.SMALL["eval_every"] <= saved < step
    assert f"the last checkpoint has step {saved}" in error.hint
    for path in (run.best, run.last):
        assert all(tensor.isfinite().all() for tensor in load_file(str(path)).values())


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("step", [0, 4, 8, 12])
@pytest.mark.parametrize("repeat", range(4))
def test_a_second_trainer_is_refused_until_the_first_ends(
    step: int, is_killed: bool, repeat: int, project: Path, whole: Path, place: Path
) -> None:
    """The first waits after the evaluation of this step. A kill gives the run free, too."""
    reached, goes_on = multiprocessing.Semaphore(0), multiprocessing.Semaphore(0)

    def wait(event: object) -> None:
        if isinstance(event, Evaluated) and event.step == step:
            reached.release()
            goes_on.acquire()

    first = kit.Child(lambda: kit.train(project, place, model="multi-head", on_event=wait).name)
    reached.acquire()
    with pytest.raises(kit.ChildError, match="AttnlmError: run is being trained by another"):
        kit.in_child(lambda: attnlm.train(resume=place / "run").name)
    if is_killed:
        first.kill()
        first.join()
    else:
        goes_on.release()
        first.result()
    kit.in_child(_assert_undisturbed, place / "run", {"model": "multi-head"}, project, whole)


@pytest.mark.parametrize("case", range(30))
@kit.forked
def test_a_run_is_sampled_and_evaluated_while_it_is_trained(
    case: int, project: Path, place: Path, generator: Random
) -> None:
    way: dict[str, Any] = {"model": "multi-head", "steps": 40, "eval_every": 1}
    way["seed"] = generator.randrange(2**31)
    writer = kit.Child(lambda: kit.train(project, place, **way).name)
    while not (place / "run" / "last.safetensors").exists():
        time.sleep(0.001)
    for which in ("best", "last") * 5:
        run = attnlm.open_run(place / "run")
        attnlm.evaluate(run, checkpoint=which, device="cpu")
        "".join(attnlm.sample(run, tokens=5, seed=1, checkpoint=which, device="cpu"))
    writer.result()


# --- Memory ---------------------------------------------------------------------------------------

_GROWTH = 12 * 2**20  # bytes: an allocator's unrest, as when another thread does a share
_FEW = {"steps": 3, "eval_every": 3}
_LARGE = {**_FEW, "block_size": 128, "batch_size": 48, "embed_dim": 128}
# A wide head is evaluated on far more tokens than it is trained on.
_WIDE = {**_FEW, "block_size": 8, "batch_size": 1, "embed_dim": 2, "heads": 1, "head_size": 2**15}
_LONG = {**_LARGE, "block_size": 1024, "batch_size": 2, "heads": 16}
_ESTIMATED = {
    **{rung: kit.settings_of(rung, **_LARGE) for rung in RUNGS},
    "a wide head": kit.settings_of("multi-head", **_WIDE),
    "a long context": kit.settings_of("transformer", **_LONG),
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("steps", [1_000, 100_000])
@pytest.mark.parametrize("rung", ["multi-head", "transformer"])
@kit.forked
def test_training_and_sampling_take_no_more_memory_the_longer_they_last(
    rung: str, steps: int, project: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # curves are drawn, as for users
    sizes: list[int] = []

    def measure(event: object) -> None:
        if isinstance(event, Stepped):
            sizes.append(_status("VmRSS"))

    sized = {"model": rung, "steps": steps, "eval_every": steps // 20}
    run = kit.train(project, place, on_event=measure, **sized)  # type: ignore[arg-type]
    _assert_steady(sizes)
    pieces = attnlm.sample(run, tokens=max(10_000, steps), seed=1, device="cpu")
    _assert_steady([_status("VmRSS") for _ in pieces])


def _assert_steady(sizes: list[int]) -> None:
    """Assert that the second half of a life takes no more memory than the first half."""
    first, second = sizes[: len(sizes) // 2], sizes[len(sizes) // 2 :]
    assert max(second) - max(first) <= _GROWTH


def _status(what: str) -> int:
    """Return bytes of this process's memory: VmRSS now, VmHWM at most."""
    (found,) = re.findall(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found) * 1024


@pytest.mark.parametrize("name", _ESTIMATED)
@kit.forked
def test_a_run_takes_as_much_memory_as_was_estimated(name: str, place: Path) -> None:
    # A bigram's memory is all in its vocabulary.
    symbols = "".join(map(chr, range(0x4E00, 0x4E00 + 1500)))
    (place / "text.txt").write_text(symbols * 3 if name == "bigram" else kit.TEXT * 10)
    data = attnlm.prepare(place / "text.txt", data_dir=place, val_fraction=0.4).path
    estimates = []
    before = _status("VmRSS")

    def listen(event: object) -> None:
        if isinstance(event, Started):
            estimates.append(event.memory)

    attnlm.train(data, checkpoint_dir=place, on_event=listen, **_ESTIMATED[name])
    taken = _status("VmHWM") - before
    assert taken / FACTOR <= estimates[0] <= taken * FACTOR
