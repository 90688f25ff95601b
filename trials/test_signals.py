"""SIGINT, SIGTERM and SIGHUP to real commands, at any moment of their lives."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from socket import create_server, socket
from typing import Any

import pytest

import attnlm
from attnlm.workflows.autotune import has_compiler
from tests.kit import ATTNLM
from tests.models import assert_same_run
from tests.processes import free_port
from trials import kit

# Seconds to the end after a signal, and after a second one, on a machine without other work.
_SOON, _AT_ONCE = 5.0, 2.0
# No learning rate depends on the total, so a run that was stopped is one of so many steps.
_SETTINGS = {**kit.settings_of("multi-head"), "schedule": "constant", "eval_every": 20}


def _train(**settings: Any) -> list[str]:
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]
    return ["train", "{project}/data/fruits-char", "--checkpoint-dir=runs", "--name=run", *flags]


_ENDLESSLY = {**_SETTINGS, "steps": 10**8}
_COMPILING = {**_ENDLESSLY, "model": "transformer", "compile": "torch"}
_TIMED = {key: value for key, value in _SETTINGS.items() if key not in ("threads", "steps")}
# Commands, with variables, that do not end by themselves before they are stopped.
_COMMANDS = {
    "train": _train(**_ENDLESSLY),
    "train, with a budget": _train(**_TIMED, budget=60),
    "train, compiling": _train(**_COMPILING),
    "train, waiting for rank 1": ["WORLD_SIZE=2", "RANK=0", *_train()],
    "train, waiting for rank 0": ["WORLD_SIZE=2", "RANK=1", *_train()],
    "train, waiting for a host": ["WORLD_SIZE=2", "RANK=1", "MASTER_ADDR=no.host", *_train()],
    "sample": ["sample", "{project}/checkpoints/small", f"--tokens={10**8}"],
    "prepare": ["prepare", "{long}", "--tokenizer=bpe:512"],
    "prepare, reading stdin": ["prepare", "-"],
    "prepare, downloading slowly": ["prepare", "{slow}"],
    "prepare, a download stalled": ["prepare", "{stalled}"],
}
_LONGEST = {"prepare": 1.5, "train, compiling": 12.0}  # seconds to the signal
if not has_compiler():
    del _COMMANDS["train, compiling"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, project: Path) -> Iterator[dict[str, object]]:
    """What commands read: a project, a long text, a slow server, and one that says nothing."""
    long = tmp_path_factory.mktemp("given") / "long.txt"
    long.write_text(kit.TEXT * 100_000)
    with create_server(("127.0.0.1", 0)) as slow, create_server(("127.0.0.1", 0)) as stalled:
        multiprocessing.get_context("fork").Process(target=_drip, args=(slow,), daemon=True).start()
        urls = [f"http://127.0.0.1:{server.getsockname()[1]}/text" for server in (slow, stalled)]
        yield {"project": project, "long": long, "slow": urls[0], "stalled": urls[1]}


def _drip(server: socket) -> None:
    while True:
        with server.accept()[0] as connection, contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
            while True:
                connection.sendall(b"a word ")
                time.sleep(0.05)


@pytest.mark.parametrize("name", _COMMANDS)
@pytest.mark.parametrize("case", range(9))
def test_a_signal_ends_a_command_soon_and_loses_nothing(
    name: str, case: int, sources: dict[str, object], place: Path, generator: Random
) -> None:
    """Sometimes a second one follows, which ends it at once."""
    words = [word.format(**sources) for word in _COMMANDS[name]]
    is_joining = "WORLD_SIZE=2" in words
    signum = generator.choice((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    is_sent_twice = generator.random() < 0.4
    longest = 8.0 if is_joining else _LONGEST.get(name, 4.0)
    with _started(words, place) as process:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(generator.uniform(0, longest))
            pytest.fail("it ended by itself")
        os.kill(process.pid, signum)
        if is_sent_twice:
            time.sleep(generator.uniform(0, 0.3))
            os.kill(process.pid, signum)
        took = _seconds_to_the_end(process)
    said = (place / "stderr").read_text()
    assert "Traceback" not in said and "Exception ignored" not in said
    assert process.returncode in (128 + signum, *([-signum] if is_joining else [])), said
    assert took <= (_AT_ONCE if is_sent_twice and signum != signal.SIGHUP else _SOON)
    assert not is_joining or said.count("\n") <= 1
    if name == "train" and (place / "runs" / "run").exists():
        kit.in_child(_compare_with_never_stopped, place / "runs" / "run", words[1])


@contextlib.contextmanager
def _started(words: list[str], place: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command, and wait until it handles signals; kill it at the end."""
    variables = dict(word.split("=") for word in words if word[0].isupper())
    caches = {"ATTNLM_CACHE_DIR": "cache", "TORCHINDUCTOR_CACHE_DIR": "compiled"}
    network = {"NO_PROXY": "*", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with (place / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            [*ATTNLM, *words[len(variables) :]],
            cwd=place,
            env={**os.environ, **caches, **network, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # not nohup's
        )
    with process:
        try:
            while process.poll() is None and not _listens(process.pid):
                time.sleep(0.001)  # Python itself is not up yet
            yield process
        finally:
            process.kill()


def _listens(pid: int) -> bool:
    """Return True if that process has its handlers: that of SIGHUP comes last."""
    caught = Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")[2].split()[0]
    return bool(int(caught, 16) >> (signal.SIGHUP - 1) & 1)


def _seconds_to_the_end(process: subprocess.Popen[bytes]) -> float:
    """Return the seconds to the end of a process, but for those without a processor to run on."""

    def now() -> float:
        schedule = Path(f"/proc/{process.pid}/schedstat").read_text().split()
        return time.perf_counter() - int(schedule[1]) / 1e9

    began = now()
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        assert now() - began < 30, "it went on"
        time.sleep(0.005)
    return now() - began


def _compare_with_never_stopped(part: Path, data: str) -> None:
    """A stopped run is one of as many steps as it made."""
    run = attnlm.open_run(part)
    steps = run.checkpoint("last").step if run.last.exists() else 0
    if steps > _SETTINGS["eval_every"]:  # else it has no evaluation before the first
        # An endless run is worth compiling parts for, a short one isn't.
        settings = {**_SETTINGS, "steps": steps, "compile": run.config.training.compile}
        whole = attnlm.train(data, checkpoint_dir=part.parent, name="whole", **settings)
        assert_same_run(whole, attnlm.train(resume=part, steps=steps))
