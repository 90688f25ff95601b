"""Errors name what is wrong in the files of a run that another version wrote or somebody edited."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import attnlm
from attnlm.base.errors import AttnlmError
from attnlm.base.files import read_json, write_json
from attnlm.config.settings import RECORD_OF
from attnlm.runs.run import open_run

WRONG_SETTINGS: dict[str, tuple[dict[str, Any], str, str]] = {
    "a setting of another version": (
        {"slope": 2},
        "is not valid: unknown key 'slope'",
        f"the keys are {', '.join(RECORD_OF)}; or ",
    ),
    "a choice of another version": (
        {"positions": "slope"},
        "is not valid: invalid value for `positions`: 'slope'",
        "choose from learned, rotary, none; or ",
    ),
    "a number that cannot be": (
        {"embed_dim": -1},
        "is not valid: invalid value for `embed_dim`: -1",
        "it must be at least 1 and at most 1048576; or ",
    ),
    "two that cannot be combined": (
        {"sampling": "random", "stride": 3},
        "is not valid: `stride` cannot be combined with `sampling` random",
        "leave one out; or ",
    ),
}


@pytest.mark.parametrize("name", WRONG_SETTINGS)
def test_settings_that_are_not_ours_are_named(name: str, trained: Path, tmp_path: Path) -> None:
    """A program that changes config.json may also recompute its hash."""
    settings, says, advice = WRONG_SETTINGS[name]
    run = Path(shutil.copytree(trained / "checkpoints" / "multi-head", tmp_path / "run"))
    content = read_json(run / "config.json")
    write_json(run / "config.json", {**content, "config": {**content["config"], **settings}})
    with pytest.raises(AttnlmError) as caught:
        open_run(run)
    assert caught.value.message == f"{run / 'config.json'} {says}"
    assert caught.value.hint == f"{advice}copy the run's folder again from its source"


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"head_size": 4}, "blocks.0.attention.query.weight has the shape (16, 16), not (8, 16)"),
        ({"embed_dim": 8}, ": blocks.0.attention.key.weight has the shape (16, 16), not (8, 8)"),
        ({"embed_dim": 1024}, " and 3 more"),
        ({"projection": True}, ": blocks.0.attention.projection.weight is missing"),
    ],
)
def test_tensors_that_do_not_fit_the_configuration_are_named(
    changed: dict[str, Any], says: str, trained: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(trained / "checkpoints" / "multi-head", tmp_path / "run"))
    content = read_json(run / "config.json")
    write_json(run / "config.json", {**content, "config": {**content["config"], **changed}})
    with pytest.raises(AttnlmError) as caught:
        attnlm.load_model(run, device="cpu")
    assert says in caught.value.message and caught.value.hint.startswith("undo changes to config")


def test_an_edited_configuration_is_read_or_its_value_named(trained: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained / "checkpoints" / "multi-head", tmp_path / "run"))
    text = (run / "config.json").read_text()

    def edit(old: str, new: str) -> None:
        assert text.count(old) == 1
        (run / "config.json").write_text(text.replace(old, new))

    edit('"seed": 1', '"seed": 2')
    assert open_run(run).config.training.seed == 2
    edit('"seed": 1', '"seed": "lucky"')
    with pytest.raises(AttnlmError, match=r"config\.json.*seed.*'lucky'"):
        open_run(run)
    edit('"embed_dim": 16,', '"embed_dim": 8,')
    with pytest.raises(AttnlmError, match="has the shape"):
        attnlm.load_model(run, device="cpu")
    (run / "config.json").write_text(text.replace('"heads": 2,', '"heads": 4'))
    line = text[: text.index('"heads": 2,')].count("\n") + 2
    with pytest.raises(AttnlmError, match=rf"is not valid JSON: .* line {line} column \d+"):
        open_run(run)
    content = read_json(trained / "checkpoints" / "multi-head" / "config.json")
    write_json(run / "config.json", {**content, "vocab_size": 99})
    with pytest.raises(AttnlmError, match=r"tokenizer\.json has 29 ids, but config.json has 99"):
        open_run(run).tokenizer.encode("a")
