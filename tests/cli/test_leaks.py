"""A model that sees later tokens: each command that shows its loss says that it means nothing."""

from __future__ import annotations

from pathlib import Path

from tests import own
from tests.command import attnlm, fails

LEAKY = own.PARTS.replace("scores = scores.masked_fill", "scores.masked_fill")
SMALL = ("--embed-dim", 8, "--heads", 2, "--block-size", 8, "--batch-size", 2, "--steps", 2)


def test_a_loss_that_is_not_comparable_is_marked_wherever_it_is_shown(
    project: Path, tmp_path: Path
) -> None:
    data = ("--data-dir", project / "data")
    (tmp_path / "leaky.py").write_text(LEAKY)
    train = ("train", *data, *SMALL, "--attention", "leaky.py:Head", "--name", "leaky")
    fails(*train, cwd=tmp_path, code=1, says="is not causal", hints="--force")
    attnlm(*train, "--force", cwd=tmp_path)
    words = "not comparable: the model sees later tokens"
    assert words in attnlm("eval", "leaky", *data, cwd=tmp_path).stderr
    listed = attnlm("list", "runs", cwd=tmp_path)
    assert "!" in listed.stdout and words in listed.stderr
    attnlm("train", *data, *SMALL, "--name", "causal", cwd=tmp_path)
    assert f"the loss of leaky is {words}" in attnlm("diff", "leaky", "causal", cwd=tmp_path).stderr
    assert words in attnlm("sample", "leaky", "--tokens", 2, cwd=tmp_path).stderr
