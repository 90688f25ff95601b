"""A clock that is set back: by an hour whenever it is asked, with files from the year 2100."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import attnlm
from tests import command as commands
from tests.trials import small
from tests.trials.children import command_in_child, in_child
from tests.trials.small import same_run
from tests.trials.trial import Tally, Trial, not_linux

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
_TRAIN = ("train", small.CHAR, "--name", "new", "--seed", "1", *_STEPS)
_COMMANDS = (
    (*_TRAIN, "--steps", "9"),
    ("train", "--resume", small.RUN, "--steps", "12"),
    ("prepare", "fruits.txt", "--tokenizer", "bpe:280", "--name", "more"),
    ("sample", small.RUN, "--tokens", "25000", "--seed", "1"),
    ("eval", small.RUN, "--json"),
    ("report", small.RUN),
    ("prepare", "fruits.txt", "--val-fraction", "0.2", "--force"),
    (*_TRAIN, "--model", "bigram", "--budget", "3"),
)
_FUTURE = 4_102_444_800  # 2100


def _why_not() -> str | None:
    return not_linux() or (None if shutil.which("cc") else "there is no C compiler")


@Trial("clock", short=1, full=len(_COMMANDS), skip=_why_not, forks=True)
def _clock(tally: Tally, folder: Path) -> None:
    """A clock that is set back again and again: the same results, no time is negative."""
    in_child(small.make_all, folder / "whole")
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(_C)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    for case, _ in tally.drawn(tally.wanted):
        command = _COMMANDS[case % len(_COMMANDS)]
        tally.count(_compared(command, folder, {"LD_PRELOAD": str(library)}), " ".join(command))


def _compared(command: tuple[str, ...], folder: Path, env: Mapping[str, str]) -> str | None:
    """Return how the results of a command with a good clock and with this one differ."""
    good, bad = (shutil.copytree(folder / "whole", folder / clock) for clock in ("good", "bad"))
    for path in bad.rglob("*"):
        os.utime(path, (_FUTURE, _FUTURE))
    expected, done = command_in_child(command, good)[0], commands.alone(command, bad, env=env)
    fault = done.fault() or (None if done.code == 0 else done.stderr[-300:])
    if fault is None and done.stdout != expected.stdout:
        fault = f"it says {done.stdout[-300:]!r}, not {expected.stdout[-300:]!r}"
    if fault is None and command[0] == "train":
        fault = in_child(_other_run, folder, done.stdout.strip(), command).failure
    shutil.rmtree(good)
    shutil.rmtree(bad)
    return fault


def _other_run(folder: Path, name: str, command: tuple[str, ...]) -> str | None:
    good, bad = (attnlm.open_run(folder / clock / name) for clock in ("good", "bad"))
    seconds = [record["seconds"] for record in bad.metrics()]
    if seconds != sorted(seconds) or not 0 <= seconds[0] <= seconds[-1] < 100:
        return f"it took {seconds} seconds"
    return None if "--budget" in command else same_run(good, bad)
