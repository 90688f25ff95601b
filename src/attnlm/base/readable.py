"""Times, sizes and others' texts as a person can read them."""

from __future__ import annotations

_UNITS = (
    *(("ms", 1e-3, 1.0), ("s", 1.0, 120.0), ("min", 60.0, 7200.0)),
    *(("h", 3600.0, 72 * 3600.0), ("days", 86_400.0, float("inf"))),
)
_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y", "R", "Q")


def duration(seconds: float, digits: int = 3) -> str:
    """`4.45 s`, `120 ms`, `14.2 min`, `2.5 h`, `32 days`: to so many significant digits."""
    unit, length = next(((unit, length) for unit, length, end in _UNITS if seconds < end))
    amount = round(float(f"{seconds / length:.{digits}g}"), 3)
    return f"{amount:,.10g} {unit}"


def byte_size(count: int) -> str:
    """`1 MB`, `512 MB`, `1.5 GB`."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{max(1, round(count / 1e6))} MB"


def quantity(count: float, unit: str = "") -> str:
    """`1.24 GFLOP`, `650 k`, `0`: to three digits, with a prefix of the SI."""
    rounded = float(f"{count:.3g}")
    power = 0
    while rounded >= 1000 and power < len(_PREFIXES) - 1:
        rounded, power = rounded / 1000, power + 1
    return f"{rounded:.3g} {_PREFIXES[power]}{unit}".rstrip()


def age(seconds: float) -> str:
    """`just now`, `5 min ago`, `3 h ago`, `12 days ago`: in whole units, rounded down."""
    for unit, length in (("days", 86_400), ("h", 3600), ("min", 60)):
        # The same limits as of a duration: 100 minutes say more than an hour.
        if seconds >= 2 * length or (unit == "min" and seconds >= length):
            return f"{int(seconds // length):,} {unit} ago"
    return "just now"


def harmless(text: str) -> str:
    """Return the text with escapes in place of characters that a terminal obeys.

    Control characters move the cursor or command the terminal; direction marks reorder what is
    shown, and U+2028, U+2029 and U+FEFF hide in it. A text and its file's name may come from
    anybody, and a model may say what it read.
    """
    return text.translate(_ESCAPES)


_CONTROLS = (*range(32), *range(127, 160))
_DIRECTIONS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_ESCAPES = {
    code: chr(code).encode("unicode_escape").decode()
    for code in (*_CONTROLS, *_DIRECTIONS, 0x2028, 0x2029, 0xFEFF)
}
_ESCAPES |= {ord(c): c for c in "\t\n"} | {ord("\r"): ""}  # line ends of Windows stay line ends
