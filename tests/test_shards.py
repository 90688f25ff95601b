"""A large text becomes shards: the same ids as one bin, wherever it was stopped on the way."""

from __future__ import annotations

import errno
import gzip
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnlm
from attnlm.base import files
from attnlm.base.errors import AttnlmError
from attnlm.base.events import Note, Progress
from attnlm.base.locks import locked
from attnlm.data import bins, dataset, unfinished
from attnlm.data.batches import Batches
from attnlm.data.dataset import Dataset, open_dataset
from attnlm.data.prepare import prepare
from attnlm.data.shards import Shards
from attnlm.tokens import byte_pairs
from attnlm.tokens.split_patterns import GPT2_PATTERN
from attnlm.tokens.tokenizer import BpeTokenizer

TEXT = "The cat sat on the mat. The naïve cat's hat: 猫!\n"
SHARD = 1000  # bytes: 500 ids


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Some 20 KB in three files."""
    chance = random.Random(1)
    words = TEXT.split(" ")
    (tmp_path / "books").mkdir()
    for name in ("a.txt", "b.txt", "c.txt"):
        text = " ".join(chance.choices(words, k=1200))
        (tmp_path / "books" / name).write_text(text, encoding="utf-8")
    return tmp_path / "books"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bins, "SHARD_BYTES", SHARD)
    monkeypatch.setattr(bins, "_PIECE", 300)
    monkeypatch.setattr("attnlm.text.documents.PIECE", 400)


def sharded(source: Path, data: Path, **options: Any) -> Dataset:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bins, "SHARD_BYTES", SHARD)
        return prepare(source, data_dir=data, **options)


def entries(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def ids_of(opened: Dataset) -> tuple[list[int], list[int]]:
    return np.asarray(opened.train).tolist(), np.asarray(opened.val).tolist()


# --- What is written ------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["char", "byte", "bpe:300"])
@pytest.mark.parametrize("val_file", [False, True])
def test_shards_hold_what_one_bin_does(
    spec: str, val_file: bool, source: Path, data: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"tokenizer": spec}
    if val_file:
        (tmp_path / "val.txt").write_text(TEXT * 30, encoding="utf-8")
        options["val_file"] = tmp_path / "val.txt"
    one = prepare(source, data_dir=data / "one", **options)
    many = sharded(source, data, **options)
    assert isinstance(many.train, Shards) and isinstance(many.val, Shards)
    assert [len(part) for part in many.train.parts[:-1]] == [500] * (len(many.train.parts) - 1)
    assert len(many.train.parts) > 5 and len(many.val.parts) >= 1
    assert ids_of(many) == ids_of(one)
    for name in ("bigram_loss", "source_sha256", "val_bytes", "characters", "train_tokens"):
        assert getattr(many, name) == getattr(one, name)
    last = len(many.train.parts) - 1
    assert {"train-00000.bin", f"train-{last:05}.bin", "val-00000.bin"} <= entries(many.path)
    assert entries(data) == {"one", "latest", many.name}
    assert not any("partial" in name or "progress" in name for name in entries(many.path))


def test_a_small_text_is_in_one_bin(source: Path, data: Path) -> None:
    assert entries(prepare(source, data_dir=data).path) == {
        *("meta.json", "train.bin", "val.bin", "tokenizer.json")
    }


def test_windows_are_the_same_whatever_holds_them(source: Path, data: Path) -> None:
    one = prepare(source, data_dir=data / "one")
    many = sharded(source, data)
    for stride in (None, 7, 64):
        for block_size in (7, 64, 700):  # the longest reaches over a whole shard
            options: dict[str, Any] = {"block_size": block_size, "stride": stride, "seed": 3}
            ours, theirs = (
                Batches(opened.train, batch_size=8, vocab_size=opened.vocab_size, **options)
                for opened in (many, one)
            )
            for step in (0, 1, 50):
                assert np.array_equal(ours(step), theirs(step))


def test_training_and_evaluation_are_the_same(source: Path, data: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"model": "single-head", "embed_dim": 16, "block_size": 16}
    settings |= {"steps": 8, "seed": 1, "threads": 1, "eval_every": 4}
    runs = [
        attnlm.train(made, checkpoint_dir=tmp_path / "runs", **settings)
        for made in (prepare(source, data_dir=data / "one"), sharded(source, data))
    ]
    one, many = (
        [(m["step"], m.get("train_loss"), m.get("val_loss")) for m in run.metrics()] for run in runs
    )
    assert one == many
    assert attnlm.evaluate(runs[0]) == attnlm.evaluate(runs[1])
    assert attnlm.evaluate(runs[0]).tokens == len(open_dataset(data / "one/books-char").val) - 1


def test_shards_are_seen_as_one_array() -> None:
    whole = np.arange(23, dtype=np.uint16)
    shards = Shards([whole[:5], whole[5:10], whole[10:15], whole[15:20], whole[20:]])
    assert (len(shards), shards.shape, shards.nbytes, shards.dtype) == (23, (23,), 46, whole.dtype)
    for start in (*range(24), None, -3):
        for stop in (*range(24), None, 99, -2):
            for step in (None, 1, 3, -2):
                places = slice(start, stop, step)
                assert np.array_equal(shards[places], whole[places]), places
    for shape in ((0,), (7,), (4, 3), (2, 3, 4), (0, 5)):
        places_array = np.random.default_rng(1).integers(0, 23, shape)
        assert np.array_equal(shards[places_array], whole[places_array])
    assert [shards[0], shards[22], shards[-1]] == [0, 22, 22]
    assert [*shards] == [*whole] and np.array_equal(np.asarray(shards), whole)
    with pytest.raises(IndexError):
        shards[23]
    with pytest.raises(ValueError, match="without a copy"):
        np.array(shards, copy=False)


# --- What is checked ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["train-00000.bin", "train-00003.bin", "val-00001.bin"])
def test_a_damaged_shard_is_found(
    name: str, source: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset, "_SAMPLE", 10)
    monkeypatch.setattr(dataset, "_SAMPLES", 6)
    path = sharded(source, data).path / name
    whole = path.read_bytes()
    damaged = bytes([whole[0] ^ 1]) + whole[1:]
    for change in (damaged, whole[:-2], b""):
        path.write_bytes(change)
        with pytest.raises(AttnlmError, match=name):
            open_dataset(path.parent)
    path.write_bytes(damaged)
    monkeypatch.setattr(dataset, "_LARGE", 100)  # from here on samples are compared
    with pytest.raises(AttnlmError, match=r"one of .*-\*\.bin is damaged"):
        open_dataset(path.parent)
    path.write_bytes(whole[:200] + b"xx" + whole[202:])
    open_dataset(path.parent)
    with pytest.raises(AttnlmError, match=name):
        open_dataset(path.parent, verify=True)
    path.unlink()
    with pytest.raises(AttnlmError, match=name):
        open_dataset(path.parent)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 1},
        {"format": 3},
        {"shard_tokens": 0},
        {"shard_tokens": 499},
        {"train_shards": []},
        {"train_shards": ["x"]},
        {"val_shards": None},
        {"train_sha256": "0" * 64},
        {"val_tokens": 7},
    ],
    ids=str,
)
def test_a_hostile_meta_is_refused(changes: dict[str, Any], source: Path, data: Path) -> None:
    path = sharded(source, data).path / "meta.json"
    files.write_json(path, {**files.read_json(path), **changes})
    with pytest.raises(AttnlmError, match=r"meta\.json|train(-00000)?\.bin"):
        open_dataset(path.parent)


# --- Stopped, and gone on with --------------------------------------------------------------------

KILLED = """
import os, signal, sys
from attnlm.data import bins, unfinished
from attnlm.data.prepare import prepare
bins.SHARD_BYTES = 1000
add, left = unfinished.Log.add, int(sys.argv[4])
def add_and_die(log, split, shard):
    global left
    add(log, split, shard)
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
unfinished.Log.add = add_and_die
prepare(sys.argv[1], data_dir=sys.argv[2], tokenizer=sys.argv[3])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
@pytest.mark.parametrize(("spec", "kills"), [("char", (1, 3, 99)), ("bpe:270", (2, 1, 99))])
def test_a_killed_prepare_goes_on_and_makes_the_same(
    spec: str, kills: tuple[int, ...], source: Path, data: Path
) -> None:
    whole = content(sharded(source, data / "whole", tokenizer=spec).path)
    for kill in kills[:-1]:
        command = [sys.executable, "-c", KILLED, str(source), str(data), spec, str(kill)]
        assert subprocess.run(command).returncode == -signal.SIGKILL
        assert not any(name.startswith("books") for name in entries(data))
    (kept,) = data.glob(".partial-*")
    written = {path.name: path.stat().st_mtime_ns for path in kept.glob("train-*.bin")}
    assert len(written) == sum(kills[:-1])
    events: list[object] = []
    made = sharded(source, data, tokenizer=spec, on_event=events.append)
    assert content(made.path) == whole
    assert all((made.path / name).stat().st_mtime_ns == at for name, at in written.items())
    notes = [event.text for event in events if isinstance(event, Note)]
    assert notes == [f"continuing after {len(written)} shards that an earlier `prepare` wrote"]
    done = [e for e in events if isinstance(e, Progress) and e.task == "encode"]
    assert (done[-1].done, done[-1].total) == (made.characters, made.characters)
    assert entries(data) == {"whole", "latest", made.name}


class _StopError(Exception):
    pass


def stopped_after(source: Path, data: Path, shards: int, **options: Any) -> None:
    """Prepares so many shards."""
    add, left = unfinished.Log.add, shards

    def add_and_stop(log: unfinished.Log, split: str, shard: unfinished.Shard) -> None:
        nonlocal left
        add(log, split, shard)
        left -= 1
        if left == 0:
            raise _StopError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unfinished.Log, "add", add_and_stop)
        with pytest.raises(_StopError):
            sharded(source, data, **options)


@pytest.mark.parametrize("spec", ["char", "bpe:300", "gpt2"])
def test_it_goes_on_from_any_shard(
    spec: str, source: Path, data: Path, monkeypatch: pytest.MonkeyPatch, small_shards: None
) -> None:
    """Pieces are smaller than shards and larger, of documents too, which a shard may end in."""
    if spec == "gpt2":
        monkeypatch.setattr(byte_pairs, "published", lambda *_, **__: few_pairs())
    whole = content(prepare(source, data_dir=data / "whole", tokenizer=spec).path)
    shards = sum(name.endswith(".bin") for name in whole)
    assert shards > 10
    for number in (1, 2, shards // 2, shards - 1, shards):
        stopped_after(source, data, number, tokenizer=spec)
        made = sharded(source, data, tokenizer=spec)
        assert content(made.path) == whole
        made.path.rename(data / f"made-{number}")
    if spec == "gpt2":
        assert (made.documents, [*open_dataset(data / "made-1").val][-1]) == (3, 262)


def few_pairs() -> BpeTokenizer:
    ranks = [*(bytes([byte]) for byte in range(256)), b"th", b"at", b" the", b" c", b"at.", b"\n\n"]
    return BpeTokenizer("gpt2", GPT2_PATTERN, ranks, vocab_size=263, end_of_text=262)


def test_shards_that_are_gone_or_cut_short_are_made_again(source: Path, data: Path) -> None:
    whole = content(sharded(source, data / "whole").path)
    stopped_after(source, data, 6)
    (kept,) = data.glob(".partial-*")
    (kept / "train-00001.bin").write_bytes(b"xx")
    (kept / "train-00004.bin").unlink()
    assert content(sharded(source, data).path) == whole


@pytest.mark.parametrize("change", ["byte", "link", "folder"])
def test_shards_are_taken_over_before_the_first_that_is_damaged(
    change: str, source: Path, data: Path, tmp_path: Path
) -> None:
    whole = content(sharded(source, data / "whole").path)
    stopped_after(source, data, 6)
    (kept,) = data.glob(".partial-*")
    bad, sound = kept / "train-00003.bin", kept / "train-00002.bin"
    shard, at = bad.read_bytes(), sound.stat().st_mtime_ns
    bad.unlink()
    match change:
        case "byte":
            bad.write_bytes(bytes([shard[0] ^ 1]) + shard[1:])
        case "link":
            (tmp_path / "elsewhere").write_bytes(shard)
            bad.symlink_to(tmp_path / "elsewhere")
        case "folder":
            bad.mkdir()
    made = sharded(source, data)
    assert content(made.path) == whole
    assert not any(path.is_symlink() for path in made.path.iterdir())
    assert (made.path / sound.name).stat().st_mtime_ns == at
    if change == "link":
        assert (tmp_path / "elsewhere").read_bytes() == shard


def test_only_files_of_a_data_set_are_published(source: Path, data: Path, tmp_path: Path) -> None:
    whole = content(sharded(source, data / "whole").path)
    stopped_after(source, data, 3)
    (kept,) = data.glob(".partial-*")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    (kept / "link").symlink_to(tmp_path / "mine")
    (kept / "train-00099.bin").write_bytes(b"x")
    (kept / "meta.json").mkdir()
    (kept / ".train-00003.bin.0badcafe.tmp").write_bytes(b"x")
    assert content(sharded(source, data).path) == whole
    assert (tmp_path / "mine" / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "changes",
    [
        None,
        {"sha256": 5},
        {"sha256": None},
        {"tokens": 499},
        {"tokens": True},
        {"tokens": 500.0},
        {"tokens": "500"},
        {"characters": -1},
        {"characters": 2**62},
        {"utf8_bytes": 0},
        {"utf8_bytes": None},
        {"handed": -1},
        {"handed": 501},
        {"handed": []},
        {"more": 1},
    ],
    ids=str,
)
def test_shards_whose_numbers_can_not_be_are_made_again(
    changes: dict[str, Any] | None, source: Path, data: Path, small_shards: None
) -> None:
    whole = content(prepare(source, data_dir=data / "whole").path)
    stopped_after(source, data, 6)
    (log,) = data.glob(".partial-*/progress.json")
    written = files.read_json(log)
    train = written["train"]
    train[2] = None if changes is None else {**train[2], **changes}
    files.write_json(log, {"train": train, "val": []})
    events: list[object] = []
    assert content(sharded(source, data, on_event=events.append).path) == whole
    assert "continuing after 2 shards" in "".join(e.text for e in events if isinstance(e, Note))


@pytest.mark.parametrize("content_of_log", [{}, {"train": []}, {"train": None, "val": {"a": 1}}])
def test_a_log_of_nothing_is_none(content_of_log: dict[str, Any], source: Path, data: Path) -> None:
    whole = content(sharded(source, data / "whole").path)
    stopped_after(source, data, 3)
    (log,) = data.glob(".partial-*/progress.json")
    files.write_json(log, content_of_log)
    assert content(sharded(source, data).path) == whole


@pytest.mark.parametrize("forge", ["place", "ids"])
def test_what_only_the_text_shows_to_be_forged_is_removed(
    forge: str, source: Path, data: Path, small_shards: None
) -> None:
    whole = content(prepare(source, data_dir=data / "whole").path)
    stopped_after(source, data, 3)
    (log,) = data.glob(".partial-*/progress.json")
    written = files.read_json(log)
    last = written["train"][-1]
    if forge == "place":  # more ids than a piece has, which would be waited for without end
        last["handed"] = 500
    else:
        path = log.with_name("train-00002.bin")
        path.write_bytes(b"\xff" * SHARD)
        last["sha256"] = files.file_hash(path)
    files.write_json(log, written)
    with pytest.raises(AttnlmError, match="what is kept of this preparation is damaged"):
        sharded(source, data)
    assert entries(data) == {"whole"}
    assert content(sharded(source, data).path) == whole


def test_strange_entries_are_no_leftovers(source: Path, data: Path, tmp_path: Path) -> None:
    data.mkdir()
    key = "0123456789abcdef"
    (data / ".partial-x").mkdir()
    (data / f".partial-{key}").write_text("a file")
    (data / f".partial-{key[::-1]}").symlink_to(tmp_path)
    ours = data / f".partial-{'0' * 16}"
    ours.mkdir()
    (ours / "link").symlink_to("nowhere")
    events: list[object] = []
    sharded(source, data, on_event=events.append)
    (told,) = [event.text for event in events if isinstance(event, Note)]
    assert told.startswith(str(ours))


@pytest.mark.parametrize("change", ["text", "split", "tokenizer", "touch", "shards"])
def test_nothing_is_taken_over_from_another_preparation(
    change: str, source: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped_after(source, data, 4)
    options: dict[str, Any] = {}
    match change:
        case "text":
            path = source / "b.txt"
            path.write_text(path.read_text(encoding="utf-8").swapcase(), encoding="utf-8")
        case "split":
            options["val_fraction"] = 0.2
        case "tokenizer":
            options["tokenizer"] = "byte"
        case "touch":  # it may have been another text in between
            os.utime(source / "c.txt", (1, 1))
        case "shards":
            monkeypatch.setattr("tests.test_shards.SHARD", 1002)
    events: list[object] = []
    made = sharded(source, data, on_event=events.append, **options)
    (told,) = [event.text for event in events if isinstance(event, Note)]
    (kept,) = data.glob(".partial-*")
    assert str(kept) in told and "prepare the same again to go on with it, or delete" in told
    one = prepare(source, data_dir=data / "one", **options)
    assert ids_of(made) == ids_of(one)


def test_a_full_disk_is_one_line_and_what_was_written_stays(
    source: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = content(sharded(source, data / "whole").path)
    write_shard, left = bins._write_shard, 4

    def full(path: Path, *rest: Any) -> unfinished.Shard:
        nonlocal left
        left -= 1
        if left == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write_shard(path, *rest)

    monkeypatch.setattr(bins, "_write_shard", full)
    with pytest.raises(
        AttnlmError, match=r"can't write .*train-00003.bin: No space left"
    ) as caught:
        sharded(source, data)
    assert "free some space" in caught.value.hint
    assert len(entries(next(data.glob(".partial-*")))) == 4
    assert content(sharded(source, data).path) == whole


def test_a_text_that_changes_meanwhile_leaves_nothing(source: Path, data: Path) -> None:
    def change(event: object) -> None:
        if isinstance(event, Progress) and event.task == "encode":
            (source / "c.txt").write_text("other")

    with pytest.raises(AttnlmError, match="books changed while it was read"):
        sharded(source, data, on_event=change)
    assert entries(data) == set()


PEAK = """
import re, sys
from pathlib import Path
from attnlm.data import bins
from attnlm.data.prepare import prepare
bins.SHARD_BYTES = 2**22
prepare(sys.argv[1], data_dir=sys.argv[2])
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_records_are_never_in_memory_as_a_whole(tmp_path: Path, data: Path) -> None:
    record = json.dumps({"text": TEXT * 20}) + "\n"
    (tmp_path / "large.jsonl.gz").write_bytes(gzip.compress(record.encode() * 60_000, 1))
    command = [sys.executable, "-c", PEAK, str(tmp_path / "large.jsonl.gz"), str(data)]
    peak = int(subprocess.run(command, check=True, capture_output=True).stdout) * 1024
    assert peak < 80 * 2**20  # the interpreter and NumPy take some 40 of these, the text 64
    assert len(list(data.glob("*/train-*.bin"))) > 20


STOPPED = """
import os, signal
from attnlm.data import bins, unfinished
bins.SHARD_BYTES, add = 1000, unfinished.Log.add
def add_and_stop(log, split, shard):
    add(log, split, shard)
    os.kill(os.getpid(), signal.SIGINT)
def stop(*_):
    os.kill(os.getpid(), signal.SIGINT)
if int(os.environ["KEPT"]):
    unfinished.Log.add = add_and_stop
else:
    unfinished.Log.take_over = stop
from attnlm.__main__ import main
main()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no SIGINT to one process")
@pytest.mark.parametrize("kept", [0, 1])
def test_a_stopped_command_says_what_is_kept(kept: int, source: Path, data: Path) -> None:
    command = [sys.executable, "-c", STOPPED, "prepare", str(source), "--data-dir", str(data)]
    environ = {**os.environ, "KEPT": str(kept)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 130
    (line,) = done.stderr.splitlines()
    partial = [str(path) for path in data.glob(".partial-*")]
    if kept:
        assert line.startswith(f"stopped; {partial[0]} keeps ") and "the same again" in line
    else:
        assert (line, partial) == ("stopped; nothing is kept", [])


@pytest.mark.skipif(sys.platform == "win32", reason="Windows locks no folders")
def test_two_do_not_write_to_the_same_folder(source: Path, data: Path) -> None:
    stopped_after(source, data, 2)
    (kept,) = data.glob(".partial-*")
    before = content(kept)
    with locked(kept), pytest.raises(AttnlmError, match="another process is preparing the same"):
        sharded(source, data)
    assert content(kept) == before


def test_an_existing_data_set_is_replaced_with_force_only(source: Path, data: Path) -> None:
    prepare(source, data_dir=data, val_fraction=0.5)
    with pytest.raises(AttnlmError, match="other content"):
        sharded(source, data)
    assert isinstance(sharded(source, data, force=True).train, Shards)
    made = (data / "books-char" / "meta.json").stat().st_mtime_ns
    sharded(source, data)  # the same again
    assert (data / "books-char" / "meta.json").stat().st_mtime_ns == made
    assert entries(data) == {"books-char", "latest"}
