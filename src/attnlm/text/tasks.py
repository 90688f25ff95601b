"""Tasks with exact answers, such as copying and addition: questions drawn from a fixed seed."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from string import ascii_lowercase
from typing import NamedTuple

from attnlm.base.errors import UsageError
from attnlm.text.corpus_tales import random_below, uniform_words
from attnlm.text.text_files import ANSWER_END, TURN

_MODULUS = 97
_VALIDATION_FRACTION = 0.1
_MOST_VALIDATION = 1000
_LONGER = 200  # examples
_MOST_REPEATED = 20  # times as many questions in a row that were drawn before as questions found
_FACTS = 256
_ASKED = 4  # letters of induction
_BRACKETS = ("()", "[]", "{}")

Below = Callable[[int], int]
"""Returns a random integer from 0 to n − 1, given n."""
Draw = Callable[[Below, int], tuple[str, str]]
"""Returns a random question of a size, and its answer."""


class Task(NamedTuple):
    """A kind of question.

    A question ends with the text that separates it from its answer. `setting` is the name of the
    size, "" for a task without a size, which is between `smallest` and `largest`.
    """

    draw: Draw
    setting: str = "length"
    size: int = 8
    largest: int = 64
    smallest: int = 1
    question_end: str = "="


def _of_letters(answer: Callable[[str], str]) -> Draw:
    def draw(below: Below, length: int) -> tuple[str, str]:
        letters = "".join(ascii_lowercase[below(26)] for _ in range(length))
        return letters, answer(letters)

    return draw


def _draw_addition(below: Below, digits: int) -> tuple[str, str]:
    a = below(10**digits)
    b = below(10**digits)
    return f"{a}+{b}", str(a + b)


def _draw_modular_addition(below: Below, _: int) -> tuple[str, str]:
    a = below(_MODULUS)
    b = below(_MODULUS)
    return f"{a}+{b}", str((a + b) % _MODULUS)


def _draw_parity(below: Below, length: int) -> tuple[str, str]:
    bits = "".join(str(below(2)) for _ in range(length))
    return bits, str(bits.count("1") % 2)


def _draw_running_parity(below: Below, length: int) -> tuple[str, str]:
    """Draw bits, and as the answer for each whether the number of ones so far is odd."""
    bits = [below(2) for _ in range(length)]
    return "".join(map(str, bits)), "".join(str(n % 2) for n in itertools.accumulate(bits))


def _draw_closing(below: Below, length: int) -> tuple[str, str]:
    """Draw brackets of which some stay open, and as the answer those that close them."""
    brackets: list[str] = []
    missing: list[str] = []
    while len(brackets) < length:
        if len(missing) > 1 and not below(4):  # the first one stays open
            brackets.append(missing.pop())
        else:
            kind = _BRACKETS[below(len(_BRACKETS))]
            brackets.append(kind[0])
            missing.append(kind[1])
    return "".join(brackets), "".join(reversed(missing))


def _draw_brackets(below: Below, length: int) -> tuple[str, str]:
    """Draw balanced brackets and, in half of the cases, exchange one, which unbalances them."""
    brackets: list[str] = []
    missing: list[str] = []  # closing brackets
    for left in range(length, 0, -1):
        if missing and (len(missing) == left or below(2)):
            brackets.append(missing.pop())
        else:
            kind = _BRACKETS[below(len(_BRACKETS))]
            brackets.append(kind[0])
            missing.append(kind[1])
    if below(2):
        return "".join(brackets), "yes"
    place = below(length)
    other_brackets = [bracket for bracket in "".join(_BRACKETS) if bracket != brackets[place]]
    brackets[place] = other_brackets[below(len(other_brackets))]
    return "".join(brackets), "no"


def _draw_selective_copy(below: Below, length: int) -> tuple[str, str]:
    """Draw letters among as many dots, and the letters alone as the answer."""
    letters = [ascii_lowercase[below(26)] for _ in range(length)]
    left = iter(letters)
    places = _shuffle(below, "x" * length + "." * length)
    return "".join(next(left) if place == "x" else "." for place in places), "".join(letters)


def _draw_induction(below: Below, length: int) -> tuple[str, str]:
    """Draw different letters, and as the answer pairs of a letter and the one behind it."""
    letters = _shuffle(below, ascii_lowercase)[:length]
    pairs = [one + following for one, following in itertools.pairwise(letters)]
    return "".join(letters), "".join(_shuffle(below, pairs)[:_ASKED])


def _draw_facts(below: Below, names: int) -> tuple[str, str]:
    """Draw names, and the value of each as the answer. The values are the same in all questions."""
    values = _values_of_names()
    drawn = [below(len(values)) for _ in range(names)]
    name_of = [ascii_lowercase[number // 16] + ascii_lowercase[number % 16] for number in drawn]
    return "".join(name_of), "".join(values[number] for number in drawn)


@functools.cache
def _values_of_names() -> list[str]:
    words = uniform_words("attnlm values 1")
    return [
        "".join(ascii_lowercase[random_below(words, 26)] for _ in range(2)) for _ in range(_FACTS)
    ]


def _draw_recall(below: Below, length: int) -> tuple[str, str]:
    """Draw pairs of a letter and a digit, and the same pairs in another order as the answer."""
    letters = _shuffle(below, ascii_lowercase)[:length]
    pairs = [letter + str(below(10)) for letter in letters]
    return "".join(pairs), "".join(_shuffle(below, pairs))


def _shuffle(below: Below, items: Sequence[str]) -> list[str]:
    left = list(items)
    return [left.pop(below(len(left))) for _ in items]


TASKS = {
    "copy": Task(_of_letters(str)),
    "reverse": Task(_of_letters(lambda letters: letters[::-1])),
    "sort": Task(_of_letters(lambda letters: "".join(sorted(letters)))),
    "addition": Task(_draw_addition, "digits", 3, 9),
    "modular-addition": Task(_draw_modular_addition, "", 0),
    "parity": Task(_draw_parity, size=10),
    "brackets": Task(_draw_brackets, size=12),
    "recall": Task(_draw_recall, size=4, largest=26, question_end=""),
    "induction": Task(_draw_induction, size=12, largest=26, smallest=2, question_end=""),
    "selective-copy": Task(_draw_selective_copy),
    "running-parity": Task(_draw_running_parity, size=16),
    "closing": Task(_draw_closing, size=12),
    "facts": Task(_draw_facts, size=2),
}


def generate_examples(
    name: str, *, examples: int, size: int | None
) -> tuple[list[str], list[str], list[str]]:
    """Return examples of a task for training and for validation, and longer ones.

    TURN and ANSWER_END mark the answers. The examples are the same on every machine.
    There are `examples` training examples, and a tenth as many for validation, but at most 1,000.
    All questions differ. If the task has fewer questions, all are used, a tenth of them for
    validation. Longer examples have half a size more, or one digit more; a task without a size, or
    whose largest size is less, has none. Raises UsageError for a size that the task can't have.
    """
    task = TASKS[name]
    size = task.size if size is None else size
    if task.setting and not task.smallest <= size <= task.largest:
        raise UsageError(
            f"invalid value for `{task.setting}`: {size}",
            f"{name} takes a number from {task.smallest} to {task.largest}",
        )
    if name == "brackets" and size % 2:
        raise UsageError("brackets of an odd `length` are never balanced", f"use {size + 1}")
    count = examples + min(_MOST_VALIDATION, math.ceil(_VALIDATION_FRACTION * examples))
    drawn = _draw_examples(name, size, count)
    held_out = min(_MOST_VALIDATION, math.ceil(_VALIDATION_FRACTION * len(drawn)))
    if len(drawn) == count:
        held_out = count - examples
    longer_size = size + 1 if task.setting == "digits" else math.ceil(1.5 * size / 2) * 2
    longer_examples = []
    if task.setting and longer_size <= task.largest:
        longer_examples = _draw_examples(name, longer_size, _LONGER)
    return drawn[held_out:], drawn[:held_out], longer_examples


def _draw_examples(name: str, size: int, most: int) -> list[str]:
    """Return up to `most` examples with different questions."""
    task = TASKS[name]
    words = uniform_words(f"attnlm {name} 1, {size}")
    answers: dict[str, str] = {}
    repeated = 0
    while len(answers) < most and repeated <= _MOST_REPEATED * (len(answers) + 1):
        question, answer = task.draw(lambda n: random_below(words, n), size)
        repeated = repeated + 1 if question in answers else 0
        answers[question] = answer
    if name in ("recall", "induction"):
        return [_turn_per_letter(*drawn) + ANSWER_END for drawn in answers.items()]
    end = task.question_end + TURN
    return [question + end + answer + ANSWER_END for question, answer in answers.items()]


def _turn_per_letter(question: str, answer: str) -> str:
    """Return the question with each letter of the answer, which asks for what follows."""
    return question + TURN.join(answer)
