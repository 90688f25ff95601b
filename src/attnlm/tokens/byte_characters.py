"""The notation of GPT-2 and `tokenizers` for bytes: each byte is one visible character."""

from __future__ import annotations

_VISIBLE = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
_OTHERS = [byte for byte in range(256) if byte not in _VISIBLE]
BYTE_OF = {chr(byte): byte for byte in _VISIBLE} | {chr(256 + i): b for i, b in enumerate(_OTHERS)}
"""The byte of each character, in the order of GPT-2's ids."""
_CHARACTER_OF = {byte: character for character, byte in BYTE_OF.items()}


def to_text(token: bytes) -> str:
    """Return the bytes of a token as visible characters."""
    return "".join(_CHARACTER_OF[byte] for byte in token)


def to_bytes(token: str) -> bytes:
    """Return the bytes that `token` denotes. Raises KeyError for a character that denotes none."""
    return bytes(BYTE_OF[character] for character in token)
