"""`attnlm eval`: the loss on a validation split, and the share of right answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attnlm
from attnlm.base.errors import UsageError
from attnlm.cli import completion, console, options
from attnlm.cli.event_printer import baselines
from attnlm.cli.options import option, switch
from attnlm.runs.records import NOT_COMPARABLE

_MOST_ERRORS = 20
_MOST_SHOWN = 200  # characters of a question or answer


def evaluate(
    run: str | None = options.RUN,
    checkpoint: str = options.CHECKPOINT,
    data: str | None = option(
        None, "name or path of another data set with the same tokenizer", completion.datasets
    ),
    device: str = options.DEVICE,
    checkpoint_dir: Path = options.CHECKPOINT_DIR,
    data_dir: Path = options.DATA_DIR,
    pairs: Path | None = option(
        None,
        'ask the questions of this file instead: records such as {"prompt": "2+3", "answer": "5"}, '
        "in .jsonl, .json, .csv or .parquet",
    ),
    errors: bool = switch("list questions with wrong answers", "--errors"),
    verify: bool = options.VERIFY,
    json: bool = options.JSON,
) -> None:
    """Measure a model's loss on the validation split and, for examples, the share of right answers.

    Of a larger split, the first 4,194,304 tokens are used. Answers are decoded greedily; they are
    right if every token is.
    """
    opened = attnlm.open_run(run, checkpoint_dir=checkpoint_dir)
    if pairs is not None:
        if data is not None:
            raise UsageError("--pairs cannot be combined with --data", "use only one")
        _evaluate_pairs(opened, pairs, checkpoint, device, errors, json)
        return
    other = None if data is None else attnlm.open_dataset(data, data_dir=data_dir, verify=verify)
    dataset = opened.dataset if other is None else other
    trained_on = opened.dataset.question_end
    has_questions = (trained_on if other is None else other.examples) is not None
    if errors and not has_questions:
        raise UsageError("--errors needs questions with answers", "use it with --pairs")
    chosen = opened.checkpoint(checkpoint)
    evaluation = attnlm.evaluate(
        opened,
        checkpoint=chosen.which,
        data=other,
        device=device,
        data_dir=data_dir,
        verify=verify,
    )
    console.say(
        f"{opened.name}, step {chosen.step} ({chosen.which}), "
        f"{evaluation.tokens:,} tokens predicted"
    )
    if opened.leaks:
        console.say(f"{NOT_COMPARABLE}: {opened.leaks.partition(';')[0]}")
    console.say(f"baselines: {baselines(opened.vocab_size, dataset)}")
    longer: float | None = None
    wrong: list[attnlm.Answered] = []
    if has_questions:
        from attnlm.runs.run import open_dataset_of
        from attnlm.workflows.answers import answer_examples, longer_pairs, select_pairs

        examples = other or open_dataset_of(opened, data_dir)
        answered = answer_examples(opened, examples, longer_pairs(examples), chosen, device)
        longer = _accuracy(answered) if answered else None
        if errors:
            wrong = _wrong_answers(
                answer_examples(opened, examples, select_pairs(examples), chosen, device)
            )
    facts = {
        "val_loss": evaluation.loss,
        "bits_per_byte": evaluation.bits_per_byte,
        "perplexity": evaluation.perplexity,
        "tokens": evaluation.tokens,
        "bigram_loss": dataset.bigram_loss,
        "floor": dataset.floor,
        "checkpoint": chosen.which,
        "step": chosen.step,
        "leaks": opened.leaks,
        "accuracy": evaluation.accuracy,
        "longer_accuracy": longer,
        **({"errors": [answered._asdict() for answered in wrong]} if errors else {}),
    }
    perplexity = evaluation.perplexity
    shown = f"{perplexity:,.3f}" if perplexity < 1e6 else "above a million"
    summary = f"{evaluation.loss:.4f} nats per token, {evaluation.bits_per_byte:.4f} bits per byte"
    summary = f"{summary}, perplexity {shown}"
    if evaluation.accuracy is not None:
        summary = f"{evaluation.accuracy:.1%} of answers right; {summary}"
    console.print_result_or_json(summary, facts, json)
    if longer is not None and not json:
        console.say(f"{longer:.1%} of answers to longer questions right")
    _print_errors([] if json else wrong)


def _evaluate_pairs(
    run: attnlm.Run, path: Path, checkpoint: str, device: str, errors: bool, json: bool
) -> None:
    """Print the share of questions in a file that a run answers right."""
    from attnlm.workflows.answers import read_pairs

    answers = attnlm.answer_pairs(run, read_pairs(path), checkpoint=checkpoint, device=device)
    right = sum(answered.is_right for answered in answers)
    accuracy = _accuracy(answers)
    wrong = _wrong_answers(answers) if errors else []
    facts: dict[str, Any] = {"accuracy": accuracy, "right": right, "pairs": len(answers)}
    if errors:
        facts["errors"] = [answered._asdict() for answered in wrong]
    summary = f"{accuracy:.1%} of answers right: {right:,} of {len(answers):,}"
    console.print_result_or_json(summary, facts, json)
    _print_errors([] if json else wrong)


def _accuracy(answers: Sequence[attnlm.Answered]) -> float:
    """Return the share of right answers."""
    return sum(answered.is_right for answered in answers) / len(answers)


def _wrong_answers(answers: Sequence[attnlm.Answered]) -> list[attnlm.Answered]:
    """Return the first 20 wrong answers."""
    return [answered for answered in answers if not answered.is_right][:_MOST_ERRORS]


def _print_errors(wrong: Sequence[attnlm.Answered]) -> None:
    """Print a table of questions with wrong answers."""
    if wrong:
        rows = [[repr(text[:_MOST_SHOWN])[1:-1] for text in answered] for answered in wrong]
        console.print_table(("question", "answer", "model's answer"), rows, ("question",))
