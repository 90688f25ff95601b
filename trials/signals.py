"""SIGINT, SIGTERM and SIGHUP to real commands, at any moment of their lives."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, NamedTuple

import attnlm
from attnlm.workflows.autotune import _has_compiler
from tests.kit import ATTNLM
from tests.processes import free_port
from tests.web_server import WebServer
from trials.forked_children import Child, in_child
from trials.small_projects import TEXT, facts_of, prepared, same_run, settings_of
from trials.trial import Tally, Trial, not_linux

_SECONDS = 5.0  # within which a signal is answered
_AT_ONCE = 2.0  # within which a second one is, on a machine that has other work too
_ENDLESS = 10**8
_OF_TWO = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


class _Command(NamedTuple):
    """A command that does not end by itself before it is stopped, on any machine."""

    words: list[str]
    longest: float = 4.0
    """Seconds to the signal."""
    variables: dict[str, str] = {}  # noqa: RUF012 - never changed


@Trial("signals", short=2, full=96, skip=not_linux, forks=True)
def _signals(tally: Tally, folder: Path) -> None:
    """SIGINT, SIGTERM, SIGHUP at any moment: gone within 5 s, exit 128 + it, nothing lost."""
    data = prepared(folder / "given")
    # No learning rate depends on the total, so a run that was stopped is one of so many steps.
    settings = {**settings_of("multi-head"), "schedule": "constant", "eval_every": 20}
    with _serving() as web:
        commands = _commands(data, folder, settings, web.url)
        for number, generator in tally.drawn(tally.wanted):
            name = list(commands)[number % len(commands)]
            command = commands[name]
            place = folder / f"case-{number}"
            place.mkdir()
            signum = generator.choice((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
            delay = generator.uniform(0, command.longest)
            gap = generator.uniform(0, 0.3) if generator.random() < 0.4 else None
            failure = _stop(command, place, signum, delay, gap)
            lines = _said(place).splitlines()
            if failure is None and command.variables and len(lines) > 1:
                failure = f"it says more than one line: {lines}"
            part = place / "runs" / "run"
            if failure is None and name == "train" and part.exists():
                failure = in_child(_as_never_stopped, data, part, settings).failure
            again = "" if gap is None else f" and {gap:.2f} s later"
            tally.count(failure, f"{name}, {signum.name} after {delay:.2f} s{again}")
            shutil.rmtree(place, ignore_errors=True)


def _commands(data: Path, folder: Path, settings: dict[str, Any], url: str) -> dict[str, _Command]:
    runs = folder / "whole"
    in_child(lambda: attnlm.train(data, checkpoint_dir=runs, name="run", **settings).name)
    (folder / "long.txt").write_text(TEXT * 100_000)
    settings = {**settings, "steps": _ENDLESS}
    untimed = {key: settings[key] for key in settings.keys() - {"threads", "steps"}}
    train = ["train", str(data), "--checkpoint-dir=runs", "--name=run"]

    def training(**settings: Any) -> list[str]:
        return train + [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]

    compiling = training(**{**settings, "model": "transformer", "compile": "on"})
    sample = ["sample", str(runs / "run"), f"--tokens={_ENDLESS}"]
    elsewhere = {"RANK": "1", "MASTER_ADDR": "no.such.host"}
    commands = {
        "train": _Command(training(**settings)),
        "prepare, downloading slowly": _Command(["prepare", f"{url}/slow"]),
        "train, compiling": _Command(compiling, longest=12.0),
        "sample": _Command(sample),
        "prepare": _Command(["prepare", str(folder / "long.txt"), "--tokenizer=bpe:512"], 1.5),
        "prepare, a download stalled": _Command(["prepare", f"{url}/stalled"]),
        "train, with a budget": _Command(training(**untimed, budget=60)),
        "prepare, reading stdin": _Command(["prepare", "-"]),
        "train, waiting for rank 1": _Command(train, 8.0, variables={**_OF_TWO, "RANK": "0"}),
        "train, waiting for rank 0": _Command(train, 8.0, variables={**_OF_TWO, "RANK": "1"}),
        "train, waiting for a host": _Command(train, 8.0, variables={**_OF_TWO, **elsewhere}),
    }
    if _has_compiler():
        return commands
    return {name: command for name, command in commands.items() if "compiling" not in name}


@contextlib.contextmanager
def _serving() -> Iterator[WebServer]:
    """A server in a child of its own: where a thread runs, nobody may fork."""
    with WebServer() as web:

        def stall(handler: BaseHTTPRequestHandler) -> None:
            handler.wfile.write(b"HTTP/1.0 200 OK\r\n\r\nsome words ")
            web.stay_silent(handler)

        def drip(handler: BaseHTTPRequestHandler) -> None:
            handler.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n")
            while not web.closing.wait(0.05):
                handler.wfile.write(b"a word ")

        web.answer("/slow", drip)
        web.answer("/stalled", stall)
        child = Child(web.serve_forever)
        try:
            yield web
        finally:
            child.kill()
            child.wait()


def _stop(
    command: _Command, place: Path, signum: signal.Signals, delay: float, gap: float | None
) -> str | None:
    """Send the signal, and another after a gap unless that is None; return what goes wrong."""
    variables = {
        **os.environ,
        **command.variables,
        "MASTER_PORT": str(free_port()),
        "NO_PROXY": "127.0.0.1",
        "ATTNLM_CACHE_DIR": str(place / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(place / "compiled"),
    }
    with (place / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            [*ATTNLM, *command.words],
            cwd=place,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # not nohup's
        )
    with process, contextlib.ExitStack() as at_last:
        at_last.callback(process.kill)
        while process.poll() is None and not _listens(process.pid):
            time.sleep(0.001)  # Python itself is not up yet
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(delay)
            return f"it ended by itself, with {process.returncode}: {_said(place)[-200:]!r}"
        process.send_signal(signum)
        if gap is not None:
            time.sleep(gap)
            process.send_signal(signum)
        began = time.perf_counter()
        try:
            code = process.wait(30)
        except subprocess.TimeoutExpired:
            return "it went on"
    took = time.perf_counter() - began
    said = _said(place)
    if "Traceback" in said or "Exception ignored" in said:
        return said[-300:].replace("\n", " | ")
    if code != 128 + signum and not (command.variables and code == -signum):
        return f"exit {code}: {said[-200:]!r}"
    is_insisted = gap is not None and signum != signal.SIGHUP
    return f"it took {took:.1f} s" if took > (_AT_ONCE if is_insisted else _SECONDS) else None


def _said(place: Path) -> str:
    return (place / "stderr").read_text()


def _listens(pid: int) -> bool:
    """Return True if that process has its handlers: that of SIGHUP comes last."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = re.search(r"SigCgt:\s*([0-9a-f]+)", status)
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGHUP - 1) & 1)


def _as_never_stopped(data: Path, part: Path, settings: dict[str, Any]) -> str | None:
    """Return how a stopped run differs from one of as many steps as it made."""
    run = attnlm.open_run(part)
    steps = facts_of(run.last)["step"] if run.last.exists() else 0
    if steps <= settings["eval_every"]:
        return None  # a run of so few steps has no evaluation before the first
    # An endless run is worth compiling parts for, a short one isn't.
    settings = {**settings, "steps": steps, "compile": run.config.training.compile}
    whole = attnlm.train(data, checkpoint_dir=part.parent, name="whole", **settings)
    return same_run(whole, attnlm.train(resume=part, steps=steps))
