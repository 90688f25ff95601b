"""Times, sizes and texts as a person reads them."""

from __future__ import annotations

from attnlm.base.formatting import byte_size, duration, escape_control_characters, quantity


def test_a_time_has_few_digits_and_no_exponent() -> None:
    times = (0.0, 1e-9, 0.00123, 0.9999, 4.4512, 300.0, 7384.0, 259_199.0, 3.6e9)
    shown = "0 ms; 0 ms; 1.23 ms; 1,000 ms; 4.45 s; 5 min; 2.05 h; 72 h; 41,700 days"
    assert "; ".join(map(duration, times)) == shown
    assert [duration(time, 2) for time in (0.123, 118.0, 852.0)] == ["120 ms", "120 s", "14 min"]


def test_a_size_is_in_megabytes_or_gigabytes_and_a_quantity_has_a_prefix() -> None:
    assert "; ".join(map(byte_size, (1, 512_000_000, 1_540_000_000, 2 * 10**12))) == (
        "1 MB; 512 MB; 1.5 GB; 2,000.0 GB"
    )
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
