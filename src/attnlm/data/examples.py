"""Examples in a split: where they start, which tokens are answers, and windows of whole examples.

Axes: N tokens of a split, E examples, W windows, T tokens of a window.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnlm.base.errors import AttnlmError
from attnlm.base.files import open_replacement, read_bytes, write_bytes
from attnlm.text.text_files import ANSWER_END, END, TURN
from attnlm.tokens.tokenizer import Tokenizer

IGNORED = -100
"""The target of a position that does not count in the loss: PyTorch's default `ignore_index`."""

LONGER = "longer.jsonl"
"""The name of the file with longer examples of a task."""

Ids = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class Examples:
    """The examples of a split, of which the first starts at token 0 and the last ends at token N.

    `starts`, of int64 and shape (E,), are the offsets of their first tokens. `is_answer`, of bool
    and shape (N,), is True for each token of an answer, with the token that ends the answer.
    A window has at most `most` examples; None stands for as many as fit.
    """

    starts: NDArray[np.int64]
    is_answer: NDArray[np.bool_]
    most: int | None = None

    def __len__(self) -> int:
        return len(self.starts)

    def divide_at(self, index: int) -> tuple[Examples, Examples]:
        """Return the examples before `index`, and the others, each as a split of its own."""
        place = int(self.starts[index])
        before = replace(self, starts=self.starts[:index], is_answer=self.is_answer[:place])
        after = self.starts[index:] - place
        return before, replace(self, starts=after, is_answer=self.is_answer[place:])

    @functools.cached_property
    def ends(self) -> NDArray[np.int64]:
        """Return the offsets behind the last token of each example, (E,)."""
        return np.append(self.starts[1:], len(self.is_answer))

    @property
    def longest(self) -> int:
        """Return the number of tokens of the longest example."""
        return int((self.ends - self.starts).max())

    def is_longer(self, length: int) -> NDArray[np.bool_]:
        """Return for each example whether windows of `length` tokens cut it, (E,)."""
        return self.ends - self.starts > length + 1

    def has_answers(self, length: int) -> bool:
        """Return True if a window of `length` tokens has targets that belong to an answer."""
        ends = np.minimum(self.starts + length + 1, self.ends)
        before = np.append(0, np.cumsum(self.is_answer))
        return bool((before[ends] > before[self.starts + 1]).any())

    def last_in_window(self, first_W: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Return the offset behind the last whole example of windows that begin with an example.

        `first_W` are indices of examples. A window has `length` tokens and their targets. An
        example longer than a window is cut at the window's end.
        """
        most_W = np.minimum(self.starts[first_W] + length + 1, len(self.is_answer))
        return np.minimum(self.ends[self._first_behind(first_W, length) - 1], most_W)

    def _first_behind(self, first_W: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Return the index of the first example behind windows that begin with `first_W`."""
        fitting_W = np.searchsorted(self.ends, self.starts[first_W] + length + 1, "right")
        if self.most is not None:
            fitting_W = np.minimum(fitting_W, first_W + self.most)
        return np.maximum(fitting_W, first_W + 1)

    def targets(
        self, first_W: NDArray[np.int64], windows_WT: NDArray[np.integer[Any]], only_answers: bool
    ) -> NDArray[np.int64]:
        """Return the targets of windows that begin with the examples `first_W`, (W, T).

        `windows_WT` are the ids of the targets' positions. The target is IGNORED behind the last
        whole example of a window and, if `only_answers`, for tokens that belong to no answer.
        """
        begin_W1 = self.starts[first_W, None] + 1
        places_WT = begin_W1 + np.arange(windows_WT.shape[1])
        counts_WT = places_WT < self.last_in_window(first_W, windows_WT.shape[1])[:, None]
        if only_answers:
            counts_WT &= self.is_answer[np.minimum(places_WT, len(self.is_answer) - 1)]
        return np.where(counts_WT, windows_WT.astype(np.int64, "C"), np.int64(IGNORED))

    def windows(
        self,
        read: Callable[[NDArray[np.int64]], NDArray[Any]],
        first_W: NDArray[np.int64],
        length: int,
        only_answers: bool,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return inputs and targets, each (W, T), of windows that begin with these examples.

        `read` returns the ids at these places of the split.
        """
        places_WT = self.starts[first_W, None] + np.arange(length + 1)
        # The last windows end behind the last token.
        ids_WT = read(np.minimum(places_WT, len(self.is_answer) - 1)).astype(np.int64)
        inputs_WT = np.ascontiguousarray(ids_WT[:, :-1])
        return inputs_WT, self.targets(first_W, ids_WT[:, 1:], only_answers)

    def packed(self, length: int) -> NDArray[np.int64]:
        """Return the first example of each window, (W,), if windows take the examples in order.

        Each window has as many whole examples as fit into `length` tokens and their targets.
        """
        following = self._first_behind(np.arange(len(self)), length)
        first = [0]
        while (after := int(following[first[-1]])) < len(self):
            first.append(after)
        return np.array(first, np.int64)

    def per_window(self, length: int) -> int:
        """Return how many examples a window has in `packed`, on average, rounded down."""
        return max(1, len(self) // len(self.packed(length)))


def join_examples(parts: Sequence[Examples]) -> Examples:
    """Return the examples of texts that follow each other, at least one."""
    places = itertools.accumulate((len(part.is_answer) for part in parts), initial=0)
    starts = [part.starts + place for part, place in zip(parts, places, strict=False)]
    return Examples(np.concatenate(starts), np.concatenate([part.is_answer for part in parts]))


def limit_per_window(examples: Examples | None, most: int | None) -> Examples | None:
    """Return examples of which a window has at most `most`; None for a text."""
    return None if examples is None else replace(examples, most=most)


def encode_examples(text: str, tokenizer: Tokenizer, answer_end: str) -> tuple[Ids, Examples, int]:
    """Return the ids of examples, (N,), their places, and the UTF-8 bytes of their answers.

    Each example is its question, then its answer and its end: `answer_end`, or the end-of-text id
    for "". A token never crosses the end of a question or an answer. Raises AttnlmError if the
    vocabulary lacks a character, and for a text that contains the end of answers.
    """
    end_ids = tokenizer.encode(answer_end) if answer_end else [tokenizer.end_of_text or 0]
    end_text = answer_end or tokenizer.end_text
    ids: list[int] = []
    lengths: list[int] = []  # of questions and answers in turns
    starts: list[int] = []
    answer_bytes = 0
    for example in text.split(END)[:-1]:
        starts.append(len(ids))
        before = len(ids)
        ids += [] if tokenizer.beginning is None else [tokenizer.beginning]
        for is_answer, part in enumerate(example.split(TURN)):
            said, *ends = part.split(ANSWER_END)
            if end_text in said and (is_answer % 2 or not answer_end):
                message = f"{said[:60]!r} contains {end_text}, which ends an answer"
                if end_text == "\n":
                    of = f"the vocabulary of {tokenizer.dataset}"
                    message = f"{of} has no end for answers of several lines"
                raise AttnlmError(
                    message, "leave it out, or prepare the first run's text with `tokenizer` byte"
                )
            ids += [*tokenizer.encode(said), *end_ids * len(ends)]
            lengths.append(len(ids) - before)
            before = len(ids)
            if is_answer % 2:
                answer_bytes += len(said.encode()) + len(ends) * max(1, len(answer_end.encode()))
    is_answer_N = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
    places = Examples(np.array(starts, np.int64), is_answer_N)
    return np.array(ids, np.uint32), places, answer_bytes


# --- The file of marks ----------------------------------------------------------------------------
# Two arrays of N bits, each padded to whole bytes: is_answer, and True at each example's start.


def write_marks(path: Path, examples: Examples) -> None:
    """Write the places of examples to a file."""
    is_start = np.zeros(len(examples.is_answer), np.bool_)
    is_start[examples.starts] = True
    with open_replacement(path) as file:
        file.write(np.packbits(examples.is_answer).tobytes() + np.packbits(is_start).tobytes())


def read_marks(path: Path, tokens: int) -> Examples:
    """Return the places of examples in a split of `tokens` tokens."""
    content = np.frombuffer(read_bytes(path), np.uint8)
    is_answer, is_start = (np.unpackbits(part, count=tokens) for part in content.reshape(2, -1))
    return Examples(np.flatnonzero(is_start).astype(np.int64), is_answer.view(np.bool_))


# --- The file of longer examples ------------------------------------------------------------------
# A line of JSON for each: question, answer, and perhaps later questions and answers, in turns.


def write_longer(path: Path, examples: Sequence[str]) -> None:
    """Write examples, whose answers TURN and ANSWER_END mark, to a file."""
    turns = (example.removesuffix(ANSWER_END).split(TURN) for example in examples)
    write_bytes(path, "".join(json.dumps(example) + "\n" for example in turns).encode())


def read_longer(path: Path) -> str:
    """Return the text that `encode_examples` takes."""
    lines = map(json.loads, read_bytes(path).splitlines())
    return "".join(TURN.join(turns) + ANSWER_END + END for turns in lines)
