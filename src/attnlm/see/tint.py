"""The one colour scale of the terminal."""

from __future__ import annotations

_NOTHING, _ALL = (0x1F, 0x24, 0x2B), (0x2F, 0x80, 0xD8)  # the backgrounds of 0 and of 1


def tint(share: float) -> str:
    """A style for a number from 0 to 1: white on a blue that is the brighter, the larger it is."""
    mixed = (round(low + (high - low) * share) for low, high in zip(_NOTHING, _ALL, strict=True))
    return "#ffffff on #" + "".join(f"{part:02x}" for part in mixed)
