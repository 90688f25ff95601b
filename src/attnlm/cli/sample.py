"""`attnlm sample`: generate text with a run."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attnlm
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.files import decode_utf8, read_text
from attnlm.base.folders import command_for
from attnlm.base.formatting import duration, escape_control_characters
from attnlm.base.setting_fields import help_of
from attnlm.cli import console, options
from attnlm.cli.event_printer import Display
from attnlm.cli.options import decode_argument, option, sampling_option, switch, with_options
from attnlm.generation.sampling_config import (
    MOST_CHOICES_HELD,
    MOST_HELD,
    SAMPLING,
    SamplingConfig,
    draw_seed,
)
from attnlm.text.record_files import record_texts
from attnlm.text.text_files import record_suffix

if TYPE_CHECKING:
    from attnlm.generation.question_format import QuestionFormat
    from attnlm.generation.sampler import Choice, Sampler


_MOST_LISTED = 10  # least likely tokens


@with_options(SAMPLING, sampling_option)
def sample(
    run: str | None = options.RUN,
    *,
    prompt: str | None = option(None, "text to continue; - reads stdin, without its final newline"),
    prompt_file: Path | None = option(None, "file with the text to continue"),
    prompts: Path | None = option(
        None,
        "file with a text to continue on each line (or - for stdin), or a .jsonl file of records "
        'such as {"prompt": "…"}; all are continued together',
    ),
    stop: list[str] | None = option(
        None, "stop before this text, which is not printed; may be repeated"
    ),
    checkpoint: str = options.CHECKPOINT,
    device: str = options.DEVICE,
    checkpoint_dir: Path = options.CHECKPOINT_DIR,
    data_dir: Path = options.DATA_DIR,
    show_probs: bool = switch(
        "show the probability of each token, and the likeliest alternatives", "--show-probs"
    ),
    interactive: bool = switch(
        "continue each line that you type; /help lists commands", "--interactive", "-i"
    ),
    json: bool = options.JSON,
    quiet: bool = options.QUIET,
    **settings: Any,
) -> None:
    """Generate text with a trained model.

    A model that was trained on questions with answers gets the prompt as a question; without a
    prompt, it is asked some questions of the validation split.
    """
    many = settings["num_samples"] != 1 or prompts is not None
    sources = 3 - [prompt, prompt_file, prompts].count(None)
    _check_combinations(sources, interactive, json or prompt == "-", show_probs, many)
    if settings["seed"] is None:
        settings["seed"] = draw_seed()
    config = SamplingConfig(
        **settings, stop=[decode_argument(text, "--stop") for text in stop or ()]
    )
    if prompts is not None:
        prompt_texts = _read_prompts(prompts)
    elif prompt == "-":
        text = decode_utf8(sys.stdin.buffer.read(), "the prompt on stdin")
        prompt_texts = [text.removesuffix("\n")]
    elif prompt_file is not None:
        prompt_texts = [read_text(prompt_file)]
    else:
        prompt_texts = [decode_argument(prompt, "--prompt") if prompt else ""]
    if many or json:  # memory holds the texts to the end
        config.check_room(len(prompt_texts), MOST_CHOICES_HELD if show_probs else MOST_HELD)
    opened = attnlm.open_run(run, checkpoint_dir=checkpoint_dir)

    from attnlm.generation.question_format import format_of
    from attnlm.generation.sampler import load_sampler

    format = format_of(opened)
    if format is not None:
        config = format.with_stop(config)
        prompt_texts = [format.prompt(text) if text else text for text in prompt_texts]
    chosen = opened.checkpoint(checkpoint)
    sampler = load_sampler(opened, checkpoint=chosen, device=device, on_event=Display())
    prompt_ids = [] if interactive else sampler.encode_prompts(prompt_texts)
    model_on_device = f"{opened.name}, {chosen} on {sampler.device}"
    if format is not None and not (sources or many or show_probs or interactive):
        if not quiet:
            console.say(f"{model_on_device}, greedy")
        if _answer_questions(sampler, format, opened, data_dir, json, quiet):
            return
    if not quiet:
        console.say(f"{model_on_device}, temperature {config.temperature:g}, seed {config.seed}")
    if interactive:
        _converse(sampler, prompt_texts[0], config, quiet, format)
        return
    began = time.perf_counter()
    texts, count, facts = _generate(sampler, prompt_ids, prompt_texts, config, json, show_probs)
    if prompts is not None:
        facts["prompts"] = prompt_texts
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


def _check_combinations(
    sources: int, interactive: bool, json_or_stdin: bool, show_probs: bool, many: bool
) -> None:
    """Raise UsageError for options that exclude each other. `sources` is the number of prompts."""
    if interactive and (json_or_stdin or show_probs or many):
        raise UsageError(
            "--interactive cannot be combined with --json, --show-probs, --num-samples, --prompts "
            "or a prompt from stdin",
            "leave one out",
        )
    if show_probs and many:
        message = "--show-probs cannot be combined with --num-samples or --prompts"
        raise UsageError(message, "leave one out")
    if sources > 1:
        message = "only one of --prompt, --prompt-file and --prompts can be used"
        raise UsageError(message, "leave the others out")


def _read_prompts(path: Path) -> list[str]:
    """Return the prompts in a file: its lines, without empty ones, or the field of its records."""
    if record_suffix(path):
        try:
            prompts = list(record_texts(path, "prompt", str(path)))
        except AttnlmError as error:
            raise AttnlmError(error.message, 'use records such as {"prompt": "…"}') from None
    else:
        if str(path) == "-":
            text = decode_utf8(sys.stdin.buffer.read(), "the prompts on stdin")
        else:
            text = read_text(path)
        prompts = [line.removesuffix("\r") for line in text.split("\n") if line.strip("\r")]
    if not prompts:
        raise AttnlmError(f"{path} has no prompts", "write a prompt on each line")
    return prompts


def _generate(
    sampler: Sampler,
    prompt_ids: list[list[int]],
    prompts: list[str],
    config: SamplingConfig,
    json: bool,
    probs: bool,
) -> tuple[list[str], int, dict[str, object]]:
    """Generate text, and print it unless `json` is True; with `probs`, print each token in numbers.

    Return the texts (only the prompt if tokens were printed), the number of tokens, and values for
    the JSON output.
    """
    if config.num_samples > 1 or len(prompts) > 1:
        from attnlm.generation.sampling import prepend_prompts

        continued, count = sampler.samples(prompt_ids, config)
        texts = prepend_prompts(prompts, continued)
        console.write("" if json else "\n---\n".join(texts))
        return texts, count, {}
    (ids,), (prompt,) = prompt_ids, prompts
    length = len(ids)
    pieces = [prompt]
    facts: dict[str, object] = {}
    if not probs:
        console.write("" if json else prompt)
        for piece in sampler.stream(ids, config):
            pieces.append(piece)
            console.write("" if json else piece)
    elif json:
        choices = list(sampler.choices(ids, config))
        pieces += [choice.text for choice in choices]
        facts = {"choices": [choice.facts() for choice in choices]}
    elif console.has_colour():
        _print_tinted(prompt, sampler.choices(ids, config))
    else:
        for choice in sampler.choices(ids, config):
            console.print_result(_choice_line(choice))
    return ["".join(pieces)], len(ids) - length, facts


def _print_tinted(prompt: str, choices: Iterable[Choice]) -> None:
    """Print the text with tokens tinted by probability, then the least likely tokens."""
    from rich.text import Text

    from attnlm.see.shown_tokens import tint

    terminal = console.terminal(sys.stdout, soft_wrap=True)
    console.write(prompt)
    least: list[Choice] = []
    for choice in choices:
        # Print line ends without colour: the tint would fill the rest of the line.
        for piece in choice.text.splitlines(keepends=True):
            line = piece.rstrip("\r\n")
            words = Text.assemble((escape_control_characters(line), tint(choice.probability)))
            terminal.print(words, end="\n" if piece.endswith("\n") else "")
        sys.stdout.flush()
        least = sorted([*least, choice], key=lambda c: c.probability)[:_MOST_LISTED]
    console.write("\n\nthe least likely tokens, each with its likeliest alternatives\n")
    for choice in least:
        console.print_result(_choice_line(choice))


def _choice_line(choice: Choice) -> str:
    """Return one line with a token, its probability, and the likeliest alternatives."""
    from attnlm.see.shown_tokens import visible

    others = "  ".join(f"{visible(token)} {p:.4f}" for token, p in choice.runners_up)
    return f"{visible(choice.token)}\t{choice.probability:.4f}\t{others}"


# --- Questions ------------------------------------------------------------------------------------

_QUESTIONS = 10


def _answer_questions(
    sampler: Sampler,
    format: QuestionFormat,
    run: attnlm.Run,
    data_dir: Path,
    json: bool,
    quiet: bool,
) -> bool:
    """Print questions of the validation split with the model's answers, and return True.

    Return False, after a note, if the data set can't be opened.
    """
    from attnlm.runs.run import open_dataset_of
    from attnlm.workflows.answers import ask, select_pairs

    try:
        pairs = select_pairs(open_dataset_of(run, data_dir), _QUESTIONS)
    except AttnlmError as error:
        console.say(f"{error.message}: no questions to ask")
        return False
    answered = ask(sampler, format, pairs)
    right = sum(question.is_right for question in answered)
    if json:
        questions = [{**question._asdict(), "right": question.is_right} for question in answered]
        console.print_json({"questions": questions, "right": right})
        return True
    for question in answered:
        mark = "right" if question.is_right else f"wrong: {question.answer}"
        console.print_result(f"{question.prompt}{format.question_end}{question.said}\t{mark}")
    if not quiet:
        counts = f"{right} of {len(answered)} right"
        console.say(f"{counts}; ask one: --prompt, or -i for a conversation")
    return True


# --- --interactive --------------------------------------------------------------------------------


def _converse(
    sampler: Sampler,
    prompt: str,
    config: SamplingConfig,
    quiet: bool,
    format: QuestionFormat | None,
) -> None:
    """Read lines until the user stops; add each line to the text and print the continuation.

    If the model was trained on questions with answers, each line is a question, and the oldest
    questions are forgotten when they no longer fit into the context.
    """
    if not quiet:
        reply = "continues it" if format is None else "answers"
        console.say(f"type a line and the model {reply}; /help lists commands, /bye stops")
    ids: list[int] = []
    turns: list[int] = []  # the places in `ids` where questions begin
    first_line = prompt if format is not None else ""
    if prompt and format is None:
        _extend_conversation(ids, sampler, prompt, format)
    while True:
        if sys.stdin.isatty() and not first_line:
            print("> ", end="", file=sys.stderr, flush=True)  # noqa: T201
        line = first_line or sys.stdin.readline()
        first_line = ""
        if not line or line.strip() in ("/bye", "/quit", "/exit", "quit", "exit"):
            return
        if command := re.match(r"/([a-z]+)(?:\s|$)", line):
            config = _change_config(command[1], line[command.end() :].strip(), config)
            continue
        if format is not None:
            turns.append(len(ids))
            line = format.prompt(line.rstrip("\n"))
        if _extend_conversation(ids, sampler, line, format):
            # Remove the oldest turns, so that half of the context is left for the answer.
            while len(turns) > 1 and len(ids) > sampler.spec.block_size // 2:
                length = turns[1] - turns[0]
                del ids[:length]
                turns = [place - length for place in turns[1:]]
            for piece in sampler.stream(ids, config):
                console.write(piece)
            console.write("\n")
            config = replace(config, seed=(config.seed + 1) % 2**63)


def _extend_conversation(
    ids: list[int], sampler: Sampler, text: str, format: QuestionFormat | None
) -> bool:
    """Add the ids of `text` to `ids`, and return True; on an error, print it and return False."""
    if format is None and sampler.tokenizer.newline is None:
        text = text.rstrip("\n")  # the tokenizer has no line end
    try:
        ids.extend(sampler.tokenizer.encode(text) if ids else sampler.prompt_ids(text))
    except AttnlmError as error:
        console.fail(error.message, error.hint)
        return False
    return True


_COMMANDS = {
    "/seed N": "set the random seed",
    "/temperature X": help_of(SamplingConfig, "temperature"),
    "/help": "this list",
    "/bye, quit, exit": "stop; so does the end of input",
}


def _change_config(command: str, value: str, config: SamplingConfig) -> SamplingConfig:
    """Return `config` as a typed command such as /seed 1 changes it; print errors."""
    kinds: dict[str, Callable[[str], Any]] = {"seed": int, "temperature": float}
    if command == "help":
        console.say_facts(_COMMANDS)
    elif command not in kinds:
        console.fail(f"unknown command /{command}", f"choose from {', '.join(_COMMANDS)}")
    else:
        try:
            config = replace(config, **{command: kinds[command](value)})
            console.say(f"{command} {value}")
        except (ValueError, UsageError) as error:
            hint = error.hint if isinstance(error, UsageError) else "it must be a number"
            console.fail(f"invalid value for /{command}: {value!r}", hint)
    return config
