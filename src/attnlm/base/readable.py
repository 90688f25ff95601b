"""Times and sizes as a person reads them: without exponents, with few digits."""

from __future__ import annotations

_UNITS = (("ms", 1e-3, 1.0), ("s", 1.0, 120.0), ("min", 60.0, 7200.0))


def duration(seconds: float, digits: int = 3) -> str:
    """`4.45 s`, `120 ms`, `14.2 min`, `2.5 h`: to so many significant digits."""
    unit, length = next(
        ((unit, length) for unit, length, end in _UNITS if seconds < end), ("h", 3600.0)
    )
    amount = round(float(f"{seconds / length:.{digits}g}"), 3)
    return f"{amount:,.10g} {unit}"


def byte_size(count: int) -> str:
    """`1 MB`, `512 MB`, `1.5 GB`."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{max(1, round(count / 1e6))} MB"
