"""Training on answers: the mask in every loss, the accuracy, and runs that answer questions."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import attnlm
from attnlm.base.errors import AttnlmError
from attnlm.compute.device import choose_device
from attnlm.config.settings import resolve
from attnlm.config.training import TrainingConfig
from attnlm.data.dataset import Dataset
from attnlm.data.examples import IGNORED, LONGER, Examples
from attnlm.generation.sampling import load_sampler
from attnlm.model.language_model import Bigram
from attnlm.model.loss import LOGITS_AT_ONCE, cross_entropy, linear_cross_entropy
from attnlm.runs.records import CheckpointFacts
from attnlm.training.one_layer import one_layer_form
from attnlm.training.state import TrainingState, initial_state
from attnlm.training.step import Stepper
from attnlm.training.validation import Split, right_answers, validation_loss
from attnlm.workflows.answers import ask, format_of, select_pairs, texts_to_patch
from tests.kit import command, quick_run
from tests.models import gradients, needs_kernels, parts_of, small_model
from tests.tolerances import assert_near

CPU = choose_device("cpu", "float32")
LEARNING: dict[str, Any] = {"model": "single-head", "block_size": 16, "batch_size": 8, "steps": 60}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """A data set of short additions."""
    folder = tmp_path_factory.mktemp("task")
    return attnlm.prepare("addition", digits=1, examples=60, data_dir=folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("learned")


@pytest.fixture(scope="module")
def run(folder: Path) -> attnlm.Run:
    """A run that copies two letters."""
    return quick_run(attnlm.prepare("copy", length=2, data_dir=folder / "data"), **LEARNING)


# --- The mask -------------------------------------------------------------------------------------


def _masked(shape: tuple[int, int], vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random inputs and targets, of which a third is ignored, and all of the first row."""
    generator = torch.Generator().manual_seed(1)
    inputs_BT = torch.randint(vocab_size, shape, generator=generator)
    targets_BT = torch.randint(vocab_size, shape, generator=generator)
    targets_BT[torch.rand(shape, generator=generator) < 0.3] = IGNORED
    targets_BT[0] = IGNORED
    return inputs_BT, targets_BT


@pytest.mark.parametrize("at_once", [2**21, 700])
@pytest.mark.parametrize("ignored", [IGNORED, -1])
def test_ignored_targets_have_no_loss_and_no_gradient(
    at_once: int, ignored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOGITS_AT_ONCE, "cpu", at_once)
    _, targets_BT = _masked((5, 9), 37)
    x_BTC = torch.randn(5, 9, 6, generator=torch.Generator().manual_seed(2)).requires_grad_()
    head = nn.Linear(6, 37)
    tensors = [x_BTC, head.weight, head.bias]
    reference = F.cross_entropy(head(x_BTC).flatten(0, 1), targets_BT.flatten())
    targets_BT = targets_BT.where(targets_BT >= 0, ignored)
    loss = linear_cross_entropy(x_BTC, head.weight, head.bias, targets_BT)
    found = torch.autograd.grad(loss, tensors)
    assert_near([loss, *found], [reference, *torch.autograd.grad(reference, tensors)])
    assert (found[0][targets_BT == ignored] == 0).all()


def test_a_loss_without_targets_is_zero() -> None:
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss = cross_entropy(logits, torch.full((2, 3), IGNORED))
    loss.backward()
    assert loss == 0 and logits.grad is not None and not logits.grad.any()


@pytest.mark.parametrize("name", ["bigram", "multi-head", "transformer", "gpt2"])
@pytest.mark.parametrize(
    "how", [{}, {"micro_batch_size": 1}, {"threads": 2}, {"compile": "modules"}], ids=str
)
def test_a_step_counts_the_answers_as_a_plain_loop_does(
    name: str, how: dict[str, Any], task: Dataset
) -> None:
    sizes: dict[str, Any] = {"block_size": 13, "batch_size": 4, "seed": 1, "steps": 5, "threads": 1}
    config = resolve({"model": name, "loss_on": "answers", "compile": "native", **sizes, **how})
    state = initial_state(config, task.vocab_size, CPU)
    for parameter in state.model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.2)
    stepper = Stepper(state, config, task)
    inputs, targets = map(torch.from_numpy, stepper.batches(0))
    assert (targets == IGNORED).float().mean() > 0.3
    logits_BTV = state.model(inputs)
    expected = F.cross_entropy(logits_BTV.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    expected_gradients = gradients(state.model, expected)
    state.optimizer.update = lambda *_, **__: None  # type: ignore[method-assign]
    assert float(stepper.step()) == pytest.approx(expected.item(), rel=1e-5)
    found = {n: p.grad for n, p in state.model.named_parameters() if p.grad is not None}
    assert_near(found, expected_gradients, 1e-4)


@pytest.mark.parametrize("counted", ["1", "01", "10", "0010", "1001", "00"])
def test_a_step_without_a_counted_target_does_not_lower_the_training_loss(
    counted: str, task: Dataset
) -> None:
    sizes: dict[str, Any] = {"block_size": 13, "batch_size": 4, "seed": 1, "steps": 5, "threads": 1}
    config = resolve({"model": "bigram", "compile": "modules", "loss_on": "answers", **sizes})
    state = initial_state(config, task.vocab_size, CPU)
    stepper = Stepper(state, config, task)
    inputs, targets = stepper.batches(0)
    state.optimizer.update = lambda *_, **__: None  # type: ignore[method-assign]
    for step, is_counted in enumerate(counted):
        if step == 2:  # as when the run is resumed
            stepper.check()
            stepper = Stepper(state, config, task)
        masked = targets if is_counted == "1" else np.full_like(targets, IGNORED)
        stepper.batches = lambda step, masked=masked: (inputs, masked)  # type: ignore[assignment]
        loss = float(stepper.step())
    stepper.check()
    assert state.counted_steps == counted.count("1")
    expected = math.log(task.vocab_size) if "1" in counted else 0.0
    found = state.loss_sum / max(1, state.counted_steps)
    assert (found, loss) == pytest.approx((expected, expected))


@needs_kernels
@pytest.mark.parametrize("ignored", [IGNORED, -1])
def test_the_one_layer_form_ignores_targets(ignored: int) -> None:
    model = small_model("multi-head", vocab_size=37).float()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    form = one_layer_form(model, 5, CPU)
    assert form is not None
    inputs_BT, targets_BT = _masked((5, model.block_size), 37)
    share = float((targets_BT >= 0).float().mean())
    loss = form(inputs_BT, targets_BT.where(targets_BT >= 0, ignored)) / share
    found = {n: p.grad / share for n, p in model.named_parameters() if p.grad is not None}
    expected = F.cross_entropy(model(inputs_BT).flatten(0, 1), targets_BT.flatten())
    assert_near({"loss": loss, **found}, {"loss": expected, **gradients(model, expected)})


@pytest.mark.parametrize("only_answers", [True, False])
@pytest.mark.parametrize("native", [False, pytest.param(True, marks=needs_kernels)])
def test_the_validation_loss_is_that_of_each_counted_token(
    task: Dataset, only_answers: bool, native: bool
) -> None:
    model = small_model("multi-head", task.vocab_size).float()
    assert task.val_examples is not None
    split = Split(task.val, 1.0, task.val_examples, only_answers)
    training = TrainingConfig(device="cpu", compile="native" if native else "modules")
    found = validation_loss(model, split, training)
    total, count = 0.0, 0
    firsts = task.val_examples.packed(13)
    for first in firsts:
        begin = task.val_examples.starts[first]
        end = int(task.val_examples.last_in_window(np.array([first]), 13)[0])
        ids = torch.from_numpy(task.val[begin:end].astype(np.int64))
        losses = F.cross_entropy(model(ids[None, :-1])[0], ids[1:], reduction="none")
        counts = task.val_examples.is_answer[begin + 1 : end] | (not only_answers)
        total += losses[torch.from_numpy(counts)].sum().item()
        count += int(counts.sum())
    assert found.tokens == count
    assert found.loss == pytest.approx(total / count, rel=1e-5)


# --- Whole answers --------------------------------------------------------------------------------


def test_greedy_decoding_and_one_forward_pass_find_the_same_right_answers(
    run: attnlm.Run, folder: Path
) -> None:
    dataset = attnlm.prepare(
        "copy", length=2, examples=80, name="two", tokenizer=str(run.path), data_dir=folder / "data"
    )
    assert dataset.val_examples is not None
    sampler = load_sampler(run)
    for data in (dataset, attnlm.open_dataset("copy-char", data_dir=folder / "data")):
        assert data.val_examples is not None
        model, _ = attnlm.load_model(run, device="cpu")
        once = right_answers(model, data.val, data.val_examples, CPU)
        said = ask(sampler, format_of(run), select_pairs(data))
        assert [one.is_right for one in said] == once.tolist()
    assert once.all()


def test_an_answer_beyond_the_context_is_wrong() -> None:
    model = parts_of(resolve({"model": "bigram", "block_size": 3})).build(5)
    assert isinstance(model, Bigram)
    with torch.no_grad():
        model.table.weight.copy_(torch.eye(5).roll(1, 1))
    tokens = np.array([0, 1, 2, 0, 1, 2, 3, 4], np.uint16)
    is_answer = np.array([False, True, True, False, True, True, True, True])
    examples = Examples(np.array([0, 3]), is_answer)
    assert right_answers(model, tokens, examples, CPU).tolist() == [True, False]


def test_a_run_on_a_task_records_its_accuracy(run: attnlm.Run, folder: Path) -> None:
    records = run.metrics()
    assert records[0]["accuracy"] == 0 and records[-1]["accuracy"] == 1
    assert run.config.training.loss_on == "answers" and run.dataset.floor == 0
    evaluation = attnlm.evaluate(run)
    assert evaluation.accuracy == 1 and evaluation.loss < 0.1


def test_questions_may_be_one_several_or_come_from_an_iterator(run: attnlm.Run) -> None:
    assert attnlm.generate(run, "ab") == attnlm.generate(run, iter(["ab"])) == ["ab"]
    assert attnlm.generate(run, ["ab", "zy="]) == ["ab", "zy"]
    assert attnlm.answer_pairs(run, [("ab", "ba")]) == [("ab", "ba", "ab")]
    assert attnlm.answer_pairs(run, zip("a", "b", strict=True))[0].answer == "b"


def test_the_best_checkpoint_can_be_chosen_by_accuracy() -> None:
    state = TrainingState.__new__(TrainingState)
    vars(state).update(vars(CheckpointFacts()))
    scores = [(2.0, 0.1), (1.0, 0.1), (3.0, 0.5), (0.5, 0.4), (3.0, 0.5)]
    assert [state.record_evaluation(*score) for score in scores] == [True, True, True, False, False]


def test_examples_longer_than_the_context_are_cut_or_refused(tmp_path: Path) -> None:
    dataset = attnlm.prepare("copy", length=8, examples=30, data_dir=tmp_path)
    settings: dict[str, Any] = {"model": "bigram", "steps": 1, "checkpoint_dir": tmp_path}
    notes: list[object] = []
    attnlm.train(dataset, block_size=9, **settings, on_event=notes.append)
    assert "30 of 30 training examples are longer" in str(notes)
    attnlm.train(dataset, block_size=8, loss_on="all", **settings)
    model = parts_of(resolve({"model": "bigram", "block_size": 8})).build(28)
    split = Split(dataset.val, 1.0, dataset.val_examples, only_answers=True)
    with pytest.raises(AttnlmError, match="ends before every answer of the validation split"):
        validation_loss(model, split, TrainingConfig(device="cpu"))


def test_changed_longer_questions_are_refused(tmp_path: Path) -> None:
    dataset = attnlm.prepare("copy", length=2, examples=10, data_dir=tmp_path)
    assert dataset.longer_examples()
    (dataset.path / LONGER).write_text('["a=", "a"]\n')
    with pytest.raises(AttnlmError, match="does not match its hash"):
        dataset.longer_examples()


# --- Commands -------------------------------------------------------------------------------------


def test_commands_ask_and_show_what_is_wrong(run: attnlm.Run, folder: Path) -> None:
    shown = command("sample", run.name, "--quiet", cwd=folder).stdout.splitlines()
    assert len(shown) == 10 and all(re.fullmatch(r"(\w\w)=\1\tright", line) for line in shown)
    answered = command("sample", run.name, "--prompt", "qr", "--quiet", cwd=folder)
    assert answered.stdout.rstrip() == "qr=qr"
    facts = json.loads(command("eval", run.name, "--json", cwd=folder).stdout)
    assert facts["accuracy"] == 1
    longer = run.open_dataset().longer_examples()
    assert longer is not None
    questions = run.tokenizer.decode(longer[0].tolist()).splitlines()
    pairs = [(q[: q.index("=")], q[q.index("=") + 1 :]) for q in questions]
    right = [answer.is_right for answer in attnlm.answer_pairs(run, pairs)]
    assert facts["longer_accuracy"] == sum(right) / len(right)
    lines = [{"prompt": "ab", "answer": "ab"}, {"prompt": "bc", "answer": "cb"}]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    done = command("eval", run.name, "--pairs", "pairs.jsonl", cwd=folder)
    assert done.stdout == "50.0% of answers right: 1 of 2\n"


def test_a_run_of_texts_is_asked_in_the_format_of_the_questions(
    run: attnlm.Run, folder: Path, tmp_path: Path
) -> None:
    task = attnlm.open_dataset("copy-char", data_dir=folder / "data")
    (tmp_path / "text.txt").write_text(task.tokenizer.decode(task.train.tolist()))
    text = attnlm.prepare(
        tmp_path / "text.txt", tokenizer=str(task.path), name="text", data_dir=folder / "data"
    )
    quick_run(text, name="text", **LEARNING)
    done = command("eval", "text", "--data", "copy-char", "--json", cwd=folder)
    right = json.loads(done.stdout)["accuracy"] * len(task.val_examples or ())
    assert len(task.val_examples or ()) - 20 < right < len(task.val_examples or ())


def test_a_conversation_answers_each_line(run: attnlm.Run, folder: Path) -> None:
    typed = "ab\nzy\n" * 6 + "cd\n"  # more than the context holds
    done = command("sample", run.name, "-i", "--temperature", "0", cwd=folder, stdin=typed)
    assert done.stdout.split() == ["ab", "zy"] * 6 + ["cd"]
    words = ("sample", run.name, "-i", "--temperature", "0", "--prompt", "qr")
    assert command(*words, cwd=folder, stdin="cd\n").stdout.split() == ["qr", "cd"]


def test_a_run_without_its_data_set_is_sampled_as_text(run: attnlm.Run, folder: Path) -> None:
    (folder / "data").rename(folder / "gone")
    done = command("sample", run.name, "--tokens", "3", cwd=folder)
    (folder / "gone").rename(folder / "data")
    assert "no questions to ask" in done.stderr and done.stdout


def test_silencing_heads_measures_the_answers(run: attnlm.Run, folder: Path) -> None:
    found = attnlm.heads(run, ablate=True, windows=500)
    expected = attnlm.evaluate(run)
    assert found.loss == pytest.approx(expected.loss, abs=1e-4)
    assert found.heads[0].loss_change is not None and found.heads[0].loss_change > 1


def test_recall_needs_two_layers_and_an_induction_head(tmp_path: Path) -> None:
    dataset = attnlm.prepare("recall", examples=4000, data_dir=tmp_path / "data")
    sizes = {"heads": 2, "embed_dim": 64, "block_size": 17, "batch_size": 64, "steps": 60}
    parts = {"model": "transformer", "mlp": "none", "positions": "learned"}
    given: dict[str, Any] = {**parts, **sizes, "seed": 1, "examples_per_window": 1}
    given |= {"eval_every": 60, "checkpoint_dir": tmp_path / "checkpoints"}
    runs = [attnlm.train(dataset, layers=layers, **given) for layers in (1, 2)]
    shallow, deep = (run.metrics()[-1]["accuracy"] for run in runs)
    assert shallow < 0.2 and deep > 0.8
    found = attnlm.heads(runs[1], windows=16).heads
    assert any((head.layer, head.name) == (0, "previous-token") for head in found)
    assert any((head.layer, head.name) == (1, "induction") for head in found)
    texts = texts_to_patch(dataset, 50)
    for clean, corrupted, answer, other in texts:
        (changed,) = (i for i in range(len(clean)) if clean[i] != corrupted[i])
        assert (clean[changed], corrupted[changed]) == (answer, other)
    cleans, others, *answers = zip(*texts, strict=True)
    pairs = [*zip(*answers, strict=True)]
    shares_LH = attnlm.patch(cleans, others, runs[1], answers=pairs).heads
    layer, head = divmod(int(np.argmax(shares_LH)), shares_LH.shape[1])
    assert {(one.layer, one.head): one.name for one in found}[layer, head] == "induction"
