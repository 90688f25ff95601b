from __future__ import annotations

import _thread
import math
import threading

import numpy as np
import pytest
import torch

from attnlm.base.errors import NotFiniteError, UsageError
from attnlm.base.settings import Setting
from attnlm.compute.device import Device
from attnlm.config.settings import resolve
from attnlm.generation.decoders import (
    CachedDecoder,
    Decoder,
    PlainDecoder,
    fastest_decoding,
)
from attnlm.generation.next_token import (
    Array,
    Probabilities,
    Uniforms,
    draw,
    next_token_weights,
    normalised,
)
from attnlm.generation.sampling import generate, generate_all, window_start
from attnlm.generation.sampling_config import SamplingConfig
from attnlm.model.architecture import RUNGS
from attnlm.model.language_model import LanguageModel, build_model
from tests.tolerances import assert_near

CPU = Device("cpu", "float32", "tests")
V, BLOCK = 31, 12


def logits(*probabilities: float) -> Probabilities:
    logs: Probabilities = np.log(np.array([probabilities])) + 3.7  # a constant changes nothing
    return logs


def next_token_probabilities(
    logits_BV: Array,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Probabilities:
    with np.errstate(all="ignore"):
        return normalised(next_token_weights(logits_BV, temperature, top_k, top_p))


def assert_probabilities(got: Probabilities, *expected: float) -> None:
    np.testing.assert_allclose(got, [expected], atol=1e-12, rtol=1e-12)


def test_plain_softmax_gives_the_probabilities_back() -> None:
    assert_probabilities(next_token_probabilities(logits(0.5, 0.3, 0.2)), 0.5, 0.3, 0.2)


def test_temperature_is_a_power_of_the_probabilities() -> None:
    got = next_token_probabilities(logits(0.5, 0.3, 0.2), temperature=0.5)
    total = 0.25 + 0.09 + 0.04
    assert_probabilities(got, 0.25 / total, 0.09 / total, 0.04 / total)


def test_temperature_zero_is_greedy_and_tiny_ones_nearly_so() -> None:
    for temperature in (0.0, 1e-300, 1e-5):
        got = next_token_probabilities(logits(0.3, 0.45, 0.25), temperature=temperature)
        assert_probabilities(got, 0, 1, 0)


def test_top_k_keeps_exactly_k_tokens_even_among_equals() -> None:
    got = next_token_probabilities(logits(0.4, 0.1, 0.3, 0.2), top_k=2)
    assert_probabilities(got, 4 / 7, 0, 3 / 7, 0)
    assert (next_token_probabilities(logits(0.25, 0.25, 0.25, 0.25), top_k=3) > 0).sum() == 3
    assert_probabilities(next_token_probabilities(logits(0.6, 0.4), top_k=9), 0.6, 0.4)


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    four = logits(0.1, 0.4, 0.2, 0.3)
    assert_probabilities(next_token_probabilities(four, top_p=0.39), 0, 1, 0, 0)
    assert_probabilities(next_token_probabilities(four, top_p=0.6), 0, 4 / 7, 0, 3 / 7)
    assert_probabilities(next_token_probabilities(four, top_p=0.75), 0, 4 / 9, 2 / 9, 3 / 9)
    assert_probabilities(next_token_probabilities(four, top_p=1.0), 0.1, 0.4, 0.2, 0.3)
    assert_probabilities(next_token_probabilities(four, top_p=1e-9), 0, 1, 0, 0)


def test_the_nucleus_of_a_large_vocabulary_is_the_same_without_sorting_all_of_it() -> None:
    random = np.random.default_rng(1)
    for spread, top_p in ((6.0, 0.9), (1.0, 0.5), (0.0, 0.3), (1.0, 0.999999)):
        # Few different values: equals are kept in the order of their ids.
        weights_BV = np.exp(np.round(random.normal(size=(3, 20_000)) * spread, 1))
        weights_BV[1] = weights_BV[1, ::-1] ** 2
        got_BV = next_token_weights(np.log(weights_BV), 1.0, None, top_p)
        for got_V, weights_V in zip(got_BV, normalised(weights_BV), strict=True):
            places = np.argsort(-weights_V, kind="stable")
            count = 1 + int((np.cumsum(weights_V[places]) < top_p).sum())
            assert abs(len(places[got_V[places] > 0]) - count) <= 1  # to rounding
            assert (got_V[places[: count - 1]] > 0).all()
            assert not got_V[places[count + 1 :]].any()


def test_top_k_comes_before_top_p() -> None:
    got = next_token_probabilities(logits(0.4, 0.3, 0.2, 0.1), top_k=2, top_p=0.5)
    assert_probabilities(got, 1, 0, 0, 0)


def test_draw_finds_the_interval_that_the_number_falls_into() -> None:
    probabilities_BV = np.array([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]])
    for number, token in [
        (0.0, 1),
        (0.2499, 1),
        (0.25, 3),
        (0.7499, 3),
        (0.75, 4),
        (math.nextafter(1, 0), 4),
    ]:
        assert draw(probabilities_BV, np.array([number])).tolist() == [token]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e-300])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_refused(wrong: float, temperature: float) -> None:
    finite = np.array([[0.0, 3e38, -3e38]], np.float32)
    assert_probabilities(next_token_probabilities(finite, temperature=temperature), 0, 1, 0)
    for logits_BV in ([[0.0, wrong, 1.0]], [[0.0, 1.0, 2.0], [0.0, wrong, -wrong]]):
        with pytest.raises(NotFiniteError):
            next_token_probabilities(np.array(logits_BV), temperature=temperature)


def test_draws_follow_the_distribution() -> None:
    uniforms = Uniforms(3, range(1))
    probabilities_BV = np.array([[0.1, 0.6, 0.3]])
    counts = [0, 0, 0]
    for _ in range(4000):
        counts[int(draw(probabilities_BV, uniforms.take(1)[0])[0])] += 1
    assert counts[0] == pytest.approx(400, abs=95)  # five standard deviations
    assert counts[1] == pytest.approx(2400, abs=155)


def test_each_sample_has_a_stream_of_its_own_whatever_the_others() -> None:
    two, three = Uniforms(5, range(2)), Uniforms(5, range(3))
    for count in (1, 2, 5000):
        few_TB, many_TB = two.take(count), three.take(count)
        assert few_TB.shape == (count, 2)
        assert np.array_equal(few_TB, many_TB[:, :2])
        assert len(set(many_TB.ravel().tolist())) == 3 * count


def test_numbers_do_not_depend_on_how_many_are_taken_together() -> None:
    one, other = Uniforms(5, range(2)), Uniforms(5, range(2))
    pieces = np.concatenate([one.take(count) for count in (1, 700, 1, 3000)])
    assert np.array_equal(pieces, other.take(len(pieces)))


def a_model(
    rung: str, dtype: torch.dtype, settings: dict[str, Setting] | None = None
) -> LanguageModel:
    torch.manual_seed(4)
    size: dict[str, Setting] = {} if rung == "bigram" else {"embed_dim": 20}
    size |= {"heads": 5} if rung in ("multi-head", "wide-head") else {}
    size |= {"heads": 2, "layers": 2} if rung == "transformer" else {}
    config = resolve({"model": rung, "block_size": BLOCK, **size, **(settings or {})})
    model = build_model(config.model, V)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.to(dtype).eval()


VARIANTS: list[tuple[str, dict[str, Setting]]] = [
    *((rung, {}) for rung in RUNGS),
    ("multi-head", {"projection": True}),
    ("multi-head", {"qkv_bias": True}),
    ("multi-head", {"head_size": 7, "projection": True, "qkv_bias": True}),
    ("single-head", {"head_size": 9}),
    ("transformer", {"head_size": 6}),
    ("transformer", {"tie_embeddings": True, "layers": 1}),
]


@pytest.mark.parametrize(("rung", "settings"), VARIANTS)
@pytest.mark.parametrize("prompt_length", [1, BLOCK - 1, BLOCK, 2 * BLOCK + 3])
@pytest.mark.parametrize("num_samples", [1, 3])
def test_fast_tokens_equal_plain_ones_far_past_the_context(
    rung: str, settings: dict[str, Setting], prompt_length: int, num_samples: int
) -> None:
    model = a_model(rung, torch.float64, settings)
    prompt = [int(i) for i in torch.randint(V, (prompt_length,))]
    config = SamplingConfig(tokens=3 * BLOCK, num_samples=num_samples, seed=8)
    fast = np.stack(list(generate(model, prompt, config, CPU)))
    plain = np.stack(list(generate(model, prompt, config, CPU, cached=False)))
    assert fast.tolist() == plain.tolist()
    assert len(set(map(tuple, fast.T.tolist()))) == num_samples


@pytest.mark.parametrize(("rung", "settings"), VARIANTS)
@pytest.mark.parametrize("num_samples", [1, 3])
def test_fast_logits_equal_plain_ones_far_past_the_context(
    rung: str, settings: dict[str, Setting], num_samples: int
) -> None:
    model = a_model(rung, torch.float32, settings)
    assert_equal_logits(model, fastest_decoding(model, CPU).new_decoder(num_samples), num_samples)


@pytest.mark.parametrize("rung", [rung for rung in RUNGS if rung != "bigram"])
@pytest.mark.parametrize("number", [math.nan, math.inf, 3e38])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_numbers_that_are_not_finite_are_refused_by_every_decoder(
    rung: str, number: float, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is warned of, as the tests turn warnings into errors."""
    model = a_model(rung, torch.float32)
    with torch.no_grad():
        for name in ("token_embedding.weight", "head.weight"):
            model.get_parameter(name).fill_(number)

    def refused(*, cached: bool = True, num_samples: int = 1) -> None:
        config = SamplingConfig(temperature=temperature, num_samples=num_samples)
        with pytest.raises(NotFiniteError):
            next(generate(model, [1, 2], config, CPU, cached=cached))

    if rung == "transformer" and math.isfinite(number):
        return  # its last norm makes zeros of 3e38
    monkeypatch.setattr("attnlm.generation.decoders.cores", lambda: 2)
    refused(cached=False)
    refused()
    refused(num_samples=32)


@pytest.mark.parametrize("rung", RUNGS)
def test_without_a_compiler_logits_come_from_cached_keys(
    rung: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnlm.generation.decoders.library", lambda source: None)
    model = a_model(rung, torch.float32)
    decoder = fastest_decoding(model, CPU).new_decoder(2)
    assert isinstance(decoder, CachedDecoder) == (rung != "bigram")
    assert_equal_logits(model, decoder, 2)


def assert_equal_logits(model: LanguageModel, decoder: Decoder, num_samples: int) -> None:
    """Over tokens drawn from both a decoder and the model see the same windows."""
    plain = PlainDecoder(model, CPU)
    ids_BT = torch.randint(V, (num_samples, 4 * BLOCK)).numpy()
    start = known = 0
    for length in range(2, 4 * BLOCK):
        if (moved := window_start(model, length, start)) != start:
            start, known = moved, 0
        expected_BV = plain.logits(ids_BT[:, start:length], 0)
        got_BV = decoder.logits(ids_BT[:, start:length], known)
        assert got_BV.dtype == expected_BV.dtype
        assert_near(got_BV, expected_BV)
        assert expected_BV.std() > 0.1
        known = length - start


def test_the_number_of_threads_is_what_it_was() -> None:
    model = a_model("transformer", torch.float32)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        for _ in generate(model, [1], SamplingConfig(tokens=2 * BLOCK), CPU):
            assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("rung", ["multi-head", "transformer"])
def test_the_window_is_the_one_that_the_design_promises(rung: str) -> None:
    """Plain recompute, spelled out: the model sees just the tokens from window_start on."""
    model = a_model(rung, torch.float64)
    config = SamplingConfig(tokens=3 * BLOCK, temperature=0, seed=8)
    got = [int(ids[0]) for ids in generate(model, [3, 1], config, CPU)]
    text, start = [3, 1], 0
    for token in got:
        if len(text) - start > BLOCK:
            start = len(text) - (BLOCK // 2 if rung == "transformer" else BLOCK)
        with torch.no_grad():
            assert token == int(model(torch.tensor([text[start:]]))[0, -1].argmax())
        text.append(token)


def test_a_full_window_slides_or_keeps_its_newer_half() -> None:
    for rung, after_full in (("multi-head", [1, 2, 3]), ("transformer", [7, 7, 7])):
        model = a_model(rung, torch.float32)
        starts = [0]
        for length in range(1, BLOCK + 4):
            starts.append(window_start(model, length, starts[-1]))
        assert starts[1:] == [0] * BLOCK + after_full


def test_a_context_of_one_token_works() -> None:
    for rung in RUNGS:
        model = a_model(rung, torch.float64, {"block_size": 1})
        config = SamplingConfig(tokens=7, seed=1)
        cached = list(generate(model, [2, 3], config, CPU))
        assert cached == list(generate(model, [2, 3], config, CPU, cached=False))


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"tokens": -1},
        {"num_samples": 0},
        {"num_samples": 2, "tokens": 10**12},
        {"seed": -1},
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError) as caught:
        SamplingConfig(**wrong)  # type: ignore[arg-type]
    assert f"`{next(iter(wrong))}`" in caught.value.message


def test_a_signal_ends_the_threads_of_all_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would make a million tokens each."""
    monkeypatch.setattr("attnlm.generation.decoders.cores", lambda: 3)
    model = a_model("transformer", torch.float32)
    config = SamplingConfig(tokens=10**6, num_samples=24)
    threading.Timer(0.3, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        generate_all(model, [1], config, CPU)
