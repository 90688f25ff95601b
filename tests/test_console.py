"""What the command line shows of training while it goes on."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from attnlm import console, exits
from attnlm.ticker import Moment
from attnlm.training import Evaluated, Stepped


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Makes stderr a terminal of 40 columns."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return stream


def evaluated(step: int, text: str) -> Evaluated:
    record: dict[str, Any] = {
        "step": step,
        "val_loss": 2.5,
        "train_loss": 2.4,
        "tokens_per_second": 9,
        "seconds": 1.0,
    }
    return Evaluated(record, improved=True, moment=Moment(step, text, None))


def lines(stream: io.StringIO) -> list[str]:
    """The dimmed lines."""
    return re.findall(r"\x1b\[2m([^\n]*)\x1b\[0m\n", stream.getvalue())


def test_what_a_model_says_is_one_dimmed_line_of_the_terminals_width(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = terminal(monkeypatch)
    display = console.TrainingDisplay()
    display._bar = console.bar(9, "step", "train")
    display(evaluated(0, "\nROMEO:\n\x1b[2Jfox \ufffd"))
    display(evaluated(9, "word " * 20))
    display.close()
    assert lines(shown) == [
        r"step      0  2.5000  ⏎ROMEO:⏎\x1b[2Jfox…",
        "step      9  2.5000  word word word wor…",
    ]


def test_lines_that_follow_each_other_too_fast_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = terminal(monkeypatch)
    display = console.TrainingDisplay()
    display._bar = console.bar(999, "step", "train")
    monkeypatch.setattr(console, "_SECONDS_BETWEEN_LINES", 1e6)
    for step in range(1000):
        display(evaluated(step, "said"))
    display.close()
    assert [line.split()[1] for line in lines(shown)] == ["0", "999"]


@pytest.mark.parametrize("quiet", [False, True])
def test_elsewhere_it_is_not_shown(quiet: bool, capsys: pytest.CaptureFixture[str]) -> None:
    console.TrainingDisplay(quiet)(evaluated(0, "the words"))
    shown = capsys.readouterr()
    assert shown.out == "" and "the words" not in shown.err
    assert ("validation 2.5000*" in shown.err) == (not quiet)


def test_the_bars_time_left_is_that_of_the_latest_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "100")
    display = console.TrainingDisplay()
    display._bar = console.bar(2600, "step", "train")
    display(evaluated(0, "said"))
    display(Stepped(20, loss=2.5, tokens_per_second=5000.0, seconds_left=852.0))
    display(Stepped(21, loss=2.5, tokens_per_second=5000.0, seconds_left=7384.0))
    display.close()
    first, second = (
        re.findall(rf"{step}/2600 \[\d\d:\d\d<([\d:]+), ", shown.getvalue()) for step in (20, 21)
    )
    assert (first, second) == (["14:12"], ["2:03:04"])


@pytest.mark.parametrize(
    ("seconds_left", "quiet", "says"),
    [
        (59.0, False, ""),
        (852.0, False, "step     20  about 14 min left\n"),
        (61.0, False, "step     20  about 61 s left\n"),
        (9000.0, False, "step     20  about 2.5 h left\n"),
        (852.0, True, ""),
    ],
)
def test_elsewhere_the_time_left_is_told_once(
    seconds_left: float,
    quiet: bool,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(console, "_SECONDS_OF_STEPS", 0.0)
    display = console.TrainingDisplay(quiet)
    for step in (19, 20, 21, 22):
        display(Stepped(step, 2.5, tokens_per_second=5000.0, seconds_left=seconds_left))
    assert capsys.readouterr().err == says


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_what_json_does_not_have_is_never_printed(
    number: float, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        console.result_json({"weights": [[0.5, number]]})
    assert capsys.readouterr().out == ""


def test_a_path_with_a_nul_character_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Which no shell can pass on, but a program that starts the command in its own process can."""
    assert exits._run(Path("a\0b").stat) == 1
    assert "NUL" in capsys.readouterr().err
