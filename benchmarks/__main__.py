"""`python -m benchmarks [PART…]`: attnlm and its rivals in the same run, as one table.

ATTNLM_TEST_DATA names a folder with tinyshakespeare.txt; NANOGPT, if it is set, a checkout of
nanoGPT, and TIKTOKEN_CACHE_DIR a folder with GPT-2's vocabulary. A rival that is missing is left
out, with the reason. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import attnlm
from benchmarks import preparation, sampling, training
from benchmarks.measure import Bench
from tools.on_processors import limited

PARTS = {
    "steps": training.steps,
    "process": training.process,
    "sample": sampling.sample,
    "prepare": preparation.prepare,
    "growth": training.growth,
    "busy": training.busy,
    "gpu": training.gpu,
    "losses": training.losses,
}


def main() -> None:
    """Measure the parts that were named, or all but the losses, and print the table."""
    given = _options()
    if given.processor is not None:
        place = sys.argv.index("--processor")
        command = [sys.executable, "-m", "benchmarks", *sys.argv[1:place], *sys.argv[place + 2 :]]
        with tempfile.TemporaryDirectory() as copy:
            variables = limited(given.processor, Path(copy))
            sys.exit(subprocess.run(command, env=variables).returncode)
    text = Path(os.environ.get("ATTNLM_TEST_DATA", ".")).resolve() / "tinyshakespeare.txt"
    if not text.is_file():
        sys.exit("ATTNLM_TEST_DATA must name a folder with tinyshakespeare.txt in it")
    nanogpt = os.environ.get("NANOGPT")
    table = Table("measured: beside", "attnlm", "rival", "ratio", title=_machine())
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(
            text=text,
            dataset=attnlm.prepare(text, data_dir=folder).path.resolve(),
            folder=Path(folder),
            nanogpt=None if nanogpt is None else Path(nanogpt).resolve(),
            rounds=given.rounds,
            seconds=given.seconds,
            trainings=given.training,
        )
        for part in given.parts or [name for name in PARTS if name != "losses"]:
            for row in PARTS[part](bench):
                print(*row, sep="  ", file=sys.stderr, flush=True)
                table.add_row(*row)
    Console(width=140).print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="of a measurement of tokens per second"
    )
    parser.add_argument(
        "--processor", help="limit both sides to an older one, such as AVX2, of `make processors`"
    )
    parser.add_argument(
        "--training",
        action="append",
        default=[],
        help='of the part losses: a model or recipe, with options: "best --budget 30s"',
    )
    given = parser.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"no part is called {', '.join(sorted(unknown))}")
    return given


def _machine() -> str:
    peak = training.matmul_speed("cpu", torch.float32) / 1e9
    capability = torch.backends.cpu.get_cpu_capability()
    gpus = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return (
        f"{_processor()}, {os.cpu_count()} cores, {capability}, {peak:.0f} GFLOP/s in float32 "
        f"matmuls{gpus}, torch {torch.__version__}"
    )


def _processor() -> str:
    """Return the name of the processor as the system reports it."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
