"""Two machines that train together by torchrun: slow and broken links, lost processes, their data.

The machines are network namespaces with a file system each, and gloo joins them.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import attnlm
from tests.command import ATTNLM
from tests.trials.link import DEVICE, Link, Machine, two_machines, why_no_machines
from tests.trials.small import TEXT, prepared, same_run
from tests.trials.trial import Tally, Trial

_TRAIN = (
    *("train", "fruits-char", "--model", "single-head", "--batch-size", "8", "--block-size", "8"),
    *("--optimizer", "adamw", "--seed", "1", "--name", "run", "--eval-every", "200"),
)
_LONG, _SHORT = ("--steps", "3000"), ("--steps", "60")
_SHARDED = ("--steps", "1000", "--shard")
_RESUME = ("train", "--resume", "run")
_ANSWER = 60.0  # seconds, within which all end
_LONGEST = 300.0
_ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": DEVICE}
_STATIC, _C10D = "static", "c10d"


@dataclass
class _Pair:
    """The two machines of a case, and what runs on them."""

    machines: tuple[Machine, Machine]
    link: Link
    launchers: tuple[subprocess.Popen[bytes], ...] = ()

    def start(self, *arguments: str, by: str = _STATIC, each: int = 1) -> None:
        """Start torchrun on both, with `each` processes on each."""
        first = self.machines[0].address
        c10d = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:29500", "--rdzv-id", "trial")
        program = ("--nnodes", "2", "--nproc-per-node", str(each), "-m", "attnlm", *arguments)
        started = []
        for number, machine in enumerate(self.machines):
            is_host = ("--rdzv-conf", f"is_host={int(number == 0)}", "--local-addr")
            rendezvous = {
                _STATIC: ("--node-rank", str(number), "--master-addr", first),
                _C10D: (*c10d, *is_host, machine.address),
            }
            torchrun = (sys.executable, "-m", "torch.distributed.run", *rendezvous[by])
            command = machine.command(*torchrun, *program)
            with (machine.folder / "stderr").open("wb") as stderr:
                streams: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": stderr}
                started.append(subprocess.Popen(command, env=_ENVIRONMENT, **streams))
        self.launchers = tuple(started)

    def run(self) -> Path:
        """The run's folder, which is the main machine's."""
        return self.machines[0].folder / "checkpoints" / "run"

    def share_runs(self) -> None:
        """Both write runs to one file system."""
        (shared := self.machines[0].folder.parent / "shared").mkdir()
        for machine in self.machines:
            (machine.folder / "checkpoints").symlink_to(shared)

    def shares_runs(self) -> bool:
        return (self.machines[1].folder / "checkpoints").is_symlink()

    def until_evaluated(self, times: int) -> None:
        metrics = self.run() / "metrics.jsonl"
        for _ in range(int(_LONGEST / 0.05)):
            if metrics.exists() and metrics.read_bytes().count(b"\n") >= times:
                return
            if any(launcher.poll() is not None for launcher in self.launchers):
                break
            time.sleep(0.05)
        raise AssertionError(f"it does not train: {self.says(0)} {self.says(1)}")

    def processes(self, number: int) -> list[int]:
        """Return the processes that train on one machine, by rank."""
        found = {}
        for pid in self.machines[number].pids():
            with contextlib.suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                found.update({int(v[5:]): pid for v in variables if v.startswith(b"RANK=")})
        return [found[rank] for rank in sorted(found)]

    def ends(self, within: float, codes: tuple[int, ...]) -> str | None:
        """What is wrong with how both end."""
        until = time.monotonic() + within
        for number, launcher in enumerate(self.launchers):
            try:
                code = launcher.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                return f"machine {number} still runs after {within:.0f} s"
            if code not in codes:
                return f"machine {number} ends with {code}: {self.says(number)}"
        return None

    def says(self, number: int) -> list[str]:
        """The errors that a machine reports."""
        lines = (self.machines[number].folder / "stderr").read_text().splitlines()
        return [line for line in lines if line.startswith("error: ")]

    def fails(self, *says: str) -> str | None:
        """What is wrong unless both end soon, each with the one error that is given, or none."""
        if wrong := self.ends(_ANSWER, codes=(1,)):
            return wrong
        for number, expected in enumerate(says):
            found = self.says(number)
            if len(found) != bool(expected) or any(expected not in line for line in found):
                return f"machine {number} reports {found}"
        return None

    def kill(self) -> None:
        """Kill whatever still runs on them."""
        for machine in self.machines:
            for pid in machine.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for launcher in self.launchers:
            launcher.wait()


@contextlib.contextmanager
def _pair(folder: Path, data: Path) -> Iterator[_Pair]:
    with two_machines(folder) as (*machines, link):
        for machine in machines:
            shutil.copytree(data, machine.folder / "data")
        pair = _Pair((machines[0], machines[1]), link)
        try:
            yield pair
        finally:
            pair.kill()


def _undisturbed(given: Path, steps: tuple[str, ...], processes: int = 2) -> Path:
    """The same run, of as many processes of one machine."""
    folder = given / "".join((str(processes), *steps))
    if not folder.exists():
        options = ("--checkpoint-dir", str(folder), "--processes", str(processes))
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [*ATTNLM, *_TRAIN, *steps, *options]
        subprocess.run(command, cwd=given, env=env, capture_output=True, check=True)
    return folder / "run"


def _same(pair: _Pair, undisturbed: Path) -> str | None:
    written = pair.machines[1].folder / "checkpoints"
    if written.exists() and not written.is_symlink():
        return "the other machine has written a run"
    return same_run(attnlm.open_run(undisturbed), attnlm.open_run(pair.run()))


def _resumed(pair: _Pair, given: Path, steps: tuple[str, ...] = _LONG) -> str | None:
    """The run goes on, on two new machines, as if nothing had happened."""
    run = pair.run()
    if attnlm.open_run(run).checkpoint("last").step < 200:
        return "no checkpoint is left"
    with _pair(pair.machines[0].folder.parent / "again", given / "data") as other:
        if pair.shares_runs():
            other.share_runs()
        shutil.copytree(run, other.run())
        other.start(*_RESUME)
        return other.ends(_LONGEST, codes=(0,)) or _same(other, _undisturbed(given, steps))


def _plain(pair: _Pair, given: Path, generator: random.Random) -> str | None:
    """Two processes on each, by either rendezvous: the bytes of four on one machine."""
    pair.start(*_TRAIN, *_SHORT, by=generator.choice((_STATIC, _C10D)), each=2)
    return pair.ends(_LONGEST, codes=(0,)) or _same(pair, _undisturbed(given, _SHORT, 4))


def _slow(pair: _Pair, given: Path, generator: random.Random) -> str | None:
    """50 ms each way, 10 Mbit/s."""
    pair.link.delay, pair.link.rate = 0.05, 1e7
    pair.start(*_TRAIN, *_SHORT, by=generator.choice((_STATIC, _C10D)))
    return pair.ends(_LONGEST, codes=(0,)) or _same(pair, _undisturbed(given, _SHORT))


def _broken(pair: _Pair, given: Path, generator: random.Random) -> str | None:
    """Packets are lost from some moment on, or one machine's network goes down."""
    pair.start(*_TRAIN, *_LONG)
    pair.until_evaluated(generator.randrange(2, 6))
    if generator.random() < 0.5:
        pair.link.is_cut = True
    else:
        generator.choice(pair.machines).unplug()
    silent = "another process of this training stopped responding"
    return pair.fails(silent, silent) or _resumed(pair, given)


def _killed(pair: _Pair, given: Path, generator: random.Random) -> str | None:
    pair.start(*_TRAIN, *_LONG, by=generator.choice((_STATIC, _C10D)))
    pair.until_evaluated(generator.randrange(2, 6))
    for pid in pair.processes(1):
        os.kill(pid, signal.SIGKILL)
    ended = "another process of this training has ended"
    return pair.fails(ended, "") or _resumed(pair, given)


def _sharded(pair: _Pair, given: Path, generator: random.Random) -> str | None:
    """Each process has its part of the weights and of every checkpoint; one of them is killed."""
    pair.share_runs()
    pair.start(*_TRAIN, *_SHARDED, by=generator.choice((_STATIC, _C10D)))
    pair.until_evaluated(generator.randrange(3, 5))
    os.kill(pair.processes(1)[0], signal.SIGKILL)
    return pair.fails() or _resumed(pair, given, _SHARDED)


def _stopped(pair: _Pair, given: Path, generator: random.Random) -> str | None:
    """One of two processes of a machine hangs: its launcher kills it when the other has ended."""
    pair.start(*_TRAIN, *_LONG, by=generator.choice((_STATIC, _C10D)), each=2)
    pair.until_evaluated(2)
    os.kill(generator.choice(pair.processes(1)), signal.SIGSTOP)
    silent = "another process of this training "  # the first that gives up ends; others see that
    return pair.fails(silent, silent)


def _out_of_memory(pair: _Pair, given: Path, generator: random.Random) -> str | None:
    """Libraries may crash where they get no memory, so that the other machine reports it."""
    pair.start(*_TRAIN, *_LONG, by=generator.choice((_STATIC, _C10D)))
    pair.until_evaluated(2)
    pid = pair.processes(1)[0]
    size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (size, size))
    return pair.fails("another process of this training has ended") or _resumed(pair, given)


def _without_data(pair: _Pair, given: Path, generator: random.Random) -> str | None:
    """The second machine has no data set, or another one of the same name."""
    data = pair.machines[1].folder / "data"
    shutil.rmtree(data)
    expected = "data set 'fruits-char' not found in data"
    if generator.random() < 0.5:
        other = data.parent / "fruits.txt"
        other.write_text(TEXT[::-1])
        attnlm.prepare(other, data_dir=data)
        expected = "data/fruits-char is not the data set that run was trained on"
    pair.start(*_TRAIN, *_SHORT, by=generator.choice((_STATIC, _C10D)))
    return pair.fails("another process of this training has ended", expected)


_KINDS: tuple[Callable[[_Pair, Path, random.Random], str | None], ...] = (
    *(_plain, _slow, _broken, _killed, _sharded, _stopped, _out_of_memory, _without_data),
)


@Trial("machines", short=0, full=16, skip=why_no_machines)
def _machines(tally: Tally, folder: Path) -> None:
    """Two machines train as one; where link or process fails, all end, and resume as one."""
    given = folder / "one"
    data = prepared(given)
    for case, generator in tally.drawn(tally.wanted):
        kind = _KINDS[case % len(_KINDS)]
        with _pair(folder / f"case-{case}", data.parent) as pair:
            tally.count(kind(pair, given, generator), kind.__name__)
