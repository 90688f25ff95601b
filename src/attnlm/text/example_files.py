"""Examples: questions with their answers, from two columns of records or a list of messages."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from attnlm.base.errors import AttnlmError
from attnlm.text.record_files import require_text

if TYPE_CHECKING:
    from attnlm.text.corpus import TextFile

QUESTION_END = "\n"
END_OF_TEXT = "\x03"
"""The control character "end of text". It ends answers if the tokenizer has no end-of-text id."""
_ROLES = {
    **dict.fromkeys(("system", "user", "human"), "question"),
    **dict.fromkeys(("assistant", "gpt", "model"), "answer"),
}
_ONE_MESSAGE = 'a message is like {"role": "user", "content": "…"}'


class Turn(NamedTuple):
    """A question, with the text that separates it from its answer, and the answer.

    `ends` is False if the next question follows the answer without an end of the answer.
    """

    question: str
    answer: str
    ends: bool = True


Example: TypeAlias = tuple[Turn, ...]
"""One turn, or the turns of a conversation."""


def read_examples(
    files: Iterable[TextFile], prompt_column: str, answer_column: str | None
) -> Iterator[Example]:
    """Yield the examples in files of records.

    `prompt_column` has the questions and `answer_column` the answers, both texts. Without
    `answer_column`, `prompt_column` has lists of messages, each with a role and a content.
    """
    columns = [prompt_column] if answer_column is None else [prompt_column, answer_column]
    for file in files:
        for where, values in file.records(columns):
            if answer_column is None:
                yield _conversation_turns(values[0], prompt_column, where)
            else:
                question, answer = map(require_text, values, columns, itertools.repeat(where))
                yield (_checked_turn(question, answer, where),)


def _checked_turn(question: str, answer: str, where: str) -> Turn:
    if not question or not answer:
        raise AttnlmError(
            f"{where} has an empty {'answer' if question else 'question'}", "leave it out"
        )
    if END_OF_TEXT in question + answer:
        raise AttnlmError(
            f"{where} has the control character U+0003, which ends answers", "remove it"
        )
    return Turn(question + QUESTION_END, answer)


def _conversation_turns(messages: object, column: str, where: str) -> Example:
    """Return the turns of a list of messages. Messages in a row of one side are joined."""
    if not isinstance(messages, list) or not all(isinstance(m, Mapping) for m in messages):
        raise AttnlmError(
            f"{where}: column {column!r} is not a list of messages",
            f"{_ONE_MESSAGE}; texts need `answer_column` too",
        )
    texts_by_side = [_side_and_text(message, column, where) for message in messages]
    joined = [
        (side, "\n".join(text for _, text in group))
        for side, group in itertools.groupby(texts_by_side, key=lambda message: message[0])
    ]
    if not joined or joined[0][0] != "question":
        raise AttnlmError(f"{where} does not begin with a question", "leave it out")
    if len(joined) < 2:
        raise AttnlmError(f"{where} has no answer", "leave it out")
    texts = [text for _, text in joined]
    turns = zip(texts[::2], texts[1::2], strict=False)  # without a last question
    return tuple(_checked_turn(question, answer, where) for question, answer in turns)


def _side_and_text(message: Mapping[str, Any], column: str, where: str) -> tuple[str, str]:
    """Return the side of a message, "question" or "answer", and its text."""
    role = message.get("role", message.get("from"))
    content = message.get("content", message.get("value"))
    if not isinstance(role, str) or role not in _ROLES:
        raise AttnlmError(
            f"{where} has a message with the role {role!r}",
            f"{_ONE_MESSAGE}; roles are {', '.join(_ROLES)}",
        )
    return _ROLES[role], require_text(content, column, f"{where}: a message")
