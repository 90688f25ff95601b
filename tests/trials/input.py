"""Whatever is typed or read, a command succeeds or says in two lines why not."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random

import attnlm
from attnlm.base.folders import flag
from attnlm.config.settings import RECORD_OF
from attnlm.model.architecture import RUNGS
from tests import command as commands
from tests.trials import small
from tests.trials.trial import Tally, Trial, place

_LONGEST_REFUSAL = 1500  # characters of an error and its hint; a path may be part of it
_PER_PROCESS = 50  # cases made in this process for each that has a process of its own
_FULL = 10_000


@Trial("input", short=50, full=_FULL)
def _input(tally: Tally, folder: Path) -> None:
    """Whatever is typed or read: success, or an error and a hint with exit code 1 or 2.

    The named cases, and so many drawn ones, some of which have a process of their own too.
    """
    small.make_all(folder / "made")
    named = list(_NAMED.items())[: None if tally.wanted >= _FULL else -1]
    with contextlib.chdir(folder / "made"):
        for (name, case), _ in tally.chosen(named, len(named)):
            with place(folder) as here:
                tally.count(case(here), name)
        for number, generator in tally.drawn(tally.wanted, len(_NAMED)):
            with place(folder) as here:
                arguments, stdin = generator.choice(_COMMANDS)(here, generator)
                done = commands.here(arguments, stdin)
                fault = done.fault() or _checked(done, arguments)
                tally.count(fault, f"{arguments} {stdin[:40]!r}")
                if number % _PER_PROCESS == 0 and "\0" not in "".join(arguments):
                    shutil.rmtree(here / "data", ignore_errors=True)
                    alone = commands.alone(arguments, Path.cwd(), stdin)
                    fault = alone.fault()
                    if fault is None and alone.code != done.code:
                        fault = f"exit code {alone.code} by itself, {done.code} here"
                    tally.count(fault, f"by itself, {arguments}")


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


def _words(generator: Random, flags: tuple[str, ...]) -> list[str]:
    """Return some flags, most with a value, in all kinds of wrong ways; rarely one flag twice."""
    words: list[str] = []
    some = generator.sample(flags, generator.choice((0, 1, 1, 2, 2, 3, 5)))
    for name in some + some[: generator.random() < 0.1]:
        value = generator.choice(_WORDS)
        part = name[: generator.randrange(2, len(name) + 1)]
        odd = ([name], [f"{name}={value}"], [value], [part, value])
        words += generator.choice((*odd, *[[name, value]] * 8))
    return words


def _settings(place: Path, generator: Random) -> _Command:
    flags = (*map(flag, RECORD_OF), "--recipe", "--no-projection", "--json", "-q")
    return ["train", "--print-config", *_words(generator, flags)], b""


_TOML = ('"muon"', "'x'", "1979-05-27", "[1, 2]", "{a = 1}", '"""a', "1e3", "+inf")


def _recipe(place: Path, generator: Random) -> _Command:
    lines = []
    for _ in range(generator.randrange(6)):
        key = generator.choice((*RECORD_OF, "config", "a.b", '""', "[model]", "é"))
        value = generator.choice((*_WORDS, *_TOML))
        if generator.random() < 0.1:
            key += generator.choice(("x", ".x", '."é"')) * generator.choice((100, 1500, 4000))
        if generator.random() < 0.1:
            n = generator.choice((100, 400, 5000))
            deep = (f"0x{'f' * n}", "9" * n, f"{'[' * n}1{']' * n}", "{a = " * n)
            value = generator.choice(deep)
        lines.append(f"{key}{generator.choice((' = ', '=', ': ', ' '))}{value}")
    text = generator.choice(("\n", "\n", "\r\n", ",")).join(lines)
    if generator.random() < 0.3:
        text = '{"config": {' + ", ".join(f'"{line}' for line in lines) + "}}"
    content = bytearray(text.encode(errors="surrogateescape"))
    for _ in range(generator.choice((0, 0, 0, 1, 5))):
        content.insert(generator.randrange(len(content) + 1), generator.randrange(256))
    path = place / generator.choice(("a.toml", "a.json", "a"))
    path.write_bytes(content)
    return ["train", "--print-config", "--recipe", str(path)], b""


_PIECES = (
    *(b"the cat sat. ", b"a", b"\n", b"\r\n", b"\r", b"\0", b"\t", b" " * 40, "é".encode()),
    *("🙂".encode(), "e\u0301".encode(), "👩‍👩‍👧".encode(), "日本語".encode(), codecs.BOM_UTF8),
    *(b"\xff", b"\xfe", b"\xed\xa0\x80", b"\xe9", b"\xf0\x9f", b"\x80", b"<|endoftext|>"),
    *("text".encode("utf-16"), "more\n".encode("utf-16-le"), "\u2028".encode(), b"'ll 12"),
    *(b"\x1a", b"\x1b[0m"),
)
_TIDY = tuple(piece for piece in _PIECES if piece.isascii() and b"\0" not in piece)


def _text(place: Path, generator: Random) -> _Command:
    """A file, or stdin, of pieces that do not always fit an encoding."""
    pieces = generator.choice((_PIECES, _TIDY, _TIDY))
    content = b"".join(generator.choices(pieces, k=generator.choice((0, 1, 2, 5, 40, 300))))
    path = place / generator.choice(("a.txt", "b", "c d é.txt"))
    path.write_bytes(content)
    source = generator.choice((str(path), str(path), str(place), "-"))
    words = ["--data-dir", str(place / "data"), *_some(_OF_PREPARE, 0.4, generator)]
    return ["prepare", source, *words], content if source == "-" else b""


_OF_PREPARE = {
    "--tokenizer": ("char", "byte", "bpe:257", "bpe:300", "gpt2x", ""),
    "--encoding": ("utf-8", "latin-1", "utf-16", "utf-16-le", "ascii", "shift_jis", "utf-7"),
    "--newlines": ("unix", "keep", "dos"),
    "--val-fraction": ("0.5", "0.001", "0.999", "0", "1", "nan"),
    "--split": ("tail", "documents", "head"),
    "--split-seed": ("0", "7", "-1", "9" * 30),
    "--name": ("a b", "é", "con", "..", "x" * 130, "🙂"),
}
_OF_TRAIN = {
    "--model": RUNGS,
    "--heads": ("1", "2", "3"),
    "--embed-dim": ("1", "2", "6", "8"),
    "--head-size": ("1", "2", "5"),
    "--layers": ("1", "2"),
    "--block-size": ("1", "2", "9", "100000"),
    "--batch-size": ("1", "3"),
    "--stride": ("1", "7", "100000"),
    "--sampling": ("epoch", "random"),
    "--optimizer": ("adamw", "muon"),
    "--learning-rate": ("1e-30", "0.1", "100"),
    "--warmup": ("0", "2", "3"),
    "--eval-every": ("1", "5"),
    "--gradient-clip": ("1e-30", "1"),
    "--dropout": ("0", "0.99"),
    "--dtype": ("float32", "bfloat16"),
    "--name": ("a b", "é", "..", "latest"),
}


def _some(flags: Mapping[str, Sequence[str]], often: float, generator: Random) -> Iterator[str]:
    """Yield some of these flags, each with one of its values."""
    for name, values in flags.items():
        if generator.random() < often:
            yield from (name, generator.choice(values))


def _any_prepare(place: Path, generator: Random) -> _Command:
    flags = ("--tokenizer", "--val-fraction", "--val-file", "--name", "--encoding", "--force")
    words = _words(generator, (*flags, "--split", "--split-seed", "--json"))
    return ["prepare", "--offline", "--data-dir", str(place / "data"), *words], b"abc\n" * 9


def _sample(place: Path, generator: Random) -> _Command:
    flags = ("--temperature", "--top-k", "--top-p", "--seed", "--checkpoint", "--device", "--json")
    words = _words(generator, flags) if generator.random() < 0.6 else []
    parts = ("12 apples", "é", "\n", "🙂", "\udcff", "", "\x00", " ")
    prompt = "".join(generator.choices(parts, k=generator.randrange(4)))
    how = generator.choice((["--prompt", prompt], ["--prompt", "-"], ["-i"], []))
    stdin = b"".join(generator.choices(_PIECES, k=generator.randrange(3)))
    tokens = generator.choice(("0", "1", "5", "-1"))
    return ["sample", "--tokens", tokens, *how, *words], stdin


def _train(place: Path, generator: Random) -> _Command:
    """Small runs with settings that may not fit each other."""
    words = ["--steps", "2", "--threads", "1", "--checkpoint-dir", str(place)]
    words += _some(_OF_TRAIN, 0.3, generator)
    return ["train", generator.choice(("fruits-char", "fruits-bpe260")), *words], b""


_COMMANDS = (
    *(_settings, _settings, _settings, _recipe, _recipe),
    *(_text, _any_prepare, _sample, _train),
)


def _checked(done: commands.Done, arguments: list[str]) -> str | None:
    """Return what is wrong if a prepared text is not the given one, or a refusal is long."""
    if "--recipe" in arguments and done.code and len(done.stderr) > _LONGEST_REFUSAL:
        return f"its refusal has {len(done.stderr):,} characters"
    if done.code != 0 or arguments[0] != "prepare" or arguments[1] == "--offline":
        return None
    path = Path(arguments[1])
    return _differs(path, Path(done.stdout.strip()), arguments) if path.is_file() else None


def _differs(source: Path, data: Path, flags: Sequence[str] = ()) -> str | None:
    """Return what is wrong if a data set, prepared with these flags, has another text."""
    encoding = flags[flags.index("--encoding") + 1] if "--encoding" in flags else "utf-8"
    dataset = attnlm.open_dataset(data)
    text = dataset.tokenizer.decode([*dataset.train.tolist(), *dataset.val.tolist()])
    expected = source.read_bytes().decode(encoding).removeprefix("\ufeff")
    if "unix" in flags:
        expected = expected.replace("\r\n", "\n").replace("\r", "\n")
    return None if text == expected else "the text does not come back as it was"


# --- Named cases: test_corpus.py and test_preparation.py have others ------------------------------


def _recipe_of(content: Callable[[], str], file: str = "a.toml") -> Callable[[Path], str | None]:
    """A recipe with this content is refused, in a few words and in time."""

    def run(place: Path) -> str | None:
        (place / file).write_text(content())
        arguments = ["train", "--print-config", "--recipe", str(place / file)]
        began = time.monotonic()
        done = commands.here(arguments)
        if (took := time.monotonic() - began) > _LONGEST_READING:
            return f"it took {took:.0f} s"
        return done.fault() or _checked(done, arguments) or (None if done.code else "accepted")

    return run


_LONGEST_READING = 20.0  # seconds
_DEEP, _HUGE = 2**18, 10**7
_RECIPES: dict[str, Callable[[], str]] = {
    "lists in lists": lambda: f"heads = {'[' * _DEEP}",
    "lists in lists, closed": lambda: f"heads = {'[' * 400}{']' * 400}",
    "tables in tables": lambda: f"heads = {'{a = ' * _DEEP}",
    "tables in tables, closed": lambda: f"heads = {'{a = ' * 200}1{'}' * 200}",
    "a table's name of many parts": lambda: f"[a{'.a' * _DEEP}]",
    "a key of many parts": lambda: f"heads{'.a' * _DEEP} = 1",
    "a key of some thousand parts": lambda: f"heads{'.a' * 4000} = 1",
    "a key of one part more each line": lambda: "\n".join(
        f"heads{'.a' * i} = 1" for i in range(2, 120)
    ),
    "a long key": lambda: f"{'k' * _DEEP} = 1",
    "a key of 10 MB": lambda: f"{'k' * _HUGE} = 1",
    "a huge number": lambda: f"heads = {'9' * _DEEP}",
    "a huge number in base 16": lambda: f"heads = 0x{'f' * 10_000}",
    "a huge number for a real one": lambda: f"budget = 0x{'f' * 10_000}",
    "a huge number in a list": lambda: f"heads = [0x{'f' * 10_000}]",
    "a long text": lambda: f"model = '{'x' * 10_000}'",
    "10 MB of comments": lambda: "# comment\n" * (_HUGE // 10),
    "10 MB of keys": lambda: "".join(f"k{i} = 1\n" for i in range(_HUGE // 12)),
    "10 MB of tables": lambda: "[[a]]\n" * (_HUGE // 6),
    "many keys": lambda: "".join(f"k{i} = 1\n" for i in range(1000)),
}


def _pipe(place: Path) -> str | None:
    os.mkfifo(place / "pipe")
    content = b"the cat sat on the mat.\n" * 99
    writer = threading.Thread(target=(place / "pipe").write_bytes, args=(content,))
    writer.start()
    done = commands.here(["prepare", str(place / "pipe"), "--data-dir", str(place / "data")])
    writer.join()
    (place / "text.txt").write_bytes(content)
    return done.fault() or _differs(place / "text.txt", Path(done.stdout.strip()))


def _unreadable(place: Path) -> str | None:
    path = place / "text.txt"
    path.write_text("text")
    path.chmod(0)
    if os.access(path, os.R_OK):
        return None  # root may read all
    done = commands.here(["prepare", str(path), "--data-dir", str(place / "data")])
    return done.fault() or (None if "Permission denied" in done.stderr else done.stderr)


# Started by a process without torch: of a child, the system counts what its parent had.
_MEASURED = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:])
taken = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
sys.exit(code or (f"it took {taken} KiB" if taken > 100 * 2**10 else 0))
"""


def _endless_line(place: Path) -> str | None:
    """2 GB without a line's end, through a pipe: a command takes at most 100 MiB of memory."""
    script = "head -c 2147483648 /dev/zero | tr '\\0' a | \"$@\""
    through = ["bash", "-c", script, "bash", sys.executable, "-c", _MEASURED]
    flags = ["--data-dir", str(place / "data"), "--tokenizer", "byte"]
    done = commands.alone(["prepare", "-", *flags], place, through=through)
    return None if done.code == 0 else done.stderr[-300:]


_NAMED: dict[str, Callable[[Path], str | None]] = {
    "a pipe": _pipe,
    "no permission": _unreadable,
    **{f"a recipe: {name}": _recipe_of(content) for name, content in _RECIPES.items()},
    "a configuration: a key of 1 MB": _recipe_of(
        lambda: json.dumps({"config": {"heads" * 200_000: 1}}), "config.json"
    ),
    "one line of 2 GB": _endless_line,
}
