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
from attnlm.config.new_run import resolve_new
from attnlm.config.settings import Config
from attnlm.model import own_modules
from attnlm.model.inspection import parameter_count
from attnlm.model.language_model import LanguageModel, OwnPart, Transformer
from attnlm.model.own_modules import OwnLanguageModel
from attnlm.model.own_specs import OwnParts
from attnlm.model.recorder import NotRecordedError, record

V = 11
SIZES: dict[str, Any] = {"embed_dim": 12, "heads": 2, "block_size": 9}
IDS_BT = torch.arange(18).view(2, 9) % V


def config(code: Path, **settings: Any) -> Config:
    """Resolve settings in which own code is called parts:NAME or models:NAME."""
    named = {
        k: f"{code / v.replace(':', '.py:')}" if isinstance(v, str) and ":" in v else v
        for k, v in settings.items()
    }
    return resolve_new(named, None).config


def build(code: Path, **settings: Any) -> LanguageModel:
    torch.manual_seed(0)
    return config(code, **settings).spec.build(V).eval()


def draw_head(model: LanguageModel) -> None:
    """Draw what begins as zeros, so that logits depend on all parameters."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.3)


# --- Parts ----------------------------------------------------------------------------------------

MODELS = ("single-head", "multi-head", "transformer", "gpt2", "llama", "qwen3")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["Fused", "Convolution"])
def test_attention_can_be_replaced_in_each_layer(code: Path, model: str, name: str) -> None:
    sizes = {k: v for k, v in SIZES.items() if k != "heads"}
    built = build(code, model=model, attention=f"parts:{name}", **sizes)
    assert isinstance(built, Transformer)
    parts = [block.attention for block in built.blocks]
    assert all(isinstance(part, OwnPart) for part in parts)
    assert len(parts) == built.architecture.layers
    if name == "Convolution":
        assert [part.module.layer for part in parts] == list(range(len(parts)))  # type: ignore
    draw_head(built)
    logits = built(IDS_BT)
    assert logits.shape == (2, 9, V)
    loss = F.cross_entropy(logits.mT, IDS_BT)
    assert built.loss(IDS_BT, IDS_BT).item() == pytest.approx(loss.item(), abs=1e-5)
    built.loss(IDS_BT, IDS_BT).backward()
    assert all(p.grad is not None and p.grad.any() for p in built.parameters())


def test_a_part_gets_the_sizes_that_it_names(code: Path) -> None:
    spec = config(code, attention="parts:Head", model="transformer", **SIZES).spec
    assert isinstance(spec, OwnParts)
    for layer in range(spec.architecture.layers):
        module = spec.make_module("attention", layer)
        assert (module.heads, module.query.in_features, module.mask.shape) == (2, 12, (9, 9))
    with pytest.raises(UsageError, match=r"`heads` has no effect: parts.py:Fused has no argument"):
        config(code, attention="parts:Fused", **SIZES)


def test_the_scores_know_their_heads_size_and_layer(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\nclass Scores(nn.Module):\n"
        "    def __init__(self, *, embed_dim, heads, block_size, layer, head_size):\n"
        "        super().__init__()\n"
        "        self.given = embed_dim, heads, block_size, layer, head_size\n"
        "    def forward(self, q, k): return q @ k.mT\n"
    )
    settings = {"model": "transformer", "scores": f"{tmp_path}/mine.py:Scores", **SIZES}
    built = resolve_new({**settings, "head_size": 4, "layers": 2}, None).config.spec.build(V)
    given = [block.attention.scores.module.given for block in built.blocks]  # type: ignore
    assert given == [(12, 2, 9, 0, 4), (12, 2, 9, 1, 4)]


def test_an_mlp_can_be_replaced(code: Path) -> None:
    built = build(code, model="transformer", mlp="parts:Gate", layers=2, **SIZES)
    plain = build(code, model="transformer", layers=2, **SIZES)
    assert [type(b.mlp.module).__name__ for b in built.blocks] == ["Gate", "Gate"]  # type: ignore
    assert [type(b.attention) for b in built.blocks] == [type(b.attention) for b in plain.blocks]  # type: ignore
    draw_head(built)
    assert built(IDS_BT).shape == (2, 9, V)
    with pytest.raises(UsageError, match="multi-head has no mlp that mlp of your own"):
        config(code, model="multi-head", mlp="parts:Gate")


def test_attention_and_mlp_can_be_replaced_together(code: Path) -> None:
    both = {"attention": "parts:Head", "mlp": "parts:Gate"}
    spec = config(code, model="transformer", **both, **SIZES, set={"start": 3}).spec
    assert spec.name == "transformer-Head-Gate"
    assert spec.settings()["set.start"] == 3.0
    with pytest.raises(UsageError, match="cannot both be your own"):
        config(code, model="transformer", attention="parts:Head", scores="parts:Scores")


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
    settings = {"model": model, "embed_dim": 12, "block_size": 9, **more}
    ours, theirs = build(code, **settings), build(code, **settings, scores="parts:Scores")
    draw_head(ours)
    theirs.load_state_dict(ours.state_dict())
    assert ours(IDS_BT).std() > 0.01
    assert (theirs(IDS_BT) - ours(IDS_BT)).abs().max() < 1e-5
    maps = [record(m, IDS_BT).maps for m in (ours, theirs)]
    assert (maps[0] - maps[1]).abs().max() < 1e-6


def test_scores_of_the_users_take_effect(code: Path) -> None:
    settings = {"model": "multi-head", **SIZES}
    ours, theirs = build(code, **settings), build(code, **settings, scores="parts:ALiBi")
    draw_head(ours)
    theirs.load_state_dict(ours.state_dict())
    assert (theirs(IDS_BT) - ours(IDS_BT)).abs().max() > 1e-3
    assert torch.allclose(theirs(IDS_BT[:, :4]), theirs(IDS_BT)[:, :4], atol=1e-5)


def test_a_rung_takes_another_width_and_a_transformer_does_not(code: Path) -> None:
    sizes = {"embed_dim": 12, "block_size": 9, "attention": "parts:Wide"}
    built = build(code, model="multi-head", **sizes)
    assert built.head.in_features == 24  # type: ignore[union-attr]
    assert built(IDS_BT).shape == (2, 9, V)
    tripled = build(code, model="single-head", **sizes, set={"times": 3})
    assert tripled.head.in_features == 36  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="makes 24 features of 12, and the residual stream"):
        build(code, model="transformer", **sizes)
    assert build(code, model="transformer", **sizes, set={"times": 1})(IDS_BT).shape == (2, 9, V)


@pytest.mark.parametrize("model", MODELS)
def test_positions_can_be_left_out_of_each_model(code: Path, model: str) -> None:
    sizes = {"embed_dim": 12, "block_size": 9, "positions": "none"}
    for part in ({"attention": "parts:Wide", "set": {"times": 1}}, {"scores": "parts:Scores"}):
        built = build(code, model=model, **sizes, **part)
        assert built.position_embedding is None
        draw_head(built)
        if "attention" in part:  # each token by itself
            same = built(torch.full((1, 9), 3))
            assert torch.allclose(same, same[:, :1].expand_as(same), atol=1e-5)
    assert config(code, model=model, **sizes, **part).settings()["positions"] == "none"
    with pytest.raises(UsageError, match="turns queries and keys"):
        config(code, model="llama", attention="parts:Fused", positions="rotary")


def test_arguments_are_settings_of_their_defaults_types(code: Path) -> None:
    def given(**values: Any) -> dict[str, Any]:
        settings = config(code, attention="parts:Head", **SIZES, set=values).settings()
        return {k: v for k, v in settings.items() if k.startswith("set.")}

    usual = {"set.start": 1.0, "set.dropout": 0.0, "set.name": "plain"}
    assert given() == usual
    assert given(start="2", name="x") == {**usual, "set.start": 2.0, "set.name": "x"}
    assert given(start=2) == {**usual, "set.start": 2.0}
    start: Any
    for start in ("two", True, None, [1], {}, "nan", "inf", math.inf, 10**400):
        with pytest.raises(UsageError, match="invalid value for"):
            given(start=start)
    for wrong in ({"name": 3}, {"a b": 1}, {"\n": 1}, {"": 1}):
        with pytest.raises(UsageError, match="invalid value for"):
            given(**wrong)
    with pytest.raises(UsageError, match="no argument 'strat'") as refused:
        given(strat=1)
    assert "start" in str(refused.value.hint)
    with pytest.raises(UsageError, match="`set` must be a dictionary"):
        config(code, attention="parts:Head", set=[1])


@pytest.mark.parametrize(
    ("forward", "says"),
    [
        ("return x[:, :1]", r"returns \(2, 1, 12\), and the model needs \(2, 9, 12\)"),
        ("return 3", "returns int, and the model needs"),
        ("return None, x", "returns NoneType, and the model needs"),
    ],
)
def test_a_wrong_shape_is_refused(tmp_path: Path, forward: str, says: str) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\nclass A(nn.Module):\n    def __init__(self, embed_dim):\n"
        f"        super().__init__()\n    def forward(self, x):\n        {forward}\n"
    )
    with pytest.raises(AttnlmError, match=says.replace("2, ", "., ").replace("9, ", "., ")):
        resolve_new(
            {"attention": f"{tmp_path}/mine.py:A", "embed_dim": 12, "block_size": 9}, None
        ).config.spec.build(V)(IDS_BT)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def A(embed_dim, size): ...", "needs the argument size, which attnlm does not give"),
        ("def A(embed_dim): return 3", "returns int, not a module"),
    ],
)
def test_code_that_makes_no_module_is_refused(tmp_path: Path, source: str, says: str) -> None:
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(AttnlmError, match=says):
        resolve_new({"attention": f"{tmp_path}/mine.py:A"}, None).config.spec.build(V)


# --- Models ---------------------------------------------------------------------------------------

FORMS = ("Logits", "Pair", "Flat", "Last", "Output")


@pytest.mark.parametrize("name", FORMS)
def test_each_form_of_logits_gives_the_cross_entropy(code: Path, name: str) -> None:
    model = build(code, model=f"models:{name}", block_size=9)
    assert isinstance(model, OwnLanguageModel)
    targets_BT = IDS_BT.roll(1)
    plain = build(code, model="models:Logits", block_size=9)
    logits_BTV = plain(IDS_BT)
    assert torch.equal(model(IDS_BT), logits_BTV)
    assert torch.equal(model.next_logits(IDS_BT), logits_BTV[:, -1])
    loss = F.cross_entropy(logits_BTV.mT, targets_BT)
    assert model.loss(IDS_BT, targets_BT).item() == pytest.approx(loss.item(), abs=1e-6)
    assert torch.equal(model(IDS_BT[:1, :1]), plain(IDS_BT[:1, :1]))
    if name in ("Pair", "Flat", "Last"):
        _, theirs = model.call(IDS_BT, targets_BT)
        assert theirs.item() == pytest.approx(loss.item(), abs=1e-6)


def test_a_function_builds_a_model_with_its_settings(code: Path) -> None:
    made = config(code, model="models:lecture", block_size=9, set={"width": "7"})
    assert made.settings() | {"set.width": 7, "block_size": 9} == made.settings()
    assert parameter_count(made.spec, V) == 7 * V + 9 * 7 + 7 * 7 + 7
    with pytest.raises(UsageError, match=r"`heads` does not apply to models.py:lecture"):
        config(code, model="models:lecture", heads=2)


@pytest.mark.parametrize("returned", ["x[:, :1]", "x.mean()", "None", "'logits'", "{}", "()"])
def test_a_model_that_gives_no_logits_is_refused(tmp_path: Path, returned: str) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\nclass A(nn.Module):\n    def __init__(self, vocab_size):\n"
        "        super().__init__()\n        self.t = nn.Embedding(vocab_size, vocab_size)\n"
        f"    def forward(self, ids):\n        x = self.t(ids)\n        return {returned}\n"
    )
    model = resolve_new({"model": f"{tmp_path}/mine.py:A"}, None).config.spec.build(V)
    with pytest.raises(
        AttnlmError, match=r"mine.py:A returns .*, and the model needs \(2, 9, 11\)"
    ):
        model(IDS_BT)


def test_muon_gets_the_matrices_inside_a_model(code: Path) -> None:
    def matrices(**settings: Any) -> set[str]:
        model = build(code, **settings)
        return {n for n, p in model.named_parameters() if model.is_matrix(n, p)}

    assert matrices(model="models:Logits") == {"module.past.weight"}
    cells = {"module.cells.weight_ih_l0", "module.cells.weight_hh_l0"}
    assert matrices(model="models:Recurrent") == cells
    names = ("query", "key", "value", "mix")
    of_part = {f"blocks.0.attention.module.{name}.weight" for name in names}
    assert matrices(attention="parts:Head", **SIZES) == of_part


# --- Maps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "shape"),
    [
        ({"attention": "parts:Head", "model": "transformer", "layers": 2}, (2, 2, 2, 9, 9)),
        ({"attention": "parts:Head"}, (1, 2, 2, 9, 9)),
        ({"scores": "parts:ALiBi"}, (1, 2, 2, 9, 9)),
        ({"attention": "parts:Fused", "heads": None}, (1, 2, 1, 9, 9)),
    ],
)
def test_maps_are_seen_and_heads_silenced(
    code: Path, settings: dict[str, Any], shape: tuple[int, ...]
) -> None:
    given = {k: v for k, v in {**SIZES, **settings}.items() if v is not None}
    model = build(code, **given)
    draw_head(model)
    recorded = record(model, IDS_BT)
    assert (recorded.logits - model(IDS_BT)).abs().max() < 1e-6
    assert recorded.maps.shape == shape
    assert torch.allclose(recorded.maps.sum(-1), torch.ones(()), atol=1e-5)
    assert not recorded.maps.triu(1).any()
    for layer, head in itertools.product(range(shape[0]), range(shape[2])):
        silent = record(model, IDS_BT, silenced=(layer, head))
        assert (silent.logits - recorded.logits).abs().max() > 1e-4


def test_a_part_without_maps_has_none(code: Path) -> None:
    model = build(code, attention="parts:Convolution", embed_dim=12, block_size=9)
    with pytest.raises(NotRecordedError):
        _ = record(model, IDS_BT).maps


# --- Costs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["parts:Head", "parts:Fused"])
def test_the_measured_costs_are_those_that_pytorch_counts(code: Path, name: str) -> None:
    spec = config(code, attention=name, embed_dim=12, block_size=9).spec
    model = spec.build(V).train()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.loss(IDS_BT[:1], IDS_BT[:1]).backward()
    assert spec.costs(V).training_flops == pytest.approx(counter.get_total_flops() / 9, abs=3)
    on_meta = own_modules._costs_on("meta", spec, V)
    assert on_meta == own_modules._costs_on("cpu", spec, V)
