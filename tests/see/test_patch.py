"""Patched activations: shares equal a plain loop with hooks, and find the heads of a model that is
built to have them; what differs in a model from outside, and what is refused."""

from __future__ import annotations

import json
import xml.etree.ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import attnlm
from attnlm.base.errors import AttnlmError
from attnlm.data.dataset import Dataset
from attnlm.model.language_model import Block, LanguageModel, Transformer
from attnlm.runs.load_model import load_model
from attnlm.runs.run import open_run
from attnlm.see.patch import in_colour, patch_page
from attnlm.see.pictures import patch_picture
from attnlm.see.text import tint
from tests.command import attnlm as command
from tests.command import fails, on_a_terminal
from tests.models import BUILT, induction_by_hand, random_run
from tests.own import MODELS, SMALL

CLEAN, CORRUPTED = "3 apples an", "4 pears are"
EXAMPLES = Path(__file__).parents[2] / "examples"


def replaced(
    model: LanguageModel, pair: Tensor, module: nn.Module, part: Any, *, before: bool = False
) -> Tensor:
    """The logits after the corrupted text, with a part of what a module reads or returns as it is
    in the clean text."""
    seen: list[Tensor] = []

    def hook(_: nn.Module, *arguments: Any) -> Tensor:
        values: Tensor = arguments[0][0] if before else arguments[1]
        seen.append(values.clone())
        changed = values.clone()
        changed[0][part] = seen[0][0][part]
        return changed

    register = nn.Module.register_forward_pre_hook if before else nn.Module.register_forward_hook
    handle = register(module, hook)
    logits: Tensor = [model(ids_1T)[0, -1] for ids_1T in pair.split(1)][1]
    handle.remove()
    return logits


def slowly(model: Transformer, pair: Tensor) -> Iterator[tuple[str, list[list[Tensor]]]]:
    """Patch one place after the other; yield the logits by kind, layer, and token or head."""
    tokens = range(pair.size(1))
    blocks = [block for block in model.blocks if isinstance(block, Block)]
    modules: dict[str, list[Any]] = {
        "stream": [model.dropout, *blocks],
        "attention": [block.attention for block in blocks if block.attention is not None],
        "mlp": [block.mlp for block in blocks if block.mlp is not None],
    }
    for name, ours in modules.items():
        yield name, [[replaced(model, pair, m, t) for t in tokens] for m in ours]
    heads = []
    for attention in modules["attention"]:
        if model.architecture.attention != "softmax":
            # One head, which is all of the attention.
            heads.append([replaced(model, pair, attention, slice(None))])
            continue
        size, is_read = attention.head_size, attention.projection is not None
        parts = [(slice(None), slice(h * size, (h + 1) * size)) for h in range(attention.heads)]
        module = attention.projection if is_read else attention
        heads.append([replaced(model, pair, module, part, before=is_read) for part in parts])
    yield "heads", heads


@pytest.mark.parametrize(
    "variant",
    [
        "transformer",
        "gpt2:kv_heads=2",
        "multi-head",
        "average",
        "llama:projection=false",
        "transformer:attention=none:positions=learned",
    ],
)
@torch.no_grad()
def test_shares_equal_a_plain_loop_with_hooks(
    variant: str, dataset: Dataset, tmp_path: Path
) -> None:
    run = random_run(variant, dataset, tmp_path)
    found = attnlm.patch(CLEAN, CORRUPTED, run, answers=("a", "s"))
    model, _ = load_model(run, device="cpu")
    assert isinstance(model, Transformer) and found.answers == ("a", "s")
    pair = torch.tensor([run.tokenizer.encode(text) for text in (CLEAN, CORRUPTED)])
    a, b = run.tokenizer.encode("as")

    def difference(logits_V: Tensor) -> float:
        return float(logits_V[a] - logits_V[b])

    full, none = (difference(model(pair)[n, -1]) for n in (0, 1))
    assert found.differences == pytest.approx((full, none), abs=1e-5)
    for name, logits in slowly(model, pair):
        wanted = [[(difference(one) - none) / (full - none) for one in row] for row in logits]
        shares = getattr(found, name)
        assert shares.shape == np.shape(wanted)[: shares.ndim] if wanted else not shares.size
        np.testing.assert_allclose(shares.ravel(), np.ravel(wanted), atol=1e-5, rtol=1e-5)
    last = found.stream[-1, -1]
    assert last == pytest.approx(1, abs=1e-5)
    assert np.abs(found.heads).max(initial=0) > 0.01 or variant.count("none")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_patching_finds_exactly_the_two_heads_of_induction(
    dataset: Dataset, tmp_path: Path
) -> None:
    """The texts differ in the token before 1 and before 2, which the first head writes there, and
    with which the second compares the last token."""
    run = induction_by_hand(dataset, tmp_path)
    found = attnlm.patch(" p1r2 p", " r1p2 p", run)
    assert found.answers == ("1", "2") and not found.missing and not found.mlp.size
    carrying = {(0, 1), (1, 0)}
    assert {BUILT[head] for head in carrying} == {"previous-token", "induction"}
    for head, share in np.ndenumerate(found.heads):
        assert share == pytest.approx(float(head in carrying), abs=1e-4)
    # What differs moves from the tokens before to the tokens after, and from there to the end.
    for row, tokens in enumerate([{1, 3}, {2, 4}, {6}]):
        assert set(np.flatnonzero(np.abs(found.stream[row]) > 1e-3)) == tokens
    assert set(np.flatnonzero(np.abs(found.attention[0]) > 1e-3)) == {2, 4}
    assert found.attention[1] == pytest.approx([0, 0, 0, 0, 0, 0, 1], abs=1e-4)
    bare = [" ".join(name.split()) for name in found.grids[0].rows]
    assert bare == ["1 r→p", "2 1", "3 p→r", "4 2", "5 ␣", "6 p"]


LECTURE = f"{EXAMPLES / 'lecture.py'}:LectureModel"
HEAD = f"{EXAMPLES / 'linear_attention.py'}:LinearAttention"


def test_heads_of_a_whole_model_from_outside(dataset: Dataset, project: Path) -> None:
    run = attnlm.train(dataset, model=LECTURE, **SMALL, checkpoint_dir=project / "checkpoints")
    found = attnlm.patch(CLEAN, CORRUPTED, run, answers=("a", "s"))
    assert found.heads.shape == (1, 4) and "only heads" in found.missing
    assert [grid.title for grid in found.grids] == ["heads"]
    model: Any = load_model(run, device="cpu")[0]
    pair = torch.tensor([run.tokenizer.encode(text) for text in (CLEAN, CORRUPTED)])
    a, b = run.tokenizer.encode("as")
    with torch.no_grad():
        logits = [replaced(model, pair, head, slice(None)) for head in model.module.heads]
        full, none = model(pair)[:, -1]
    full, *others = (float(one[a] - one[b] - none[a] + none[b]) for one in (full, *logits))
    np.testing.assert_allclose(found.heads[0], np.array(others) / full, atol=1e-4)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_part_without_softmax_has_no_heads(dataset: Dataset, project: Path) -> None:
    settings: dict[str, Any] = {**SMALL, "checkpoint_dir": project / "checkpoints"}
    run = attnlm.train(dataset, model="transformer", attention=HEAD, layers=2, **settings)
    found = attnlm.patch(CLEAN, CORRUPTED, run, answers=("a", "s"))
    assert "heads are not patched" in found.missing and not found.heads.size
    assert found.attention.shape == found.mlp.shape == (2, len(CLEAN))
    (project / "recurrent.py").write_text(MODELS)
    model = f"{project / 'recurrent.py'}:Recurrent"
    with pytest.raises(AttnlmError, match="nothing to patch"):
        attnlm.patch(CLEAN, CORRUPTED, attnlm.train(dataset, model=model, **settings))


# --- The command ----------------------------------------------------------------------------------

TEXTS = "the lazy dog", "the lazy fox"
ANSWERS = ("--answers", "t", "x")


@pytest.mark.parametrize("kind", ["png", "svg", "html"])
def test_a_map_of_each_kind_is_written(kind: str, trained: Path) -> None:
    name = f"patch.{kind.upper()}"
    done = command("patch", *TEXTS, "tied", *ANSWERS, "-o", name, "--json", cwd=trained)
    facts, content = json.loads(done.stdout), (trained / name).read_bytes()
    run = open_run("tied", checkpoint_dir=trained / "checkpoints")
    found = attnlm.patch(*TEXTS, run, answers=("t", "x"))
    assert facts == json.loads(json.dumps(found.facts())) | {"output": name}
    assert content == (patch_page(found) if kind == "html" else patch_picture(found, kind))
    text = content.decode(errors="replace")
    if kind == "svg":
        assert xml.etree.ElementTree.fromstring(text).tag.endswith("svg")
    if kind != "png":
        assert all(grid.title in text for grid in found.grids) and "d→f" not in text
        assert text.count("f→d") == 3  # residual stream, attention and MLP


def test_tables_of_words_and_of_colour(trained: Path) -> None:
    done = command("patch", *TEXTS, "--answers", "t", "x", cwd=trained)
    run = open_run(None, checkpoint_dir=trained / "checkpoints")
    found = attnlm.patch(*TEXTS, run, answers=("t", "x"))
    assert done.stdout == f"{found}\n" and "logit of t − logit of x: " in done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == sum(1 + len(grid.rows) for grid in found.grids)
    assert lines[0].split() == ["residual", "stream", "embed", "1", "2"]
    assert lines[1].split() == ["9", "f→d", *(f"{share:z.2f}" for share in found.stream[:, 9])]
    shown = on_a_terminal("patch", *TEXTS, *ANSWERS, cwd=trained)
    assert "\x1b[" in shown and "f→d" in shown
    (wide, narrow) = (list(in_colour(found, width).renderables) for width in (80, 20))
    share = found.stream[2, 11]
    assert share == pytest.approx(1, abs=1e-5) and tint(1.0) != tint(-1.0)
    for tables, has_numbers in ((wide, True), (narrow, False)):
        table: Any = tables[0]
        assert (" 1.00" in table.plain) == has_numbers
        assert table.spans[-1].style == tint(min(1.0, float(share)))


def test_patch_refuses_bad_arguments(trained: Path) -> None:
    for arguments, code, says, hints in [
        ([*TEXTS, "bigram"], 1, "a bigram has no layers", "single-head"),
        (["the", "quick", "tied"], 1, "the texts have 3 and 5 tokens", "as many"),
        (["the", "the", "tied"], 1, "after both texts", "--answers"),
        (["the", "the", "tied", *ANSWERS], 1, "after both texts", "differently"),
        (["the", "fox", "tied", "--answers", "t", "fox"], 2, "'fox' has 3 tokens", "one token"),
        (["the", "fox", "tied", "--answers", "t", "t"], 2, "are equal", "two tokens"),
        (["the", "", "tied"], 2, "empty", "at least one"),
        (["the" * 9, "fox" * 9, "tied"], 1, "27 tokens", "at most 16"),
        (["the", "fox", "-o", "map.pdf"], 2, "map.pdf", ".html or .png"),
    ]:
        fails("patch", *arguments, cwd=trained, code=code, says=says, hints=hints)
