"""Tokenizers give every text back, and encode it alike in one piece and in many.

Those that others publish give the ids that `tokenizers` and `tiktoken` give.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlm import AttnlmError, Note, UsageError
from attnlm.base import files
from attnlm.base.files import write_json
from attnlm.text.text_files import BLOCK, END
from attnlm.tokens import tokenizer
from attnlm.tokens.specs import CL100K_PATTERN
from attnlm.tokens.tokenizer import (
    BYTES,
    END_OF_TEXT,
    BpeTokenizer,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    load_published,
    load_tokenizer,
    safe_blocks,
    train_vocabulary,
)
from attnlm.tokens.tokenizer_json import library_tokenizer, listed_pairs, read_tokenizer
from tests.texts import (
    BEGIN,
    BOS,
    PATTERNS,
    PUBLISHED,
    TALE,
    TOKENIZERS,
    TRAINED,
    TRICKY,
    added,
    published_like,
    split,
    texts_with_special,
)

WITH_END = published_like("gpt2")
MIXED = "The cat!\nThe naïve cat: 日本, ß\x7f\x80ÿ a\n"


@settings(max_examples=60)
@given(st.text() | TRICKY)
@pytest.mark.parametrize("made", [ByteTokenizer(), TRAINED, *map(published_like, PATTERNS)])
def test_decode_gives_any_text_back(made: Tokenizer, text: str) -> None:
    ids = made.encode(text)
    assert all(type(i) is int and 0 <= i < made.vocab_size for i in ids)
    assert made.decode(ids) == text
    assert made.decode_bytes(ids) == text.encode()


@given(st.text(min_size=1))
def test_char_ids_are_places_in_the_sorted_vocabulary(text: str) -> None:
    characters = "".join(sorted(set(text)))
    made = CharTokenizer(characters)
    assert made.vocab_size == len(characters)
    assert made.encode(text) == [characters.index(character) for character in text]
    assert made.decode(made.encode(text)) == text


@pytest.mark.parametrize(
    "characters",
    [
        "".join(sorted(set(MIXED))),
        "".join(map(chr, range(0x500, 0x700))) + "".join(sorted(set(MIXED))),
    ],
    ids=["ascii first", "ascii past 255"],
)
def test_ascii_and_other_pieces_have_the_same_char_ids(characters: str) -> None:
    made = CharTokenizer(characters)
    expected = [characters.index(character) for character in MIXED]
    for cut in range(len(MIXED) + 1):
        ids = [made.encode(part) for part in (MIXED[:cut], MIXED[cut:])]
        assert np.concatenate(ids).tolist() == expected


def test_what_has_no_id_is_named() -> None:
    for outside in (-1, 2):
        with pytest.raises(UsageError, match=f"no id {outside}"):
            CharTokenizer("ab").decode([0, outside])
    for text, lacks in (("abc\nc", r"'c', '\\n'"), ("a123456789b", "'1', .*, '5' and 4 more")):
        with pytest.raises(AttnlmError, match=rf"^the vocabulary lacks {lacks}\nhint"):
            CharTokenizer("ab").encode(text)
    for made in (ByteTokenizer(), CharTokenizer("ab"), TRAINED):
        assert made.encode("") == [] and made.decode([]) == ""
        with pytest.raises(AttnlmError, match=r"U\+D800"):
            made.encode("ab\ud800")


def test_byte_ids_are_utf8_and_bytes_that_complete_no_character_are_replaced() -> None:
    assert ByteTokenizer().encode("aé字") == list("aé字".encode())
    assert ByteTokenizer().decode([0x61, 0xC3]) == "a\ufffd"
    assert ByteTokenizer().decode_bytes([0xC3]) == b"\xc3"


def test_special_ids_of_each_tokenizer() -> None:
    assert (ByteTokenizer().newline, ByteTokenizer().end_of_text) == (10, None)
    assert (CharTokenizer("\nab").newline, CharTokenizer("ab").newline) == (0, None)
    made = published_like("gpt2")
    end = made.end_of_text
    assert end == len(TRAINED.ranks) + 1
    assert made.newline == 10
    text = "<|endoftext|>a<|endoftext|>"
    assert made.encode(text) == [end, 97, end]
    assert made.decode(made.encode(text)) == text
    # The others are ordinary text, as is this one where the vocabulary has no id for it.
    assert max(made.encode("<|fim_prefix|>")) < len(TRAINED.ranks)
    assert max(TRAINED.encode(text)) < TRAINED.vocab_size
    assert TRAINED.decode(TRAINED.encode(text)) == text
    # Ids that stand for nothing, as there are in cl100k_base.
    assert made.decode([len(TRAINED.ranks), 97, made.vocab_size - 1]) == "a"


@given(
    st.lists(TRICKY.filter(bool) | st.just(END_OF_TEXT), max_size=8),
    st.integers(1, 40),
    st.randoms(use_true_random=False),
)
def test_blocks_are_the_documents_however_they_come(
    documents: list[str], limit: int, chance: random.Random
) -> None:
    whole = "".join(text + END for text in documents)
    cuts = sorted({0, len(whole), *chance.choices(range(len(whole) + 1), k=5)})
    blocks = list(safe_blocks((whole[a:b] for a, b in itertools.pairwise(cuts)), limit))
    assert blocks == list(safe_blocks([whole], limit))
    assert "".join(blocks) == whole
    assert all(0 < len(block) <= limit for block in blocks)
    ids = [token for block in blocks for token in WITH_END.encode_documents(block)]
    splits = np.split(ids, np.flatnonzero(np.array(ids) == WITH_END.end_of_text) + 1)
    decoded = [WITH_END.decode(map(int, part)).removesuffix(END_OF_TEXT) for part in splits]
    assert decoded == [*documents, ""]


def safe_places(text: str) -> list[int]:
    """Return the positions where `safe_blocks` may cut."""
    cuts = ((i, tokenizer._CUT.match(text[: i + 1])) for i in range(len(text)))
    return [i for i, cut in cuts if cut and cut.end() == i]


@settings(max_examples=80)
@given(st.lists(TRICKY | st.just(END_OF_TEXT), max_size=3).map("".join))
@pytest.mark.parametrize("name", PATTERNS)
def test_no_token_reaches_over_a_safe_place(name: str, text: str) -> None:
    made = published_like(name)
    whole = made.encode(text)
    for place in safe_places(text):
        assert made.encode(text[:place]) + made.encode(text[place:]) == whole


@pytest.mark.parametrize("run", ["a", " ", "^", "\n", "\u3000"])
@pytest.mark.parametrize("name", PATTERNS)
def test_long_runs_do_not_crash(name: str, run: str) -> None:
    made = published_like(name)
    text = (run * (BLOCK + 9))[: BLOCK + 9]
    assert made.decode_bytes(made.encode(text)) == text.encode()


def test_a_text_is_cut_at_safe_places_or_at_the_limit() -> None:
    assert safe_places("a b") == [1]
    assert safe_places("a\nb \n c\n\nd\r\ne\n/f\ng") == [2, 3, 17]
    assert list(map(len, safe_blocks(["a" * BLOCK + "bc def"]))) == [BLOCK, 6]
    assert list(map(len, safe_blocks(["x y", "z" * (BLOCK - 2)]))) == [1, BLOCK]
    assert list(safe_blocks([f"ab{END}cdef"], limit=4)) == [f"ab{END}", "cdef"]


@settings(max_examples=30)
@given(st.text("ab- '\n", min_size=1, max_size=200), st.text("ab- '\né", max_size=60))
def test_trained_merges_equal_tokenizers(text: str, other: str) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    theirs = Tokenizer(models.BPE())
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options: dict[str, Any] = {"initial_alphabet": alphabet, "show_progress": False}
    theirs.train_from_iterator([text], trainers.BpeTrainer(vocab_size=290, **options))
    assert sorted(tokenizer.BYTE_OF) == sorted(alphabet)
    ours = train_vocabulary("bpe:290", 290, [text])
    assert ours.vocab_size == theirs.get_vocab_size()
    for words in (text, other):
        assert theirs.encode(words).tokens == [
            tokenizer.visible(ours.decode_bytes([i])) for i in ours.encode(words)
        ]


def test_training_gives_the_same_ids_each_time_and_fewer_for_a_small_text() -> None:
    first, again = (train_vocabulary("bpe:280", 280, [TALE]).ranks for _ in range(2))
    assert first == again
    assert first[:256] == [bytes([byte]) for byte in range(256)]
    assert len(first) == 280
    assert len(TRAINED.encode(TALE)) < len(TALE) / 2
    events: list[object] = []
    made = train_vocabulary("bpe:5000", 5000, ["to be or not to be"], events.append)
    assert 256 < made.vocab_size < 300
    assert made.name == "bpe:5000"
    assert events == [Note(f"the text is too short for 5,000 ids; {made.vocab_size} were made")]
    genes = "".join(random.Random(1).choices("ACGT", k=200_000))  # without spaces, it is quick too
    assert train_vocabulary("bpe:270", 270, [genes]).vocab_size == 270


def test_patterns_equal_tiktoken(monkeypatch: pytest.MonkeyPatch) -> None:
    openai_public = importlib.import_module("tiktoken_ext.openai_public")  # has no types
    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: {})
    monkeypatch.setattr(openai_public, "data_gym_to_mergeable_bpe_ranks", lambda *_, **__: {})
    for name, pattern in PATTERNS.items():
        theirs = getattr(openai_public, name)()
        assert pattern == theirs["pat_str"]
        special = theirs["special_tokens"]
        assert tokenizer._PUBLISHED[name][2:] == (
            special["<|endoftext|>"],
            max(special.values()) + 1,
        )


# --- Published vocabularies -----------------------------------------------------------------------


def test_a_published_vocabulary_is_read_from_a_tiktoken_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNLM_CACHE_DIR", str(tmp_path / "cache"))
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(TRAINED.ranks)]
    url = tokenizer._PUBLISHED["cl100k_base"][0]
    entry = (url, hashlib.sha256(b"".join(lines)).hexdigest(), 500, 510)
    monkeypatch.setitem(tokenizer._PUBLISHED, "cl100k_base", entry)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    kept = tmp_path / hashlib.sha1(url.encode()).hexdigest()
    kept.write_bytes(b"".join(lines))
    made = load_published("cl100k_base", spool=tmp_path, offline=True)
    assert made.ranks == TRAINED.ranks
    assert (made.vocab_size, made.end_of_text) == (510, 500)
    kept.write_bytes(b"something else")
    with pytest.raises(AttnlmError, match=r"cl100k_base\.tiktoken is not in the .*\nhint: .*bpe:1"):
        load_published("cl100k_base", spool=tmp_path, offline=True)


def test_gpt2_ids_equal_tiktoken(gpt2: BpeTokenizer) -> None:
    import tiktoken

    theirs = tiktoken.get_encoding("gpt2")
    text = TALE + "naïve 日本語 <|endoftext|> 🙂 \n\n\t x"
    assert gpt2.encode(text) == theirs.encode(text, allowed_special="all")
    assert gpt2.vocab_size == theirs.n_vocab == 50257
    assert (gpt2.newline, gpt2.end_of_text) == (198, 50256)


@pytest.mark.parametrize(
    "made", [ByteTokenizer(), CharTokenizer("\n'aé字"), TRAINED, published_like("o200k_base")]
)
def test_a_saved_tokenizer_is_the_same_when_loaded(made: Tokenizer, tmp_path: Path) -> None:
    write_json(tmp_path / "tokenizer.json", made.to_json())
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert type(loaded) is type(made)
    assert loaded.to_json() == made.to_json()
    for attribute in ("name", "vocab_size", "newline", "end_of_text"):
        assert getattr(loaded, attribute) == getattr(made, attribute)
    text = "'a\né字a<|endoftext|>" if made.name != "char" else "'a\né字a"
    assert np.array_equal(loaded.encode(text), made.encode(text))


def damages() -> Iterator[object]:
    whole, char = TRAINED.to_json(), {"format": 1, "name": "char"}
    singles = [base64.b64encode(bytes([byte])).decode() for byte in range(256)]
    ranks = whole["ranks"]
    wrong: dict[str, tuple[object, ...]] = {
        "format": (2, None),
        "name": ("bpe:1", ["char"], "../../x"),
        "pattern": ("(", "(a+)+$", CL100K_PATTERN),
        "vocab_size": (True, 10**18, 300),
        "end_of_text": (5, -1, "x"),
        "ranks": (ranks.replace(" ", "  ", 1), f"{ranks} {singles[7]}", f"{ranks}!"),
    }
    for key, values in wrong.items():
        yield from ({**whole, key: value} for value in values)
    yield {**whole, "vocab_size": 256, "ranks": " ".join(singles[:255])}
    yield from ([], {**char, "name": "bpe:400"})
    yield from ({**char, "characters": characters} for characters in ("a\ud800", 5))


@pytest.mark.parametrize("content", list(damages()))
def test_a_file_that_makes_no_tokenizer_is_refused(content: object, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    if isinstance(content, dict):
        content = {**content, "sha256": files._json_hash(content)}
    path.write_text(json.dumps(content))
    with pytest.raises(AttnlmError, match=r"tokenizer\.json"):
        load_tokenizer(path)


def test_a_changed_or_missing_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(AttnlmError, match=r"tokenizer\.json"):
        load_tokenizer(path)
    write_json(path, CharTokenizer("abc").to_json())
    path.write_text(path.read_text().replace("abc", "abd"))
    with pytest.raises(AttnlmError, match="does not match its own hash"):
        load_tokenizer(path)


# --- Tokenizers as Llama 3, Qwen3 and SmolLM publish them -----------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_ids_equal_the_published_file(name: str, tmp_path: Path) -> None:
    from tokenizers import Tokenizer as LibraryTokenizer

    content, marks = PUBLISHED[name]
    theirs = LibraryTokenizer.from_str(json.dumps(content))
    read = read_tokenizer(content, 612)
    write_json(tmp_path / "tokenizer.json", read.to_json())
    ours = load_tokenizer(tmp_path / "tokenizer.json")
    assert isinstance(ours, BpeTokenizer) and ours.to_json() == read.to_json()
    assert (ours.name, ours.end_of_text, ours.beginning) == (name, *marks)
    exported = library_tokenizer(ours)
    for text in texts_with_special(list(ours.special)):
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == ids
        begins = ids[:1] == [ours.beginning]  # where it does, no second one is put before it
        assert ours.encode_from_start(text) == (ids if begins else theirs.encode(text).ids)
        assert exported.encode(text).ids == theirs.encode(text).ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)
        assert ours.nfc or ours.decode_bytes(ids) == text.encode()
    assert read_tokenizer(json.loads(exported.to_str()), 612).to_json() == ours.to_json()


def test_special_texts_within_a_document_are_text_in_normal_form() -> None:
    ours = read_tokenizer(PUBLISHED["qwen2"][0], 612)
    plain = ours.encode_documents(f"Ae\u0301.{END}one")
    assert plain.tolist() == [*ours.encode("A\u00e9."), 600, *ours.encode("one")]
    marked = ours.encode_documents("a<think>b")
    assert 602 not in marked and ours.decode(marked) == "a<think>b"
    assert 602 in ours.encode("a<think>b")
    text = "\U0001d160" * 2**17  # three characters of four bytes each, in form NFC
    assert len(ours.decode(ours.encode_piece(text))) == 3 * len(text)


def template(*pieces: dict[str, Any]) -> dict[str, Any]:
    special = {BOS: {"id": BOS, "ids": [3], "tokens": [BOS]}}
    kind = {"type": "TemplateProcessing", "special_tokens": special}
    return {
        **kind,
        "single": list(pieces),
        "pair": [*pieces, {"Sequence": {"id": "B", "type_id": 1}}],
    }


A = {"Sequence": {"id": "A", "type_id": 0}}
BERT = {"type": "BertProcessing", "sep": ["a", 3], "cls": ["a", 3]}


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"post_processor": template(A, BEGIN)}, "post_processor"),
        ({"post_processor": template(BEGIN, BEGIN, A)}, "post_processor"),
        ({"post_processor": "TemplateProcessing"}, "is damaged"),
        ({"post_processor": BERT}, "post_processor"),
        ({"pre_tokenizer": split("(a+)+$")}, "split pattern"),  # it may take for ever
        ({"normalizer": {"type": "NFKC"}}, "differently"),
        ({"decoder": None}, "differently"),
        ({"added_tokens": [added(600, "<a b>")]}, "ambiguous"),
        (
            {"added_tokens": [{**added(600, "<a>"), "lstrip": True}]},
            "differently",
        ),
        ({"added_tokens": [added(600, "<a"), added(601, "<a>")]}, "ambiguous"),
        ({"added_tokens": [{"id": 600, "content": "<a>"}], "post_processor": None}, "is damaged"),
        ({"model": {"type": "Unigram"}}, "is damaged"),
        ({"model": {"vocab": {"a": 0, "b": 0}}}, "is damaged"),
        ({"model": {"vocab": {"a": 5000}}}, "is damaged"),
        ({"model": {"merges": [["a", "b"], ["a", "b"]]}}, "is damaged"),
        ({"model": {"merges": ["t h e"]}}, "is damaged"),
    ],
    ids=str,
)
def test_unsupported_tokenizers_are_refused(parts: dict[str, Any], says: str) -> None:
    content = PUBLISHED["llama3"][0]
    model = {"model": content["model"] | parts.get("model", {})}
    with pytest.raises(AttnlmError, match=f"cannot reproduce the model's tokenizer: .*({says})"):
        read_tokenizer(content | parts | model, 612)


def test_every_pair_that_makes_a_token_is_listed() -> None:
    tokens = [b"a" * length for length in range(2, 301)]
    assert len(listed_pairs(BpeTokenizer("gpt2", [*BYTES, *tokens]))) == 299 * 300 // 2


@pytest.mark.parametrize("ours", TOKENIZERS, ids=lambda t: t.name)
def test_exported_tokenizers_are_read_and_post_processors_only_without_effect(
    ours: Tokenizer,
) -> None:
    content = json.loads(library_tokenizer(ours).to_str())
    size = ours.vocab_size
    for more in ({}, {"post_processor": template(A)}):  # `transformers` adds it
        read = read_tokenizer(content | more, size)
        assert read.to_json() | {"name": ours.name} == ours.to_json()
    for other in (template(A, BEGIN), template(BEGIN, A), BERT):
        with pytest.raises(AttnlmError, match=r"post_processor|no special text"):
            read_tokenizer(content | {"post_processor": other}, size)
    if ours.name in ("char", "byte"):  # each id of such a model has a character
        with pytest.raises(AttnlmError, match=f"the model has 999 ids, but its tokenizer {size}"):
            read_tokenizer(content, 999)
