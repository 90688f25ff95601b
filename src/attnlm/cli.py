"""The commands: options → one library call → what a person or a pipe gets to see."""

from __future__ import annotations

import contextlib
import math
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

import attnlm
from attnlm import cli_see, console
from attnlm.config import Setting, help_of, load_recipe, resolve, setting_names, to_toml
from attnlm.errors import AttnlmError, UsageError
from attnlm.folders import command_for
from attnlm.options import (
    Checkpoint,
    CheckpointDir,
    DataDir,
    DeviceOption,
    JsonOption,
    Verify,
    decoded,
    typed,
)
from attnlm.readable import duration

app = typer.Typer(
    name="attnlm",
    help="Prepare a text, train small attention language models on it, read what they learned.",
    epilog="Start with: attnlm prepare",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        console.result(f"attnlm {attnlm.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        console.result(context.get_help())


@app.command()
def prepare(
    source: Annotated[
        list[str] | None,
        typer.Argument(
            show_default=False,
            help="tinyshakespeare | tales | a file | a directory | a URL | - (stdin), or several, "
            "joined in their order; default: tinyshakespeare, or tales where that can't be had",
        ),
    ] = None,
    tokenizer: Annotated[
        str, typer.Option(help="char|byte|bpe:N|gpt2|cl100k_base|o200k_base")
    ] = "char",
    val_fraction: Annotated[
        float, typer.Option(help="share of the text, at its end, to validate on")
    ] = 0.1,
    val_file: Annotated[
        Path | None, typer.Option(help="validate on this file, train on all of SOURCE")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="of the data set; <source>-<tokenizer> unless given")
    ] = None,
    data_dir: DataDir = Path("data"),
    encoding: Annotated[str, typer.Option(help="of the text")] = "utf-8",
    newlines: Annotated[
        str, typer.Option(help="keep|unix: line ends as they are, or CR LF and CR become LF")
    ] = "keep",
    offline: Annotated[bool, typer.Option("--offline", help="never use the network")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="replace another data set of the same name")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Get a text, choose a tokenizer, encode it."""
    from attnlm.preparation import prepare as run_prepare

    display = console.PreparationDisplay()
    with contextlib.closing(display):
        dataset = run_prepare(
            source or None,
            tokenizer=tokenizer,
            val_fraction=val_fraction,
            val_file=val_file,
            name=name,
            data_dir=data_dir,
            encoding=encoding,
            newlines=newlines,
            offline=offline,
            force=force,
            on_event=display,
        )
    console.say_facts(
        {
            "data": f"{dataset.name}, from {dataset.source}",
            "text": f"{dataset.characters:,} characters",
            "tokens": f"{dataset.train_tokens + dataset.val_tokens:,} of {dataset.vocab_size:,} "
            f"ids ({dataset.tokenizer.name})",
            "split": f"{dataset.train_tokens:,} to train on, {dataset.val_tokens:,} to validate",
            "losses": _reference_losses(dataset.vocab_size, dataset.bigram_loss, dataset.floor),
        }
    )
    flags = []
    if dataset.largest_block_size < resolve({}).model.block_size:
        flags = ["--block-size", str(dataset.largest_block_size)]
    console.say_next(command_for("attnlm train", dataset.path, *flags, kind="data set"))
    if json:
        console.result_json(
            {
                "dataset": str(dataset.path),
                "characters": dataset.characters,
                "vocab_size": dataset.vocab_size,
                "train_tokens": dataset.train_tokens,
                "val_tokens": dataset.val_tokens,
                "bigram_loss": dataset.bigram_loss,
                "floor": dataset.floor,
            }
        )
    else:
        console.result(str(dataset.path))


def _setting(name: str) -> Any:
    return typer.Option(help=help_of(name), show_default=False)


@app.command()
def train(
    dataset: Annotated[
        str | None,
        typer.Argument(show_default=False, help="name or path; the one prepared last unless given"),
    ] = None,
    model: Annotated[str | None, _setting("model")] = None,
    heads: Annotated[int | None, _setting("heads")] = None,
    layers: Annotated[int | None, _setting("layers")] = None,
    embed_dim: Annotated[int | None, _setting("embed_dim")] = None,
    head_size: Annotated[int | None, _setting("head_size")] = None,
    block_size: Annotated[int | None, _setting("block_size")] = None,
    dropout: Annotated[float | None, _setting("dropout")] = None,
    projection: Annotated[bool | None, _setting("projection")] = None,
    qkv_bias: Annotated[bool | None, _setting("qkv_bias")] = None,
    tie_embeddings: Annotated[bool | None, _setting("tie_embeddings")] = None,
    sampling: Annotated[str | None, _setting("sampling")] = None,
    stride: Annotated[int | None, _setting("stride")] = None,
    steps: Annotated[int | None, _setting("steps")] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            show_default=False, help="time to train for, in place of steps: 90s|5min|1h30m"
        ),
    ] = None,
    batch_size: Annotated[int | None, _setting("batch_size")] = None,
    learning_rate: Annotated[float | None, _setting("learning_rate")] = None,
    optimizer: Annotated[str | None, _setting("optimizer")] = None,
    beta1: Annotated[float | None, _setting("beta1")] = None,
    beta2: Annotated[float | None, _setting("beta2")] = None,
    schedule: Annotated[str | None, _setting("schedule")] = None,
    cooldown: Annotated[float | None, _setting("cooldown")] = None,
    warmup: Annotated[int | None, _setting("warmup")] = None,
    weight_decay: Annotated[float | None, _setting("weight_decay")] = None,
    weight_decay_on: Annotated[str | None, _setting("weight_decay_on")] = None,
    gradient_clip: Annotated[float | None, _setting("gradient_clip")] = None,
    eval_every: Annotated[int | None, _setting("eval_every")] = None,
    patience: Annotated[int | None, _setting("patience")] = None,
    seed: Annotated[int | None, _setting("seed")] = None,
    device: Annotated[str | None, _setting("device")] = None,
    dtype: Annotated[str | None, _setting("dtype")] = None,
    compile: Annotated[str | None, _setting("compile")] = None,
    threads: Annotated[int | None, _setting("threads")] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            show_default=False,
            help="settings from a recipe by name, a TOML file or a run's config.json; "
            "flags go over them",
        ),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="print the settings as a recipe, and stop")
    ] = False,
    name: Annotated[
        str | None,
        typer.Option(show_default=False, help="of the run; <model>-001 and so on unless given"),
    ] = None,
    checkpoint_dir: CheckpointDir = Path("checkpoints"),
    data_dir: DataDir = Path("data"),
    verify: Verify = False,
    resume: Annotated[
        str | None, typer.Option(show_default=False, help="name or path of a run to go on with")
    ] = None,
    json: JsonOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="say only how it went")] = False,
) -> None:
    """Train a rung of the ladder on prepared data."""
    arguments = {**locals(), "budget": None if budget is None else _seconds(budget)}
    settings: dict[str, Setting] = {
        key: arguments[key] for key in setting_names() if arguments[key] is not None
    }
    if print_config:
        config = resolve(settings, load_recipe(recipe) if recipe is not None else None)
        console.result(to_toml(config.settings()).rstrip())
        return
    if recipe is None and resume is None:
        resolve(settings)  # what is wrong with the flags is said before torch is loaded

    from attnlm.launch import train as run_train

    display = console.TrainingDisplay(quiet)
    with contextlib.closing(display):
        try:
            run = run_train(
                dataset,
                recipe=recipe,
                resume=resume,
                name=name,
                checkpoint_dir=checkpoint_dir,
                data_dir=data_dir,
                verify=verify,
                on_event=display,
                **settings,
            )
        except KeyboardInterrupt:
            display.close()
            if display.run is not None:
                _say_how_to_resume(display.run)
            raise
    _report_training(run, json, quiet)


_NUMBER = r"(\d+(?:\.\d+)?)\s*"
_TIME = re.compile(
    rf"{_NUMBER}|(?:{_NUMBER}h(?:(?:ou)?rs?)?)?\s*(?:{_NUMBER}m(?:in(?:ute)?s?)?)?\s*"
    rf"(?:{_NUMBER}s(?:ec(?:ond)?s?)?)?"
)


def _seconds(text: str) -> float:
    """90s, 5min, 1h30m or plain seconds."""
    match = _TIME.fullmatch(text.strip().lower())
    parts = match.groups("0") if match else ()
    seconds = sum(float(n) * unit for n, unit in zip(parts, (1, 3600, 60, 1), strict=False))
    if not 0 < seconds < math.inf:
        raise UsageError(f"--budget can't be {text!r}", "give a time such as 90s, 5m or 1h30m")
    return seconds


def _reference_losses(vocab_size: int, bigram: float | None, floor: float | None) -> str:
    parts = [f"guessing (ln V) {math.log(vocab_size):.4f}"]
    if bigram is not None:
        parts.append(f"counted bigram {bigram:z.4f}")
    if floor is not None:
        parts.append(f"floor {floor:z.4f}")
    return ", ".join(parts) + " nats per token"


def _say_how_to_resume(run: Any) -> None:
    console.say(f"stopped; the last complete step is saved in {run.path}")
    console.say_next(command_for("attnlm train --resume", run.path))


def _report_training(run: Any, json: bool, quiet: bool) -> None:
    from attnlm.curves import plain_curve, references_of
    from attnlm.memory import estimate_memory
    from attnlm.verdict import verdict

    records = run.metrics()
    if not records:
        raise AttnlmError(
            f"{run.path / 'metrics.jsonl'} has no evaluations",
            f"its checkpoints can be measured again: {command_for('attnlm eval', run.path)}",
        )
    if sys.stderr.isatty() and not quiet:
        console.say(plain_curve(records, references_of(run)))
    last, best = records[-1], min(records, key=lambda record: record["val_loss"])
    memory = estimate_memory(
        run.config,
        run.vocab_size,
        run.parameters,
        run.dataset["val_tokens"],
        run.config.training.device,
    )
    bigram, floor = run.dataset["bigram_loss"], run.dataset["floor"]
    console.say_facts(
        {
            "validation": f"{best['val_loss']:.4f} nats per token at step {best['step']}, "
            f"{best['bits_per_byte']:.3f} bits per byte",
            "beside": _reference_losses(run.vocab_size, bigram, floor),
            "verdict": verdict(records, bigram_loss=bigram, floor=floor),
            "time": f"{duration(last['seconds'])}, {last['tokens']:,} tokens",
        }
    )
    console.say_next(command_for("attnlm sample", run.path, "--tokens", "500"))
    if json:
        console.result_json(
            {
                "run": str(run.path),
                "model": run.config.model.model,
                "parameters": run.parameters,
                "steps": last["step"],
                "val_loss": last["val_loss"],
                "best_val_loss": best["val_loss"],
                "bits_per_byte": last["bits_per_byte"],
                "seconds": last["seconds"],
                "tokens_per_second": last["tokens_per_second"],
                "estimated_memory": memory.total,
            }
        )
    else:
        console.result(str(run.path))


@app.command()
def ladder(
    dataset: Annotated[
        str | None,
        typer.Argument(show_default=False, help="name or path; the one prepared last unless given"),
    ] = None,
    rungs: Annotated[
        str | None,
        typer.Option(
            show_default=False,
            help="which, in their order; "
            "bigram,average,single-head,multi-head,transformer unless given",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            show_default=False, help="time for all rungs: 90s|5min|1h30m; 2m unless given"
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(show_default=False, help="updates of each rung, in place of a budget"),
    ] = None,
    eval_every: Annotated[int | None, _setting("eval_every")] = None,
    seed: Annotated[int | None, _setting("seed")] = None,
    prompt: Annotated[
        str | None, typer.Option(show_default=False, help="text that every rung continues")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(show_default=False, help="how many each rung continues it by; 200"),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            show_default=False,
            help="of the ladder, ladder-001 and so on unless given; one that exists goes on",
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(show_default=False, help="name or path of a ladder to go on with"),
    ] = None,
    checkpoint_dir: CheckpointDir = Path("checkpoints"),
    data_dir: DataDir = Path("data"),
    json: JsonOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="say only how it went")] = False,
) -> None:
    """Train the rungs on the same batches, and show what each one gains."""
    seconds = None if budget is None else _seconds(budget)
    if steps is not None and seconds is not None:
        raise UsageError("--steps and --budget exclude each other", "give one of them")

    from attnlm.see.ladder import LadderStarted, climb
    from attnlm.see.ladder_page import write_ladder

    display = console.TrainingDisplay(quiet)
    started: list[Path] = []

    def listen(event: object) -> None:
        if isinstance(event, LadderStarted):
            started.append(event.path)
        else:
            display(event)

    with contextlib.closing(display):
        try:
            climbed = climb(
                dataset,
                rungs=None if rungs is None else [rung.strip() for rung in rungs.split(",")],
                budget=seconds,
                steps=steps,
                eval_every=eval_every,
                seed=seed,
                prompt=None if prompt is None else typed(prompt, "--prompt"),
                tokens=tokens,
                name=name,
                resume=resume,
                checkpoint_dir=checkpoint_dir,
                data_dir=data_dir,
                on_event=listen,
            )
        except KeyboardInterrupt:
            display.close()
            if started:
                console.say(f"stopped; the rungs so far are beside {started[0]}")
                console.say_next(command_for("attnlm ladder --resume", started[0]))
            raise
    _report_ladder(climbed, write_ladder(climbed), json)


def _report_ladder(climbed: Any, page: Path, json: bool) -> None:
    rows = list(zip(climbed.rungs, climbed.gains, strict=True))
    if not json:
        for rung in climbed.rungs:
            console.say_styled(f"── {rung.model}", "cyan")
            console.say(f"{climbed.plan.prompt}{rung.text}")
        console.say("")
    console.say_table(
        ("rung", "validation loss", "gain", "bits per byte", "parameters", "seconds"),
        [
            (
                rung.model,
                f"{rung.best['val_loss']:.4f}",
                "–" if gain is None else f"{gain:+z.4f}",
                f"{rung.best['bits_per_byte']:.3f}",
                f"{rung.run.parameters:,}",
                f"{rung.last['seconds']:.1f}",
            )
            for rung, gain in rows
        ],
    )
    about = climbed.rungs[0].run
    bigram, floor = about.dataset["bigram_loss"], about.dataset["floor"]
    console.say(f"beside: {_reference_losses(about.vocab_size, bigram, floor)}")
    for warning in climbed.warnings:
        console.say_styled("not like for like:", "yellow", f" {warning}")
    if json:
        console.result_json(
            {
                "ladder": str(climbed.path),
                "page": str(page),
                "steps": climbed.plan.steps,
                "seed": climbed.plan.seed,
                "warnings": climbed.warnings,
                "rungs": [
                    {
                        "model": rung.model,
                        "run": str(rung.run.path),
                        "val_loss": rung.best["val_loss"],
                        "gain": gain,
                        "bits_per_byte": rung.best["bits_per_byte"],
                        "parameters": rung.run.parameters,
                        "seconds": rung.last["seconds"],
                        "text": climbed.plan.prompt + rung.text,
                    }
                    for rung, gain in rows
                ],
            }
        )
    else:
        console.result(str(page))


@app.command()
def sample(
    run: Annotated[
        str | None,
        typer.Argument(show_default=False, help="name or path; the one trained last unless given"),
    ] = None,
    tokens: Annotated[int, typer.Option(help="how many to generate, the prompt not counted")] = 500,
    prompt: Annotated[
        str | None, typer.Option(show_default=False, help="text to continue; - reads stdin")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(show_default=False, help="file with the text to continue")
    ] = None,
    temperature: Annotated[
        float,
        typer.Option(help="below 1 likely tokens gain, above 1 the others do; 0 is greedy"),
    ] = 1.0,
    top_k: Annotated[
        int | None, typer.Option(show_default=False, help="choose among the K likeliest tokens")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(show_default=False, help="choose among the likeliest that sum to P"),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(show_default=False, help="of the choices; drawn unless given")
    ] = None,
    num_samples: Annotated[int, typer.Option(help="texts, computed side by side")] = 1,
    checkpoint: Checkpoint = "auto",
    device: DeviceOption = "auto",
    checkpoint_dir: CheckpointDir = Path("checkpoints"),
    show_probs: Annotated[
        bool,
        typer.Option("--show-probs", help="how likely each token was, and which others were"),
    ] = False,
    interactive: Annotated[
        bool, typer.Option("--interactive", "-i", help="talk back and forth; /help says how")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Read what a run learned."""
    text = _prompt(prompt, prompt_file)
    if interactive and (json or num_samples != 1 or prompt == "-"):
        raise UsageError(
            "--interactive does not go with --json, --num-samples or a prompt from stdin",
            "leave one of them out",
        )
    if show_probs and (interactive or num_samples != 1):
        raise UsageError(
            "--show-probs does not go with --interactive or --num-samples", "leave one of them out"
        )

    from attnlm.run import open_run
    from attnlm.sampling import (
        MOST_CHOICES_HELD,
        MOST_HELD,
        SamplingConfig,
        drawn_seed,
        load_sampler,
    )

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
    opened = open_run(run, checkpoint_dir=checkpoint_dir)
    chosen = opened.checkpoint(checkpoint)
    sampler = load_sampler(opened, checkpoint=chosen.which, device=device)
    console.say(
        f"{opened.name}, {chosen} on {sampler.device.name}, "
        f"temperature {temperature:g}, seed {config.seed}"
    )
    if interactive:
        _talk(sampler, text, config)
    else:
        _sample(sampler, text, config, chosen, json, show_probs)
        console.say_next(command_for("attnlm report", opened.path))


def _prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if prompt is not None and prompt_file is not None:
        raise UsageError("--prompt and --prompt-file exclude each other", "give one of them")
    if prompt == "-":
        return decoded(sys.stdin.buffer.read(), "the prompt on stdin")
    if prompt_file is not None:
        return decoded(prompt_file.read_bytes(), str(prompt_file))
    return typed(prompt, "--prompt") if prompt else ""


def _sample(
    sampler: Any, prompt: str, config: Any, chosen: Any, json: bool, show_probs: bool
) -> None:
    ids = sampler.prompt_ids(prompt)
    began = time.perf_counter()
    about: dict[str, object] = {}
    if config.num_samples > 1:
        texts = [prompt + text for text in sampler.samples(ids, config)]
        if not json:
            console.write("\n---\n".join(texts))
    elif show_probs:
        display = console.ChoiceDisplay(quiet=json)
        display.begin(prompt)
        choices = []
        for choice in sampler.choices(ids, config):
            if json:
                choices.append(choice)
            display(choice)
        display.end()
        texts = [prompt + "".join(choice.text for choice in choices)]
        about = {"choices": [choice.facts() for choice in choices]}
    else:
        pieces = [prompt]
        console.write("" if json else prompt)
        for piece in sampler.stream(ids, config):
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
                **about,
                "tokens": count,
                "seconds": round(seconds, 3),
                "tokens_per_second": speed,
                "seed": config.seed,
                "checkpoint": chosen.which,
                "step": chosen.step,
            }
        )
    elif show_probs:
        pass  # ends on a line of its own anyhow
    elif sys.stdout.isatty():
        console.write("\n")
    else:
        console.say("")  # where both streams are shown, the text ends on a line of its own
    console.say(f"{count:,} tokens in {duration(seconds)}, {speed:,} tokens/s")


def _talk(sampler: Any, prompt: str, config: Any) -> None:
    """Each line typed is added to the text, and the model continues it."""
    console.say("type a line and the model continues; /help says what else there is, /bye stops")
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
            config = _obeyed(command[1], line[command.end() :].strip(), config)
        elif _extend(ids, sampler, line):
            for piece in sampler.stream(ids, config):
                console.write(piece)
            console.write("\n")
            config = replace(config, seed=(config.seed + 1) % 2**63)


def _extend(ids: list[int], sampler: Any, text: str) -> bool:
    """Whether `text` could be added to the ids; if not, that was said."""
    if sampler.tokenizer.newline is None:
        text = text.rstrip("\n")  # the end of a line is no part of such texts
    try:
        ids.extend(sampler.prompt_ids(text) if text or not ids else [])
    except AttnlmError as error:
        console.fail(error.message, error.hint)
        return False
    return True


_TALK_HELP = {
    "/seed N": "draw from another seed",
    "/temperature X": "below 1 likely tokens gain, above 1 the others do; 0 is greedy",
    "/help": "this list",
    "/bye, quit, exit": "stop, as the end of input does",
}


def _obeyed(command: str, value: str, config: Any) -> Any:
    """The settings after a command that was typed; what is wrong with it is said."""
    kinds: dict[str, type] = {"seed": int, "temperature": float}
    if command == "help":
        console.say_facts(_TALK_HELP)
    elif command not in kinds:
        console.fail(f"there is no /{command}", f"there is {', '.join(_TALK_HELP)}")
    else:
        try:
            config = replace(config, **{command: kinds[command](value)})
            console.say(f"{command} {value}")
        except (ValueError, UsageError) as error:
            hint = error.hint if isinstance(error, UsageError) else "it must be a number"
            console.fail(f"/{command} can't be {value!r}", hint)
    return config


@app.command("eval")
def measure(
    run: Annotated[
        str | None,
        typer.Argument(show_default=False, help="name or path; the one trained last unless given"),
    ] = None,
    checkpoint: Checkpoint = "auto",
    data: Annotated[
        str | None,
        typer.Option(show_default=False, help="another data set of the same tokenizer"),
    ] = None,
    device: DeviceOption = "auto",
    checkpoint_dir: CheckpointDir = Path("checkpoints"),
    data_dir: DataDir = Path("data"),
    verify: Verify = False,
    json: JsonOption = False,
) -> None:
    """Measure a run on the whole validation split."""
    from attnlm.evaluation import evaluate
    from attnlm.run import open_run

    opened = open_run(run, checkpoint_dir=checkpoint_dir)
    chosen = opened.checkpoint(checkpoint)
    evaluation = evaluate(
        opened,
        checkpoint=chosen.which,
        data=data,
        device=device,
        data_dir=data_dir,
        verify=verify,
    )
    console.say(
        f"{opened.name}, step {chosen.step} ({chosen.which}), "
        f"{evaluation.tokens:,} tokens predicted"
    )
    if json:
        console.result_json(
            {
                "val_loss": evaluation.loss,
                "bits_per_byte": evaluation.bits_per_byte,
                "perplexity": evaluation.perplexity,
                "tokens": evaluation.tokens,
                "checkpoint": chosen.which,
                "step": chosen.step,
            }
        )
    else:
        perplexity = evaluation.perplexity
        shown = f"{perplexity:,.3f}" if perplexity < 1e6 else "above a million"
        console.result(
            f"{evaluation.loss:.4f} nats per token, {evaluation.bits_per_byte:.4f} bits per byte, "
            f"perplexity {shown}"
        )


app.add_typer(cli_see.app)


def run_command() -> None:
    """The command that the arguments name. Every failure is an exception."""
    # Not through Typer's own main: it has other ideas about errors, signals and closed pipes.
    command = typer.main.get_command(app)
    with command.make_context("attnlm", sys.argv[1:]) as context:
        command.invoke(context)
