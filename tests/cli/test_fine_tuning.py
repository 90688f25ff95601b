"""Fine-tuning on thirty questions: each command leads to the next one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import attnlm
from attnlm.base.errors import AttnlmError
from attnlm.data.batches import Batches
from tests.kit import QUICK, Done, command, fails
from tests.models import FRUITS

SMALL = ["--steps", "2", "--seed", "1", "--batch-size", "2"]
COLUMNS = ["--prompt-column", "question", "--answer-column", "answer"]


def following(done: Done) -> list[str]:
    """The last command that a command names as the next one."""
    *_, last = re.findall("^next  attnlm (.*)$", done.stderr, flags=re.MULTILINE)
    return str(last).split()


@pytest.fixture(scope="module", params=["char", "byte", "bpe:300"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run on a text, named base, and thirty short questions."""
    folder = tmp_path_factory.mktemp(request.param.replace(":", ""))
    (folder / "fruits.txt").write_text(FRUITS)
    command("prepare", "fruits.txt", "--tokenizer", request.param, cwd=folder)
    command("train", "--embed-dim", "8", "--heads", "2", *SMALL, "--name", "base", cwd=folder)
    lines = [json.dumps({"question": str(i), "answer": str(i % 3)}) for i in range(30)]
    (folder / "qa.jsonl").write_text("\n".join(lines))
    return folder


def test_thirty_questions_fine_tune_a_run(trained: Path) -> None:
    text = ["prepare", "qa.jsonl", "--tokenizer", "base"]
    if "char" in trained.name:
        fails(*text, cwd=trained, code=1, says="no column 'text'", hints="need --prompt-column and")
    done = command(*text, *COLUMNS, cwd=trained)
    assert "27 for training, 3 for validation" in done.stderr and "too small" not in done.stderr
    assert following(done) == ["train", "--from", "base"]
    done = command(*following(done), *SMALL, "--name", "tuned", cwd=trained)
    assert following(done) == ["sample"]
    command(*following(done), "--prompt", "7", cwd=trained)
    for other in ("eval", "report", "heads"):
        command(other, cwd=trained)
    dataset = attnlm.open_dataset(trained / "data" / "qa-base")
    assert dataset.examples and dataset.val_tokens < 64  # fewer than the context
    end = {"char": "\n", "byte": "\x03", "bpe300": "\x03"}
    assert dataset.examples.answer_end == end[re.sub(r"\d$", "", trained.name)]


def test_a_context_longer_than_a_split_of_examples_has_the_targets_of_a_shorter_one(
    trained: Path,
) -> None:
    words = ["prepare", "qa.jsonl", "--val-fraction", "0.5", "--name", "half", *COLUMNS]
    command(*words, cwd=trained)
    dataset = attnlm.open_dataset(trained / "data" / "half")
    assert dataset.val_examples is not None and 30 < dataset.val_tokens < 200
    losses = [
        attnlm.train(
            dataset,
            checkpoint_dir=trained / "short",
            model="bigram",
            **{**QUICK, "block_size": length, "examples_per_window": 3},
        ).evaluations()[-1]
        for length in (30, 200)
    ]
    assert losses[0].val_loss == pytest.approx(losses[1].val_loss, abs=1e-6)
    batches = Batches(
        dataset.val, block_size=200, batch_size=1, seed=1, examples=dataset.val_examples
    )
    assert (batches(0)[1] >= 0).sum() < dataset.val_tokens


def test_hints_of_a_fixed_context_do_not_ask_to_change_it(tmp_path: Path) -> None:
    (tmp_path / "fruits.txt").write_text(FRUITS)
    command("prepare", "fruits.txt", "--name", "fruits", cwd=tmp_path)
    options = ["--model", "bigram", "--steps", "1", "--seed", "1"]
    command("train", *options, "--block-size", "30", "--name", "base", cwd=tmp_path)
    (tmp_path / "few.txt").write_text(FRUITS[:200])
    done = command("prepare", "few.txt", "--tokenizer", "base", "--name", "few", cwd=tmp_path)
    assert following(done) == ["train", "--from", "base"]
    with pytest.raises(AttnlmError, match="the validation split has 20 tokens") as caught:
        attnlm.train(
            tmp_path / "data" / "few", start_from=tmp_path / "checkpoints" / "base", steps=1
        )
    assert caught.value.hint == "prepare a longer text, or with a larger `val_fraction`"
    record = json.dumps({"question": "1 2 3 " * 9, "answer": "3"})
    (tmp_path / "qa.jsonl").write_text(f"{record}\n" + f"{record.replace('1', '3')}\n" * 9)
    words = ["prepare", "qa.jsonl", "--tokenizer", "base", *COLUMNS, "--val-file", "qa.jsonl"]
    command(*words, cwd=tmp_path)
    says = "--block-size 30 ends before every answer"
    fails("train", "--from", "base", cwd=tmp_path, code=1, says=says, hints="shorten the questions")


def test_an_answer_of_several_lines_needs_a_vocabulary_with_an_end(tmp_path: Path) -> None:
    (tmp_path / "fruits.txt").write_text(FRUITS)
    command("prepare", "fruits.txt", "--name", "fruits", cwd=tmp_path)
    records = [json.dumps({"question": str(i), "answer": "1\n2"}) for i in range(30)]
    (tmp_path / "qa.jsonl").write_text("\n".join(records))
    words = ["prepare", "qa.jsonl", "--tokenizer", "fruits", *COLUMNS]
    fails(*words, cwd=tmp_path, code=1, says="no end for answers of several", hints="byte")
