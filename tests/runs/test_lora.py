"""Low-rank adapters: what is trained, what is kept, and that every reader sees them merged."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import attnlm
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.signals import Interrupted
from attnlm.compute.device import Device
from attnlm.config.settings import resolve
from attnlm.config.variants import variant
from attnlm.model.layers import Linear
from attnlm.model.linear_maps import LoRA, map_shapes
from attnlm.model.lora import add_adapters, merged_lora
from attnlm.model.textbook import forward
from attnlm.runs.load_model import load_weights
from attnlm.runs.run import Run
from attnlm.see.reproduce import train_command
from attnlm.training import run_writer
from attnlm.training.state import initial_state
from tests.command import ATTNLM
from tests.command import attnlm as command
from tests.models import VARIANTS, parts_of, places, prepared, small_model, some_ids
from tests.processes import ended, started
from tests.tolerances import assert_near

SMALL: dict[str, Any] = {
    "batch_size": 4,
    "steps": 6,
    "eval_every": 3,
    "seed": 1,
    "device": "cpu",
    "threads": 2,
}
CPU = Device("cpu", "float32", "requested")
ADAPTABLE = [name for name in VARIANTS if map_shapes(parts_of(resolve(variant(name))))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with the data set fruits-char and the run `parent`, a small gpt2."""
    path = tmp_path_factory.mktemp("project")
    prepared(path)
    sizes = {"block_size": 8, "heads": 2, "embed_dim": 16, "model": "gpt2"}
    attnlm.train(**places(path), name="parent", **{**SMALL, **sizes, "steps": 30})
    return path


def child(folder: Path, **settings: Any) -> Run:
    given = {"start_from": "parent", "lora": 3, **SMALL, **settings}
    return attnlm.train("fruits-char", **{**places(folder), **given})


def adapted(name: str, lora: LoRA) -> tuple[Any, Any]:
    """A small model with adapters that are not zero, of scale 2, and the same merged by hand."""
    plain, model = small_model(name), small_model(name)
    add_adapters(model, lora)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.copy_(torch.randn_like(p) * 0.3)
    for path, m in maps_of(model.double()).items():
        plain.get_submodule(path).weight.data += 2.0 * m.lora_up.data @ m.lora_down.data
    return plain, model


def maps_of(model: Any) -> dict[str, Any]:
    return {path: m for path, m in model.named_modules() if isinstance(m, Linear)}


@pytest.mark.parametrize("name", ADAPTABLE)
def test_adapters_equal_their_folded_weights(name: str) -> None:
    config = resolve({**variant(name), "lora": 3, "lora_on": "all"})
    lora = config.training.adapters
    assert lora is not None and lora.scale == 2.0
    plain, model = adapted(name, lora)
    named = dict(model.named_parameters())
    trained = {n: tuple(p.shape) for n, p in named.items() if p.requires_grad}
    assert trained == model.spec.costs(0).adapter_shapes(lora)
    ids = some_ids(3, model.architecture.block_size)
    logits = model(ids)
    torch.testing.assert_close(logits, plain(ids))
    assert (logits - small_model(name)(ids)).abs().max() > 0.1
    with merged_lora(model):
        assert dict(model.named_parameters()).keys() == dict(plain.named_parameters()).keys()
        textbook = forward(model.architecture, model.state_dict(), ids[0])
        torch.testing.assert_close(textbook, logits[0])
    assert torch.equal(model(ids), logits)


@pytest.mark.parametrize("name", ["gpt2", "llama:kv_heads=2:tie_embeddings=true", "multi-head"])
@pytest.mark.parametrize("recompute", [False, True])
def test_adapter_gradients_follow_from_folded_weights(name: str, recompute: bool) -> None:
    """Use the chain rule: dA = s Bᵀ dW and dB = s dW Aᵀ."""
    plain, model = adapted(name, LoRA(3, 6.0, tuple(map_shapes(small_model(name).architecture))))
    model.recompute = recompute
    ids = some_ids(3, model.architecture.block_size + 1)
    model.train().loss(ids[:, :-1], ids[:, 1:]).backward()
    plain.loss(ids[:, :-1], ids[:, 1:]).backward()
    for path, m in maps_of(model).items():
        d_weight = plain.get_submodule(path).weight.grad
        torch.testing.assert_close(m.lora_down.grad, 2.0 * m.lora_up.T @ d_weight)
        torch.testing.assert_close(m.lora_up.grad, 2.0 * d_weight @ m.lora_down.T)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def test_frozen_weights_have_no_gradients_and_moments(folder: Path) -> None:
    run = child(folder, lora_on="query,down", weight_decay=0.5)
    base, model = (weights_of(attnlm.open_run(run.path.parent / n)) for n in ("parent", run.name))
    changed = {name for name in base if not torch.equal(base[name], model[name])}
    maps = "attention.query", "mlp.down"
    assert changed == {f"blocks.{i}.{m}.weight" for i in (0, 1) for m in maps}
    lora = run.config.training.adapters
    assert lora is not None
    state = initial_state(run.config, run.vocab_size, CPU)
    numbers = run.config.spec.costs(0).adapter_numbers(lora)
    trained, means = state.optimizer.weights().values(), state.optimizer.state().values()
    assert [sum(map(torch.numel, some)) for some in (trained, means)] == [numbers, 2 * numbers]
    copied, gradient = state.optimizer.replica(state.model)  # type: ignore[attr-defined]
    assert len(gradient) == numbers
    for one, other in zip(copied.parameters(), state.model.parameters(), strict=True):
        assert one.data_ptr() == other.data_ptr()
        assert (one.grad is None) == (not one.requires_grad)


def weights_of(run: Run, which: str = "best") -> dict[str, Tensor]:
    return dict(attnlm.load_model(run, checkpoint=which, device="cpu")[0].named_parameters())


def test_a_new_adapter_changes_nothing_and_then_learns(folder: Path) -> None:
    parent = attnlm.open_run("parent", checkpoint_dir=folder / "checkpoints")
    run = child(folder, steps=30, eval_every=15)
    losses = [record["val_loss"] for record in run.metrics()]
    # The same weights, elsewhere in memory.
    assert losses[0] == pytest.approx(min(r["val_loss"] for r in parent.metrics()), rel=1e-5)
    assert losses[-1] < losses[0]
    assert run.config.training.optimizer == "adamw" and run.config.training.lora_alpha == 6
    assert attnlm.evaluate(run, checkpoint="last", **places(folder)).loss == losses[-1]
    assert run.last.stat().st_size < parent.best.stat().st_size


def test_an_adapter_is_resumed_exactly(folder: Path) -> None:
    settings = {"schedule": "constant", "dropout": 0.1, "micro_batch_size": 2}
    whole = child(folder, steps=12, **settings)
    half = child(folder, **settings)
    parted = attnlm.train(resume=half, steps=12, eval_every=3, **places(folder))
    assert whole.last.read_bytes() == parted.last.read_bytes()
    assert whole.metrics()[-1]["val_loss"] == parted.metrics()[-1]["val_loss"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="gloo and signals of Unix")
def test_several_processes_train_one_adapter(folder: Path) -> None:
    alone = child(folder, dropout=0.1)
    given = {**SMALL, "lora": 3, "dropout": 0.1, "processes": 2, "name": "two"}
    options = [(f"--{name.replace('_', '-')}", str(value)) for name, value in given.items()]
    arguments = "train", "fruits-char", "--from", "parent", *sum(options, ())
    ended(started(*ATTNLM, *arguments, cwd=folder), 0)
    two = attnlm.open_run(folder / "checkpoints" / "two")
    for one, other in zip(alone.metrics(), two.metrics(), strict=True):
        assert one["val_loss"] == pytest.approx(other["val_loss"], rel=1e-4)
    assert_near(weights_of(two), weights_of(alone), within=1e-3)


@pytest.mark.parametrize("links", [True, False])
def test_an_adapter_needs_no_parent_and_does_not_write_through_links(
    links: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of the parent are linked, or copied if links cannot be made."""
    if not links:
        monkeypatch.setattr("os.link", Mock(side_effect=OSError(1, "Operation not permitted")))
    shutil.copytree(folder / "checkpoints" / "parent", tmp_path / "parent")
    run = child(folder, start_from=tmp_path / "parent")
    assert run.base.samefile(tmp_path / "parent" / "best.safetensors") == links
    before = weights_of(run)
    shutil.rmtree(tmp_path / "parent")
    assert all(torch.equal(w, before[n]) for n, w in weights_of(run).items())
    shutil.rmtree(run.adapter)
    run.adapter.symlink_to(tmp_path)
    attnlm.train(resume=run, steps=8, **places(folder))
    assert not list(tmp_path.iterdir()) and not run.adapter.is_symlink()


def test_children_of_an_adapter_start_from_merged_weights(folder: Path) -> None:
    first = child(folder)
    expected = weights_of(first)
    for more in ({"lora": 2}, {}):
        settings = {**SMALL, "steps": 1, "learning_rate": 1e-12, "optimizer": "adamw", **more}
        run = attnlm.train("fruits-char", start_from=first, **places(folder), **settings)
        for name, weight in weights_of(run, "last").items():
            assert_near(weight, expected[name])


def test_the_command_of_an_adapter_reproduces_it_and_commands_read_it_merged(folder: Path) -> None:
    run = child(folder, lora_on="all", lora_alpha=1.5)
    _, *words = shlex.split(train_command(run))
    command(*words, "--checkpoint-dir", "elsewhere", "--name", "again", cwd=folder)
    again = attnlm.open_run(folder / "elsewhere" / "again")
    assert again.last.read_bytes() == run.last.read_bytes()

    done = command("eval", "--json", run.path, "--data-dir", folder / "data", cwd=folder)
    assert json.loads(done.stdout)["val_loss"] == min(r["val_loss"] for r in run.metrics())
    command("trace", "3 apples", "--run", run.path, cwd=folder)
    weights = load_weights(run, run.checkpoint())  # of a page in which it computes
    ids = some_ids(5)
    with torch.inference_mode():
        expected = attnlm.load_model(run, device="cpu")[0](ids[None])[0]
    assert_near(forward(parts_of(run.config), weights, ids), expected)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"start_from": None}, "`lora` needs a run to adapt"),
        ({"lora_on": "query,gate"}, "this gpt2 has no projection 'gate'"),
        ({"lora_on": "q_proj"}, "has no projection 'q_proj'"),
        ({"lora": None, "lora_alpha": 3.0}, "no effect without `lora`"),
        ({"lora": 0}, "invalid value for `lora`: 0"),
        ({"shard": True}, "`shard` cannot be combined with `lora`"),
        ({"optimizer": "muon"}, "`optimizer` muon cannot be combined with `lora`"),
        ({"compile": "on"}, "`compile` on cannot be combined with `lora`"),
    ],
)
def test_options_that_conflict_with_adapters_are_refused(
    settings: dict[str, Any], says: str, folder: Path
) -> None:
    given = {"start_from": "parent", "lora": 3, **SMALL, **settings}
    given = {name: value for name, value in given.items() if value is not None}
    with pytest.raises(UsageError) as refused:
        attnlm.train("fruits-char", **places(folder), **given)
    assert says in refused.value.message


def test_a_missing_or_different_base_is_reported(folder: Path) -> None:
    run = child(folder)
    run.base.unlink()
    with pytest.raises(AttnlmError, match=r"checkpoint not found: .*base\.safetensors"):
        attnlm.load_model(run)
    run.base.write_bytes(b"\0" * 999)
    with pytest.raises(AttnlmError, match="is damaged") as caught:
        attnlm.load_model(run)
    assert caught.value.hint == "copy the run's folder again, with all of its files"
    other = attnlm.open_run("parent", checkpoint_dir=folder / "checkpoints")
    shutil.copyfile(other.last, run.base)
    with pytest.raises(AttnlmError, match="does not contain the frozen weights"):
        attnlm.load_model(run)


def test_a_signal_while_adapters_are_put_back_loses_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = child(folder, name="undisturbed", eval_every=6)

    @contextlib.contextmanager
    def interrupted(model: Any) -> Iterator[None]:
        with merged_lora(model):
            yield
        next(m for m in model.modules() if isinstance(m, Linear)).lora_down = None
        raise Interrupted(signal.SIGINT)

    monkeypatch.setattr(run_writer, "merged_lora", interrupted)
    with pytest.raises(Interrupted):
        child(folder, name="disturbed", eval_every=6)
    monkeypatch.undo()
    run = attnlm.train(resume="disturbed", **places(folder))
    assert run.last.read_bytes() == whole.last.read_bytes()
