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

from tests import command as commands
from tests.trials import small
from tests.trials.trial import Tally, Trial

_STEPS = ["--steps", "1", "--threads", "1", "--block-size", "4", "--seed", "1"]


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


@Trial("anywhere", short=1, full=len(_PLACES) * len(_SURROUNDINGS))
def _anywhere(tally: Tally, folder: Path) -> None:
    """Odd paths, other locales, no home, no terminal, no reader: the commands work.

    All three commands in each odd place with all that may surround it, or in so many of these. The
    full form also has the named cases, most of which tests/cli/test_cli.py tries too.
    """
    everywhere = list(itertools.product(_PLACES, _SURROUNDINGS))
    for (place, env), generator in tally.chosen(everywhere, tally.wanted):
        names = ", ".join(f"{key}={value}" for key, value in env.items())
        fault = _three_commands(folder / str(tally.number) / place, generator, env)
        tally.count(fault, f"in {place!r} with {names}")
    if tally.wanted > 1:
        small.make_all(folder / "made")
        for (name, case), _ in tally.chosen(list(_NAMED.items()), len(_NAMED), len(everywhere)):
            tally.count(case(folder / "made"), name)


# In one process, which loads torch once.
_ONE_AFTER_ANOTHER = """
import sys, attnlm.__main__ as program
words = sys.argv[4:]
while words:
    end = words.index(";")
    sys.argv, words = ["attnlm", *words[:end]], words[end + 1 :]
    try: program.main()
    except SystemExit as end:
        if end.code: raise
"""


def _three_commands(place: Path, generator: Random, env: dict[str, str | None]) -> str | None:
    """Prepare, train and sample below `place`, by names or by paths; return what goes wrong."""
    place.mkdir(parents=True)
    name = generator.choice(("text.txt", "Wörter 日本.txt", "a b"))
    (place / name).write_text("αβγ δεζ ηθι. " * 40, encoding="utf-8")
    folders = generator.choice(([], ["--data-dir", "d é"]))
    runs = generator.choice(([], ["--checkpoint-dir", str(place / "läufe")]))
    source = generator.choice((name, str(place / name)))
    train = ["train", *_STEPS, *folders, *runs]
    sample = ["sample", "--tokens", "9", "--prompt", "αβ", *runs]
    arguments = ["prepare", source, *folders, ";", *train, ";", *sample, ";"]
    through = [sys.executable, "-c", _ONE_AFTER_ANOTHER]
    done = commands.alone(arguments, place, env=env, through=through)
    if done.code != 0 or done.fault():
        return f"{arguments} ended with {done.code}: {done.stderr[-300:]}"
    sampled = done.stdout[-12:]
    return None if sampled[:3] == "\nαβ" else f"sampled {sampled!r}"


# --- Named cases ----------------------------------------------------------------------------------


def _in_a_shell(
    script: str, *arguments: str, code: int = 0, says: str = ""
) -> Callable[[Path], str | None]:
    """Return the case: the script, whose "$@" is the command, ends with `code` and `says` so."""

    def run(folder: Path) -> str | None:
        through = ["bash", "-o", "pipefail", "-c", script, "bash"]
        done = commands.alone(arguments, folder, through=through)
        is_so = done.code == code and says in done.stderr and "Broken" not in done.stderr
        return done.fault() or (None if is_so else f"exit code {done.code}: {done.stderr}")

    return run


_NAMED = {
    "a reader of samples leaves": _in_a_shell('"$@" | head -c 10', "sample", "--tokens", "3000"),
    "a reader of samples never reads": _in_a_shell('"$@" | true', "sample", "--tokens", "300"),
    "a reader of help leaves": _in_a_shell('"$@" | head -c 1', "train", "--help"),
    "a reader of a configuration leaves": _in_a_shell('"$@" | true', "train", "--print-config"),
    "a reader of a path leaves": _in_a_shell('"$@" | true', "prepare", "fruits.txt"),
    "no terminal": _in_a_shell('setsid "$@" </dev/null >/dev/null 2>&1', "train", *_STEPS),
    "a cache that can't be written": _in_a_shell(
        'ATTNLM_CACHE_DIR=fruits.txt/cache "$@"', "train", *_STEPS[:2]
    ),
    "a data folder that can't be written": _in_a_shell(
        '"$@" --data-dir /dev/null/data', "prepare", "fruits.txt", code=1, says="/dev/null"
    ),
    "a folder of runs that can't be written": _in_a_shell(
        '"$@" --checkpoint-dir /dev/null/runs', "train", *_STEPS, code=1, says="/dev/null"
    ),
}


# --- Temporary folders ----------------------------------------------------------------------------


def _mounting(place: Path, options: str) -> list[str]:
    """Return what runs a command that alone sees an empty folder there, mounted with `options`."""
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
    "train": ["train", small.CHAR, *_STEPS],
    "sample": ["sample", small.RUN, "--tokens", "25000"],
    "eval": ["eval", small.RUN],
    "report": ["report", small.RUN],
    "ladder": ["ladder", small.CHAR, "--rungs", "bigram,average", "--steps", "2", "--seed", "1"],
    "attend": ["attend", "pear", "--run", small.RUN, "--output", "pear.png"],
    "heads": ["heads", "--run", small.RUN, "--windows", "2"],
    "trace": ["trace", "pear", "--run", small.RUN],
}


@Trial("temporary", short=1, full=len(_TEMPORARY) * len(COMMANDS), skip=_cannot_mount)
def _temporary(tally: Tally, folder: Path) -> None:
    """TMPDIR missing, a file, read-only, full or noexec, no home: every command works, in silence.

    Python takes another folder if TMPDIR can't be written. What can't be loaded from one is done
    without.
    """
    small.make_all(folder)
    (folder / "file").touch()
    (folder / "mounted").mkdir()
    cases = list(itertools.product(_TEMPORARY, COMMANDS))
    for (kind, name), _ in tally.chosen(cases, tally.wanted):
        place, options = _TEMPORARY[kind]
        env = {"TMPDIR": str(folder / place), "HOME": "/dev/null/home", **_NO_CACHE}
        through = _mounting(folder / place, options) if options else []
        done = commands.alone(COMMANDS[name], folder, env=env, through=through)
        chatter = "matplotlib" in done.stderr.lower()
        fault = done.fault() or (done.stderr[-300:] if done.code or chatter else None)
        tally.count(fault, f"{name}, TMPDIR {kind}")
