"""`attnlm sample --interactive`: lines typed in, continued by the model."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.settings import number
from attnlm.cli import console

if TYPE_CHECKING:
    from attnlm.generation.sampling import Sampler
    from attnlm.generation.sampling_config import SamplingConfig

TEMPERATURE = "below 1 favours likely tokens, above 1 flattens the distribution; 0 is greedy"


def talk(sampler: Sampler, prompt: str, config: SamplingConfig) -> None:
    """Each line typed is added to the text, and the model continues it."""
    console.say("type a line and the model continues it; /help lists commands, /bye stops")
    ids: list[int] = []
    if prompt:
        _extend(ids, sampler, prompt)
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)  # noqa: T201
        line = sys.stdin.readline()
        if not line or line.strip() in ("/bye", "/quit", "/exit", "quit", "exit"):
            return
        if command := re.match(r"/([a-z]+)(?:\s|$)", line):
            config = _changed(command[1], line[command.end() :].strip(), config)
        elif _extend(ids, sampler, line):
            for piece in sampler.stream(ids, config):
                console.write(piece)
            console.write("\n")
            config = replace(config, seed=(config.seed + 1) % 2**63)


def _extend(ids: list[int], sampler: Sampler, text: str) -> bool:
    """Whether `text` could be added to the ids; if not, an error is printed."""
    if sampler.tokenizer.newline is None:
        text = text.rstrip("\n")  # the end of a line is no part of such texts
    try:
        ids.extend(sampler.tokenizer.encode(text) if ids else sampler.prompt_ids(text))
    except AttnlmError as error:
        console.fail(error.message, error.hint)
        return False
    return True


_COMMANDS = {
    "/seed N": "set the random seed",
    "/temperature X": TEMPERATURE,
    "/help": "this list",
    "/bye, quit, exit": "stop; so does the end of input",
}


def _changed(command: str, value: str, config: SamplingConfig) -> SamplingConfig:
    """The settings after a typed command; an error in it is printed."""
    kinds: dict[str, type[int] | type[float]] = {"seed": int, "temperature": float}
    if command == "help":
        console.say_facts(_COMMANDS)
    elif command not in kinds:
        console.fail(f"there is no /{command}", f"there are {', '.join(_COMMANDS)}")
    else:
        try:
            config = replace(config, **{command: number(kinds[command], value)})
            console.say(f"{command} {value}")
        except (ValueError, UsageError) as error:
            hint = error.hint if isinstance(error, UsageError) else "it must be a number"
            console.fail(f"/{command} can't be {value!r}", hint)
    return config
