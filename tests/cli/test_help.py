"""Output of `--help`: every setting, in its section, with its defaults; other tools' names."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from attnlm.base.setting_fields import fields_of
from attnlm.cli.app import root_command
from attnlm.cli.event_printer import setting_text
from attnlm.cli.options import help_with_default
from attnlm.config.settings import RECORD_OF, resolve
from attnlm.model.architecture import MODELS, Architecture
from attnlm.workflows.ladder import DEFAULT_BUDGET, DEFAULT_RUNGS
from tests.kit import command, try_command


def sections(command: str, option: str = "--help") -> dict[str, str]:
    """The text of each section of a command's help, without its line breaks."""
    shown = try_command([command, option]).stdout
    parts = re.split(r"^(\w+):\n", shown, flags=re.MULTILINE)
    return {
        heading: re.sub(r"\s+", " ", re.sub(r"-\n\s+", "-", body))
        for heading, body in zip(parts[1::2], parts[2::2], strict=True)
    }


def test_every_setting_is_an_option_in_its_section() -> None:
    shown = sections("train", "--help-all")
    assert list(shown) == ["Arguments", "Model", "Training", "Options"]
    for name in RECORD_OF:
        flag = f"--{name.replace('_', '-')}"
        option = re.compile(rf"(^| ){flag} [</]")
        having = {heading for heading, text in shown.items() if option.search(text)}
        assert len(having) == 1 and (having == {"Model"}) == (name in fields_of(Architecture))
    assert "--wide-heads" not in str(shown)
    assert "--batch-size" in shown["Training"] and "--learning-rate" in shown["Training"]
    assert all(option in shown["Options"] for option in ("--resume", "--code", "--json"))


def test_help_fits_a_screen_and_help_all_shows_all_options() -> None:
    few, everything = (try_command(["train", option]).stdout for option in ("--help", "--help-all"))
    for shown in (few, try_command(["prepare", "--help"]).stdout):
        assert len(shown.splitlines()) <= 60 and max(map(len, shown.splitlines())) <= 80
    for name in ("--steps", "--model", "--batch-size", "--from", "--json", "--help-all"):
        assert name in few, name
    assert "--norm-epsilon" in everything and "--norm-epsilon" not in few
    words = set(re.findall("--[a-z-]+", everything))
    assert words >= set(re.findall("--[a-z-]+", few))
    # What --help shows does not depend on what was shown before.
    assert try_command(["train", "--help"]).stdout == few


@pytest.mark.parametrize("model", MODELS)
def test_help_states_the_defaults_of_every_model(model: str) -> None:
    for name, value in resolve({"model": model}).settings().items():
        _, _, default = help_with_default(name).partition("; default: ")
        assert default, name
        if name in ("eval_every", "model"):  # told in words; the default model alone
            continue
        assert _told(default, model) == setting_text(value), name


def _told(default: str, model: str) -> str:
    named = re.search(rf"([^ ]+) \([^)]*\b{model}\b[^)]*\)", default)
    return named[1] if named else default.split("; ")[0]


def test_help_states_the_defaults_of_the_ladder() -> None:
    shown = sections("ladder")
    assert f"default: {','.join(DEFAULT_RUNGS)}" in shown["Options"]
    assert DEFAULT_BUDGET == 120 and "default: 2m" in shown["Training"]


def test_parts_of_a_model_are_given_as_options(tmp_path: Path) -> None:
    flags = ["--model", "transformer", "--positions", "none", "--no-residual", "--kv-heads", "2"]
    more = ["--norm-epsilon", "1e-4", "--bias", "--no-query-key-norm", "--budget", "1h"]
    printed = command("train", *flags, *more, "--print-config", cwd=tmp_path).stdout
    expected = {"positions": "none", "residual": False, "kv_heads": 2, "norm_epsilon": 1e-4}
    expected |= {"bias": True, "query_key_norm": False, "budget": 3600.0}
    assert expected.items() <= tomllib.loads(printed).items()


def test_names_of_other_tools_are_understood_as_options_and_in_recipes(tmp_path: Path) -> None:
    words = "train --model gpt2 --n_layer=3 --n-head 2 --n_embd 32 --block_size 16 --lr 0.1"
    ours = "train --model gpt2 --layers 3 --heads 2 --embed-dim 32 --block-size 16"
    ours += " --learning-rate 0.1 --steps 7 --print-config"
    expected = command(*ours.split(), cwd=tmp_path).stdout
    for steps in ("--max-iters", "--max_steps"):
        typed = [*words.split(), steps, "7", "--print-config"]
        assert command(*typed, cwd=tmp_path).stdout == expected
    recipe = 'model = "gpt2"\nn_layer = 3\nn_head = 2\nhidden_size = 32\nblock_size = 16\n'
    (tmp_path / "mine.toml").write_text(f"{recipe}lr = 0.1\nmax_iters = 7\n")
    typed = ["train", "--config", "mine.toml", "--print-config"]
    assert command(*typed, cwd=tmp_path).stdout == expected


def test_a_run_is_an_argument_of_every_command_that_reads_one() -> None:
    commands = root_command().list_commands(None)
    having = {name for name in commands if "RUN" in sections(name).get("Arguments", "")}
    assert having == {"sample", "eval", "attend", "trace", "heads", "patch", "report", "export"}
