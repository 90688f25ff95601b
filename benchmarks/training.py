"""Training: tokens per second, their growth with the model's size, whole processes and losses."""

from __future__ import annotations

import contextlib
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from matplotlib.figure import Figure

import attnlm as library
from benchmarks import nanogpt
from benchmarks.measure import (
    SEED,
    Bench,
    Row,
    attnlm,
    compare,
    in_turns,
    measure,
    python,
    row,
    within,
)
from benchmarks.nanogpt import Shape
from benchmarks.sampling import speed_command

SPEED = ("tokens_per_second",)
SHAPES = (
    Shape(4, 128, 4, 64, 12),
    Shape(6, 384, 6, 256, 8),
    Shape(4, 256, 4, 2048, 1),
    Shape(4, 256, 4, 256, 4, 50257),
)
GPT2 = Shape(12, 768, 12, 1024, 12, 50257)
BASE = Shape(layers=4, width=128, heads=4, context=256, batch=4)
AXES: dict[str, tuple[int, ...]] = {
    "width": (64, 128, 256, 512),
    "layers": (1, 2, 4, 8),
    "context": (64, 256, 1024, 4096),
    "batch": (1, 4, 16, 64),
}
RUNGS = (
    *("bigram", "average", "dot-product", "single-head", "multi-head", "wide-head"),
    "transformer",
)
BUSY = {"multi-head": "model", "transformer": "model", "shakespeare-fast": "recipe"}
R2 = {4: "r2-multi-head", 1: "r2-single-head"}
"""The recipes of reference system R2, by their numbers of heads."""


def steps(bench: Bench) -> Iterator[Row]:
    """Tokens per second of `attnlm train`, beside nanoGPT's loop and the plain loop."""
    for shape in SHAPES:
        rival = nanogpt.command(bench.nanogpt, "train", shape, seconds=bench.seconds)
        for model in ("gpt2", "transformer"):
            ours = _steps_of(bench, model, shape)
            yield from compare(f"{model}, {shape}: nanoGPT", SPEED, ours, rival, bench.rounds)
    for heads, recipe in R2.items():
        ours = _timed(bench, bench.dataset, {"recipe": recipe, "seed": 1}, batch_tokens=16 * 32)
        plain = _plain(bench, heads, steps=500)
        yield from compare(f"R2, heads {heads}: plain loop", SPEED, ours, plain, bench.rounds)


def growth(bench: Bench) -> Iterator[Row]:
    """Microseconds per token for each size of each axis; draws build/growth.png beside nanoGPT."""
    figure = Figure(figsize=(10, 2.8), layout="constrained")
    panels = figure.subplots(1, len(AXES), sharey=True)
    for panel, (axis, sizes) in zip(panels, AXES.items(), strict=True):
        points: list[list[float]] = []
        for size in sizes:
            shape = BASE._replace(**{axis: size})
            if axis == "context":  # the tokens of a step stay as many
                shape = shape._replace(batch=max(1, BASE.batch * BASE.context // size))
            rival = nanogpt.command(bench.nanogpt, "train", shape, seconds=bench.seconds)
            if isinstance(rival, str):
                yield Row("growth", "", rival, "–")
                return
            sides = [_steps_of(bench, "gpt2", shape), rival]
            rounds = [
                [{"us_per_token": 1e6 / one["tokens_per_second"]} for one in both]
                for both in in_turns(sides, bench.rounds)
            ]
            ours, theirs = zip(*rounds, strict=True)
            yield row(f"gpt2, {shape}: nanoGPT", "us_per_token", ours, theirs)
            costs = [[one["us_per_token"] for one in side] for side in (ours, theirs)]
            points.append([size, *map(statistics.median, costs)])
        for column, (label, style) in enumerate((("attnlm", "o-"), ("nanoGPT", "s--")), 1):
            panel.plot([p[0] for p in points], [p[column] for p in points], style, label=label)
        panel.set(xscale="log", yscale="log", xlabel=axis, xticks=sizes, xticklabels=sizes)
        panel.minorticks_off()
    panels[0].set_ylabel("µs per token of a step")
    panels[0].legend(frameon=False)
    picture = Path("build", "growth.png")
    picture.parent.mkdir(exist_ok=True)
    figure.savefig(picture, dpi=110)


def busy(bench: Bench) -> Iterator[Row]:
    """How many times as long steps take beside one and two busy processes, and the plain loop's."""
    for name, option in BUSY.items():
        training = _timed(bench, bench.dataset, {option: name, "seed": 1})
        sides = [training, _plain(bench, 4, steps=500)]
        idle = list(in_turns(sides, bench.rounds))
        for count in (1, 2):
            with _busy_processes(count):
                made = list(in_turns(sides, bench.rounds))
            ours, theirs = (
                [
                    {"slowdown": before[side]["tokens_per_second"] / one["tokens_per_second"]}
                    for before, one in zip(idle, (both[side] for both in made), strict=True)
                ]
                for side in (0, 1)
            )
            yield row(f"{name} beside {count} busy: plain loop", "slowdown", ours, theirs)


@contextlib.contextmanager
def _busy_processes(count: int) -> Iterator[None]:
    loop = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(loop) for _ in range(count)]
    time.sleep(0.5)
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def process(bench: Bench) -> Iterator[Row]:
    """Whole processes: R2's steps, R2's loss, and nanoGPT's recipe for CPUs. Seeds differ."""
    figures = ("process_seconds",)
    plain = _plain(bench, 4, steps=10_000)
    for recipe in (R2[4], "multi-head-fast"):
        ours = _train(bench.dataset, recipe=recipe, seed=SEED)
        yield from compare(f"{recipe}: plain script", figures, ours, plain, bench.rounds)
    ours = _train(bench.dataset, recipe="shakespeare-fast", seed=SEED)
    rival = _recipe_of_nanogpt(bench)
    yield from compare("shakespeare-fast: nanoGPT's recipe", figures, ours, rival, bench.rounds)


def losses(bench: Bench) -> Iterator[Row]:
    """Losses over the whole validation split, a seed in each round. They have no rival."""
    recipes = {entry.name for entry in library.list_recipes()}
    for words in bench.trainings or RUNGS:
        name, *options = words.split()
        option = "recipe" if name in recipes else "model"
        ours = [*_train(bench.dataset, **{option: name}, seed=SEED), *options]
        found = [measure(ours, seed) for seed in range(1, bench.rounds + 1)]
        of_best = [{"val_loss": (one["whole"].get("best") or one)["val_loss"]} for one in found]
        yield row(f"{words}: loss", "val_loss", of_best, "")


def gpu(bench: Bench) -> Iterator[Row]:
    """GPT-2's shape in bfloat16 on one GPU and on all, and sampling, beside nanoGPT."""
    if torch.cuda.is_available():
        yield from gpu_rows(bench, GPT2, "cuda", torch.cuda.device_count())
    else:
        yield Row("GPU", "PyTorch finds no CUDA device", "", "–")


def gpu_rows(bench: Bench, shape: Shape, device: str, count: int) -> Iterator[Row]:
    """Return the rows of `gpu` for a shape on a device, and on `count` devices."""
    on_gpu = {"dtype": "bfloat16", "compile": "torch"} if device == "cuda" else {}
    settings = {**_settings("gpt2", shape), **on_gpu, "device": device}
    data = _dataset(bench, shape.vocab_size)
    # GPUs make about 40 steps per second; the first ones compile and are recorded.
    number = max(3, round(40 * bench.seconds))
    name = f"gpt2, {shape}"
    rival = nanogpt.command(bench.nanogpt, "train", shape, device=device, seconds=bench.seconds)
    ours = _train(data, **settings, **_counts(number, shape.tokens))
    yield from compare(f"{name}: nanoGPT", SPEED, ours, rival, bench.rounds)
    speed = measure(ours)["tokens_per_second"]
    peak = matmul_speed(device, torch.bfloat16)
    share = f"{speed * shape.flops_per_token / peak:.0%} of {peak / 1e12:,.1f} TFLOP/s"
    yield Row(f"{name}: share of the speed of matmuls", share)
    if count > 1:
        settings["batch-size"] = count * shape.batch
        alone = _train(data, **settings, **_counts(number, shape.tokens))
        launcher = python("torch.distributed.run", "--standalone", f"--nproc-per-node={count}")
        several = [*launcher, *alone[1:]]  # without the name of Python
        yield from compare(f"{name}, {count} GPUs: one GPU", SPEED, several, ours, bench.rounds)
    settings["checkpoint-dir"] = bench.folder / "checkpoints"
    made = measure(_train(data, **settings, **_counts(1, shape.tokens)))
    for samples in (1, 64):
        rival = nanogpt.command(
            bench.nanogpt, "sample", shape._replace(batch=samples), device=device, tokens=200
        )
        ours = speed_command(made["run"], 200, samples, device)
        name = f"sampling gpt2, {samples} × 200 tokens: nanoGPT"
        yield from compare(name, SPEED, ours, rival, bench.rounds)


def matmul_speed(device: str, dtype: torch.dtype) -> float:
    """Return the FLOP/s of large matmuls on a device: the fastest of ten."""
    size = 8192 if device == "cuda" else 2048
    one = torch.ones(size, size, dtype=dtype, device=device)

    def seconds() -> float:
        began = time.perf_counter()
        torch.mm(one, one)[0, 0].item()  # waits for the GPU
        return time.perf_counter() - began

    seconds()
    return 2.0 * size**3 / min(seconds() for _ in range(10))


def _steps_of(bench: Bench, model: str, shape: Shape) -> list[str]:
    data = _dataset(bench, shape.vocab_size)
    return _timed(bench, data, _settings(model, shape), shape.tokens)


def _dataset(bench: Bench, vocab_size: int) -> Path:
    """Return the data set of a vocabulary: the text's characters, or its GPT-2 byte pairs."""
    if vocab_size != 50257:
        return bench.dataset
    return library.prepare(bench.text, tokenizer="gpt2", data_dir=bench.folder, force=True).path


def _settings(model: str, shape: Shape) -> dict[str, object]:
    """Return the options of a training of this shape, with nanoGPT's optimizer and clipping."""
    return {
        "model": model,
        "layers": shape.layers,
        "embed-dim": shape.width,
        "heads": shape.heads,
        "block-size": shape.context,
        "batch-size": shape.batch,
        "optimizer": "adamw",
        "gradient-clip": 1.0,
        "seed": 1,
        **({"tie-embeddings": True} if shape.vocab_size == 50257 else {}),
    }


def _timed(
    bench: Bench, dataset: Path, settings: dict[str, object], batch_tokens: int = 2048
) -> list[str]:
    """Return a training whose speed is that of its second half, which takes `bench.seconds`."""
    first = _counts(max(3, 10_000 // batch_tokens), batch_tokens)
    speed = measure(_train(dataset, **settings, **first))["tokens_per_second"]
    number = max(5, round(speed * bench.seconds / batch_tokens))
    return _train(dataset, **settings, **_counts(number, batch_tokens))


def _counts(number: int, eval_tokens: int) -> dict[str, object]:
    """Return the options that make as many steps twice; the speed printed is of the second half."""
    return {"steps": 2 * number, "eval-every": number, "eval-tokens": eval_tokens}


def _train(dataset: Path, **settings: object) -> list[str]:
    given = [
        word
        for name, value in settings.items()
        for word in ([f"--{name}"] if value is True else [f"--{name}", str(value)])
    ]
    return attnlm("train", dataset, *given, "--json")


def _plain(bench: Bench, heads: int, steps: int) -> list[str]:
    return python("benchmarks.plain", bench.text, "--heads", heads, "--steps", steps)


def _recipe_of_nanogpt(bench: Bench) -> list[str] | str:
    """Return its training on 2,000 batches, with the flags of its README for CPUs, in a copy."""
    if bench.nanogpt is None:
        return "NANOGPT is not set"
    copy = bench.folder / "nanoGPT"
    shutil.copytree(bench.nanogpt, copy, dirs_exist_ok=True)
    shutil.copy(bench.text, copy / "data" / "shakespeare_char" / "input.txt")
    script = "data/shakespeare_char/prepare.py"
    subprocess.run([sys.executable, script], cwd=copy, check=True, stdout=subprocess.DEVNULL)
    flags = (
        "--device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64 "
        "--batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 "
        "--lr_decay_iters=2000 --dropout=0.0"
    )
    config = "config/train_shakespeare_char.py"
    return within(copy, [sys.executable, "train.py", config, *flags.split()])
