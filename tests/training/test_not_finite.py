"""NaN and infinity in a checkpoint, or in what it computes: every command refuses in one way."""

from __future__ import annotations

import math
import shlex
import shutil
from pathlib import Path

import pytest
import torch

import attnlm
from attnlm.base.errors import NotFiniteError
from attnlm.model.building import build_with_weights
from attnlm.runs.checkpoint import load_checkpoint, save_checkpoint
from attnlm.runs.run import open_run
from tests.kit import fails

OF_LOGITS = (
    "sample run --tokens 9",
    "sample run --tokens 9 --temperature 0 --json",
    "sample run --tokens 9 --num-samples 3",
    "sample run --tokens 9 --show-probs",
    "eval run --json",
)
COMMANDS = (
    *OF_LOGITS,
    "report run",
    "attend 'the fox' run --json",
    "attend 'the fox' run --output maps.png",
    "trace 'the fox' run --json",
    "heads run --json",
)


def folder_with(trained: Path, name: str, number: float, tmp_path: Path) -> Path:
    """A folder with the data set and a run in whose weights there is that number."""
    shutil.copytree(trained / "data", tmp_path / "data")
    shutil.copytree(trained / "checkpoints" / name, tmp_path / "checkpoints" / "run")
    run = open_run(tmp_path / "checkpoints" / "run")
    for path in (run.best, run.last):
        facts, weights, _ = load_checkpoint(path, run.config.spec, run.vocab_size)
        model = build_with_weights(run.config.spec, run.vocab_size, weights)
        with torch.no_grad():
            for parameter in model.parameters():
                # Finite numbers must overflow when they are summed.
                parameter.fill_(number) if name == "bigram" else parameter.mul_(number)
            if name == "transformer" and math.isfinite(number):
                model.get_parameter("norm.gain").fill_(number)
                model.get_parameter("token_embedding.weight").fill_(1)
        save_checkpoint(path, dict(model.named_parameters()), facts)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "number", "commands"),
    [
        ("multi-head", 1e38, COMMANDS),
        # Weights are loaded, and logits computed, in one way for all commands.
        ("bigram", math.nan, OF_LOGITS),
        ("multi-head", math.inf, OF_LOGITS),
        ("transformer", 1e38, OF_LOGITS),
    ],
)
def test_every_command_refuses_weights_that_are_not_finite(
    name: str, number: float, commands: tuple[str, ...], trained: Path, tmp_path: Path
) -> None:
    folder, says = folder_with(trained, name, number, tmp_path), NotFiniteError().message
    for command in commands:
        fails(*shlex.split(command), cwd=folder, code=1, says=says, hints="--checkpoint best")
    assert not (folder / "page.html").exists()


def test_resuming_and_ablation_refuse_weights_that_are_not_finite(
    trained: Path, tmp_path: Path
) -> None:
    folder = folder_with(trained, "transformer", math.nan, tmp_path)
    runs = folder / "checkpoints"
    with pytest.raises(NotFiniteError):
        attnlm.train(resume=runs / "run", steps=40)
    with pytest.raises(NotFiniteError):
        attnlm.train(data_dir=folder / "data", start_from="run", checkpoint_dir=runs, steps=1)
    assert {path.name for path in runs.iterdir()} == {"latest", "run"}
    with pytest.raises(NotFiniteError):
        attnlm.heads(attnlm.open_run(runs / "run", data_dir=folder / "data"), ablate=True)
