"""A batch that threads share out gives the gradients of one that is computed whole."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlm.compute.device import choose_device
from attnlm.compute.threads import threads_of_torch
from attnlm.config.settings import Config, resolve
from attnlm.config.variants import variant
from attnlm.data.batches import window_seeds
from attnlm.data.dataset import Dataset
from attnlm.training.state import initial_state
from attnlm.training.step import Stepper, split_batch
from tests.compute.test_threads import occupied
from tests.models import prepared
from tests.tolerances import assert_near


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("data")
    return prepared(folder, " ".join(map(str, range(3000))), "count")


def config_of(name: str, **more: object) -> Config:
    settings = {"batch_size": 8, "block_size": 12, "seed": 3, "steps": 5, "threads": 1}
    return resolve({**variant(name), **settings, "compile": "modules", **more})  # type: ignore[dict-item]


def first_gradient(config: Config, dataset: Dataset) -> dict[str, Tensor]:
    """Return loss and gradients of a step from weights that are nowhere zero."""
    state = initial_state(config, dataset.vocab_size, choose_device("cpu"))
    torch.manual_seed(1)
    with torch.no_grad():
        for values in state.optimizer.weights().values():
            values.add_(torch.randn_like(values) * 0.1)
    state.optimizer.update = lambda *_, **__: None  # type: ignore[method-assign]
    with threads_of_torch(torch.get_num_threads()):  # which a step may change
        loss = Stepper(state, config, dataset).step()
    named = state.model.named_parameters()
    return {"loss": loss} | {name: p.grad.clone() for name, p in named if p.grad is not None}


MODELS = ("bigram", "average", "single-head", "multi-head:dropout=0.3", "transformer:dropout=0.3")


@pytest.mark.parametrize("name", [*MODELS, "gpt2", "llama:kv_heads=2"])
def test_gradients_do_not_depend_on_how_a_batch_is_divided(name: str, dataset: Dataset) -> None:
    expected = first_gradient(config_of(name), dataset)
    for compile, divisions in {
        "native": ((8, 2), (4, 1), (3, 2), (1, 1)),  # 3 becomes 2
        "modules": ((8, 4), (4, 2), (1, 1)),
    }.items():
        for micro, threads in divisions:
            settings = {"micro_batch_size": micro, "threads": threads, "compile": compile}
            assert_near(first_gradient(config_of(name, **settings), dataset), expected)


@pytest.mark.parametrize(
    ("settings", "cut"),
    [
        ({"batch_size": 8, "threads": 1}, (1, 1, 8)),
        ({"batch_size": 7}, (1, 1, 7)),
        ({"batch_size": 6, "threads": 4}, (1, 2, 3)),
        ({"batch_size": 12, "threads": 16}, (1, 4, 3)),
        ({"batch_size": 64, "threads": 64}, (1, 8, 8)),
        ({"batch_size": 1}, (1, 1, 1)),
        ({"batch_size": 8, "compile": "torch"}, (1, 1, 8)),
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
    assert split_batch(training, settings.get("threads", 2)) == cut[1:]


def test_dropout_differs_by_window_and_step(dataset: Dataset) -> None:
    seeds = [seed for step in range(9) for seed in window_seeds(1, step, 0, 64)]
    assert len(set(seeds)) == 9 * 64
    assert window_seeds(2, 4, 0, 64) != window_seeds(1, 4, 0, 64)
    assert window_seeds(1, 4, 16, 3) == window_seeds(1, 4, 0, 64)[16:19]
    dropped = [config_of("transformer:dropout=0.3", seed=seed) for seed in (3, 4, 5)]
    assert len({first_gradient(config, dataset)["loss"].item() for config in dropped}) == 3


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


@pytest.mark.compilers
def test_every_training_run_of_a_process_is_compiled(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch recompiles a function for eight models by default, and then runs it uncompiled."""
    from torch._dynamo.testing import CompileCounter  # loading it takes seconds

    counter, compile = CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda loss, options: compile(loss, backend=counter))
    small = {"layers": 1, "embed_dim": 4, "heads": 1, "compile": "torch"}
    with torch._dynamo.config.patch(recompile_limit=2):
        for number in range(4):
            first_gradient(config_of("transformer", **small, batch_size=1 + number), dataset)
            assert counter.frame_count == 1 + number
