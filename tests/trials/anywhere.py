"""Any folder, any locale, no home, no terminal, no reader: the commands work, or say why not."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from random import Random

import attnlm
from tests import command as commands
from tests.trials import opening
from tests.trials.trial import Tally, Trial

_STEPS = ["--steps", "1", "--threads", "1", "--block-size", "4", "--seed", "1"]


def _anywhere(tally: Tally, folder: Path) -> None:
    """All three commands in each odd place with all that may surround it, or in so many of these;
    where more than one, each named case, most of which tests/test_cli.py tries too.
    """
    everywhere = list(itertools.product(_PLACES, _SURROUNDINGS))
    for (place, env), generator in tally.chosen(everywhere, tally.wanted):
        names = ", ".join(f"{key}={value}" for key, value in env.items())
        fault = _three_commands(folder / str(tally.number) / place, generator, env)
        tally.count(fault, f"in {place!r} with {names}")
    if tally.wanted > 1:
        opening.make_all(folder / "made")
        for (name, case), _ in tally.chosen(list(_NAMED.items()), len(_NAMED), len(everywhere)):
            tally.count(case(folder / "made"), name)


_PLACES = (
    "plain",
    "with spaces ",
    "Größe, 日本語 und 🙂",
    "e\u0301 or " + unicodedata.normalize("NFC", "e\u0301"),
    'it\'s "quoted" & $HOME; `ls` %PATH% #1',
    "-dash",
    "a\nb",
    "x" * 200,
    os.fsdecode(b"not utf-8: \xff\xfe"),
)
_NO_CACHE = {"ATTNLM_CACHE_DIR": None, "XDG_CACHE_HOME": None}
_SURROUNDINGS: tuple[dict[str, str | None], ...] = (
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    {"LC_ALL": "C.UTF-8"},
    {"LC_ALL": "no_SUCH.locale"},
    {"PYTHONIOENCODING": "latin-1"},
    {"TERM": None, "COLUMNS": "0"},
    {"TERM": "dumb", "NO_COLOR": "1"},
    {"FORCE_COLOR": "1"},
    {"HOME": None, **_NO_CACHE},
    {"HOME": "/dev/null/home", **_NO_CACHE},
    {"HOME": "", "PATH": "", **_NO_CACHE},
    {"ATTNLM_CACHE_DIR": "/dev/null/cache"},
    {"ATTNLM_CACHE_DIR": "/proc/cache"},
    {"TMPDIR": "/dev/null/temporary"},
)


def _three_commands(place: Path, generator: Random, env: dict[str, str | None]) -> str | None:
    """Prepares, trains and samples below `place`, by names or by paths; what goes wrong."""
    place.mkdir(parents=True)
    name = generator.choice(("text.txt", "Wörter 日本.txt", "a b"))
    (place / name).write_text("αβγ δεζ ηθι. " * 40, encoding="utf-8")
    folders = generator.choice(([], ["--data-dir", "d é"]))
    runs = generator.choice(([], ["--checkpoint-dir", str(place / "läufe")]))
    source = generator.choice((name, str(place / name)))
    for arguments in (
        ["prepare", source, *folders],
        ["train", *_STEPS, *folders, *runs],
        ["sample", "--tokens", "9", "--prompt", "αβ", *runs],
    ):
        done = commands.alone(arguments, place, env=env)
        if done.code != 0 or done.fault():
            return f"{arguments} ended with {done.code}: {done.stderr[-300:]}"
        if arguments[0] == "sample" and (done.stdout[:2] != "αβ" or len(done.stdout) != 11):
            return f"sampled {done.stdout!r}"
    return None


# --- Named cases ----------------------------------------------------------------------------------


def _reader_leaves(arguments: list[str], read: int) -> Callable[[Path], str | None]:
    """As in `attnlm … | head`: the reader takes some bytes and goes."""

    def run(folder: Path) -> str | None:
        process = subprocess.Popen(
            [sys.executable, "-m", "attnlm", *arguments],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None and process.stderr is not None
        with process.stdout as stdout:
            stdout.read(read)
        with process.stderr as stderr:
            said = stderr.read().decode()
        if process.wait() != 0 or "error" in said or "Broken" in said or "Traceback" in said:
            return f"exit code {process.returncode}: {said}"
        return None

    return run


def _cache_cannot_be_written(folder: Path) -> str | None:
    """A vocabulary that can't be kept is used all the same; a choice of threads is made anew."""
    blocked = folder / "blocked"
    blocked.touch()
    env = {"ATTNLM_CACHE_DIR": str(blocked / "cache")}
    done = commands.alone(["train", *_STEPS[:2], "--name", "no-cache"], folder, env=env)
    return done.fault() or (done.stderr if done.code else None)


def _folder_cannot_be_written(folder: Path) -> str | None:
    """Where nothing can be made, that is said, with the path."""
    for arguments in (
        ["prepare", "fruits.txt", "--data-dir", "/dev/null/data"],
        ["train", *_STEPS, "--checkpoint-dir", "/dev/null/runs"],
    ):
        done = commands.alone(arguments, folder)
        if done.fault() or done.code != 1 or "/dev/null" not in done.stderr:
            return f"{arguments}: {done.code} {done.stderr}"
    return None


def _no_terminal(folder: Path) -> str | None:
    """In a session of its own, with nothing to read from or write to."""
    process = subprocess.run(
        [sys.executable, "-m", "attnlm", "train", *_STEPS, "--name", "alone"],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    if process.returncode != 0:
        return f"exit code {process.returncode}"
    return None if attnlm.open_run(folder / "checkpoints" / "alone").metrics() else "not trained"


_NAMED: dict[str, Callable[[Path], str | None]] = {
    "a reader of samples leaves": _reader_leaves(["sample", "--tokens", "3000"], 10),
    "a reader of samples never reads": _reader_leaves(["sample", "--tokens", "300"], 0),
    "a reader of help leaves": _reader_leaves(["train", "--help"], 1),
    "a reader of a configuration leaves": _reader_leaves(["train", "--print-config"], 0),
    "a reader of a path leaves": _reader_leaves(["prepare", "fruits.txt"], 0),
    "no terminal": _no_terminal,
    "a cache that can't be written": _cache_cannot_be_written,
    "folders that can't be written": _folder_cannot_be_written,
}


# --- Temporary folders ----------------------------------------------------------------------------


def _temporary(tally: Tally, folder: Path) -> None:
    """Every command that reads or writes, without a home, with every temporary folder that is none.

    Python takes another where TMPDIR can't be written. What can't be loaded from one is done
    without.
    """
    opening.make_all(folder)
    (folder / "file").touch()
    (folder / "mounted").mkdir()
    for (kind, name), _ in tally.chosen(
        list(itertools.product(_TEMPORARY, COMMANDS)), tally.wanted
    ):
        place, options = _TEMPORARY[kind]
        env = {"TMPDIR": str(folder / place), "HOME": "/dev/null/home", **_NO_CACHE}
        through = _mounting(folder / place, options) if options else []
        done = commands.alone(COMMANDS[name], folder, env=env, through=through)
        chatter = "matplotlib" in done.stderr.lower()
        fault = done.fault() or (done.stderr[-300:] if done.code or chatter else None)
        tally.count(fault, f"{name}, TMPDIR {kind}")


def _mounting(place: Path, options: str) -> list[str]:
    """What runs a command that alone sees an empty folder there, mounted with these options."""
    # A page is what "size=4k" has; after this it has none.
    script = """mount -t tmpfs -o "$1" none "$2" || exit 1
        [ "$1" != size=4k ] || head -c 4096 /dev/zero >"$2/full"; shift 2; exec "$@\""""
    return ["unshare", "--mount", "sh", "-c", script, "sh", options, str(place)]


def _cannot_mount() -> str | None:
    try:
        tried = subprocess.run([*_mounting(Path("/tmp"), "noexec"), "true"], capture_output=True)
    except OSError:
        return "there is no unshare"
    return "this user may not mount folders" if tried.returncode else None


_TEMPORARY = {
    "missing": ("nowhere", ""),
    "a file": ("file", ""),
    "read-only": ("mounted", "ro"),
    "without room": ("mounted", "size=4k"),
    "without room for a name": ("mounted", "nr_inodes=1"),
    "noexec": ("mounted", "noexec"),
}
COMMANDS = {
    "prepare": ["prepare", "fruits.txt", "--tokenizer", "bpe:280", "--force"],
    "train": ["train", opening.CHAR, *_STEPS],
    "sample": ["sample", opening.RUN, "--tokens", "25000"],  # so many that C is worth compiling
    "eval": ["eval", opening.RUN],
    "report": ["report", opening.RUN],
    "ladder": ["ladder", opening.CHAR, "--rungs", "bigram,average", "--steps", "2", "--seed", "1"],
    "attend": ["attend", "pear", "--run", opening.RUN, "--output", "pear.png"],
    "heads": ["heads", "--run", opening.RUN, "--windows", "2"],
    "trace": ["trace", "pear", "--run", opening.RUN],
}


TRIAL = Trial(
    "anywhere",
    "odd paths, other locales, no home, no terminal, no reader: the commands work",
    short=1,
    full=len(_PLACES) * len(_SURROUNDINGS),
    run=_anywhere,
    skip=lambda: "Windows has other paths" if os.name == "nt" else None,
)
TEMPORARY = Trial(
    "temporary",
    "TMPDIR missing, a file, read-only, full or noexec, no home: every command works, in silence",
    short=1,
    full=len(_TEMPORARY) * len(COMMANDS),
    run=_temporary,
    skip=_cannot_mount,
)
