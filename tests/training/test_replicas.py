"""A batch that threads share out gives the gradients of one that is computed whole."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlm.base.errors import UsageError
from attnlm.compute.device import choose_device
from attnlm.compute.threads import compute_all, new_pool, threads_of_torch
from attnlm.config.settings import Config, resolve
from attnlm.config.variants import variant
from attnlm.data.batches import window_seeds
from attnlm.data.dataset import Dataset
from attnlm.training.batch_split import split_batch
from attnlm.training.state import initial_state
from attnlm.training.step import Stepper
from tests.models import prepared
from tests.tolerances import assert_near


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("data")
    return prepared(folder, " ".join(map(str, range(3000))), "count")


def config_of(name: str, **more: object) -> Config:
    settings = {"batch_size": 8, "block_size": 12, "seed": 3, "steps": 5, "threads": 1}
    return resolve({**variant(name), **settings, "compile": "off", **more})  # type: ignore[dict-item]


def first_gradient(config: Config, dataset: Dataset) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of a step from weights that are nowhere zero."""
    state = initial_state(config, dataset.vocab_size, choose_device("cpu"))
    torch.manual_seed(1)
    with torch.no_grad():
        for values in state.optimizer.weights().values():
            values.add_(torch.randn_like(values) * 0.1)
    found: dict[str, Tensor] = {}

    def keep(*_: object, **__: object) -> None:
        named = state.model.named_parameters()
        found.update({name: p.grad.clone() for name, p in named if p.grad is not None})

    state.optimizer.update = keep  # type: ignore[method-assign]
    before = torch.get_num_threads()
    try:
        loss = Stepper(state, config, dataset).step().item()
    finally:
        torch.set_num_threads(before)
    return loss, found


@pytest.mark.parametrize(
    "name",
    [
        "bigram",
        "average",
        "single-head",
        "multi-head:dropout=0.3",
        "transformer:dropout=0.3",
        "gpt2",
        "llama:kv_heads=2",
    ],
)
def test_gradients_do_not_depend_on_how_a_batch_is_divided(name: str, dataset: Dataset) -> None:
    expected_loss, expected = first_gradient(config_of(name, threads=1), dataset)
    for compile in ("auto", "off"):
        for micro, threads in ((8, 2), (8, 4), (4, 1), (4, 2), (3, 2), (1, 1)):  # 3 becomes 2
            settings = {"micro_batch_size": micro, "threads": threads, "compile": compile}
            loss, found = first_gradient(config_of(name, **settings), dataset)
            assert loss == pytest.approx(expected_loss, rel=1e-5)
            assert_near(found, expected)


@pytest.mark.parametrize(
    ("settings", "cut"),
    [
        ({"batch_size": 8, "threads": 1}, (1, 1, 8)),
        ({"batch_size": 7}, (1, 1, 7)),
        ({"batch_size": 6, "threads": 4}, (1, 2, 3)),
        ({"batch_size": 12, "threads": 16}, (1, 4, 3)),
        ({"batch_size": 64, "threads": 64}, (1, 8, 8)),
        ({"batch_size": 1}, (1, 1, 1)),
        ({"batch_size": 8, "compile": "on"}, (1, 1, 8)),
        ({"batch_size": 12}, (1, 2, 6)),
        ({"batch_size": 12, "micro_batch_size": 4}, (3, 2, 2)),
        ({"batch_size": 12, "micro_batch_size": 5}, (3, 2, 2)),
        ({"batch_size": 12, "micro_batch_size": 1}, (12, 1, 1)),
        ({"batch_size": 12, "micro_batch_size": 99}, (1, 2, 6)),
        ({"batch_size": 12, "processes": 3, "micro_batch_size": 2}, (2, 2, 1)),
        ({"batch_size": 7, "micro_batch_size": 6}, (7, 1, 1)),
    ],
)
def test_a_batch_is_cut_among_processes_rounds_and_threads(
    settings: dict[str, Any], cut: tuple[int, ...]
) -> None:
    assert math.prod(cut) * settings.get("processes", 1) == settings["batch_size"]
    training = config_of("transformer", **settings).training
    assert split_batch(training, settings.get("threads", 2)) == cut


def test_dropout_differs_by_window_and_step(dataset: Dataset) -> None:
    seeds = [seed for step in range(9) for seed in window_seeds(1, step, 0, 64)]
    assert len(set(seeds)) == 9 * 64
    assert window_seeds(2, 4, 0, 64) != window_seeds(1, 4, 0, 64)
    assert window_seeds(1, 4, 16, 3) == window_seeds(1, 4, 0, 64)[16:19]
    losses = {
        first_gradient(config_of("transformer:dropout=0.3", seed=seed), dataset)[0]
        for seed in (3, 4, 5)
    }
    assert len(losses) == 3


@pytest.mark.parametrize(
    ("settings", "says", "hints"),
    [
        ({"processes": 3}, "`batch_size` 8 is not divisible by `processes` 3", "9 or 6"),
        ({"processes": 9}, "divisible by `processes` 9", "use `batch_size` 9"),
        ({"micro_batch_size": 0}, "`micro_batch_size`", "at least 1"),
    ],
)
def test_batches_that_processes_cannot_divide_are_refused(
    settings: dict[str, Any], says: str, hints: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(says)) as caught:
        resolve({"model": "transformer", "batch_size": 8, **settings})
    assert hints in str(caught.value.hint)


def test_a_failure_waits_for_running_jobs() -> None:
    begun, ended = threading.Event(), threading.Event()

    def slow() -> int:
        begun.set()
        time.sleep(0.05)
        ended.set()
        return 2

    def fails() -> int:
        begun.wait()
        raise ValueError("on purpose")

    with new_pool(2) as pool:
        assert isinstance(pool, ThreadPoolExecutor)
        assert compute_all([lambda: 1, slow], pool) == [1, 2]
        for jobs in ([fails, slow], [slow, fails]):
            begun.clear()
            ended.clear()
            with pytest.raises(ValueError, match="on purpose"):
                compute_all(jobs, pool)
            assert ended.is_set()


@contextlib.contextmanager
def occupied(pool: ThreadPoolExecutor) -> Iterator[None]:
    """Keep the other threads of a pool busy."""
    free = threading.Event()
    for _ in range(pool._max_workers):
        pool.submit(free.wait)
    try:
        yield
    finally:
        free.set()


def test_the_calling_thread_takes_jobs_that_no_worker_has_started() -> None:
    with new_pool(3) as pool:
        with occupied(pool):
            here = threading.get_ident()
            assert compute_all([threading.get_ident] * 3, pool) == [here] * 3
            with pytest.raises(ZeroDivisionError):
                compute_all([lambda: 1, lambda: 1 // 0, lambda: pytest.fail("is done")], pool)
        all_here = threading.Barrier(3)

        def meets() -> int:
            all_here.wait(20)
            return threading.get_ident()

        assert len(set(compute_all([meets] * 3, pool))) == 3


@pytest.mark.parametrize("name", ["single-head", "transformer"])
def test_numbers_do_not_depend_on_which_thread_does_a_job(name: str, dataset: Dataset) -> None:
    config = config_of(name, batch_size=4, threads=6, dropout=0.1 if name[0] == "t" else 0.0)
    found = []
    for busy in (False, True):
        state = initial_state(config, dataset.vocab_size, choose_device("cpu"))
        stepper = Stepper(state, config, dataset)
        with threads_of_torch(3), occupied(stepper._pool) if busy else contextlib.nullcontext():
            losses = [stepper.step().item() for _ in range(3)]
        found.append((losses, [v.numpy().tobytes() for v in state.optimizer.weights().values()]))
    assert found[0] == found[1]


def test_compiled_steps_recompute_activations(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    about: dict[str, Any] = {"compile": "on", "layers": 2, "dropout": 0.3, "threads": 1}
    loss, found = first_gradient(config_of("transformer", **about, recompute=True), dataset)
    expected_loss, expected = first_gradient(config_of("transformer", **about), dataset)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_every_training_run_of_a_process_is_compiled(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch recompiles a function for eight models by default, and then runs it uncompiled."""
    from torch._dynamo.testing import CompileCounter  # loading it takes seconds

    counter, compile = CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda loss, options: compile(loss, backend=counter))
    small = {"layers": 1, "embed_dim": 4, "heads": 1, "compile": "on", "threads": 1}
    with torch._dynamo.config.patch(recompile_limit=2):
        for number in range(4):
            first_gradient(config_of("transformer", **small, batch_size=1 + number), dataset)
            assert counter.frame_count == 1 + number
