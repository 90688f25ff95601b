"""The table of words gives the ids of the tokenizer itself, whatever it met before."""

from __future__ import annotations

import ctypes
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

import attnlm
from attnlm.compute.native import baseline_library
from attnlm.data import bin_files
from attnlm.tokens import word_table as words
from attnlm.tokens.tokenizer import PIECE, BpeTokenizer, ByteTokenizer
from attnlm.tokens.word_table import WordTable, piece_encoder
from tests.texts import PATTERNS, TALE, TRAINED, TRICKY, published_like

PARTS = [*" \n/X.字é\u0301\x1c\x85\u00a0\u3000<", "\n\n", "  ", "\r\n", "\t", "'s", "the", "12"]
MADE = [TRAINED, *map(published_like, PATTERNS)]


@pytest.fixture(scope="module")
def native() -> ctypes.CDLL:
    found = baseline_library()
    if found is None:
        pytest.skip("there are no kernels here")
    return found


def random_text(seed: int, parts: int) -> str:
    chosen = random.Random(seed)
    return "".join(chosen.choice(PARTS) + chosen.choice(PARTS[:9]) for _ in range(parts))


@pytest.mark.parametrize("made", MADE, ids=lambda made: made.name)
def test_ids_equal_the_tokenizer(made: BpeTokenizer, native: ctypes.CDLL) -> None:
    table = WordTable(made, native)

    @settings(max_examples=60)
    @given(TRICKY, TRICKY)
    def held(first: str, second: str) -> None:
        for text in (first, f"{second} {first}\n{second}", f"a {second}<|endoftext|> b", first):
            assert np.array_equal(table.encode_piece(text), made.encode_piece(text))

    held()
    for seed in range(12):
        text = random_text(seed, 5000)
        assert np.array_equal(table.encode_piece(text), made.encode_piece(text))


def test_a_full_table_forgets(native: ctypes.CDLL) -> None:
    for most_words, most_bytes in ((40, 4096), (4096, 200), (1, 1)):
        table = WordTable(TRAINED, native, most_words=most_words, most_bytes=most_bytes)
        for seed in range(40):
            text = random_text(seed, 30) + " the cat sat"
            assert np.array_equal(table.encode_piece(text), TRAINED.encode_piece(text))


def test_known_words_are_not_encoded_again(
    native: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = WordTable(TRAINED, native)
    ids = TRAINED.encode_piece(TALE)
    assert np.array_equal(table.encode_piece(TALE), ids)
    encode_piece, encoded = TRAINED.encode_piece, []

    def encode_and_tell(text: str) -> object:
        encoded.append(text)
        return encode_piece(text)

    monkeypatch.setattr(TRAINED, "encode_piece", encode_and_tell)
    assert np.array_equal(table.encode_piece(TALE), ids)
    assert encoded == ["", "It's", "\n"]  # no new words, the beginning, the end


@pytest.mark.parametrize("start", ["aaaaa", "aaaaaaaaaaaaa"])
def test_crafted_words_spread_over_the_table(start: str, native: ctypes.CDLL) -> None:
    """Words that share all but the last bits would have one hash in a table without random keys."""
    table = WordTable(TRAINED, native)
    crafted = [start + a + b for a in "0@P`p" for b in map(chr, range(ord("!"), ord("~")))]
    table.encode_piece(f"a {' '.join(crafted)} b")
    hashes = table._hashes[: table._words[0]]
    assert len(np.unique(hashes & np.uint64(words._SLOTS - 1))) > 0.9 * len(crafted)


def test_the_longest_pieces_have_room(native: ctypes.CDLL) -> None:
    table = WordTable(TRAINED, native)
    for text in ("a " * (PIECE // 2), "\U0001f600" * PIECE, "a b! " * (PIECE // 5), "\n" * PIECE):
        assert np.array_equal(table.encode_piece(text), TRAINED.encode_piece(text))


def test_a_token_that_reaches_over_words_is_noticed(
    native: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a pattern matched across the assumed boundary, the reference ids would be used."""
    made = BpeTokenizer("cl100k_base", [*TRAINED.ranks, b"!\n"])
    monkeypatch.setattr(words, "takes_line_ends", lambda pattern: False)
    table = WordTable(made, native)
    text = "a x!\nb x! c"
    assert made.vocab_size - 1 in made.encode_piece(text)
    assert np.array_equal(table.encode_piece(text), made.encode_piece(text))


def test_prepare_writes_the_same_files_either_way(
    tmp_path: Path, native: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(random_text(1, 30_000) + TALE)
    made: dict[str, attnlm.Dataset] = {}
    of_bytes = ByteTokenizer()
    assert piece_encoder(of_bytes) == of_bytes.encode_piece
    for kind, found in (("plain", None), ("words", native)):
        monkeypatch.setattr(words, "baseline_library", lambda found=found: found)
        assert (piece_encoder(TRAINED) == TRAINED.encode_piece) == (found is None)
        monkeypatch.setattr(bin_files, "PIECE", PIECE if kind == "plain" else 1000)
        made[kind] = attnlm.prepare(text, tokenizer="bpe:400", data_dir=tmp_path / kind)
    assert isinstance(made["words"].tokenizer, BpeTokenizer)
    for name in ("train.bin", "val.bin", "meta.json"):
        assert (made["plain"].path / name).read_bytes() == (made["words"].path / name).read_bytes()
