"""A block in C computes what Block computes with PyTorch, forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlm.base.errors import UsageError
from attnlm.base.setting_fields import Settings
from attnlm.compute.device import Device
from attnlm.compute.native import instruction_sets, load
from attnlm.config.settings import resolve
from attnlm.data.dataset import Dataset
from attnlm.model import ops
from attnlm.model.language_model import Block, Transformer
from attnlm.model.layers import dropout_from
from attnlm.model.native_block import make_native_block
from attnlm.model.ops import Kernels, use_kernels
from attnlm.model.ops import block as native_block
from attnlm.training.state import initial_state
from attnlm.training.step import Stepper
from attnlm.workflows.autotune import autotune
from attnlm.workflows.train import train
from tests.models import CHANGES, SIZES, V, needs_kernels, small_model
from tests.tolerances import assert_near, assert_rounded

pytestmark = needs_kernels
CPU = Device("cpu", "float32", "tests")
IN_C = Kernels(native_ops=True, matmul="native", attention="native")
BLOCKS = (
    "gpt2",
    "gpt2:bias=false",
    "gpt2:norm=rms:mlp=relu2",
    "gpt2:norm=none:mlp=none",
    "gpt2:embed_dim=40:mlp_width=50:block_size=70",
    "transformer",
    "transformer:kv_heads=2:mlp=swiglu:bias=true",
    "llama:kv_heads=1:head_size=10",
    "qwen3:qkv_bias=true:kv_heads=2",
)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def a_model(name: str) -> Transformer:
    model = small_model(name).train()
    assert isinstance(model, Transformer)
    return model


def some_windows(model: Transformer, windows: int = 3) -> tuple[Tensor, Tensor]:
    length = model.architecture.block_size - 2
    ids = torch.randint(V, (windows, length + 1), generator=torch.Generator().manual_seed(2))
    return ids[:, :-1], ids[:, 1:]


def loss_and_gradients(
    model: Transformer, windows: tuple[Tensor, Tensor], kernels: Kernels = IN_C, seed: int = 0
) -> dict[str, Tensor]:
    """The loss, and the gradient of each parameter; dropout draws for each window."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    generators = [torch.Generator().manual_seed(seed + i) for i in range(len(windows[0]))]
    with use_kernels(kernels), dropout_from(generators):
        loss = model.loss(*windows)
        loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def passes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The passes that block.c computes from now on."""
    made: list[Any] = []
    call = native_block._run_kernel

    def counted(*given: Any) -> None:
        made.append(given)
        call(*given)

    monkeypatch.setattr(native_block, "_run_kernel", counted)
    return made


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("instructions", instruction_sets())
def test_loss_and_gradients_equal_pytorch(
    name: str, instructions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "native_library", lambda: load(instructions))
    made, precise = passes(monkeypatch), a_model(name)
    windows = some_windows(precise)
    found: dict[str, Tensor] = {}
    for threads in (1, 3):
        torch.set_num_threads(threads)
        ours = loss_and_gradients(copy.deepcopy(precise).float(), windows)
        found |= {f"{name} by {threads} threads": x for name, x in ours.items()}
    assert len(made) == 2 * 2 * len(precise.blocks)

    def expected() -> dict[str, Tensor]:
        exact = loss_and_gradients(precise, windows, Kernels())
        return {f"{name} by {n} threads": x for n in (1, 3) for name, x in exact.items()}

    assert_rounded(found, expected)


def test_the_number_of_threads_changes_no_bit() -> None:
    model = a_model("transformer:kv_heads=2:embed_dim=96:block_size=150").float()
    block, rotation = model.blocks[0], (model.cosines.float(), model.sines.float())
    generator = torch.Generator().manual_seed(3)
    x, d_out = torch.randn(2, 2, 150, 96, generator=generator)

    def results(threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        given = x.clone().requires_grad_()
        for parameter in block.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with use_kernels(IN_C):
            out = block(given, rotation)
            out.backward(d_out)
        gradients = [p.grad for p in (given, *block.parameters()) if p.grad is not None]
        return [out.detach(), *gradients]

    alone = results(1)
    for threads in (2, 3, 7):
        for found, expected in zip(results(threads), alone, strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["gpt2:dropout=0.3", "llama:dropout=0.2:mlp=none"])
def test_dropout_draws_as_in_pytorch(name: str) -> None:
    model = a_model(name).float()
    windows = some_windows(model)
    found = loss_and_gradients(model, windows)
    assert_near(found, loss_and_gradients(model, windows, Kernels()), 1e-4)
    other = loss_and_gradients(model, windows, seed=7)
    assert (other["loss"] - found["loss"]).abs() > 1e-3


def test_gradients_accumulate() -> None:
    model = a_model("gpt2").float()
    windows = some_windows(model)
    once = loss_and_gradients(model, windows)
    with use_kernels(IN_C):
        model.loss(*windows).backward()
    twice = {name: p.grad / 2 for name, p in model.named_parameters() if p.grad is not None}
    assert_near(twice, {name: once[name] for name in twice}, 1e-5)


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_changed_from_outside_is_trained_by_its_modules(
    change: str, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, other = CHANGES[change]
    monkeypatch.setattr(f"attnlm.model.{place}", other)
    made, losses = passes(monkeypatch), []
    for matmul in ("native", "blas"):
        given: Settings = {"model": "transformer", "steps": 4, "seed": 1, "threads": 2}
        config = resolve({**given, "compile": "parts", "matmul": matmul, **SIZES})
        stepper = Stepper(initial_state(config, dataset.vocab_size, CPU), config, dataset)
        made.clear()
        losses.append([stepper.step().item() for _ in range(4)])
        assert not made
    assert losses[0] == losses[1]


def test_hooks_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks on each module of a block are called; the block itself always is."""
    made, plain = passes(monkeypatch), a_model("transformer").float()
    names = [name for name, _ in plain.blocks[0].named_modules() if name]
    for name in names:
        model, called = copy.deepcopy(plain), list[object]()
        module = model.blocks[0].get_submodule(name)
        module.register_forward_hook(lambda *given, called=called: called.append(given))
        block = model.blocks[0]
        assert isinstance(block, Block) and make_native_block(block) is None, name
        loss_and_gradients(model, some_windows(model))
        assert called, name
    assert len(made) == 2 * len(names) * (len(plain.blocks) - 1)


def test_a_block_that_is_recomputed_has_the_same_gradients() -> None:
    model = a_model("transformer:dropout=0.3").float()
    windows = some_windows(model)
    kept = loss_and_gradients(model, windows)
    model.recompute = True
    again = loss_and_gradients(model, windows)
    for name, found in again.items():
        assert torch.equal(found, kept[name]), name


def test_other_passes_are_computed_by_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen weights, evaluation, and blocks without residuals use PyTorch."""
    made, model = passes(monkeypatch), a_model("transformer").float()
    windows = some_windows(model)
    with use_kernels(IN_C):
        model.loss(*windows).backward()
        with torch.no_grad():
            model.loss(*windows)
    frozen = a_model("transformer").float()
    for name, parameter in frozen.named_parameters():
        parameter.requires_grad_("query" not in name)
    loss_and_gradients(frozen, windows)
    loss_and_gradients(a_model("transformer:residual=false:mlp=relu2").float(), windows)
    assert not made


@pytest.mark.parametrize(
    ("changed", "compiled", "matmul", "attention"),
    [
        ({"compile": "off"}, "off", "blas", "torch"),
        ({"attention_kernel": "torch"}, "parts", "blas", "torch"),
        ({"matmul": "blas"}, "parts", "blas", "torch"),
        ({"steps": 3}, "parts", "native", "native"),
    ],
)
def test_a_resumed_run_chooses_the_kernels_that_fit_a_changed_one(
    changed: dict[str, Any],
    compiled: str,
    matmul: str,
    attention: str,
    dataset: Dataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("attnlm.training.kernel_choice.faster_matmul", lambda: "blas")
    given: dict[str, Any] = {"model": "transformer", "device": "cpu", "batch_size": 2, **SIZES}
    run = train(dataset, checkpoint_dir=tmp_path, steps=2, seed=1, **given)
    assert run.config.training.matmul == "native"
    run = train(resume=run, data_dir=dataset.path.parent, **{"steps": 3, **changed})
    training = run.config.training
    found = training.compile, training.matmul, training.attention_kernel
    assert found == (compiled, matmul, attention)


@pytest.mark.parametrize(
    "settings",
    [
        {"model": "bigram"},
        {"model": "multi-head"},
        {"model": "transformer", "compile": "off"},
        {"model": "transformer", "attention_kernel": "torch"},
    ],
)
def test_unsupported_blocks_in_c_are_refused(settings: Settings, dataset: Dataset) -> None:
    config = resolve({"steps": 2, "matmul": "native", **settings})
    with pytest.raises(UsageError, match="native"):
        autotune(config, CPU, dataset)
