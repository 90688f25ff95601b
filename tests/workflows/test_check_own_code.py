"""`attnlm check`: the mistakes of lectures and notebooks, each caught or shown."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import attnlm
from attnlm.base.own_code import named_code
from attnlm.runs.manage import run_entry
from tests import own_code
from tests.kit import command

SIZES: dict[str, Any] = {"embed_dim": 8, "heads": 4, "block_size": 8}

MISTAKES = '''
import torch
from torch import nn
from torch.nn import functional as F


class Good(nn.Module):
    def __init__(self, embed_dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim)

    def weights(self, scores, later):
        return scores.masked_fill(later, -torch.inf).softmax(-1)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = self.weights(q @ k.mT, torch.ones(T, T).triu(1).bool())
        return (weights @ v).transpose(1, 2).flatten(2)


class Axis(Good):
    """Softmax over the queries, as in R4."""

    def weights(self, scores, later):
        return F.softmax(scores.masked_fill(later, -1e9), dim=-2)


class NoMask(Good):
    """As in R5."""

    def weights(self, scores, later):
        return scores.softmax(-1)


class Late(Good):
    """The mask comes after the softmax."""

    def weights(self, scores, later):
        return torch.softmax(scores, -1).masked_fill(later, 0)


class OneHead(Good):
    """As in R2: the argument is not used."""

    def __init__(self, embed_dim, heads):
        super().__init__(embed_dim, 1)


class NotFinite(Good):
    """The first row has no key."""

    def __init__(self, embed_dim, heads):
        super().__init__(embed_dim, heads)
        self.softmax = nn.Softmax(-1)

    def weights(self, scores, later):
        return self.softmax(scores.masked_fill(torch.ones_like(scores).triu() > 0, -torch.inf))


class Unused(Good):
    def __init__(self, embed_dim, heads):
        super().__init__(embed_dim, heads)
        self.spare = nn.Linear(embed_dim, embed_dim)


class BatchInTraining(Good):
    def forward(self, x):
        return super().forward(x - self.training * x.mean(0))


class InPlace(Good):
    def forward(self, x):
        y = super().forward(x).sigmoid()
        y += 1
        return y


class Noise(Good):
    def forward(self, x):
        return super().forward(F.dropout(x, 0.5))


class Pairs(Good):
    def forward(self, x):
        assert x.size(1) > 1
        return super().forward(x)


class Model(nn.Module):
    """Its own loss is not the cross-entropy."""

    def __init__(self, vocab_size, block_size):
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)

    def forward(self, ids, targets=None):
        logits = self.table(ids)
        return logits, None if targets is None else 2 * F.cross_entropy(logits.mT, targets)


class Sees(Model):
    """The whole text in a mean."""

    def forward(self, ids):
        return self.table(ids) + self.table(ids).mean(1, keepdim=True)
'''


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = own_code.written(tmp_path_factory.mktemp("code"))
    (folder / "wrong.py").write_text(MISTAKES)
    return folder


def found(code: Path, name: str, **settings: Any) -> dict[str, Any]:
    return {f.name: f for f in attnlm.check(f"{code}/{name}", **settings)}


def problems(findings: dict[str, Any]) -> set[str]:
    return {name for name, finding in findings.items() if finding.remedy}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("wrong.py:Good", SIZES),
        ("parts.py:Head", SIZES),
        ("parts.py:Head", {**SIZES, "model": "transformer"}),
        ("parts.py:ALiBi", SIZES),
        ("parts.py:Gate", {"model": "transformer", "part": "mlp", **SIZES}),
        ("models.py:lecture", {"block_size": 8}),
        ("models.py:Last", {"block_size": 8}),
        ("models.py:Recurrent", {"block_size": 8}),
    ],
)
def test_right_code_has_no_problem(code: Path, name: str, settings: dict[str, Any]) -> None:
    findings = found(code, name, **settings)
    # In these models, tables of N(0, 1) are both input and output.
    is_large = name in ("models.py:lecture", "models.py:Last")
    assert problems(findings) == ({"loss at start"} if is_large else set())
    assert findings["causality"].text == "logits depend on no later token"
    assert findings["contexts"].text == f"from 1 to {settings.get('block_size', 64)} tokens"
    got, wanted = findings["gradients"].text.split()[:3:2]
    assert got == wanted


@pytest.mark.parametrize(
    ("name", "where", "text", "remedy", "is_fatal"),
    [
        ("Axis", "causality", "when the later tokens", "softmax(dim=-1)", True),
        (
            "NoMask",
            "causality",
            "when the later tokens",
            "mask the scores before the softmax",
            True,
        ),
        ("Late", "causality", "when the later tokens", "mask the scores before the softmax", True),
        ("OneHead", "maps", "1 layer × 1 heads", "the model has `heads` 4", False),
        ("NotFinite", "causality", "computes NaN or infinity: whether", "all -inf", True),
        ("Unused", "gradients", "6 of 8", "attention.module.spare.weight", False),
        ("BatchInTraining", "batch", "batch change each other", "first axis", False),
        ("Noise", "evaluation", "logits differ by", "if self.training", False),
        ("Pairs", "contexts", "1 tokens: AssertionError", "allow any length", True),
    ],
)
def test_a_mistake_is_caught_or_shown(
    code: Path, name: str, where: str, text: str, remedy: str, is_fatal: bool
) -> None:
    findings = found(code, f"wrong.py:{name}", **SIZES)
    finding = findings[where]
    assert text in finding.text and remedy in finding.remedy, finding
    assert finding.is_fatal is is_fatal
    if "the later tokens" in text:  # the first of them is named too
        words = finding.text.split()
        assert 1 <= int(words[words.index("token") + 1]) < int(words[-3]) <= 8
    others = {"NotFinite": {"gradients", "batch", "evaluation", "loss at start"}}
    others |= {"Axis": {"maps"}, "Late": {"maps"}, "NoMask": {"maps"}}
    others |= {"Noise": {"batch", "gradients"}}
    assert problems(findings) <= {where} | others.get(name, set())


def test_code_without_gradients_is_an_error_that_says_so(code: Path) -> None:
    with pytest.raises(attnlm.AttnlmError, match="gradients cannot be computed: one of") as caught:
        found(code, "wrong.py:InPlace", **SIZES)
    assert "instead of y += x" in caught.value.hint and ": [" not in caught.value.message


def test_a_models_own_loss_is_compared(code: Path) -> None:
    finding = found(code, "wrong.py:Model", block_size=8)["its own loss"]
    assert "but the mean cross-entropy is" in finding.text
    assert "causality" in problems(found(code, "wrong.py:Sees", block_size=8))


def test_the_command_shows_findings_and_fails_if_training_would(code: Path, tmp_path: Path) -> None:
    sizes = ("--embed-dim", 8, "--heads", 4, "--block-size", 8)
    done = command("check", code / "wrong.py:Good", *sizes, cwd=tmp_path)
    assert "all of it holds" in done.stderr and "causality" in done.stdout
    done = command("check", code / "wrong.py:NoMask", *sizes, cwd=tmp_path, code=1)
    assert "→ mask the scores before the softmax" in done.stdout
    done = command("check", code / "wrong.py:NoMask", *sizes, "--json", cwd=tmp_path, code=1)
    (leak,) = [f for f in json.loads(done.stdout)["findings"] if f["name"] == "causality"]
    assert leak["is_fatal"] is True
    assert not list(tmp_path.iterdir())


def test_a_file_with_one_class_needs_no_name(tmp_path: Path) -> None:
    example = named_code("linear-attention").path
    done = command("check", example, "--embed-dim", 8, "--heads", 2, cwd=tmp_path)
    assert "linear_attention.py:LinearAttention" in done.stdout


# --- Training what is not causal ------------------------------------------------------------------

TRAIN = [f"--{n.replace('_', '-')}={v}" for n, v in own_code.SMALL.items()]
TRAIN += ["--embed-dim=8", "--heads=4"]
NOT_COMPARABLE = "not comparable"


def test_a_model_that_looks_ahead_is_trained_only_by_force(code: Path, project: Path) -> None:
    about = ("train", "--attention", f"{code}/wrong.py:NoMask", *TRAIN, "--name", "ahead")
    refused = command(*about, cwd=project, code=1).stderr
    assert "multi-head-NoMask is not causal" in refused
    assert not (project / "checkpoints/ahead").exists()
    done = command(*about, "--force", cwd=project)
    assert NOT_COMPARABLE in done.stderr
    run = attnlm.open_run(project / "checkpoints/ahead")
    assert re.fullmatch("the logits at token .* when the later tokens .* change", run.leaks)
    assert NOT_COMPARABLE in str(run.checkpoint("best"))
    entry = run_entry(run.path)
    assert entry is not None and entry.leaks == run.leaks
    assert NOT_COMPARABLE in command("eval", "ahead", cwd=project).stderr
    assert json.loads(command("eval", "ahead", "--json", cwd=project).stdout)["leaks"]
    listed = command("list", "runs", cwd=project)
    assert NOT_COMPARABLE in listed.stdout + listed.stderr
    (listed_run,) = json.loads(command("list", "runs", "--json", cwd=project).stdout)["runs"]
    assert listed_run["leaks"] == run.leaks
    assert NOT_COMPARABLE in command("sample", "ahead", "--tokens", 2, cwd=project).stderr
    command("train", *TRAIN, "--name", "causal", cwd=project)
    compared = command("compare", "ahead", "causal", cwd=project).stderr
    assert f"the loss of ahead is {NOT_COMPARABLE}: the model sees later tokens" in compared
    command("report", "ahead", cwd=project)
    assert NOT_COMPARABLE in (run.path / "report.html").read_text()
    resumed = command("train", "--resume", "ahead", "--steps", 6, cwd=project)
    assert NOT_COMPARABLE in resumed.stderr


def test_a_causal_model_is_never_marked(code: Path, project: Path) -> None:
    about = ("--attention", f"{code}/wrong.py:Good", *TRAIN, "--name", "good", "--force", "--json")
    done = command("train", *about, cwd=project)
    assert not json.loads(done.stdout)["leaks"]
    assert NOT_COMPARABLE not in str(attnlm.open_run(project / "checkpoints/good").checkpoint())
