"""Shell completion: what the shells are answered, and that they take what is installed."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path
from unittest import mock

import pytest

from attnlm.base.setting_fields import fields_of
from attnlm.cli.app import root_command
from attnlm.config.recipes import recipe_names
from attnlm.config.settings import RECORD_OF
from attnlm.model.architecture import MODELS
from tests.kit import ATTNLM, run_in_new_process, try_command


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with the names of runs, a ladder and a data set; completion reads only names."""
    folder = tmp_path_factory.mktemp("project")
    for path in (
        "checkpoints/tiny-001/config.json",
        "checkpoints/ladder-001/ladder.json",
        "checkpoints/$(touch gone)/config.json",
        "checkpoints/.unfinished-a/config.json",
        "elsewhere/other/config.json",
        "data/tales-char/meta.json",
        "data/empty/notes",
    ):
        (folder / path).parent.mkdir(parents=True)
        (folder / path).touch()
    return folder


@pytest.mark.parametrize(
    ("words", "expected"),
    {
        "": root_command().list_commands(None),
        "tra": ["train", "trace"],
        "train --mod": ["--model"],
        "train --norm-e": ["--norm-epsilon"],
        "train --model ": list(MODELS),
        "train --device c": ["cpu", "cuda"],
        "train --recipe ": recipe_names(),
        "train ": ["tales-char"],
        "train --steps ": [],
        "train --resume ": ["tiny-001"],
        "sample --checkpoint-dir elsewhere ": ["other"],
        "attend hello ": ["tiny-001"],
        "ladder --resume ": ["ladder-001"],
        "ladder --rungs bigram,b": [],
        "ladder --rungs bigram,a": ["bigram,average"],
        "export ": ["tiny-001"],
        "prepare --tokenizer t": ["tales-char", "tiny-001"],
        "compare tiny-001 ": ["tiny-001", "ladder-001"],
        "list d": ["datasets"],
        "sample 'unclosed ": [],
    }.items(),
)
def test_words_are_completed_from_options_choices_and_names(
    words: str, expected: list[str], project: Path
) -> None:
    env = {
        "COMP_WORDS": f"attnlm {words}",
        "COMP_CWORD": str(len(words.split(" "))),
        "_ATTNLM_COMPLETE": "complete_bash",
    }
    with contextlib.chdir(project), mock.patch.dict(os.environ, env):
        done = try_command([])
    assert done.code == 0 and done.stderr == ""
    assert done.stdout.split() == list(expected)


def test_every_choice_of_a_setting_is_completed() -> None:
    options = {p.name: p for p in root_command().get_command(None, "train").params}
    for name, record in RECORD_OF.items():
        words = fields_of(record)[name].metadata["choices"] or ()
        found = [item.value for item in options[name].shell_complete(None, "")]
        assert found == list(words), name


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_takes_what_is_installed(shell: str, project: Path, tmp_path: Path) -> None:
    if (program := shutil.which(shell)) is None:
        pytest.skip(f"there is no {shell} here")
    command = f'"{ATTNLM[0]}" -m attnlm'
    # A shell would become its last command, if that were one of ours.
    both = f"{command} --install-completion; {command} --show-completion; exit"
    run = [program, "-c", both]
    done = run_in_new_process([], project, env={"HOME": str(tmp_path)}, through=run)
    assert done.code == 0 and f"{shell} completion installed in {tmp_path}" in done.stdout
    assert "_attnlm_completion" in done.stdout or "complete --command attnlm" in done.stdout
    script = tmp_path / "script"
    script.write_text(done.stdout.partition("terminal\n")[2])
    assert subprocess.run([program, "-n", script]).returncode == 0
