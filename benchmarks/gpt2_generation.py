"""Generation with a GPT-2-sized model imported from `transformers`, compared with `transformers`.

Weights are random, which does not affect the cost. Both sides alternate, in one process for speed
and in separate processes for memory and the time to the first token. The best run of each counts,
since other load on the machine only slows them down; greedy tokens must be the same.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import attnlm as library
from attnlm.data.dataset import Dataset
from attnlm.generation.decoders import fastest_decoding
from attnlm.generation.sampling_config import SamplingConfig
from attnlm.tokens.byte_pairs import load_published
from attnlm.tokens.tokenizer_json import library_tokenizer
from benchmarks.table import Measured, Row, attnlm, measured

Speaker = Callable[[Tensor, int], list[int]]
"""A prompt's ids (T,), and how many tokens follow it: their ids."""

PROMPTS = {16: 128, 512: 128, 900: 1}
"""Tokens to read, and how many to generate after them."""
_ROUNDS, _TURNS = 3, 2
_NUMBERS = 2**27
_FIRST_TOKEN = """
import sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
ids = tokenizer(sys.argv[2], return_tensors="pt")
made = model.generate(**ids, max_new_tokens=1, do_sample=False, pad_token_id=0)
print(tokenizer.decode(made[0]), end="")
"""


def speaking(dataset: Dataset, text: Path) -> list[Row]:
    """Reading prompts, generating after them, and both programs from their start."""
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "source"
        torch.manual_seed(1)
        theirs: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config())
        theirs.eval().save_pretrained(source)
        tokenizer = library_tokenizer(load_published("gpt2", spool=Path(name)))
        (source / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
        run = library.import_run(source, name="gpt2", checkpoint_dir=name)
        model, device = library.load_model(run, device="cpu")

        def ours(prompt: Tensor, count: int) -> list[int]:
            config = SamplingConfig(tokens=count, temperature=0)
            blocks = fastest_decoding(model, device).generate(prompt.tolist(), config)
            return [int(ids_B[0]) for block_TB in blocks for ids_B in block_TB]

        rows = [_bandwidth_row(), *_speed_rows(ours, theirs)]
        return [*rows, *_process_rows(run.path, source)]


def _bandwidth_row() -> Row:
    """Return the memory bandwidth, which bounds tokens per second: each token reads all weights."""
    numbers = torch.ones(_NUMBERS)
    seconds = min(_seconds(numbers.sum) for _ in range(10))
    return Row(f"reading memory, {4 * _NUMBERS / 1e6:,.0f} MB", *_rate(seconds), "")


def _rate(seconds: float) -> tuple[str, str]:
    gigabytes = 4 * _NUMBERS / seconds / 1e9
    return f"{gigabytes:.1f} GB/s", f"{1000 * 498e6 / gigabytes / 1e9:.1f} ms for 498 MB"


def _speed_rows(ours: Speaker, model: Any) -> list[Row]:
    def theirs(prompt: Tensor, count: int) -> list[int]:
        with torch.inference_mode():
            made = model.generate(
                prompt[None],
                max_new_tokens=count,
                do_sample=False,
                use_cache=True,
                pad_token_id=0,
                eos_token_id=None,
            )
        ids: list[int] = made[0, len(prompt) :].tolist()
        return ids

    rows = []
    generator = torch.Generator().manual_seed(1)
    for length, count in PROMPTS.items():
        prompt = torch.randint(50_257, (length,), generator=generator)
        rows.append(_compared(f"reading {length} tokens", ours, theirs, prompt, 1))
        if count > 1:
            name = f"{count} tokens after {length}"
            rows.append(_compared(name, ours, theirs, prompt, count))
        _check(model, prompt, ours(prompt, count), theirs(prompt, count))
    return rows


def _check(model: Any, prompt: Tensor, ours: list[int], theirs: list[int]) -> None:
    """Ends the benchmark where tokens differ, with how near to each other they are."""
    for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one != other:
            with torch.inference_mode():
                ids = torch.cat([prompt, torch.tensor(theirs[:place], dtype=torch.long)])
                logits = model(ids[None]).logits[0, -1]
            gap = abs(float(logits[one] - logits[other]))
            sys.exit(f"token {place} after {len(prompt)}: {one}, not {other}, {gap:.1e} apart")


def _compared(name: str, ours: Speaker, theirs: Speaker, prompt: Tensor, count: int) -> Row:
    best = dict.fromkeys((ours, theirs), float("inf"))
    for _ in range(_ROUNDS):
        for side in best:
            best[side] = min(best[side], _seconds(partial(side, prompt, count)))
    one, other = best.values()
    tokens = count if count > 1 else len(prompt)
    speeds = [f"{s:.3f} s, {tokens / s:,.0f} tokens/s" for s in (one, other)]
    return Row(name, speeds[0], f"transformers {speeds[1]}", f"{other / one:.2f}")


def _seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _process_rows(run: Path, source: Path) -> list[Row]:
    """Time processes from the start to the first token, and to the end."""
    prompt = "The first token after these"
    options = ["--prompt", prompt, "--tokens", "1", "--temperature", "0", "--device", "cpu"]
    sides = {
        "ours": attnlm("sample", str(run), *options),
        "theirs": [sys.executable, "-c", _FIRST_TOKEN, str(source), prompt],
    }
    runs: dict[str, list[Measured]] = {side: [] for side in sides}
    for _ in range(_TURNS):
        for side, command in sides.items():
            runs[side].append(measured(command))
    said = {made.stdout.strip() for side in runs.values() for made in side}
    assert len(said) == 1, said
    one, other = (min(made.seconds for made in side) for side in runs.values())
    least, most = (min(made.mib for made in side) for side in runs.values())
    return [
        Row(
            "process, one token",
            f"{one:.2f} s",
            f"transformers {other:.2f} s",
            f"{other / one:.2f}",
        ),
        Row(
            "process, peak memory",
            f"{least:,.0f} MiB",
            f"transformers {most:,.0f} MiB",
            f"{most / least:.2f}",
        ),
    ]
