"""Links, pipes, sockets and devices where a file or folder of ours may be, from the first or late.

A late one takes a file's place just before it is opened, when it was looked at already.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

from tests.models import contents
from tests.trials import small
from tests.trials.children import command_in_child, in_child
from tests.trials.trial import Tally, Trial, place

_SECONDS = 100  # from which a command waits for something that never comes
_VICTIM = "victim"
_RUN = f"checkpoints/{small.RUN}"
_STEPS = ("--steps", "2", "--block-size", "4", "--threads", "1", "--device", "cpu", "--seed", "1")
_COMMANDS = (
    ("prepare", "fruits.txt"),
    ("prepare", "fruits.txt", "--val-fraction", "0.2", "--force"),
    ("train", small.CHAR, *_STEPS),
    ("train", "--resume", small.RUN, "--steps", "8"),
    ("sample", small.RUN, "--tokens", "9"),
    ("sample", "--tokens", "9", "--checkpoint", "last"),
    ("eval", small.RUN),
    ("report", small.RUN),
    ("attend", "pear", "--run", small.RUN, "--output", "pear.png"),
)
# What killed processes leave has such names.
_LEFTOVERS = (
    *(f"data/.unfinished-abcdefgh{end}" for end in ("", "/a", "/a/b")),
    *(f"checkpoints/.unfinished-abcdefgh{end}" for end in ("", "/a", "/a/b")),
    *("data/.latest.x.tmp", "checkpoints/.latest.x.tmp"),
    *(f"{_RUN}/.last.safetensors.x.tmp", f"{_RUN}/.curve.png.x.tmp"),
)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


def _link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(os.path.relpath(target, path.parent))


THINGS: dict[str, Callable[[Path], None]] = {
    "a pipe": os.mkfifo,
    "a socket": _socket,
    "an endless device": _link_to("/dev/zero"),
    "a link to another file": _link_to(f"{_VICTIM}/keys"),
    "a link to another folder": _link_to(_VICTIM),
    "a link to nothing": _link_to("nothing"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a folder": Path.mkdir,
}
_MOVED = "a link to where it was moved"


@Trial("places", short=6, full=1500, forks=True, draws=True)
def _places(tally: Tally, folder: Path) -> None:
    """Links, pipes and devices in any place, even late: nothing hangs or leaves its folder.

    One thing in one place for each case, then a late one, before one command. As promised is an end
    in time: success, or an error in one line. What is elsewhere stays as it was. What looks like a
    leftover hinders nothing; what the user moved, and has a link to, works.
    """
    in_child(_make, folder / "whole")
    there = [p.relative_to(folder / "whole") for p in (folder / "whole").rglob("*")]
    names = sorted(name for name in map(str, there) if name.startswith(("data", "checkpoints")))
    inputs = [*product(names, (*THINGS, _MOVED)), *product(_LEFTOVERS, THINGS)]
    for case, generator in tally.drawn(tally.wanted):
        command = generator.choice(_COMMANDS)
        with place(folder, like=folder / "whole") as copy:
            if case % 3:
                name, thing = generator.choice(inputs)
                fault, what = _put(copy, command, name, thing), f"{thing} as {name}"
            else:
                thing, number = generator.choice([*THINGS]), generator.randrange(60)
                fault = _tried(copy, command, before=partial(_swap, copy, thing, number))
                what = f"{thing} instead of what is opened as number {number}"
        tally.count(fault, f"{' '.join(command)}: {what}")


def _make(folder: Path) -> None:
    small.make_all(folder)
    (folder / _VICTIM / "Documents").mkdir(parents=True)
    for name in ("keys", "Documents/letter"):
        (folder / _VICTIM / name).write_text("secret\n")


def _put(copy: Path, command: tuple[str, ...], name: str, thing: str) -> str | None:
    path, moved = copy / name, copy / "moved"
    path.parent.mkdir(parents=True, exist_ok=True)
    if thing == _MOVED:
        path.rename(moved)
        path.symlink_to(moved)
        before = moved.read_bytes() if moved.is_file() else None
        fault = _tried(copy, command, must_succeed=True)
        if before is not None and moved.read_bytes() != before:
            fault = "it was written through the link"
        return fault
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    is_leftover = name in _LEFTOVERS
    fault = _tried(copy, command, partial(THINGS[thing], path), must_succeed=is_leftover)
    is_real = thing == "a folder" or ".unfinished-abcdefgh/" in name  # or lies in a folder
    if fault is None and is_leftover and not is_real and not os.path.lexists(path):
        fault = "it was moved or removed"
    return fault


def _tried(
    copy: Path,
    command: tuple[str, ...],
    before: Callable[[], object] = lambda: None,
    *,
    must_succeed: bool = False,
) -> str | None:
    """Return what the command does that nothing should, after `before`, in its own process."""

    def prepare() -> None:
        signal.alarm(_SECONDS)
        before()

    victim = contents(copy / _VICTIM)
    done, fault = command_in_child(command, copy, prepare)
    if victim.items() - contents(copy / _VICTIM).items():
        return "what was elsewhere changed, or is gone"
    return fault or (done.stderr[-300:] if must_succeed and done.code else None)


def _swap(copy: Path, thing: str, number: int) -> None:
    """From now on: put `thing` in the place of the file in `copy` that is opened as `number`."""
    opened = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal opened
        if event != "open" or not isinstance(arguments[0], (str, Path)):
            return
        path = copy / arguments[0]
        if path.is_relative_to(copy) and path.is_file() and not path.is_relative_to(copy / _VICTIM):
            opened += 1
            if opened == number + 1:
                path.unlink()
                THINGS[thing](path)

    sys.addaudithook(hook)
