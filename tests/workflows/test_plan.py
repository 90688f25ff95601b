"""Output of `plan`: counted, estimated and measured."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.cli.app import root_command
from attnlm.config.settings import resolve
from attnlm.config.variants import variant
from attnlm.data.dataset import Dataset
from attnlm.data.prepare import prepare
from attnlm.model.architecture import MODELS
from attnlm.model.inspection import parameter_count
from attnlm.model.layers import dropout_from
from attnlm.model.ops import Kernels, use_kernels
from attnlm.model.ops.loss import LOGITS_AT_ONCE
from attnlm.training.memory import FACTOR, estimate_memory
from attnlm.training.optimizer import Optimizer
from attnlm.workflows.plan import Plan, plan
from attnlm.workflows.train import train
from tests.command import alone, attnlm, fails
from tests.models import SIZES, VARIANTS, needs_kernels, parts_of

LLAMA_1B: dict[str, Any] = variant(
    "llama:layers=16:embed_dim=2048:heads=32:kv_heads=8:mlp_width=8192:tie_embeddings=true:"
    "block_size=4096:optimizer=adamw"
)


def stated(**settings: Any) -> Plan:
    """A plan for which nothing is measured."""
    return plan(**{"vocab_size": 65, "peak": 1e12, "device": "cpu", **settings})


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(("vocab_size", "at_once"), [(11, 2**21), (300, 3000)])
def test_flops_equal_the_count_of_pytorch(
    name: str, vocab_size: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference implementation never holds all logits if there are many ids and tokens."""
    monkeypatch.setitem(LOGITS_AT_ONCE, "cpu", at_once)
    a = parts_of(resolve(variant(name), SIZES))
    model = a.build(vocab_size)
    ids = torch.zeros((2, a.block_size), dtype=torch.long)
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH):
        with counter, torch.no_grad():
            model(ids)
        assert counter.get_total_flops() == a.costs(vocab_size).forward_flops * ids.numel()
        with counter:
            model.loss(ids, ids).backward()
        assert counter.get_total_flops() == a.costs(vocab_size).training_flops * ids.numel()


@pytest.mark.parametrize("name", ["transformer", "gpt2", "wide-head", "llama:kv_heads=2"])
def test_flops_of_an_update_equal_the_count_of_pytorch(name: str) -> None:
    config = resolve({**variant(name), "optimizer": "muon"}, SIZES)
    model = parts_of(config).build(65)
    optimizer = Optimizer(model, config.training)
    with FlopCounterMode(display=False) as counter:
        optimizer.update(0)
    of_settings = {**variant(name), **{k: v for k, v in SIZES.items() if k in config.settings()}}
    assert counter.get_total_flops() == stated(**of_settings, optimizer="muon").update_flops
    assert stated(**of_settings, optimizer="adamw").update_flops == 0


KEPT = (
    *(name for name in VARIANTS if "projection=false" not in name),
    *("transformer:dropout=0.1", "gpt2:dropout=0.1"),
)


@needs_kernels
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("name", KEPT)
def test_activations_equal_the_tensors_that_autograd_keeps(name: str, compiled: bool) -> None:
    """The short formula comes near it, but for models that keep hardly anything."""
    sizes = {"embed_dim": 92, "heads": 4, "head_size": 22, "layers": 3, "block_size": 64}
    config = resolve(variant(name), sizes)
    a, vocab_size, windows = parts_of(config), 7, 5
    model = a.build(vocab_size).train()
    tensors = [*model.parameters(), *model.buffers()]
    lasting = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in lasting:
            kept[storage.data_ptr()] = storage
        return tensor

    ids = torch.zeros((windows, a.block_size), dtype=torch.long)
    generators = [torch.Generator() for _ in range(windows)] if a.dropout else []
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        use_kernels(Kernels(compiled)),
        dropout_from(generators),
    ):
        model.loss(ids, ids)
    found = sum(storage.nbytes() for storage in kept.values())
    costs = a.costs(vocab_size)
    by_blocks = costs.layers * (costs.kept_features + costs.kept_inputs)
    estimated = 4 * (by_blocks + 2 * costs.lm_head_inputs + vocab_size)
    most = 3 if name == "dot-product" else FACTOR
    assert found / FACTOR < ids.numel() * estimated < most * found


def test_memory_is_given_for_computation() -> None:
    config = resolve({**LLAMA_1B, "batch_size": 64, "processes": 64})
    parameters = parameter_count(config.spec, 32_000)
    sizes = config, 32_000, parameters, 10**6, "cuda"
    whole = estimate_memory(*sizes)
    less = replace(config, training=replace(config.training, recompute=True))
    recomputed = estimate_memory(less, *sizes[1:])
    assert whole.gradients == 4 * parameters and whole.optimizer == 8 * parameters
    # Of each block its input only, and all of one.
    assert recomputed.activations < whole.activations / 4
    assert recomputed.weights == whole.weights
    doubled = replace(config, training=replace(config.training, processes=32))
    assert estimate_memory(doubled, *sizes[1:]).activations == 2 * whole.activations


def test_a_billion_parameters_by_hand() -> None:
    """Llama 3.2 1B has 1,235,814,400; 6·N·D, and attention on top."""
    there = {"device": "cuda", "processes": 64, "peak": 989e12, "share": 0.4}
    planned = stated(**{**LLAMA_1B, **there, "vocab_size": 128_256, "batch_size": 512})
    assert planned.parameters == 1_235_814_400
    assert planned.parameters - planned.parameters_without_embeddings == 128_256 * 2048
    attention = 12 * 16 * 2048 * 4096
    norms = 33 * 2048
    assert planned.training_flops == 6 * (1_235_814_400 - norms) + attention
    assert planned.tokens == 20 * 1_235_814_400
    assert planned.flops == pytest.approx(planned.tokens * planned.training_flops, rel=1e-3)
    assert planned.seconds == pytest.approx(planned.flops / (64 * 0.4 * 989e12))
    assert planned.device_hours == pytest.approx(64 * planned.seconds / 3600)
    assert planned.pf_days == pytest.approx(planned.flops / 8.64e19)


@pytest.mark.parametrize("model", MODELS)
def test_every_model_grows(model: str) -> None:
    if model == "bigram":
        with pytest.raises(UsageError, match="bigram has no matmuls"):
            stated(model=model)
        return
    planned = stated(model=model, batch_size=6, processes=2)
    grown = dict(planned.grown())
    kinds = ["width × 2", "context × 2", "processes × 2, batch × 2"]
    if "layers" in planned.config.settings():
        kinds.insert(1, "depth × 2")
        assert grown["depth × 2"].parameters > planned.parameters
    assert list(grown) == kinds
    assert grown["context × 2"].config.spec.block_size == 2 * planned.config.spec.block_size
    wider = parts_of(grown["width × 2"].config)
    assert wider.embed_dim == 2 * (parts_of(planned.config).embed_dim or 0)
    many = model in ("multi-head", "transformer", "gpt2", "llama", "qwen3")
    assert wider.heads == parts_of(planned.config).heads * (2 if many else 1)
    if many:
        assert wider.head_dim == parts_of(planned.config).head_dim
    for more in grown.values():
        assert more.flops_per_second == pytest.approx(planned.flops_per_second, rel=1e-6)
    together = grown["processes × 2, batch × 2"]
    assert together.tokens_per_second == pytest.approx(2 * planned.tokens_per_second, rel=0.5)


def test_the_budget_is_tokens_or_steps_or_twenty_for_each_parameter() -> None:
    assert stated(tokens=10**6).tokens == 10**6
    assert stated(tokens=2049).steps == 2  # of 2,048 tokens
    assert stated(steps=7).tokens == 7 * 2048
    planned = stated(recipe="r2-multi-head", optimizer="adamw")
    assert planned.tokens == 20 * planned.parameters
    grown = dict(planned.grown())["processes × 2"]  # which share the batch
    assert grown.config == planned.config.with_training(processes=2)
    assert grown.tokens_per_second == pytest.approx(2 * planned.tokens_per_second)


def test_the_model_of_a_run_is_planned(dataset: Dataset, tmp_path: Path) -> None:
    small: dict[str, Any] = {"layers": 1, "embed_dim": 16, "heads": 2, "block_size": 8, "steps": 1}
    run = train(dataset, model="llama", seed=1, device="cpu", checkpoint_dir=tmp_path, **small)
    planned = plan(dataset, start_from=run.name, checkpoint_dir=tmp_path, peak=1e9)
    assert planned.config.spec == run.config.spec
    with pytest.raises(UsageError, match="`layers` cannot be changed"):
        plan(dataset, start_from=run, layers=2)
    (tmp_path / "other.txt").write_text("another text " * 99)
    other = prepare(tmp_path / "other.txt", tokenizer="byte", data_dir=tmp_path / "data")
    with pytest.raises(AttnlmError, match="not encoded with the tokenizer of llama-001"):
        plan(other, start_from=run, peak=1e9)


def test_ten_steps_are_measured(dataset: Dataset) -> None:
    settings: dict[str, Any] = {"block_size": 8, "batch_size": 4, "threads": 1, "device": "cpu"}
    notes: list[object] = []
    measured = plan(dataset, **settings, on_event=notes.append)
    assert [getattr(note, "text", "") for note in notes] == ["measuring ten steps"]
    assert measured.vocab_size == dataset.vocab_size and measured.peak is None
    assert measured.config.training.compile in ("parts", "off")
    assert 0 < measured.step_seconds < 1
    made_up = plan(vocab_size=dataset.vocab_size, **settings)
    assert made_up.parameters == measured.parameters
    bigram = plan(vocab_size=7, model="bigram", **settings)
    assert bigram.step_flops == 0 and bigram.tokens_per_second > 0
    grown = dict(bigram.grown())
    assert grown["context × 2"].tokens_per_second == pytest.approx(bigram.tokens_per_second)
    with pytest.raises(AttnlmError, match="of memory, but cpu has"):
        plan(vocab_size=65, device="cpu", model="transformer", embed_dim=2**16, heads=2**8)


@pytest.mark.skipif(sys.platform == "win32", reason="gloo")
@pytest.mark.slow
def test_several_processes_are_measured_together(dataset: Dataset, tmp_path: Path) -> None:
    """Processes plan as they train; only one reports."""
    arguments = [str(dataset.path), "--processes", "2", "--block-size", "8", "--batch-size", "4"]
    more = ["--device", "cpu", "--json"]
    done = alone(["plan", *arguments, *more], tmp_path, env={"PYTHONWARNINGS": None})
    facts = json.loads(done.stdout)
    assert facts["settings"]["processes"] == 2 and facts["tokens_per_second"] > 0


def test_the_output_of_plan(dataset: Dataset, tmp_path: Path) -> None:
    arguments = ["plan", str(dataset.path), "--model", "transformer", "--optimizer", "adamw"]
    arguments += ["--peak", "1e12", "--share", "0.5", "--device", "cpu", "--processes", "4"]
    said = attnlm(*arguments, cwd=tmp_path).stdout
    facts = json.loads(attnlm(*arguments, "--json", cwd=tmp_path).stdout)
    assert f"transformer, {facts['parameters']:,} parameters" in said
    assert "0.5 of a stated peak of 1 TFLOP/s in each process" in said
    assert re.search(r"^width × 2 ", said, re.MULTILINE) and "in 4 processes" in said
    assert facts["flops_per_second"] == pytest.approx(0.5e12, rel=1e-6)
    assert sum(facts["memory_by_part"].values()) == facts["memory"]
    assert facts["growth"]["depth × 2"]["parameters"] > facts["parameters"]
    assert facts["share"] == 0.5 and facts["tokens"] == 20 * facts["parameters"]


@pytest.mark.parametrize(
    ("arguments", "code", "says", "hints"),
    [
        ("", 1, "there is no data set in", "or use --vocab-size"),
        ("--vocab-size 0 --peak 1e12", 2, "invalid value for --vocab-size: 0", "between"),
        ("--vocab-size 9 --tokens -3 --peak 1", 2, "invalid value for --tokens: -3", "between"),
        ("--vocab-size 9 --peak nan", 2, "invalid value for --peak: nan", "between"),
        ("--vocab-size 9 --peak 1e12 --share 1.5", 2, "invalid value for --share: 1.5", "and 1"),
        ("--vocab-size 9 --share 0.5", 2, "--share needs a --peak", "989e12"),
        ("--vocab-size 9 --model bigram --peak 1e9", 2, "bigram has no matmuls", "measure steps"),
        ("--vocab-size 9 --model bigram --heads 2", 2, "--heads does not apply", "--model"),
        ("--vocab-size 9 --processes 3 --peak 1", 2, "not divisible by --processes 3", "--batch"),
        ("--vocab-size 9 --device cuda", 1, "--device cuda cannot be used", "cpu"),
        ("--vocab-size 9 --learning-rate 1", 2, "no such option", "attnlm train"),
        ("fruits-char --vocab-size 9", 2, "--vocab-size cannot be combined", "only one"),
    ],
)
def test_bad_input_is_one_line_and_a_hint(
    arguments: str, code: int, says: str, hints: str, project: Path, tmp_path: Path
) -> None:
    cwd = tmp_path if not arguments else project
    fails("plan", *arguments.split(), cwd=cwd, code=code, says=says, hints=hints)


def test_every_setting_that_costs_anything_is_an_option() -> None:
    options = {option.name for option in root_command().get_command(None, "plan").params}
    costs = {"batch_size", "micro_batch_size", "optimizer", "device", "dtype", "compile", "threads"}
    assert costs | {"processes", "steps", "layers", "kv_heads", "dropout"} <= options
    assert not {"learning_rate", "seed", "eval_every"} & options
