"""Times and sizes as a person reads them."""

from __future__ import annotations

import pytest

from attnlm.base.formatting import byte_size, duration, escape_control_characters, quantity


@pytest.mark.parametrize(
    ("seconds", "digits", "shown"),
    [
        *((0.0, 3, "0 ms"), (1e-9, 3, "0 ms"), (0.00123, 3, "1.23 ms"), (0.123, 2, "120 ms")),
        *((0.9999, 3, "1,000 ms"), (4.4512, 3, "4.45 s"), (118.0, 2, "120 s"), (300.0, 3, "5 min")),
        *((852.0, 2, "14 min"), (7384.0, 3, "2.05 h"), (259_199.0, 3, "72 h")),
        (3.6e9, 3, "41,700 days"),
    ],
)
def test_a_time_has_few_digits_and_no_exponent(seconds: float, digits: int, shown: str) -> None:
    assert duration(seconds, digits) == shown


@pytest.mark.parametrize(
    ("count", "text"), [(1, "1 MB"), (512e6, "512 MB"), (1.54e9, "1.5 GB"), (2e12, "2,000.0 GB")]
)
def test_a_size_is_in_megabytes_or_gigabytes(count: int, text: str) -> None:
    assert byte_size(count) == text


@pytest.mark.parametrize(
    ("count", "unit", "text"),
    [
        *((0, "FLOP", "0 FLOP"), (0.25, "", "0.25"), (999.6, "", "1 k"), (690_460, "", "690 k")),
        *((1.2345e9, "FLOP/s", "1.23 GFLOP/s"), (1.6e20, "FLOP", "160 EFLOP")),
        (1e36, "FLOP", "1e+06 QFLOP"),
    ],
)
def test_a_quantity_has_a_prefix(count: float, unit: str, text: str) -> None:
    assert quantity(count, unit) == text


def test_a_text_neither_commands_a_terminal_nor_reorders_what_it_shows() -> None:
    marks = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    hidden = marks + "\u2028\u2029\ufeff"
    assert escape_control_characters("\x1b[2J\x7f\x9b") == r"\x1b[2J\x7f\x9b"
    assert escape_control_characters(hidden) == "".join(f"\\u{ord(c):04x}" for c in hidden)
    kept = "a\tb\n שלום مرحبا 中文 👩\u200d💻"
    assert escape_control_characters(f"{kept}\r\n") == f"{kept}\n"
