"""`attnlm attend`, `trace`, `heads`, `patch` and `report`: show what a run learned."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attnlm
from attnlm.base import files
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import Progress
from attnlm.base.folders import folder_names
from attnlm.cli import console, options
from attnlm.cli.event_printer import Display
from attnlm.cli.options import argument, decode_argument, option, switch
from attnlm.model.spec import Use

if TYPE_CHECKING:
    from attnlm.see.pictures import HeatMaps


def _windows_option(default: int) -> Any:
    help = "number of windows to score heads on, spread over the validation split"
    return option(default, help, callback=_checked_windows)


def _checked_windows(windows: int) -> int:
    from attnlm.see.shown_tokens import check_windows  # loads numpy

    check_windows(windows)
    return windows


_PICTURE = option(None, "file to write or replace: .png or .svg", names=["--output", "-o"])


def attend(
    text: str = options.TEXT,
    run: str | None = options.RUN,
    output: Path | None = _PICTURE,
    checkpoint: str = options.CHECKPOINT,
    checkpoint_dir: Path = options.CHECKPOINT_DIR,
    json: bool = options.JSON,
) -> None:
    """Show what each head attends to in a text."""
    kind = "" if output is None else _check_output(output, "png", "svg")
    text, opened = _decoded_and_opened("attend", text, run, checkpoint_dir)

    from attnlm.see import attend as see

    chosen = opened.checkpoint(checkpoint)
    attention = see.attend(text, run=opened, checkpoint=chosen.which, on_event=Display())
    layers, heads, length, _ = attention.weights.shape
    console.say(
        f"{opened.name}, {chosen}: {attention.model}, layers {layers}, heads {heads}; "
        f"{length} tokens"
    )
    _show(attention.maps, str(attention), attention.facts() if json else {}, output, kind, json)
    console.say(see.CAUTION)


def _decoded_and_opened(
    command: str, text: str, run: str | None, checkpoint_dir: Path
) -> tuple[str, attnlm.Run]:
    """Return the text and the run of a command. Raises UsageError if only a run is named."""
    if run is None and text in folder_names(checkpoint_dir, "run"):
        raise UsageError(
            f"missing argument 'TEXT': {text} is a run",
            f"attnlm {command} TEXT {text}; a text that is the name of a run needs RUN too",
        )
    return decode_argument(text, "the text"), attnlm.open_run(run, checkpoint_dir=checkpoint_dir)


def _check_output(output: Path, *kinds: str) -> str:
    """Return the suffix of `output`, one of `kinds`, in lower case and without the dot."""
    kind = output.suffix.lower().removeprefix(".")
    if kind not in kinds:
        ends = " or ".join(f".{name}" for name in kinds)
        message = f"invalid value for --output: {str(output)!r}"
        raise UsageError(message, f"use a name that ends in {ends}")
    if not output.parent.is_dir():
        raise AttnlmError(f"folder not found: {output.parent}", "create it, or choose another one")
    if output.is_dir():
        raise AttnlmError(f"{output} is a folder", "choose another name")
    return kind


def trace(
    text: str = options.TEXT,
    run: str | None = options.RUN,
    as_code: bool = switch("print a PyTorch script that computes the same logits", "--as-code"),
    head: int | None = option(None, "number of the head to print; default: 1"),
    checkpoint: str = options.CHECKPOINT,
    checkpoint_dir: Path = options.CHECKPOINT_DIR,
    json: bool = options.JSON,
) -> None:
    """Follow one forward pass step by step, with shapes and numbers."""
    if as_code + json + (head is not None) > 1:
        message = "only one of --as-code, --json and --head can be used"
        raise UsageError(message, "--as-code and --json always include every head")
    text, opened = _decoded_and_opened("trace", text, run, checkpoint_dir)

    from attnlm.see.script_export import as_script
    from attnlm.see.trace import trace_lines

    chosen = opened.checkpoint(checkpoint)
    console.say(f"{opened.name}, {chosen}: {opened.config.spec.name}")
    if as_code:
        console.write(as_script(opened, text, checkpoint=chosen.which))
        return
    traced = attnlm.trace(text, opened, checkpoint=chosen.which)
    if json:
        console.print_json(traced.facts())
    else:
        console.print_result("\n".join(trace_lines(traced, 1 if head is None else head)))


def heads(
    run: str | None = options.RUN,
    over_training: bool = switch(
        "show the scores at each evaluation of the training", "--over-training"
    ),
    ablate: bool = options.ABLATE,
    windows: int = _windows_option(64),
    text: Path | None = option(
        None,
        "text file to measure on; default: the validation split (random tokens for an "
        "imported run)",
        metavar="FILE",
    ),
    output: Path | None = _PICTURE,
    checkpoint: str = options.CHECKPOINT,
    device: str = options.DEVICE,
    checkpoint_dir: Path = options.CHECKPOINT_DIR,
    data_dir: Path = options.DATA_DIR,
    json: bool = options.JSON,
) -> None:
    """Score and name attention heads by what they attend to."""
    kind = "" if output is None else _check_output(output, "png", "svg")
    if over_training and (ablate or text is not None):
        message = "--over-training cannot be combined with --ablate or --text"
        raise UsageError(message, "training measured the scores, on the validation split")
    if text is not None and not os.path.lexists(text):
        raise AttnlmError(
            f"file not found: {str(text)!r} (--text takes a file)",
            "write the text to a file, and pass its path",
        )
    opened = attnlm.open_run(run, checkpoint_dir=checkpoint_dir)
    if over_training:
        scores = attnlm.heads_over_training(opened)
        console.say(f"{opened.name}: {opened.config.spec.name}, {len(scores.steps)} snapshots")
        _show(scores.maps, str(scores), scores.facts(), output, kind, json)
        return

    chosen = opened.checkpoint(checkpoint)
    with contextlib.closing(Display()) as display:
        report = attnlm.heads(
            opened,
            windows=windows,
            ablate=ablate,
            text=text,
            checkpoint=chosen.which,
            device=device,
            data_dir=data_dir,
            on_event=display,
        )
    console.say(f"{report.run}, {chosen}, measured over {report.measured_on}")
    if report.loss is not None:
        more = "" if report.measures_all else f" (--windows {report.windows_of_text} uses all)"
        loss = f"{report.loss:.4f} nats per token"
        console.say(f"loss over these windows{more}, with all heads: {loss}")
    _show(report.maps, str(report), report.facts(), output, kind, json)


def _show(
    maps: HeatMaps, text: str, facts: dict[str, Any], output: Path | None, kind: str, json: bool
) -> None:
    """Write a picture to a file of a kind and print its name, or print the text."""
    if output is not None:
        files.write_bytes(output, maps.picture(kind))
        text = str(output)
        facts |= {"output": text}
    console.print_result_or_json(text, facts, json)


def patch(
    clean: str | None = argument(None, "CLEAN", "text whose activations replace the other's"),
    corrupted: str | None = argument(None, "CORRUPTED", "text with as many tokens"),
    run: str | None = options.RUN,
    answers: tuple[str, str] | None = option(
        None,
        "tokens whose logits are compared, one for each text; default: the likeliest next tokens",
        metavar="<str> <str>",
    ),
    examples: int | None = option(
        None,
        "use this many questions of the run's validation split, each with another question of the "
        "same length, instead of CLEAN and CORRUPTED",
    ),
    output: Path | None = _PICTURE,
    checkpoint: str = options.CHECKPOINT,
    checkpoint_dir: Path = options.CHECKPOINT_DIR,
    data_dir: Path = options.DATA_DIR,
    json: bool = options.JSON,
) -> None:
    """Find the places of a model that carry the difference between two texts."""
    kind = "" if output is None else _check_output(output, "png", "svg")
    if examples is not None and (corrupted, answers) == (None, None) and None in (clean, run):
        run, clean = run or clean, None  # the only argument is RUN
    elif examples is not None or clean is None or corrupted is None:
        message = "patch takes two texts, or --examples"
        raise UsageError(message, "give CLEAN and CORRUPTED, or --examples N")
    if examples is not None and examples < 1:
        raise UsageError(f"invalid value for --examples: {examples}", "it must be at least 1")
    opened = attnlm.open_run(run, checkpoint_dir=checkpoint_dir)
    texts: list[tuple[str, ...]]
    if examples is not None:
        from attnlm.runs.run import open_dataset_of
        from attnlm.workflows.answers import texts_to_patch

        texts = [*texts_to_patch(open_dataset_of(opened, data_dir), examples)]
    else:
        given = {"the clean text": clean, "the corrupted text": corrupted}
        a, b = (decode_argument(text or "", name) for name, text in given.items())
        texts = [(a, b, *(decode_argument(answer, "--answers") for answer in answers or ()))]

    chosen = opened.checkpoint(checkpoint)
    with contextlib.closing(Display()) as display:
        patching = attnlm.patch(
            [pair[0] for pair in texts],
            [pair[1] for pair in texts],
            opened,
            answers=[(pair[2], pair[3]) for pair in texts] if texts[0][2:] else None,
            checkpoint=chosen.which,
            on_event=display,
        )
    console.say(f"{opened.name}, {chosen}: {patching.model}, {len(patching.clean)} tokens")
    for sentence in filter(None, (patching.compared, patching.missing)):
        console.say(sentence)
    _show(patching.maps, str(patching), patching.facts(), output, kind, json)


def report(
    run: str | None = options.RUN,
    output: Path | None = option(
        None,
        "page to write or replace; default: report.html in the run's folder",
        names=["--output", "-o"],
    ),
    text: str | None = option(
        None,
        "text (not a file) that the page begins with; default: the start of the validation split",
    ),
    windows: int = _windows_option(16),
    ablate: bool = options.ABLATE,
    checkpoint: str = options.CHECKPOINT,
    device: str = options.DEVICE,
    checkpoint_dir: Path = options.CHECKPOINT_DIR,
    data_dir: Path = options.DATA_DIR,
    json: bool = options.JSON,
) -> None:
    """Write everything about a run as one HTML page that works offline."""
    if output is not None:
        _check_output(output, "html")
    text = None if text is None else decode_argument(text, "--text")
    if text is not None and os.path.lexists(text):
        console.say(f"--text takes a text, not a file: the page begins with {text!r} itself")
    opened = attnlm.open_run(run, checkpoint_dir=checkpoint_dir)

    with contextlib.closing(Display()) as display:
        display(Progress("report", 0, None, "step"))
        chosen = opened.checkpoint(checkpoint)
        run_report = attnlm.report(
            opened,
            text=text,
            windows=windows,
            ablate=ablate,
            checkpoint=chosen.which,
            device=device,
            data_dir=data_dir,
            on_event=display,
        )
        page = run_report.write_page(output)
    result = run_report.result
    words = console.with_flags(run_report.verdict)
    if result is None:
        console.say(f"{opened.name}: {words}")
    else:
        part = f" on {opened.evaluated_part}" if opened.evaluated_part else ""
        console.say(
            f"{opened.name}, {chosen}; best validation loss {result.best.val_loss:.4f} nats "
            f"per token, {result.best.bits_per_byte:.3f} bits per byte{part}; {words}"
        )
        has_maps = opened.config.spec.reason_against(Use.ATTENTION_MAPS) is None
        if run_report.data_gone and has_maps:
            console.say(f"heads are not measured on validation text: {run_report.data_gone}")
    console.print_result_or_json(str(page), run_report.facts() | {"output": str(page)}, json)
