"""Scores are what their formulas say, and find the heads of models that are built or trained to
have them; names keep to limits; a silenced head is missed."""

from __future__ import annotations

import json
import shutil
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import attnlm
from attnlm import AttnlmError, Dataset, Run, load_model, open_run
from attnlm.see import head_scores as see
from attnlm.see.head_scores import PATTERNS, repeated_random_tokens
from attnlm.see.heads import HeadsOverTraining, heads_over_training
from attnlm.training.validation import Split, validation_loss
from tests.kit import command, fails, quick_run
from tests.models import BUILT, CONTEXT, induction_by_hand, parts_of, prepared

N, H, T, V = 3, 2, 11, 4
NO_CHANCE = dict.fromkeys(PATTERNS, 0.0)


def spelled_out(a: Tensor, ids: Tensor) -> dict[str, float]:
    """The formulas of the docs, token by token, of one head (N, T, T)."""
    found: dict[str, list[float]] = {pattern: [] for pattern in PATTERNS}
    for n in range(len(ids)):
        x, w = ids[n].tolist(), a[n].tolist()
        for t in range(1, len(x)):
            past = range(t + 1)
            found["previous-token"].append(w[t][t - 1])
            found["first-token"].append(w[t][0])
            found["uniform"].append(sum(min(w[t][s], 1 / (t + 1)) for s in past))
            if x[t] in x[:t]:
                found["same-token"].append(sum(w[t][s] for s in past if x[s] == x[t]))
            after = [s for s in range(1, t) if x[s - 1] == x[t]]
            if after:
                found["induction"].append(sum(w[t][s] for s in after))
    return {pattern: float(np.mean(shares)) for pattern, shares in found.items()}


def test_scores_equal_their_formulas() -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(N, H, T, T, generator=generator) * 2
    later = torch.ones(T, T, dtype=torch.bool).triu(1)
    weights = torch.softmax(scores.masked_fill(later, -torch.inf), -1)
    ids = torch.randint(V, (N, T), generator=generator)
    sums_PH, counts_P = see.pattern_sums(weights, ids)
    for head, found_P in enumerate((sums_PH / counts_P[:, None]).T.tolist()):
        wanted = spelled_out(weights[:, head], ids)
        assert dict(zip(PATTERNS, found_P, strict=True)) == pytest.approx(wanted)


LEAST = dict.fromkeys(PATTERNS, see.LEAST_EXCESS) | {"uniform": see.LEAST_UNIFORM}
OFTEN = {"same-token": 0.4, "uniform": 1.0}
RARE = {"induction": 0.025, "same-token": 0.1}
ALIKE = {"same-token": 0.32, "previous-token": 0.3}


@pytest.mark.parametrize(
    ("scores", "chance", "others", "name"),
    [
        ({}, {}, {}, "mixed"),
        *(({pattern: LEAST[pattern]}, {}, {}, pattern) for pattern in PATTERNS),
        *(({pattern: LEAST[pattern] - 0.001}, {}, {}, "mixed") for pattern in PATTERNS),
        ({"uniform": 0.79, "first-token": 0.5}, {}, {}, "first-token"),
        ({"induction": 0.7, "first-token": 0.6}, {}, {}, "induction"),
        ({"induction": 0.9, "uniform": 0.8}, {}, {}, "induction"),
        # Beyond chance: a fifth of the attention that uniform attention gives elsewhere.
        ({"induction": 0.22}, RARE, {}, "induction"),
        ({"induction": 0.21}, RARE, {}, "mixed"),
        ({"same-token": 0.79}, OFTEN, {}, "mixed"),
        ({"same-token": 0.8}, OFTEN, {}, "same-token"),
        ({"same-token": 0.8, "induction": 0.68}, RARE | OFTEN, {}, "induction"),
        ({"uniform": 0.9}, OFTEN, {}, "uniform"),
        # Beyond the other heads, or most of the attention.
        ({"same-token": 0.39}, RARE, ALIKE, "mixed"),
        ({"same-token": 0.41}, RARE, ALIKE, "same-token"),
        ({"same-token": 0.39, "previous-token": 0.38}, RARE, ALIKE, "previous-token"),
        ({"same-token": 0.49}, RARE, {"same-token": 0.6}, "mixed"),
        ({"same-token": 0.5}, RARE, {"same-token": 0.6}, "same-token"),
    ],
)
def test_a_name_needs_a_score_above_chance_and_other_heads(
    scores: dict[str, float], chance: dict[str, float], others: dict[str, float], name: str
) -> None:
    assert see.choose_name(NO_CHANCE | scores, NO_CHANCE | chance, others) == name


@pytest.mark.parametrize("name", ["average", "multi-head", "transformer"])
def test_ablation_measures_the_loss_without_a_head(name: str, trained: Path) -> None:
    run = open_run(trained / "checkpoints" / name)
    report = attnlm.heads(run, windows=1000, ablate=True, device="cpu")
    model, _ = load_model(run, device="cpu")
    tokens = run.open_dataset().val
    whole = tokens[: report.windows * report.window + 1]
    assert (report.windows, report.window) == ((len(tokens) - 1) // 16, 16)
    assert report.loss == pytest.approx(
        validation_loss(model, Split(whole), run.config.training).loss, rel=1e-5
    )
    assert len(report.heads) == {"average": 1, "multi-head": 2, "transformer": 4}[name]
    for head in report.heads:
        assert head.loss_change is not None and abs(head.loss_change) > 1e-6
        assert all(0 <= score <= 1 + 1e-5 for score in head.scores.values())
    last = report.heads[-1]
    assert report.loss is not None and last.loss_change is not None
    parameters = dict(model.named_parameters())
    if name == "average":
        assert last.name == "uniform" and last.scores == pytest.approx(report.chance)
        assert "(induction: 8 random tokens" in report.measured_on
        # Without its only head the logits are the bias alone.
        bias = parameters["head.bias"].detach()
        targets = torch.from_numpy(np.asarray(whole[1:]).astype(np.int64))
        without = F.cross_entropy(bias.expand(len(targets), -1), targets).item()
    else:
        with torch.no_grad():
            value = [parameters[name] for name in parameters if name.endswith("value.weight")][-1]
            value[len(value) // 2 :] = 0
        without = validation_loss(model, Split(whole), run.config.training).loss
    assert last.loss_change == pytest.approx(without - report.loss, abs=1e-5 * report.loss)


def test_heads_prints_a_line_for_each_head(trained: Path) -> None:
    flags = ("heads", "multi-head", "--windows", 3, "--ablate")
    done = command(*flags, cwd=trained)
    titles, first, second, _ = done.stdout.splitlines()
    assert titles.split()[:5] == ["layer", "head", "name", "previous", "same"]
    windows = (open_run(trained / "checkpoints" / "multi-head").dataset.val_tokens - 1) // 16
    assert f"measured over 3 of {windows} windows of 16 tokens" in done.stderr
    facts = json.loads(command(*flags, "--json", cwd=trained).stdout)
    assert facts["windows"] == 3 and [head["head"] for head in facts["heads"]] == [1, 2]
    for line, head in zip((first, second), facts["heads"], strict=True):
        assert line.split()[-1] == f"{head['loss_change']:+z.4f}" and head["name"] in line
    whole = command(*flags[:3], windows, cwd=trained).stderr
    assert f"measured over all {windows} windows of 16 tokens" in whole


@pytest.mark.parametrize("change", [None, -1.5])
def test_the_table_of_heads_fits_80_columns(change: float | None, trained: Path) -> None:
    report = attnlm.heads(open_run(trained / "checkpoints" / "multi-head"), ablate=bool(change))
    named = [
        replace(report.heads[0], layer=99, head=head, name=name, loss_change=change)
        for head, name in enumerate((*PATTERNS, "mixed"), 98)
    ]
    lines = str(replace(report, heads=named)).splitlines()
    assert len(lines) == 1 + len(named) + 1 and len({len(line) for line in lines[:-1]}) == 1
    assert len(lines[0]) <= 80 and lines[-2].split()[:3] == ["100", "104", "mixed"]


def test_a_text_in_place_of_a_data_set_that_is_gone(trained: Path, tmp_path: Path) -> None:
    run = open_run(shutil.copytree(trained / "checkpoints" / "single-head", tmp_path / "run"))
    run = replace(run, dataset=replace(run.dataset, path=str(tmp_path / "gone"), name="gone"))
    with pytest.raises(AttnlmError) as raised:
        attnlm.heads(run)
    assert "`text`" in raised.value.hint
    text = tmp_path / "mine.txt"
    text.write_text("the fox jumps")
    report = attnlm.heads(run, text=text)
    assert (report.windows, report.window, report.loss) == (1, 12, None)
    text.write_text("th")
    with pytest.raises(AttnlmError, match="too short"):
        attnlm.heads(run, text=text)


def test_scores_over_training_are_shown_as_heat_maps(trained: Path) -> None:
    flags = ("heads", "tied", "--over-training")
    run = open_run(trained / "checkpoints" / "tied")
    found = heads_over_training(run)
    facts = {**found.facts(), "run": "checkpoints/tied"}
    assert json.loads(command(*flags, "--json", cwd=trained).stdout) == facts
    evaluated = [record["step"] for record in run.metrics()]
    assert found.steps == sorted({*evaluated, 1, 10}) and len(evaluated) == 11
    shown = command(*flags, cwd=trained).stdout
    assert shown == f"{found}\n" and max(map(len, shown.splitlines())) <= 80
    for number, pattern in enumerate(PATTERNS):
        title, *rows = shown.splitlines()[5 * number : 5 * number + 5]
        grid = found.grids[number]
        assert title.split() == [pattern, *grid.columns]
        at = [found.steps.index(int(step)) for step in grid.columns]
        wanted = found.scores[pattern][at, 1, 0]
        assert rows[2].split() == [*["layer", "2", "head", "1"], *(f"{x:.2f}" for x in wanted)]
    now = attnlm.heads(run, windows=3)
    assert [grid.values.shape for grid in now.grids] == [(2, 2)] * len(PATTERNS)


def test_a_table_shows_at_most_eleven_snapshots() -> None:
    scores = {"induction": (np.arange(40) / 40).astype(np.float32).reshape(40, 1, 1)}
    (grid,) = HeadsOverTraining("run", [10 * n for n in range(40)], scores).grids
    assert len(grid.columns) == 11 and (grid.columns[0], grid.columns[-1]) == ("0", "390")
    assert grid.values[0] == pytest.approx([int(step) / 400 for step in grid.columns])


def test_runs_without_scores_over_training_are_refused(trained: Path, tmp_path: Path) -> None:
    older = shutil.copytree(trained / "checkpoints" / "tied", tmp_path / "older")
    records = [json.loads(line) for line in (older / "ticker.jsonl").read_text().splitlines()]
    without = [json.dumps({**record, "scores": []}) for record in records]
    (older / "ticker.jsonl").write_text("".join(f"{line}\n" for line in without))
    missing = {"says": "no snapshots with scores", "hints": "--eval-every"}
    fails("heads", older, "--over-training", cwd=tmp_path, code=1, **missing)


NAMES = {place: "same-token" if kind == "current token" else kind for place, kind in BUILT.items()}


@pytest.fixture(name="built", scope="module")
def built_by_hand(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return induction_by_hand(dataset, tmp_path_factory.mktemp("built"))


@pytest.mark.parametrize("has_text", [True, False])
def test_scores_identify_exactly_the_built_heads(has_text: bool, built: Run) -> None:
    run = built if has_text else replace(built, imported_from="elsewhere")
    report = attnlm.heads(run, windows=8, device="cpu")
    random = f"{min(CONTEXT // 2, run.vocab_size)} random tokens, repeated once"
    assert random in report.measured_on and ("tokens (" in report.measured_on) == has_text
    for head in report.heads:
        wanted = NAMES.get((head.layer, head.head), "uniform")
        assert head.name == wanted
        assert head.scores[wanted] > 0.9
        for pattern in ("previous-token", "induction"):
            assert head.scores[pattern] > 0.9 or head.scores[pattern] < 0.2
            assert (head.scores[pattern] > 0.9) == (pattern == wanted)


def scores_of(map_TT: Tensor, ids_NT: Tensor) -> dict[str, float]:
    """Return the scores of a head with the same map in each window."""
    maps_NHTT = map_TT.expand(len(ids_NT), 1, -1, -1)
    sums_PH, counts_P = see.pattern_sums(maps_NHTT, ids_NT)
    return see.by_pattern((sums_PH[:, 0] / counts_P.clamp(min=1)).numpy())


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
def test_heads_with_partial_attention_to_a_target_are_named(share: float) -> None:
    """The rest of the attention is uniform. A query without a target attends to itself."""
    ids_NT = torch.from_numpy(repeated_random_tokens(26, 64, 8))
    length = ids_NT.size(1)
    places = torch.arange(length)
    targets = {
        "previous-token": (places - 1).clamp(min=0),
        "first-token": 0 * places,
        "same-token": places,
        "induction": torch.where(places < length // 2, places, places - length // 2 + 1),
    }
    uniform = torch.ones(length, length).tril()
    uniform /= uniform.sum(-1, keepdim=True)
    exact = {name: F.one_hot(target, length) for name, target in targets.items()}
    maps = {name: share * one + (1 - share) * uniform for name, one in exact.items()}
    scores = {name: scores_of(map_TT, ids_NT) for name, map_TT in maps.items()}
    scores["uniform"] = scores_of(uniform, ids_NT)
    for name in scores:
        others = [scores[other] for other in scores if other != name]
        medians = {p: float(np.median([other[p] for other in others])) for p in PATTERNS}
        assert see.choose_name(scores[name], scores["uniform"], medians) == name


def test_heads_of_a_model_trained_on_repeated_strings_are_named(tmp_path: Path) -> None:
    """Two layers of attention learn to continue what they have seen: a head of the first layer
    attends to the previous token, and one of the second to what followed the same token before."""
    random = np.random.default_rng(0)
    lengths = random.integers(6, 15, 2000)
    strings = ("".join(random.choice(list(string.ascii_lowercase), n)) for n in lengths)
    dataset = prepared(tmp_path, "".join(4 * letters + "\n" for letters in strings), "strings")
    sizes = {"embed_dim": 32, "heads": 2, "block_size": 32, "batch_size": 32, "eval_every": 100}
    model = "transformer:mlp=none:layers=2"
    fresh, run = (quick_run(dataset, model, **sizes, steps=steps) for steps in (1, 300))
    before, report = (attnlm.heads(one, windows=16, device="cpu") for one in (fresh, run))
    assert {head.name for head in before.heads} <= {"mixed", "uniform"}
    names = [head.name for head in report.heads]
    assert sorted(names[:2]) == ["mixed", "previous-token"]
    assert "induction" in names[2:] and set(names[2:]) <= {"induction", "mixed"}
    best = max(report.heads, key=lambda head: head.scores["induction"])
    assert 0.2 < best.scores["induction"] < 0.5  # most of the attention is elsewhere
    found = heads_over_training(run)
    assert found.steps == [0, 1, 3, 10, 30, 100, 200, 300]
    forming = found.scores["induction"][:, best.layer, best.head]
    assert max(forming[0], *found.scores["induction"][:, 0].ravel()) < 0.15
    assert forming[-1] == pytest.approx(best.scores["induction"], abs=0.1)
    assert forming[-1] > 2 * forming[0] and forming.argmax() > 0


def test_random_tokens_come_twice_and_no_two_are_alike() -> None:
    tokens = repeated_random_tokens(50_257, 1024, 4)
    assert tokens.shape == (4, 2 * see.REPEATED)
    np.testing.assert_array_equal(tokens[:, : see.REPEATED], tokens[:, see.REPEATED :])
    assert all(len(set(row)) == see.REPEATED for row in tokens.tolist())
    assert len(set(map(tuple, tokens.tolist()))) == 4 and tokens.max() > 40_000
    np.testing.assert_array_equal(tokens, repeated_random_tokens(50_257, 1024, 4))
    assert repeated_random_tokens(7, 64, 2).shape == (2, 14)
    assert repeated_random_tokens(65, 9, 2).shape == (2, 8)


def test_an_imported_run_needs_no_text(built: Run) -> None:
    imported = replace(built, imported_from="elsewhere")
    report = attnlm.heads(imported, windows=3)
    assert report.measured_on == f"3 windows of {CONTEXT // 2} random tokens, repeated once"
    with pytest.raises(AttnlmError, match="no text to measure a loss on"):
        attnlm.heads(imported, ablate=True)
    tiny: Any = replace(built.config, spec=replace(parts_of(built.config), block_size=1))
    with pytest.raises(AttnlmError, match="too short"):
        attnlm.heads(replace(imported, config=tiny))


DISTANT = """
import torch
from torch import nn


class Distant(nn.Module):
    def __init__(self, embed_dim, heads):
        super().__init__()
        self.rates = nn.Parameter(torch.rand(heads, 1, 1))
        self.heads = heads

    def forward(self, x):
        distance = torch.arange(x.size(1))[:, None] - torch.arange(x.size(1))
        scores = (-self.rates * distance).masked_fill(distance < 0, -torch.inf)
        values = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return (torch.softmax(scores, -1) @ values).transpose(1, 2).flatten(2)
"""


def test_heads_with_one_map_for_all_texts_are_counted(tmp_path: Path) -> None:
    """Of four texts, the maps (H, T, T) of four heads could be those of one head in each."""
    (tmp_path / "own.py").write_text(DISTANT)
    own = {"attention": f"{tmp_path}/own.py:Distant", "heads": 4, "embed_dim": 8}
    run = quick_run(prepared(tmp_path), "multi-head", **own, steps=1)
    report = attnlm.heads(run, windows=4, ablate=True)
    assert [(head.layer, head.head) for head in report.heads] == [(0, h) for h in range(4)]
