"""SIGINT and SIGTERM to real commands, at any moment of their lives."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import attnlm
from tests.trials.children import in_child, in_own_process
from tests.trials.small import TEXT, prepared, same_run, settings_of
from tests.trials.trial import Tally, Trial

_SECONDS = 5.0  # within which a signal is answered


def _run(cases: int, seed: int, folder: Path) -> Tally:
    tally = Tally()
    generator = random.Random(seed)
    data = prepared(folder / "given")
    (folder / "long.txt").write_text(TEXT * 4000)
    settings = {**settings_of("multi-head"), "steps": 600, "eval_every": 20}
    in_child(
        lambda: attnlm.train(data, checkpoint_dir=folder / "whole", name="run", **settings) and None
    )
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]
    untimed = [flag for flag in flags if "threads" not in flag and "steps" not in flag]
    train = ["train", str(data), "--checkpoint-dir=runs", "--name=run"]
    commands = {
        "train": [*train, *flags],
        "train, threads and budget tried": [*train, *untimed, "--budget=20"],
        "sample": ["sample", str(folder / "whole" / "run"), "--tokens=200000"],
        "prepare": ["prepare", str(folder / "long.txt"), "--tokenizer=bpe:512", "--data-dir=data"],
        "prepare, downloading": ["prepare", "http://127.0.0.1:9/x", "--data-dir=data"],
        "prepare, reading stdin": ["prepare", "-", "--data-dir=data"],
    }
    if cases >= 40:
        commands["train, compiling"] = [*train, *flags, "--model=transformer", "--compile=on"]
    for case in range(cases):
        name = list(commands)[case % len(commands)]
        place = folder / "case"
        place.mkdir()
        signum = generator.choice((signal.SIGINT, signal.SIGTERM))
        delay = generator.uniform(0.02, 12.0 if "compiling" in name else 4.0)
        again = generator.random() < 0.3
        failure = _stop(commands[name], place, signum, delay, again)
        if failure is None and name == "train" and (place / "runs" / "run").exists():
            whole, part = folder / "whole" / "run", place / "runs" / "run"
            outcome = in_child(lambda: _go_on(whole, part))  # noqa: B023
            failure = outcome.result or outcome.error
        what = f"{name}, {'twice ' if again else ''}{signum.name} after {delay:.2f} s"
        tally.count(f"{what}: {failure}" if failure else None)
        shutil.rmtree(place)
    return tally


def _stop(
    arguments: list[str], place: Path, signum: signal.Signals, delay: float, again: bool
) -> str | None:
    process = subprocess.Popen(
        [sys.executable, "-m", "attnlm", *arguments],
        cwd=place,
        env={**os.environ, "ATTNLM_CACHE_DIR": str(place / "cache")},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=(place / "stderr").open("wb"),
    )
    try:
        process.wait(delay)
        ended = True
    except subprocess.TimeoutExpired:
        ended = False
    began = time.perf_counter()
    for _ in range(1 + again):
        process.send_signal(signum)
    try:
        code = process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return "it went on"
    finally:
        assert process.stdin is not None
        process.stdin.close()
    took = time.perf_counter() - began
    said = (place / "stderr").read_text()
    if "Traceback" in said or "Exception ignored" in said:
        return said[-300:].replace("\n", " | ")
    if ended or (code == 0 and took < 1):  # it was about to end by itself
        return None if code in (0, 1) else f"it ended with {code}"
    if code == -signum and delay < 0.3:
        return None  # Python itself was not up yet
    if code != 128 + signum:
        return f"exit {code}: {said[-200:]!r}"
    return f"it took {took:.1f} s" if took > _SECONDS else None


def _go_on(whole: Path, part: Path) -> str | None:
    run = attnlm.open_run(part)
    if run.last.exists():
        attnlm.train(resume=part)
        return same_run(attnlm.open_run(whole), run)
    return None


TRIAL = Trial(
    name="signals",
    promise="SIGINT and SIGTERM at any moment: an end within 5 s, exit 130 or 143, nothing lost",
    short=2,
    full=49,
    run=in_own_process(_run),
    skip=lambda: "Windows has other signals" if sys.platform == "win32" else None,
)
