"""Weights divided among processes: the same numbers, and checkpoints that any number reads."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import attnlm
from attnlm.base import files
from attnlm.compute.processes import ALONE, rows_of_rank
from attnlm.config.settings import resolve
from attnlm.runs.checkpoint import ShardedCheckpoints, load_checkpoint, named_tensors
from attnlm.runs.run import Run
from tests.models import parts_of, timeless
from tests.processes import commands, ended, ranks, some_way_on

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="gloo and signals of Unix")
TRAIN = (
    *("train", "fruits-char", "--model", "multi-head", "--batch-size", "6", "--block-size", "8"),
    *("--seed", "1", "--shard", "--steps", "96", "--eval-every", "12", "--gradient-clip", "1"),
)


@pytest.fixture(scope="module")
def whole(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of two processes that nobody disturbed."""
    arguments = (*TRAIN, "--name", "whole")
    commands(project, tmp_path_factory.mktemp("out"), 0, arguments, arguments)
    return attnlm.open_run(project / "checkpoints" / "whole")


def tensors(run: Run, which: str = "last") -> dict[str, Tensor]:
    _, weights, state = load_checkpoint(run.path / which, run.config.spec, run.vocab_size)
    return named_tensors(weights, state)


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_sharded_run_equals_an_unsharded_one_and_every_command_reads_it(
    whole: Run, project: Path
) -> None:
    settings: dict[str, Any] = {**whole.config.settings(), "processes": 1, "shard": False}
    alone = attnlm.train(
        project / "data" / "fruits-char", checkpoint_dir=project / "alone", **settings
    )
    for one, other in zip(timeless(alone.path)[:3], timeless(whole.path), strict=False):
        assert one["step"] == other["step"]
        assert one["val_loss"] == pytest.approx(other["val_loss"], rel=1e-4)
    names = {path.name for path in whole.path.iterdir()}
    assert names == {
        *("best", "last", "config.json", "metrics.jsonl"),
        *("ticker.jsonl", "tokenizer.json", "curve.png"),
    }
    assert {path.suffix for path in whole.last.iterdir()} == {".json", ".safetensors"}
    assert len(list(whole.last.iterdir())) == 5 and len(list(whole.best.iterdir())) == 3
    model, _ = attnlm.load_model(whole)
    evaluation = attnlm.evaluate(whole, data_dir=project / "data")
    best = min(float(record["val_loss"]) for record in timeless(whole.path))
    assert evaluation.loss == pytest.approx(best, rel=1e-5)
    assert sum(p.numel() for p in model.parameters()) == whole.parameters
    assert len(attnlm.samples(whole, num_samples=1, tokens=20, seed=1)[0]) > 10


@pytest.mark.parametrize("count", [1, 3, 40])
def test_any_number_of_processes_reads_its_rows(count: int, whole: Run) -> None:
    expected = tensors(whole)
    parts = []
    for rank in range(count):
        about = whole.config.spec, whole.vocab_size, rank, count
        _, weights, state = load_checkpoint(whole.last, *about)
        parts.append(named_tensors(weights, state))
    for name, tensor in expected.items():
        for rank, part in enumerate(parts):
            assert torch.equal(part[name], tensor[rows_of_rank(len(tensor), rank, count)])


def test_pytorch_loads_sharded_checkpoints(whole: Run) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    expected = tensors(whole)
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    with pytest.warns(UserWarning, match="single process"):
        load(found, storage_reader=HuggingFaceStorageReader(str(whole.last)), no_dist=True)
    assert_equal(found, expected)


def test_a_stopped_run_resumes_with_any_number_of_processes(
    whole: Run, project: Path, tmp_path: Path
) -> None:
    words = [(*TRAIN, "--name", "stopped")] * 2
    said = commands(project, tmp_path, 143, *words, signum=signal.SIGTERM)
    assert "".join(one for _, one in said).count("stopped; the last complete step, ") == 1
    path = whole.path.with_name("stopped")
    stopped = attnlm.open_run(path)
    assert 24 <= stopped.checkpoint("last").step < 96
    other = shutil.copytree(path, path.with_name("copy"))
    commands(project, tmp_path, 0, *[("train", "--resume", "stopped")] * 2)
    assert_equal(tensors(stopped), tensors(whole))
    assert_equal(tensors(stopped, "best"), tensors(whole, "best"))
    assert timeless(path) == timeless(whole.path)
    alone = attnlm.train(resume=other, processes=1, data_dir=project / "data")
    assert alone.config.training.processes == 1 and alone.config.training.shard
    for one, two in zip(timeless(other), timeless(whole.path), strict=True):
        assert one["val_loss"] == pytest.approx(two["val_loss"], rel=1e-3)


@pytest.mark.slow
def test_the_last_checkpoint_survives_a_killed_process(project: Path) -> None:
    with some_way_on(project, (*TRAIN, "--processes", "2")) as (process, path):
        os.kill(ranks(process.pid)[0], signal.SIGKILL)
        _, stderr = ended(process, 1)
    assert stderr.count("error: ") == 1
    run = attnlm.open_run(path)
    step = run.checkpoint("last").step
    assert step > 0 and tensors(run)
    attnlm.train(
        resume=path, processes=1, steps=step + 1, eval_every=step + 1, data_dir=project / "data"
    )
    assert not list(path.glob(".*")), "what the killed process left is removed"


def small_checkpoint(path: Path) -> tuple[Any, dict[str, Tensor]]:
    config = parts_of(resolve({"block_size": 4, "embed_dim": 8, "heads": 2}))
    named = named_tensors(dict(config.build(5).named_parameters()), {})
    copies = {name: p.detach().clone() for name, p in named.items()}
    checkpoints = ShardedCheckpoints(ALONE)
    saved = []
    checkpoints.save(path.parent, {path.name: (copies, {"step": 1})}, lambda: saved.append(1))
    checkpoints.finish()
    assert saved == [1]
    return config, copies


def test_a_checkpoint_replaces_an_older_one_in_one_step(tmp_path: Path) -> None:
    config, first = small_checkpoint(tmp_path / "last")
    again, second = small_checkpoint(tmp_path / "last")
    assert again == config
    assert any(not torch.equal(first[name], second[name]) for name in first)
    facts, loaded, state = load_checkpoint(tmp_path / "last", config, 5)
    assert facts == {"step": 1} and not state
    assert_equal(named_tensors(loaded, {}), second)
    assert [p.name for p in tmp_path.iterdir()] == ["last"]


def test_a_best_checkpoint_that_fails_leaves_the_older_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a run would be resumed with a best checkpoint that is missing."""

    def full(path: Path, content: Any) -> None:
        raise OSError(28, f"No space left for {path.parent.name}")

    monkeypatch.setattr(files, "write_json", full)
    checkpoints = ShardedCheckpoints(ALONE)
    content: Any = {"model.weight": torch.ones(2, 2)}, {}
    checkpoints.save(tmp_path, {"best": content, "last": content})
    with pytest.raises(OSError, match="No space left for best"):
        checkpoints.finish()
    assert not list(tmp_path.iterdir())


def sealed(path: Path) -> None:
    """Makes the hashes fit the files again, as somebody who forges a checkpoint would."""
    facts = files.read_json(path / "facts.json")
    facts["files"] = {
        name: files.file_hash(path / name) for name in facts["files"] if (path / name).exists()
    }
    files.write_json(path / "facts.json", facts)


def rewritten(path: Path, change: Any) -> None:
    """Changes the tensors and the places of a checkpoint's one file."""
    (file,) = path.glob("*.safetensors")
    found = load_file(file)
    places = {name: {"saved_offsets": [0] * tensor.ndim} for name, tensor in found.items()}
    change(found, places)
    save_file(found, file, {"DCP_SHARDING_INFO": json.dumps(places), "format": "pt"})
    sealed(path)


HEAD = "model.head.weight"
Forge = Callable[[dict[str, Tensor], dict[str, Any]], object]


def moved(*place: object) -> Forge:
    return lambda found, places: places[HEAD].update(saved_offsets=list(place))


def changed(change: Callable[[Tensor], Tensor]) -> Forge:
    return lambda found, places: found.update({HEAD: change(found[HEAD]).clone()})


@pytest.mark.parametrize(
    ("forge", "message"),
    [
        *((moved(*place), "is damaged") for place in ((2, 0), (-1, 0), ("a", None))),
        (lambda found, places: places.pop(HEAD), "is damaged"),
        (changed(lambda head: head[:-1]), "is damaged"),
        (changed(lambda head: head[:, :-1]), "does not contain the model"),
        (changed(lambda head: head.half()), "does not contain the model"),
        (lambda found, places: found.pop(HEAD), "does not contain the model"),
        (lambda found, places: found.update(more=torch.zeros(3)), "does not contain the model"),
    ],
)
def test_a_forged_checkpoint_is_refused(forge: Forge, message: str, tmp_path: Path) -> None:
    path = tmp_path / "last"
    config, _ = small_checkpoint(path)
    rewritten(path, lambda found, places: None)
    load_checkpoint(path, config, 5)
    rewritten(path, forge)
    with pytest.raises(attnlm.AttnlmError, match=message):
        load_checkpoint(path, config, 5)


def test_a_damaged_folder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "last"
    config, _ = small_checkpoint(path)

    def refused(says: str) -> None:
        with pytest.raises(attnlm.AttnlmError, match=says):
            load_checkpoint(path, config, 5)

    (file,) = path.glob("*.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    refused("is damaged")
    file.write_bytes(b"\xff" * 9)
    sealed(path)
    refused("is damaged")
    file.unlink()
    refused("cannot read")
    (tmp_path / file.name).write_bytes(content)  # names of files do not lead elsewhere
    facts = files.read_json(path / "facts.json")
    facts["files"] = {f"../{file.name}": files.file_hash(tmp_path / file.name)}
    files.write_json(path / "facts.json", facts)
    refused("is damaged")
    shutil.rmtree(path)
    path.write_text("a file")
    refused("cannot read")


def test_unsupported_sharding_and_recomputation_are_refused() -> None:
    with pytest.raises(attnlm.UsageError, match="`compile` on cannot be combined with `shard`"):
        attnlm.train(shard=True, compile="on")
    with pytest.raises(attnlm.UsageError, match="bigram does not support"):
        attnlm.train(model="bigram", recompute=True)


def test_recomputed_gradients_are_the_same(project: Path) -> None:
    common: dict[str, Any] = {"model": "transformer", "block_size": 8, "batch_size": 6, "seed": 1}
    common |= {"dropout": 0.3, "steps": 5, "threads": 2, "checkpoint_dir": project / "recomputed"}
    data = project / "data" / "fruits-char"
    runs = [attnlm.train(data, recompute=recompute, **common) for recompute in (False, True)]
    first, second = (
        dict(attnlm.load_model(run, checkpoint="last")[0].named_parameters()) for run in runs
    )
    for name, values in first.items():
        assert torch.equal(values, second[name])
