"""A traced pass is the model's own, and so is the script that computes it again."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from attnlm import export, load_model, open_run
from attnlm.base.errors import AttnlmError
from attnlm.model.architecture import RUNGS
from attnlm.see.trace import as_script, specialise_textbook, trace
from tests.kit import command
from tests.models import CHANGES, VARIANTS, small_model, some_ids
from tests.tolerances import assert_near

NAMES = [*RUNGS, "projected", "tied"]
TEXT = "the lazy\n"


@pytest.mark.parametrize("name", NAMES)
def test_steps_and_script_give_the_models_logits(name: str, trained: Path, capsys: Any) -> None:
    run = open_run(trained / "checkpoints" / name)
    model, _ = load_model(run, device="cpu")
    with torch.inference_mode():
        logits = model(torch.tensor([run.tokenizer.encode(TEXT)]))[0]

    script = as_script(run, TEXT)
    assert len(script.splitlines()) <= 80 and max(map(len, script.splitlines())) <= 200
    assert "attnlm" not in script.replace(str(trained), "")
    names: dict[str, torch.Tensor] = {}
    exec(script, names)
    likeliest = capsys.readouterr().out.splitlines()
    assert_near(names["logits"], logits)
    best = torch.softmax(logits[-1], -1).max().item()
    assert len(likeliest) == 5 and float(likeliest[0].split()[0]) == pytest.approx(best, abs=1e-4)

    traced = trace(TEXT, run)
    steps = {step.name: step for step in traced.operations}
    assert_near(steps["logits"].values, logits)
    assert steps["tokens"].values.tolist() == run.tokenizer.encode(TEXT)
    for step in traced.operations:
        sizes = dict(zip(step.axes.split(), step.values.shape, strict=False))
        assert sizes["T"] == len(TEXT) and sizes.get("V", run.vocab_size) == run.vocab_size
    attending = [step for step in traced.operations if step.name.endswith("softmax")]
    layers = {"bigram": 0, "transformer": 2, "tied": 2}.get(name, 1)
    assert len(attending) == layers
    for softmax in attending:
        masked = steps[softmax.name.replace("softmax", "masked")].values
        torch.testing.assert_close(torch.softmax(masked, -1), softmax.values)
    assert sum(p for _, p in traced.next) <= 1 + 1e-6
    words = str(traced)
    assert all(f". {step.name}  (" in words for step in traced.operations)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_functions_of_a_script_compute_every_variant(name: str) -> None:
    model, ids = small_model(name), some_ids(13)
    names: dict[str, Any] = {"torch": torch, "F": F}
    exec(specialise_textbook(model.architecture), names)
    with torch.inference_mode():
        assert_near(names["forward"](model.state_dict(), ids), model(ids[None])[0], within=1e-12)


def test_no_trace_script_page_or_export_of_a_model_changed_from_outside(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, other = CHANGES["another scale"]
    monkeypatch.setattr(f"attnlm.model.{place}", other)
    run = open_run(trained / "checkpoints" / "transformer")
    for call in (
        lambda: as_script(run, TEXT),
        lambda: trace(TEXT, run),
        lambda: export(run, tmp_path / "p.html", to="html"),
        lambda: export(run, tmp_path / "hf"),
    ):
        with pytest.raises(AttnlmError, match="computes something else"):
            call()
    assert not list(tmp_path.iterdir())


def test_trace_prints_steps_or_json(trained: Path) -> None:
    shown = command("trace", "the", "transformer", cwd=trained)
    for word in ("embedding", "layer 2 q", "scores", "mask", "−∞", "mlp", "logits", "next token"):
        assert word in shown.stdout
    evaluated = r"transformer, best checkpoint \(step \d+, validation loss \d\.\d{4}\)"
    assert re.search(evaluated, shown.stderr)
    facts = json.loads(command("trace", "the", "bigram", "--json", cwd=trained).stdout)
    assert facts["tokens"] == ["t", "h", "e"] and facts["model"] == "bigram"
    assert [step["name"] for step in facts["operations"]] == ["tokens", "logits", "probabilities"]
    text = command("trace", "the", "average", "--json", cwd=trained).stdout
    assert "Infinity" not in text and "NaN" not in text
    masks = [step["values"] for step in json.loads(text)["operations"] if step["name"] == "masked"]
    assert masks == [[[[0, None, None], [0, 0, None], [0, 0, 0]]]]


def test_zero_after_rounding_has_no_sign(trained: Path) -> None:
    traced = trace("the", open_run(trained / "checkpoints" / "average"))
    tiny = [replace(step, values=torch.full_like(step.values, -1e-6)) for step in traced.operations]
    words = str(replace(traced, operations=tiny))
    assert " 0.000" in words and "-0.000" not in words
