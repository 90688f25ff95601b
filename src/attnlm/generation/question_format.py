"""Questions to a run that was trained on examples, and its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from attnlm.generation.sampler import Sampler
from attnlm.generation.sampling_config import SamplingConfig
from attnlm.runs.run import Run


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
    return sampler.samples(sampler.encode_prompts([format.prompt(q) for q in questions]), config)[0]
