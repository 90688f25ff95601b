"""Format times, sizes, lists and untrusted texts for people to read."""

from __future__ import annotations

from collections.abc import Sequence

_UNITS = (
    *(("ms", 1e-3, 1.0), ("s", 1.0, 120.0), ("min", 60.0, 7200.0)),
    *(("h", 3600.0, 72 * 3600.0), ("days", 86_400.0, float("inf"))),
)
_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y", "R", "Q")


def duration(seconds: float, digits: int = 3) -> str:
    """Return `4.45 s`, `120 ms`, `14.2 min`, `2.5 h`, `32 days`, to `digits` significant digits."""
    unit, length = next(((unit, length) for unit, length, end in _UNITS if seconds < end))
    amount = round(float(f"{seconds / length:.{digits}g}"), 3)
    return f"{amount:,.10g} {unit}"


def quantity(count: float, unit: str = "") -> str:
    """Return `1.24 GFLOP`, `650 k` or `0`: three significant digits with an SI prefix."""
    rounded = float(f"{count:.3g}")
    power = 0
    while rounded >= 1000 and power < len(_PREFIXES) - 1:
        rounded = rounded / 1000
        power = power + 1
    return f"{rounded:.3g} {_PREFIXES[power]}{unit}".rstrip()


def escape_control_characters(text: str) -> str:
    """Return the text with escapes in place of characters that a terminal obeys.

    Control characters move the cursor or control the terminal; direction marks reorder the shown
    text, and U+2028, U+2029 and U+FEFF are invisible. Texts and file names may come from
    anybody, and a model may repeat its training text.
    """
    return text.translate(_ESCAPES)


_CONTROLS = (*range(32), *range(127, 160))
_DIRECTIONS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_ESCAPES = {
    code: chr(code).encode("unicode_escape").decode()
    for code in (*_CONTROLS, *_DIRECTIONS, 0x2028, 0x2029, 0xFEFF)
}
_ESCAPES |= {ord(c): c for c in "\t\n"} | {ord("\r"): ""}  # keep Windows line ends as line ends


def nats_and_bits(loss: float, bits: float | None, digits: int = 3) -> str:
    """Return a loss in words. `bits`, per byte, are None for ids that are no text."""
    in_bits = "" if bits is None else f", {bits:.{digits}f} bits per byte"
    return f"{loss:.4f} nats per token{in_bits}"


def listed(names: Sequence[str], most: int = 5) -> str:
    """Return `a, b, c and 4 more`: the first `most` names, and how many are left out."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
