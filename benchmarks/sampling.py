"""Sampling: tokens per second beside nanoGPT, the plain loop, and `transformers`.

`python -m benchmarks.sampling RUN …` prints our tokens per second as JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Iterator
from pathlib import Path

import attnlm as library
from benchmarks import nanogpt
from benchmarks.measure import Bench, Row, attnlm, compare, measure, python
from benchmarks.nanogpt import Shape

SPEED = ("tokens_per_second",)


def sample(bench: Bench) -> Iterator[Row]:
    """Texts past the context, of models that are hardly trained, which does not affect the cost."""
    shape = Shape(layers=4, width=128, heads=4, context=64, batch=1)
    sizes = {"layers": 4, "embed-dim": 128, "heads": 4, "block-size": 64}
    run = _trained(bench, "transformer", sizes)
    rival = nanogpt.command(bench.nanogpt, "sample", shape, prompt=shape.context)
    for tokens, samples in ((500, 1), (10_000, 1), (1000, 64)):
        name = f"transformer 4 × 128, {samples} × {tokens:,} tokens: one of nanoGPT"
        ours = speed_command(run, tokens, samples)
        yield from compare(name, SPEED, ours, rival, bench.rounds)
    for model, heads in (("single-head", 1), ("multi-head", 4)):
        sizes = {"embed-dim": 32, "block-size": 32, **({"heads": heads} if heads > 1 else {})}
        ours = speed_command(_trained(bench, model, sizes), 150_000)
        plain = python(
            *("benchmarks.plain", bench.text, "--heads", heads, "--steps", 0, "--tokens", 300)
        )
        yield from compare(f"{model}, 150,000 tokens: plain loop", SPEED, ours, plain, bench.rounds)
    yield from _imported(bench)


def _imported(bench: Bench) -> Iterator[Row]:
    """A model of GPT-2's shape that was imported, and `transformers`, whose text is the same."""
    name = "imported GPT-2, 128 tokens: transformers"
    if importlib.util.find_spec("transformers") is None:
        yield Row(name, "", "transformers is not installed", "–")
        return
    source = bench.folder / "gpt2"
    measure(python("benchmarks.hugging_face", source))
    run = library.import_run(source, checkpoint_dir=bench.folder / "checkpoints").path
    text = bench.text.read_text(encoding="utf-8")
    for characters in (50, 2000):
        prompt = text[:characters]
        ours = [*speed_command(str(run), 128), "--prompt", prompt, "--temperature", "0"]
        rival = python("benchmarks.hugging_face", source, "--prompt", prompt, "--tokens", 128)
        texts = [measure(command)["text"] for command in (ours, rival)]
        assert texts[0] == texts[1], f"other greedy tokens than those of transformers: {texts}"
        named = f"{name}, after {characters:,} characters"
        yield from compare(named, SPEED, ours, rival, bench.rounds)


def _trained(bench: Bench, model: str, sizes: dict[str, int]) -> str:
    """Return the folder of a run after one step."""
    options = [word for name, value in sizes.items() for word in (f"--{name}", value)]
    command = attnlm(
        *("train", bench.dataset, "--model", model, *options, "--steps", 1, "--seed", 1),
        *("--eval-tokens", 64, "--checkpoint-dir", bench.folder / "checkpoints", "--json"),
    )
    return str(measure(command)["run"])


def speed_command(run: str, tokens: int, samples: int = 1, device: str = "cpu") -> list[str]:
    """Return the command that prints the speed with which a run generates texts."""
    options = ("--tokens", tokens, "--samples", samples, "--device", device)
    return python("benchmarks.sampling", run, *options)


def main() -> None:
    """Print the tokens per second of a call, which loads the model of several texts itself."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--prompt", default="")
    parser.add_argument("--temperature", type=float, default=1.0)
    given = parser.parse_args()
    how = {"prompt": given.prompt, "device": given.device, "temperature": given.temperature}
    "".join(library.sample(given.run, tokens=2, seed=1, **how))
    if given.samples > 1:
        began = time.perf_counter()
        text = library.samples(
            given.run, tokens=given.tokens, num_samples=given.samples, seed=1, **how
        )[0]
    else:
        pieces = library.sample(given.run, tokens=given.tokens, seed=1, **how)
        began = time.perf_counter()  # the model is loaded
        text = "".join(pieces)
    seconds = time.perf_counter() - began
    print(json.dumps({"tokens_per_second": given.samples * given.tokens / seconds, "text": text}))


if __name__ == "__main__":
    main()
