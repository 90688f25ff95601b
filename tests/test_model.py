"""What must hold on every rung of the ladder."""

from __future__ import annotations

import math

import pytest
import torch
from attnlm.model.models import (
    LanguageModel,
    Transformer,
    build_model,
    count_parameters,
    cross_entropy,
)

from attnlm.config.settings import RUNGS, resolve

B, T, V = 3, 13, 67
SIZES = {
    "bigram": {},
    "average": {"embed_dim": 23},
    "dot-product": {"embed_dim": 23},
    "single-head": {"embed_dim": 23},
    "multi-head": {"embed_dim": 35, "heads": 5},
    "wide-head": {"embed_dim": 11, "heads": 5},
    "transformer": {"embed_dim": 22, "heads": 11, "head_size": 6, "layers": 3},
}


def a_model(rung: str, **settings: bool | float) -> LanguageModel:
    torch.manual_seed(1)
    config = resolve({"model": rung, "block_size": T, **SIZES[rung], **settings})
    return build_model(config.model, V)


def scrambled(model: LanguageModel) -> LanguageModel:
    """With weights that are nowhere zero, so that every path counts."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.fixture(name="tokens_BT")
def some_tokens() -> torch.Tensor:
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(2))


def test_every_rung_is_tried() -> None:
    assert tuple(SIZES) == RUNGS


@pytest.mark.parametrize("rung", RUNGS)
def test_first_loss_is_that_of_guessing(rung: str, tokens_BT: torch.Tensor) -> None:
    logits_BTV = a_model(rung)(tokens_BT)
    assert logits_BTV.shape == (B, T, V)
    loss = cross_entropy(logits_BTV, tokens_BT.roll(1, 1)).item()
    assert loss == pytest.approx(math.log(V), rel=0.05)


@pytest.mark.parametrize("rung", RUNGS)
def test_no_rung_sees_the_future(rung: str, tokens_BT: torch.Tensor) -> None:
    model = scrambled(a_model(rung)).eval()
    before = model(tokens_BT)
    for t in (1, T // 2, T - 1):
        changed_BT = tokens_BT.clone()
        changed_BT[:, t] = (changed_BT[:, t] + 1) % V
        after = model(changed_BT)
        assert torch.equal(after[:, :t], before[:, :t])
        assert not torch.allclose(after[:, t], before[:, t])


@pytest.mark.parametrize("rung", [rung for rung in RUNGS if rung != "bigram"])
def test_every_other_rung_sees_the_past(rung: str, tokens_BT: torch.Tensor) -> None:
    model = scrambled(a_model(rung)).eval()
    changed_BT = tokens_BT.clone()
    changed_BT[:, 0] = (changed_BT[:, 0] + 1) % V
    assert not torch.allclose(model(changed_BT)[:, -1], model(tokens_BT)[:, -1])


@pytest.mark.parametrize("rung", RUNGS)
def test_gradients_are_finite_and_reach_every_parameter(rung: str, tokens_BT: torch.Tensor) -> None:
    model = scrambled(a_model(rung))
    cross_entropy(model(tokens_BT), tokens_BT.roll(1, 1)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("rung", ["multi-head", "wide-head", "transformer"])
def test_one_batch_can_be_learned_by_heart(rung: str, tokens_BT: torch.Tensor) -> None:
    model = a_model(rung, embed_dim=60)
    # The first token of a window has nothing before it, so all windows share theirs.
    tokens_BT[:, 0] = 0
    targets_BT = tokens_BT.roll(-1, 1)
    weights = torch.ones(B, T)
    weights[:, 0] = 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0)
    for _ in range(400):
        losses = torch.nn.functional.cross_entropy(
            model(tokens_BT).transpose(1, 2), targets_BT, reduction="none"
        )
        loss = (losses * weights).sum() / weights.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05


def test_bigram_logits_are_rows_of_its_table() -> None:
    model = scrambled(a_model("bigram"))
    table = next(model.parameters())
    assert table.shape == (V, V)
    assert torch.equal(model(torch.tensor([[4, 2]]))[0], table[[4, 2]])


def body_parameters(model: LanguageModel) -> int:
    outside = ("token_embedding", "position_embedding", "head", "norm")
    return sum(
        p.numel() for name, p in model.named_parameters() if name.split(".")[0] not in outside
    )


def test_bodies_have_as_many_parameters_as_the_table_says() -> None:
    C, H, L = 24, 4, 3
    size = {"embed_dim": C, "block_size": T}
    heads = {**size, "heads": H}

    def body(rung: str, **settings: bool | float) -> int:
        return body_parameters(build_model(resolve({"model": rung, **settings}).model, V))

    assert count_parameters(build_model(resolve({"model": "bigram"}).model, V)) == V**2
    assert body("average", **size) == body("dot-product", **size) == 0
    assert body("single-head", **size) == 3 * C**2
    assert body("multi-head", **heads) == 3 * C**2
    assert body("multi-head", **heads, projection=True) == 3 * C**2 + C**2 + C
    assert body("multi-head", **heads, qkv_bias=True) == 3 * C**2 + 3 * C
    assert body("wide-head", **heads) == 3 * H * C**2 + H * C**2 + C
    transformer = body("transformer", **heads, layers=L)
    assert transformer == pytest.approx(12 * L * C**2, rel=0.02)


def test_one_head_of_multi_head_is_single_head(tokens_BT: torch.Tensor) -> None:
    single = scrambled(a_model("single-head"))
    multi = a_model("multi-head", heads=1, embed_dim=23)
    multi.load_state_dict(single.state_dict())
    assert torch.equal(single(tokens_BT), multi(tokens_BT))


def test_a_transformer_may_tie_its_embeddings() -> None:
    tied, untied = a_model("transformer", tie_embeddings=True), a_model("transformer")
    assert isinstance(tied, Transformer)
    assert tied.head.weight is tied.token_embedding.weight
    assert count_parameters(untied) - count_parameters(tied) == V * 22


@pytest.mark.parametrize("rung", RUNGS)
def test_caches_give_the_same_logits_as_the_whole_text(rung: str, tokens_BT: torch.Tensor) -> None:
    model = scrambled(a_model(rung)).eval()
    whole = model(tokens_BT)
    caches = model.new_caches()
    parts = [model(part, caches) for part in tokens_BT.split([4, 1, 5, 1, 2], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-5)
