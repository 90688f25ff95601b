"""`attnlm sample` and `eval`: generate text with a run, and measure its loss and answers."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attnlm
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.files import decode_utf8
from attnlm.base.folders import command_for
from attnlm.base.formatting import duration, nats_and_bits
from attnlm.cli import console, options
from attnlm.cli.event_printer import Display, baselines
from attnlm.cli.options import decode_argument, opened_run, option, shared, switch, with_options
from attnlm.generation.sampling_config import (
    MOST_CHOICES_HELD,
    MOST_HELD,
    SAMPLING,
    SamplingConfig,
    draw_seed,
)
from attnlm.runs.records import NOT_COMPARABLE

if TYPE_CHECKING:
    from attnlm.generation.question_format import QuestionFormat
    from attnlm.generation.sampler import Choice, Sampler

_QUESTIONS = 10  # asked if there is no prompt


@with_options(SAMPLING)
def sample(
    run: str | None,
    *,
    prompt: str | None = option(None, "text to continue; - reads stdin, without its final newline"),
    stop: list[str] | None = option(
        None, "stop before this text, which is not printed; may be repeated"
    ),
    show_probs: bool = switch(
        "show the probability of each token, and the likeliest alternatives", "--show-probs"
    ),
    interactive: bool = switch(
        "continue each line that you type, until /bye", "--interactive", "-i"
    ),
    checkpoint: str,
    device: str,
    checkpoint_dir: str,
    data_dir: str,
    json: bool,
    quiet: bool,
    **settings: Any,
) -> None:
    """Generate text with a trained model.

    A model that was trained on questions with answers gets the prompt as a question; without a
    prompt, it is asked some questions of the validation split.
    """
    if settings["seed"] is None:
        settings["seed"] = draw_seed()
    config = SamplingConfig(
        **settings, stop=[decode_argument(text, "--stop") for text in stop or ()]
    )
    many = config.num_samples > 1
    if interactive and (json or prompt == "-" or show_probs or many):
        raise UsageError(
            "--interactive cannot be combined with --json, --show-probs, --num-samples or a prompt "
            "from stdin",
            "leave one out",
        )
    if show_probs and many:
        message = "--show-probs cannot be combined with --num-samples"
        raise UsageError(message, "leave one out")
    if prompt == "-":
        text = decode_utf8(sys.stdin.buffer.read(), "the prompt on stdin").removesuffix("\n")
    else:
        text = decode_argument(prompt or "", "--prompt")
    if many or json:  # memory holds the texts to the end
        config.check_room(1, MOST_CHOICES_HELD if show_probs else MOST_HELD)
    opened = attnlm.open_run(run, checkpoint_dir=checkpoint_dir, data_dir=data_dir)

    from attnlm.generation.question_format import format_of
    from attnlm.generation.sampler import load_sampler

    format = format_of(opened)
    if format is not None:
        config = format.with_stop(config)
        text = format.prompt(text) if text else text
    chosen = opened.checkpoint(checkpoint)
    sampler = load_sampler(opened, checkpoint=chosen, device=device, on_event=Display())
    ids = [] if interactive else sampler.prompt_ids(text)
    how = f"temperature {config.temperature:g}, seed {config.seed}"
    asked = None
    if format is not None and not (prompt or many or show_probs or interactive):
        asked = _answer_questions(sampler, format, opened)
        how = "greedy" if asked else how
    if not quiet:
        console.say(f"{opened.name}, {chosen} on {sampler.device}, {how}")
    if format is not None and asked:
        _print_answers(asked, format.question_end, json, quiet)
        return
    if interactive:
        _converse(sampler, text, config, quiet, format)
        return
    began = time.perf_counter()
    texts, count, facts = _generate(sampler, ids, text, config, json, show_probs)
    seconds = time.perf_counter() - began
    speed = round(count / seconds) if seconds else 0
    if json:
        console.print_json(
            {
                "text": texts[0],
                "texts": texts,
                **facts,
                "tokens": count,
                "seconds": round(seconds, 3),
                "tokens_per_second": speed,
                "seed": config.seed,
                "checkpoint": chosen.which,
                "step": chosen.step,
            }
        )
    elif not show_probs:  # its output ends with a line end
        if sys.stdout.isatty():
            console.write("\n")
        elif not quiet:
            console.say("")  # a terminal may show both streams: start a new line
    if not quiet:
        console.say(f"{count:,} tokens in {duration(seconds)}, {speed:,} tokens/s")
        console.say_next(command_for("attnlm report", opened.path))


def _generate(
    sampler: Sampler, ids: list[int], prompt: str, config: SamplingConfig, json: bool, probs: bool
) -> tuple[list[str], int, dict[str, object]]:
    """Generate text, and print it unless `json` is True; with `probs`, print each token in numbers.

    Return the texts, the number of tokens, and values for the JSON output.
    """
    if config.num_samples > 1:
        continued, count = sampler.samples([ids], config)
        texts = [prompt + text for text in continued]
        console.write("" if json else "\n---\n".join(texts))
        return texts, count, {}
    length = len(ids)
    pieces = [prompt]
    facts: dict[str, object] = {}
    if probs:
        choices = []
        for choice in sampler.choices(ids, config):
            pieces.append(choice.text)
            if json:
                choices.append(choice.facts())
            else:
                console.print_result(_choice_line(choice))
        facts = {"choices": choices} if json else {}
    else:
        console.write("" if json else prompt)
        for piece in sampler.stream(ids, config):
            pieces.append(piece)
            console.write("" if json else piece)
    return ["".join(pieces)], len(ids) - length, facts


def _choice_line(choice: Choice) -> str:
    """Return one line with a token, its probability, and the likeliest alternatives."""
    from attnlm.see.shown_tokens import visible

    others = "  ".join(f"{visible(token)} {p:.4f}" for token, p in choice.runners_up)
    return f"{visible(choice.token)}\t{choice.probability:.4f}\t{others}"


def _answer_questions(
    sampler: Sampler, format: QuestionFormat, run: attnlm.Run
) -> list[attnlm.Answered]:
    """Return answers to some questions of the validation split; [], after a note, without one."""
    from attnlm.workflows.answers import ask, select_pairs

    try:
        return ask(sampler, format, select_pairs(run.open_dataset(), _QUESTIONS))
    except AttnlmError as error:
        console.say(f"{error.message}: no questions to ask")
        return []


def _print_answers(
    answered: list[attnlm.Answered], question_end: str, json: bool, quiet: bool
) -> None:
    """Print questions with the model's answers, and which of them are right."""
    right = sum(question.is_right for question in answered)
    if json:
        questions = [{**question._asdict(), "right": question.is_right} for question in answered]
        console.print_json({"questions": questions, "right": right})
        return
    for question in answered:
        mark = "right" if question.is_right else f"wrong: {question.answer}"
        console.print_result(f"{question.prompt}{question_end}{question.said}\t{mark}")
    if not quiet:
        counts = f"{right} of {len(answered)} right"
        console.say(f"{counts}; ask one: --prompt, or -i for a conversation")


def _converse(
    sampler: Sampler, line: str, config: SamplingConfig, quiet: bool, format: QuestionFormat | None
) -> None:
    """Read lines until the user stops; add each line to the text and print the continuation.

    If the model was trained on questions with answers, each line is a question; the earlier ones
    are forgotten when they fill half of the context.
    """
    if not quiet:
        reply = "continues it" if format is None else "answers"
        console.say(f"type a line and the model {reply}; /bye stops")
    ids: list[int] = []
    if line and format is None:
        _extend(ids, sampler, line)
        line = ""
    while True:
        if not line:
            if sys.stdin.isatty():
                print("> ", end="", file=sys.stderr, flush=True)  # noqa: T201
            line = sys.stdin.readline()
            if not line or line.strip() in ("/bye", "/quit", "/exit", "quit", "exit"):
                return
            if format is not None:
                line = format.prompt(line.rstrip("\n"))
            elif sampler.tokenizer.newline is None:  # the tokenizer has no line end
                line = line.rstrip("\n")
        if format is not None and len(ids) > sampler.spec.block_size // 2:
            ids.clear()
        if _extend(ids, sampler, line):
            for piece in sampler.stream(ids, config):
                console.write(piece)
            console.write("\n")
            config = replace(config, seed=(config.seed + 1) % 2**63)
        line = ""


def _extend(ids: list[int], sampler: Sampler, text: str) -> bool:
    """Add the ids of `text` to `ids`, and return True; on an error, print it and return False."""
    try:
        ids.extend(sampler.tokenizer.encode(text) if ids else sampler.prompt_ids(text))
    except AttnlmError as error:
        console.fail(error.message, error.hint)
        return False
    return True


# --- eval -----------------------------------------------------------------------------------------


@with_options(shared("checkpoint", "device", "checkpoint_dir", "data_dir", "verify"))
def eval_(
    run: str | None,
    *,
    data: str | None = option(
        None,
        "name or path of another data set with the same tokenizer",
        complete=options.names("data set"),
    ),
    pairs: Path | None = option(
        None,
        'ask the questions of this file instead: records such as {"prompt": "2+3", "answer": "5"}, '
        "in .jsonl, .json, .csv or .parquet",
    ),
    json: bool,
    **settings: Any,
) -> None:
    """Measure a model's loss on the validation split and, for examples, the share of right answers.

    Of a larger split, the first 4,194,304 tokens are used. Answers are decoded greedily; they are
    right if every token is.
    """
    opened = opened_run(run, settings)
    chosen = opened.checkpoint(settings["checkpoint"])
    if pairs is not None:
        if data is not None:
            raise UsageError("--pairs cannot be combined with --data", "use only one")
        from attnlm.workflows.answers import read_pairs

        asked = read_pairs(pairs)
        answers = attnlm.answer_pairs(
            opened, asked, checkpoint=chosen.which, device=settings["device"]
        )
        right = _right(answers)
        facts = {"accuracy": right / len(answers), "right": right, "pairs": len(answers)}
        summary = f"{right / len(answers):.1%} of answers right: {right:,} of {len(answers):,}"
        console.print_result_or_json(summary, facts, json)
        return
    verify = settings.pop("verify")
    if data is None:
        dataset = opened.open_dataset(verify=verify)
    else:
        dataset = attnlm.open_dataset(data, data_dir=opened.data_dir, verify=verify)
    references = opened.dataset if data is None else dataset
    evaluation = attnlm.evaluate(opened, data=dataset, **settings)
    console.say(
        f"{opened.name}, {chosen.which} checkpoint (step {chosen.step}), "
        f"{evaluation.tokens:,} tokens predicted"
    )
    if opened.leaks:
        console.say(f"{NOT_COMPARABLE}: {opened.leaks.partition(';')[0]}")
    console.say(f"baselines: {baselines(opened.vocab_size, references)}")
    longer_accuracy = None
    if evaluation.accuracy is not None:
        from attnlm.workflows.answers import longer_pairs

        if longer := longer_pairs(dataset):
            answers = attnlm.answer_pairs(
                opened, longer, checkpoint=chosen.which, device=settings["device"]
            )
            longer_accuracy = _right(answers) / len(answers)
    perplexity = evaluation.perplexity
    shown = f"{perplexity:,.3f}" if perplexity < 1e6 else "above a million"
    summary = nats_and_bits(evaluation.loss, evaluation.bits_per_byte, digits=4)
    summary = f"{summary}, perplexity {shown}"
    if evaluation.accuracy is not None:
        summary = f"{evaluation.accuracy:.1%} of answers right; {summary}"
    measured: dict[str, Any] = {
        "val_loss": evaluation.loss,
        "bits_per_byte": evaluation.bits_per_byte,
        "perplexity": perplexity,
        "tokens": evaluation.tokens,
        "bigram_loss": references.bigram_loss,
        "floor": references.floor,
        "checkpoint": chosen.which,
        "step": chosen.step,
        "leaks": opened.leaks,
        "accuracy": evaluation.accuracy,
        "longer_accuracy": longer_accuracy,
    }
    console.print_result_or_json(summary, measured, json)
    if longer_accuracy is not None and not json:
        console.say(f"{longer_accuracy:.1%} of answers to longer questions right")


def _right(answers: list[attnlm.Answered]) -> int:
    """Return the number of right answers."""
    return sum(answered.is_right for answered in answers)
