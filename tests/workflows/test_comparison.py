"""What a comparison says: conclusions, what makes it unfair, its tables and its page."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from attnlm.base.setting_fields import fields_of
from attnlm.cli.compare import show_tables
from attnlm.model.architecture import MODELS
from attnlm.runs.run import Result, Run
from attnlm.see.comparison import _IDEAS, Comparison, Group
from attnlm.see.reproduce import ladder_command
from attnlm.workflows.compare import compare_groups
from tests.browser import PHONE, asks_for_nothing, check_fits, elements, opened, until
from tests.kit import terminal
from tests.models import WithoutCache
from tests.workflows.conftest import Ladders


@dataclass(frozen=True)
class Measured(Run):
    """A run with other results than those in its folder."""

    measured: Result | None = None

    def result(self) -> Result | None:
        return self.measured


def with_losses(climbed: Comparison, **losses: tuple[float, ...]) -> Comparison:
    """Return a ladder with these rungs and losses by seed. Each run took a minute."""
    first, result = climbed.groups[0].shown, climbed.groups[0].result
    best = replace(result.best, seconds=60.0)
    named: dict[str, list[Run]] = {}
    for model, of_seeds in losses.items():
        runs = named.setdefault(model.replace("_", "-"), [])
        for seed, loss in enumerate(of_seeds):
            about = {**vars(first), "config": first.config.with_training(seed=seed)}
            known = {name: about[name] for name in fields_of(Run)}
            records = [replace(best, val_loss=loss)]
            runs.append(Measured(**known, measured=replace(result, records=records, whole={})))
    assert climbed.plan is not None
    plan = replace(climbed.plan, seeds=max(map(len, losses.values())))
    found = compare_groups(named)
    return replace(found, plan=plan, path=climbed.path, command=climbed.command)


def page_of(found: Comparison, folder: Path) -> str:
    return " ".join(elements(found.save(folder / "page.html").read_bytes()).text.split())


# --- Conclusions ----------------------------------------------------------------------------------


def test_the_spread_between_seeds_decides_what_a_difference_is_worth(
    climbed: Comparison, tmp_path: Path
) -> None:
    losses = {
        "bigram": (2.4, 2.5, 2.6, 2.7, 2.8),
        "average": (2.3, 2.45, 2.55, 2.6, 2.75),
        "multi_head": (2.0, 2.1, 2.2, 2.21, 2.22),
    }
    found = with_losses(climbed, **losses)
    # The seeds overlap, but with the same seed, average is always better.
    header, rows = found.pair_table()
    by_hand = {
        ("average", "bigram"): ["better", "+0.0700", "0.0279 to 0.1121"],
        ("multi-head", "bigram"): ["better", "+0.4540", "0.3470 to 0.5610"],
        ("multi-head", "average"): ["better", "+0.3840", "0.2803 to 0.4877"],
    }
    assert {(row[0], row[1]): row[2:5] for row in rows} == by_hand
    assert found.verdict == (
        "the lowest validation loss is 2.1460, by multi-head; multi-head is better than bigram by "
        "0.4540; multi-head is better than average by 0.3840"
    )
    assert found._curves("tokens")[0].band == [(2.4, 2.8)]
    assert not found._curves("seconds")[0].band
    page = page_of(found, tmp_path)
    assert "Equal groups are called different in at most 5 of" in page
    assert all(cell in page for row in (header, *rows) for cell in row)


def test_a_difference_that_is_not_shown_comes_with_what_would_show_it(
    climbed: Comparison, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = {"bigram": (2.5, 2.6, 2.7), "average": (2.1, 2.2, 2.7), "single_head": (2.1, 2.2, 2.6)}
    found = with_losses(climbed, **losses)
    show_tables(found, sys.stderr)
    told = capsys.readouterr().err
    assert re.search(
        r"average +bigram +not shown +\+0\.2667 +−0\.3210 to 0\.8543 +0\.11 +9\n", told
    )
    pair = found.facts()["comparisons"][0]
    assert pair == {
        "groups": ("average", "bigram"),
        "difference": pytest.approx(4 / 15),
        "interval": pytest.approx((-0.3210, 0.8543), abs=1e-4),
        "verdict": "not shown",
        "seeds_needed": 9,
        "p": pytest.approx(0.1147, abs=1e-4),
        "paired": True,
    }
    two = with_losses(climbed, **dict([*losses.items()][:2]))
    assert two.pairs[0].seeds_needed == 8
    assert two.verdict.endswith(  # for five more of each
        "no difference is shown between average and bigram: 8 seeds would show one of 0.2667, in "
        "about 10 min more at the speed of these runs"
    )
    # One more of the second: of the first there are more than are needed.
    twenty = tuple(3.0 + 0.01 * i for i in range(20))
    unequal = with_losses(climbed, average=twenty, bigram=(3.3, 3.6, 3.4))
    assert "4 seeds would show one of 0.3383, in about 60 s more" in unequal.verdict


def test_one_seed_gives_no_verdict(climbed: Comparison) -> None:
    assert not climbed.pair_table()[1] and climbed.pairs[0].interval is None
    assert "with one run of each, a difference may be chance" in climbed.verdict
    assert climbed.groups[0].interval is None


def test_one_rung_with_several_seeds_has_a_mean_and_its_interval(climbed: Comparison) -> None:
    """The interval is the mean 2.5 ± 4.303 · 0.1 / √3: t of 2 degrees of freedom."""
    found = with_losses(climbed, bigram=(2.4, 2.5, 2.6))
    header, (row,) = found.table()
    shown = dict(zip(header, row, strict=True))
    assert (shown["validation loss"], shown["interval"]) == ("2.5000", "2.2516 to 2.7484")
    (group,) = found.facts()["groups"]
    assert group["mean"] == pytest.approx(2.5)
    assert group["mean_interval"] == pytest.approx((2.2516, 2.7484), abs=1e-4)
    assert not found.pairs and "may be chance" not in found.verdict


def test_groups_that_are_equal_up_to_rounding_are_the_same(climbed: Comparison) -> None:
    found = with_losses(climbed, bigram=(2.5, 2.6), average=(2.5, 2.60000002))
    assert "average is the same as bigram, up to rounding" in found.verdict


# --- What makes a comparison unfair ---------------------------------------------------------------


def test_unequal_settings_and_few_steps_are_warnings(climbed: Comparison) -> None:
    said = "\n".join(climbed.warnings)
    differs = "not only the model differs: learning rate is 0.1 in bigram, 0.03 in single-head"
    assert differs in said and "optimizer is adamw in bigram, muon in single-head" in said
    first, second = climbed.groups
    alone = replace(climbed, groups=(first,))
    assert not alone.warnings
    config = second.shown.config
    training = replace(config.training, batch_size=8, learning_rate=0.1, optimizer="adamw")
    other = replace(second.shown, config=replace(config, training=training))
    said = "\n".join(replace(climbed, groups=(first, replace(second, runs=(other,)))).warnings)
    assert "not equally large, in tokens: batch size is 32 in bigram, 8 in single-head" in said
    assert "not only the model differs" not in said


def test_groups_that_need_more_steps_to_rank_are_named(climbed: Comparison) -> None:
    """Such groups differ by less than their losses still fall."""
    first = climbed.groups[0]
    groups: list[Group] = []
    for model, losses in {
        "bigram": [4.0, 3.0, 2.7, 2.51, 2.50],
        "single-head": [4.0, 2.5, 1.9, 1.75, 1.70],
        "multi-head": [4.0, 2.5, 1.9, 1.80, 1.67],
        "wide-head": [4.0, 1.7, 1.6, 1.602, 1.601],
    }.items():
        records = [replace(first.result.best, val_loss=loss) for loss in losses]
        result = replace(first.result, records=records, whole={})
        groups.append(replace(first, name=model, results=(result,)))
    said = [one for one in replace(climbed, groups=tuple(groups)).warnings if "to rank" in one]
    assert said == [
        "too few steps to rank wide-head and multi-head: they are 0.070 apart, and a loss fell by "
        "0.130 over the last fifth of training",
        "too few steps to rank multi-head and single-head: they are 0.030 apart, and a loss fell "
        "by 0.130 over the last fifth of training",
    ]


# --- Names, tables and the page -------------------------------------------------------------------


def variants(climbed: Comparison, *models: str) -> Comparison:
    """A ladder of variants, which are the first rung by other names."""
    return replace(climbed, groups=tuple(replace(climbed.groups[0], name=m) for m in models))


VARIANTS = ("transformer", "transformer:positions=none", "transformer:mlp=gelu:norm=layer")


def test_long_names_fit_a_terminal(climbed: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = terminal(monkeypatch, 80)
    show_tables(variants(climbed, *VARIANTS, "transformer:query_key_norm=false"), sys.stderr)
    told = re.sub(r"\x1b\[[\d;]*m", "", shown.getvalue()).partition("baselines")[0]
    assert max(map(len, told.splitlines())) <= 80
    assert f"{climbed.groups[0].mean:.4f}" in told


def test_every_model_has_its_sentence(climbed: Comparison, tmp_path: Path) -> None:
    assert _IDEAS.keys() == set(MODELS)
    assert "A table in which the last token's row" in page_of(climbed, tmp_path)


def test_a_tuned_ladder_says_so_and_another_that_it_is_not(
    climbed: Comparison, tmp_path: Path
) -> None:
    assert climbed.plan is not None
    adapted = {"bigram": {"learning_rate": 0.2}}
    plan = replace(climbed.plan, tune=True, adapted=adapted)
    tuned = replace(climbed, plan=plan, command=ladder_command(plan))
    page = page_of(tuned, tmp_path)
    assert "Each rung has the best of five learning rates" in page
    assert "So the rungs have bigram: learning_rate 0.2." in page
    assert "--tune" in page and tuned.facts()["ladder"]["adapted"] == adapted
    assert not any("not only the model" in warning for warning in tuned.warnings)
    page = page_of(climbed, tmp_path)
    assert "may prefer another: --tune" in page and "So the rungs" not in page


def test_the_page_of_models_with_changed_classes_does_not_run_them(
    ladders: Ladders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnlm.model.language_model.SelfAttention", WithoutCache)
    page = ladders.train(tmp_path, steps=1).save(tmp_path / "page.html")
    found = elements(page.read_bytes())
    data = json.loads(found.scripts[0])
    assert "single-head" in found.text and not data["models"] and len(data["charts"]) == 2


def test_the_page_is_complete_and_loads_nothing(climbed: Comparison, tmp_path: Path) -> None:
    hostile = replace(climbed.groups[0], text="<script>alert(1)</script>")
    failed = Group("transformer:mlp=<b>", (), failed="its code raised ValueError: <i>")
    assert climbed.plan is not None
    plan = replace(climbed.plan, prompt="<b>&")
    others = replace(climbed, plan=plan, groups=(hostile, climbed.groups[1], failed))
    for ladder in (climbed, others):
        content = ladder.save(tmp_path / "page.html").read_bytes()
        asks_for_nothing(content)
        page, shown = content.decode(), elements(content).text
        assert page.count("<svg") == 2 and page.count("<style>") == 2
        assert "<script>alert" not in page
        assert ladder.plan is not None
        for words in (
            *(f"{rung.mean:.4f}" for rung in ladder.measured),
            *(f"{ladder.plan.prompt}{rung.text}" for rung in ladder.measured),
            *(rung.failed for rung in ladder.groups if rung.failed),
            *ladder.warnings,
        ):
            assert words in shown
        assert shown.rstrip().endswith(ladder.command)
        ids = re.findall(r'\bid="([^"]+)"', page)
        assert len(ids) == len(set(ids))


@pytest.mark.smoke
def test_models_can_be_tried_in_the_page(
    climbed: Comparison, browser: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with opened(browser, climbed.save(tmp_path / "page.html")) as view:
        names = view.evaluate("attnlm.models.map((model) => model.name)")
        assert names == ["bigram", "single-head"]
        assert view.input_value("#prompt") == "1 "
        view.locator("#models li").first.wait_for()
    monkeypatch.setattr("attnlm.see.model_page._MOST_TO_TRY", 1000)
    assert 'id="try"' not in climbed.save(tmp_path / "page.html").read_text(encoding="utf-8")


def test_the_page_in_a_real_browser(browser: Any, climbed: Comparison, tmp_path: Path) -> None:
    long = "gpt2:norm=rms:tie_embeddings=false:norm_epsilon=0.001:head_bias=true"
    page = variants(climbed, *VARIANTS, long).save(tmp_path / "index.html")
    check_fits(browser, page, "ladder")
    with opened(browser, page, viewport={"width": 1300, "height": 900}) as view:
        parts = (".verdict", ".pictures svg", "table", ".warnings")
        tops = [view.locator(part).first.bounding_box()["y"] for part in parts]
        assert tops == sorted(tops) and tops[1] < 300
        assert view.is_hidden(".warnings li")
    assert page.stat().st_size < 3_000_000
    with opened(browser, page, viewport=PHONE) as view:
        view.keyboard.press("Tab")
        assert view.evaluate("document.activeElement.hash") == "#try"
        view.keyboard.press("Tab")
        assert view.evaluate("document.activeElement.ariaLabel") == "Table of results"
        for cell in view.locator("table.blocks td").all():
            box = cell.bounding_box()
            assert box is None or box["x"] + box["width"] <= PHONE["width"]
        view.keyboard.press("ArrowRight")  # a region wider than the screen scrolls by keys
        moved = "(e => e.scrollLeft > 0 || e.scrollWidth <= e.clientWidth)(document.activeElement)"
        until(view, moved)
        right = "e => e.getBoundingClientRect().right"
        pictures = view.evaluate(
            f"[...document.querySelectorAll('.pictures svg')].map("
            f"svg => [svg, ...svg.querySelectorAll('text')].map({right}))"
        )
        assert pictures
        for end, *texts in pictures:
            assert max(texts, default=0) <= end <= PHONE["width"]
