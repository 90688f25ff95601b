"""GGUF files run by llama.cpp: the same ids, logits and greedy tokens there.

`pip install llama-cpp-python` compiles it; docs/import-export.md says what these tests found.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import attnlm
from attnlm.data.dataset import Dataset
from attnlm.runs.gguf_vocabulary import vocabulary
from attnlm.tokens import byte_characters
from attnlm.tokens.specs import CL100K_PATTERN
from attnlm.tokens.tokenizer import BpeTokenizer, ByteTokenizer, CharTokenizer, Tokenizer
from tests.models import FRUITS, TRANSFORMERS_CLASSES, random_run
from tests.texts import TOKENIZERS, texts
from tests.tolerances import assert_near

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

NAMES = [n for n in TRANSFORMERS_CLASSES if "relu2" not in n and "rotary_context" not in n]
TOKENS = 100


def opened(path: Path, **more: Any) -> Any:
    """Load the model in float32; by default, keys and values are float16."""
    return llama_cpp.Llama(
        str(path), verbose=False, flash_attn=False, type_k=0, type_v=0, n_threads=1, **more
    )


def greedy(model: Any, ids: list[int]) -> list[int]:
    """The next tokens, each the likeliest, from the logits: past what would end a text."""
    made: list[int] = []
    model.reset()
    model.eval(ids)
    for _ in range(TOKENS):
        made.append(int(model.scores[model.n_tokens - 1].argmax()))
        model.eval(made[-1:])
    return made


@pytest.mark.parametrize("spec", ["char", "byte", "bpe:300"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens(name: str, spec: str, tmp_path: Path) -> None:
    (tmp_path / "fruits.txt").write_text(FRUITS, encoding="utf-8")
    dataset = attnlm.prepare(tmp_path / "fruits.txt", tokenizer=spec, data_dir=tmp_path / "data")
    run = random_run(name, dataset, tmp_path / "runs")
    exported = attnlm.export(run, tmp_path / "out.gguf", to="gguf")
    theirs = opened(exported.path, n_ctx=210, logits_all=True)
    model, _ = attnlm.load_model(run, device="cpu")
    ids = torch.randint(run.vocab_size, (1, 200), generator=torch.Generator().manual_seed(1))
    theirs.eval(ids[0].tolist())
    with torch.no_grad():
        logits = model(ids)[0]
    assert logits.abs().max() > 1
    # llama.cpp looks GELU up in a table of float16.
    near = 1e-2 if exported.form == "gpt2" else 1e-4
    found = torch.tensor(theirs.scores[:200])
    assert_near(found, logits, within=near)

    prompt = run.tokenizer.encode("3 apples")
    ours = "".join(
        attnlm.sample(run, prompt="3 apples", tokens=TOKENS, temperature=0, device="cpu")
    )
    assert run.tokenizer.decode(prompt + greedy(theirs, prompt)) == ours


@pytest.mark.parametrize(("kind", "near"), [("f16", 0.005), ("q8_0", 0.1)])
@pytest.mark.parametrize("name", ["qwen3", "llama", "gpt2"])
def test_smaller_types_compute_nearly_the_same(
    name: str, kind: str, near: float, dataset: Dataset, tmp_path: Path
) -> None:
    run = random_run(f"{name}:embed_dim=64:head_size=16:mlp_width=40", dataset, tmp_path)
    path = attnlm.export(run, tmp_path / "out.gguf", to="gguf", type=kind).path
    theirs = opened(path, n_ctx=210, logits_all=True)
    ids = torch.randint(run.vocab_size, (1, 200), generator=torch.Generator().manual_seed(1))
    theirs.eval(ids[0].tolist())
    model, _ = attnlm.load_model(run, device="cpu")
    with torch.no_grad():
        logits = model(ids)[0]
    error = torch.tensor(theirs.scores[:200]) - logits
    assert error.std() < near * logits.std()


def vocabulary_only(tokenizer: Tokenizer, path: Path) -> Any:
    """llama.cpp with a tokenizer, and no model."""
    writer = gguf.GGUFWriter(path, "llama")
    kinds = {bool: "BOOL", int: "UINT32", str: "STRING", list: "ARRAY"}
    for key, value in vocabulary(tokenizer).items():
        kind = gguf.GGUFValueType[kinds[type(value)]]
        writer.add_key_value(f"tokenizer.ggml.{key}", value, kind)
    for key in ("context_length", "embedding_length", "block_count", "feed_forward_length"):
        writer.add_uint32(f"llama.{key}", 32)
    writer.add_uint32("llama.attention.head_count", 1)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return llama_cpp.Llama(str(path), vocab_only=True, verbose=False)


def piece(model: Any, token: int) -> bytes:
    """The bytes of an id. (The package's own `detokenize` has room for 32.)"""
    vocabulary = llama_cpp.llama_model_get_vocab(model.model)
    room = llama_cpp.ctypes.create_string_buffer(1024)
    length = llama_cpp.llama_token_to_piece(vocabulary, token, room, len(room), 0, True)
    assert 0 <= length < len(room)
    return bytes(room.raw[:length])


def texts_of_words(number: int) -> Iterator[str]:
    """Return texts with capitals, marks, digits and spaces of many scripts."""
    drawn = random.Random(5)
    signs = (
        "Éàß ŒæÑПриветМИРγΓ漢字かなカ한글हिन्दीกำ١٢½ aAzZ'sS'LL'\u017f\u212a"
        "\t\n\r\u00a0\u2028.!/1234567"
    )
    for _ in range(number):
        yield "".join(drawn.choices(signs, k=drawn.randrange(60)))


def merged_anywhere(number: int) -> list[bytes]:
    """Ranks whose merges reach across words, so that a text split elsewhere has other ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=number, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(texts_of_words(2000), trainer)
    id_of = trained.get_vocab()
    merged = map(byte_characters.to_bytes, sorted(id_of, key=id_of.__getitem__)[256:])
    return list(dict.fromkeys([bytes([byte]) for byte in range(256)] + [*merged]))


# llama.cpp's tables of Unicode are of 15.1: these are the letters and numbers that 16.0 added.
NEWER = re.compile(
    "[\u1c89\u1c8a\ua7cb-\ua7cd\ua7da-\ua7dc\U000105c0-\U000105f3\U00010d40-\U00010d85"
    "\U00010ec2-\U00010ec4\U00011380-\U000113d3\U000116d0-\U000116e3\U00011bc0-\U00011bf9"
    "\U00013460-\U000143fa\U00016100-\U00016139\U00016d40-\U00016d79\U00018cff"
    "\U0001ccf0-\U0001ccf9\U0001e5d0-\U0001e5fa]"
)
ASCII = CharTokenizer(" \n\r\x00aA\\'<|>x0\x7f\t")
ACROSS = merged_anywhere(3000)
EXPRESSED = (
    ASCII,
    *(t for t in TOKENIZERS if t.name not in ("byte", "char", "o200k_base")),
    ByteTokenizer(),
    BpeTokenizer("bpe:3000", ACROSS),
    BpeTokenizer("cl100k_base", ACROSS, vocab_size=4000, end_of_text=3500),
    BpeTokenizer(
        *("llama3", ACROSS),
        vocab_size=4000,
        special={"<|begin_of_text|>": 3500, "<|eot_id|>": 3502},
        beginning=3500,
        end_of_text=3501,
    ),
    BpeTokenizer(
        *("smollm", [b"", b"", *ACROSS]),
        special={"<|im_start|>": 1},
        end_of_text=0,
    ),
)


@pytest.mark.parametrize("tokenizer", EXPRESSED, ids=lambda t: f"{t.name}-{t.vocab_size}")
def test_ids_and_decoded_texts_are_identical(tokenizer: Tokenizer, tmp_path: Path) -> None:
    theirs = vocabulary_only(tokenizer, tmp_path / "v.gguf")
    assert [piece(theirs, token) for token in range(tokenizer.vocab_size)] == tokenizer.tokens
    more = [] if tokenizer is ASCII else list(texts_of_words(400))
    for text in [*texts(tokenizer), *more]:
        text = NEWER.sub("", text)
        if isinstance(tokenizer, BpeTokenizer) and tokenizer.pattern == CL100K_PATTERN:
            text = re.sub(r"\s+(?=<\|endoftext\|>|\Z)", "", text)  # which a test below is about
        found = theirs.tokenize(text.encode(), add_bos=False, special=True) if text else []
        assert found == tokenizer.encode(text), text
    if isinstance(tokenizer, BpeTokenizer):
        begins = [] if tokenizer.beginning is None else [tokenizer.beginning]
        assert theirs.tokenize(b"1") == [*begins, *tokenizer.encode("1")]


def test_only_end_tokens_end_a_text(tmp_path: Path) -> None:
    for tokenizer in (ByteTokenizer(), ASCII, *(t for t in TOKENIZERS if t.name == "bpe:600")):
        theirs = vocabulary_only(tokenizer, tmp_path / f"{tokenizer.vocab_size}.gguf")
        listed = llama_cpp.llama_model_get_vocab(theirs.model)
        ends = {i for i in range(tokenizer.vocab_size) if llama_cpp.llama_vocab_is_eog(listed, i)}
        assert {tokenizer.tokens[i] for i in ends} <= {b"\xff"}


def test_a_character_that_the_vocabulary_lacks_has_no_id(tmp_path: Path) -> None:
    theirs = vocabulary_only(ASCII, tmp_path / "v.gguf")
    assert theirs.tokenize(b"ab", add_bos=False) == [ASCII.encode("a")[0], -1]


def test_spaces_at_the_end_are_split_in_two_with_cl100k(tmp_path: Path) -> None:
    """The note describes the only difference, as the test above shows."""
    ranks = [bytes([b]) for b in range(256)] + [b"\n "]
    tokenizer = BpeTokenizer("cl100k_base", ranks)
    theirs = vocabulary_only(tokenizer, tmp_path / "v.gguf")
    assert tokenizer.encode("a\n ") == [97, 256]
    assert theirs.tokenize(b"a\n ", add_bos=False) == [97, 10, 32]
