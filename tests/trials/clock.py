"""A clock that is set back: by an hour whenever it is asked, with files from the year 2100."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import attnlm
from tests import command as commands
from tests.trials import opening
from tests.trials.children import in_child, in_own_process
from tests.trials.small import same_run
from tests.trials.trial import Tally, Trial

_C = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
static time_t back;
int clock_gettime(clockid_t clock, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec -= back += 3600;
    return failed;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    int failed = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec, now->tv_usec = exact.tv_nsec / 1000;
    return failed;
}
time_t time(time_t *kept) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    return kept ? *kept = exact.tv_sec : exact.tv_sec;
}
"""
_STEPS = ("--threads", "1", "--device", "cpu", "--eval-every", "3")
_TRAIN = ("train", opening.CHAR, "--name", "new", "--seed", "1", *_STEPS)
_COMMANDS = (
    (*_TRAIN, "--steps", "9"),
    ("train", "--resume", opening.RUN, "--steps", "12"),
    ("prepare", "fruits.txt", "--tokenizer", "bpe:280", "--name", "more"),
    ("sample", opening.RUN, "--tokens", "25000", "--seed", "1"),
    ("eval", opening.RUN, "--json"),
    ("report", opening.RUN),
    ("prepare", "fruits.txt", "--val-fraction", "0.2", "--force"),
    (*_TRAIN, "--model", "bigram", "--budget", "3"),
)
_FUTURE = 4_102_444_800  # 2100


def _run(tally: Tally, folder: Path) -> None:
    """Each command in its turn, with a good clock and with this one: the same comes of it."""
    in_child(lambda: opening.make_all(folder / "whole"))
    (folder / "clock.c").write_text(_C)
    library = folder / "clock.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", library, folder / "clock.c", "-ldl"], check=True
    )
    for case, _ in tally.drawn(tally.wanted):
        command = _COMMANDS[case % len(_COMMANDS)]
        tally.count(_compared(command, folder, library), " ".join(command))


def _compared(command: tuple[str, ...], folder: Path, library: Path) -> str | None:
    said = []
    for name, env in (("good", {}), ("bad", {"LD_PRELOAD": str(library)})):
        shutil.copytree(folder / "whole", folder / name)
        if env:
            for path in (folder / name).rglob("*"):
                os.utime(path, (_FUTURE, _FUTURE))
        done = commands.alone(command, folder / name, env=env)
        if done.fault() or done.code:
            return done.fault() or done.stderr[-300:]
        said.append(done.stdout)
    fault = None if said[0] == said[1] else "something else is said"
    if command[0] == "train":
        fault = fault or in_child(lambda: _other_run(folder, said[0].strip(), command)).failure
    for name in ("good", "bad"):
        shutil.rmtree(folder / name)
    return fault


def _other_run(folder: Path, name: str, command: tuple[str, ...]) -> str | None:
    good, bad = (attnlm.open_run(folder / clock / name) for clock in ("good", "bad"))
    seconds = [record["seconds"] for record in bad.metrics()]
    if seconds != sorted(seconds) or not 0 <= seconds[0] <= seconds[-1] < 100:
        return f"it took {seconds} seconds"
    return None if "--budget" in command else same_run(good, bad)


def _why_not() -> str | None:
    if sys.platform != "linux":
        return "it takes the place of what Linux's C library does"
    return None if shutil.which("cc") else "there is no C compiler"


TRIAL = Trial(
    name="clock",
    promise="a clock that is set back again and again: the same results, no time is negative",
    short=1,
    full=len(_COMMANDS),
    run=in_own_process(_run),
    skip=_why_not,
)
