"""A text becomes a data set that is exact, complete or absent, and small in memory.

Each test is in a folder with cats.txt. What fails by its arguments or its text is in errors.toml.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnlm import AttnlmError, Note, Progress, open_dataset, prepare
from attnlm.base.events import ignore
from attnlm.data import prepare as preparation
from attnlm.data import spool
from attnlm.data.dataset import id_dtype
from attnlm.text.corpus import Corpus, get_corpus
from attnlm.text.text_files import TextFile
from tests.models import contents
from tests.web_server import WebServer, body

TEXT = "The cat sat.\nThe naïve cat's hat: 猫!\n" * 40
DATA, FOLDER = Path("data"), Path("data/cats-char")


@pytest.fixture(autouse=True)
def source(here: Path) -> Path:
    path = Path("cats.txt")
    path.write_bytes(TEXT.encode())
    return path


def entries(folder: Path = DATA) -> set[str]:
    return {path.name for path in folder.iterdir()}


def notes_of(events: list[object]) -> list[str]:
    return [event.text for event in events if isinstance(event, Note)]


@pytest.mark.parametrize("spec", ["char", "byte", "bpe:300"])
def test_splits_are_encoded_separately_and_decode_to_the_text(spec: str) -> None:
    dataset = prepare("cats.txt", tokenizer=spec, val_fraction=0.25)
    cut = len(TEXT) * 3 // 4
    for ids, text in ((dataset.train, TEXT[:cut]), (dataset.val, TEXT[cut:])):
        assert dataset.tokenizer.decode(ids) == text
        assert np.array_equal(ids, dataset.tokenizer.encode(text))
    assert (dataset.name, dataset.tokenizer.name) == ("cats-" + spec.replace(":", ""), spec)
    assert dataset.path == DATA / dataset.name
    assert (dataset.train_tokens, dataset.val_tokens) == (len(dataset.train), len(dataset.val))


def test_meta_json_says_what_was_done() -> None:
    events: list[object] = []
    prepare("cats.txt", on_event=events.append)
    assert events[-1] == Progress("encode", len(TEXT), len(TEXT), "chars")
    meta = json.loads((FOLDER / "meta.json").read_text(encoding="utf-8"))
    cut = len(TEXT) * 9 // 10
    sizes = {"characters": len(TEXT), "train_tokens": cut, "val_characters": len(TEXT) - cut}
    sizes |= {"val_bytes": len(TEXT[cut:].encode()), "vocab_size": len(set(TEXT))}
    origin = {"name": "cats-char", "sources": ["cats.txt"], "options": {}, "val_fraction": 0.1}
    origin |= {"source_sha256": hashlib.sha256(TEXT.encode()).hexdigest(), "dtype": "uint16"}
    expected = {**sizes, **origin, "val_source": None, "floor": None}
    assert {key: meta[key] for key in expected} == expected
    for name in ("train.bin", "val.bin", "tokenizer.json"):
        hashed = hashlib.sha256((FOLDER / name).read_bytes()).hexdigest()
        assert meta["files"][name] == hashed
    assert (FOLDER / "train.bin").stat().st_size == 2 * cut
    assert entries(FOLDER) == {"meta.json", "train.bin", "val.bin", "tokenizer.json"}
    assert (DATA / "latest").read_text() == "cats-char\n"
    assert entries() == {"cats-char", "latest"}


@pytest.mark.parametrize(
    ("characters", "fraction", "train"),
    [(20, 0.9, 2), (100, 0.29, 71), (10, 0.3, 7), (11, 0.1, 9), (1000, 1e-2, 990)],
)
def test_the_split_is_exact_to_the_character(
    characters: int, fraction: float, train: int, source: Path
) -> None:
    source.write_text("ab" * (characters // 2) + "c" * (characters % 2))
    dataset = prepare(source, val_fraction=fraction)
    assert (dataset.train_characters, dataset.val_characters) == (train, characters - train)


def test_a_validation_file_leaves_the_whole_source_to_train_on() -> None:
    val = Path("val.txt")
    val.write_text("Dogs: Ω!", encoding="utf-8")
    dataset = prepare("cats.txt", val_file=val)
    assert dataset.tokenizer.decode(dataset.train) == TEXT
    assert dataset.tokenizer.decode(dataset.val) == "Dogs: Ω!"
    assert dataset.vocab_size == len(set(TEXT + "Dogs: Ω!"))
    assert dataset.characters == len(TEXT) + 8
    assert (dataset.val_bytes, dataset.val_fraction) == (9, None)
    assert dataset.bytes_per_token == 9 / 8
    val.write_text("Dogs?")
    with pytest.raises(AttnlmError, match="other content"):
        prepare("cats.txt", val_file=val)
    val.write_text("T")
    with pytest.raises(AttnlmError, match=r"validation split of val\.txt has fewer") as caught:
        prepare("cats.txt", val_file=val, force=True)
    assert caught.value.hint == "use a longer text"


def test_a_large_text_is_sampled_evenly(
    source: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "SAMPLE_BYTES", 2000)
    monkeypatch.setattr(spool, "_SAMPLE_BLOCK", 100)
    source.write_text("ab" * 5000 + "cd" * 5000 + "ef" * 5000)
    text = spool.read_spool(get_corpus([source], spool=here), here / "spool", ignore)
    sample = "".join(text.parts(Fraction("0.1"), False)[0].sample())
    assert 1600 <= len(sample) <= 2000
    counts = {pair: sample.count(pair) // 100 for pair in ("ab", "cd", "ef")}
    assert counts == {"ab": 3, "cd": 3, "ef": 2}


def test_many_distinct_characters_need_four_bytes(source: Path) -> None:
    text = "".join(map(chr, [*range(32, 0xD800), *range(0xE000, 0x14000)]))
    source.write_text(text, encoding="utf-8")
    dataset = prepare(source)
    assert dataset.train.dtype == np.dtype("<u4")
    assert dataset.tokenizer.decode(dataset.val) == text[-len(dataset.val) :]
    assert dataset.val[-1] == len(text) - 1 > 65535
    assert dataset.bigram_loss is None
    assert (id_dtype(65536), id_dtype(65537)) == (np.dtype("<u2"), np.dtype("<u4"))


def test_the_floor_is_the_nats_of_the_validation_split_by_its_tokens(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = len(TEXT) // 2
    file = TextFile(source, "stories")
    corpus = Corpus("stories", ("stories",), (file,), floor_nats={0: 90.0, half: 45.0})
    monkeypatch.setattr("attnlm.data.prepare.get_corpus", lambda *_, **__: corpus)
    assert prepare(val_fraction=0.5).floor == 45 / half
    pairs = prepare(val_fraction=0.5, tokenizer="bpe:300")
    assert pairs.floor == 45 / pairs.val_tokens > 45 / half
    assert prepare(val_fraction=0.4, name="in-a-story").floor is None
    assert prepare(val_file=source, name="other-text").floor is None


def test_tiny_shakespeare_has_its_known_sizes() -> None:
    folder = os.environ.get("ATTNLM_TEST_DATA")
    if not folder:
        pytest.skip("ATTNLM_TEST_DATA names no folder with tinyshakespeare.txt")
    dataset = prepare(Path(folder) / "tinyshakespeare.txt")
    assert (dataset.characters, dataset.vocab_size) == (1_115_394, 65)
    assert (dataset.train_tokens, dataset.val_tokens) == (1_003_854, 111_540)
    assert round(dataset.bigram_loss or 0, 4) == 2.4819
    assert dataset.source_sha256.startswith("86c4e6aa9db7c042")


def test_line_ends_are_kept_and_their_files_are_named() -> None:
    content = "One line.\r\nAnother\rline.\r\n" * 40
    Path("pets").mkdir()
    for name, text in {"a.txt": "One.\n" * 90, "b.txt": content, "c.txt": content}.items():
        Path("pets", name).write_bytes(text.encode())
    events: list[object] = []
    dataset = prepare("pets", on_event=events.append)
    assert dataset.tokenizer.decode([*dataset.train, *dataset.val]).endswith(2 * content)
    assert any(note.startswith("pets/b.txt, pets/c.txt: carriage") for note in notes_of(events))


def test_several_sources_are_one_text_however_long_their_names(web: WebServer, here: Path) -> None:
    Path("dogs.txt").write_text("Dogs. " * 30)
    dataset = prepare(["dogs.txt", "cats.txt"])
    assert open_dataset(dataset.path).sources == dataset.sources == ("dogs.txt", "cats.txt")
    with pytest.raises(AttnlmError, match="other content"):
        prepare(["cats.txt", "dogs.txt"], name=dataset.name)
    long = Path(here, *["é" * 60] * 20)
    long.mkdir(parents=True)
    (long / "a").write_text("Dogs.")
    url = web.answer("/cats?" + "a" * 9000, body(TEXT.encode()))
    assert len(prepare([url, *[long / "a"] * 300]).sources) == 301


def test_a_text_too_small_for_the_defaults_is_reported(source: Path) -> None:
    def notes_about(characters: int) -> list[str]:
        source.write_text("abcdefghij" * (characters // 10))
        events: list[object] = []
        prepare(source, name=f"of-{characters}", on_event=events.append)
        return [note for note in notes_of(events) if "too small" in note]

    assert not notes_about(650)  # a context of 64 needs 65 tokens to validate
    for _ in range(2):  # also where it is prepared already
        (note,) = notes_about(640)
        assert "the validation split has 64 tokens" in note
        assert "`block_size` 63 or less" in note and "a larger `val_fraction`" in note
    assert open_dataset("of-640").largest_block_size == 63


def test_a_text_that_changes_after_it_was_read_is_the_text_that_was_read() -> None:
    def change(event: object) -> None:
        if isinstance(event, Progress) and event.task == "read":
            Path("cats.txt").write_text("Ω")

    dataset = prepare("cats.txt", on_event=change)
    assert dataset.tokenizer.decode([*dataset.train, *dataset.val]) == TEXT


# --- What is there already ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cats.txt", "web"])
def test_a_longer_text_than_is_allowed_leaves_nothing(name: str, web: WebServer) -> None:
    source = web.answer("/cats.txt", body(TEXT.encode())) if name == "web" else name
    size = len(TEXT.encode())
    with pytest.raises(AttnlmError, match=f"has more than {size - 1:,} bytes"):
        prepare(source, max_bytes=size - 1)
    assert entries() == set()
    assert prepare(source, max_bytes=size).characters == len(TEXT)


def test_a_long_text_stops_before_the_disk_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk._replace(total=10**12, free=10**8))
    prepare("cats.txt", name="small")
    monkeypatch.setattr("attnlm.text.text_files._SMALL", 100)
    with pytest.raises(AttnlmError, match=r"only 100 MB of the disk is free: cats\.txt"):
        prepare("cats.txt")


def test_a_variable_of_the_hub_forbids_the_network(
    web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(AttnlmError, match="needs the network, but `offline` is set"):
        prepare(web.answer("/cats.txt", body(TEXT.encode())))
    assert not web.asked


def test_a_full_disk_is_one_line_and_the_old_data_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare("cats.txt")
    before = contents(DATA)

    def full(path: Path, sealed: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(preparation, "write_json", full)
    with pytest.raises(AttnlmError, match=r"^cannot write data: No space left on device\nhint"):
        prepare("cats.txt", val_fraction=0.5, force=True)
    assert contents(DATA) == before
    with pytest.raises(AttnlmError, match=r"cannot write .*cats\.txt"):
        prepare("cats.txt", data_dir="cats.txt")


def test_the_same_content_is_left_as_it_is() -> None:
    first = prepare("cats.txt")
    written = {path: path.stat().st_mtime_ns for path in FOLDER.iterdir()}
    prepare("cats.txt", tokenizer="byte")
    events: list[object] = []
    again = prepare("cats.txt", on_event=events.append)
    assert again.path == first.path
    assert {path: path.stat().st_mtime_ns for path in FOLDER.iterdir()} == written
    (note,) = notes_of(events)
    assert "prepared from the same text" in note and first.source_sha256[:12] in note
    assert (DATA / "latest").read_text() == "cats-char\n"


def test_other_or_damaged_content_needs_force() -> None:
    prepare("cats.txt")
    before = contents(DATA)
    for options in ({"val_fraction": 0.5}, {"tokenizer": "byte", "name": "cats-char"}):
        with pytest.raises(AttnlmError, match="other content") as caught:
            prepare("cats.txt", **options)
        assert "`force`" in caught.value.hint and "`name`" in caught.value.hint
    assert contents(DATA) == before
    (FOLDER / "val.bin").write_bytes(b"damage")
    with pytest.raises(AttnlmError, match=r"val\.bin is damaged"):
        prepare("cats.txt")
    assert prepare("cats.txt", val_fraction=0.5, force=True).val_characters == len(TEXT) // 2
    (DATA / "other").mkdir()
    (DATA / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(AttnlmError, match="is not a data set"):
        prepare("cats.txt", name="other", force=True)
    assert (DATA / "other" / "thesis.txt").read_text() == "mine"
    assert entries() == {"cats-char", "latest", "other"}


@pytest.mark.parametrize(
    ("first", "second", "left"),
    [
        ({"val_fraction": 0.5}, {}, None),
        ({"val_fraction": 0.5}, {"force": True}, 0.1),
        ({}, {}, 0.1),
    ],
    ids=["the first stays", "the second may replace it", "both are alike"],
)
def test_of_two_preparations_one_replaces_the_other_only_as_asked(
    first: dict[str, Any], second: dict[str, Any], left: float | None
) -> None:
    """The first is made, under the same name, while the second is encoded."""

    def prepare_first(event: object) -> None:
        if isinstance(event, Progress) and event.task == "encode" and not FOLDER.exists():
            prepare("cats.txt", **first)

    if left is None:
        with pytest.raises(AttnlmError, match="other content"):
            prepare("cats.txt", on_event=prepare_first, **second)
    else:
        assert prepare("cats.txt", on_event=prepare_first, **second).val_fraction == left
    assert open_dataset("cats-char").val_fraction == (left or 0.5)
    assert entries() == {"cats-char", "latest"}


def test_the_old_data_set_returns_when_the_new_one_cannot_take_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare("cats.txt")
    before, rename = contents(FOLDER), Path.rename

    def interrupted(path: Path, target: Path) -> Path:
        if path.name == "new":
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare("cats.txt", val_fraction=0.5, force=True)
    assert contents(FOLDER) == before


# --- Processes ------------------------------------------------------------------------------------


STOPPED = """
import os, sys
from attnlm.data import contents
encode, signum = contents._encode, int(sys.argv.pop())
def stop(*given):
    os.kill(os.getpid(), signum)
    return encode(*given)
contents._encode = stop
from attnlm.__main__ import main
main()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no signal to one process")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_command_leaves_nothing_of_its_own(signum: signal.Signals) -> None:
    prepare("cats.txt", val_fraction=0.5)
    before = contents(DATA)
    words = [sys.executable, "-c", STOPPED, "prepare", "cats.txt", "--force", str(int(signum))]
    done = subprocess.run(words, capture_output=True, text=True)
    said = "stopped; nothing was written\n"
    assert (done.returncode, done.stdout, done.stderr) == (128 + signum, "", said)
    assert contents(DATA) == before


IMPORTED = """
import sys, attnlm
dir(attnlm); attnlm.AttnlmError, attnlm.Note, attnlm.Dataset
attnlm.prepare("cats.txt")
late = {"torch", "tokenizers", "tiktoken", "requests", "rich", "tqdm"}
late |= {"pyarrow", "datasets", "backports"}
sys.exit(", ".join(late & sys.modules.keys()))
"""


def test_preparation_imports_nothing_slow() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTED], stderr=subprocess.PIPE, text=True)
    assert done.stderr.strip() == ""


# --- Memory ---------------------------------------------------------------------------------------

GROWTH = """
import re, sys
from pathlib import Path
from attnlm import prepare
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
prepare("small" + sys.argv[1])
before = peak()
prepare("large" + sys.argv[1])
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.parametrize("suffix", [".txt", ".jsonl.gz", ".json"])
def test_a_large_text_is_never_in_memory_as_a_whole(suffix: str) -> None:
    part = TEXT * 50 if suffix == ".txt" else json.dumps({"text": TEXT * 50})
    between, around = {".txt": ("", "{}"), ".json": (", ", "[{}]")}.get(suffix, ("\n", "{}"))
    for size, count in (("small", 1), ("large", 24 * 2**20 // len(part.encode()))):
        content = around.replace("{}", between.join([part] * count)).encode()
        content = gzip.compress(content) if suffix == ".jsonl.gz" else content
        Path(size + suffix).write_bytes(content)
    words = [sys.executable, "-c", GROWTH, suffix]
    growth = int(subprocess.run(words, check=True, capture_output=True).stdout) * 1024
    assert growth < 15e6  # the text has 25 MB
