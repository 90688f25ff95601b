"""A question is asked as it was trained: the same ids, whatever it begins and ends with."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

import attnlm
from attnlm.generation.sampling import load_sampler
from attnlm.workflows.answers import QuestionFormat, format_of, select_pairs

ENDS = ("", "\n", "\n\n", "\r", "\r\n", " ", "\u2028", "=", "<|endoftext|", "\x02")
QUESTIONS = [f"{a}which {i}{b}" for i, (a, b) in enumerate(itertools.product(ENDS, ENDS))]


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe:300"])
def test_a_question_is_asked_with_the_ids_of_its_training(tokenizer: str, tmp_path: Path) -> None:
    records = (json.dumps({"q": q, "a": f"{i}"}) + "\n" for i, q in enumerate(QUESTIONS))
    (tmp_path / "q.jsonl").write_text("".join(records))
    dataset = attnlm.prepare(
        tmp_path / "q.jsonl",
        prompt_column="q",
        answer_column="a",
        val_fraction=0.5,
        tokenizer=tokenizer,
        data_dir=tmp_path / "data",
    )
    sizes: dict[str, Any] = {"model": "bigram", "block_size": 64, "batch_size": 2, "steps": 1}
    run = attnlm.train(dataset, checkpoint_dir=tmp_path / "checkpoints", **sizes)
    sampler, format = load_sampler(run), format_of(run)
    assert format is not None and dataset.val_examples is not None
    pairs = select_pairs(dataset)
    examples = dataset.val_examples
    for number, pair in enumerate(pairs):
        ids = sampler.prompt_ids(format.prompt(pair[0]))
        place = slice(examples.starts[number], examples.ends[number])
        assert ids == dataset.val[place][~examples.is_answer[place]].tolist(), pair
    assert {question for question, _ in pairs} < set(QUESTIONS)


def test_the_end_of_a_task_may_be_typed() -> None:
    format = QuestionFormat("=")
    assert format.prompt("2+3") == format.prompt("2+3=") == "2+3="
