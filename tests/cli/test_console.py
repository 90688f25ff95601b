"""What the command line shows: progress, notes, models, times and sizes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from attnlm.base.events import Note, Progress
from attnlm.base.formatting import duration, escape_control_characters, quantity
from attnlm.base.setting_fields import Setting
from attnlm.cli import console, event_printer
from attnlm.cli.app import root_command
from attnlm.config.settings import resolve
from attnlm.runs.journal import Snapshot
from attnlm.training.events import Evaluated, Finished, Stepped
from tests.kit import Clock, terminal
from tests.models import evaluation_record


def evaluated(step: int, text: str, *, is_last: bool = False) -> Evaluated:
    snapshot = Snapshot.of(step, text, None)
    return Evaluated(
        **vars(evaluation_record(step)), improved=True, snapshot=snapshot, is_last=is_last
    )


def test_samples_are_dimmed_lines_of_the_terminals_width(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = terminal(monkeypatch)
    display = event_printer.Display()
    display.begin("train", 999, "step")
    display(evaluated(0, "\nROMEO:\n\x1b[2Jfox \ufffd"))
    display(evaluated(999, "word " * 20, is_last=True))
    display.close()
    assert re.findall(r"\x1b\[2m([^\n]*)\x1b\[0m\n", shown.getvalue()) == [
        r"step      0  validation 2.5000  ⏎ROMEO:…",
        "step    999  validation 2.5000  word wo…",
    ]


def test_long_lines_wrap_at_words_but_not_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = terminal(monkeypatch)
    console.say("notes of more than forty characters wrap here")
    console.say_next("attnlm train --resume checkpoints/transformer-001")
    first, second, command = shown.getvalue().splitlines()
    assert (first, second) == ("notes of more than forty characters wrap", "here")
    assert command.endswith("--resume checkpoints/transformer-001")


@pytest.mark.parametrize("quiet", [False, True])
def test_samples_are_shown_on_a_terminal_only(
    quiet: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    event_printer.Display(quiet)(evaluated(0, "the words"))
    shown = capsys.readouterr()
    assert shown.out == "" and "the words" not in shown.err
    assert ("validation 2.5000*" in shown.err) == (not quiet)


def test_the_bar_shows_the_time_left_at_the_latest_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "100")
    display = event_printer.Display()
    display.begin("train", 2600, "step")
    display(evaluated(0, "said"))
    display(Stepped(20, loss=2.5, tokens_per_second=5000.0, seconds_left=852.0))
    display(Stepped(21, loss=2.5, tokens_per_second=5000.0, seconds_left=7384.0))
    display.close()
    first, second = (
        re.findall(rf"{step}/2600 \[\d\d:\d\d, ([\w. ]+) left, ", shown.getvalue())
        for step in (20, 21)
    )
    assert (first, second) == (["14 min"], ["2.1 h"])


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_values_that_json_lacks_are_never_printed(
    number: float, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        console.print_json({"weights": [[0.5, number]]})
    assert capsys.readouterr().out == ""


def test_a_line_of_progress_is_printed_after_ten_seconds_of_a_task(
    capsys: pytest.CaptureFixture[str], clock: Clock
) -> None:
    display = event_printer.Display()
    start = clock.now
    for total, seconds in ((None, (0, 9, 11, 20)), (4000, (25, 34, 36))):
        for second in seconds:
            clock.now = start + second
            display(Progress("encode" if total else "read", 1000, total, "chars"))
    told = capsys.readouterr().err
    assert told == "read: 1,000 chars\nencode: 1,000 of 4,000 chars (25%)\n"


def test_a_run_out_of_patience_says_why_it_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    run: Any = None
    event_printer.Display(quiet=True)(Finished(run, 4, out_of_patience=True))
    told = capsys.readouterr().err
    assert told == "stopped at step 4: no improvement in --patience evaluations\n"


@pytest.mark.parametrize(
    ("library", "shown"),
    [
        ("`embed_dim` 32 is not divisible", "--embed-dim 32 is not divisible"),
        ("use `positions` none", "use --positions none"),
        ("leave out `recipe` and `start_from`", "leave out --recipe and --from"),
        ("`num_samples`, `top_k`, `windows`", "--num-samples, --top-k, --windows"),
        ("the --steps of before, `budget`", "the --steps of before, --budget"),
        ("a file of `key = value` lines", "a file of `key = value` lines"),
        ("no text in `tales`, `x`", "no text in `tales`, `x`"),
    ],
)
def test_settings_are_named_as_they_are_typed(
    library: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root_command()  # knows the options
    assert console.with_flags(library) == shown
    console.fail(library, library)
    event_printer.Display()(Note(library))
    assert capsys.readouterr().err == f"error: {shown}\nhint: {shown}\n{shown}\n"


def test_a_model_is_described_by_its_sizes_and_changed_parts() -> None:
    def told(**settings: Setting) -> str:
        return event_printer.parts_in_words(resolve(settings).spec)

    assert told() == "heads 4, embed_dim 64, block_size 64"
    assert told(model="bigram") == "block_size 64"
    changed = told(model="transformer", positions="none", residual=False, kv_heads=2)
    assert changed == (
        "layers 2, heads 4, kv_heads 2, embed_dim 128, block_size 128, positions none, residual no"
    )


def test_a_time_has_few_digits_and_no_exponent() -> None:
    times = (0.0, 1e-9, 0.00123, 0.9999, 4.4512, 300.0, 7384.0, 259_199.0, 3.6e9)
    shown = "0 ms; 0 ms; 1.23 ms; 1,000 ms; 4.45 s; 5 min; 2.05 h; 72 h; 41,700 days"
    assert "; ".join(map(duration, times)) == shown
    assert [duration(time, 2) for time in (0.123, 118.0, 852.0)] == ["120 ms", "120 s", "14 min"]


def test_a_quantity_has_a_prefix() -> None:
    assert "; ".join(map(quantity, (0.25, 999.6, 690_460))) == "0.25; 1 k; 690 k"
    assert quantity(1.2345e9, "FLOP/s") == "1.23 GFLOP/s"
    floats = [quantity(count, "FLOP") for count in (0, 1.6e20, 1e36)]
    assert floats == ["0 FLOP", "160 EFLOP", "1e+06 QFLOP"]


def test_a_text_neither_commands_a_terminal_nor_reorders_what_it_shows() -> None:
    marks = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    hidden = marks + "\u2028\u2029\ufeff"
    assert escape_control_characters("\x1b[2J\x7f\x9b") == r"\x1b[2J\x7f\x9b"
    assert escape_control_characters(hidden) == "".join(f"\\u{ord(c):04x}" for c in hidden)
    kept = "a\tb\n שלום مرحبا 中文 👩\u200d💻"
    assert escape_control_characters(f"{kept}\r\n") == f"{kept}\n"
