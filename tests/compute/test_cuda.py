"""What an NVIDIA GPU computes, held to a CPU: `make cuda`. Skipped where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attnlm
from attnlm.base.process import Interrupted
from attnlm.compute.device import Device
from attnlm.data.dataset import Dataset
from attnlm.generation.module_decoder import decoders_of
from attnlm.model.architecture import MODELS, PRESETS
from attnlm.runs.run import Run
from attnlm.training import cuda_graph
from tests.kit import quick_run
from tests.models import VARIANTS, gradients, small_model, some_ids
from tests.tolerances import assert_near
from tests.training.conftest import signal_after_step
from tests.training.test_training import BLOCKS, RESUMED

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU, or ATTNLM_TEST_CUDA is not set"
)
FLOAT32 = Device("cuda", "float32", "tests")
BFLOAT16 = Device("cuda", "bfloat16", "tests")
SIZES: dict[str, Any] = {"embed_dim": 24, "heads": 4}


@pytest.fixture(autouse=True)
def full_precision() -> None:
    torch.set_float32_matmul_precision("highest")


def trained(data: Dataset, model: str = "transformer", **settings: Any) -> Run:
    """Train a small model for a few steps, by default on the GPU."""
    options = {"device": "cuda", "dtype": "float32", "steps": 6, "eval_every": 3, "seed": 3}
    sizes = {name: size for name, size in SIZES.items() if name in PRESETS[model].settings}
    return quick_run(data, model, **{**sizes, **options, **settings})


def losses(run: Run) -> list[float]:
    return [evaluation.val_loss for evaluation in run.evaluations()]


# --- The model ------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradients_are_the_cpus(variant: str) -> None:
    model, (inputs, targets) = small_model(variant), some_ids(2, 3, 13)
    model.train()
    for dropout in (m for m in model.modules() if hasattr(m, "p")):
        dropout.p = 0.0  # type: ignore[assignment]
    loss = model.loss(inputs, targets)
    expected = {"loss": loss.detach(), **gradients(model, loss)}
    model.float().cuda()
    loss = model.loss(inputs.cuda(), targets.cuda())
    found = {"loss": loss.detach(), **gradients(model, loss)}
    assert_near({name: x.cpu() for name, x in found.items()}, expected, 3e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16_stays_near_float32(variant: str) -> None:
    model, (inputs, targets) = small_model(variant), some_ids(2, 3, 13)
    expected = model.loss(inputs, targets).detach()
    model.float().cuda()
    with BFLOAT16.autocast():
        loss = model.loss(inputs.cuda(), targets.cuda())
    assert_near(loss.detach().cpu(), expected, 0.05)
    for name, gradient in gradients(model, loss).items():
        assert gradient.dtype == torch.float32 and gradient.isfinite().all(), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_decoding_with_a_cache_gives_the_cpus_logits(variant: str) -> None:
    model, ids_BT = small_model(variant), some_ids(3, 11).numpy()
    cpu = decoders_of(model, Device("cpu", "float64", "tests"))(3)
    expected = [cpu.logits(ids_BT[:, :end], known) for end, known in ((5, 0), (6, 5), (9, 6))]
    gpu = decoders_of(model.float().cuda(), FLOAT32)(3)
    found = [gpu.logits(ids_BT[:, :end], known) for end, known in ((5, 0), (6, 5), (9, 6))]
    for one, other in zip(found, expected, strict=True):
        assert_near(one, np.asarray(other), 1e-4)


# --- Training -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_run_has_the_losses_of_the_cpu(name: str, dataset: Dataset) -> None:
    runs = [trained(dataset, name, device=device) for device in ("cpu", "cuda")]
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), rel=1e-3)


ON_A_GPU: dict[str, tuple[str, dict[str, Any]]] = {
    "blocks": (BLOCKS, {}),
    "blocks in bfloat16": (BLOCKS, {"dtype": "bfloat16"}),
    "blocks in tf32": (BLOCKS, {"dtype": "tf32"}),
    "clipped gradients": (BLOCKS, {"optimizer": "adamw", "gradient_clip": 1.0}),
    "micro-batches": (BLOCKS, {"micro_batch_size": 1}),
    "compiled": (BLOCKS, {"compile": "torch"}),
    "compiled in bfloat16": (BLOCKS, {"compile": "torch", "dtype": "bfloat16"}),
    "own part that fuses": ("transformer:attention=CODE/parts.py:Fused", {}),
    "own convolution": ("transformer:attention=CODE/parts.py:Convolution", {}),
    "own scores": ("transformer:scores=CODE/parts.py:ALiBi", {}),
    "own scores, compiled": ("transformer:scores=CODE/parts.py:ALiBi", {"compile": "torch"}),
}


@pytest.mark.parametrize("case", [*RESUMED, *ON_A_GPU])
def test_a_resumed_run_repeats_the_uninterrupted_one(
    case: str, dataset: Dataset, code: Path, tmp_path: Path
) -> None:
    name, settings = {**RESUMED, **ON_A_GPU}[case]
    model = name.replace("CODE", str(code))
    about: dict[str, Any] = {"device": "cuda", "steps": 9, "checkpoint_dir": tmp_path, **settings}
    whole = quick_run(dataset, model, **about)
    with pytest.raises(Interrupted):
        quick_run(dataset, model, **about, name="half", **signal_after_step(5))
    resumed = attnlm.train(resume=tmp_path / "half")
    assert losses(resumed) == pytest.approx(losses(whole), rel=1e-5)
    assert "".join(attnlm.sample(resumed, tokens=20, seed=1, device="cuda"))


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "muon"},
        {"optimizer": "adamw", "gradient_clip": 1.0, "dropout": 0.2},
        {"dtype": "bfloat16", "micro_batch_size": 1, "dropout": 0.2},
        {"compile": "torch"},
        {"model": "bigram"},
    ],
    ids=str,
)
def test_replayed_steps_are_those_launched_one_by_one(
    settings: dict[str, Any], dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"model": "transformer", "steps": 12, "eval_every": 4, **settings}
    replayed = trained(dataset, **settings)
    monkeypatch.setattr(cuda_graph, "_WARM_UP", 1000)
    assert losses(replayed) == pytest.approx(losses(trained(dataset, **settings)), rel=1e-5)


def test_steps_do_not_wait_for_the_gpu(dataset: Dataset) -> None:
    def forbid_waiting(steps: int, loss: torch.Tensor) -> None:
        torch.cuda.set_sync_debug_mode("error" if 6 <= steps < 9 else "default")

    try:
        trained(dataset, model="transformer", steps=12, eval_every=12, on_step=forbid_waiting)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_run_moves_between_devices(dataset: Dataset) -> None:
    run = trained(dataset, model="transformer", device="cpu")
    moved = attnlm.train(resume=run, steps=9, device="cuda", data_dir=dataset.path.parent)
    back = attnlm.train(resume=moved, steps=12, device="cpu", data_dir=dataset.path.parent)
    assert [evaluation.step for evaluation in back.evaluations()] == [0, 3, 6, 9, 12]


def test_examples_with_answers_are_trained(tmp_path: Path) -> None:
    data = attnlm.prepare("reverse", examples=200, data_dir=tmp_path / "data")
    runs = [trained(data, block_size=24, device=device) for device in ("cpu", "cuda")]
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), rel=1e-3)
    evaluations = [attnlm.evaluate(run, device="cuda") for run in runs]
    assert evaluations[0].accuracy == evaluations[1].accuracy


# --- What uses a trained model --------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(dataset: Dataset) -> Run:
    return trained(dataset, model="gpt2", layers=2, steps=60, eval_every=20)


def test_both_devices_evaluate_sample_and_score_heads_alike(run: Run, dataset: Dataset) -> None:
    where: dict[str, Any] = {"data_dir": dataset.path.parent}
    expected = attnlm.evaluate(run, device="cpu", **where).loss
    assert attnlm.evaluate(run, device="cuda", **where).loss == pytest.approx(expected, rel=1e-4)
    how: dict[str, Any] = {"num_samples": 3, "tokens": 40, "prompt": "1 ", "temperature": 0}
    assert attnlm.samples(run, device="cuda", **how) == attnlm.samples(run, device="cpu", **how)
    one, other = (attnlm.heads(run, device=d, **where).heads for d in ("cpu", "cuda"))
    for mine, theirs in zip(one, other, strict=True):
        assert mine.scores == pytest.approx(theirs.scores, abs=1e-3)


# --- Processes and memory -----------------------------------------------------------------------


def test_torchrun_trains_one_process(dataset: Dataset, tmp_path: Path) -> None:
    torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "-m"
    sizes = ("--model=gpt2", "--layers=2", "--embed-dim=24", "--heads=4", "--block-size=12")
    words = ("train", dataset.path, *sizes, "--batch-size=4", "--steps=6", "--device=cuda")
    program = [sys.executable, *torchrun, "attnlm", *map(str, words)]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_micro_batch_is_halved_until_the_first_step_fits(dataset: Dataset) -> None:
    """A gigabyte holds a quarter of the batch's activations."""
    torch.cuda.empty_cache()
    allowed = torch.cuda.memory_reserved() + 2**30
    torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.mem_get_info()[1])
    sizes = {"layers": 4, "embed_dim": 256, "heads": 4, "block_size": 512, "batch_size": 64}
    try:
        run = trained(dataset, model="gpt2", **sizes)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert (run.config.training.micro_batch_size or 64) < 64
