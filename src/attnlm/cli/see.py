"""`attnlm attend`, `trace`, `heads`, `patch` and `report`: show what a run learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attnlm
from attnlm.base import files
from attnlm.base.errors import UsageError
from attnlm.base.folders import folder_names
from attnlm.cli import console, options
from attnlm.cli.options import argument, opened_run, option, output, utf8, with_options


def _windows(default: int) -> Any:
    help = "number of windows to score heads on, spread over the validation split"
    return option(default, help, min=1, max=100_000)


_PICTURE = output("picture, .png or .svg,", ".png", ".svg")
_ABLATE = option(False, "also measure the loss with each head silenced")


@with_options("checkpoint", "checkpoint_dir")
def attend(
    text: str, run: str | None, *, output: Path | None = _PICTURE, json: bool, **settings: Any
) -> None:
    """Show what each head attends to in a text."""
    opened = _opened("attend", text, run, settings)

    from attnlm.see.attend import CAUTION

    found = attnlm.attend(text, opened, **settings)
    _say_read(opened, settings, f"{found.model}, {len(found.tokens)} tokens")
    _show(found, opened, output, json)
    console.say(CAUTION)


def _opened(command: str, text: str, run: str | None, settings: dict[str, Any]) -> attnlm.Run:
    """Return the run of a command. Raises UsageError if only a run is named."""
    runs = folder_names(Path(settings["checkpoint_dir"]), "run")
    if text in runs and (run is None or (run not in runs and not Path(run).exists())):
        missing = "missing argument 'TEXT'" if run is None else f"{run!r} is no run"
        raise UsageError(
            f"{missing}: {text} is a run",
            f"attnlm {command} TEXT {text}; a text that is the name of a run needs RUN too",
        )
    return opened_run(run, settings)


def _say_read(run: attnlm.Run, settings: dict[str, Any], what: str) -> None:
    console.say(f"{run.name}, {run.checkpoint(settings['checkpoint'])}: {what}")


def _show(found: Any, run: attnlm.Run, output: Path | None, json: bool) -> None:
    """Print what was found; or write it as a picture, and print the name of the file."""
    if output is not None:
        files.write_bytes(output, found.picture(output.suffix.lower().removeprefix(".")))
    facts = {**found.facts(), "run": str(run.path)} if json else {}
    facts |= {} if output is None else {"output": str(output)}
    console.print_result_or_json(str(output or found), facts, json)


@with_options("checkpoint", "checkpoint_dir")
def trace(
    text: str,
    run: str | None,
    *,
    as_code: bool = option(False, "print a PyTorch script that computes the same logits"),
    json: bool,
    **settings: Any,
) -> None:
    """Follow one forward pass step by step, with shapes and numbers."""
    if as_code and json:
        raise UsageError("--as-code cannot be combined with --json", "leave one out")
    opened = _opened("trace", text, run, settings)
    _say_read(opened, settings, opened.config.spec.name)
    if as_code:
        from attnlm.see.trace import as_script

        chosen = opened.checkpoint(settings["checkpoint"])
        console.write(as_script(opened, text, checkpoint=chosen.which))
    else:
        _show(attnlm.trace(text, opened, **settings), opened, None, json)


@with_options(
    "checkpoint",
    "device",
    "checkpoint_dir",
    "data_dir",
    ablate=_ABLATE,
    windows=_windows(64),
)
def heads(
    run: str | None,
    *,
    over_training: bool = option(False, "show the scores at each evaluation of the training"),
    text: Path | None = option(
        None,
        "text file to measure on; default: the validation split (random tokens for an "
        "imported run)",
    ),
    output: Path | None = _PICTURE,
    json: bool,
    on_event: Any,
    **settings: Any,
) -> None:
    """Score and name attention heads by what they attend to."""
    if over_training and (settings["ablate"] or text is not None):
        message = "--over-training cannot be combined with --ablate or --text"
        raise UsageError(message, "training measured the scores, on the validation split")
    opened = opened_run(run, settings)
    if over_training:
        scores = attnlm.heads_over_training(opened)
        console.say(f"{opened.name}: {opened.config.spec.name}, {len(scores.steps)} snapshots")
        _show(scores, opened, output, json)
        return
    report = attnlm.heads(opened, text=text, on_event=on_event, **settings)
    _say_read(opened, settings, f"measured over {report.measured_on}")
    if report.loss is not None:
        console.say(f"loss over these windows, with all heads: {report.loss:.4f} nats per token")
    _show(report, opened, output, json)


@with_options("checkpoint", "checkpoint_dir", "data_dir")
def patch(
    clean: str | None = argument(
        None, "CLEAN", "text whose activations replace the other's", callback=utf8
    ),
    corrupted: str | None = argument(None, "CORRUPTED", "text with as many tokens", callback=utf8),
    run: str | None = options.USUAL["run"],
    *,
    answers: tuple[str, str] | None = option(
        None,
        "tokens whose logits are compared, one for each text; default: the likeliest next tokens",
        callback=utf8,
    ),
    examples: int | None = option(
        None,
        "use this many questions of the run's validation split, each with another question of the "
        "same length, instead of CLEAN and CORRUPTED",
        min=1,
    ),
    output: Path | None = _PICTURE,
    json: bool,
    on_event: Any,
    **settings: Any,
) -> None:
    """Find the places of a model that carry the difference between two texts."""
    texts: Any = [(clean, corrupted, *(answers or ()))]
    if examples is not None and (corrupted, answers) == (None, None) and None in (clean, run):
        run = run or clean  # the only argument is RUN
    elif examples is not None or None in texts[0]:
        message = "patch takes two texts, or --examples"
        raise UsageError(message, "give CLEAN and CORRUPTED, or --examples N")
    opened = opened_run(run, settings)
    if examples is not None:
        from attnlm.workflows.answers import texts_to_patch

        texts = texts_to_patch(opened.open_dataset(), examples)
    first, second = ([text[side] for text in texts] for side in (0, 1))
    pairs = [text[2:] for text in texts] if texts[0][2:] else None
    patching = attnlm.patch(first, second, opened, answers=pairs, on_event=on_event, **settings)
    _say_read(opened, settings, f"{patching.model}, {len(patching.clean)} tokens")
    console.say(patching.compared)
    _show(patching, opened, output, json)


@with_options(
    "checkpoint",
    "device",
    "checkpoint_dir",
    "data_dir",
    text=option(
        None,
        "text (not a file) that the page begins with; default: the start of the validation split",
        callback=utf8,
    ),
    windows=_windows(16),
    ablate=_ABLATE,
)
def report(
    run: str | None,
    *,
    output: Path | None = output(
        "page, .html,", ".html", default="; default: report.html in the run's folder"
    ),
    json: bool,
    on_event: Any,
    **settings: Any,
) -> None:
    """Write everything about a run as one HTML page that works offline."""
    opened = opened_run(run, settings)
    made = attnlm.report(opened, on_event=on_event, **settings)
    page = made.write_page(output)
    if made.not_measured and opened.config.spec.has_attention:
        console.say(f"heads are not measured: {made.not_measured}")
    _say_read(opened, settings, console.with_flags(made.verdict))
    console.print_result_or_json(str(page), made.facts() | {"output": str(page)}, json)
