"""Parts and models of the user's in ours: shapes, arguments, scores, forms of logits, maps."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.config.settings import Config, resolve_new
from attnlm.model.language_model import LanguageModel, Transformer
from attnlm.model.layers import SelfAttention
from attnlm.model.own_modules import OwnLanguageModel
from attnlm.model.own_parts import OwnPart
from attnlm.model.recorder import NotRecordedError, record, silence
from attnlm.model.spec import parameter_count
from tests.tolerances import assert_near

V = 11
PART_SIZES: dict[str, Any] = {"embed_dim": 12, "block_size": 9}
SIZES = {**PART_SIZES, "heads": 2}
IDS_BT = torch.arange(18).view(2, 9) % V
MODELS = ("single-head", "multi-head", "transformer", "gpt2", "llama", "qwen3")


def config(code: Path, **settings: Any) -> Config:
    """Resolve settings in which own code is called FILE:NAME, of FILE.py in the folder `code`."""
    named = {
        k: f"{code / v.replace(':', '.py:')}" if isinstance(v, str) and ":" in v else v
        for k, v in settings.items()
    }
    return resolve_new(named, None).config


def build(code: Path, **settings: Any) -> LanguageModel:
    """Build a model, and draw what begins as zeros, so that logits depend on all parameters."""
    torch.manual_seed(0)
    model = config(code, **settings).spec.build(V).eval()
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.3)
    return model


# --- Parts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_attention_can_be_replaced_in_each_layer(code: Path, model: str) -> None:
    built = build(code, model=model, attention="parts:Convolution", **PART_SIZES)
    assert isinstance(built, Transformer)
    parts = [block.attention for block in built.blocks]
    assert all(isinstance(part, OwnPart) for part in parts)
    assert [part.module.layer for part in parts] == [*range(built.architecture.layers)]  # type: ignore
    assert built(IDS_BT).shape == (2, 9, V)
    built.loss(IDS_BT, IDS_BT).backward()
    assert all(p.grad is not None and p.grad.any() for p in built.parameters())


def test_an_mlp_can_be_replaced(code: Path) -> None:
    built = build(code, model="transformer", mlp="parts:Gate", layers=2, **SIZES)
    assert [type(b.mlp.module).__name__ for b in built.blocks] == ["Gate", "Gate"]  # type: ignore
    assert all(isinstance(block.attention, SelfAttention) for block in built.blocks)  # type: ignore
    assert built(IDS_BT).shape == (2, 9, V)


def test_attention_and_mlp_get_the_sizes_that_they_name(code: Path) -> None:
    parts = {"attention": "parts:Head", "mlp": "parts:Gate", "set": {"start": 3}}
    built = build(code, model="transformer", **parts, layers=2, **SIZES)
    assert built.spec.name == "transformer-Head-Gate"
    assert built.spec.settings()["set.start"] == 3.0
    for block in built.blocks:  # type: ignore[union-attr]
        head, gate = block.attention.module, block.mlp.module
        assert (head.heads, head.query.in_features, head.mask.shape) == (2, 12, (9, 9))
        assert gate.up.in_features == 12


def test_the_scores_know_their_heads_size_and_layer(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\nclass Scores(nn.Module):\n"
        "    def __init__(self, *, embed_dim, heads, block_size, layer, head_size):\n"
        "        super().__init__()\n"
        "        self.given = embed_dim, heads, block_size, layer, head_size\n"
        "    def forward(self, q, k): return q @ k.mT\n"
    )
    sizes = {**SIZES, "head_size": 4, "layers": 2}
    built = build(tmp_path, model="transformer", scores="mine:Scores", **sizes)
    given = [block.attention.scores.module.given for block in built.blocks]  # type: ignore
    assert given == [(12, 2, 9, 0, 4), (12, 2, 9, 1, 4)]


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("single-head", {}),
        ("multi-head", {"heads": 2}),
        ("transformer", {"heads": 4, "kv_heads": 2, "head_size": 6}),
        ("gpt2", {"heads": 2}),
        ("llama", {"heads": 4, "kv_heads": 1, "head_size": 4}),
        ("qwen3", {"heads": 2, "kv_heads": 1, "head_size": 6}),
    ],
)
def test_scaled_products_as_scores_compute_the_standard_model(
    code: Path, model: str, more: dict[str, Any]
) -> None:
    settings = {"model": model, **PART_SIZES, **more}
    ours, theirs = build(code, **settings), build(code, **settings, scores="parts:Scores")
    theirs.load_state_dict(ours.state_dict())
    assert ours(IDS_BT).std() > 0.01
    assert_near(theirs(IDS_BT), ours(IDS_BT))
    assert_near(record(theirs, IDS_BT).maps, record(ours, IDS_BT).maps)


def test_scores_of_the_users_take_effect(code: Path) -> None:
    ours, theirs = build(code, **SIZES), build(code, **SIZES, scores="parts:ALiBi")
    theirs.load_state_dict(ours.state_dict())
    assert (theirs(IDS_BT) - ours(IDS_BT)).abs().max() > 1e-3
    assert_near(theirs(IDS_BT[:, :4]), theirs(IDS_BT)[:, :4])


@pytest.mark.parametrize("model", MODELS)
def test_positions_can_be_left_out_of_each_model(code: Path, model: str) -> None:
    without = {"model": model, "positions": "none", **PART_SIZES}
    assert build(code, **without, scores="parts:Scores").position_embedding is None
    by_itself = build(code, **without, attention="parts:Wide", set={"times": 1})
    assert by_itself.position_embedding is None
    same = by_itself(torch.full((1, 9), 3))
    assert_near(same, same[:, :1].expand_as(same))


def test_arguments_are_settings_of_their_defaults_types(code: Path) -> None:
    def given(**values: Any) -> dict[str, Any]:
        settings = config(code, attention="parts:Head", **SIZES, set=values).settings()
        return {k.removeprefix("set."): v for k, v in settings.items() if k.startswith("set.")}

    usual = {"start": 1.0, "dropout": 0.0, "name": "plain"}
    assert given() == usual
    assert given(start="2", name="x") == {**usual, "start": 2.0, "name": "x"}
    assert given(start=2) == {**usual, "start": 2.0}


WRONG_STARTS: tuple[Any, ...] = ("two", True, None, [1], {}, "nan", "inf", math.inf, 10**400)
WRONG_SETS = (*({"start": x} for x in WRONG_STARTS), {"name": 3}, {"a b": 1}, {"\n": 1}, {"": 1})


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"attention": "parts:Fused", **SIZES}, "`heads` has no effect: parts.py:Fused has no arg"),
        (
            {"attention": "parts:Head", "scores": "parts:Scores"},
            "`scores` has no effect without `attention` softmax",
        ),
        ({"mlp": "parts:Gate"}, "multi-head has no mlp that your own could"),
        ({"attention": "parts:Fused", "positions": "rotary"}, "rotary needs queries and keys"),
        ({"attention": "parts:Head", "set": {"strat": 1}}, "no argument 'strat'"),
        ({"attention": "parts:Head", "set": [1]}, "`set` must be a dictionary"),
        ({"model": "models:lecture", "heads": 2}, "`heads` does not apply to models.py:lecture"),
        *(({"attention": "parts:Head", "set": x}, "invalid value for") for x in WRONG_SETS),
    ],
    ids=lambda value: str(value)[:60],
)
def test_settings_that_do_not_fit_the_code_are_refused(
    settings: dict[str, Any], says: str, code: Path
) -> None:
    with pytest.raises(UsageError, match=says):
        build(code, **settings)


AS_PART = {"attention": "mine:Mine", **PART_SIZES}
PART = """class Mine(nn.Module):
    def __init__(self, embed_dim): super().__init__()
    def forward(self, x): return {}
"""
AS_MODEL = {"model": "mine:Mine"}
MODEL = """class Mine(nn.Embedding):
    def __init__(self, vocab_size): super().__init__(vocab_size, vocab_size)
    def forward(self, ids): x = super().forward(ids); return {}
"""
NO_LOGITS = ("x[:, :1]", "x.mean()", "None", "'logits'", "{}", "()")


@pytest.mark.parametrize(
    ("settings", "source", "says"),
    [
        (AS_PART, PART.format("x[:, :1]"), r"returns \(., 1, 12\), and the model needs \(., ., 12"),
        (AS_PART, PART.format("x.repeat(1, 1, 2)"), r"returns \(., ., 24\), and .* \(., ., 12\)"),
        (AS_PART, PART.format("3"), "returns int, and the model needs"),
        (AS_PART, PART.format("None, x"), "returns NoneType, and the model needs"),
        (AS_PART, "def Mine(embed_dim, size): ...", "needs the argument size, which attnlm does"),
        (AS_PART, "def Mine(embed_dim): return 3", "returns int, not a module"),
        *((AS_MODEL, MODEL.format(x), r"Mine returns .*, and the model needs \(2, 9, 11\)")
          for x in NO_LOGITS),
    ],
)  # fmt: skip
def test_code_that_returns_what_does_not_fit_is_refused(
    settings: dict[str, Any], source: str, says: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(f"from torch import nn\n{source}")
    with pytest.raises(AttnlmError, match=says):
        build(tmp_path, **settings)(IDS_BT)


# --- Models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Logits", "Pair", "Flat", "Last", "Output"])
def test_each_form_of_logits_gives_the_cross_entropy(code: Path, name: str) -> None:
    model = build(code, model=f"models:{name}", block_size=9)
    assert isinstance(model, OwnLanguageModel)
    targets_BT = IDS_BT.roll(1)
    logits_BTV = build(code, model="models:Logits", block_size=9)(IDS_BT)
    assert torch.equal(model(IDS_BT), logits_BTV)
    assert torch.equal(model.next_logits(IDS_BT), logits_BTV[:, -1])
    assert_near(model(IDS_BT[:1, :1]), logits_BTV[:1, :1])
    loss = F.cross_entropy(logits_BTV.mT, targets_BT)
    assert_near(model.loss(IDS_BT, targets_BT), loss)
    if name in ("Pair", "Flat", "Last"):
        _, theirs = model.call(IDS_BT, targets_BT)
        assert_near(theirs, loss)


def test_a_function_builds_a_model_with_its_settings(code: Path) -> None:
    made = config(code, model="models:lecture", block_size=9, set={"width": "7"})
    assert made.settings() | {"set.width": 7, "block_size": 9} == made.settings()
    assert parameter_count(made.spec, V) == 7 * V + 9 * 7 + 7 * 7 + 7


@pytest.mark.parametrize(
    ("settings", "matrices"),
    [
        ({"model": "models:Logits"}, ["past.weight"]),
        ({"model": "models:Recurrent"}, ["cells.weight_ih_l0", "cells.weight_hh_l0"]),
        ({"attention": "parts:Head"}, [f"{m}.weight" for m in ("query", "key", "value", "mix")]),
    ],
)
def test_muon_gets_the_matrices_inside_a_model(
    code: Path, settings: dict[str, Any], matrices: list[str]
) -> None:
    model = build(code, **settings)
    names = [name for name, p in model.named_parameters() if model.is_matrix(name, p)]
    assert [name.partition("module.")[2] for name in names] == matrices


# --- Maps and costs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "shape"),
    [
        (
            {"attention": "parts:Head", "model": "transformer", "layers": 2, **SIZES},
            (2, 2, 2, 9, 9),
        ),
        ({"attention": "parts:Head", **SIZES}, (1, 2, 2, 9, 9)),
        ({"scores": "parts:ALiBi", **SIZES}, (1, 2, 2, 9, 9)),
        ({"attention": "parts:Fused", **PART_SIZES}, (1, 2, 1, 9, 9)),
    ],
)
def test_maps_are_seen_and_heads_silenced(
    code: Path, settings: dict[str, Any], shape: tuple[int, ...]
) -> None:
    model = build(code, **settings)
    recorded = record(model, IDS_BT)
    assert_near(recorded.logits, model(IDS_BT))
    assert recorded.maps.shape == shape
    assert_near(recorded.maps.sum(-1), torch.ones(shape[:-1]))
    assert not recorded.maps.triu(1).any()
    for layer, head in itertools.product(range(shape[0]), range(shape[2])):
        silent = record(model, IDS_BT, silence((layer, head)))
        assert (silent.logits - recorded.logits).abs().max() > 1e-4


def test_a_part_without_maps_has_none(code: Path) -> None:
    model = build(code, attention="parts:Convolution", **PART_SIZES)
    with pytest.raises(NotRecordedError):
        _ = record(model, IDS_BT).maps


@pytest.mark.parametrize("name", ["parts:Head", "parts:Fused"])
def test_the_measured_costs_are_those_that_pytorch_counts(code: Path, name: str) -> None:
    spec = config(code, attention=name, **PART_SIZES).spec
    model = spec.build(V).train()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.loss(IDS_BT[:1], IDS_BT[:1]).backward()
    assert spec.costs(V).training_flops == pytest.approx(counter.get_total_flops() / 9, abs=3)


def test_costs_are_measured_with_numbers_and_with_sparse_buffers(tmp_path: Path) -> None:
    """Memory that nobody wrote may hold NaN, of which torch.bernoulli draws nothing."""
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\n\nclass Part(nn.Module):\n"
        "    def __init__(self, embed_dim):\n        super().__init__()\n"
        "        self.g = nn.Linear(embed_dim, embed_dim)\n"
        "        same = torch.eye(embed_dim).to_sparse()\n"
        "        self.register_buffer('same', same, persistent=False)\n\n"
        "    def forward(self, x):\n        p = self.g(x).sigmoid()\n"
        "        if self.training:\n"
        "            p = torch.bernoulli(p.detach()) + p - p.detach()\n"
        "        return (self.same @ (x * p).flatten(0, 1).T).T.view_as(x)\n"
    )
    part = f"{tmp_path}/mine.py:Part"
    torch.use_deterministic_algorithms(True)  # writes NaN into such memory
    try:
        costs = resolve_new({"attention": part, **PART_SIZES}, None).config.spec.costs(V)
    finally:
        torch.use_deterministic_algorithms(False)
    assert costs.training_flops > 0
