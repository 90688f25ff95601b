"""Names that do not exist: what the hint says, of flags, commands, keys, values and runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnlm.base.errors import AttnlmError
from attnlm.base.folders import find_folder
from attnlm.base.suggestions import _OTHER_NAMES, equivalent_name, suggestion
from attnlm.config.settings import RECORD_OF, resolve
from tests.kit import try_command

_MERGE = "model.merge_and_unload().save_pretrained(DIR)"


def told(command: str) -> list[str]:
    done = try_command(command.split())
    assert done.code == 2 and done.stdout == ""
    return done.stderr.splitlines()


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("train --lr 1", "did you mean --learning-rate?"),
        ("train --epochs 1", "did you mean --steps? (a step is one batch)"),
        ("train --block_size 1", "did you mean --block-size?"),
        ("train --n_embd 1", "did you mean --embed-dim?"),
        ("train --hed 1", "did you mean --heads?"),
        ("train --max-length 1", "did you mean --block-size?"),
        ("train --peak 1e12", "train with --dry-run measures steps on this machine"),
        ("train --share 1", "train with --dry-run measures steps on this machine"),
        ("train --seeds 3", "--seeds is an option of attnlm ladder"),
        ("train --data text", "DATASET is an argument, not an option: attnlm train DATASET"),
        ("train --tokens 1", "--tokens is an option of attnlm sample, ladder"),
        ("train -n 1", "see attnlm train --help"),
        ("sample --temp 1", "did you mean --temperature?"),
        ("sample --max-length 1", "did you mean --tokens?"),
        ("sample --lr 1", "--learning-rate is an option of attnlm train"),
        ("sample --model mine", "RUN is an argument, not an option: attnlm sample RUN"),
        ("sample --qqq 1", "see attnlm sample --help"),
        ("attend --model mine", "RUN is an argument, not an option: attnlm attend TEXT RUN"),
        ("ladder --model bigram", "did you mean --rungs?"),
        ("prepare --split-seed 7", "leave it out: --split documents always makes the same choice"),
        ("prepare --newlines unix", "line ends are kept: dos2unix converts those of a file"),
        ("train --shard", "to train with less memory, lower --micro-batch-size or use --recompute"),
    ],
)
def test_similar_options_are_suggested(command: str, hint: str) -> None:
    error, said = told(command)
    assert error == f"error: no such option: {command.split()[1].split('=')[0]}"
    assert said == f"hint: {hint}"


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("generate", "did you mean sample?"),
        ("tarin", "did you mean train?"),
        ("version", "did you mean --version?"),
        ("chat", "did you mean sample?"),
        ("resume", "did you mean train?"),
        ("qqqqq", "see attnlm --help"),
        *((name, "did you mean list?") for name in ("runs", "ls")),
        ("rm", "delete the folder of the run"),
        ("plan", "use train with --dry-run"),
    ],
)  # fmt: skip
def test_similar_commands_are_suggested(command: str, hint: str) -> None:
    assert told(command) == [
        f"error: no such command '{command}'",
        f"hint: {hint}",
    ]


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("export out --to gguf", "use --to hf, then llama.cpp's convert_hf_to_gguf.py"),
        ("export out --type q8_0", "use --to hf, then llama.cpp's convert_hf_to_gguf.py"),
        ("train --lora 8", "use --from, which trains all weights of another run"),
        ("train --lora-alpha 8", "use --from, which trains all weights of another run"),
        ("train --lora-on query", "use --from, which trains all weights of another run"),
        ("import DIR --base RUN", f"merge the adapter with peft first: {_MERGE}"),
    ],
)
def test_names_that_left_are_answered_with_what_replaces_them(command: str, hint: str) -> None:
    assert told(command)[1] == f"hint: {hint}"


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"lr": 0.1}, "did you mean learning_rate?"),
        ({"n_head": 4}, "did you mean heads?"),
        ({"seeds": 3}, "use a ladder of one rung, with `seeds`"),
        ({"context": 64}, "did you mean block_size?"),
        ({"epochs": 3}, "did you mean steps? (a step is one batch)"),
        ({"embed_dmi": 3}, "did you mean embed_dim?"),
        ({"block-size": 3}, "did you mean block_size?"),
        ({"device": "gpu"}, "did you mean cuda?"),
        ({"schedule": "cos"}, "did you mean cosine?"),
    ],
)
def test_keys_and_values_of_a_recipe(settings: dict[str, object], hint: str) -> None:
    for given, recipe in ((settings, {}), ({}, settings)):
        with pytest.raises(AttnlmError) as caught:
            resolve(given, recipe)  # type: ignore[arg-type]
        assert caught.value.hint == hint


def test_names_with_a_common_prefix_are_suggested_the_first_in_a_tie() -> None:
    assert suggestion("my-run", ["multi-head-001", "my"], "none") == "did you mean my?"
    assert suggestion("multi", ["multi-head-002", "multi-head-001"], "") == (
        "did you mean multi-head-002?"
    )
    assert suggestion("bigram-1", ["bigram-001", "bigram-002"], "") == "did you mean bigram-001?"
    assert suggestion("nobody", ["multi-head-001", "my"], "none") == "none"
    assert suggestion("x", [], "none") == "none"


def test_a_run_may_have_the_name_of_an_option_that_left(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "config.json").touch()
    with pytest.raises(AttnlmError) as caught:
        find_folder("base", tmp_path, kind="run")
    assert caught.value.hint == "there is first"


def test_settings_do_not_clash_with_terms_of_other_tools() -> None:
    """Or the table would answer with the wrong one where both exist."""
    for name in RECORD_OF:
        assert equivalent_name(name, RECORD_OF) == name
    for ours, others in _OTHER_NAMES.items():
        if ours in RECORD_OF:
            assert {equivalent_name(other, RECORD_OF) for other in others.split()} == {ours}
