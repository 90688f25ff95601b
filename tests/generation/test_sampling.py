"""Drawing tokens: exact probabilities, one text alone or with others, and where a text ends."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attnlm.base.errors import NotFiniteError
from attnlm.compute.device import Device
from attnlm.compute.native import native_library
from attnlm.generation.module_decoder import ModuleDecoder, decoders_of
from attnlm.generation.native_decoder import BigramTable, NativeDecoder
from attnlm.generation.next_token import (
    Array,
    Ids,
    Probabilities,
    draw,
    normalised,
    uniform_numbers,
    unnormalised_probabilities,
)
from attnlm.generation.sampling import Continuation, Sampler, sampler_of
from attnlm.generation.sampling_config import SamplingConfig
from attnlm.model.architecture import RUNGS
from attnlm.model.language_model import Bigram, Transformer
from attnlm.tokens.tokenizer import BpeTokenizer, ByteTokenizer, CharTokenizer
from tests.kit import Clock, command, on_a_terminal
from tests.models import V, WithoutCache, small_model, some_ids

CPU = Device("cpu", "float32", "tests")
BLOCK = 13
LETTERS = CharTokenizer("".join(map(chr, range(ord("A"), ord("A") + V))))


def next_token_probabilities(logits_BV: Array, **settings: Any) -> Probabilities:
    settings = {"temperature": 1.0, "top_k": None, "top_p": None, **settings}
    with np.errstate(all="ignore"):
        return normalised(unnormalised_probabilities(logits_BV, **settings))


FOUR = (0.1, 0.4, 0.2, 0.3)


@pytest.mark.parametrize(
    ("given", "settings", "expected"),
    [
        (FOUR, {}, FOUR),
        ((0.5, 0.3, 0.2), {"temperature": 0.5}, (0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38)),
        *((FOUR, {"temperature": tiny}, (0, 1, 0, 0)) for tiny in (0.0, 1e-300, 1e-5)),
        (FOUR, {"top_k": 2}, (0, 4 / 7, 0, 3 / 7)),
        (FOUR, {"top_k": 9}, FOUR),
        *((FOUR, {"top_p": p}, (0, 1, 0, 0)) for p in (1e-9, 0.39)),
        (FOUR, {"top_p": 0.6}, (0, 4 / 7, 0, 3 / 7)),
        (FOUR, {"top_p": 0.75}, (0, 4 / 9, 2 / 9, 3 / 9)),
        (FOUR, {"top_p": 1.0}, FOUR),
        (FOUR, {"top_k": 2, "top_p": 0.5}, (0, 1, 0, 0)),  # of the two that are left, 4/7
    ],
)
def test_temperature_top_k_and_top_p_give_these_probabilities(
    given: tuple[float, ...], settings: dict[str, Any], expected: tuple[float, ...]
) -> None:
    logits_BV = np.log(np.array([given])) + 3.7  # a constant changes nothing
    got_BV = next_token_probabilities(logits_BV, **settings)
    np.testing.assert_allclose(got_BV, [expected], atol=1e-12, rtol=1e-12)
    # Exactly k are kept, even among equals.
    assert (next_token_probabilities(np.zeros((1, 4)), top_k=3) > 0).sum() == 3


def test_top_p_of_a_large_vocabulary_is_exact_without_a_full_sort() -> None:
    random = np.random.default_rng(1)
    for spread, top_p in ((6.0, 0.9), (1.0, 0.5), (0.0, 0.3), (1.0, 0.999999)):
        # Few different values: equals are kept in the order of their ids.
        weights_BV = np.exp(np.round(random.normal(size=(3, 20_000)) * spread, 1))
        weights_BV[1] = weights_BV[1, ::-1] ** 2
        got_BV = unnormalised_probabilities(np.log(weights_BV), 1.0, None, top_p)
        for got_V, weights_V in zip(got_BV, normalised(weights_BV), strict=True):
            places = np.argsort(-weights_V, kind="stable")
            count = 1 + int((np.cumsum(weights_V[places]) < top_p).sum())
            assert abs(len(places[got_V[places] > 0]) - count) <= 1  # to rounding
            assert (got_V[places[: count - 1]] > 0).all()
            assert not got_V[places[count + 1 :]].any()


def test_draw_finds_the_interval_that_the_number_falls_into() -> None:
    probabilities_BV = np.array([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]])
    below_1 = math.nextafter(1, 0)
    for token, numbers in {1: (0.0, 0.2499), 3: (0.25, 0.7499), 4: (0.75, below_1)}.items():
        for number in numbers:
            assert draw(probabilities_BV, np.array([number])).tolist() == [token]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e-300])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_refused(wrong: float, temperature: float) -> None:
    finite = np.array([[0.0, 3e38, -3e38]], np.float32)
    assert next_token_probabilities(finite, temperature=temperature).tolist() == [[0, 1, 0]]
    for logits_BV in ([[0.0, wrong, 1.0]], [[0.0, 1.0, 2.0], [0.0, wrong, -wrong]]):
        with pytest.raises(NotFiniteError):
            next_token_probabilities(np.array(logits_BV), temperature=temperature)


def test_random_streams_of_samples_are_independent() -> None:
    two_TB, three_TB, short_TB = (
        np.stack([*uniform_numbers(5, range(streams), steps)])
        for streams, steps in ((2, 5000), (3, 5000), (2, 700))
    )
    assert two_TB.shape == (5000, 2) and np.array_equal(two_TB, three_TB[:, :2])
    assert len(set(three_TB.ravel().tolist())) == 3 * 5000
    assert np.array_equal(short_TB, two_TB[:700])


class Uncached(ModuleDecoder):
    """Reference decoder, which recomputes every token."""

    def logits(self, ids_BS: Ids, known: int) -> Array:
        return super().logits(ids_BS, 0)


def generated(sampler: Sampler, prompt: list[int], config: SamplingConfig) -> Iterator[list[int]]:
    """Yield the next ids of all samples, (B,), one token after another."""
    streams = range(config.num_samples)
    for ids_B, _ in sampler.generate([prompt for _ in streams], streams, config):
        yield ids_B.tolist()


VARIANTS = (
    *RUNGS,
    "multi-head:projection=true",
    "multi-head:head_size=7:projection=true:qkv_bias=true",
    "single-head:head_size=9",
    "transformer:tie_embeddings=true:layers=1",
)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("block_size", [BLOCK, 1])
def test_fast_tokens_equal_uncached_ones_far_past_the_context(name: str, block_size: int) -> None:
    model = small_model(name, block_size=block_size)
    for prompt_length, num_samples in ((1, 3), (BLOCK, 1), (2 * BLOCK + 3, 3)):
        prompt = [int(i) for i in torch.randint(V, (prompt_length,))]
        config = SamplingConfig(tokens=3 * BLOCK, num_samples=num_samples, seed=8)
        plain = Sampler(model.spec, LETTERS, "cpu", lambda _: Uncached(model, CPU))
        fast = [*generated(sampler_of(model, LETTERS, CPU), prompt, config)]
        assert fast == [*generated(plain, prompt, config)]
        assert block_size == 1 or len(set(zip(*fast, strict=True))) == num_samples


@pytest.mark.parametrize("rung", ["multi-head", "transformer"])
def test_the_window_slides_as_documented(rung: str) -> None:
    """Plain recompute, spelled out: the model sees just the tokens from window_start on."""
    model = small_model(rung)
    config = SamplingConfig(tokens=3 * BLOCK, temperature=0, seed=8)
    text, start = [3, 1], 0
    for (token,) in generated(sampler_of(model, LETTERS, CPU), [3, 1], config):
        if len(text) - start > BLOCK:
            start = len(text) - (BLOCK // 2 if rung == "transformer" else BLOCK)
        with torch.no_grad():
            assert token == int(model(torch.tensor([text[start:]]))[0, -1].argmax())
        text.append(token)


def test_an_attention_that_keeps_no_cache_sees_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnlm.model.language_model.SelfAttention", WithoutCache)
    model, ids_BS = small_model("transformer"), some_ids(3, BLOCK)
    decoder = ModuleDecoder(model, CPU)
    for known, end in ((0, 4), (4, 5), (5, BLOCK), (0, 2), (2, 3)):
        found_BV = decoder.logits(ids_BS[:, :end].numpy(), known)
        np.testing.assert_allclose(found_BV, model(ids_BS[:, :end])[:, -1].detach(), rtol=1e-9)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("name", VARIANTS)
def test_batched_prompts_equal_single_prompts(
    name: str, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts may come in any order, repeat, and exceed the context."""
    if not native:
        monkeypatch.setattr("attnlm.generation.native_decoder.native_library", lambda: None)
    model = small_model(name)
    sampler = sampler_of(model.float() if native else model, LETTERS, CPU)
    lengths = (7, 1, 2 * BLOCK + 3, 2, BLOCK, 7, BLOCK + 1, 4)
    prompts = [[int(i) for i in torch.randint(V, (length,))] for length in lengths]
    configs: list[dict[str, Any]] = [
        {"tokens": 1, "num_samples": 3},
        {"tokens": 6, "top_k": 4},
        {"tokens": 6, "temperature": 0.0, "num_samples": 2},
        {"tokens": 2 * BLOCK, "num_samples": 3},
    ]
    for settings in configs:
        config = SamplingConfig(seed=8, **settings)
        together, count = sampler.samples(prompts, config)
        assert count == len(together) * config.tokens
        alone = [sampler.samples([prompt], config)[0] for prompt in prompts]
        assert together == [text for texts in alone for text in texts]
        texts = zip(*generated(sampler, prompts[2], config), strict=True)
        assert alone[2] == [LETTERS.decode(ids) for ids in texts]


def test_a_slow_model_stops_with_its_texts(clock: Clock) -> None:
    steps: list[Ids] = []

    class Slow:
        def logits(self, ids_BS: Ids, known: int) -> Array:
            clock.advance(0.1)
            steps.append(ids_BS)
            return np.eye(V)[(ids_BS[:, -1] + 1) % V] * 1e3

    sampler = Sampler(small_model("multi-head").spec, LETTERS, "cpu", lambda _: Slow())
    config = SamplingConfig(tokens=90, num_samples=3, seed=1, stop="E")
    assert sampler.samples([[0]], config) == (["BCD"] * 3, 12) and len(steps) == 4


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_tokens_before_logits_that_are_not_finite_are_made(wrong: float) -> None:
    """The third token and those after it cannot be drawn."""
    model = small_model("gpt2").float()
    assert isinstance(model, Transformer) and model.position_embedding is not None
    with torch.no_grad():
        model.position_embedding.weight[4] = wrong
    made: list[Any] = []
    with pytest.raises(NotFiniteError):
        for ids in generated(sampler_of(model, LETTERS, CPU), [1, 2], SamplingConfig(tokens=9)):
            made.append(ids)
    assert len(made) == 3


def test_a_bigram_is_a_table() -> None:
    model, ids_BS = small_model("bigram").float(), some_ids(3, BLOCK)
    decoder = decoders_of(model, CPU)(3)
    assert isinstance(decoder, BigramTable)
    found_BV = decoder.logits(ids_BS.numpy(), 2)
    assert np.array_equal(found_BV, model(ids_BS)[:, -1].detach().numpy())


TEXT = "one né → 名前 two 名"
ENDED = {
    (): TEXT,
    "x": TEXT,
    "名 ": TEXT,
    "名前": "one né → ",
    "é": "one n",
    ("two", "→ 名前 "): "one né ",
    ("前 two", "o"): "",
}


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize("stop", ENDED)
def test_a_text_ends_before_the_first_stop_text(stop: str | tuple[str, ...], size: int) -> None:
    """Tokens are single bytes, which come in blocks of any size; TEXT itself ends with a part of
    a stop text."""
    ids, shown = list(TEXT.encode()), ENDED[stop]
    made = Continuation(ByteTokenizer(), SamplingConfig(stop=stop))
    pieces = [made.add(ids[i : i + size]) for i in range(0, len(ids), size)]
    assert "".join(pieces) + made.close() == shown
    assert made.has_ended == (shown != TEXT)
    found = next((one for one in made._stop_texts if TEXT.startswith(shown + one)), "")
    assert made.tokens == len((shown + found).encode())


def test_a_text_ends_before_the_first_of_the_stop_texts_in_one_token() -> None:
    tokenizer = BpeTokenizer("bpe:257", [*(bytes([i]) for i in range(256)), b"one two three"])
    made = Continuation(tokenizer, SamplingConfig(stop=("three", "two", " t")))
    assert made.add([256]) == "one" and made.has_ended


@pytest.mark.parametrize("native", [True, False])
def test_all_decoders_end_at_the_same_token(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr("attnlm.generation.native_decoder.native_library", lambda: None)
    elif native_library() is None:
        pytest.skip("there are no kernels here")
    tokenizer = CharTokenizer("".join(map(chr, range(ord("A"), ord("A") + V))))
    sampler = sampler_of(small_model("transformer").float(), tokenizer, CPU)
    assert isinstance(sampler.new_decoder(1), NativeDecoder if native else ModuleDecoder)
    whole = sampler.samples([[3]], SamplingConfig(tokens=90, num_samples=3, seed=1))[0]
    end = whole[0][60]
    tokenizer.end_of_text = tokenizer.encode(end)[0]
    for stop, ignore_eos in (((), False), (whole[0][40:43], True), (whole[0][20:22], False)):
        config = SamplingConfig(tokens=90, seed=1, stop=stop, ignore_eos=ignore_eos)
        ends = [*config.stop_texts, *([] if ignore_eos else [end])]
        expected = [min((text.partition(one)[0] for one in ends), key=len) for text in whole]
        assert expected[0] != whole[0]
        ids = [3]
        assert "".join(sampler.stream(ids, config)) == expected[0]
        shown = tokenizer.decode(ids[1:])
        assert shown.startswith(expected[0]) and shown.endswith(tuple(ends))
        chosen = list(sampler.choices([3], config))
        assert "".join(choice.text for choice in chosen) == expected[0]
        assert "".join(choice.token for choice in chosen) == shown
        texts, count = sampler.samples([[3]], replace(config, num_samples=3))
        assert texts == expected and count >= sum(map(len, texts))


def test_the_command_ends_texts_and_counts_like_the_library(project: Path) -> None:
    command("train", "--steps", "1", "--eval-tokens", "64", "--seed", "1", "-q", cwd=project)
    flags = ("sample", "--tokens", "60", "--seed", "1")
    whole = command(*flags, cwd=project).stdout
    stop = whole[20:22]
    shown = whole.partition(stop)[0]
    assert command(*flags, "--stop", "@@", "--stop", stop, cwd=project).stdout == shown
    for more in ((), ("--show-probs",), ("--num-samples", "2")):
        found = json.loads(command(*flags, "--stop", stop, "--json", *more, cwd=project).stdout)
        assert found["texts"][0] == shown
        assert "--num-samples" in more or found["generated_tokens"] == len(shown + stop)


# --- Probabilities that are shown -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["bigram", "multi-head", "transformer"])
@pytest.mark.parametrize(
    "cut",
    [
        {},
        {"temperature": 0.7, "top_k": 5},
        {"top_p": 0.6},
        {"temperature": 0.0},
        {"temperature": 1e-300},
    ],
)
def test_shown_probabilities_are_those_of_the_draw(name: str, cut: dict[str, Any]) -> None:
    model = small_model(name, block_size=20).float()
    sampler = sampler_of(model, LETTERS, CPU)
    config, ids = SamplingConfig(tokens=12, seed=4, **cut), [1, 2, 3]
    choices = list(sampler.choices(list(ids), config))
    assert "".join(c.text for c in choices) == "".join(sampler.stream(list(ids), config))
    for choice in choices:
        with torch.inference_mode():
            logits = model(torch.tensor([ids]))[:, -1].numpy()
        wanted = next_token_probabilities(logits, **cut)[0]
        (drawn,) = LETTERS.encode(choice.token)
        assert choice.probability == pytest.approx(wanted[drawn], abs=1e-5) and wanted[drawn] > 0
        others = np.sort(np.delete(wanted, drawn))[::-1]
        found = [p for _, p in choice.runners_up]
        np.testing.assert_allclose(found, others[: len(found)], atol=1e-5)
        assert len(found) == min(3, np.count_nonzero(others > 0))
        ids.append(int(drawn))


def test_bytes_make_whole_characters_as_in_the_stream() -> None:
    model = small_model("bigram", 256).float()
    assert isinstance(model, Bigram)
    with torch.no_grad():
        model.table.weight.zero_()
        model.table.weight[:, [0xC3, 0xA9]] = 30  # é and its two bytes
    sampler = sampler_of(model, ByteTokenizer(), CPU)
    for seed in range(6):
        config = SamplingConfig(tokens=5, seed=seed)
        choices = list(sampler.choices([0], config))
        assert "".join(c.text for c in choices) == "".join(sampler.stream([0], config))
        assert len(choices) == 5


def test_lines_and_numbers_are_those_of_the_json(trained: Path) -> None:
    flags = ["sample", "multi-head", "--tokens", "20", "--seed", "3", "--prompt", "the"]
    facts = json.loads(command(*flags, "--show-probs", "--json", cwd=trained).stdout)
    assert facts["texts"][0] == command(*flags, cwd=trained).stdout
    assert "the" + "".join(c["token"] for c in facts["choices"]) == facts["texts"][0]
    lines = command(*flags, "--show-probs", cwd=trained).stdout.splitlines()
    assert len(lines) == facts["generated_tokens"] == 20
    for line, choice in zip(lines, facts["choices"], strict=True):
        token, probability, others = line.split("\t")
        shown = {" ": "␣", "\n": "⏎"}.get(choice["token"], choice["token"])
        assert token == shown and probability == f"{choice['probability']:.4f}"
        assert others.count("0.") == len(choice["runners_up"])


def test_a_text_does_not_command_a_terminal(tmp_path: Path) -> None:
    """Text of models and users is untrusted; it is escaped exactly there."""
    text = "\x1b]0;title\x07 \x9b31m\b\u202e\ufeff\r\n\t."
    (tmp_path / "text.txt").write_text(text * 40, encoding="utf-8", newline="")
    command("prepare", "text.txt", cwd=tmp_path)
    flags = ["--steps", "1", "--block-size", "4", "--embed-dim", "8", "--heads", "1"]
    command("train", *flags, "--model", "transformer", cwd=tmp_path)
    sample = ["sample", "--prompt", text, "--tokens", "200", "--seed", "1"]
    said = json.loads(command(*sample, "--json", cwd=tmp_path).stdout)["texts"][0]
    assert said.startswith(text) and "\x1b" in said[len(text) :] and "\x9b" in said[len(text) :]
    shown = on_a_terminal(*sample, cwd=tmp_path)
    assert shown.startswith("\\x1b]0;title\\x07 \\x9b31m\\x08\\u202e\\ufeff\r\n\t.")
    assert not re.search(r"[\x00-\x08\x0b-\x0c\x0e-\x1f\x7f-\x9f\u202e\ufeff]", shown)
    tinted = on_a_terminal(*sample, "--show-probs", cwd=tmp_path)
    assert not re.search(r"[\x00-\x08\x0b-\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]", tinted)
    assert not re.search(r"\x1b(?!\[[0-9;]*m)", tinted)  # but for colours, our own
    hostile = (tmp_path / "checkpoints" / "transformer-001").rename(tmp_path / "a\x1b]0;t\nb")
    for arguments in (["eval"], ["report"], ["attend", "t"], ["sample", "--tokens", "1"]):
        said = command(*arguments, hostile, cwd=tmp_path).stderr
        assert "a\\x1b]0;t\\nb" in said and "\x1b" not in said


TIED = [[2.0, 5.0, 5.0, 1.0, 5.0], [0.0, 0.0, 0.0, 0.0, 0.0], [1.0, 7.0, 3.0, 3.0, 3.0]]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "kept"),
    [
        (0.0, None, None, [[1], [0], [1]]),
        (1.0, 1, None, [[1], [0], [1]]),
        (1.0, None, 1e-9, [[1], [0], [1]]),
        (1.0, 2, None, [[1, 2], [0, 1], [1, 2]]),
        (0.5, 3, None, [[1, 2, 4], [0, 1, 2], [1, 2, 3]]),
    ],
)
def test_of_equally_likely_tokens_the_lowest_ids_are_kept(
    temperature: float, top_k: int | None, top_p: float | None, kept: list[list[int]]
) -> None:
    p_BV = unnormalised_probabilities(np.array(TIED, np.float32), temperature, top_k, top_p)
    assert [np.flatnonzero(row).tolist() for row in p_BV] == kept
