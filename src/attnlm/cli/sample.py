"""`attnlm sample`: text from a run."""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnlm.base.errors import UsageError
from attnlm.base.folders import command_for
from attnlm.base.readable import duration
from attnlm.cli import console
from attnlm.cli.displays import ChoiceDisplay
from attnlm.cli.options import (
    Checkpoint,
    CheckpointDir,
    DeviceOption,
    JsonOption,
    RunArgument,
    decoded,
    opened_run,
    typed,
)
from attnlm.cli.talk import TEMPERATURE, talk
from attnlm.generation.sampling_config import (
    MOST_CHOICES_HELD,
    MOST_HELD,
    SamplingConfig,
    drawn_seed,
)

if TYPE_CHECKING:
    from attnlm.generation.sampling import Sampler
    from attnlm.runs.run import Checkpoint as ChosenCheckpoint


def sample(
    run: RunArgument = None,
    tokens: Annotated[int, typer.Option(help="tokens to generate, excluding the prompt")] = 500,
    prompt: Annotated[
        str | None,
        typer.Option(help="text to continue; - reads stdin, less one newline at its end"),
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="file with the text to continue")] = None,
    temperature: Annotated[float, typer.Option(help=TEMPERATURE)] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="sample from the K likeliest tokens")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="sample from the likeliest tokens whose probabilities sum to P"),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="random seed; default: drawn")] = None,
    num_samples: Annotated[int, typer.Option(help="number of texts to generate")] = 1,
    checkpoint: Checkpoint = "auto",
    device: DeviceOption = "auto",
    checkpoint_dir: CheckpointDir = Path("checkpoints"),
    show_probs: Annotated[
        bool,
        typer.Option("--show-probs", help="show each token's probability and the likeliest others"),
    ] = False,
    interactive: Annotated[
        bool,
        typer.Option(
            "--interactive", "-i", help="continue each line that you type; /help lists commands"
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Generate text with a trained model."""
    _check(interactive, show_probs, json, num_samples, prompt)
    text = _prompt(prompt, prompt_file)
    most = MOST_CHOICES_HELD if show_probs else MOST_HELD
    if json and tokens > most:
        raise UsageError(
            f"--json holds the whole text in memory, and --tokens {tokens} is too long for that",
            f"give at most {most}, or leave out --json",
        )
    config = SamplingConfig(
        tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        num_samples=num_samples,
        seed=drawn_seed() if seed is None else seed,
    )
    opened = opened_run(run, checkpoint_dir)

    from attnlm.generation.sampling import load_sampler

    chosen = opened.checkpoint(checkpoint)
    sampler = load_sampler(opened, checkpoint=chosen, device=device)
    ids = None if interactive else sampler.prompt_ids(text)
    console.say(
        f"{opened.name}, {chosen} on {sampler.device.name}, "
        f"temperature {temperature:g}, seed {config.seed}"
    )
    if ids is None:
        talk(sampler, text, config)
    else:
        _generate(sampler, text, ids, config, chosen, json, show_probs)
        console.say_next(command_for("attnlm report", opened.path))


def _check(
    interactive: bool, show_probs: bool, json: bool, num_samples: int, prompt: str | None
) -> None:
    """Raises UsageError for options that exclude each other."""
    if interactive and (json or num_samples != 1 or prompt == "-"):
        raise UsageError(
            "--interactive does not go with --json, --num-samples or a prompt from stdin",
            "leave one of them out",
        )
    if show_probs and (interactive or num_samples != 1):
        raise UsageError(
            "--show-probs does not go with --interactive or --num-samples", "leave one of them out"
        )


def _prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if prompt is not None and prompt_file is not None:
        raise UsageError("--prompt and --prompt-file exclude each other", "give one of them")
    if prompt == "-":
        return decoded(sys.stdin.buffer.read(), "the prompt on stdin").removesuffix("\n")
    if prompt_file is not None:
        return decoded(prompt_file.read_bytes(), str(prompt_file))
    return typed(prompt, "--prompt") if prompt else ""


def _generate(
    sampler: Sampler,
    prompt: str,
    ids: list[int],
    config: SamplingConfig,
    chosen: ChosenCheckpoint,
    json: bool,
    show_probs: bool,
) -> None:
    began = time.perf_counter()
    more: dict[str, object] = {}
    if config.num_samples > 1:
        texts = [prompt + text for text in sampler.samples(ids, config)]
        if not json:
            console.write("\n---\n".join(texts))
    elif show_probs:
        text, more = _choices(sampler, ids, prompt, config, json)
        texts = [text]
    else:
        pieces = []
        for piece in itertools.chain([prompt], sampler.stream(ids, config)):
            pieces.append(piece)
            console.write("" if json else piece)
        texts = ["".join(pieces)]
    seconds = time.perf_counter() - began
    count = config.tokens * config.num_samples
    speed = round(count / seconds) if seconds else 0
    if json:
        console.result_json(
            {
                "text": texts[0],
                "texts": texts,
                **more,
                "tokens": count,
                "seconds": round(seconds, 3),
                "tokens_per_second": speed,
                "seed": config.seed,
                "checkpoint": chosen.which,
                "step": chosen.step,
            }
        )
    elif not show_probs:  # which ends on a line of its own
        if sys.stdout.isatty():
            console.write("\n")
        else:
            console.say("")  # where both streams are shown, the text ends on a line of its own
    console.say(f"{count:,} tokens in {duration(seconds)}, {speed:,} tokens/s")


def _choices(
    sampler: Sampler, ids: list[int], prompt: str, config: SamplingConfig, json: bool
) -> tuple[str, dict[str, object]]:
    """The text, and what --json tells of its choices."""
    display = ChoiceDisplay(quiet=json)
    display.begin(prompt)
    pieces, facts = [prompt], []
    for choice in sampler.choices(ids, config):
        if json:
            pieces.append(choice.text)
            facts.append(choice.facts())
        display(choice)
    display.end()
    return "".join(pieces), {"choices": facts}
