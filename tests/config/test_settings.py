"""Settings override recipes, which override defaults; errors.toml has impossible settings.

The parts of a model are tested in test_architecture.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from attnlm import AttnlmError, UsageError
from attnlm.base.setting_fields import Settings
from attnlm.config.recipes import load_sizes, recipe_names
from attnlm.config.settings import resolve, resolve_new
from attnlm.config.variants import variant
from attnlm.model.building import uninitialised_model
from tests.models import parts_of


def test_flags_override_recipes_and_recipes_override_defaults() -> None:
    recipe: Settings = {"model": "single-head", "embed_dim": 48, "block_size": 16}
    config = resolve({"block_size": 8}, recipe)
    assert (parts_of(config).embed_dim, parts_of(config).block_size) == (48, 8)
    assert config.training.batch_size == resolve({}).training.batch_size


def test_wrong_recipes_exit_with_1_and_wrong_flags_with_2() -> None:
    with pytest.raises(AttnlmError, match="recipe") as caught:
        resolve({"batch_size": 4}, {"model": "multi-head", "heads": 0})
    assert caught.value.exit_code == 1
    with pytest.raises(UsageError):
        resolve({"heads": 3}, {"model": "multi-head", "embed_dim": 32})


@pytest.mark.parametrize(
    ("settings", "dropped"),
    [
        ({"model": "single-head"}, ("layers", "heads", "mlp_width")),
        ({"attention": "none", "positions": "none"}, ("heads",)),
        ({"mlp": "none"}, ("mlp_width",)),
        ({}, ("rotary_base",)),
    ],
)
def test_unused_recipe_settings_are_dropped_and_named(
    settings: Settings, dropped: tuple[str, ...]
) -> None:
    recipe: Settings = {"model": "transformer", "layers": 3, "embed_dim": 48, "heads": 4}
    recipe |= {"mlp_width": 50, "batch_size": 5}
    recipe |= {} if settings else {"positions": "learned", "rotary_base": 9.0}
    request = resolve_new(settings, recipe)
    config = request.config
    assert request.ignored(config) == [*dropped]
    assert parts_of(config).embed_dim == 48 and config.training.batch_size == 5
    with pytest.raises(UsageError):
        resolve({**settings, dropped[0]: recipe[dropped[0]]}, recipe)
    request = resolve_new({}, {"model": "multi-head", "bias": False})
    assert request.ignored(request.config) == ["bias"]


def test_budget_and_steps_override_each_other() -> None:
    assert resolve({"budget": 60.0}, {"steps": 10}).training.steps is None
    config = resolve({"steps": 10}, {"budget": "1m30s"})
    assert config.training.steps == 10 and config.training.budget is None
    assert resolve({}, {"budget": "1m30s"}).training.budget == 90
    with pytest.raises(AttnlmError, match="in the recipe: invalid value for `budget`: 'soon'"):
        resolve({}, {"budget": "soon"})


def test_recipes_that_come_with_the_package_resolve() -> None:
    promised = "r1-multi-head r2-bigram r2-single-head r2-multi-head r3-bigram r4-gpt2-windows"
    promised += " r5-wide-heads shakespeare-fast shakespeare-best"
    assert {*promised.split()} <= {*recipe_names()}
    for recipe in (size for name in recipe_names() for size in load_sizes(name)):
        resolved = resolve({}, recipe)
        recipe.pop("tokenizer", None)
        assert recipe.items() <= resolved.settings().items()


def test_a_recipe_with_a_number_of_5000_digits_cannot_be_parsed(tmp_path: Path) -> None:
    (tmp_path / "long.toml").write_text("steps = " + "9" * 5000)
    with pytest.raises(AttnlmError, match=r"cannot parse .*: [^;]* has 5000 digits\n"):
        load_sizes(str(tmp_path / "long.toml"))[0]


@pytest.mark.parametrize(
    "sizes",
    [
        {"model": "wide-head", "heads": 2**12, "embed_dim": 2**20},
        {"model": "multi-head", "heads": 2**12, "head_size": 2**16, "embed_dim": 2**20},
        {"model": "transformer", "heads": 2**12, "head_size": 2**16, "block_size": 2**20},
    ],
)
def test_the_largest_models_have_shapes(sizes: Settings) -> None:
    uninitialised_model(resolve(sizes).spec, 2**21, "meta")


_RATES = {
    "bigram": {"adamw": 0.1},
    "transformer:attention=uniform:positions=learned:mlp=none": {"adamw": 0.01},  # no matrices
    "multi-head": {"muon": 0.03, "adamw": 0.03},
    "gpt2:mlp=none": {"muon": 0.02, "adamw": 0.002},
}
"""by optimizer, the model's default first; docs/cli.md has those of each model"""


def _optimizer_and_rate(settings: Settings, recipe: Settings | None = None) -> tuple[str, float]:
    training = resolve(settings, recipe).training
    return training.optimizer, training.learning_rate


@pytest.mark.parametrize(("name", "rates"), _RATES.items())
def test_the_default_learning_rate_depends_on_model_and_optimizer(
    name: str, rates: dict[str, float]
) -> None:
    model = variant(name)
    assert _optimizer_and_rate(model) == next(iter(rates.items()))
    for optimizer, rate in rates.items():
        by: Settings = {"optimizer": optimizer}
        assert _optimizer_and_rate({**model, **by}) == (optimizer, rate)
        assert _optimizer_and_rate({}, {**model, **by}) == (optimizer, rate)
        assert _optimizer_and_rate(model, by) == _optimizer_and_rate(by, model) == (optimizer, rate)
        assert _optimizer_and_rate(by, {**model, "learning_rate": 0.5}) == (optimizer, 0.5)
        assert _optimizer_and_rate({"learning_rate": 0.5, **by}, model) == (optimizer, 0.5)


def test_an_option_replaces_the_optimizer_of_a_recipe_and_its_default_rate() -> None:
    recipe: Settings = {"model": "transformer", "optimizer": "muon"}
    by_adamw = resolve({"model": "transformer", "optimizer": "adamw"}).training.learning_rate
    assert _optimizer_and_rate({"optimizer": "adamw"}, recipe) == ("adamw", by_adamw)
    parts: Settings = {"attention": "uniform", "positions": "learned", "mlp": "none"}
    assert _optimizer_and_rate(parts, {**recipe, "optimizer": "adamw"}) == ("adamw", 0.01)


def test_a_variant_of_an_own_model_sets_arguments_that_have_names_of_ours() -> None:
    found = variant("lecture.py:LectureModel:heads=1:block_size=32:learning-rate=0.1")
    assert found == {
        "model": "lecture.py:LectureModel",
        "set.heads": "1",
        "block_size": 32,
        "learning_rate": 0.1,
    }
