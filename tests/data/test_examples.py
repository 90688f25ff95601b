"""Examples with answers: tasks, records, their places in a split, and windows of whole examples."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnlm
from attnlm import AttnlmError, Batches, UsageError
from attnlm.base.files import write_json
from attnlm.data import contents
from attnlm.data import examples as marks
from attnlm.data.examples import IGNORED, Examples
from attnlm.text.tasks import TASKS, generate_examples
from attnlm.text.text_files import ANSWER_END, END, TURN, without_marks
from attnlm.tokens.tokenizer import END_OF_TEXT, CharTokenizer
from attnlm.workflows.answers import select_pairs
from tests.kit import command

pytestmark = pytest.mark.usefixtures("here")


def _is_balanced(text: str) -> bool:
    """Pairs of brackets vanish until none is left."""
    while (shorter := re.sub(r"\(\)|\[\]|\{\}", "", text)) != text:
        text = shorter
    return not text


def _closed(text: str) -> str:
    """What balances brackets: pairs vanish, and the others are turned around."""
    while (shorter := re.sub(r"\(\)|\[\]|\{\}", "", text)) != text:
        text = shorter
    return text[::-1].translate(str.maketrans("([{", ")]}"))


FACTS = {
    example[i : i + 2]: example.partition("=" + TURN)[2][i : i + 2]
    for example in generate_examples("facts", examples=5000, size=4)[0]
    for i in range(0, 8, 2)
}
"""The value of each name; if the task had two for a name, no solution would be right."""


def _solution(task: str, question: str) -> str:
    """The answer to a question, found in another way than the task draws it."""
    numbers = list(map(int, re.findall(r"\d+", question)))
    solutions: dict[str, Callable[[], str]] = {
        "copy": lambda: question,
        "reverse": lambda: "".join(reversed(question)),
        "sort": lambda: "".join(sorted(question)),
        "addition": lambda: str(sum(numbers)),
        "modular-addition": lambda: str(sum(numbers) % 97),
        "parity": lambda: str(sum(map(int, question)) % 2),
        "brackets": lambda: "yes" if _is_balanced(question) else "no",
        "recall": lambda: question[question.index(question[-1]) + 1],
        "induction": lambda: question[question.index(question[-1]) + 1],
        "selective-copy": lambda: question.replace(".", ""),
        "running-parity": lambda: "".join(
            str(question[: i + 1].count("1") % 2) for i in range(len(question))
        ),
        "closing": lambda: _closed(question),
        "facts": lambda: "".join(FACTS[name] for name in re.findall("..", question)),
    }
    return solutions[task]()


@pytest.mark.parametrize("task", TASKS)
def test_every_answer_of_a_task_is_right_and_no_question_appears_twice(task: str) -> None:
    found = generate_examples(task, examples=300, size=None)
    assert found == generate_examples(task, examples=300, size=TASKS[task].size)
    train, val, longer = found
    every = [*train, *val, *longer]
    questions = [without_marks(example) for example in every]
    assert len(set(questions)) == len(questions)
    assert (len(train), len(val)) == (300, 30)
    said = [example.removesuffix(ANSWER_END).split(TURN) for example in every]
    for example in said:
        before = ""
        for question, answer in zip(example[::2], example[1::2], strict=True):
            asked = before + question.removesuffix("=")
            assert answer == _solution(task, asked), example
            before = asked + answer
    lengths = [len(example[0]) for example in said]
    shortest = min(lengths[330:], default=99)
    assert task in ("addition", "modular-addition") or shortest > lengths[0]
    answers = [answer for example in said[:300] for answer in example[1::2]]
    assert max(map(answers.count, set(answers))) < 0.65 * len(answers)  # no answer by habit


def test_a_task_with_few_questions_uses_all_of_them_and_says_so() -> None:
    notes: list[object] = []
    dataset = attnlm.prepare("parity", length=5, on_event=notes.append)
    assert dataset.examples and (dataset.examples.train, dataset.examples.val) == (28, 4)
    assert "parity has only 32 questions of this size" in "\n".join(map(str, notes))


def test_a_prepared_task_has_its_examples_back() -> None:
    made = attnlm.prepare("addition", digits=2, examples=200)
    dataset = attnlm.open_dataset(made.path)
    assert dataset.examples == made.examples and dataset.floor == 0
    text = dataset.tokenizer.decode(dataset.train.tolist())
    assert re.fullmatch(r"(\d+\+\d+=\d+\n){200}", text)
    is_answer = dataset.train_examples.is_answer if dataset.train_examples else np.array([])
    after_signs = re.sub(r"[^=\n]+=|\d|\n", lambda m: "." * len(m[0]) if "=" in m[0] else "a", text)
    assert "".join("a" if answer else "." for answer in is_answer) == after_signs
    pairs = dict(select_pairs(dataset))
    assert pairs == {question: _solution("addition", question) for question in pairs}
    longer = dataset.longer_examples()
    assert longer is not None
    text = dataset.tokenizer.decode(longer[0].tolist())
    assert re.fullmatch(r"(\d+\+\d+=\d+\n){200}", text) and len(longer[1]) == 200
    assert all(_solution("addition", q) == a for q, a in re.findall(r"(.+)=(.+)\n", text))
    assert attnlm.prepare("addition", digits=2, examples=200).train_sha256 == made.train_sha256
    with pytest.raises(AttnlmError, match="exists with other content"):
        attnlm.prepare("addition", digits=3, examples=200)


def test_recall_asks_for_one_digit_after_another() -> None:
    dataset = attnlm.prepare("recall", length=3, examples=30)
    question, answer = select_pairs(dataset)[0]
    assert re.fullmatch(r"([a-z]\d){3}([a-z]\d){2}[a-z]", question)
    assert _solution("recall", question) == answer
    longer = dataset.longer_examples()
    assert longer is not None
    ids, places = longer
    for start, end in zip(places.starts[:9], places.ends[:9], strict=True):
        text, is_answer = dataset.tokenizer.decode(ids[start:end].tolist()), places.is_answer
        pairs = len(text) // 4
        asked = [n for n in range(len(text)) if is_answer[start + n]]
        assert asked == [*range(2 * pairs + 1, 4 * pairs, 2), 4 * pairs]  # each digit, and the end


def test_a_damaged_file_of_marks_is_refused() -> None:
    path = attnlm.prepare("copy", examples=20).path / "train.marks"
    first, *others = path.read_bytes()
    for content in (bytes([first ^ 1, *others]), bytes([first, *others[:-1]])):
        path.write_bytes(content)
        with pytest.raises(AttnlmError, match=r"train\.marks is damaged"):
            attnlm.open_dataset(path.parent)


@pytest.mark.parametrize("key", ["val_bytes", "val_answer_bytes"])
def test_forged_sizes_are_refused(key: str) -> None:
    path = attnlm.prepare("copy", examples=20).path / "meta.json"
    meta = json.loads(path.read_text())
    del meta["sha256"]
    (meta if key in meta else meta["examples"])[key] = 10**400
    write_json(path, meta)
    with pytest.raises(AttnlmError, match=f"{key}' cannot be"):
        attnlm.open_dataset(path.parent)


def _examples(lengths: list[int]) -> Examples:
    """Examples of these lengths, of which the second half of each is an answer."""
    is_answer = [i >= length - length // 2 for length in lengths for i in range(length)]
    starts = np.cumsum([0, *lengths[:-1]]).astype(np.int64)
    return Examples(starts, np.array(is_answer))


@pytest.mark.parametrize("only_answers", [True, False])
def test_windows_hold_whole_examples_and_no_target_behind_them(only_answers: bool) -> None:
    generator = np.random.default_rng(1)
    lengths = generator.integers(2, 9, 50).tolist()
    examples = _examples(lengths)
    tokens = np.arange(1, sum(lengths) + 1).astype(np.uint16)  # token i has the id i + 1
    sizes: dict[str, Any] = {"block_size": 16, "batch_size": 5, "stride": 16, "seed": 1}
    batches = Batches(tokens, examples=examples, only_answers=only_answers, **sizes)
    seen = set()
    for step in range(30):
        for inputs, targets in zip(*batches(step), strict=True):
            begin = int(inputs[0]) - 1
            assert begin in examples.starts
            counted = np.flatnonzero(targets != IGNORED)
            assert (targets[counted] == np.minimum(begin + counted + 2, len(tokens))).all()
            last = int(targets[counted[-1]])  # the offset behind the last token
            assert last in examples.ends and last - begin <= 17
            following = examples.ends[np.searchsorted(examples.ends, last) + 1 :][:1]
            assert not len(following) or following[0] - begin > 17  # no other would fit
            places = targets[counted] - 1
            assert not only_answers or examples.is_answer[places].all()
            inside = np.arange(begin + 1, last)
            assert set(places) == {i for i in inside if not only_answers or examples.is_answer[i]}
            seen |= set(places.tolist())
    assert seen >= set(np.flatnonzero(examples.is_answer).tolist())  # no answer is left out


def test_divided_examples_are_two_splits() -> None:
    before, after = _examples([4, 7, 2, 9]).divide_at(2)
    assert (before.starts.tolist(), after.starts.tolist()) == ([0, 4], [0, 2])
    assert before.ends.tolist() == [4, 11] and after.ends.tolist() == [2, 11]
    assert after.is_answer.tolist() == _examples([2, 9]).is_answer.tolist()


def test_an_example_longer_than_the_window_is_cut_at_its_end() -> None:
    examples = _examples([30, 4])
    targets = examples.targets(np.array([0]), np.arange(1, 11)[None], only_answers=False)
    assert targets.tolist() == [list(range(1, 11))]
    assert examples.packed(10).tolist() == [0, 1]


def test_a_window_can_have_fewer_examples_than_fit() -> None:
    examples = marks.limit_per_window(_examples([3, 4, 2, 5, 3]), 2)
    assert examples and examples.packed(30).tolist() == [0, 2, 4]
    assert examples.last_in_window(np.array([0, 2, 4]), 30).tolist() == [7, 14, 17]
    assert examples.per_window(30) == 1


def test_questions_and_answers_are_encoded_apart() -> None:
    tokenizer = CharTokenizer("\n =ab")
    answered = f"a={TURN}b{TURN}b={TURN}a{ANSWER_END}{END}", f"aa={TURN}bb{ANSWER_END}{END}"
    ids, found, size = marks.encode_examples("".join(answered), tokenizer, "\n")
    assert size == len("ba\nbb\n")
    other = marks.encode_examples(answered[1], tokenizer, "\n")[1]
    both = marks.join_examples([marks.encode_examples(answered[0], tokenizer, "\n")[1], other])
    assert both.starts.tolist() == found.starts.tolist()
    assert both.is_answer.tolist() == found.is_answer.tolist()
    assert tokenizer.decode(ids.tolist()) == "a=bb=a\naa=bb\n"
    assert found.starts.tolist() == [0, 7]
    assert found.is_answer.astype(int).tolist() == [0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1]


class Counted(np.ndarray[Any, Any]):
    """Counts the numbers in arrays that functions make of it."""

    made = 0

    def __array_function__(self, *call: Any) -> Any:
        result = super().__array_function__(*call)
        Counted.made += np.size(result)
        return result


def test_the_places_of_many_blocks_are_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "made", 0)
    answers = np.array([False, False, True]).view(Counted)
    block = Examples(np.array([0]), answers)
    blocks = (contents.count(np.zeros(3, int), 5000, 3, 3, block) for _ in range(100))
    found = contents.write_bin(Path("a.bin"), blocks).places
    assert found and found.starts.tolist() == list(range(0, 300, 3))
    assert found.is_answer.tolist() == [False, False, True] * 100
    assert Counted.made <= 2 * 300


def write_records(*lines: object) -> Path:
    Path("chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Path("chats.jsonl")


def test_records_become_examples_whose_answers_end() -> None:
    records = write_records(
        *({"question": f"say {i}", "answer": f"it is {i}\nyes"} for i in range(30))
    )
    dataset = attnlm.prepare(records, prompt_column="question", answer_column="answer")
    assert dataset.examples and (dataset.examples.train, dataset.examples.val) == (27, 3)
    assert dataset.examples.answer_end == ""
    said = dataset.tokenizer.decode(dataset.train.tolist()).split(END_OF_TEXT)
    assert said[0] == "say 0\nit is 0\nyes" and len(said) == 28
    for question, answer in select_pairs(dataset):
        assert answer == f"it is {question.removeprefix('say ')}\nyes"


def test_messages_become_conversations() -> None:
    lines: list[object] = []
    for i in range(20):
        said = [("system", "be brief"), ("user", f"a{i}"), ("assistant", "b"), ("user", "c")]
        said += [("assistant", "d"), ("user", "unanswered")]
        keys = ("role", "content") if i % 2 else ("from", "value")
        lines.append({"messages": [dict(zip(keys, one, strict=True)) for one in said]})
    records = write_records(*lines)
    Path("plain.txt").write_text("text without records")
    plain = attnlm.prepare("plain.txt", tokenizer="byte")
    for tokenizer, mark in (("byte", END_OF_TEXT), ("bpe:257", END_OF_TEXT), (plain.name, "\x03")):
        dataset = attnlm.prepare(records, prompt_column="messages", tokenizer=tokenizer)
        assert dataset.train_examples
        end = int(dataset.train_examples.ends[0])
        found = dataset.tokenizer.decode(dataset.train[:end].tolist())
        assert found == f"be brief\na0\nb{mark}c\nd{mark}"


# --- What is refused (more in errors.toml) --------------------------------------------------------


def test_batches_refuse_the_examples_of_another_split() -> None:
    dataset = attnlm.prepare("copy", examples=20, length=3)
    with pytest.raises(UsageError, match="`examples`"):
        Batches(dataset.train, block_size=8, batch_size=2, seed=1, examples=dataset.val_examples)


def test_prepare_shows_an_example(here: Path) -> None:
    done = command("prepare", "reverse", "--examples", "20", "--length", "3", cwd=here)
    shown = r"20 for training, 2 for validation and 200 longer ones, such as '\w+=\w+'"
    assert re.search(shown, done.stderr)
