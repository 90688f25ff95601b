"""A block in C computes what Block computes with PyTorch, forward and backward."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attnlm
from attnlm.base.setting_fields import Settings
from attnlm.compute.device import Device
from attnlm.compute.native import instruction_sets, load
from attnlm.compute.threads import threads_of_torch
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
from tests.kit import quick_run
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


def a_model(name: str) -> Transformer:
    model = small_model(name).train()
    assert isinstance(model, Transformer)
    return model


def some_windows(model: Transformer) -> tuple[Tensor, Tensor]:
    length = model.architecture.block_size - 2
    ids = torch.randint(V, (3, length + 1), generator=torch.Generator().manual_seed(2))
    return ids[:, :-1], ids[:, 1:]


def loss_and_gradients(
    model: Transformer, kernels: Kernels = IN_C, *, seed: int = 0, passes: int = 1
) -> dict[str, Tensor]:
    """The loss, and the sum of each parameter's gradients; dropout draws for each window."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    for _ in range(passes):
        generators = [torch.Generator().manual_seed(seed + window) for window in range(3)]
        with use_kernels(kernels), dropout_from(generators):
            loss = model.loss(*some_windows(model))
            loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


@pytest.fixture
def in_c(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Receives each pass of a block that block.c computes, forward or backward."""
    passes: list[Any] = []
    compute = native_block._run_kernel

    def noted(*given: Any) -> None:
        passes.append(given)
        compute(*given)

    monkeypatch.setattr(native_block, "_run_kernel", noted)
    return passes


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("instructions", instruction_sets())
def test_loss_and_gradients_equal_pytorch(
    name: str, instructions: str, in_c: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "native_library", lambda: load(instructions))
    exact = a_model(name)
    found = loss_and_gradients(copy.deepcopy(exact).float())
    assert len(in_c) == 2 * len(exact.blocks)
    assert_rounded(found, loss_and_gradients, exact, Kernels())


def test_the_number_of_threads_changes_no_bit() -> None:
    model = a_model("transformer:kv_heads=2:embed_dim=96:block_size=150").float()
    block, rotation = model.blocks[0], (model.cosines.float(), model.sines.float())
    x = torch.randn(2, 150, 96, generator=torch.Generator().manual_seed(3), requires_grad=True)

    def results(threads: int) -> list[Tensor]:
        for tensor in (x, *block.parameters()):
            tensor.grad = torch.zeros_like(tensor)
        with threads_of_torch(threads), use_kernels(IN_C):
            out = block(x, rotation)
            out.square().sum().backward()
        return [out, *(tensor.grad for tensor in (x, *block.parameters()))]

    alone = results(1)
    for threads in (2, 3, 7):
        assert all(map(torch.equal, results(threads), alone))


@pytest.mark.parametrize("name", ["gpt2:dropout=0.3", "llama:dropout=0.2:mlp=none"])
def test_dropout_draws_as_in_pytorch(name: str) -> None:
    model = a_model(name).float()
    found = loss_and_gradients(model)
    assert_near(found, loss_and_gradients(model, Kernels()), within=1e-4)
    assert (loss_and_gradients(model, seed=7)["loss"] - found["loss"]).abs() > 1e-3


def test_gradients_accumulate() -> None:
    model = a_model("gpt2").float()
    once = loss_and_gradients(model)
    twice = loss_and_gradients(model, passes=2)
    assert_near({name: twice[name] / 2 for name in once if name != "loss"},
                {name: once[name] for name in once if name != "loss"})  # fmt: skip


def test_a_block_that_is_recomputed_has_the_same_gradients() -> None:
    model = a_model("transformer:dropout=0.3").float()
    kept = loss_and_gradients(model)
    model.recompute = True
    again = loss_and_gradients(model)
    assert all(torch.equal(again[name], kept[name]) for name in kept)


def test_a_model_changed_from_outside_is_trained_by_its_modules(
    dataset: Dataset, in_c: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """test_language_model.py has all ways to change a model."""
    place, other = CHANGES["another forward"]
    monkeypatch.setattr(f"attnlm.model.{place}", other)
    given: Settings = {"model": "transformer", "steps": 4, "compile": "parts", **SIZES}
    losses = []
    for matmul in ("native", "blas"):
        config = resolve({**given, "seed": 1, "threads": 1, "matmul": matmul})
        stepper = Stepper(initial_state(config, dataset.vocab_size, CPU), config, dataset)
        losses.append([stepper.step().item() for _ in range(2)])
    assert losses[0] == losses[1] and not in_c


def test_hooks_on_each_module_of_a_block_are_called(in_c: list[Any]) -> None:
    plain = a_model("transformer").float()
    names = [name for name, _ in plain.blocks[0].named_modules() if name]
    for name in names:
        model, called = copy.deepcopy(plain), list[object]()
        block = model.blocks[0]
        hooked = block.get_submodule(name)
        hooked.register_forward_hook(lambda *given, called=called: called.append(given))
        assert isinstance(block, Block) and make_native_block(block) is None, name
        loss_and_gradients(model)
        assert called, name
    assert len(in_c) == 2 * len(names)  # the other block of each model


def test_evaluation_frozen_weights_and_blocks_without_residuals_use_pytorch(
    in_c: list[Any],
) -> None:
    model = a_model("transformer").float()
    with use_kernels(IN_C):
        with torch.no_grad():
            model.loss(*some_windows(model))
        model.loss(*some_windows(model)).backward()  # no weight has a gradient to add to
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("query" not in name)
    loss_and_gradients(model)
    loss_and_gradients(a_model("transformer:residual=false:mlp=relu2").float())
    assert not in_c


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"compile": "off"}, ("off", "blas", "torch")),
        ({"attention_kernel": "torch"}, ("parts", "blas", "torch")),
        ({"matmul": "blas"}, ("parts", "blas", "torch")),
        ({}, ("parts", "native", "native")),
    ],
    ids=lambda value: str(value),
)
def test_a_resumed_run_chooses_the_kernels_that_fit_a_changed_one(
    changed: dict[str, Any],
    expected: tuple[str, ...],
    dataset: Dataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("attnlm.training.kernel_choice.faster_matmul", lambda: "blas")
    sizes = {**SIZES, "layers": 1, "steps": 2, "device": "cpu"}
    run = quick_run(dataset, "transformer", checkpoint_dir=tmp_path, **sizes)
    assert run.config.training.matmul == "native"
    run = attnlm.train(resume=run, data_dir=dataset.path.parent, steps=3, **changed)
    training = run.config.training
    assert (training.compile, training.matmul, training.attention_kernel) == expected
