"""Training: steps per second for the same work, time to the same loss, whole processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

import attnlm as library
from attnlm.compute.device import choose_device
from attnlm.config.recipes import load_recipe
from attnlm.config.settings import resolve
from attnlm.data.dataset import Dataset
from attnlm.training.state import initial_state
from attnlm.training.step import Stepper
from attnlm.training.validation_loss import validation_loss
from attnlm.workflows.autotune import autotune
from attnlm.workflows.speed_check import peak_matmul_speed
from benchmarks import plain
from benchmarks.table import Row, attnlm, in_turn, seconds_of


def steps(dataset: Dataset, text: Path) -> list[Row]:
    """Compare training of reference system R2 with the plain loop, on the same batches."""
    rows = []
    peak = peak_matmul_speed(os.cpu_count() or 1)
    for heads, recipe in ((4, "r2-multi-head"), (1, "r2-single-head")):
        stepper = stepper_of(dataset, recipe)
        threads = torch.get_num_threads()

        def ours(stepper: Stepper = stepper, threads: int = threads) -> float:
            torch.set_num_threads(threads)
            return speed(stepper, 2000)

        def rival(heads: int = heads) -> float:
            torch.set_num_threads(os.cpu_count() or 1)
            data, _, vocab_size = plain.encode(text.read_text(encoding="utf-8"))
            model = plain.PlainModel(vocab_size, 32, heads, 32)
            plain.train(model, data, 20, batch_size=16)
            return plain.train(model, data, 500, batch_size=16)

        own, other, ratio = in_turn(ours, rival, rounds=5)
        share = own * _arithmetic(stepper) / peak
        rows.append(
            Row(
                f"R2, heads {heads}: steps/s",
                f"{own:,.0f} ({threads} thread{'s' * (threads > 1)}, {share:.0%} of peak)",
                f"plain loop {other:,.0f}",
                f"{ratio:.1f}",
            )
        )
    return rows


def process(dataset: Dataset, text: Path) -> list[Row]:
    """Recipe r2-multi-head as a whole process, its eleven evaluations included."""
    command = [*_train(dataset, "r2-multi-head"), "--seed", "1"]
    script = [sys.executable, "-m", "benchmarks.plain", str(text), "--heads", "4"]
    rounds = int(os.environ.get("ROUNDS", 3))
    own, other, ratio = in_turn(
        lambda: 1 / seconds_of(command), lambda: 1 / seconds_of(script), rounds
    )
    return [
        Row(
            "R2, heads 4: 10,000 steps, process",
            f"{1 / own:.1f} s",
            f"{1 / other:.1f} s",
            f"{ratio:.1f}",
        )
    ]


def quality(dataset: Dataset, text: Path) -> list[Row]:
    """Compare the time to R2's loss: recipe multi-head-fast against 10,000 plain steps."""
    data, val, vocab_size = plain.encode(text.read_text(encoding="utf-8"))
    torch.manual_seed(1)
    torch.set_num_threads(os.cpu_count() or 1)
    model = plain.PlainModel(vocab_size, 32, 4, 32)
    began = time.perf_counter()
    plain.train(model, data, 10_000, batch_size=16)
    theirs = time.perf_counter() - began
    reached = plain.validation_loss(model, val)
    seconds, losses = [], []
    for seed in range(1, 6):
        stepper = stepper_of(dataset, "multi-head-fast", seed=seed)
        count = stepper.training.steps or 0
        began = time.perf_counter()
        speed(stepper, count)
        seconds.append(time.perf_counter() - began)
        losses.append(_loss(stepper, dataset))
    return [
        Row(
            "R2's four heads to its loss: loop",
            f"{max(seconds):.2f} s, {min(losses):.3f}–{max(losses):.3f} (slowest, 5 seeds)",
            f"plain loop {theirs:.1f} s, {reached:.3f}",
            f"{theirs / max(seconds):.1f}",
        )
    ]


def shakespeare(dataset: Dataset, text: Path) -> list[Row]:
    """Compare recipe shakespeare-fast with nanoGPT's recipe for CPUs, as whole processes."""
    runs = []
    for seed in range(6):
        command = [*_train(dataset, "shakespeare-fast"), "--seed", str(seed), "--json"]
        began = time.perf_counter()
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        if seed > 0:  # the first run of a machine compiles C code and tries its threads
            runs.append((time.perf_counter() - began, json.loads(done.stdout)["val_loss"]))
    slowest = max(seconds for seconds, _ in runs)
    losses = [loss for _, loss in runs]
    ours = f"{slowest:.1f} s, {min(losses):.3f}–{max(losses):.3f} (slowest, 5 seeds)"
    folder = os.environ.get("NANOGPT")
    if folder is None:
        return [Row("shakespeare-fast: process", ours, "nanoGPT: NANOGPT is not set", "–")]
    theirs = _nanogpt(Path(folder), text)
    return [
        Row(
            "shakespeare-fast: process",
            ours,
            f"nanoGPT's CPU recipe {theirs:.1f} s",
            f"{theirs / slowest:.1f}",
        )
    ]


def _arithmetic(stepper: Stepper) -> float:
    """Return the FLOPs of matmuls in a step of the reference implementation, both passes."""
    model, batches = stepper.state.model, stepper.batches
    in_products = sum(p.numel() for name, p in model.named_parameters() if "embedding" not in name)
    attention = model.spec.costs(model.vocab_size).mixing_flops
    tokens = batches.batch_size * batches.block_size
    return 3.0 * tokens * (2 * in_products + attention)


def _nanogpt(folder: Path, text: Path) -> float:
    """Seconds of its training on 2,000 batches, with the flags of its README for CPUs."""
    target = folder / "data" / "shakespeare_char"
    (target / "input.txt").write_bytes(text.read_bytes())
    prepare = [sys.executable, "prepare.py"]
    subprocess.run(prepare, cwd=target, check=True, stdout=subprocess.DEVNULL)
    flags = (
        "--device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64 "
        "--batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 "
        "--lr_decay_iters=2000 --dropout=0.0"
    )
    script = [sys.executable, "train.py", "config/train_shakespeare_char.py", *flags.split()]
    return seconds_of(script, cwd=folder)


def _train(dataset: Dataset, recipe: str) -> list[str]:
    folders = ["--checkpoint-dir", str(dataset.path.parent / "checkpoints")]
    return attnlm("train", str(dataset.path), "--recipe", recipe, *folders)


def stepper_of(dataset: Dataset, recipe: str, seed: int = 1) -> Stepper:
    """A recipe's training on a data set, before its first step."""
    config = resolve({"seed": seed}, load_recipe(recipe))
    device = choose_device("cpu")
    torch.set_num_threads(os.cpu_count() or 1)
    config = autotune(config, device, dataset)
    state = initial_state(config, dataset.vocab_size, device)
    return Stepper(state, config, dataset)


def speed(stepper: Stepper, count: int) -> float:
    """Return the steps per second over `count` steps."""
    began = time.perf_counter()
    for _ in range(count):
        stepper.step()
    return count / (time.perf_counter() - began)


def _loss(stepper: Stepper, dataset: Dataset) -> float:
    return validation_loss(
        stepper.state.model, dataset.val, stepper.state.device, bytes_per_token=1.0
    ).loss


def prepared(text: Path, folder: Path) -> Dataset:
    """Tiny Shakespeare's characters as a data set."""
    return library.prepare(text, data_dir=folder)
