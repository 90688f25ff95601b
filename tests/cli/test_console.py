"""Progress on the command line during training."""

from __future__ import annotations

import re
import time

import pytest

from attnlm.base.events import Note, Progress
from attnlm.base.setting_fields import Setting
from attnlm.cli import console, event_printer
from attnlm.config.settings import resolve
from attnlm.runs.journal import Snapshot
from attnlm.training.events import Evaluated, Stepped
from tests.kit import terminal
from tests.models import evaluation_record


def evaluated(step: int, text: str, *, is_last: bool = False) -> Evaluated:
    snapshot = Snapshot(step, text, None)
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
        r"step      0  2.5000  ⏎ROMEO:⏎\x1b[2Jfox…",
        "step    999  2.5000  word word word wor…",
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
        re.findall(rf"{step}/2600 \[\d\d:\d\d<([\d:]+), ", shown.getvalue()) for step in (20, 21)
    )
    assert (first, second) == (["14:12"], ["2:03:04"])


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_values_that_json_lacks_are_never_printed(
    number: float, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        console.print_json({"weights": [[0.5, number]]})
    assert capsys.readouterr().out == ""


def test_long_preparation_prints_lines_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    display = event_printer.Display()
    for now, task, total in [  # noqa: B007
        *((0.0, "read", None), (9.9, "read", None), (10.1, "read", None), (19.0, "read", None)),
        *((25.0, "encode", 4000), (34.0, "encode", 4000), (36.0, "encode", 4000)),
    ]:
        display(Progress(task, 1000, total, "chars"))
    told = capsys.readouterr().err
    assert told == "read: 1,000 chars\nencode: 1,000 of 4,000 chars (25%)\n"


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
