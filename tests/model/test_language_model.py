"""Properties of every preset; test_textbook.py checks the numbers."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch

from attnlm.base.errors import AttnlmError
from attnlm.base.setting_fields import Setting, Settings
from attnlm.config.settings import resolve
from attnlm.model.architecture import MODELS
from attnlm.model.attention import LayerCache
from attnlm.model.inspection import meta_model, parameter_count
from attnlm.model.layers import Dropout
from attnlm.model.ops.loss import LOGITS_AT_ONCE
from benchmarks.plain import Head, PlainModel
from tests.models import (
    SIZES,
    VARIANTS,
    V,
    gradients,
    parts_of,
    self_attention,
    small_model,
    some_ids,
)

B, T = 3, 13

presets = pytest.mark.parametrize("model_name", MODELS)


@presets
def test_first_loss_equals_guessing(model_name: str) -> None:
    inputs, targets = some_ids(2, B, T)
    torch.manual_seed(1)
    model = parts_of(resolve({"model": model_name}, SIZES)).build(V)
    assert model(inputs).shape == (B, T, V)
    # A head that is the embedding gives small logits, not none.
    assert model.loss(inputs, targets).item() == pytest.approx(math.log(V), rel=0.05)


@presets
def test_tokens_reach_what_comes_after_them_and_nothing_before(model_name: str) -> None:
    model = small_model(model_name)
    ids_BT = some_ids(B, T)
    before = model(ids_BT)
    for t in (0, T // 2, T - 1):
        changed_BT = ids_BT.clone()
        changed_BT[:, t] = (changed_BT[:, t] + 1) % V
        moved_T = (model(changed_BT) != before).any(-1).any(0)
        assert not moved_T[:t].any() and moved_T[t]
        assert model_name == "bigram" or moved_T[t:].all()


@presets
def test_gradients_reach_every_parameter_in_bfloat16_too(model_name: str) -> None:
    model = small_model(model_name).float()
    inputs, targets = some_ids(2, B, T)
    exact = model.loss(inputs, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = model.loss(inputs, targets)
    assert rough.item() == pytest.approx(exact.item(), rel=0.05)
    for loss in (exact, rough):
        for name, gradient in gradients(model, loss).items():
            assert gradient.dtype == torch.float32 and gradient.isfinite().all(), name
            assert gradient.any(), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_skeleton_has_all_names_and_shapes_and_no_memory(variant: str) -> None:
    model = small_model(variant)
    skeleton = meta_model(model.architecture, V)
    assert {n: w.shape for n, w in skeleton.state_dict().items()} == {
        n: w.shape for n, w in model.state_dict().items()
    }
    assert all(w.is_meta for w in (*skeleton.parameters(), *skeleton.buffers()))
    assert parameter_count(model.architecture, V) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", ["single-head", "transformer", "gpt2"])
def test_dropout_is_for_training_only(name: str) -> None:
    dropping = small_model(name, dropout=0.5)
    ids_BT = some_ids(B, T)
    assert torch.equal(dropping(ids_BT), small_model(name)(ids_BT))
    dropping.train()
    assert not torch.allclose(dropping(ids_BT), dropping(ids_BT))
    places = [m for m in dropping.modules() if isinstance(m, Dropout) and m.p]
    assert bool(places) == (name != "single-head")  # which drops attention weights
    for place in places:
        for module in places:
            module.p = 0.5 if module is place else 0.0
        assert not torch.allclose(dropping(ids_BT), dropping(ids_BT))


def test_tokens_of_another_shape_or_beyond_the_context_are_refused() -> None:
    model = small_model("single-head")
    with pytest.raises(AttnlmError, match=r"shape \(B, T\), not \(13,\)"):
        model(some_ids(T))
    caches: list[LayerCache] = []
    model(some_ids(B, T - 1), caches)
    model(some_ids(B, 1), caches)
    for arguments in ((some_ids(B, T + 1),), (some_ids(B, 1), caches)):
        with pytest.raises(
            AttnlmError, match="has 14 tokens, more than the context of the model, 13"
        ):
            model(*arguments)
    assert small_model("bigram")(some_ids(B, T + 1)).shape == (B, T + 1, V)  # which has no context


def test_parameter_counts_equal_the_table() -> None:
    C, H, L = 24, 4, 3
    heads: Settings = {"embed_dim": C, "heads": H}

    def body(name: str, settings: Settings, **more: Setting) -> int:
        model = parts_of(resolve({"model": name, **settings, **more})).build(V)
        return sum(p.numel() for p in model.get_submodule("blocks").parameters())

    assert parameter_count(small_model("bigram").architecture, V) == V**2
    assert body("average", {"embed_dim": C}) == body("dot-product", {"embed_dim": C}) == 0
    assert body("single-head", {"embed_dim": C}) == body("multi-head", heads) == 3 * C**2
    assert body("multi-head", heads, projection=True) == 3 * C**2 + C**2 + C
    assert body("multi-head", heads, qkv_bias=True) == 3 * C**2 + 3 * C
    assert body("wide-head", heads) == 3 * H * C**2 + H * C**2 + C
    assert body("transformer", heads, layers=L) == pytest.approx(12 * L * C**2, rel=0.02)


def test_r2_trains_as_the_plain_loop_does() -> None:
    size, heads, width, batch, V = 32, 4, 32, 16, 65
    torch.manual_seed(1)
    plain = PlainModel(V, width, heads, size)
    config = resolve(
        {"model": "multi-head", "heads": heads, "embed_dim": width, "block_size": size}
    )
    ours = parts_of(config).build(V)
    attention = self_attention(ours)
    separate = [head for head in plain.heads if isinstance(head, Head)]
    weights = {
        f"blocks.0.attention.{kind}.weight": torch.cat([getattr(h, kind).weight for h in separate])
        for kind in ("query", "key", "value")
    }
    others = {n.removeprefix("lm_"): w for n, w in plain.state_dict().items() if "heads" not in n}
    ours.load_state_dict({**others, **weights})
    assert len(separate) == heads and attention.projection is None
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (plain, ours)]
    text = (torch.arange(2000) ** 2 // 7) % V
    for _ in range(100):
        starts_B1 = torch.randint(len(text) - size, (batch, 1))
        windows = text[starts_B1 + torch.arange(size + 1)]
        inputs, targets = windows[:, :-1].clone(), windows[:, 1:].clone()
        losses = plain(inputs, targets)[1], ours.loss(inputs, targets)
        torch.testing.assert_close(*losses, rtol=0, atol=1e-4)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert losses[0] < math.log(V)


@pytest.mark.parametrize("at_once", [None, 4 * V])
@presets
def test_nothing_waits_for_the_device(
    model_name: str, at_once: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's meta device has shapes, but no numbers that one could wait for."""
    if at_once is not None:
        monkeypatch.setitem(LOGITS_AT_ONCE, "meta", at_once)
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)  # it has none
        monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    model = small_model(model_name).to("meta")
    inputs, targets = some_ids(2, B, T).to("meta")
    assert model(inputs).shape == (B, T, V) and model(inputs).is_meta
    for name, gradient in gradients(model, model.loss(inputs, targets)).items():
        assert gradient.is_meta, name
