"""A text becomes a data set that is exact, complete or absent, and small in memory."""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import Note, Progress, ignore
from attnlm.data import bin_files, new_dataset, splits
from attnlm.data import prepare as preparation
from attnlm.data.dataset import Dataset, id_dtype, open_dataset
from attnlm.data.prepare import prepare
from attnlm.text import corpus_tales, text_files
from attnlm.text.corpus import Corpus, TextFile, get_corpus
from tests.models import contents
from tests.web_server import WebServer, body

TEXT = "The cat sat.\nThe naïve cat's hat: 猫!\n" * 40


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "cats.txt"
    path.write_bytes(TEXT.encode())
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


def entries(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# --- What is in it --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "spec"), [("char", "char"), ("byte", "byte"), ("BPE-300", "bpe:300")]
)
def test_splits_are_encoded_separately_and_decode_to_the_text(
    typed: str, spec: str, source: Path, data: Path
) -> None:
    dataset = prepare(source, tokenizer=typed, val_fraction=0.25, data_dir=data)
    cut = len(TEXT) * 3 // 4
    assert dataset.tokenizer.decode(dataset.train) == TEXT[:cut]
    assert dataset.tokenizer.decode(dataset.val) == TEXT[cut:]
    assert np.array_equal(dataset.val, dataset.tokenizer.encode(TEXT[cut:]))
    assert (dataset.name, dataset.tokenizer.name) == ("cats-" + spec.replace(":", ""), spec)
    assert dataset.path == data / dataset.name
    assert (dataset.train_tokens, dataset.val_tokens) == (len(dataset.train), len(dataset.val))


def test_meta_json_says_what_was_done(source: Path, data: Path) -> None:
    events: list[object] = []
    folder = prepare(source, data_dir=data, on_event=events.append).path
    assert events[-1] == Progress("encode", len(TEXT), len(TEXT), "chars")
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    cut = len(TEXT) * 9 // 10
    expected = {
        "name": "cats-char",
        "source": str(source),
        "source_sha256": hashlib.sha256(TEXT.encode()).hexdigest(),
        "val_source": None,
        "encoding": "utf-8",
        "val_fraction": 0.1,
        "characters": len(TEXT),
        "train_characters": cut,
        "val_characters": len(TEXT) - cut,
        "train_tokens": cut,
        "val_tokens": len(TEXT) - cut,
        "val_bytes": len(TEXT[cut:].encode()),
        "tokenizer": "char",
        "vocab_size": len(set(TEXT)),
        "dtype": "uint16",
        "floor": None,
    }
    assert {key: meta[key] for key in expected} == expected
    for name, key in [
        ("train.bin", "train_sha256"),
        ("val.bin", "val_sha256"),
        ("tokenizer.json", "tokenizer_sha256"),
    ]:
        assert meta[key] == hashlib.sha256((folder / name).read_bytes()).hexdigest()
    assert (folder / "train.bin").stat().st_size == 2 * cut
    assert entries(folder) == {"meta.json", "train.bin", "val.bin", "tokenizer.json"}
    assert (data / "latest").read_text() == "cats-char\n"
    assert entries(data) == {"cats-char", "latest"}


@pytest.mark.parametrize(
    ("characters", "fraction", "train"),
    [(20, 0.9, 2), (100, 0.29, 71), (10, 0.3, 7), (11, 0.1, 9), (1000, 1e-2, 990)],
)
def test_the_split_is_exact_to_the_character(
    characters: int, fraction: float, train: int, tmp_path: Path, data: Path
) -> None:
    (tmp_path / "t.txt").write_text("ab" * (characters // 2) + "c" * (characters % 2))
    dataset = prepare(tmp_path / "t.txt", val_fraction=fraction, data_dir=data)
    assert (dataset.train_characters, dataset.val_characters) == (train, characters - train)


def test_a_validation_file_leaves_the_whole_source_to_train_on(
    source: Path, tmp_path: Path, data: Path
) -> None:
    (tmp_path / "val.txt").write_text("Dogs: Ω!", encoding="utf-8")
    dataset = prepare(source, val_file=tmp_path / "val.txt", data_dir=data)
    assert dataset.tokenizer.decode(dataset.train) == TEXT
    assert dataset.tokenizer.decode(dataset.val) == "Dogs: Ω!"
    assert dataset.vocab_size == len(set(TEXT + "Dogs: Ω!"))
    assert dataset.characters == len(TEXT) + 8
    assert (dataset.val_bytes, dataset.val_fraction) == (9, None)
    assert dataset.bytes_per_token == 9 / 8
    (tmp_path / "val.txt").write_text("Dogs?")
    with pytest.raises(AttnlmError, match="other content"):
        prepare(source, val_file=tmp_path / "val.txt", data_dir=data)


def test_bpe_is_trained_on_the_training_split_only(tmp_path: Path, data: Path) -> None:
    (tmp_path / "t.txt").write_text("abab " * 50 + "xyxyxy " * 50)
    dataset = prepare(tmp_path / "t.txt", tokenizer="bpe:290", val_fraction=0.59, data_dir=data)
    learned = [dataset.tokenizer.decode([token]) for token in range(256, dataset.vocab_size)]
    assert any("ab" in token for token in learned)
    assert not any("x" in token for token in learned)


def test_a_large_text_is_sampled_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "SAMPLE_BYTES", 2000)
    monkeypatch.setattr(splits, "_SAMPLE_BLOCK", 100)
    (tmp_path / "t.txt").write_text("ab" * 5000 + "cd" * 5000 + "ef" * 5000)
    found = get_corpus(tmp_path / "t.txt", spool=tmp_path)
    text = splits.survey_text(found, Fraction("0.1"), ignore)
    sample = "".join(splits.Split(text).train_sample())
    assert 1600 <= len(sample) <= 2000
    counts = {pair: sample.count(pair) // 100 for pair in ("ab", "cd", "ef")}
    assert counts == {"ab": 3, "cd": 3, "ef": 2}


def test_many_distinct_characters_need_four_bytes(tmp_path: Path, data: Path) -> None:
    text = "".join(map(chr, [*range(32, 0xD800), *range(0xE000, 0x14000)]))
    (tmp_path / "t.txt").write_text(text, encoding="utf-8")
    dataset = prepare(tmp_path / "t.txt", data_dir=data)
    assert dataset.train.dtype == np.dtype("<u4")
    assert dataset.tokenizer.decode(dataset.val) == text[-len(dataset.val) :]
    assert dataset.val[-1] == len(text) - 1 > 65535
    assert dataset.bigram_loss is None
    assert (id_dtype(65536), id_dtype(65537)) == (np.dtype("<u2"), np.dtype("<u4"))


def counted_bigram_loss(train: Any, val: Any, vocab_size: int) -> float:
    pairs = Counter(zip(train[:-1].tolist(), train[1:].tolist(), strict=True))
    firsts = Counter(train[:-1].tolist())
    losses = [
        -math.log((pairs[a, b] + 1) / (firsts[a] + vocab_size))
        for a, b in zip(val[:-1].tolist(), val[1:].tolist(), strict=True)
    ]
    return sum(losses) / len(losses)


@pytest.mark.parametrize("spec", ["char", "bpe:300"])
def test_the_bigram_loss_equals_counted_pairs(
    spec: str, source: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bin_files, "PIECE", 7)  # pairs lie across the pieces
    dataset = prepare(source, tokenizer=spec, data_dir=data)
    expected = counted_bigram_loss(dataset.train, dataset.val, dataset.vocab_size)
    assert dataset.bigram_loss == pytest.approx(expected, rel=1e-12)
    source.write_text("a" * 100)
    assert str(prepare(source, data_dir=data / "a").bigram_loss) == "0.0"  # not -0.0


MIXED = "\ufeffA cat.\r\nna\u0131\u0308ve \u65e5\u672c, \U0001d11e!\x7f\x80\xff ab" * 3 + "\u732b"


@pytest.mark.parametrize("spec", ["char", "byte"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
@pytest.mark.parametrize("size", [1, 2, 3, 8, 64])
def test_chunks_of_any_size_make_the_same_data_set(
    size: int, encoding: str, spec: str, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.txt").write_bytes(MIXED.encode(encoding))
    whole = prepare(tmp_path / "t.txt", tokenizer=spec, encoding=encoding, data_dir=data).path
    monkeypatch.setattr(text_files, "PIECE", size)
    monkeypatch.setattr(bin_files, "PIECE", size)
    prepare(tmp_path / "t.txt", tokenizer=spec, encoding=encoding, data_dir=data / "chunks")
    assert contents(data / "chunks" / whole.name) == contents(whole)


def test_pieces_encoded_in_parallel_have_the_ids_of_the_whole(
    source: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "PIECE", 11)
    monkeypatch.setattr(bin_files, "PIECE", 20)
    monkeypatch.setattr(bin_files, "cores", lambda: 3)
    dataset = prepare(source, tokenizer="bpe:300", data_dir=data)
    cut = len(TEXT) * 9 // 10
    assert np.array_equal(dataset.train, dataset.tokenizer.encode(TEXT[:cut]))
    assert np.array_equal(dataset.val, dataset.tokenizer.encode(TEXT[cut:]))


def test_the_floor_is_the_nats_of_the_validation_split_by_its_tokens(
    source: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = len(TEXT) // 2
    file = TextFile(source, "stories")
    corpus = Corpus("stories", ("stories",), (file,), floor_nats={0: 90.0, half: 45.0})
    monkeypatch.setattr(preparation, "get_corpus", lambda *_, **__: corpus)
    char = prepare(val_fraction=0.5, data_dir=data)
    assert char.floor == 45 / half
    pairs = prepare(val_fraction=0.5, tokenizer="bpe:300", data_dir=data)
    assert pairs.floor == 45 / pairs.val_tokens > 45 / half
    assert prepare(val_fraction=0.4, name="in-a-story", data_dir=data).floor is None
    assert prepare(val_file=source, name="other-text", data_dir=data).floor is None


def test_any_source_can_be_the_validation_split(source: Path, data: Path) -> None:
    dataset = prepare(source, val_file="tales", data_dir=data)
    assert dataset.val_source == "tales"
    assert dataset.tokenizer.decode([*dataset.val]) == corpus_tales.generate_tales()[0]


def test_tiny_shakespeare_has_its_known_sizes(data: Path) -> None:
    folder = os.environ.get("ATTNLM_TEST_DATA")
    if not folder:
        pytest.skip("ATTNLM_TEST_DATA names no folder with tinyshakespeare.txt")
    dataset = prepare(Path(folder) / "tinyshakespeare.txt", data_dir=data)
    assert (dataset.characters, dataset.vocab_size) == (1_115_394, 65)
    assert (dataset.train_tokens, dataset.val_tokens) == (1_003_854, 111_540)
    assert dataset.bigram_loss is not None
    assert round(dataset.bigram_loss, 4) == 2.4819
    assert dataset.source_sha256.startswith("86c4e6aa9db7c042")


def notes_of(events: list[object]) -> list[str]:
    return [event.text for event in events if isinstance(event, Note)]


WINDOWS = ("One line.\r\nAnother\rline.\r\n" * 40).encode()


def test_line_ends_are_kept_and_reported(source: Path, tmp_path: Path, data: Path) -> None:
    (tmp_path / "w.txt").write_bytes(WINDOWS)
    events: list[object] = []
    dataset = prepare(tmp_path / "w.txt", data_dir=data, on_event=events.append)
    assert dataset.tokenizer.decode([*dataset.train, *dataset.val]) == WINDOWS.decode()
    assert dataset.characters == len(WINDOWS)
    assert ["w.txt has carriage returns" in note for note in notes_of(events)] == [True]
    dataset = prepare(source, val_file=tmp_path / "w.txt", data_dir=data)
    assert dataset.tokenizer.decode(dataset.val) == WINDOWS.decode()


def test_several_sources_are_one_text_however_long_their_names(
    web: WebServer, source: Path, tmp_path: Path, data: Path
) -> None:
    (tmp_path / "dogs.txt").write_text("Dogs. " * 30)
    dataset = prepare([tmp_path / "dogs.txt", source], data_dir=data)
    assert dataset.tokenizer.decode([*dataset.train, *dataset.val]) == "Dogs. " * 30 + TEXT
    assert dataset.name == "dogs-and-1-more-char"
    assert dataset.sources == (str(tmp_path / "dogs.txt"), str(source))
    assert open_dataset(dataset.path).sources == dataset.sources
    with pytest.raises(AttnlmError, match="other content"):
        prepare([source, tmp_path / "dogs.txt"], name=dataset.name, data_dir=data)
    long = Path(tmp_path, *["é" * 60] * 20)
    long.mkdir(parents=True)
    (long / "a").write_text("Dogs.")
    url = web.answer("/cats?" + "a" * 9000, body(TEXT.encode()))
    assert len(prepare([url, *[long / "a"] * 300], data_dir=data).sources) == 301


def test_a_text_too_small_for_the_defaults_is_reported(tmp_path: Path, data: Path) -> None:
    for size, fits in ((650, True), (640, False)):  # a context of 64 needs 65 tokens to validate
        path = tmp_path / f"{size}.txt"
        path.write_text("abcdefghij" * (size // 10))
        for _ in range(2):  # also where it is prepared already
            events: list[object] = []
            dataset = prepare(path, data_dir=data, on_event=events.append)
            told = [note for note in notes_of(events) if "too small" in note]
            assert len(told) == (not fits)
    assert "`block_size` 63 or less" in told[0]
    assert dataset.largest_block_size == 63


# --- What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("val_fraction", (0.0, 1.0, -0.1, 1.5, math.nan, math.inf)),
        ("name", ("..", "a/b", "latest", ".hidden", "", "a\\b")),
        ("split", ("", "head", "Tail")),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_read(
    argument: str, values: tuple[Any, ...], data: Path
) -> None:
    for value in values:
        with pytest.raises(UsageError, match=f"`{argument}`"):
            prepare("missing.txt", data_dir=data, **{argument: value})
    with pytest.raises(UsageError, match="unknown tokenizer"):
        prepare("missing.txt", tokenizer="bpe:9", data_dir=data)
    assert not data.exists()


@pytest.mark.parametrize("spec", ["char", "byte", "bpe:300"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("\ufeff", "is empty"),
        ("a", "training split"),
        ("ab", "training split"),
        ("abcdefghij", "(training|validation) split"),  # bpe makes one token of nine letters
    ],
)
def test_a_text_too_short_is_refused(
    spec: str, text: str, message: str, tmp_path: Path, data: Path
) -> None:
    (tmp_path / "t.txt").write_text(text, encoding="utf-8")
    with pytest.raises(AttnlmError, match=message):
        prepare(tmp_path / "t.txt", tokenizer=spec, data_dir=data)
    assert entries(data) == set()


def test_a_validation_file_too_short_is_named(source: Path, tmp_path: Path, data: Path) -> None:
    (tmp_path / "val.txt").write_text("T")
    with pytest.raises(AttnlmError, match=r"validation split of .*val\.txt has fewer") as caught:
        prepare(source, val_file=tmp_path / "val.txt", data_dir=data)
    assert "val_fraction" not in caught.value.hint


@pytest.mark.parametrize("name", ["cats.txt", "val.txt"])
@pytest.mark.parametrize("changed", ["tac", "Ωat"])
def test_a_text_that_changes_during_preparation_is_refused(
    changed: str, name: str, source: Path, data: Path, tmp_path: Path
) -> None:
    """The changed text may even have characters that the vocabulary lacks."""
    (tmp_path / "val.txt").write_text("the cat's hat")
    path = tmp_path / name
    text = path.read_text(encoding="utf-8")

    def change(event: object) -> None:
        if isinstance(event, Progress) and (event.task, event.done) == ("read", len(text)):
            path.write_text(text.replace("cat", changed), encoding="utf-8")

    with pytest.raises(AttnlmError, match=rf"{name} changed while it was read"):
        prepare(source, val_file=tmp_path / "val.txt", data_dir=data, on_event=change)
    assert entries(data) == set()


def test_a_full_disk_is_one_line_and_the_old_data_stay(
    source: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepare(source, data_dir=data).path
    before = contents(folder)

    def full(path: Path, sealed: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(new_dataset, "write_json", full)
    with pytest.raises(AttnlmError, match=rf"^cannot write {data}: No space left on device\nhint"):
        prepare(source, val_fraction=0.5, force=True, data_dir=data)
    assert contents(folder) == before
    assert entries(data) == {"cats-char", "latest"}
    with pytest.raises(AttnlmError, match=r"cannot write .*cats\.txt"):
        prepare(source, data_dir=source)


# --- What is there already ------------------------------------------------------------------------


def test_the_same_content_is_left_as_it_is(source: Path, data: Path) -> None:
    first = prepare(source, data_dir=data)
    written = {path: path.stat().st_mtime_ns for path in first.path.iterdir()}
    prepare(source, tokenizer="byte", data_dir=data)
    events: list[object] = []
    again = prepare(source, data_dir=data, on_event=events.append)
    assert again.path == first.path
    assert {path: path.stat().st_mtime_ns for path in first.path.iterdir()} == written
    notes = [event.text for event in events if isinstance(event, Note)]
    assert len(notes) == 1
    assert "prepared from the same text" in notes[0]
    assert first.source_sha256[:12] in notes[0]
    assert (data / "latest").read_text() == "cats-char\n"


def test_other_or_damaged_content_needs_force(source: Path, data: Path) -> None:
    folder = prepare(source, data_dir=data).path
    before = contents(folder)
    byte: dict[str, Any] = {"tokenizer": "byte", "name": "cats-char"}
    for options in ({"val_fraction": 0.5}, byte):
        with pytest.raises(AttnlmError, match="other content") as caught:
            prepare(source, data_dir=data, **options)
        assert "`force`" in (caught.value.hint or "")
        assert "`name`" in (caught.value.hint or "")
    assert contents(folder) == before
    (folder / "val.bin").write_bytes(b"damage")
    with pytest.raises(AttnlmError, match=r"val\.bin is damaged"):
        prepare(source, data_dir=data)
    replaced = prepare(source, val_fraction=0.5, data_dir=data, force=True)
    assert replaced.val_characters == len(TEXT) // 2
    assert entries(data) == {"cats-char", "latest"}
    (data / "other").mkdir()
    (data / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(AttnlmError, match="is not a data set"):
        prepare(source, name="other", data_dir=data, force=True)
    assert (data / "other" / "thesis.txt").read_text() == "mine"


def during_encoding(source: Path, data: Path, **options: Any) -> Any:
    """Return a listener that once prepares another split under the same name."""
    results: list[Dataset] = []

    def listen(event: object) -> None:
        if isinstance(event, Progress) and event.task == "encode" and not results:
            results.append(prepare(source, data_dir=data, **options))

    return listen


@pytest.mark.parametrize(
    ("theirs", "ours", "left"),
    [
        ({"val_fraction": 0.5}, {}, None),
        ({"val_fraction": 0.5}, {"force": True}, 0.1),
        ({}, {}, 0.1),
    ],
    ids=["the first stays", "the second may replace it", "both are alike"],
)
def test_of_two_preparations_one_replaces_the_other_only_as_asked(
    theirs: dict[str, Any], ours: dict[str, Any], left: float | None, source: Path, data: Path
) -> None:
    listener = during_encoding(source, data, **theirs)
    if left is None:
        with pytest.raises(AttnlmError, match="other content"):
            prepare(source, data_dir=data, on_event=listener, **ours)
    else:
        assert prepare(source, data_dir=data, on_event=listener, **ours).val_fraction == left
    assert open_dataset("cats-char", data_dir=data).val_fraction == (left or 0.5)
    assert entries(data) == {"cats-char", "latest"}


def test_the_old_data_set_returns_when_the_new_one_cannot_take_its_place(
    source: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepare(source, data_dir=data).path
    before = contents(folder)
    rename = Path.rename

    def interrupted(path: Path, target: Path) -> Path:
        if path.name == "new":
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(source, val_fraction=0.5, force=True, data_dir=data)
    assert contents(folder) == before


STOPPED = """
import os, sys
from attnlm.data import bin_files
encode, signum = bin_files._encode_piece, int(sys.argv.pop())
def stop(*given):
    os.kill(os.getpid(), signum)
    return encode(*given)
bin_files._encode_piece = stop
from attnlm.__main__ import main
main()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no signal to one process")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_command_leaves_nothing_of_its_own(
    signum: signal.Signals, source: Path, data: Path
) -> None:
    before = contents(prepare(source, val_fraction=0.5, data_dir=data).path)
    words = [*("prepare", str(source), "--data-dir", str(data), "--force"), str(int(signum))]
    done = subprocess.run([sys.executable, "-c", STOPPED, *words], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signum, "", "")
    assert entries(data) == {"cats-char", "latest"}
    assert contents(data / "cats-char") == before


# --- What it needs --------------------------------------------------------------------------------

IMPORTED = """
import sys, attnlm
dir(attnlm); attnlm.AttnlmError, attnlm.Note, attnlm.Dataset
attnlm.prepare(sys.argv[1], data_dir=sys.argv[2])
late = {"torch", "tokenizers", "tiktoken", "requests", "rich", "tqdm"}
late |= {"pyarrow", "datasets", "backports"}
sys.exit(", ".join(late & sys.modules.keys()))
"""


def test_preparation_imports_nothing_slow(source: Path, data: Path) -> None:
    command = [sys.executable, "-c", IMPORTED, str(source), str(data)]
    assert subprocess.run(command, stderr=subprocess.PIPE, text=True).stderr.strip() == ""


# --- Memory ---------------------------------------------------------------------------------------

PEAK = """
import re, sys
from pathlib import Path
from attnlm.data.prepare import prepare
prepare(sys.argv[1], data_dir=sys.argv[2])
status = Path("/proc/self/status").read_text()
print(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.parametrize("name", ["large.txt", "large.jsonl.gz"])
def test_a_large_text_is_never_in_memory_as_a_whole(name: str, tmp_path: Path, data: Path) -> None:
    content = TEXT.encode() * 50
    if name == "large.jsonl.gz":
        content = json.dumps({"text": TEXT * 50}).encode() + b"\n"
    content *= 2**26 // len(TEXT.encode() * 50)
    if name == "large.jsonl.gz":
        content = gzip.compress(content, 1)
    (tmp_path / name).write_bytes(content)
    command = [sys.executable, "-c", PEAK, str(tmp_path / name), str(data)]
    peak = int(subprocess.run(command, check=True, capture_output=True).stdout) * 1024
    assert peak < 100 * 2**20  # about 40 MiB for the interpreter and NumPy; the text has 64
