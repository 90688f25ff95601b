"""Ids that a user made are a data set: checked, copied, and shown as numbers."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnlm
from attnlm import AttnlmError, open_dataset, prepare
from tests.kit import command, quick_run

IDS = np.random.default_rng(0).integers(0, 300, 5000)


@pytest.fixture(autouse=True)
def _folder(here: Path) -> None:
    np.save("ids.npy", IDS)
    IDS.astype("<u2").tofile("ids.bin")
    IDS.astype("<u4").tofile("wide.bin")


@pytest.mark.parametrize(
    ("source", "options"), [("ids.npy", {}), ("ids.bin", {}), ("wide.bin", {"dtype": "uint32"})]
)
def test_a_file_of_ids_is_copied_and_divided(source: str, options: dict[str, Any]) -> None:
    made = prepare(source, vocab_size=300, val_fraction=0.2, **options)
    dataset = open_dataset(made.name, verify=True)
    assert np.array_equal(np.concatenate([dataset.train, dataset.val]), IDS)
    assert (dataset.train_tokens, dataset.vocab_size, dataset.dtype) == (4000, 300, "uint16")
    assert dataset.name == f"{Path(source).stem}-ids" and dataset.val_bytes == 0


def test_numbers_of_any_kind_and_a_second_file_are_read() -> None:
    np.save("big.npy", IDS.astype(">i8")[:, None][:, 0] + 70_000)
    dataset = prepare("big.npy", vocab_size=70_300)
    assert dataset.dtype == "uint32"
    assert np.array_equal(dataset.train, IDS[:4500] + 70_000)
    np.save("val.npy", IDS[:100])
    dataset = prepare("ids.npy", vocab_size=300, val_file="val.npy")
    assert dataset.train_tokens == 5000 and np.array_equal(dataset.val, IDS[:100])
    assert dataset.split is None


def test_the_loss_of_bigrams_is_that_of_counted_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnlm.data.contents._IDS_AT_ONCE", 7)  # pairs cross the blocks
    small = IDS % 5
    np.save("small.npy", small)
    dataset = prepare("small.npy", vocab_size=5)
    counts = np.ones((5, 5))
    np.add.at(counts, (small[:4499], small[1:4500]), 1)
    log_p = np.log(counts / counts.sum(1, keepdims=True))
    assert dataset.bigram_loss == pytest.approx(-log_p[small[4500:-1], small[4501:]].mean())
    assert np.array_equal(dataset.train, small[:4500])
    np.save("constant.npy", np.zeros(50, int))
    assert str(prepare("constant.npy", vocab_size=1).bigram_loss) == "0.0"  # not -0.0


def test_ids_are_written_as_numbers() -> None:
    tokenizer = open_dataset(prepare("ids.npy", vocab_size=300).path).tokenizer
    assert tokenizer.decode([3, 1, 299]) == " 3 1 299"
    assert tokenizer.encode(" 3 1\n299") == [3, 1, 299] and tokenizer.encode("") == []
    for text in ("300", "-1", "1.5", "x", "9" * 40, "٣"):
        with pytest.raises(AttnlmError, match="is no id from 0 to 299"):
            tokenizer.encode(text)


def _npy(array: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.npy",
            _npy(np.array([1, 2, 300, 4])),
            "id 300 at place 2 of a.npy is not from 0",
        ),
        ("a.npy", _npy(np.array([1, -2, 3])), "id -2 at place 1"),
        ("a.npy", _npy(np.ones((2, 3), int)), "array of int64 with 2 dimensions"),
        ("a.npy", _npy(np.ones(9)), "array of float64"),
        ("a.npy", _npy(np.array([print], object), allow_pickle=True), "holds no ids"),
        ("a.npy", b"not numpy", "holds no ids"),
        ("a.npy", _npy(IDS)[:-3], "holds no ids"),
        ("a.npy", b"", "holds no ids"),
        ("a.bin", b"", "holds no ids"),
        ("a.bin", b"123", "holds no ids"),
        ("a.bin", b"1\0", "training split of a.bin has fewer than two tokens"),
    ],
)
def test_what_is_no_list_of_ids_is_refused_by_name(name: str, content: bytes, message: str) -> None:
    Path(name).write_bytes(content)
    with pytest.raises(AttnlmError, match=message):
        prepare(name, vocab_size=300)
    assert not any(Path("data").iterdir())


@pytest.mark.parametrize("name", ["nope.bin", "nope.npy"])
def test_a_missing_file_of_ids_cannot_be_read(name: str) -> None:
    for source, val_file in ((name, None), ("ids.npy", name)):
        with pytest.raises(AttnlmError, match=f"cannot read {name}: No such file or directory"):
            prepare(source, vocab_size=300, val_file=val_file)


def test_a_run_on_ids_is_a_run_without_bits_per_byte(tmp_path: Path) -> None:
    dataset = prepare("ids.npy", vocab_size=300)
    run = quick_run(dataset, checkpoint_dir=tmp_path, name="run")
    result = attnlm.evaluate(run)
    assert result.bits_per_byte is None and result.loss > 0
    (entry,) = attnlm.list_runs(tmp_path)
    assert entry.bits_per_byte is None and entry.val_loss is not None
    text = "".join(attnlm.sample(run, tokens=5, seed=1, prompt="3 1"))
    assert text.startswith("3 1 ") and all(0 <= int(word) < 300 for word in text.split())
    assert attnlm.train(resume=run.path, steps=6).evaluations()[-1].bits_per_byte is None
    for code, arguments in ((0, ["eval"]), (0, ["report", "-o", "page.html"]), (2, ["export"])):
        done = command(*arguments[:1], "run", *arguments[1:], "--checkpoint-dir", tmp_path,
                       *(["x", "--to", "hf"] if code else []), cwd=Path(), code=code)  # fmt: skip
        assert ("has no tokenizer" in done.stderr) == (code == 2)
