from __future__ import annotations

import math

import pytest
import torch

from attnlm.config import RUNGS, resolve
from attnlm.device import Device
from attnlm.errors import UsageError
from attnlm.model import LanguageModel, build_model
from attnlm.sampling import (
    SamplingConfig,
    Uniforms,
    draw,
    generate,
    next_token_probabilities,
    window_start,
)

CPU = Device("cpu", "float32", "tests")
V, BLOCK = 31, 12


def logits(*probabilities: float) -> torch.Tensor:
    return (
        torch.tensor([probabilities], dtype=torch.float64).log() + 3.7
    )  # a constant changes nothing


def assert_probabilities(got: torch.Tensor, *expected: float) -> None:
    torch.testing.assert_close(
        got, torch.tensor([expected], dtype=torch.float64), atol=1e-12, rtol=1e-12
    )


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


def test_top_k_comes_before_top_p() -> None:
    got = next_token_probabilities(logits(0.4, 0.3, 0.2, 0.1), top_k=2, top_p=0.5)
    assert_probabilities(got, 1, 0, 0, 0)


def test_draw_finds_the_interval_that_the_number_falls_into() -> None:
    probabilities_BV = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]]).double()
    for number, token in [
        (0.0, 1),
        (0.2499, 1),
        (0.25, 3),
        (0.7499, 3),
        (0.75, 4),
        (math.nextafter(1, 0), 4),
    ]:
        assert draw(probabilities_BV, torch.tensor([number]).double()).tolist() == [token]


def test_draws_follow_the_distribution() -> None:
    uniforms = Uniforms(3, 1)
    probabilities_BV = torch.tensor([[0.1, 0.6, 0.3]]).double()
    counts = [0, 0, 0]
    for _ in range(4000):
        counts[int(draw(probabilities_BV, uniforms.next()))] += 1
    assert counts[0] == pytest.approx(400, abs=95)  # five standard deviations
    assert counts[1] == pytest.approx(2400, abs=155)


def test_each_sample_has_a_stream_of_its_own_whatever_the_others() -> None:
    two, three = Uniforms(5, 2), Uniforms(5, 3)
    for _ in range(4):
        few, many = two.next(), three.next()
        assert torch.equal(few, many[:2])
        assert len(set(many.tolist())) == 3


def a_model(rung: str, dtype: torch.dtype, block_size: int = BLOCK) -> LanguageModel:
    torch.manual_seed(4)
    size = {} if rung == "bigram" else {"embed_dim": 20}
    size |= {"heads": 5} if rung in ("multi-head", "wide-head") else {}
    size |= {"heads": 2, "layers": 2} if rung == "transformer" else {}
    model = build_model(resolve({"model": rung, "block_size": block_size, **size}).model, V)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.to(dtype).eval()


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("prompt_length", [1, BLOCK - 1, BLOCK, 2 * BLOCK + 3])
def test_cached_tokens_equal_plain_ones_far_past_the_context(rung: str, prompt_length: int) -> None:
    model = a_model(rung, torch.float64)
    prompt = [int(i) for i in torch.randint(V, (prompt_length,))]
    config = SamplingConfig(tokens=3 * BLOCK, num_samples=3, seed=8)
    cached = torch.stack(list(generate(model, prompt, config, CPU)))
    plain = torch.stack(list(generate(model, prompt, config, CPU, cached=False)))
    assert torch.equal(cached, plain)
    assert len(set(map(tuple, cached.T.tolist()))) == 3


@pytest.mark.parametrize("rung", RUNGS)
def test_cached_logits_equal_plain_ones_far_past_the_context(
    rung: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = a_model(rung, torch.float32)
    seen: list[torch.Tensor] = []

    def keep(logits_BV: torch.Tensor, **settings: float | None) -> torch.Tensor:
        seen.append(logits_BV.clone())
        return next_token_probabilities(logits_BV, temperature=0)

    monkeypatch.setattr("attnlm.sampling.next_token_probabilities", keep)
    config = SamplingConfig(tokens=3 * BLOCK, seed=8)
    list(generate(model, [3, 1], config, CPU))
    list(generate(model, [3, 1], config, CPU, cached=False))
    cached, plain = torch.stack(seen).chunk(2)
    torch.testing.assert_close(cached, plain, atol=1e-5, rtol=1e-5)
    assert plain.std() > 0.1


@pytest.mark.parametrize("rung", ["multi-head", "transformer"])
def test_the_window_is_the_one_that_the_design_promises(rung: str) -> None:
    """Plain recompute, spelled out: the model sees just the tokens from window_start on."""
    model = a_model(rung, torch.float64)
    config = SamplingConfig(tokens=3 * BLOCK, temperature=0, seed=8)
    got = [int(ids) for ids in generate(model, [3, 1], config, CPU)]
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
        model = a_model(rung, torch.float64, block_size=1)
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
        {"seed": -1},
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError) as caught:
        SamplingConfig(**wrong)  # type: ignore[arg-type]
    assert "--" + next(iter(wrong)).replace("_", "-") in caught.value.message
