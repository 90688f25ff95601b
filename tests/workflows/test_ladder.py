"""The ladder: rungs trained alike, what is not like for like, going on, and its page."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import attnlm
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import Note
from attnlm.base.files import read_json, write_json
from attnlm.base.signals import Interrupted
from attnlm.cli.ladder import ladder_facts, say_table, say_texts
from attnlm.data.dataset import Dataset
from attnlm.model.architecture import RUNGS
from attnlm.runs.ladder_plan import read_plan
from attnlm.runs.run import Run, open_run
from attnlm.see.ladder import Ladder
from attnlm.see.ladder_page import explain_rungs, loss_curves
from attnlm.see.reproduce import ladder_command
from attnlm.training.events import Evaluated, Started
from attnlm.training.step import StepNotFiniteError
from attnlm.workflows.answers import select_pairs
from attnlm.workflows.ladder import LadderStarted
from attnlm.workflows.ladder import ladder as train_ladder
from attnlm.workflows.train import train
from tests import own_code
from tests.browser import PHONE, asks_for_nothing, check_fits, elements, opened, until
from tests.kit import ATTNLM, Clock, terminal
from tests.models import FRUITS, Tempered, prepared, timeless

SMALL: dict[str, Any] = {"rungs": ("bigram", "single-head"), "steps": 6, "eval_every": 2}
SMALL |= {"seed": 1, "prompt": "1 ", "tokens": 20}


@pytest.fixture(scope="module")
def climbed(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Ladder:
    return train_ladder(dataset.path, checkpoint_dir=tmp_path_factory.mktemp("runs"), **SMALL)


def facts(ladder: Ladder) -> list[Any]:
    return [(rung.text, timeless(rung.run.path)) for rung in ladder.rungs]


def test_rungs_are_ordinary_runs_trained_alike(climbed: Ladder, dataset: Dataset) -> None:
    assert climbed.path.name == "ladder-001"
    assert repr(climbed).startswith("<Ladder 'ladder-001': bigram ")
    assert [rung.model for rung in climbed.rungs] == ["bigram", "single-head"]
    for rung in climbed.rungs:
        run = open_run(climbed.path.with_name(f"ladder-001-{rung.model}"))
        config = run.config
        assert (config.spec.block_size, config.training.batch_size) == (64, 32)
        assert (config.training.steps, config.training.seed) == (6, 1)
        assert [record.step for record in rung.result.records] == [0, 2, 4, 6]
        assert rung.result.last.tokens == 6 * 32 * 64
        measured = attnlm.evaluate(run, data_dir=dataset.path.parent)
        assert measured.loss == pytest.approx(rung.loss)
        said = attnlm.sample(run, prompt="1 ", tokens=20, seed=1)
        assert "".join(said) == "1 " + rung.text


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


def test_losses_are_of_the_whole_split_where_all_rungs_were_measured_on_it(
    dataset: Dataset, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"steps": 20, "eval_every": 10, "eval_tokens": 64, "seed": 1}
    climbed = train_ladder(dataset, rungs=("bigram", "average"), checkpoint_dir=tmp_path, **given)
    for rung in climbed.rungs:
        found = attnlm.evaluate(rung.run, device="cpu", data=dataset)
        assert rung.loss == found.loss != rung.result.last.val_loss
        assert rung.result.part == ""
        assert replace(rung.result, whole={}).part.startswith("64 of")


def test_each_rung_is_explained_with_its_gain(climbed: Ladder) -> None:
    losses = {"bigram": 2.5, "average": 3.25, "single_head": 2.25, "multi_head": 2.249}
    said = dict(explain_rungs(with_losses(climbed, **losses)))
    assert list(said) == ["bigram", "average", "single-head", "multi-head"]
    assert said["bigram"].endswith("The others are compared with it.")
    assert "0.750 nats per token worse than bigram: the mean does not say" in said["average"]
    assert "0.250 nats per token better than bigram: it learns" in said["single-head"]
    assert said["multi-head"].endswith("As good as single-head after these steps.")
    every = with_losses(climbed, **{rung.replace("-", "_"): 2.0 for rung in RUNGS})
    assert len(dict(explain_rungs(every))) == len(RUNGS)


def test_the_page_of_models_with_changed_classes_does_not_run_them(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnlm.model.language_model.SelfAttention", Tempered)
    ladder = train_ladder(dataset.path, checkpoint_dir=tmp_path, **SMALL)
    page = elements(ladder.write_page().read_bytes())
    assert "single-head" in page.text and not page.scripts


def test_a_preset_that_is_in_no_other_table_makes_a_ladder(
    dataset: Dataset, tmp_path: Path
) -> None:
    """Add the presets to a copy of the source, as a contributor would."""
    shutil.copytree(Path(attnlm.__file__).parent, tmp_path / "attnlm")
    models = ('"llama", "qwen3",\n', '"llama", "qwen3", "bare", "deep",\n')
    of_bare = 'Preset({**_ONE_LAYER, "heads": 2}, ("embed_dim", "block_size", "heads"))'
    of_deep = 'Preset({**_TRANSFORMER, "layers": 1}, _ALL_PARTS)'
    presets = f'PRESETS |= {{"bare": {of_bare}, "deep": {of_deep}}}\n\n\ndef architecture('
    for name, added in (("architecture", models), ("presets", ("def architecture(", presets))):
        path = tmp_path / "attnlm" / "model" / f"{name}.py"
        path.write_text(path.read_text(encoding="utf-8").replace(*added), encoding="utf-8")
    flags = ("--rungs", "bigram,bare,deep,deep:layers=2", "--steps", "2", "--seed", "1", "--json")
    done = subprocess.run(
        [*ATTNLM, "ladder", str(dataset.path), *flags],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rungs = json.loads(done.stdout)["rungs"]
    assert [rung["model"] for rung in rungs] == ["bigram", "bare", "deep", "deep:layers=2"]
    page = elements((tmp_path / "checkpoints" / "ladder-001" / "index.html").read_bytes())
    assert "The model bare." in page.text and "deep with layers 2" in page.text
    dots = {found["style"] for name, found in page.found if found.get("class") == "dot"}
    assert len(dots) == 4
    rates = [
        read_json(tmp_path / rung["run"] / "config.json")["config"]["learning_rate"]
        for rung in rungs
    ]
    assert rates[1:3] == [0.03, 0.02]  # multi-head and transformer


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
    assert "What each rung adds" in climbed.write_page().read_text(encoding="utf-8")


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


def test_unequal_settings_are_reported(climbed: Ladder) -> None:
    said = "\n".join(climbed.warnings)
    assert "the defaults of each rung: bigram adamw 0.1; single-head muon 0.03" in said
    assert "equally wide" not in said
    result = climbed.rungs[1].result
    stopped = replace(climbed.rungs[1], results=[replace(result, records=result.records[:-1])])
    shorter = replace(climbed, rungs=(climbed.rungs[0], stopped))
    assert "single-head made 4 steps, not 6" in shorter.warnings
    alike = replace(climbed, rungs=(climbed.rungs[0],))
    assert not any("defaults" in warning for warning in alike.warnings)


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


def test_a_ladder_of_questions_shows_an_answer_to_one_of_them(tmp_path: Path) -> None:
    task = attnlm.prepare("copy", examples=40, data_dir=tmp_path)
    options: dict[str, Any] = {"steps": 2, "seed": 1, "checkpoint_dir": tmp_path / "runs"}
    climbed = train_ladder(task, rungs=["bigram", "single-head"], **options)
    question, _ = select_pairs(task, 1)[0]
    assert climbed.plan.prompt == question + "="
    for rung in climbed.rungs:
        assert [rung.text] == attnlm.generate(rung.run, [question], tokens=200)


def test_a_ladder_of_few_steps_warns(climbed: Ladder) -> None:
    said = "models learn next to nothing in so few steps: bigram made 6"
    assert said in climbed.warnings
    results = [replace(r, records=[replace(r.last, step=10)]) for r in climbed.rungs[0].results]
    rungs = tuple(replace(rung, results=results) for rung in climbed.rungs)
    assert not any("so few" in one for one in replace(climbed, rungs=rungs).warnings)


class StopAt:
    """A listener that interrupts us at an evaluation of a rung."""

    def __init__(self, rung: str, step: int) -> None:
        self.rung, self.step, self.now = rung, step, ""

    def __call__(self, event: object) -> None:
        if isinstance(event, Started):
            self.now = event.run.config.spec.name
        is_there = self.now == self.rung and isinstance(event, Evaluated)
        if is_there and getattr(event, "step", None) == self.step:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(("rung", "step"), [("bigram", 2), ("single-head", 0), ("single-head", 4)])
def test_a_stopped_ladder_resumes_after_its_finished_rungs(
    rung: str, step: int, climbed: Ladder, dataset: Dataset, tmp_path: Path
) -> None:
    folders: dict[str, Any] = {"checkpoint_dir": tmp_path, "data_dir": dataset.path.parent}
    with pytest.raises(Interrupted):
        train_ladder(dataset.path, name="mine", on_event=StopAt(rung, step), **folders, **SMALL)
    events: list[object] = []
    ours = train_ladder(resume="mine", on_event=events.append, **folders)
    assert facts(ours) == facts(climbed)
    first = next(event for event in events if isinstance(event, Started))
    assert (first.run.name, first.first_step) == (f"mine-{rung}", step)
    # And the same command once more has nothing left to train.
    events.clear()
    again = train_ladder(dataset.path, name="mine", on_event=events.append, **folders, **SMALL)
    assert facts(again) == facts(climbed)
    assert not any(isinstance(event, Started) for event in events)


def test_a_ladder_whose_data_were_moved_is_resumed_with_them(
    climbed: Ladder, dataset: Dataset, tmp_path: Path
) -> None:
    shutil.copytree(dataset.path, tmp_path / "data" / "old")
    with pytest.raises(Interrupted):
        old = attnlm.open_dataset(tmp_path / "data" / "old")
        train_ladder(old, name="m", on_event=StopAt("bigram", 2), checkpoint_dir=tmp_path, **SMALL)
    (tmp_path / "data").rename(tmp_path / "moved")
    new = (tmp_path / "moved" / "old").rename(tmp_path / "moved" / "new")
    ladder = train_ladder(new, resume="m", checkpoint_dir=tmp_path)
    assert [rung.losses for rung in ladder.rungs] == [rung.losses for rung in climbed.rungs]
    assert attnlm.evaluate(ladder.rungs[0].run, checkpoint="last").loss == ladder.rungs[0].loss


def test_a_resumed_ladder_keeps_its_plan(climbed: Ladder, dataset: Dataset, tmp_path: Path) -> None:
    folder = climbed.path.parent
    with pytest.raises(UsageError, match="`steps` cannot be changed"):
        train_ladder(resume="ladder-001", steps=7, checkpoint_dir=folder)
    with pytest.raises(UsageError, match="cannot be combined"):
        train_ladder(resume="ladder-001", name="other", checkpoint_dir=folder)
    with pytest.raises(AttnlmError, match="ladder 'nothing' not found"):
        train_ladder(resume="nothing", checkpoint_dir=folder)
    other = prepared(tmp_path, FRUITS[::-1], "other")
    with pytest.raises(AttnlmError, match="is not the data set"):
        train_ladder(other.path, name="ladder-001", checkpoint_dir=folder)
    record = climbed.path / "ladder.json"
    edited = tmp_path / "edited"
    edited.mkdir()
    (edited / "ladder.json").write_text(record.read_text().replace('"steps": 6', '"steps": -6'))
    with pytest.raises(AttnlmError, match=r"ladder\.json.*-6"):
        read_plan(edited)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"rungs": ("bigram", "multihead")}, "multihead"),
        ({"rungs": ("bigram", "bigram")}, "twice"),
        ({"rungs": ()}, "is empty"),
        ({"tokens": -1}, "`tokens`"),
        ({"steps": 0}, "`steps`"),
        ({"seeds": 0}, "`seeds`"),
        ({"rungs": ("bigram:steps=5",)}, "`steps` cannot differ"),
        ({"tune": "learning"}, "`tune` cannot be 'learning'"),
        ({"tune": "seed"}, "`tune` cannot be 'seed'"),
        ({"tune": "embed_dim"}, "`tune` cannot be 'embed_dim'"),
        ({"tune": "weight_decay"}, "`tune` 'weight_decay' has no default above 0 in bigram"),
        ({"tune": "beta1"}, "`beta1`"),
        ({"equal": "flop"}, "invalid value for `equal`"),
        ({"equal": "time"}, "`equal` time cannot be combined with `steps`"),
        ({"rungs": ("bigram:learning_rate=0",)}, "`learning_rate`"),
        ({"budget": 5.0}, "cannot be combined"),
        ({"budget": -1.0, "steps": None}, "invalid value for `budget`"),
        ({"name": "a/b"}, "`name`"),
        ({"prompt": "Ω"}, "Ω"),
    ],
)
def test_invalid_arguments_are_refused_before_anything_is_made(
    given: dict[str, Any], says: str, dataset: Dataset, tmp_path: Path
) -> None:
    with pytest.raises(AttnlmError, match=says):
        train_ladder(dataset.path, checkpoint_dir=tmp_path / "runs", **{**SMALL, **given})
    assert not (tmp_path / "runs").exists()


def test_small_data_get_a_context_that_fits(tmp_path: Path) -> None:
    small, notes = prepared(tmp_path, FRUITS[:23]), list[object]()  # 3 tokens are to validate
    given = {**SMALL, "rungs": ("bigram", "multi-head", "transformer")}
    climbed = train_ladder(small, checkpoint_dir=tmp_path / "runs", on_event=notes.append, **given)
    assert Note("fruits-char is small: the context of the rungs is 2 tokens") in notes
    assert {rung.run.config.spec.block_size for rung in climbed.rungs} == {2}


def test_unrelated_runs_are_not_used(
    dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine-bigram").mkdir()
    with pytest.raises(AttnlmError, match="mine-bigram exists"):
        train_ladder(dataset.path, name="mine", checkpoint_dir=tmp_path, **SMALL)
    (tmp_path / "ladder-001-single-head").mkdir()
    ladder = train_ladder(dataset.path, checkpoint_dir=tmp_path, **{**SMALL, "steps": 1})
    assert ladder.path.name == "ladder-002"
    assert capsys.readouterr() == ("", "")  # a library prints nothing


def test_a_budget_becomes_one_number_of_steps_even_if_the_ladder_is_resumed(
    dataset: Dataset, tmp_path: Path, ticking_clock: Clock
) -> None:
    given = {key: value for key, value in SMALL.items() if key not in ("steps", "eval_every")}
    events: list[object] = []
    stop = StopAt("bigram", 0)

    def listen(event: object) -> None:
        events.append(event)
        stop(event)

    with pytest.raises(Interrupted):
        train_ladder(
            dataset, name="m", budget=1.0, checkpoint_dir=tmp_path, on_event=listen, **given
        )
    ladder = train_ladder(resume="m", checkpoint_dir=tmp_path, on_event=events.append)
    started, _ = (event for event in events if isinstance(event, LadderStarted))
    plan = ladder.plan
    assert started.plan.steps is None and plan.budget == 1.0
    assert plan.steps is not None and plan.steps > 1
    assert read_plan(ladder.path) == plan
    assert {rung.result.last.step for rung in ladder.rungs} == {plan.steps}
    # The larger one came first, and set the steps.
    runs = [event.run.config.spec.name for event in events if isinstance(event, Started)]
    assert runs == ["single-head", "bigram", "bigram"]


def test_a_sweep_over_a_setting_shows_the_median_of_several_seeds(
    dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rungs = ("bigram", "bigram:learning_rate=0.3", "bigram:batch_size=8")
    given: dict[str, Any] = {"checkpoint_dir": tmp_path, "rungs": rungs, "seeds": 3, "name": "mine"}
    ladder = train_ladder(dataset.path, **{**SMALL, **given})
    runs = attnlm.list_runs(tmp_path)
    assert len(runs) == 10 and "mine-bigram-learning_rate-0.3-seed-3" in {r.name for r in runs}
    for rung, rate, batch in zip(ladder.rungs, (0.1, 0.3, 0.1), (32, 32, 8), strict=True):
        paths = ladder.plan.runs(ladder.path)
        of_rung = [open_run(paths[key]) for key in paths if key[0] == rung.model]
        assert [run.config.training.seed for run in of_rung] == [1, 2, 3]
        assert {run.config.training.learning_rate for run in of_rung} == {rate}
        assert {run.config.training.batch_size for run in of_rung} == {batch}
        losses = sorted(min(r["val_loss"] for r in run.metrics()) for run in of_rung)
        assert (*rung.losses,) == (*losses,) and rung.loss == losses[1]
    header, rows = ladder.table()
    assert header[2] == "lowest to highest" and rows[1][0] == "…learning_rate=0.3"
    assert rows[0][2].startswith(f"{ladder.rungs[0].losses[0]:.4f}–")
    said = "\n".join(ladder.warnings)
    assert "defaults" not in said and "steps are not equally large, in tokens: " in said
    assert "--seeds 3" in ladder_command(ladder.plan)
    page = elements(ladder.write_page().read_bytes()).text
    assert "seed 1 to 3" in " ".join(page.split()) and "lowest to highest" in page
    again = train_ladder(resume="mine", checkpoint_dir=tmp_path)
    assert facts(again) == facts(ladder)


def test_the_spread_between_seeds_decides_what_a_gain_is_worth(climbed: Ladder) -> None:
    losses = {
        "bigram": (2.4, 2.5, 2.6, 2.7, 2.8),
        "average": (2.3, 2.45, 2.55, 2.6, 2.75),
        "multi_head": (2.0, 2.1, 2.2, 2.21, 2.22),
    }
    ladder = with_losses(climbed, **losses)
    said = dict(explain_rungs(ladder))
    # The seeds overlap, but with the same seed, average is always better.
    better = "0.070 nats per token better than bigram (0.0360 to 0.1040): it sees more than"
    assert better in said["average"]
    assert "0.384 nats per token better than average (0.2470 to 0.5210): they" in said["multi-head"]
    assert loss_curves(ladder, "tokens")[0].band == [(2.4, 2.8)]
    assert not loss_curves(ladder, "seconds")[0].band
    page = " ".join(ladder.write_page().read_text(encoding="utf-8").split())
    assert "the band is from the lowest to the highest of 5 seeds" in page
    assert "A ladder of equal models claims a difference, better or worse, in at most 5 of" in page
    header, rows = ladder.verdicts()
    assert rows == [
        ["average", "bigram", "better", "+0.0700", "0.0360 to 0.1040", ""],
        ["multi-head", "bigram", "better", "+0.4540", "0.3114 to 0.5966", ""],
        ["multi-head", "average", "better", "+0.3840", "0.2470 to 0.5210", ""],
    ]
    shown = elements(page.encode()).text
    assert "Holm's method for several pairs, here 3." in " ".join(shown.split())
    assert all(cell in shown for row in (header, *rows) for cell in row)


def test_a_difference_that_is_not_shown_comes_with_the_seeds_to_show_it(
    climbed: Ladder, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = {"bigram": (2.5, 2.6, 2.7), "average": (2.1, 2.2, 2.5), "single_head": (2.1, 2.2, 2.4)}
    ladder = with_losses(climbed, **losses)
    said = dict(explain_rungs(ladder))
    assert (
        "Not shown to differ from bigram: the interval for the difference, −0.0804 to 0.7470 nats "
        "per token, includes 0; to show a difference of 0.3333 takes about 4 seeds."
    ) in said["average"]
    say_table(ladder)
    told = capsys.readouterr().err
    assert re.search(r"average +bigram +not shown +\+0\.3333 +−0\.0804 to 0\.7470 +4\n", told)
    facts = ladder_facts(ladder)["pairs"]
    assert isinstance(facts, list) and len(facts) == 3
    assert facts[0] == {
        "rung": "average",
        "rival": "bigram",
        "difference": pytest.approx(1 / 3),
        "interval": pytest.approx((-0.0804, 0.7470), abs=1e-4),
        "verdict": "not shown",
        "seeds_needed": 4,
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
    (rung,) = rungs
    assert rung["mean"] == pytest.approx(2.5)
    assert rung["interval"] == pytest.approx((2.2516, 2.7484), abs=1e-4)
    assert climbed.rungs[0].interval is None


TUNED: dict[str, Any] = {**SMALL, "steps": 10, "tune": "learning_rate"}


@pytest.fixture(scope="module")
def tuned(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Ladder:
    folder = tmp_path_factory.mktemp("tuned")
    (folder / "mine.py").write_text(own_code.PARTS)
    head = f"multi-head:attention={folder / 'mine.py'}:Head:embed_dim=8:heads=2"
    rungs = ("bigram", head, "single-head:learning_rate=0.02")
    given = {**TUNED, "rungs": rungs, "checkpoint_dir": folder / "runs", "name": "t"}
    return train_ladder(dataset, **given)


def test_each_rung_gets_the_best_of_its_own_values(tuned: Ladder, dataset: Dataset) -> None:
    bigram, head, fixed = tuned.plan.rungs
    assert [t.value for t in tuned.plan.trials] == pytest.approx(
        [0.025, 0.05, 0.1, 0.2, 0.4, 0.0075, 0.015, 0.03, 0.06, 0.12]
    )
    for rung in (bigram, head):
        trials = [(t.loss, t.value) for t in tuned.plan.trials if t.rung == rung]
        run = open_run(tuned.plan.runs(tuned.path)[rung, 1])
        assert run.config.training.learning_rate == min(trials)[1]
        assert run.config.training.steps == 10
    assert open_run(tuned.plan.runs(tuned.path)[fixed, 1]).config.training.learning_rate == 0.02
    # A trial is the same as a run on a text without the last tenth, which is its validation split.
    cut = dataset.train_tokens - dataset.train_tokens // 10
    part = replace(dataset, train=dataset.train[:cut], val=dataset.train[cut:], train_tokens=cut)
    part = replace(part, val_tokens=dataset.train_tokens // 10)
    settings: dict[str, Any] = {"model": "bigram", "learning_rate": 0.05, "block_size": 64}
    settings |= {"batch_size": 32, "steps": 2, "seed": 1, "checkpoint_dir": tuned.path.parent}
    alone = attnlm.train(part, name="alone", **settings)
    assert tuned.plan.trials[1].loss == alone.evaluations()[-1].val_loss
    assert {path.name for path in tuned.path.iterdir()} <= {
        ".lock",
        "code",
        "ladder.json",
        "index.html",
    }


def test_a_tuned_ladder_says_what_it_tried(tuned: Ladder) -> None:
    page = elements(tuned.write_page().read_bytes()).text
    assert "What tuning tried" in page and "Each rung has its best learning_rate of five" in page
    assert "--tune learning_rate" in ladder_command(tuned.plan)
    facts = ladder_facts(tuned)
    assert facts["tune"] == "learning_rate"
    assert [set(trial) for trial in facts["trials"]] == 10 * [{"rung", "value", "loss", "steps"}]  # type: ignore[attr-defined]
    assert not any("defaults of each rung" in warning for warning in tuned.warnings)
    (tuned.path / "curves.png").unlink()


def test_the_page_says_that_rungs_may_prefer_another_rate(climbed: Ladder) -> None:
    page = elements(climbed.write_page().read_bytes()).text
    assert "Each rung has its default learning rate, and may prefer another: --tune" in page


def test_tuning_on_questions_tells_each_trial_and_a_best_value_at_the_end(tmp_path: Path) -> None:
    task = attnlm.prepare("copy", examples=200, length=2, data_dir=tmp_path)
    notes: list[str] = []
    given: dict[str, Any] = {"steps": 20, "seed": 1, "tune": "learning_rate", "rungs": ["bigram"]}
    climbed = train_ladder(
        task, checkpoint_dir=tmp_path, on_event=lambda event: notes.append(str(event)), **given
    )
    trials = {trial.value: trial.loss for trial in climbed.plan.trials}
    told = [note for note in notes if note.startswith("tried bigram")]
    assert told == [
        f"tried bigram with learning_rate {v:g}: loss {loss:.4f}" for v, loss in trials.items()
    ]
    best = min(trials, key=lambda value: trials[value] or math.inf)
    assert best == max(trials)
    assert f"bigram prefers learning_rate {best:g}, the largest value that was tried" in notes


def test_a_stopped_tuning_resumes_after_its_finished_trials(
    tuned: Ladder, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {**TUNED, "rungs": tuned.plan.rungs, "checkpoint_dir": tmp_path, "name": "t"}
    trials = 0

    def stopped_in_the_fourth(*arguments: Any, on_event: Any, **more: Any) -> Run:
        nonlocal trials
        trials += 1

        def stop(event: object) -> None:
            on_event(event)
            if isinstance(event, Started) and trials == 4:
                signal.raise_signal(signal.SIGINT)

        return train(*arguments, on_event=stop, **more)

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr("attnlm.workflows.tune.train", stopped_in_the_fourth)
        train_ladder(dataset, **given)
    assert len(read_plan(tmp_path / "t").trials) == 3
    again = train_ladder(resume="t", checkpoint_dir=tmp_path, data_dir=dataset.path.parent)
    assert again.plan.trials == tuned.plan.trials and facts(again) == facts(tuned)


def test_a_stopped_tuning_within_a_budget_keeps_the_steps_of_its_trials(
    dataset: Dataset, tmp_path: Path, ticking_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets: list[float | None] = []

    def stopped_in_the_third(*arguments: Any, recipe: Any, **more: Any) -> Run:
        budgets.append(recipe.get("budget"))
        if len(budgets) == 3:
            raise Interrupted(signal.SIGINT)
        ticking_clock.tick = 1e-3 if len(budgets) == 1 else 5e-3  # the machine becomes slower
        return train(*arguments, recipe=recipe, **more)

    monkeypatch.setattr("attnlm.workflows.tune.train", stopped_in_the_third)
    given: dict[str, Any] = {"tune": "learning_rate", "rungs": ("bigram",), "seed": 1, "tokens": 9}
    with pytest.raises(Interrupted):
        train_ladder(dataset, name="t", budget=2.0, checkpoint_dir=tmp_path, **given)
    ladder = train_ladder(dataset, resume="t", checkpoint_dir=tmp_path)
    assert [budget is None for budget in budgets] == [False, *[True] * 5]
    assert len(ladder.plan.trials) == 5
    assert len({trial.steps for trial in ladder.plan.trials} - {None}) == 1


def test_a_value_with_which_training_diverges_is_not_chosen(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def training(dataset: Dataset, recipe: Any, **options: Any) -> Run:
        if recipe["learning_rate"] > 0.1:
            raise AttnlmError("the loss is nan", "") from StepNotFiniteError(1, 1)
        return train(dataset, recipe=recipe, **options)

    monkeypatch.setattr("attnlm.workflows.tune.train", training)
    given = {**TUNED, "rungs": ("bigram",), "checkpoint_dir": tmp_path}
    ladder = train_ladder(dataset, **given)
    losses = {trial.value: trial.loss for trial in ladder.plan.trials}
    assert losses[0.2] is losses[0.4] is None and losses[0.1] is not None
    assert ladder.rungs[0].run.config.training.learning_rate == 0.1
    assert read_plan(ladder.path) == ladder.plan


def test_a_whole_number_is_tuned_and_resumed(dataset: Dataset, tmp_path: Path) -> None:
    given = {**TUNED, "rungs": ("bigram",), "steps": 3, "tune": "batch_size"}
    ladder = train_ladder(dataset, name="t", checkpoint_dir=tmp_path, **given)
    assert [trial.value for trial in ladder.plan.trials] == [8, 16, 32, 64, 128]
    again = train_ladder(dataset, name="t", checkpoint_dir=tmp_path, **given)
    assert again.plan == ladder.plan and facts(again) == facts(ladder)
    best = min((trial.loss, trial.value) for trial in ladder.plan.trials)[1]
    assert ladder.rungs[0].run.config.training.batch_size == best


def test_a_text_that_is_too_short_to_hold_out_a_tenth_is_refused(tmp_path: Path) -> None:
    small = prepared(tmp_path, FRUITS[:500])
    with pytest.raises(UsageError, match="too small"):
        train_ladder(small, checkpoint_dir=tmp_path / "runs", **TUNED)
    assert not (tmp_path / "runs").exists()


def test_rungs_can_be_tried_in_the_page(
    climbed: Ladder, browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "index.html").write_bytes(climbed.write_page().read_bytes())
    with opened(browser, tmp_path / "index.html") as view:
        assert view.evaluate("attnlm.models.map((model) => model.name)") == [
            "bigram",
            "single-head",
        ]
        assert view.input_value("#prompt") == "1 "
        view.locator("#models li").first.wait_for()
    monkeypatch.setattr("attnlm.see.ladder_page._MOST_TO_TRY", 1000)
    assert 'id="try"' not in climbed.write_page().read_text(encoding="utf-8")


def test_the_page_is_complete_and_loads_nothing(climbed: Ladder) -> None:
    hostile = replace(climbed.rungs[0], text="<script>alert(1)</script>")
    plan = replace(climbed.plan, prompt="<b>&")
    for ladder in (climbed, Ladder(climbed.path, plan, (hostile, climbed.rungs[1]))):
        content = ladder.write_page().read_bytes()
        assert (ladder.path / "curves.png").read_bytes().startswith(b"\x89PNG")
        asks_for_nothing(content)
        page, shown = content.decode(), elements(content).text
        assert page.count("<svg") == 2 and page.count("<style>") == 2
        assert "<script>alert" not in page
        losses = [f"{rung.loss:.4f}" for rung in ladder.rungs]
        texts = [ladder.plan.prompt + rung.text for rung in ladder.rungs]
        for words in (
            *losses,
            *texts,
            *ladder.warnings,
            *(said for _, said in explain_rungs(ladder)),
        ):
            assert words in shown
        assert shown.rstrip().endswith(ladder_command(ladder.plan))
        ids = re.findall(r'\bid="([^"]+)"', page)
        assert len(ids) == len(set(ids))


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


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("rungs", [["bigram"]], "is not valid: its 'rungs' cannot be ['bigram']"),
        ("rungs", ["bigram", "bigram"], "is not valid: `rungs` is empty or contains a rung twice"),
        ("rungs", ["transformer:slope=2"], "is not valid: 'slope' is not a setting of transformer"),
        ("steps", -1, "is not valid: invalid value for `steps`: -1"),
        ("block_size", 0, "is not valid: invalid value for `block_size`: 0"),
        ("tokens", -1, "is not valid: its 'tokens' cannot be -1"),
        ("seed", 2**70, "is not valid: invalid value for `seed`: 1180591620717411303424"),
        ("speed", "rate", "has a setting that attnlm 1.0.0 does not have: 'speed'"),
        ("tune", "rate", "is not valid: `tune` cannot be 'rate'"),
        ("equal", "x", "is not valid: its 'equal' cannot be 'x'"),
        ("adapted", [{"rung": "bigram"}], "is not valid: its 'adapted.setting' is missing"),
        (
            "adapted",
            [{"rung": "bigram", "setting": "batch_size", "value": -1}],
            "is not valid: invalid value for `batch_size`: -1",
        ),
        (
            "trials",
            [{"rung": "bigram", "value": "1"}],
            "is not valid: its 'trials.value' cannot be '1'",
        ),
    ],
)
def test_a_plan_that_nobody_would_write_is_refused(
    key: str, value: object, says: str, climbed: Ladder, tmp_path: Path
) -> None:
    """A forged record can have a valid hash."""
    content = read_json(climbed.path / "ladder.json")
    write_json(tmp_path / "ladder.json", {**content, "plan": {**content["plan"], key: value}})
    with pytest.raises(AttnlmError) as caught:
        read_plan(tmp_path)
    assert caught.value.message == f"{tmp_path / 'ladder.json'} {says}"


def test_a_rung_that_never_saved_begins_again_and_one_without_its_metrics_is_refused(
    climbed: Ladder, tmp_path: Path
) -> None:
    for folder in (climbed.path, *(rung.run.path for rung in climbed.rungs)):
        shutil.copytree(folder, tmp_path / folder.name)
    lost = tmp_path / f"{climbed.path.name}-single-head"
    for file in ("best.safetensors", "last.safetensors"):
        (lost / file).unlink()
    again = train_ladder(resume=climbed.path.name, checkpoint_dir=tmp_path)
    assert facts(again) == facts(climbed)
    (lost / "metrics.jsonl").unlink()
    with pytest.raises(AttnlmError, match=r"metrics\.jsonl is damaged"):
        train_ladder(resume=climbed.path.name, checkpoint_dir=tmp_path)
