"""What an NVIDIA GPU computes, held to a CPU: `make cuda`. Skipped where there is none."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attnlm
from attnlm.compute.device import Device
from attnlm.data.dataset import Dataset
from attnlm.generation.decoders import fastest_decoding
from attnlm.model.architecture import MODELS
from attnlm.model.ops.loss import LOGITS_AT_ONCE
from attnlm.runs.run import Run
from attnlm.training import cuda_graph
from tests.models import FRUITS, VARIANTS, gradients, places, prepared, small_model, some_ids
from tests.own_code import MODELS as OWN_MODELS
from tests.own_code import PARTS
from tests.tolerances import assert_near

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU, or ATTNLM_TEST_CUDA is not set"
)
FLOAT32 = Device("cuda", "float32", "tests")
BFLOAT16 = Device("cuda", "bfloat16", "tests")
SIZES: dict[str, Any] = {"embed_dim": 24, "heads": 4, "block_size": 12, "batch_size": 4}
WITHOUT: dict[str, tuple[str, ...]] = {
    "bigram": ("embed_dim", "heads"),
    "average": ("heads",),
    "dot-product": ("heads",),
    "single-head": ("heads",),
}
"""Sizes that a preset does not have."""


@pytest.fixture(autouse=True)
def full_precision() -> None:
    torch.set_float32_matmul_precision("highest")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return prepared(tmp_path_factory.mktemp("data"), FRUITS)


def trained(data: Dataset, **settings: Any) -> Run:
    """Train a small model for a few steps, by default on the GPU."""
    options = {"device": "cuda", "dtype": "float32", "steps": 6, "seed": 3, "eval_every": 3}
    without = WITHOUT.get(settings.get("model", "transformer"), ())
    sizes = {name: size for name, size in SIZES.items() if name not in without}
    folder = data.path.parent.parent
    return attnlm.train(data, **{**sizes, **options, **places(folder), **settings})


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


@pytest.mark.parametrize("variant", ["gpt2", "transformer:positions=learned:head_bias=true"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_in_pieces_equal_logits_computed_together(
    dtype: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, targets = (ids.cuda() for ids in some_ids(2, 3, 13))
    model = small_model(variant).float().cuda()
    results = []
    for at_once in (2**26, 40):
        monkeypatch.setitem(LOGITS_AT_ONCE, "cuda", at_once)
        with Device("cuda", dtype, "tests").autocast():
            loss = model.loss(inputs, targets)
        results.append({"loss": loss.detach(), **gradients(model, loss)})
    whole, pieces = ({k: v.cpu() for k, v in result.items()} for result in results)
    assert_near(pieces, whole, 1e-5 if dtype == "float32" else 0.03)


@pytest.mark.parametrize("variant", VARIANTS)
def test_decoding_with_a_cache_gives_the_cpus_logits(variant: str) -> None:
    model, ids_BT = small_model(variant), some_ids(3, 11).numpy()
    cpu = fastest_decoding(model, Device("cpu", "float64", "tests")).new_decoder(3)
    expected = [cpu.logits(ids_BT[:, :end], known) for end, known in ((5, 0), (6, 5), (9, 6))]
    gpu = fastest_decoding(model.float().cuda(), FLOAT32).new_decoder(3)
    found = [gpu.logits(ids_BT[:, :end], known) for end, known in ((5, 0), (6, 5), (9, 6))]
    for one, other in zip(found, expected, strict=True):
        assert_near(one, np.asarray(other), 1e-4)


# --- Training -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_run_has_the_losses_of_the_cpu(name: str, data: Dataset) -> None:
    runs = [trained(data, model=name, device=device) for device in ("cpu", "cuda")]
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), rel=1e-3)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": "bfloat16"},
        {"dtype": "tf32"},
        {"dropout": 0.2},
        {"recompute": True},
        {"optimizer": "adamw", "gradient_clip": 1.0},
        {"micro_batch_size": 1},
        {"model": "bigram"},
        {"model": "multi-head"},
        {"compile": "on"},
        {"compile": "on", "dtype": "bfloat16", "dropout": 0.2},
    ],
    ids=str,
)
def test_a_resumed_run_repeats_the_uninterrupted_one(
    settings: dict[str, Any], data: Dataset, tmp_path: Path
) -> None:
    settings = {"model": "transformer", **settings, "steps": 9}
    whole = trained(data, **settings)

    def stop_once(steps: int, loss: torch.Tensor) -> None:
        if steps == 5:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        trained(data, **settings, name="half", checkpoint_dir=tmp_path, on_step=stop_once)
    resumed = attnlm.train(resume=tmp_path / "half", data_dir=data.path.parent)
    assert losses(resumed) == pytest.approx(losses(whole), rel=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "muon"},
        {"optimizer": "adamw", "gradient_clip": 1.0, "dropout": 0.2},
        {"dtype": "bfloat16", "micro_batch_size": 1, "dropout": 0.2},
        {"compile": "on"},
        {"model": "bigram"},
    ],
    ids=str,
)
def test_replayed_steps_are_those_launched_one_by_one(
    settings: dict[str, Any], data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"model": "transformer", "steps": 12, "eval_every": 4, **settings}
    replayed = trained(data, **settings)
    monkeypatch.setattr(cuda_graph, "_WARM_UP", 1000)
    assert losses(replayed) == pytest.approx(losses(trained(data, **settings)), rel=1e-5)


def test_steps_do_not_wait_for_the_gpu(data: Dataset) -> None:
    def forbid_waiting(steps: int, loss: torch.Tensor) -> None:
        torch.cuda.set_sync_debug_mode("error" if 6 <= steps < 9 else "default")

    try:
        trained(data, model="transformer", steps=12, eval_every=12, on_step=forbid_waiting)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_two_runs_with_one_seed_have_the_same_losses(data: Dataset) -> None:
    one, other = (trained(data, model="gpt2", dropout=0.1) for _ in range(2))
    assert losses(one) == pytest.approx(losses(other), rel=1e-5)


def test_a_run_moves_between_devices(data: Dataset) -> None:
    run = trained(data, model="transformer", device="cpu")
    moved = attnlm.train(resume=run, steps=9, device="cuda", data_dir=data.path.parent)
    back = attnlm.train(resume=moved, steps=12, device="cpu", data_dir=data.path.parent)
    assert [evaluation.step for evaluation in back.evaluations()] == [0, 3, 6, 9, 12]


def test_examples_with_answers_are_trained(tmp_path: Path) -> None:
    data = attnlm.prepare("reverse", examples=200, data_dir=tmp_path / "data")
    runs = [
        attnlm.train(
            data,
            model="transformer",
            **{**SIZES, "block_size": 24},
            steps=6,
            eval_every=3,
            seed=1,
            device=device,
            dtype="float32",
            checkpoint_dir=tmp_path,
        )
        for device in ("cpu", "cuda")
    ]
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), rel=1e-3)
    evaluations = [attnlm.evaluate(run, device="cuda", data_dir=tmp_path / "data") for run in runs]
    assert evaluations[0].accuracy == evaluations[1].accuracy


@pytest.mark.parametrize(
    "settings",
    [
        {"attention": "parts.py:Head", "heads": 4},
        {"attention": "parts.py:Fused"},
        {"attention": "parts.py:Convolution"},
        {"mlp": "parts.py:Gate"},
        {"loss": "parts.py:soft"},
        {"scores": "parts.py:ALiBi", "heads": 4, "compile": "on"},
        {"model": "models.py:Logits"},
        {"scores": "parts.py:ALiBi", "heads": 4},
    ],
    ids=str,
)
def test_own_code_trains(
    settings: dict[str, Any], data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "models.py").write_text(OWN_MODELS)
    settings = {k: f"{tmp_path}/{v}" if ":" in str(v) else v for k, v in settings.items()}
    sizes: dict[str, Any] = {"block_size": 12, "batch_size": 4}
    if "model" not in settings:
        sizes["embed_dim"] = 24
    run = attnlm.train(
        data,
        **{"model": "transformer", **settings},
        **sizes,
        steps=6,
        eval_every=3,
        seed=1,
        device="cuda",
        **places(data.path.parent.parent),
    )
    assert losses(run)[-1] < losses(run)[0]
    assert "".join(attnlm.sample(run, tokens=20, seed=1, device="cuda"))


# --- What uses a trained model --------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(data: Dataset) -> Run:
    return trained(data, model="gpt2", layers=2, steps=60, eval_every=20)


def test_both_devices_evaluate_a_run_alike(run: Run, data: Dataset) -> None:
    on = [attnlm.evaluate(run, device=d, data_dir=data.path.parent).loss for d in ("cpu", "cuda")]
    assert on[1] == pytest.approx(on[0], rel=1e-4)


def test_both_devices_sample_the_same_text(run: Run) -> None:
    texts = [
        attnlm.samples(run, num_samples=3, tokens=40, prompt="1 ", temperature=0, device=d)
        for d in ("cpu", "cuda")
    ]
    assert texts[0] == texts[1]


def test_both_devices_score_heads_alike(run: Run, data: Dataset) -> None:
    one, other = (attnlm.heads(run, device=d, data_dir=data.path.parent) for d in ("cpu", "cuda"))
    for mine, theirs in zip(one.heads, other.heads, strict=True):
        assert mine.scores == pytest.approx(theirs.scores, abs=1e-3)


def test_a_model_is_read_on_the_gpu(run: Run) -> None:
    model, device = attnlm.load_model(run, device="cuda")
    ids = torch.tensor([run.tokenizer.encode("1 apples")], device=device.torch)
    assert model(ids).device.type == "cuda"


# --- Processes, memory and choices ----------------------------------------------------------------


def test_torchrun_trains_one_process(data: Dataset, tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"),
        *("-m", "attnlm", "train", str(data.path), "--model", "gpt2", "--layers", "2"),
        *("--embed-dim", "24", "--heads", "4", "--block-size", "12", "--batch-size", "4"),
        *("--steps", "6", "--device", "cuda", "--checkpoint-dir", str(tmp_path)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]


def test_more_processes_than_gpus_are_refused(data: Dataset, tmp_path: Path) -> None:
    count = torch.cuda.device_count() + 1
    command = [
        *(sys.executable, "-m", "attnlm", "train", str(data.path), "--model", "gpt2"),
        *("--processes", str(count), "--batch-size", str(4 * count), "--device", "cuda"),
        *("--steps", "2", "--checkpoint-dir", str(tmp_path)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert "cannot share" in done.stderr and "Traceback" not in done.stderr


def test_the_micro_batch_is_halved_until_the_first_step_fits(data: Dataset) -> None:
    """A gigabyte holds a quarter of the batch's activations."""
    torch.cuda.empty_cache()
    allowed = torch.cuda.memory_reserved() + 2**30
    torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.mem_get_info()[1])
    sizes = {"layers": 4, "embed_dim": 256, "heads": 4, "block_size": 512, "batch_size": 64}
    try:
        run = trained(data, model="gpt2", **sizes)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert (run.config.training.micro_batch_size or 64) < 64
