"""What a ladder says: gains, verdicts, what makes it unfair, its table and its page."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnlm.cli.ladder import ladder_facts, say_table, say_texts
from attnlm.model.architecture import RUNGS
from attnlm.see.curves import panels_picture
from attnlm.see.ladder import Ladder, Rung
from attnlm.see.reproduce import ladder_command
from tests.browser import PHONE, asks_for_nothing, check_fits, elements, opened, until
from tests.kit import terminal
from tests.models import WithoutCache
from tests.workflows.conftest import Ladders


def with_losses(climbed: Ladder, **losses: float | tuple[float, ...]) -> Ladder:
    """Return a ladder with these rungs and losses, of one seed or several, in ascending order."""
    rungs, first, seeds = [], climbed.rungs[0], 1
    for model, found in losses.items():
        of_seeds = found if isinstance(found, tuple) else (found,)
        seeds = len(of_seeds)
        best = first.result.best
        results = [
            replace(first.result, records=[replace(best, val_loss=loss)]) for loss in of_seeds
        ]
        rungs.append(replace(first, model=model.replace("_", "-"), results=results))
    return replace(climbed, plan=replace(climbed.plan, seeds=seeds), rungs=tuple(rungs))


def nats(ladder: Ladder) -> list[float | None]:
    return [gain.nats if gain else None for gain in ladder.gains]


def test_gains_are_over_the_best_so_far(climbed: Ladder) -> None:
    first, second = (rung.loss for rung in climbed.rungs)
    assert nats(climbed) == [None, first - second]
    ladder = with_losses(climbed, bigram=2.5, average=3.25, single_head=2.25, multi_head=2.0)
    assert nats(ladder) == [None, -0.75, 0.25, 0.25]
    ladder = with_losses(climbed, bigram=2.5, average=2.50002)
    assert "-0.0000" not in ladder.write_page().read_text(encoding="utf-8")
    assert not any("loss rose" in warning for warning in ladder.warnings)


def test_each_rung_is_explained_with_its_gain(climbed: Ladder) -> None:
    losses = {"bigram": 2.5, "average": 3.25, "single_head": 2.25, "multi_head": 2.249}
    said = dict(with_losses(climbed, **losses).explained)
    assert list(said) == ["bigram", "average", "single-head", "multi-head"]
    assert said["bigram"].endswith("The others are compared with it.")
    assert "0.750 nats per token worse than bigram: the mean does not say" in said["average"]
    assert "0.250 nats per token better than bigram: it learns" in said["single-head"]
    assert said["multi-head"].endswith("As good as single-head after these steps.")
    every = with_losses(climbed, **{rung.replace("-", "_"): 2.0 for rung in RUNGS})
    assert len(dict(every.explained)) == len(RUNGS)


# --- Several seeds --------------------------------------------------------------------------------


def test_the_spread_between_seeds_decides_what_a_gain_is_worth(climbed: Ladder) -> None:
    losses = {
        "bigram": (2.4, 2.5, 2.6, 2.7, 2.8),
        "average": (2.3, 2.45, 2.55, 2.6, 2.75),
        "multi_head": (2.0, 2.1, 2.2, 2.21, 2.22),
    }
    ladder = with_losses(climbed, **losses)
    said = dict(ladder.explained)
    # The seeds overlap, but with the same seed, average is always better.
    better = "0.070 nats per token better than bigram (0.0279 to 0.1121): it sees more than"
    assert better in said["average"]
    assert "0.384 nats per token better than average (0.2803 to 0.4877): they" in said["multi-head"]
    assert ladder.curves("tokens")[0].band == [(2.4, 2.8)]
    assert not ladder.curves("seconds")[0].band
    page = " ".join(ladder.write_page().read_text(encoding="utf-8").split())
    assert "A band is from the lowest to the highest of 5 seeds" in page
    assert "A ladder of equal models claims a difference, better or worse, in at most 5 of" in page
    header, rows = ladder.verdicts()
    assert rows == [
        ["average", "bigram", "better", "+0.0700", "0.0279 to 0.1121", ""],
        ["multi-head", "bigram", "better", "+0.4540", "0.3470 to 0.5610", ""],
        ["multi-head", "average", "better", "+0.3840", "0.2803 to 0.4877", ""],
    ]
    shown = elements(page.encode()).text
    assert "Holm's method for several pairs, here 3." in " ".join(shown.split())
    assert all(cell in shown for row in (header, *rows) for cell in row)


def test_a_difference_that_is_not_shown_comes_with_the_seeds_to_show_it(
    climbed: Ladder, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = {"bigram": (2.5, 2.6, 2.7), "average": (2.1, 2.2, 2.7), "single_head": (2.1, 2.2, 2.6)}
    ladder = with_losses(climbed, **losses)
    assert (
        "Not shown to differ from bigram: the interval for the difference, −0.3210 to 0.8543 nats "
        "per token, includes 0; to show a difference of 0.2667 takes about 9 seeds."
    ) in dict(ladder.explained)["average"]
    say_table(ladder)
    told = capsys.readouterr().err
    assert re.search(r"average +bigram +not shown +\+0\.2667 +−0\.3210 to 0\.8543 +9\n", told)
    facts = ladder_facts(ladder)["pairs"]
    assert isinstance(facts, list) and len(facts) == 3
    assert facts[0] == {
        "rung": "average",
        "rival": "bigram",
        "difference": pytest.approx(4 / 15),
        "interval": pytest.approx((-0.3210, 0.8543), abs=1e-4),
        "verdict": "not shown",
        "seeds_needed": 9,
        "p": pytest.approx(0.1147, abs=1e-4),
        "paired": True,
    }
    assert climbed.certainty.startswith("with one seed the spread is unknown")
    assert not climbed.verdicts()[1] and climbed.pairs[0].interval is None


def test_one_rung_with_several_seeds_has_a_mean_and_its_interval(
    climbed: Ladder, capsys: pytest.CaptureFixture[str]
) -> None:
    """The interval is the mean 2.5 ± 4.303 · 0.1 / √3: t of 2 degrees of freedom."""
    ladder = with_losses(climbed, bigram=(2.4, 2.5, 2.6))
    say_table(ladder)
    told = capsys.readouterr().err
    assert "the mean of 3 seeds is 2.5000; its 95% interval, by Student's t, is 2.2516 to" in told
    rungs: Any = ladder_facts(ladder)["rungs"]
    assert rungs[0]["mean"] == pytest.approx(2.5)
    assert rungs[0]["interval"] == pytest.approx((2.2516, 2.7484), abs=1e-4)
    assert climbed.rungs[0].interval is None


# --- What makes a comparison unfair ---------------------------------------------------------------


def shortened(rung: Rung, **last: Any) -> Rung:
    """The rung without its last evaluation, or with only that one, changed."""
    records = [replace(rung.result.last, **last)] if last else rung.result.records[:-1]
    return replace(rung, results=[replace(rung.result, records=records)])


def test_unequal_settings_and_few_steps_are_warnings(climbed: Ladder) -> None:
    first, second = climbed.rungs
    said = "\n".join(climbed.warnings)
    assert "bigram (optimizer adamw, learning rate 0.1); single-head (optimizer muon" in said
    assert "equally wide" not in said
    assert "models learn next to nothing in so few steps: bigram made 6" in climbed.warnings
    assert "single-head made 4 steps, not 6" in (
        replace(climbed, rungs=(first, shortened(second))).warnings
    )
    alone = replace(climbed, rungs=(shortened(first, step=10),))
    assert not any("defaults" in one or "so few" in one for one in alone.warnings)


def test_rungs_that_need_more_steps_to_rank_are_named(climbed: Ladder) -> None:
    """Such rungs differ by less than their losses still fall."""
    best, rungs = climbed.rungs[0].result.best, []
    for model, losses in {
        "bigram": [4.0, 3.0, 2.7, 2.51, 2.50],
        "single-head": [4.0, 2.5, 1.9, 1.75, 1.70],
        "multi-head": [4.0, 2.5, 1.9, 1.80, 1.67],
        "wide-head": [4.0, 1.7, 1.6, 1.602, 1.601],
    }.items():
        records = [replace(best, val_loss=loss) for loss in losses]
        result = replace(climbed.rungs[0].result, records=records, whole={})
        rungs.append(replace(climbed.rungs[0], model=model, results=[result]))
    said = [one for one in replace(climbed, rungs=tuple(rungs)).warnings if "too few steps" in one]
    assert said == [
        "too few steps to rank single-head and multi-head: they are 0.030 apart, and a loss fell "
        "by 0.130 over the last fifth of training",
        "too few steps to rank multi-head and wide-head: they are 0.070 apart, and a loss fell "
        "by 0.130 over the last fifth of training",
    ]


# --- Names, the table and the page ----------------------------------------------------------------


def variants(climbed: Ladder, *models: str) -> Ladder:
    """A ladder of variants, which are the first rung by other names."""
    return replace(climbed, rungs=tuple(replace(climbed.rungs[0], model=m) for m in models))


VARIANTS = ("transformer", "transformer:positions=none", "transformer:mlp=gelu:norm=layer")


def test_variants_of_one_model_are_named_by_what_they_change(climbed: Ladder) -> None:
    labels = ["transformer", "…positions=none", "…mlp=gelu:norm=layer"]
    assert list(variants(climbed, *VARIANTS).labels.values()) == labels
    of_two = variants(climbed, *VARIANTS, "gpt2:positions=none").labels
    assert all(label == model for model, label in of_two.items())
    shown = elements(variants(climbed, *VARIANTS).write_page().read_bytes()).text
    assert "What each variant changes" in shown and "rung adds" not in shown


def test_long_names_fit_a_terminal_and_lines_of_a_text_end_with_signs(
    climbed: Ladder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say_texts(replace(climbed, rungs=(replace(climbed.rungs[0], text="one\ntwo"),)))
    assert capsys.readouterr().err.splitlines()[1] == "1 one⏎two"
    shown = terminal(monkeypatch, 80)
    say_table(variants(climbed, *VARIANTS, "transformer:query_key_norm=false"))
    told = re.sub(r"\x1b\[[\d;]*m", "", shown.getvalue()).partition("baselines")[0]
    assert max(map(len, told.splitlines())) <= 80
    for label in ("…positions=none ", "…mlp=gelu:norm=layer ", "…query_key_norm=false "):
        assert label in told


def test_a_tuned_ladder_says_what_it_tried_and_another_that_it_did_not(
    ladders: Ladders, climbed: Ladder
) -> None:
    tuned = ladders.whole("tuned")
    page = elements(tuned.write_page().read_bytes()).text
    assert "What tuning tried" in page and "Each rung has its best learning_rate of five" in page
    assert "--tune learning_rate" in ladder_command(tuned.plan)
    facts: Any = ladder_facts(tuned)
    assert facts["tune"] == "learning_rate"
    assert [set(trial) for trial in facts["trials"]] == 10 * [{"rung", "value", "loss", "steps"}]
    assert not any("defaults of each rung" in warning for warning in tuned.warnings)
    page = elements(climbed.write_page().read_bytes()).text
    assert "Each rung has its default learning rate, and may prefer another: --tune" in page


def test_the_page_of_models_with_changed_classes_does_not_run_them(
    ladders: Ladders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnlm.model.language_model.SelfAttention", WithoutCache)
    page = elements(ladders.train(tmp_path, steps=1).write_page().read_bytes())
    data = json.loads(page.scripts[0])
    assert "single-head" in page.text and not data["models"] and len(data["charts"]) == 2


def test_the_page_is_complete_and_loads_nothing(
    climbed: Ladder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnlm.see.ladder.panels_picture", panels_picture)
    hostile = replace(climbed.rungs[0], text="<script>alert(1)</script>")
    plan = replace(climbed.plan, prompt="<b>&")
    for ladder in (climbed, Ladder(climbed.path, plan, (hostile, climbed.rungs[1]))):
        picture = ladder.path / "curves.png"
        picture.unlink(missing_ok=True)
        content = ladder.write_page().read_bytes()
        assert picture.read_bytes().startswith(b"\x89PNG")
        asks_for_nothing(content)
        page, shown = content.decode(), elements(content).text
        assert page.count("<svg") == 2 and page.count("<style>") == 2
        assert "<script>alert" not in page and "What each rung adds" in page
        for words in (
            *(f"{rung.loss:.4f}" for rung in ladder.rungs),
            *(ladder.plan.prompt + rung.text for rung in ladder.rungs),
            *ladder.warnings,
            *(said for _, said in ladder.explained),
        ):
            assert words in shown
        assert shown.rstrip().endswith(ladder_command(ladder.plan))
        ids = re.findall(r'\bid="([^"]+)"', page)
        assert len(ids) == len(set(ids))


@pytest.mark.smoke
def test_rungs_can_be_tried_in_the_page(
    climbed: Ladder, browser: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(browser, climbed.write_page()) as view:
        names = view.evaluate("attnlm.models.map((model) => model.name)")
        assert names == ["bigram", "single-head"]
        assert view.input_value("#prompt") == "1 "
        view.locator("#models li").first.wait_for()
    monkeypatch.setattr("attnlm.see.model_page._MOST_TO_TRY", 1000)
    assert 'id="try"' not in climbed.write_page().read_text(encoding="utf-8")


def test_the_page_in_a_real_browser(browser: Any, climbed: Ladder, tmp_path: Path) -> None:
    page = tmp_path / "index.html"
    long = "gpt2:norm=rms:tie_embeddings=false:norm_epsilon=0.001:head_bias=true"
    page.write_bytes(variants(climbed, *VARIANTS, long).write_page().read_bytes())
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
        assert view.evaluate("document.activeElement.ariaLabel") == "Table of losses"
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
