"""Bytes as GPT-2 and `tokenizers` write them in a vocabulary: each as one visible character."""

from __future__ import annotations

import functools


def written(token: bytes) -> str:
    """The bytes of a token, as visible characters."""
    character_of = _character_of_byte()
    return "".join(character_of[byte] for byte in token)


def read(token: str) -> bytes:
    """The bytes of what `written` writes. Raises KeyError for a character that stands for none."""
    byte_of = byte_of_character()
    return bytes(byte_of[character] for character in token)


@functools.cache
def byte_of_character() -> dict[str, int]:
    """Each character and its byte, in the order of GPT-2's ids."""
    visible = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


@functools.cache
def _character_of_byte() -> dict[int, str]:
    return {byte: character for character, byte in byte_of_character().items()}
