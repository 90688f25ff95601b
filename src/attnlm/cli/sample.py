"""`attnlm sample` and `eval`: generate text with a run, and measure its loss and answers."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attnlm
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import ignore
from attnlm.base.files import decode_utf8
from attnlm.base.folders import command_for
from attnlm.base.formatting import duration, nats_and_bits
from attnlm.cli import console, options
from attnlm.cli.event_printer import baselines
from attnlm.cli.options import opened_run, option, utf8, with_options
from attnlm.generation.sampling_config import SAMPLING, SamplingConfig, draw_seed
from attnlm.runs.records import NOT_COMPARABLE

if TYPE_CHECKING:
    from attnlm.generation.sampling import Choice, Sampler
    from attnlm.workflows.answers import QuestionFormat

_QUESTIONS = 10  # asked if there is no prompt


@with_options(
    settings=SAMPLING,
    interactive=option(
        False, "continue each line that you type, until /bye", "--interactive", "-i"
    ),
    show_probs=option(False, "show the probability of each token, and the likeliest alternatives"),
    stop=option(
        None,
        "stop before this text, which is not printed; may be repeated",
        type=list[str],
        callback=utf8,
    ),
)
def sample(
    run: str | None,
    *,
    prompt: str | None = option(
        None, "text to continue; - reads stdin, without its final newline", callback=utf8
    ),
    show_probs: bool,
    interactive: bool,
    checkpoint: str,
    device: str,
    checkpoint_dir: str,
    data_dir: str,
    json: bool,
    quiet: bool,
    on_event: Any,
    **settings: Any,
) -> None:
    """Generate text with a trained model.

    A model that was trained on questions with answers gets the prompt as a question; without a
    prompt, it is asked some questions of the validation split.
    """
    config = SamplingConfig(**{"seed": draw_seed(), **options.given(settings)})
    text = _prompt(prompt, config, interactive=interactive, json=json, show_probs=show_probs)
    opened = attnlm.open_run(run, checkpoint_dir=checkpoint_dir, data_dir=data_dir)

    from attnlm.generation.sampling import load_sampler
    from attnlm.workflows.answers import format_of

    format = format_of(opened)
    chosen = opened.checkpoint(checkpoint)
    sampler = load_sampler(opened, checkpoint=chosen, device=device, on_event=on_event)
    say = ignore if quiet else console.say
    read = f"{opened.name}, {chosen} on {sampler.device}"
    if format is not None:
        config = format.with_stop(config)
        is_asked = not (text or config.num_samples > 1 or show_probs or interactive)
        if is_asked and (answered := _answers(sampler, format, opened)):
            say(f"{read}, greedy")
            say(_print_answers(answered, format.question_end, json))
            return
        text = format.prompt(text) if text and not interactive else text
    ids = [] if interactive else sampler.prompt_ids(text)
    say(f"{read}, temperature {config.temperature:g}, seed {config.seed}")
    if interactive:
        say(f"type a line and the model {'answers' if format else 'continues it'}; /bye stops")
        _converse(sampler, text, config, format)
        return
    facts = _generate(sampler, ids, text, config, ignore if json else console.write, show_probs)
    if json:
        console.print_json(facts | {"checkpoint": chosen.which, "step": chosen.step})
    elif not show_probs:  # its output ends with a line end
        if sys.stdout.isatty():
            console.write("\n")
        else:
            say("")  # a terminal may show both streams: start a new line
    seconds, speed = facts["seconds"], facts["tokens_per_second"]
    say(f"{facts['generated_tokens']:,} tokens in {duration(seconds)}, {speed:,} tokens/s")
    if not quiet:
        console.say_next(command_for("attnlm report", opened.path))


def _prompt(
    prompt: str | None, config: SamplingConfig, *, interactive: bool, json: bool, show_probs: bool
) -> str:
    """Return the text of a prompt. Raises UsageError for options that exclude each other."""
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
        return decode_utf8(sys.stdin.buffer.read(), "the prompt on stdin").removesuffix("\n")
    return prompt or ""


def _generate(
    sampler: Sampler,
    ids: list[int],
    prompt: str,
    config: SamplingConfig,
    write: Callable[[str], None],
    probs: bool,
) -> dict[str, Any]:
    """Write texts as they are generated, or with `probs` each token in numbers.

    Return the texts and other facts as JSON values.
    """
    began = time.perf_counter()
    length, texts, choices = len(ids), [prompt], None
    if config.num_samples > 1:
        continued, count = sampler.samples([ids], config)
        texts = [prompt + text for text in continued]
        write("\n---\n".join(texts))
    else:
        if probs:
            drawn = []
            for choice in sampler.choices(ids, config):
                drawn.append(choice)
                write(f"{_choice_line(choice)}\n")
            texts[0] += "".join(choice.text for choice in drawn)
            choices = [choice.facts() for choice in drawn]
        else:
            write(prompt)
            for piece in sampler.stream(ids, config):
                texts[0] += piece
                write(piece)
        count = len(ids) - length
    seconds = time.perf_counter() - began
    return {
        "texts": texts,
        "choices": choices,
        "generated_tokens": count,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(count / seconds) if seconds else 0,
        "seed": config.seed,
    }


def _choice_line(choice: Choice) -> str:
    """Return one line with a token, its probability, and the likeliest alternatives."""
    from attnlm.see.shown_tokens import visible

    others = "  ".join(f"{visible(token)} {p:.4f}" for token, p in choice.runners_up)
    return f"{visible(choice.token)}\t{choice.probability:.4f}\t{others}"


def _answers(sampler: Sampler, format: QuestionFormat, run: attnlm.Run) -> list[attnlm.Answered]:
    """Return answers to some questions of the validation split; [], after a note, without one."""
    from attnlm.workflows.answers import ask, select_pairs

    try:
        return ask(sampler, format, select_pairs(run.open_dataset(), _QUESTIONS))
    except AttnlmError as error:
        console.say(f"{error.message}: no questions to ask")
        return []


def _print_answers(answered: list[attnlm.Answered], question_end: str, json: bool) -> str:
    """Print questions with the model's answers; return in words how many are right."""
    right = sum(one.is_right for one in answered)
    if json:
        answers = [{**one._asdict(), "is_right": one.is_right} for one in answered]
        console.print_json({"answers": answers, "right": right})
    for one in [] if json else answered:
        mark = "right" if one.is_right else f"wrong: {one.answer}"
        console.print_result(f"{one.prompt}{question_end}{one.said}\t{mark}")
    return f"{right} of {len(answered)} right; ask one: --prompt, or -i for a conversation"


def _converse(
    sampler: Sampler, prompt: str, config: SamplingConfig, format: QuestionFormat | None
) -> None:
    """Add each line, the prompt first, to the text and print the continuation.

    If the model was trained on questions with answers, each line is a question; the earlier ones
    are forgotten when they fill half of the context.
    """
    ids: list[int] = []
    for line in _typed_lines(prompt):
        if format is not None:
            line = format.prompt(line)
            if len(ids) > sampler.spec.block_size // 2:
                ids.clear()
        elif sampler.tokenizer.newline is not None:
            line += "\n"
        try:
            ids.extend(sampler.tokenizer.encode(line) if ids else sampler.prompt_ids(line))
        except AttnlmError as error:
            console.fail(error.message, error.hint)
            continue
        for piece in sampler.stream(ids, config):
            console.write(piece)
        console.write("\n")
        config = replace(config, seed=(config.seed + 1) % 2**63)


def _typed_lines(first: str) -> Iterator[str]:
    """Yield `first`, and the lines of stdin until its end, or until the user types /bye."""
    if first:
        yield first
    mark = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
    with contextlib.suppress(EOFError):
        while (line := input(mark)).strip() != "/bye":
            yield line


# --- eval -----------------------------------------------------------------------------------------


@with_options("checkpoint", "device", "checkpoint_dir", "data_dir")
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
    verify: bool,
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
        _answer_pairs(opened, pairs, json, settings)
        return
    if data is None:
        dataset = opened.open_dataset(verify=verify)
    else:
        dataset = attnlm.open_dataset(data, data_dir=opened.data_dir, verify=verify)
    references = opened.dataset if data is None else dataset
    found = attnlm.evaluate(opened, data=dataset, **settings)
    console.say(
        f"{opened.name}, {chosen.which} checkpoint (step {chosen.step}), "
        f"{found.tokens:,} tokens predicted"
    )
    if opened.leaks:
        console.say(f"{NOT_COMPARABLE}: {opened.leaks}")
    console.say(f"baselines: {baselines(opened.vocab_size, references)}")
    facts = {
        "val_loss": found.loss,
        "bits_per_byte": found.bits_per_byte,
        "perplexity": found.perplexity,
        "evaluated_tokens": found.tokens,
        "bigram_loss": references.bigram_loss,
        "floor": references.floor,
        "checkpoint": chosen.which,
        "step": chosen.step,
        "leaks": opened.leaks or None,
        "accuracy": found.accuracy,
        "longer_accuracy": found.longer_accuracy,
    }
    console.print_result_or_json(_summary(found), facts, json)
    if found.longer_accuracy is not None and not json:
        console.say(f"{found.longer_accuracy:.1%} of answers to longer questions right")


def _answer_pairs(run: attnlm.Run, path: Path, json: bool, settings: dict[str, Any]) -> None:
    """Print how many questions of a file a run answers right."""
    from attnlm.workflows.answers import read_pairs

    answers = attnlm.answer_pairs(run, read_pairs(path), **settings)
    right, count = sum(answer.is_right for answer in answers), len(answers)
    facts = {"accuracy": right / count, "right": right, "questions": count}
    summary = f"{right / count:.1%} of answers right: {right:,} of {count:,}"
    console.print_result_or_json(summary, facts, json)


def _summary(found: attnlm.Evaluation) -> str:
    share = "" if found.accuracy is None else f"{found.accuracy:.1%} of answers right; "
    losses = nats_and_bits(found.loss, found.bits_per_byte, digits=4)
    perplexity = f"{found.perplexity:,.3f}" if found.perplexity < 1e6 else "above a million"
    return f"{share}{losses}, perplexity {perplexity}"
