"""Any folder, any locale, no home, any terminal: the commands work."""

from __future__ import annotations

import itertools
import os
import sys
import unicodedata
from pathlib import Path
from random import Random

from tests import kit
from trials.trial import Tally, Trial

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


@Trial("anywhere", short=0, full=len(_PLACES) * len(_SURROUNDINGS))
def _anywhere(tally: Tally, folder: Path) -> None:
    """Odd paths, other locales, no home, other terminals: the commands work.

    Each case runs three commands in an odd folder, with odd environment variables.
    """
    everywhere = list(itertools.product(_PLACES, _SURROUNDINGS))
    for (place, env), generator in tally.chosen(everywhere, tally.wanted):
        names = ", ".join(f"{key}={value}" for key, value in env.items())
        fault = _three_commands(folder / str(tally.number) / place, generator, env)
        tally.count(fault, f"in {place!r} with {names}")


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
    done = kit.run_in_new_process(arguments, place, env=env, through=through)
    if done.code != 0 or done.fault():
        return f"{arguments} ended with {done.code}: {done.stderr[-300:]}"
    sampled = done.stdout[-12:]
    return None if sampled[:3] == "\nαβ" else f"sampled {sampled!r}"
