"""A block in C computes what Block computes with PyTorch, forward and backward."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attnlm
from attnlm.base.errors import AttnlmError
from attnlm.base.setting_fields import Settings
from attnlm.compute.device import Device
from attnlm.compute.native import instruction_sets, load
from attnlm.compute.threads import threads_of_torch
from attnlm.config.settings import resolve
from attnlm.config.variants import variant
from attnlm.data.dataset import Dataset
from attnlm.model import layers, native_block
from attnlm.model.language_model import Transformer
from attnlm.model.layers import drop_by
from attnlm.model.native_block import with_native_blocks
from attnlm.training import forms
from attnlm.training.forms import choose_form
from attnlm.training.state import initial_state
from attnlm.training.step import Stepper
from attnlm.workflows import autotune as autotuning
from attnlm.workflows.autotune import autotune
from tests.kit import quick_run
from tests.models import CHANGES, SIZES, V, needs_kernels, small_model
from tests.tolerances import assert_near, assert_rounded

pytestmark = needs_kernels
CPU = Device("cpu", "float32", "tests")
BEST = instruction_sets()[-1]
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
    "transformer:heads=2:head_size=34:block_size=67",
    "gpt2:heads=1:head_size=129:block_size=202",
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
    model: Transformer, kernels: str = "", *, seed: int = 0, passes: int = 1
) -> dict[str, Tensor]:
    """The loss, and the sum of each parameter's gradients, by the kernels of an instruction set or
    by the modules; dropout draws for each window."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    library = load(kernels) if kernels else None
    form = with_native_blocks(model, library) if library is not None else model
    for _ in range(passes):
        drop_by(model, [torch.Generator().manual_seed(seed + window) for window in range(3)])
        loss = form.loss(*some_windows(model))
        loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


@pytest.fixture
def in_c(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Receives each pass of a block that block.c computes, forward or backward."""
    passes: list[Any] = []
    compute = native_block._run_pass

    def noted(*given: Any) -> None:
        passes.append(given)
        compute(*given)

    monkeypatch.setattr(native_block, "_run_pass", noted)
    return passes


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("instructions", instruction_sets())
def test_loss_and_gradients_equal_pytorch(name: str, instructions: str, in_c: list[Any]) -> None:
    exact = a_model(name)
    found = loss_and_gradients(copy.deepcopy(exact).float(), instructions)
    assert len(in_c) == 2 * len(exact.blocks)
    assert_rounded(found, loss_and_gradients, exact)


def test_sharp_attention_equals_pytorch() -> None:
    exact = a_model("gpt2:heads=2:head_size=33:block_size=66")
    with torch.no_grad():
        for block in exact.blocks:
            block.get_parameter("attention.query.weight").mul_(30)
    assert_rounded(
        loss_and_gradients(copy.deepcopy(exact).float(), BEST), loss_and_gradients, exact
    )


def first_block(name: str) -> tuple[Transformer, Callable[[Tensor], Tensor]]:
    """A model, and its first block in C as a function of its input."""
    model, library = a_model(name).float(), load(BEST)
    assert library is not None
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    block = with_native_blocks(model, library).blocks[0]
    rotation = (model.cosines, model.sines) if model.architecture.positions == "rotary" else None
    if rotation is not None:
        rotation = (rotation[0].float(), rotation[1].float())
    return model, lambda x: block(x, rotation)


def test_the_number_of_threads_changes_no_bit() -> None:
    model, block = first_block("transformer:kv_heads=2:embed_dim=96:block_size=150")
    x = torch.randn(2, 150, 96, generator=torch.Generator().manual_seed(3), requires_grad=True)
    weights = list(model.blocks[0].parameters())

    def results(threads: int) -> list[Tensor]:
        for tensor in (x, *weights):
            tensor.grad = torch.zeros_like(tensor)
        with threads_of_torch(threads):
            out = block(x)
            out.square().sum().backward()
        return [out, *(tensor.grad for tensor in (x, *weights) if tensor.grad is not None)]

    alone = results(1)
    for threads in (2, 3, 7):
        assert all(map(torch.equal, results(threads), alone))


def test_nan_propagates_to_later_tokens_only() -> None:
    _, block = first_block("gpt2:block_size=130")
    x = torch.randn(1, 130, 22, requires_grad=True)
    with torch.no_grad():
        x[0, 66, 1] = torch.nan
    out = block(x)
    assert out[0, :64].isfinite().all() and out[0, 66:].isnan().all()


@pytest.mark.parametrize("name", ["gpt2:dropout=0.3", "llama:dropout=0.2:mlp=none"])
def test_dropout_draws_as_in_pytorch(name: str) -> None:
    model = a_model(name).float()
    found = loss_and_gradients(model, BEST)
    assert_near(found, loss_and_gradients(model), within=1e-4)
    assert (loss_and_gradients(model, BEST, seed=7)["loss"] - found["loss"]).abs() > 1e-3


def test_gradients_accumulate() -> None:
    model = a_model("gpt2").float()
    once = loss_and_gradients(model, BEST)
    twice = loss_and_gradients(model, BEST, passes=2)
    assert_near({name: twice[name] / 2 for name in once if name != "loss"},
                {name: once[name] for name in once if name != "loss"})  # fmt: skip


# --- The choice of a form -------------------------------------------------------------------------


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_changed_from_outside_is_trained_by_its_modules(
    change: str, dataset: Dataset, in_c: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """test_language_model.py has all ways to change a model."""
    place, other = CHANGES[change]
    monkeypatch.setattr(f"attnlm.model.{place}", other)
    given: Settings = {"model": "transformer", "steps": 4, **SIZES}
    losses = []
    for form in ("native", "modules"):
        config = resolve({**given, "seed": 1, "threads": 1, "compile": form})
        stepper = Stepper(initial_state(config, dataset.vocab_size, CPU), config, dataset)
        losses.append([stepper.step().item() for _ in range(2)])
    assert losses[0] == losses[1] and not in_c


def test_a_hook_on_any_module_is_called(in_c: list[Any]) -> None:
    config = resolve({"model": "transformer", **SIZES, "compile": "native", "seed": 1})
    plain = a_model("transformer").float()
    for name in [name for name, _ in plain.named_modules() if name and name != "blocks"]:
        model, called = copy.deepcopy(plain), list[object]()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        hooked = model.get_submodule(name)
        hooked.register_forward_hook(lambda *given, called=called: called.append(given))
        choose_form(model, config, CPU, 3, ())(*some_windows(model))
        assert called or name == "head", name  # whose matmul is a part of the loss
    assert not in_c


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("transformer", {}, "native"),
        ("transformer", {"embed_dim": 384}, "native"),
        ("gpt2:heads=4:kv_heads=2:dropout=0.1", {}, "native"),
        ("multi-head", {"block_size": 13}, "native"),
        ("multi-head:dropout=0.1", {}, "modules"),
        ("transformer:residual=false", {}, "modules"),
        ("transformer:attention=uniform:positions=learned", {}, "modules"),
        ("bigram", {}, "modules"),
        ("transformer", {"compile": "modules"}, "modules"),
        ("transformer", {"dtype": "bfloat16"}, "modules"),
    ],
)
def test_the_form_in_c_is_chosen_where_there_is_one(
    name: str,
    settings: dict[str, Any],
    expected: str,
    dataset: Dataset,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = resolve({**variant(name), **settings})
    device = Device("cpu", settings.get("dtype", "float32"), "tests")
    monkeypatch.setattr(forms, "faster_linear", lambda: None)
    assert autotune(config, device, dataset).training.compile == expected
    monkeypatch.setattr(forms, "faster_linear", lambda: layers.linear)  # of oneDNN
    by_blocks = expected == "native" and not name.startswith("multi-head")
    found = autotune(config, device, dataset).training.compile
    assert found == ("modules" if by_blocks else expected)


def test_a_form_that_is_missing_when_a_run_is_resumed_is_said(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {**SIZES, "layers": 1, "steps": 2, "device": "cpu", "compile": "native"}
    run = quick_run(dataset, "transformer", checkpoint_dir=tmp_path, **sizes)
    told: list[object] = []
    monkeypatch.setattr(autotuning, "native_library", lambda: None)
    resume: Any = functools.partial(attnlm.train, resume=run, data_dir=dataset.path.parent)
    with pytest.raises(AttnlmError, match="needs attnlm's kernels in C, which are missing"):
        resume(steps=3, compile="native")
    run = resume(steps=3, on_event=told.append)
    assert "missing or switched off: the modules compute from now on" in str(told)
    assert run.config.training.compile == "modules"
    monkeypatch.undo()
    assert resume(steps=4, compile="native").config.training.compile == "native"
