"""A recipe of several sizes: the time, the machine and the text decide on one."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import attnlm
from attnlm.base.errors import AttnlmError
from attnlm.base.events import Note, ignore
from attnlm.compute.device import Device
from attnlm.compute.threads import threads_of_torch
from attnlm.config.recipes import load_sizes
from attnlm.config.settings import Config, Request, resolve, resolve_new
from attnlm.data.dataset import Dataset
from attnlm.training.cuda_graph import FIRST_CALLS
from attnlm.workflows import autotune as sizes
from tests.kit import Clock, command
from tests.models import parts_of

MEGABYTE: Any = SimpleNamespace(
    vocab_size=65, train_tokens=1_003_854, val_tokens=111_540, largest_block_size=111_539
)
TWO_CORES = 1e11  # operations a second


def seconds_per_token(config: Config, dataset: Dataset, *_: object) -> float:
    """Simulate a machine on which FLOPS do not depend on the size."""
    forward = config.spec.costs(dataset.vocab_size).forward_flops + 200 * dataset.vocab_size
    return 3 * forward / TWO_CORES


def request_of(sizes: list[Any], given: dict[str, Any], seconds: float) -> Request:
    return Request(resolve({**given, "budget": float(seconds)}, sizes[0]), given, sizes)


def chosen(seconds: float, text: Any = MEGABYTE, recipes: Any = None, **settings: Any) -> Config:
    told: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizes, "seconds_per_token", seconds_per_token)
        given = {**settings, "budget": float(seconds)}
        candidates = request_of(recipes or load_sizes("best"), given, seconds)
        found = sizes.affordable_size(candidates, text, time.perf_counter(), told.append)
    assert all(isinstance(note, Note) for note in told) and told
    return found


@pytest.mark.parametrize(("device", "slow"), [("cpu", 1), ("cuda", FIRST_CALLS)])
@pytest.mark.parametrize(("least", "made"), [(0.0, 1), (5.0, 10)])
def test_slow_first_steps_do_not_count(
    least: float, made: int, device: str, slow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, steps = Clock(monkeypatch), itertools.count()

    def step() -> torch.Tensor:
        clock.advance(10.0 if next(steps) < slow else 0.5)
        return torch.zeros(())

    config = resolve({}).with_training(micro_batch_size=7)
    stepper = SimpleNamespace(step=step, config=config)
    for name, stand_in in {
        "Stepper": lambda *_: stepper,
        "initial_state": lambda *_: None,
        "use_precision": lambda *_: None,
        "keeping_random_state": lambda *_: contextlib.nullcontext(),
    }.items():
        monkeypatch.setattr(sizes, name, stand_in)
    device_of_tests = Device(device, "float32", "tests")
    seconds, fitting = sizes.time_step(resolve({}), device_of_tests, MEGABYTE, least)
    assert seconds == pytest.approx(0.5, rel=1e-3) and fitting == 7
    assert next(steps) == slow + made


def test_more_time_gives_a_model_that_is_as_large_or_larger() -> None:
    widths = [parts_of(chosen(seconds)).embed_dim or 0 for seconds in (3, 20, 120, 600, 3000, 1e5)]
    assert widths == sorted(widths) and len(set(widths)) >= 4
    ends = [parts_of(resolve({}, load_sizes("best")[end])).embed_dim for end in (0, -1)]
    assert [widths[0], widths[-1]] == ends
    ids = SimpleNamespace(**{**vars(MEGABYTE), "vocab_size": 50_257})  # which take time too
    assert (parts_of(chosen(300, ids)).embed_dim or 0) < (parts_of(chosen(300)).embed_dim or 0)


def test_a_text_that_is_seen_often_gets_dropout_and_an_end() -> None:
    small = SimpleNamespace(**{**vars(MEGABYTE), "train_tokens": 20_000, "val_tokens": 2_000})
    config = chosen(120, small)
    assert parts_of(config).dropout == 0.2 and config.training.steps is not None
    tokens = config.training.steps * config.tokens_per_step
    assert tokens == pytest.approx(40 * 20_000, rel=0.01)
    tiny = SimpleNamespace(**{**vars(MEGABYTE), "train_tokens": 2_700, "val_tokens": 300})
    assert parts_of(chosen(120, tiny)).embed_dim == 64  # the first: a larger one is of no use
    huge = SimpleNamespace(**{**vars(MEGABYTE), "train_tokens": 10**9})
    assert parts_of(chosen(120, huge)).dropout == 0.0


def test_sizes_with_slow_steps_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def tried(config: Config, *_: object) -> float:
        if parts_of(config).layers > limit:
            raise AttnlmError("too short", "")
        return 1e-6

    monkeypatch.setattr(sizes, "seconds_per_token", tried)
    candidates, began = request_of(load_sizes("best"), {}, 300.0), time.perf_counter()
    limit = 2
    config = sizes.affordable_size(candidates, MEGABYTE, began, ignore)
    assert parts_of(config).layers == 2
    limit = 0
    with pytest.raises(AttnlmError, match="too short"):
        sizes.affordable_size(candidates, MEGABYTE, began, ignore)


def test_explicit_settings_override_the_chosen_size() -> None:
    given: dict[str, Any] = {"dropout": 0.3, "layers": 3, "batch_size": 5, "learning_rate": 0.002}
    config = chosen(300, **given)
    assert {name: config.settings()[name] for name in given} == given
    assert parts_of(chosen(3, dropout=0.0)).dropout == 0.0
    recipes: list[Any] = [{"dropout": 0.3, "embed_dim": 16}, {"dropout": 0.4, "embed_dim": 24}]
    assert parts_of(chosen(300, recipes=recipes)).dropout == 0.4
    without: list[Any] = [{"model": "average", "embed_dim": width} for width in (8, 16)]
    assert parts_of(chosen(300, recipes=without)).embed_dim == 16


def test_a_recipe_of_sizes_takes_a_budget_and_what_does_not_change_them() -> None:
    config = resolve_new({"model": "transformer", "processes": 1}, "best").config
    assert parts_of(config).layers == 1
    assert resolve_new({"budget": 9.0}, "best")[0].training.budget == 9.0


def test_a_first_size_too_large_for_the_memory_is_refused_before_it_is_made(
    dataset: Dataset,
) -> None:
    began = time.perf_counter()
    given: dict[str, Any] = {"device": "cpu", "budget": 60.0}
    huge: list[Any] = [
        {"embed_dim": 2**20, "batch_size": 2**16, "block_size": 8},
        {"embed_dim": 2**20, "block_size": 8},
    ]
    with pytest.raises(AttnlmError, match="memory"):
        sizes.affordable_size(request_of(huge, given, 60.0), dataset, began, ignore)
    for too_large in (*huge, {"embed_dim": 16, "block_size": dataset.largest_block_size + 1}):
        request = request_of([{"embed_dim": 8, "block_size": 8}, too_large], given, 60.0)
        config = sizes.affordable_size(request, dataset, began, ignore)
        assert parts_of(config).embed_dim == 8


@pytest.fixture
def two_sizes(tmp_path: Path) -> Path:
    """A recipe of two sizes."""
    sized = "".join(f"[[sizes]]\nembed_dim = {width}\n" for width in (8, 16))
    given = "budget = 1.5\nblock_size = 8\nbatch_size = 64\nheads = 2\n"
    (tmp_path / "mine.toml").write_text(given + sized)
    return tmp_path / "mine.toml"


def test_a_training_takes_one_of_the_sizes_and_records_it(
    two_sizes: Path, dataset: Dataset, tmp_path: Path, ticking_clock: Clock
) -> None:
    told: list[object] = []
    about: dict[str, Any] = {"seed": 1, "device": "cpu", "checkpoint_dir": tmp_path / "runs"}
    run = attnlm.train(dataset, recipe=two_sizes, on_event=told.append, **about)
    assert parts_of(run.config).embed_dim in (8, 16) and parts_of(run.config).dropout == 0.2
    most = 40 * dataset.train_tokens / 512
    assert 1 <= (run.config.training.steps or 0) <= most + 1
    again = json.loads((run.path / "config.json").read_text())["config"]
    assert resolve({}, again).settings() == run.config.settings()
    assert any(" epochs" in str(event) for event in told)
    told.clear()  # its name is refused before sizes are timed
    with pytest.raises(AttnlmError, match=f"{run.name} exists"):
        attnlm.train(dataset, recipe=two_sizes, name=run.name, on_event=told.append, **about)
    assert not told


@pytest.mark.parametrize("size", [0, 1])
def test_a_finished_run_of_any_size_is_accepted(
    size: int, two_sizes: Path, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []

    def chosen(request: Request, *others: Any) -> Config:
        config = resolve(request.settings, {"dropout": 0.1, **request.sizes[size]})
        return config.with_training(steps=9)

    monkeypatch.setattr(sizes, "affordable_size", chosen)
    about: dict[str, Any] = {
        "recipe": two_sizes,
        "name": "mine",
        "checkpoint_dir": tmp_path / "runs",
    }
    run = attnlm.train(dataset, seed=1, **about)
    again = attnlm.train(dataset, seed=1, exist_ok=True, on_event=told.append, **about)
    assert again.config == run.config and "nothing to train" in str(told[0])
    with pytest.raises(AttnlmError, match="its `heads` differs"):
        attnlm.train(dataset, seed=1, exist_ok=True, heads=4, **about)


def test_each_size_is_tried_with_all_threads(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, autotune = list[int](), sizes.autotune

    def recorded(*about: Any) -> Any:
        tried.append(torch.get_num_threads())
        return autotune(*about)

    monkeypatch.setattr(sizes, "autotune", recorded)
    recipes: list[Any] = [{"embed_dim": width, "block_size": 8} for width in (8, 16, 24)]
    given: dict[str, Any] = {"device": "cpu", "budget": 3.0}
    with threads_of_torch(2):
        candidates = request_of(recipes, given, 3.0)
        sizes.affordable_size(candidates, dataset, time.perf_counter(), ignore)
        assert tried == [2, 2, 2] and torch.get_num_threads() == 2


def test_the_next_command_of_a_rung_is_the_rung_above_it(dataset: Dataset, tmp_path: Path) -> None:
    flags = ["--steps", "3", "--block-size", "8", "--device", "cpu"]
    done = command("train", dataset.path, *flags, cwd=tmp_path)
    *_, sample, better = [line for line in done.stderr.splitlines() if line.startswith("next")]
    assert "attnlm sample" in sample
    place = f"--data-dir {dataset.path.parent}"
    assert f"attnlm train {dataset.name} --model wide-head {place}" in better
    done = command("train", dataset.path, *flags, "--recipe", "r2-bigram", cwd=tmp_path)
    assert "--model" not in done.stderr
