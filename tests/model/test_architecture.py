"""Presets and what a user may change in them, hints that work, and costs without a model."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from attnlm.base.errors import UsageError
from attnlm.base.setting_fields import Settings, fields_of
from attnlm.compute.native import native_library
from attnlm.config.settings import Config, resolve
from attnlm.config.training import TrainingConfig
from attnlm.config.variants import variant
from attnlm.model import textbook
from attnlm.model.architecture import (
    MODELS,
    PRESETS,
    RUNGS,
    Architecture,
)
from attnlm.model.building import uninitialised_model
from attnlm.model.language_model import Transformer
from attnlm.model.layers import drop_by
from attnlm.model.loss import LOGITS_AT_ONCE
from attnlm.model.native_block import has_native_blocks, with_native_blocks
from attnlm.model.spec import parameter_count
from attnlm.training.memory import FACTOR
from tests.models import SIZES, VARIANTS, needs_kernels, parts_of
from tests.tolerances import assert_near

V = 7


def values(record: type, name: str) -> st.SearchStrategy[Any]:
    """Small values of a setting, and some that it can't have."""
    described = fields_of(record)[name]
    if choices := described.metadata["choices"]:
        return st.sampled_from([*choices, choices[-1] + "x"])
    kind = str(described.type).partition(" ")[0]
    found: dict[str, list[object]] = {
        "bool": [False, True, 1],
        "int": [*range(-1, 7), 2.0, *([2**41] if name != "layers" else [])],
        "str": ["query", "down,gate", "all", "quary"],
        "float": [0.0, 1e-3, 0.5, 1, 2.0, float("nan"), "1", 1e13],
    }
    return st.sampled_from(found[kind])


SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        name: values(record, name)
        for record in (Architecture, TrainingConfig)
        for name in fields_of(record)
        if name not in ("wide_heads", "arguments", "loss")
    },
)


def followed(settings: Settings, error: UsageError) -> Settings:
    """The settings, changed as an error's hint says."""
    hint = error.hint or ""
    (name, *_) = re.findall(r"`(\w+)`", error.message)  # every refusal names a setting
    if limits := dict(re.findall(r"(at least|at most|above|below) ([-+.e\d]+)", hint)):
        words = next(
            words for words in ("at least", "at most", "above", "below") if words in limits
        )
        beyond = {"above": 1, "below": -1}.get(words, 0)
        return {**settings, name: json.loads(limits[words]) + beyond}
    if found := re.search(r"must be (true|a whole number|a number)", hint):
        return {**settings, name: {"true": True, "a whole number": 1}.get(found[1], 0.5)}
    if found := re.search(r"did you mean ([\w-]+)\?|choose from ([^,]+)|applies to ([^ ,]+)", hint):
        chosen = next(filter(None, found.groups()))
        return {**settings, "model" if found[3] else name: chosen}
    if found := re.search(r"use `(\w+)` ([^ ,]+)", hint):
        value = found[2] if found[2][0].isalpha() else json.loads(found[2])
        return {**settings, found[1]: value}
    if hint == "add a `projection`":
        return {**settings, "projection": True}
    assert hint in (f"leave `{name}` out", "leave one out", "use only one"), hint
    return {k: v for k, v in settings.items() if k != name}


def resolved(settings: Settings) -> Config:
    """Settings, changed by the hints of what is refused until nothing is."""
    for _ in range(2 * len(settings) + 5):
        try:
            return resolve(settings)
        except UsageError as error:
            settings = followed(settings, error)
    raise AssertionError(settings)


@pytest.mark.parametrize(
    "name", [name for name in fields_of(Architecture) if name not in ("scores", "arguments")]
)
def test_variants_cover_every_choice_of_every_part(name: str) -> None:
    """The tests of the textbook pass, its script, the decoder in C and pages take each variant."""
    described = fields_of(Architecture)[name]
    values = {getattr(resolve(variant(model), SIZES).spec, name) for model in VARIANTS}
    assert values - {described.default}
    assert values >= set(described.metadata.get("choices") or ())


@examples(max_examples=70)
@given(SETTINGS)
def test_settings_resolve_once_their_hints_are_followed_and_build(settings: Settings) -> None:
    config = resolved(settings)
    a = parts_of(config)
    assert resolve({}, config.settings()) == resolve(config.settings()) == config
    skeleton = uninitialised_model(a, V, "meta")
    shapes = {name: tuple(p.shape) for name, p in skeleton.named_parameters()}
    assert a.parameter_shapes(V) == shapes
    if parameter_count(a, V) > 10**6 or a.block_size > 100:
        return
    model = a.build(V).double().eval()
    ids_T = torch.arange(a.block_size) % V
    expected = textbook.forward(a, dict(model.state_dict()), ids_T)
    assert_near(model(ids_T[None])[0], expected)


def test_presets_are_the_models_and_the_largest_take_every_part() -> None:
    assert tuple(PRESETS) == MODELS and MODELS[:7] == RUNGS
    parts = set(fields_of(Architecture)) - {"model", "wide_heads", "scores", "arguments"}
    assert all(set(PRESETS[model].settings) == parts for model in MODELS[6:])


ROUND = "embed_dim=24:block_size=10"
SMALLEST = 2 * 100 * 24 + 100 + 10 * 24  # a head, the embeddings of 100 tokens and of positions


@pytest.mark.parametrize(
    ("name", "vocab_size", "count"),
    [
        ("bigram", 100, 100**2),
        (f"average:{ROUND}", 100, SMALLEST),
        (f"dot-product:{ROUND}", 100, SMALLEST),
        (f"single-head:{ROUND}", 100, SMALLEST + 3 * 24**2),
        (f"multi-head:{ROUND}", 100, SMALLEST + 3 * 24**2),
        (f"multi-head:projection=true:{ROUND}", 100, SMALLEST + 4 * 24**2 + 24),
        (f"multi-head:qkv_bias=true:{ROUND}", 100, SMALLEST + 3 * 24**2 + 3 * 24),
        (f"wide-head:heads=4:{ROUND}", 100, SMALLEST + 4 * 4 * 24**2 + 24),
        ("gpt2:layers=12:embed_dim=768:heads=12:block_size=1024", 50257, 124_439_808),
        ("llama:layers=32:embed_dim=4096:heads=32:mlp_width=11008", 32000, 6_738_415_616),
        ("qwen3:layers=28:embed_dim=1024:heads=16:kv_heads=8:head_size=128:mlp_width=3072",
         151_936, 596_049_920),
    ],
)  # fmt: skip
def test_rungs_and_published_models_have_their_sizes(
    name: str, vocab_size: int, count: int
) -> None:
    assert parameter_count(resolve(variant(name)).spec, vocab_size) == count


def test_sizes_that_are_not_given_are_those_of_the_papers() -> None:
    assert parts_of(resolve(variant("transformer:embed_dim=40"))).mlp_dim == 112  # whole eights
    for model, usual in {"gpt2": (1e4, 1e-5), "llama": (1e4, 1e-5), "qwen3": (1e6, 1e-6)}.items():
        a = parts_of(resolve({"model": model}))
        assert (a.rotary_base, a.norm_epsilon) == usual


# --- Costs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(("vocab_size", "at_once"), [(11, 2**21), (300, 3000)])
def test_flops_equal_the_count_of_pytorch(
    name: str, vocab_size: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference implementation never holds all logits if there are many ids and tokens."""
    monkeypatch.setitem(LOGITS_AT_ONCE, "cpu", at_once)
    a = parts_of(resolve(variant(name), SIZES))
    model = a.build(vocab_size)
    ids = torch.zeros((2, a.block_size), dtype=torch.long)
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH):
        with counter, torch.no_grad():
            model(ids)
        assert counter.get_total_flops() == a.costs(vocab_size).forward_flops * ids.numel()
        with counter:
            model.loss(ids, ids).backward()
        assert counter.get_total_flops() == a.costs(vocab_size).training_flops * ids.numel()


def test_a_billion_parameters_by_hand() -> None:
    """Llama 3.2 1B has 1,235,814,400; 6·N·D, and attention on top."""
    llama = "llama:layers=16:embed_dim=2048:heads=32:kv_heads=8:mlp_width=8192:block_size=4096"
    costs = resolve(variant(f"{llama}:tie_embeddings=true")).spec.costs(128_256)
    attention, norms = 12 * 16 * 2048 * 4096, 33 * 2048
    assert costs.training_flops == 6 * (1_235_814_400 - norms) + attention


KEPT = (
    *(name for name in VARIANTS if "projection=false" not in name),
    *("transformer:dropout=0.1", "gpt2:dropout=0.1"),
)


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_kernels), False])
@pytest.mark.parametrize("name", KEPT)
def test_activations_are_near_the_tensors_that_autograd_keeps(name: str, native: bool) -> None:
    """The short formula comes near it, but for models that keep hardly anything."""
    sizes = {"embed_dim": 92, "heads": 4, "head_size": 22, "layers": 3, "block_size": 64}
    a, vocab_size, windows = parts_of(resolve(variant(name), sizes)), 7, 5
    model = a.build(vocab_size).train()
    tensors = [*model.parameters(), *model.buffers()]
    lasting = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in lasting:
            kept[storage.data_ptr()] = storage
        return tensor

    ids = torch.zeros((windows, a.block_size), dtype=torch.long)
    generators = [torch.Generator() for _ in range(windows)] if a.dropout else []
    drop_by(model, generators)
    form, library = model, native_library()
    if native and library is not None and has_native_blocks(a):
        assert isinstance(model, Transformer)
        form = with_native_blocks(model, library)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        form.loss(ids, ids)
    found = sum(storage.nbytes() for storage in kept.values())
    costs = a.costs(vocab_size)
    by_blocks = costs.layers * costs.kept_features
    estimated = 4 * (by_blocks + 2 * costs.lm_head_inputs + vocab_size)
    most = 3 if name == "dot-product" else FACTOR
    assert found / FACTOR < ids.numel() * estimated < most * found
