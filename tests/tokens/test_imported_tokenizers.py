"""Tokenizers as Llama 3, Qwen3 and SmolLM publish them: the ids that `tokenizers` gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attnlm import AttnlmError
from attnlm.base.files import write_json
from attnlm.data.bin_files import encode_documents
from attnlm.text.text_files import Piece
from attnlm.tokens.tokenizer import BYTES, BpeTokenizer, CharTokenizer, Tokenizer, load_tokenizer
from attnlm.tokens.tokenizer_json import library_tokenizer, listed_pairs, read_tokenizer
from tests.texts import BEGIN, BOS, PUBLISHED, TOKENIZERS, added, split, texts_with_special


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


def test_special_texts_within_a_document_are_text() -> None:
    ours = read_tokenizer(PUBLISHED["qwen2"][0], 612)
    assert isinstance(ours, BpeTokenizer) and ours.end_of_text == 600
    plain = encode_documents(ours, Piece("Ae\u0301.one", (4,)))
    assert plain.tolist() == [*ours.encode("A\u00e9."), 600, *ours.encode("one")]
    marked = encode_documents(ours, Piece("a<think>b", ()))
    assert 602 not in marked and ours.decode(marked) == "a<think>b"
    assert 602 in ours.encode("a<think>b")


def test_a_text_that_grows_when_it_is_normalised_is_encoded() -> None:
    ours = read_tokenizer(PUBLISHED["qwen2"][0], 612)
    text = "\U0001d160" * 2**17  # three characters of four bytes each, in form NFC
    assert len(ours.decode(ours.encode_piece(text))) == 3 * len(text)


def template(*pieces: dict[str, Any]) -> dict[str, Any]:
    return {"type": "TemplateProcessing", "single": list(pieces), "special_tokens": {}}


A = {"Sequence": {"id": "A", "type_id": 0}}
TWO_TEXTS = [added(600, "<a"), added(601, "<a>")]
WITHOUT_FLAGS = [{"id": 600, "content": "<a>"}]


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"post_processor": template(A, BEGIN)}, "post_processor"),
        ({"post_processor": template(BEGIN, BEGIN, A)}, "post_processor"),
        ({"post_processor": template(BEGIN, A)}, "is damaged"),  # an unknown beginning
        ({"post_processor": "TemplateProcessing"}, "post_processor"),
        ({"post_processor": {"type": "BertProcessing"}}, "post_processor"),
        ({"pre_tokenizer": split("(a+)+$")}, "the split pattern"),  # it may take for ever
        ({"added_tokens": [added(600, "<a b>")]}, "the added token"),
        ({"added_tokens": TWO_TEXTS}, "cannot reproduce added tokens"),  # one is in the other
        ({"added_tokens": [added(600, "<a>")] * 2}, "is damaged"),
        ({"added_tokens": [added(3, "<a>")]}, "is damaged"),  # an id for two
        ({"added_tokens": [added(-1, "<a>")]}, "is damaged"),
        ({"added_tokens": WITHOUT_FLAGS, "post_processor": None}, "is damaged"),
        # `tokenizers` would change this id.
        ({"added_tokens": [added(601, "<a>")], "post_processor": None}, "ids of its added tokens"),
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
    with pytest.raises(AttnlmError, match=says):
        read_tokenizer(content | parts | model, 612)


def test_every_pair_that_makes_a_token_is_listed() -> None:
    tokens = [b"a" * length for length in range(2, 301)]
    assert len(listed_pairs(BpeTokenizer("gpt2", [*BYTES, *tokens]))) == 299 * 300 // 2


def test_each_id_of_a_model_has_a_character() -> None:
    content = json.loads(library_tokenizer(CharTokenizer("abc")).to_str())
    assert read_tokenizer(content, 3).to_json() == CharTokenizer("abc").to_json()
    with pytest.raises(AttnlmError, match="the model has 64 ids, but its tokenizer has 3\n"):
        read_tokenizer(content, 64)


@pytest.mark.parametrize("ours", (*TOKENIZERS[:2], *TOKENIZERS[-2:]), ids=lambda t: t.name)
def test_only_post_processors_without_effect_are_accepted(ours: Tokenizer) -> None:
    content = json.loads(library_tokenizer(ours).to_str())
    size = ours.vocab_size
    identity = {"post_processor": template(A)}  # `transformers` adds it
    assert read_tokenizer(content | identity, size).to_json() == ours.to_json()
    begins = {**template(BEGIN, A), "special_tokens": {BOS: {"id": BOS, "ids": [3]}}}
    for other in (template(A, BEGIN), begins, {"type": "BertProcessing"}):
        with pytest.raises(AttnlmError, match=r"post_processor|is damaged"):
            read_tokenizer(content | {"post_processor": other}, size)
