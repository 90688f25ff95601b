"""Whatever is typed or read, and wherever: a command succeeds, or says in two lines why not."""

from __future__ import annotations

import codecs
import os
import shutil
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

import pytest

import attnlm
from attnlm.base.folders import flag
from attnlm.config.settings import RECORD_OF
from attnlm.model.architecture import RUNGS
from tests import kit
from trials.kit import forked


@pytest.mark.parametrize("case", range(10_000))
@forked
def test_a_drawn_command_succeeds_or_gives_an_error_and_a_hint(
    case: int, project_copy: Path, place: Path, generator: Random
) -> None:
    """Every fiftieth command is also run by itself, and must end with the same code."""
    os.chdir(project_copy)
    arguments, stdin = generator.choice(_COMMANDS)(generator)
    shutil.copytree(project_copy, place / "again")
    done = kit.try_command(arguments, stdin)
    assert done.fault() is None, (arguments, stdin)
    if done.code == 0 and arguments[1].startswith("texts/"):
        at = arguments.index("--encoding") + 1 if "--encoding" in arguments else 0
        expected = Path(arguments[1]).read_bytes().decode(arguments[at] if at else "utf-8")
        dataset = attnlm.open_dataset(Path(done.stdout.strip()))
        text = dataset.tokenizer.decode([*dataset.train.tolist(), *dataset.val.tolist()])
        assert text == expected.removeprefix("\ufeff"), (arguments, "it is another text")
    if case % 50 == 0 and "\0" not in "".join(arguments):
        alone = kit.run_in_new_process(arguments, place / "again", stdin)
        assert alone.fault() is None and alone.code == done.code, (arguments, stdin, alone)


# --- Drawn commands -------------------------------------------------------------------------------

_Command = tuple[list[str], bytes]
_WORDS = (
    *("0", "1", "2", "3", "7", "16", "64", "-1", "-5", "007", "1_000", "٣", "½", "1e3", "0x10"),
    *("0.1", "0.5", ".9", "1.5", "-0.5", "nan", "inf", "-inf", "1e400", "1e-400", "9" * 30),
    *("", " ", "-", "--", "---", "\n", "a\nb", "\x1b[31m", "\udcff", "é", "🙂", "x" * 300, "a\0b"),
    *("true", "none", "auto", "cpu", "cuda", "mps", "char", "byte", "bpe:300", "bpe:257", "bpe:0"),
    *("tales", "fruits.txt", "data", "..", "/", ".", "/dev/null", "small", "fruits-char", "latest"),
    *("epoch", "random", "muon", "adamw", "linear", "cosine", "matrices", "all", "best", "last"),
    *("utf-8", "utf-16", "latin-1", "rot13", "base64", "idna", "punycode", "utf-7", "10s", "5m"),
    *RUNGS,
)
_TOML = ('"muon"', "'x'", "1979-05-27", "[1, 2]", "{a = 1}", '"""a', "1e3", "+inf")
_PIECES = (
    *(b"the cat sat. ", b"a", b"\n", b"\r\n", b"\r", b"\0", b"\t", b" " * 40, "é".encode()),
    *("🙂".encode(), "e\u0301".encode(), "👩‍👩‍👧".encode(), "日本語".encode(), codecs.BOM_UTF8),
    *(b"\xff", b"\xfe", b"\xed\xa0\x80", b"\xe9", b"\xf0\x9f", b"\x80", b"<|endoftext|>"),
    *("text".encode("utf-16"), "more\n".encode("utf-16-le"), "\u2028".encode(), b"'ll 12"),
    *(b"\x1a", b"\x1b[0m"),
)
_TIDY = tuple(piece for piece in _PIECES if piece.isascii() and b"\0" not in piece)
_OF_PREPARE = {
    "--tokenizer": ("char", "byte", "bpe:257", "bpe:300", "gpt2x", ""),
    "--encoding": ("utf-8", "latin-1", "utf-16", "utf-16-le", "ascii", "shift_jis", "utf-7"),
    "--val-fraction": ("0.5", "0.001", "0.999", "0", "1", "nan"),
    "--split": ("tail", "documents", "head"),
    "--name": ("a b", "é", "con", "..", "x" * 130, "🙂"),
}
_SIZES = ("--heads", "--embed-dim", "--head-size", "--layers", "--batch-size", "--warmup")
_OF_TRAIN = {
    "--model": RUNGS,
    **dict.fromkeys((*_SIZES, "--eval-every"), ("1", "2", "5", "6", "9")),
    **dict.fromkeys(("--learning-rate", "--gradient-clip"), ("1e-30", "0.1", "100")),
    **dict.fromkeys(("--block-size", "--stride"), ("1", "2", "9", "100000")),
    "--sampling": ("epoch", "random"),
    "--optimizer": ("adamw", "muon"),
    "--dropout": ("0", "0.99"),
    "--dtype": ("float32", "bfloat16"),
    "--name": ("a b", "é", "..", "latest"),
}
_OF_SAMPLE = ("--temperature", "--top-k", "--top-p", "--prompt")
_FLAGS = {
    "train --print-config": (*map(flag, RECORD_OF), "--recipe", "--no-projection", "--json", "-q"),
    "prepare --offline": (*_OF_PREPARE, "--val-file", "--force", "--json"),
    "sample --tokens 5": (*_OF_SAMPLE, "--seed", "-i", "--checkpoint", "--device", "--json"),
}


def _any_flags(generator: Random) -> _Command:
    """Some flags, most with a value, in all kinds of wrong ways; rarely one flag twice."""
    beginning = generator.choice(list(_FLAGS))
    words = beginning.split()
    some = generator.sample(_FLAGS[beginning], generator.choice((0, 1, 1, 2, 2, 3, 5)))
    for name in some + some[: generator.random() < 0.1]:
        value = generator.choice(_WORDS)
        part = name[: generator.randrange(2, len(name) + 1)]
        odd = ([name], [f"{name}={value}"], [value], [part, value])
        words += generator.choice((*odd, *[[name, value]] * 8))
    return words, b"".join(generator.choices(_PIECES, k=generator.randrange(3)))


def _recipe(generator: Random) -> _Command:
    lines = []
    for _ in range(generator.randrange(6)):
        key = generator.choice((*RECORD_OF, "config", "a.b", '""', "[model]", "é"))
        value = generator.choice((*_WORDS, *_TOML))
        lines.append(f"{key}{generator.choice((' = ', '=', ': ', ' '))}{value}")
    text = generator.choice(("\n", "\n", "\r\n", ",")).join(lines)
    if generator.random() < 0.3:
        text = '{"config": {' + ", ".join(f'"{line}' for line in lines) + "}}"
    content = bytearray(text.encode(errors="surrogateescape"))
    for _ in range(generator.choice((0, 0, 0, 1, 5))):
        content.insert(generator.randrange(len(content) + 1), generator.randrange(256))
    path = Path(generator.choice(("a.toml", "a.json", "a")))
    path.write_bytes(content)
    return ["train", "--print-config", "--recipe", str(path)], b""


def _some(flags: Mapping[str, Sequence[str]], often: float, generator: Random) -> list[str]:
    """Return some of these flags, each with one of its values."""
    some = [name for name in flags if generator.random() < often]
    return [word for name in some for word in (name, generator.choice(flags[name]))]


def _text(generator: Random) -> _Command:
    """A file, a folder, or stdin, of pieces that do not always fit an encoding."""
    pieces = generator.choice((_PIECES, _TIDY, _TIDY))
    content = b"".join(generator.choices(pieces, k=generator.choice((0, 1, 2, 5, 40, 300))))
    path = Path("texts", generator.choice(("a.txt", "b", "c d é.txt")))
    path.parent.mkdir()
    path.write_bytes(content)
    source = generator.choice((str(path), str(path), "texts", "-"))
    return ["prepare", source, *_some(_OF_PREPARE, 0.4, generator)], content


def _train(generator: Random) -> _Command:
    """A small run with settings that may not fit each other."""
    data = generator.choice(("fruits-char", "fruits-bpe260"))
    words = ["train", data, "--steps", "2", "--threads", "1"]
    return [*words, *_some(_OF_TRAIN, 0.3, generator)], b""


_COMMANDS = (*[_any_flags] * 5, _recipe, _recipe, _text, _train)


# --- Environments ---------------------------------------------------------------------------------

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


@pytest.mark.parametrize("variables", _SURROUNDINGS)
@pytest.mark.parametrize("folder", _PLACES, ids=range(len(_PLACES)))
def test_commands_work_in_any_folder_and_environment(
    folder: str, variables: dict[str, str | None], place: Path, generator: Random
) -> None:
    """Prepare, train and sample there, by names or by paths."""
    here = place / folder
    here.mkdir()
    name = generator.choice(("text.txt", "Wörter 日本.txt", "a b"))
    (here / name).write_text("αβγ δεζ ηθι. " * 40, encoding="utf-8")
    folders = generator.choice(([], ["--data-dir", "d é"]))
    runs = generator.choice(([], ["--checkpoint-dir", str(here / "läufe")]))
    source = generator.choice((name, str(here / name)))
    arguments = ["prepare", source, *folders, ";"]
    arguments += ["train", "--steps=1", "--threads=1", "--block-size=4", *folders, *runs, ";"]
    arguments += ["sample", "--tokens=9", "--prompt=αβ", *runs, ";"]
    through = (sys.executable, "-c", _ONE_AFTER_ANOTHER)
    done = kit.run_in_new_process(arguments, here, env=variables, through=through)
    assert done.code == 0 and done.fault() is None, (arguments, done)
    assert done.stdout[-12:-9] == "\nαβ"
