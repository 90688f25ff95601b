"""Answers of a run: to questions, and to questions whose right answers are known."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from attnlm.base.errors import AttnlmError
from attnlm.data.dataset import Dataset, evenly_spaced
from attnlm.generation.sampling import Sampler, load_sampler
from attnlm.generation.sampling_config import SamplingConfig
from attnlm.runs.run import Run, open_run
from attnlm.text.record_files import record_texts
from attnlm.text.text_files import record_suffix

_SPARE = 8  # tokens after the longest right answer, which show that an answer does not end
_MOST_ANSWER = 1000  # tokens


@dataclass(frozen=True)
class QuestionFormat:
    """The texts that end a question and an answer, as the examples of the training had them.

    `answer_end` is "" if the tokenizer's end-of-text id ends answers.
    """

    question_end: str = ""
    answer_end: str = ""

    def prompt(self, question: str) -> str:
        """Return the prompt for a question, as training has it.

        The end of a task's question, such as `=`, may be there already; a newline may not, since
        the question itself may end with one.
        """
        if self.question_end.isspace():
            return question + self.question_end
        return question.removesuffix(self.question_end) + self.question_end

    def with_stop(self, config: SamplingConfig) -> SamplingConfig:
        """Return the settings of sampling with a stop at the end of the answer."""
        if not self.answer_end or config.ignore_eos:
            return config
        return replace(config, stop=(*config.stop_texts, self.answer_end))


def format_of(run: Run) -> QuestionFormat | None:
    """Return the format of the examples that a run was trained on; None if it had none."""
    if run.dataset.question_end is None:
        return None
    return QuestionFormat(run.dataset.question_end, run.dataset.answer_end or "")


def answers(
    sampler: Sampler, format: QuestionFormat, questions: Sequence[str], tokens: int
) -> list[str]:
    """Return the answer to each question, decoded greedily, of `tokens` tokens at most.

    Raises AttnlmError if the vocabulary lacks characters of a question.
    """
    config = format.with_stop(SamplingConfig(tokens=tokens, temperature=0.0))
    return sampler.samples([sampler.prompt_ids(format.prompt(q)) for q in questions], config)[0]


class Answered(NamedTuple):
    """A question, its right answer, and the answer of a run."""

    prompt: str
    answer: str
    said: str

    @property
    def is_right(self) -> bool:
        """Return True if the run's answer is the right one."""
        return self.said == self.answer


Pair = tuple[str, str]
"""A question and its right answer."""


def generate(
    run: str | Path | Run | None = None,
    prompts: str | Iterable[str] = (),
    *,
    tokens: int = 100,
    checkpoint: str = "auto",
    device: str = "auto",
) -> list[str]:
    """Return a run's answers to questions, decoded greedily and in batches.

        attnlm.generate("transformer-001", ["354+81", "12+7"])  # ["435", "19"]

    If the run was trained on examples, each question is ended as in training, and its answer ends
    where the model ends it, after `tokens` tokens at most. Otherwise, the texts are continued by
    `tokens` tokens. Raises AttnlmError (UsageError for invalid arguments).
    """
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    opened = open_run(run)
    sampler = load_sampler(opened, checkpoint=checkpoint, device=device)
    if not prompts:
        return []
    return answers(sampler, format_of(opened) or QuestionFormat(), prompts, tokens)


def answer_pairs(
    run: str | Path | Run | None,
    pairs: Iterable[Pair],
    *,
    checkpoint: str = "auto",
    device: str = "auto",
) -> list[Answered]:
    """Ask a run questions whose right answers are known.

        answers = attnlm.answer_pairs("transformer-001", [("354+81", "435")])
        sum(answer.is_right for answer in answers) / len(answers)

    Answers are decoded greedily. If the run was not trained on examples, an answer is right if the
    continuation begins with it. Raises AttnlmError if `pairs` is empty, or a vocabulary lacks
    characters of a question.
    """
    opened = open_run(run)
    sampler = load_sampler(opened, checkpoint=checkpoint, device=device)
    return ask(sampler, format_of(opened), list(pairs))


def ask(sampler: Sampler, format: QuestionFormat | None, pairs: Sequence[Pair]) -> list[Answered]:
    """Return the answers of a loaded model to `pairs`; `format` is None for a model of texts."""
    if not pairs:
        raise AttnlmError("there are no questions", "give at least one question and its answer")
    if empty := next((prompt for prompt, answer in pairs if not answer), None):
        raise AttnlmError(f"the answer to {empty[:60]!r} is empty", "leave this question out")
    longest = max(len(sampler.tokenizer.encode(answer)) for _, answer in pairs)
    tokens = min(longest + _SPARE, _MOST_ANSWER)
    texts = answers(sampler, format or QuestionFormat(), [prompt for prompt, _ in pairs], tokens)
    return [
        Answered(prompt, answer, text if format is not None else text[: len(answer)])
        for (prompt, answer), text in zip(pairs, texts, strict=True)
    ]


def read_pairs(path: Path) -> list[Pair]:
    """Return the questions and answers in a file of records. Raises AttnlmError."""
    if not record_suffix(path):
        raise AttnlmError(
            f"{path} is not a file of records",
            'use a .jsonl file of records such as {"prompt": "2+3", "answer": "5"}',
        )
    columns = (record_texts(path, column) for column in ("prompt", "answer"))
    return list(zip(*columns, strict=True))


def select_pairs(dataset: Dataset, most: int | None = None) -> list[Pair]:
    """Return questions and answers of the validation split, spread evenly, at most `most`.

    Of an example with several answers, the question is all before the first answer that has an end.
    The list is empty for a text.
    """
    examples = dataset.val_examples
    facts = dataset.examples
    if examples is None or facts is None:
        return []
    decode = dataset.tokenizer.decode
    end_ids: list[int | None] = [*dataset.tokenizer.encode(facts.answer_end)]
    end_ids = end_ids or [dataset.tokenizer.end_of_text]
    pairs = []
    total = len(examples)
    for index in evenly_spaced(total, total if most is None else most):
        ids = dataset.val[examples.starts[index] : examples.ends[index]].tolist()
        is_answer = examples.is_answer[examples.starts[index] : examples.ends[index]].tolist()
        begin = end = 0
        while end < len(ids) and (begin == end or ids[end - len(end_ids) : end] != end_ids):
            begin = is_answer.index(True, end)
            end = is_answer.index(False, begin) if False in is_answer[begin:] else len(ids)
        first = int(ids[0] == dataset.tokenizer.beginning)
        question = decode(ids[first:begin]).removesuffix(facts.question_end)
        pairs.append((question, decode(ids[begin : end - len(end_ids)])))
    return pairs


def texts_to_patch(dataset: Dataset, most: int) -> list[tuple[str, str, str, str]]:
    """Return pairs of questions for `patch`: clean, corrupted, and the first token of each answer.

    If the answer follows an earlier occurrence of the question's last token, as in recall, only
    this answer is exchanged. Otherwise, the corrupted question is the next one that has as many
    tokens and an answer that begins with another token. Raises AttnlmError if there is no pair.
    """
    tokenizer = dataset.tokenizer
    facts = dataset.examples
    format = QuestionFormat() if facts is None else QuestionFormat(facts.question_end)
    questions = [
        (tokenizer.encode(format.prompt(prompt)), tokenizer.encode(answer)[0])
        for prompt, answer in select_pairs(dataset)
    ]
    lengths = [len(question) for question, _ in questions]
    usual = max(set(lengths), key=lengths.count, default=0)
    questions = [question for question in questions if len(question[0]) == usual]
    pairs: list[tuple[str, str, str, str]] = []
    for number, (clean, answer) in enumerate(questions):
        rotated = itertools.chain(questions[number + 1 :], questions[:number])
        others = (question for question in rotated if question[1] != answer)
        corrupted, other = next(others, (clean, answer))
        place = clean.index(clean[-1]) + 1
        if place < len(clean) and clean[place] == answer:
            corrupted = [*clean[:place], other, *clean[place + 1 :]]
        if other != answer and len(pairs) < most:
            before, after, right, wrong = map(
                tokenizer.decode, (clean, corrupted, [answer], [other])
            )
            pairs.append((before, after, right, wrong))
    if not pairs:
        raise AttnlmError(
            f"{dataset.name} has no two questions of one length with different answers",
            "patch two texts of your own",
        )
    return pairs
