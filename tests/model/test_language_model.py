"""Properties of every preset, and models that somebody changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from attnlm.base.errors import AttnlmError
from attnlm.base.setting_fields import Settings
from attnlm.config.settings import resolve
from attnlm.model.architecture import MODELS
from attnlm.model.building import uninitialised_model
from attnlm.model.inspection import is_as_built
from attnlm.model.language_model import Transformer
from attnlm.model.layers import Dropout, LayerCache, RMSNorm
from attnlm.model.loss import LOGITS_AT_ONCE
from attnlm.model.spec import parameter_count
from benchmarks.plain import PlainModel
from tests.models import (
    CHANGES,
    SIZES,
    VARIANTS,
    V,
    gradients,
    parts_of,
    self_attention,
    small_model,
    some_ids,
)
from tests.tolerances import assert_near

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


@pytest.mark.parametrize("name", ["single-head", "transformer", "gpt2"])
def test_dropout_is_for_training_only(name: str) -> None:
    dropping = small_model(name, dropout=0.5)
    ids_BT = some_ids(B, T)
    assert torch.equal(dropping(ids_BT), small_model(name)(ids_BT))
    dropping.train()
    assert not torch.allclose(dropping(ids_BT), dropping(ids_BT))
    places = [m for m in dropping.modules() if isinstance(m, Dropout) and m.p]
    assert len(places) == (1 if name == "single-head" else 3)  # one drops attention weights
    for place in places:
        for module in places:
            module.p = 0.5 if module is place else 0.0
        assert not torch.allclose(dropping(ids_BT), dropping(ids_BT))


def test_tokens_of_another_shape_or_beyond_the_context_are_refused() -> None:
    model = small_model("single-head")
    with pytest.raises(AttnlmError, match=r"shape \(B, T\), not \(13,\)"):
        model(some_ids(T))
    caches: list[LayerCache] = []
    model(some_ids(B, T), caches)
    too_long = "has 14 tokens, more than the context of the model, 13"
    with pytest.raises(AttnlmError, match=too_long):
        model(some_ids(B, T + 1))
    with pytest.raises(AttnlmError, match=too_long):
        model(some_ids(B, 1), caches)
    assert small_model("bigram")(some_ids(B, T + 1)).shape == (B, T + 1, V)  # which has no context


def test_r2_computes_what_the_plain_loop_does() -> None:
    """With the same weights, losses and gradients are the same, so that training is too."""
    length, heads, width, vocab_size = 32, 4, 32, 65
    torch.manual_seed(1)
    plain = PlainModel(vocab_size, width, heads, length)
    sizes: Settings = {"heads": heads, "embed_dim": width, "block_size": length}
    ours = parts_of(resolve({"model": "multi-head", **sizes})).build(vocab_size)

    def as_ours(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        joined = {
            f"blocks.0.attention.{kind}.weight": torch.cat(
                [weights[f"heads.{head}.{kind}.weight"] for head in range(heads)]
            )
            for kind in ("query", "key", "value")
        }
        others = {n.removeprefix("lm_"): w for n, w in weights.items() if "heads" not in n}
        return {**others, **joined}

    ours.load_state_dict(as_ours(dict(plain.named_parameters())))
    inputs, targets = torch.randint(vocab_size, (2, 16, length))
    losses = plain(inputs, targets)[1], ours.loss(inputs, targets)
    assert_near(losses[1], losses[0])
    assert_near(gradients(ours, losses[1]), as_ours(gradients(plain, losses[0])))


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


# --- Skeletons, and models that somebody changed --------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_a_model_is_as_its_settings_make_it(name: str) -> None:
    model = small_model(name)
    assert is_as_built(model) and is_as_built(model.float().train())
    skeleton = uninitialised_model(model.architecture, V, "meta")
    assert {n: w.shape for n, w in skeleton.state_dict().items()} == {
        n: w.shape for n, w in model.state_dict().items()
    }
    assert all(w.is_meta for w in (*skeleton.parameters(), *skeleton.buffers()))
    assert parameter_count(model.architecture, V) == sum(p.numel() for p in model.parameters())


def norm_of(model: Transformer) -> RMSNorm:
    assert isinstance(model.norm, RMSNorm)
    return model.norm


class Other(nn.Linear):
    """A linear map of somebody else."""


OF_INSTANCES: dict[str, Callable[[Transformer], object]] = {
    "an attribute": lambda model: setattr(norm_of(model), "epsilon", 0.5),
    "a tensor": lambda model: setattr(norm_of(model), "epsilon", torch.tensor([0.5, 0.5])),
    "a method": lambda model: setattr(norm_of(model), "forward", lambda x: x),
    "a hook": lambda model: self_attention(model).query.register_forward_hook(lambda *_: None),
    "a size": lambda model: setattr(model, "head", nn.Linear(7, 9)),
    "a part": lambda model: setattr(model, "head", Other(*model.head.weight.shape[::-1])),
    "a part that is left out": lambda model: setattr(model, "norm", None),
}


@pytest.mark.parametrize("change", OF_INSTANCES)
def test_a_changed_instance_is_noticed(change: str) -> None:
    model = small_model("transformer")
    assert isinstance(model, Transformer)
    OF_INSTANCES[change](model)
    assert not is_as_built(model)


@pytest.mark.parametrize("change", CHANGES)
def test_changed_classes_are_noticed(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, other = CHANGES[change]
    monkeypatch.setattr(f"attnlm.model.{place}", other)
    assert not is_as_built(small_model("transformer"))
