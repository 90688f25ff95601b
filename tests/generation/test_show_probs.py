"""`sample --show-probs`: the same text, and the probabilities that it was drawn with."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attnlm.generation.next_token import normalised, unnormalised_probabilities
from attnlm.generation.sampling import Sampler, load_sampler
from attnlm.generation.sampling_config import SamplingConfig
from attnlm.runs.run import open_run
from attnlm.tokens.tokenizer import ByteTokenizer
from tests.kit import command, fails, on_a_terminal


def sampler_of(trained: Path, name: str) -> Sampler:
    return load_sampler(open_run(name, checkpoint_dir=trained / "checkpoints"), device="cpu")


@pytest.mark.parametrize("name", ["bigram", "multi-head", "transformer"])
@pytest.mark.parametrize(
    "cut", [{}, {"temperature": 0.7, "top_k": 5}, {"top_p": 0.6}, {"temperature": 0.0}]
)
def test_shown_probabilities_are_those_of_the_draw(
    name: str, cut: dict[str, float], trained: Path
) -> None:
    sampler = sampler_of(trained, name)
    config = SamplingConfig(tokens=12, seed=4, **cut)  # type: ignore[arg-type]
    start = sampler.prompt_ids("the")
    choices = list(sampler.choices(list(start), config))
    assert "".join(c.text for c in choices) == "".join(sampler.stream(list(start), config))
    ids = list(start)
    for choice in choices:
        with torch.inference_mode():
            logits = sampler.model(torch.tensor([ids]))[:, -1].numpy()
        how: dict[str, Any] = {"temperature": 1.0, "top_k": None, "top_p": None, **cut}
        wanted = normalised(unnormalised_probabilities(logits, **how))[0]
        (drawn,) = sampler.tokenizer.encode(choice.token)
        assert choice.probability == pytest.approx(wanted[drawn], abs=1e-5) and wanted[drawn] > 0
        others = np.sort(np.delete(wanted, drawn))[::-1]
        found = [p for _, p in choice.runners_up]
        np.testing.assert_allclose(found, others[: len(found)], atol=1e-5)
        assert len(found) == min(3, np.count_nonzero(others > 0))
        ids.append(int(drawn))


def test_bytes_make_whole_characters_as_in_the_stream(trained: Path) -> None:
    model = sampler_of(trained, "bigram")
    sampler = Sampler(model.model, ByteTokenizer(), model.device)
    with torch.no_grad():
        table = torch.zeros(256, 256)
        table[:, 0xC3] = table[:, 0xA9] = 30  # é and its two bytes
        sampler.model.table.weight = torch.nn.Parameter(table)  # type: ignore[union-attr]
    for seed in range(6):
        config = SamplingConfig(tokens=5, seed=seed)
        choices = list(sampler.choices([0], config))
        assert "".join(c.text for c in choices) == "".join(sampler.stream([0], config))
        assert len(choices) == 5


def test_lines_numbers_and_colours(trained: Path) -> None:
    flags = ["sample", "multi-head", "--tokens", "20", "--seed", "3", "--prompt", "the"]
    facts = json.loads(command(*flags, "--show-probs", "--json", cwd=trained).stdout)
    assert facts["text"] == command(*flags, cwd=trained).stdout
    assert "the" + "".join(c["token"] for c in facts["choices"]) == facts["text"]
    assert facts["tokens"] == 20
    lines = command(*flags, "--show-probs", cwd=trained).stdout.splitlines()
    assert len(lines) == 20
    for line, choice in zip(lines, facts["choices"], strict=True):
        token, probability, others = line.split("\t")
        shown = {" ": "␣", "\n": "⏎"}.get(choice["token"], choice["token"])
        assert token == shown and probability == f"{choice['probability']:.4f}"
        assert others.count("0.") == len(choice["runners_up"])
    tinted = on_a_terminal(*flags, "--show-probs", cwd=trained)
    assert tinted.startswith("the\x1b[") and "least likely" in tinted
    for other in (["--num-samples", "2"], ["-i"]):
        fails(*flags, "--show-probs", *other, cwd=trained, code=2, says="--show-probs", hints="")


def test_a_text_does_not_command_a_terminal(tmp_path: Path) -> None:
    """Text of models and users is untrusted; it is escaped exactly there."""
    text = "\x1b]0;title\x07 \x9b31m\b\u202e\ufeff\r\n\t."
    (tmp_path / "text.txt").write_text(text * 40, encoding="utf-8", newline="")
    command("prepare", "text.txt", cwd=tmp_path)
    flags = ["--steps", "1", "--block-size", "4", "--embed-dim", "8", "--heads", "1"]
    command("train", *flags, "--model", "transformer", cwd=tmp_path)
    sample = ["sample", "--prompt", text, "--tokens", "200", "--seed", "1"]
    in_a_pipe = command(*sample, "--json", cwd=tmp_path)
    said = json.loads(in_a_pipe.stdout)["text"]
    assert said.startswith(text) and "\x1b" in said[len(text) :] and "\x9b" in said[len(text) :]
    shown = on_a_terminal(*sample, cwd=tmp_path)
    assert shown.startswith("\\x1b]0;title\\x07 \\x9b31m\\x08\\u202e\\ufeff\r\n\t.")
    assert not re.search(r"[\x00-\x08\x0b-\x0c\x0e-\x1f\x7f-\x9f\u202e\ufeff]", shown)
    tinted = on_a_terminal(*sample, "--show-probs", cwd=tmp_path)
    assert not re.search(r"[\x00-\x08\x0b-\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]", tinted)
    assert not re.search(r"\x1b(?!\[[0-9;]*m)", tinted)  # but for colours, our own
    hostile = (tmp_path / "checkpoints" / "transformer-001").rename(tmp_path / "a\x1b]0;t\nb")
    for arguments in (["eval"], ["report"], ["attend", "t"], ["sample", "--tokens", "1"]):
        said = command(*arguments, hostile, cwd=tmp_path).stderr
        assert "a\\x1b]0;t\\nb" in said and "\x1b" not in said
