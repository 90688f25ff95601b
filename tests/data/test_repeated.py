"""The same text in both splits: equal questions stand on one side, and other copies are noted."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import attnlm
from attnlm.base.events import Note
from attnlm.data import spool
from attnlm.workflows.answers import select_pairs
from tests.texts import json_lines

pytestmark = pytest.mark.usefixtures("here")


def notes_of(source: Any, **settings: Any) -> tuple[attnlm.Dataset, str]:
    """The data set, and what `prepare` notes about repeated texts."""
    events: list[object] = []
    dataset = attnlm.prepare(source, on_event=events.append, **settings)
    notes = [event.text for event in events if isinstance(event, Note)]
    return dataset, "\n".join(text for text in notes if re.match(r"\d+ of \d+ ", text))


def write_questions(path: Path, questions: Sequence[str]) -> Path:
    draws = random.Random(1)
    records = ({"q": q, "a": "".join(draws.choices("abcd", k=9))} for q in questions)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


QUESTIONS = [f"question {i}" for i in range(100)]
COLUMNS = {"prompt_column": "q", "answer_column": "a"}


@pytest.mark.parametrize("order", ["in turns", "in a row", "with blanks"])
def test_equal_questions_stand_in_the_same_split(order: str, here: Path) -> None:
    often = 4 * QUESTIONS if order == "in turns" else [q for q in QUESTIONS for _ in range(4)]
    if order == "with blanks":
        blanks = ("", "\n", " ", "\r\n\t")
        often = [blanks[i % 4] + q + blanks[i // 100] for i, q in enumerate(4 * QUESTIONS)]
    dataset, said = notes_of(write_questions(here / "qa.jsonl", often), **COLUMNS)
    validated = {question.strip() for question, _ in select_pairs(dataset)}
    trained = re.findall(r"question \d+", dataset.tokenizer.decode(dataset.train.tolist()))
    assert len(validated) == 10 and len(trained) == 360
    assert not validated & {*trained}
    assert "300 of 400 records repeat the question of another one: equal questions stand" in said
    # Each once, they are split as their records are.
    once, said = notes_of(write_questions(here / "once.jsonl", QUESTIONS), **COLUMNS)
    assert {question for question, _ in select_pairs(once)} == validated and not said


def test_conversations_that_begin_with_the_same_question_stand_in_the_same_split(
    here: Path,
) -> None:
    def record(first: str, *others: str) -> str:
        roles = ("user", "assistant") * 3
        said = zip(roles, (first, "yes", *others), strict=False)
        return json.dumps({"m": [{"role": role, "content": text} for role, text in said]})

    lines = [record(q) for q in QUESTIONS] + [record(q, "why?", "so") for q in QUESTIONS]
    (here / "chat.jsonl").write_text("\n".join(lines))
    dataset, said = notes_of("chat.jsonl", prompt_column="m")
    texts = [dataset.tokenizer.decode(ids.tolist()) for ids in (dataset.train, dataset.val)]
    trained, validated = ({*re.findall(r"question \d+", text)} for text in texts)
    assert (len(trained), len(validated)) == (90, 10) and "100 of 200 records" in said


def test_questions_that_a_validation_file_shares_are_counted(here: Path) -> None:
    source = write_questions(here / "qa.jsonl", QUESTIONS)
    val = write_questions(here / "val.jsonl", [*QUESTIONS[:7], "another", "and another"])
    _, said = notes_of(source, val_file=val, **COLUMNS)
    assert said == f"7 of 9 questions of {val} are also in {source}"


def test_a_file_named_twice_is_noted(here: Path) -> None:
    source = write_questions(here / "qa.jsonl", QUESTIONS)
    assert "100 of 200 records repeat" in notes_of([source, source], **COLUMNS)[1]
    (here / "a.txt").write_text("One two three. " * 40_000)  # longer than a piece
    _, said = notes_of(["a.txt", "a.txt"])
    assert said == "1 of 2 documents are copies of others"


def test_copies_of_documents_are_counted_in_both_splits(here: Path) -> None:
    (here / "texts").mkdir()
    for number in range(100):
        (here / "texts" / f"{number:02}.txt").write_text(f"The number is {number}.\n")
    assert notes_of("texts")[1] == ""
    shutil.copy(here / "texts" / "07.txt", here / "texts" / "7.txt")
    assert "1 of 101 documents are copies of others: " in notes_of("texts", force=True)[1]
    (here / "t.jsonl").write_bytes(json_lines(["text " + q for q in 4 * QUESTIONS]))
    dataset, said = notes_of("t.jsonl")
    texts = [dataset.tokenizer.decode(ids.tolist()) for ids in (dataset.train, dataset.val)]
    trained, validated = (re.findall(r"question \d+", text) for text in texts)
    shared = sum(one in trained for one in validated)
    assert said == (
        "300 of 400 documents are copies of others: "
        f"{shared} of {len(validated)} for validation are also in the training split"
    )


def test_blanks_at_the_ends_and_kinds_of_line_ends_make_no_other_document(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = ["a b\n\nc", " \n a b\n\nc", "a b\r\n\r\nc \r\n", "a b\r\rc\r"]
    others = ["ab\n\nc", "a b\nc", "a  b\n\nc"]
    (here / "t.jsonl").write_bytes(json_lines([*copies, *others]))
    assert "3 of 7 documents are copies of others" in notes_of("t.jsonl")[1]
    monkeypatch.setattr(spool, "BLOCK", 1)
    assert "3 of 7 documents are copies of others" in notes_of("t.jsonl", force=True)[1]


def test_lines_that_a_validation_file_shares_are_counted(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "a.txt").write_bytes(b"".join(f"line {i}\r\n\r\n".encode() for i in range(90)))
    (here / "val.txt").write_text("".join(f"line {i}\n\n" for i in range(80, 120)))
    assert notes_of("a.txt", val_file="val.txt")[1].endswith(
        "10 of 40 lines of val.txt are also in a.txt"
    )
    (here / "b.txt").write_text("nothing\n\nof it\n")
    assert notes_of("b.txt", val_file="val.txt")[1] == ""
    # Records have no line ends between them if an id follows each.
    (here / "r.jsonl").write_bytes(json_lines([f"line {i}" for i in range(90)]))
    assert "10 of 40 lines" in notes_of("r.jsonl", val_file="val.txt", tokenizer="byte")[1]
    # Lines longer than a piece are cut, so that no line is read more than once.
    monkeypatch.setattr(spool, "BLOCK", 10)
    (here / "long.txt").write_text("x" * 1000)
    assert "of long.txt are also in long.txt" in notes_of("long.txt", val_file="long.txt")[1]
