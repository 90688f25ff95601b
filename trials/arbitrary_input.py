"""Whatever is typed or read, a command succeeds or says in two lines why not."""

from __future__ import annotations

import codecs
import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random

import attnlm
from attnlm.base.folders import flag
from attnlm.config.settings import RECORD_OF
from attnlm.model.architecture import RUNGS
from tests import kit
from trials import small_projects
from trials.trial import Tally, Trial, place

_PER_PROCESS = 50  # cases made in this process for each that has a process of its own


@Trial("input", short=50, full=10_000)
def _input(tally: Tally, folder: Path) -> None:
    """Whatever is typed or read: success, or an error and a hint with exit code 1 or 2.

    Some of the drawn commands are also run in a process of their own.
    """
    small_projects.make_all(folder / "made")
    with contextlib.chdir(folder / "made"):
        for number, generator in tally.drawn(tally.wanted):
            with place(folder) as here:
                arguments, stdin = generator.choice(_COMMANDS)(here, generator)
                done = kit.try_command(arguments, stdin)
                fault = done.fault() or _checked(done, arguments)
                tally.count(fault, f"{arguments} {stdin[:40]!r}")
                if number % _PER_PROCESS == 0 and "\0" not in "".join(arguments):
                    shutil.rmtree(here / "data", ignore_errors=True)
                    alone = kit.run_in_new_process(arguments, Path.cwd(), stdin)
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
    "--val-fraction": ("0.5", "0.001", "0.999", "0", "1", "nan"),
    "--split": ("tail", "documents", "head"),
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
    words = _words(generator, (*flags, "--split", "--json"))
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


def _checked(done: kit.Done, arguments: list[str]) -> str | None:
    """Return what is wrong if a prepared text is not the given one."""
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
