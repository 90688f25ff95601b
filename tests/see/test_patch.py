"""Patched activations: shares equal a plain loop with hooks, and find the heads of a model that is
built to have them; what differs in a model from outside, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import attnlm
from attnlm import AttnlmError, Dataset, Run, load_model
from attnlm.model.language_model import Block, LanguageModel, Transformer
from tests.kit import command, quick_run
from tests.models import BUILT, induction_by_hand, random_run
from tests.own_code import MODELS

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
    assert isinstance(model, Transformer) and found.answers == [("a", "s")]
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
    assert found.stream[-1, -1] == pytest.approx(1, abs=1e-5)
    if "attention=none" not in variant:
        assert np.abs(found.heads).max() > 0.01
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_patching_finds_exactly_the_two_heads_of_induction(
    dataset: Dataset, tmp_path: Path
) -> None:
    """The texts differ in the token before 1 and before 2, which the first head writes there, and
    with which the second compares the last token."""
    run = induction_by_hand(dataset, tmp_path)
    found = attnlm.patch(" p1r2 p", " r1p2 p", run)
    assert found.answers == [("1", "2")] and not found.mlp.size
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


def test_heads_of_a_whole_model_from_outside(dataset: Dataset) -> None:
    run = quick_run(dataset, f"{EXAMPLES / 'lecture.py'}:LectureModel")
    found = attnlm.patch(CLEAN, CORRUPTED, run, answers=("a", "s"))
    assert found.heads.shape == (1, 4) and not found.stream.size
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


def test_a_part_without_softmax_has_no_heads(dataset: Dataset) -> None:
    run = quick_run(dataset, "transformer:layers=2", attention="linear-attention")
    found = attnlm.patch(CLEAN, CORRUPTED, run, answers=("a", "s"))
    assert not found.heads.size
    assert found.attention.shape == found.mlp.shape == (2, len(CLEAN))


def test_a_recurrent_model_has_nothing_to_patch(dataset: Dataset, tmp_path: Path) -> None:
    (tmp_path / "recurrent.py").write_text(MODELS)
    run = quick_run(dataset, f"{tmp_path / 'recurrent.py'}:Recurrent")
    with pytest.raises(AttnlmError, match="nothing to patch"):
        attnlm.patch(CLEAN, CORRUPTED, run)


CLEANS = ["3 apples an", "7 apples an", "2 pears are"]
CORRUPTEDS = ["4 pears are", "7 pears are", "4 apples an"]
ANSWERS = [("a", "s"), ("s", "e"), ("3", "n")]


@pytest.mark.parametrize("tokens", [1, 50, 2**11])
def test_shares_of_pairs_compare_mean_differences(
    tokens: int, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnlm.see.patch._BATCH_TOKENS", tokens)
    run = random_run("transformer", dataset, tmp_path)
    events: list[Any] = []
    found = attnlm.patch(CLEANS, CORRUPTEDS, run, answers=ANSWERS, on_event=events.append)
    each = zip(CLEANS, CORRUPTEDS, ANSWERS, strict=True)
    alone = [attnlm.patch(clean, other, run, answers=pair) for clean, other, pair in each]
    assert found.answers == [one.answers[0] for one in alone] == ANSWERS
    whole = np.array([one.differences[0] - one.differences[1] for one in alone])
    means = np.mean([one.differences for one in alone], 0)
    assert found.differences == pytest.approx(tuple(means), abs=1e-5)
    for name in ("stream", "attention", "mlp", "heads"):
        shares = np.stack([getattr(one, name) for one in alone])
        wanted = np.tensordot(whole / whole.sum(), shares, 1)
        np.testing.assert_allclose(getattr(found, name), wanted, atol=1e-4, rtol=1e-4)
    assert "mean of 3" in found.compared
    names = [row.split()[1] for row in found.grids[0].rows]
    assert names[:2] == ["…", "␣"] and "…→…" not in names
    assert all(0 <= event.done < event.total for event in events)


def test_texts_and_answers_that_do_not_fit_are_refused(dataset: Dataset, tmp_path: Path) -> None:
    run = random_run("average", dataset, tmp_path)
    with pytest.raises(AttnlmError, match=r"7 and 1 tokens"):
        attnlm.patch([" p1r2 p", "a"], [" r1p2 p", "s"], run)
    with pytest.raises(AttnlmError, match="'an' has 2 tokens"):
        attnlm.patch("a", "s", run, answers=("an", "s"))
    with pytest.raises(AttnlmError, match="after both texts"):
        attnlm.patch("a", "s", run, answers=("e", "e"))


TEXTS = "the lazy dog", "the lazy fox"
WORDS = ("patch", *TEXTS, "tied", "--answers", "t", "x")


@pytest.fixture
def found(trained: Path) -> attnlm.Patching:
    run = attnlm.open_run("tied", checkpoint_dir=trained / "checkpoints")
    return attnlm.patch(*TEXTS, run, answers=("t", "x"))


def test_tables_of_words_and_of_numbers(found: attnlm.Patching, trained: Path) -> None:
    done = command(*WORDS, cwd=trained)
    assert done.stdout == f"{found}\n" and "logit of t − logit of x: " in done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == sum(1 + len(grid.rows) for grid in found.grids)
    assert lines[0].split() == ["residual", "stream", "embed", "1", "2"]
    assert lines[1].split() == ["9", "f→d", *(f"{share:z.2f}" for share in found.stream[:, 9])]
    facts = json.loads(command(*WORDS, "--json", cwd=trained).stdout)
    assert facts == json.loads(json.dumps({**found.facts(), "run": "checkpoints/tied"}))


def test_a_picture_names_the_tokens_that_differ(found: attnlm.Patching) -> None:
    svg = found.picture("svg").decode()
    assert all(grid.title in svg for grid in found.grids) and "d→f" not in svg
    assert svg.count("f→d") == 3  # residual stream, attention and MLP


HOOKS = {"stream": "hook_resid_post", "attention": "hook_attn_out", "mlp": "hook_mlp_out"}


def share_of(theirs: Any, run: Run, name: str, index: Any) -> float:
    """The share that an activation of TransformerLens brings back, of the mean difference."""
    found = []
    for *texts, (a, b) in zip(CLEANS, CORRUPTEDS, ANSWERS, strict=True):
        clean, corrupted = (torch.tensor([run.tokenizer.encode(text)]) for text in texts)
        _, cache = theirs.run_with_cache(clean)

        def patched(values: Tensor, hook: Any, cache: Any = cache) -> Tensor:
            values = values.clone()
            values[index] = cache[name][index]
            return values

        logits = [theirs(clean), theirs(corrupted)]
        logits.append(theirs.run_with_hooks(corrupted, fwd_hooks=[(name, patched)]))
        first, second = run.tokenizer.encode(a + b)
        found.append([float(one[0, -1, first] - one[0, -1, second]) for one in logits])
    full, none, d = np.mean(found, 0)
    return float((d - none) / (full - none))


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["transformer", "gpt2"])
@torch.no_grad()
def test_shares_equal_those_of_transformer_lens(
    variant: str, transformers: Any, dataset: Dataset, tmp_path: Path
) -> None:
    """`pip install torch transformer-lens pytest` in an environment of its own: the package pins
    versions of others. docs/import-export.md says what this test found."""
    lens = pytest.importorskip("transformer_lens.model_bridge", reason="no transformer-lens")
    run = random_run(variant, dataset, tmp_path)
    folder = attnlm.export(run, tmp_path / "exported").path
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    theirs = lens.TransformerBridge.boot_transformers(
        str(folder), hf_model=model, tokenizer=tokenizer, device="cpu", dtype=torch.float32
    )
    ours = attnlm.patch(CLEANS, CORRUPTEDS, run, answers=ANSWERS)
    for kind, hook in HOOKS.items():
        rows = getattr(ours, kind)
        for (layer, t), share in np.ndenumerate(rows[-2:]):  # without the embedding
            place = f"blocks.{layer}.{hook}", (0, t)
            assert share_of(theirs, run, *place) == pytest.approx(share, abs=1e-3), (kind, place)
    for (layer, head), share in np.ndenumerate(ours.heads):
        of_head = f"blocks.{layer}.attn.hook_z", (0, slice(None), head)
        assert share_of(theirs, run, *of_head) == pytest.approx(share, abs=1e-3), of_head
    assert np.abs(ours.heads).max() > 0.05
