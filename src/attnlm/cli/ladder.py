"""`attnlm ladder`: train several models on the same batches, and compare them."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from attnlm.base.errors import UsageError
from attnlm.base.folders import command_for, find_folder
from attnlm.cli import completion, console
from attnlm.cli.displays import Display, reference_losses
from attnlm.cli.options import (
    CheckpointDir,
    DataDir,
    DatasetArgument,
    JsonOption,
    QuietOption,
    budget_option,
    option,
    setting_option,
    typed,
)
from attnlm.model.architecture import MODELS
from attnlm.runs.ladder_plan import check_rungs

if TYPE_CHECKING:
    from attnlm.see.ladder import Ladder


def ladder(
    dataset: DatasetArgument = None,
    rungs: Annotated[
        str | None,
        option(
            "models or variants to compare, in this order, such as bigram, "
            "transformer:positions=none or transformer:learning_rate=0.005; default: "
            "bigram,average,single-head,multi-head,transformer",
            completion.several(*MODELS),
        ),
    ] = None,
    budget: Annotated[
        float | None,
        budget_option("time for all models together, such as 90s, 5m or 1h30m; default: 2m"),
    ] = None,
    steps: Annotated[int | None, option("updates of each model, instead of --budget")] = None,
    eval_every: Annotated[int | None, setting_option("eval_every")] = None,
    eval_tokens: Annotated[int | None, setting_option("eval_tokens")] = None,
    threads: Annotated[int | None, setting_option("threads")] = None,
    seed: Annotated[int | None, setting_option("seed")] = None,
    seeds: Annotated[
        int | None,
        option(
            "number of seeds: each model is trained with all of them, and the median is "
            "shown; default: 1"
        ),
    ] = None,
    prompt: Annotated[str | None, option("text that each model continues")] = None,
    tokens: Annotated[int | None, option("tokens that each model generates; default: 200")] = None,
    name: Annotated[
        str | None,
        option(
            "name of the ladder; default: ladder-001, ladder-002, …; an existing one is resumed"
        ),
    ] = None,
    resume: Annotated[
        str | None, option("name or path of a ladder to resume", completion.ladders)
    ] = None,
    checkpoint_dir: CheckpointDir = Path("checkpoints"),
    data_dir: DataDir = Path("data"),
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Train several models on the same batches and compare them."""
    if steps is not None and budget is not None:
        raise UsageError("--steps and --budget cannot be combined", "use only one of them")
    named = None if rungs is None else [rung.strip() for rung in rungs.split(",")]
    if named is not None:
        check_rungs(named)
    if resume is None:
        find_folder(dataset, data_dir, kind="data set")

    from attnlm.experiments.ladder import LadderStarted, climb
    from attnlm.see.ladder import write_ladder

    started: list[Path] = []
    with contextlib.closing(Display(quiet)) as display:

        def listen(event: object) -> None:
            if isinstance(event, LadderStarted):
                started.append(event.path)
            else:
                display(event)

        try:
            climbed = climb(
                dataset,
                rungs=named,
                budget=budget,
                steps=steps,
                eval_every=eval_every,
                eval_tokens=eval_tokens,
                threads=threads,
                seed=seed,
                seeds=seeds,
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
                console.say(f"stopped; the models trained so far are saved next to {started[0]}")
                console.say_next(command_for("attnlm ladder --resume", started[0]))
            raise
    page = write_ladder(climbed)
    if not json:
        _say_texts(climbed)
    _say_table(climbed)
    console.result_or_json(str(page), _facts(climbed) | {"page": str(page)}, json)


def _say_texts(climbed: Ladder) -> None:
    for rung in climbed.rungs:
        console.say_styled(f"── {rung.model}", "cyan")
        console.say(f"{climbed.plan.prompt}{rung.text}".replace("\n", "⏎"))
    console.say("")


def _say_table(climbed: Ladder) -> None:
    console.print_table(*climbed.table(), ("rung",), sys.stderr)
    about = climbed.rungs[0].run
    bigram, floor = about.dataset["bigram_loss"], about.dataset["floor"]
    baselines = f"baselines: {reference_losses(about.vocab_size, bigram, floor)}"
    if climbed.measured_on:
        baselines += f", on the whole split; the rungs on {climbed.measured_on}"
    console.say(baselines)
    for warning in map(console.with_flags, climbed.warnings):
        console.say_styled("not like for like:", "yellow", f" {warning}")


def _facts(climbed: Ladder) -> dict[str, object]:
    return {
        "ladder": str(climbed.path),
        "steps": climbed.plan.steps,
        "seed": climbed.plan.seed,
        "seeds": climbed.plan.seeds,
        "warnings": climbed.warnings,
        "rungs": [
            {
                "model": rung.model,
                "run": str(rung.run.path),
                "val_loss": rung.best["val_loss"],
                "val_losses": rung.losses,
                "gain": gain and gain.nats,
                "beyond_seeds": gain and gain.beyond_seeds,
                "bits_per_byte": rung.best["bits_per_byte"],
                "parameters": rung.run.parameters,
                "seconds": rung.last["seconds"],
                "text": climbed.plan.prompt + rung.text,
            }
            for rung, gain in zip(climbed.rungs, climbed.gains, strict=True)
        ],
    }
