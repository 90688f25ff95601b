"""Adapters in the format of `peft`: the same logits there and here, both ways."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import attnlm
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.runs.run import Run
from tests.command import attnlm as command
from tests.command import fails
from tests.models import places, prepared
from tests.tolerances import assert_near

TRAINING = {"steps": 8, "eval_every": 8, "batch_size": 4, "seed": 1, "device": "cpu", "threads": 1}
SIZES: dict[str, Any] = {
    "embed_dim": 24,
    "heads": 4,
    "layers": 2,
    "block_size": 10,
    **TRAINING,
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"model": "gpt2"},
    "llama": {"model": "llama", "kv_heads": 2},
    "qwen": {"model": "transformer"},
    "bare": {"model": "gpt2", "mlp": "none", "projection": False},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with the data set fruits-char, and an exported run of each stock class."""
    path = tmp_path_factory.mktemp("project")
    prepared(path)
    for name, parts in MODELS.items():
        run = attnlm.train(**places(path), name=name, **parts, **SIZES)
        attnlm.export(run, path / f"{name}-hf")
    return path


@pytest.fixture(scope="module")
def peft() -> Any:
    pytest.importorskip("transformers", reason="transformers is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("peft", reason="peft is not installed")


def adapted(folder: Path, name: str, **settings: Any) -> Run:
    given = {"lora": 3, "learning_rate": 0.01, **TRAINING, **settings}
    return attnlm.train("fruits-char", start_from=name, **places(folder), **given)


def base_of(folder: Path, name: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / f"{name}-hf")


IDS = torch.randint(20, (3, 10), generator=torch.Generator().manual_seed(1))


def logits_of(run: Run) -> torch.Tensor:
    model, _ = attnlm.load_model(run, device="cpu")
    with torch.no_grad():
        logits: torch.Tensor = model(IDS)
    return logits


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "on"),
    [
        *[("gpt2", "all"), ("gpt2", "key,down"), ("llama", "query,value"), ("qwen", "all")],
        ("bare", "all"),
    ],
)
def test_peft_loads_exported_adapters(
    name: str, on: str, folder: Path, peft: Any, tmp_path: Path
) -> None:
    run = adapted(folder, name, lora_on=on)
    ours = logits_of(run)
    theirs = peft.PeftModel.from_pretrained(base_of(folder, name), run.adapter).eval()
    with torch.no_grad():
        assert_near(theirs(IDS).logits, ours)
        assert_near(theirs.base_model.model(IDS).logits, ours)
        with theirs.disable_adapter():
            assert (theirs(IDS).logits - ours).abs().max() > 0.01
    attnlm.export(run, tmp_path / "folded")
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        folded = AutoModelForCausalLM.from_pretrained(tmp_path / "folded")(IDS).logits
    assert_near(folded, ours)

    again = attnlm.import_run(run.adapter, base=name, checkpoint_dir=folder / "checkpoints")
    assert_near(logits_of(again), ours)
    assert again.parent == run.parent


ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "fused": ("gpt2", {"r": 5, "lora_alpha": 10, "target_modules": ["c_attn"]}),
    "all of gpt2": ("gpt2", {"r": 2, "target_modules": ["c_attn", "c_proj", "c_fc"]}),
    "ranks": (
        "llama",
        {
            "r": 4,
            "lora_alpha": 6,
            "target_modules": ["q_proj", "v_proj", "up_proj"],
            "rank_pattern": {"q_proj": 2},
            "alpha_pattern": {"mlp.up_proj": 1},
        },
    ),
    "one layer": ("llama", {"target_modules": ["o_proj"], "layers_to_transform": [1]}),
    "square root": ("qwen", {"target_modules": "all-linear", "use_rslora": True}),
}


def theirs_of(folder: Path, peft: Any, base: str, settings: dict[str, Any]) -> Any:
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings)
    torch.manual_seed(1)
    return peft.get_peft_model(base_of(folder, base), config).eval()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_of_peft_can_be_imported(
    name: str, folder: Path, peft: Any, tmp_path: Path
) -> None:
    base, settings = ADAPTERS[name]
    theirs = theirs_of(folder, peft, base, settings)
    theirs.save_pretrained(tmp_path / "theirs")
    run = attnlm.import_run(tmp_path / "theirs", base=base, checkpoint_dir=folder / "checkpoints")
    with torch.no_grad():
        expected = theirs(IDS).logits
    assert_near(logits_of(run), expected)
    parent = attnlm.open_run(base, checkpoint_dir=folder / "checkpoints")
    assert (logits_of(parent) - expected).abs().max() > 0.01
    assert adapted(folder, run.name, steps=1, learning_rate=1e-9).parent is not None


@pytest.mark.filterwarnings("ignore")
def test_unsupported_adapters_are_refused(folder: Path, peft: Any, tmp_path: Path) -> None:
    before = sorted((folder / "checkpoints").iterdir())
    for name, settings, says in (
        ("bare", {"target_modules": ["c_attn", "c_fc"]}, "c_fc.* is not an adapter of GPT2"),
        ("bare", {"target_modules": ["attn.c_proj"]}, "c_proj.* is not an adapter of GPT2"),
        ("gpt2", {"target_modules": ["c_attn"], "use_dora": True}, "'use_dora' True"),
        ("gpt2", {"target_modules": ["c_attn"], "bias": "all"}, "'bias' 'all'"),
        ("gpt2", {"target_modules": ["wte"]}, "is not an adapter of GPT2LMHeadModel"),
        ("gpt2", {"target_modules": ["c_attn"], "modules_to_save": ["lm_head"]}, "'modules_to_sav"),
    ):
        theirs_of(folder, peft, name, settings).save_pretrained(tmp_path)
        with pytest.raises(AttnlmError, match=says):
            attnlm.import_run(tmp_path, base=name, checkpoint_dir=folder / "checkpoints")
    assert sorted((folder / "checkpoints").iterdir()) == before


def test_a_damaged_adapter_is_reported_in_one_line(folder: Path, tmp_path: Path) -> None:
    run = adapted(folder, "gpt2", steps=1)
    path = run.adapter
    config, tensors = (path / f"adapter_{n}" for n in ("config.json", "model.safetensors"))
    arguments = "import", path, "--base", "gpt2"
    fails(*arguments[:2], cwd=folder, code=2, says="is an adapter", hints="--base")
    other = {"says": "not an adapter of Llama", "hints": "peft"}
    fails("import", path, "--base", "llama", cwd=folder, code=1, **other)
    intact, described = load_file(tensors), json.loads(config.read_text())
    first = min(intact)
    for changed, says in (
        ({n: t for n, t in intact.items() if n != first}, "needs both matrices"),
        ({**intact, first: intact[first][:, :5].contiguous()}, "have shapes"),
        ({**intact, first: intact[first] * float("nan")}, "NaN"),
        ({**intact, "more": intact[first].clone()}, "not an adapter of GPT2LMHeadModel"),
        ({}, "no adapters"),
    ):
        save_file(changed, tensors)
        fails(*arguments, cwd=folder, code=1, says=says, hints="")
    save_file(intact, tensors)
    for change, says in (
        ({"lora_alpha": "much", "alpha_pattern": {}}, "'lora_alpha' 'much', which is not a"),
        ({"rank_pattern": [1]}, "not a table"),
        ({"use_rslora": "x"}, "'use_rslora' 'x'"),
        ({"target_modules": ["evil"]}, "does not fit"),
        ({"r": 7, "rank_pattern": {}}, "does not fit"),
        ({"rank_pattern": {".*": 3}}, "not a table of modules"),
        ({"peft_type": "LOHA"}, "'LOHA'"),
    ):
        config.write_text(json.dumps({**described, **change}))
        fails(*arguments, cwd=folder, code=1, says=says, hints="")
    config.write_text(json.dumps(described))
    tensors.write_bytes(b"nothing")
    fails(*arguments, cwd=folder, code=1, says="damaged", hints="copy")
    tensors.unlink()
    fails(*arguments, cwd=folder, code=1, says="cannot read", hints="copy")


def test_an_adapter_without_a_stock_class_cannot_be_exported(folder: Path, tmp_path: Path) -> None:
    parent = attnlm.train(**places(folder), model="multi-head", steps=2, seed=1, device="cpu")
    run = adapted(folder, parent.name, steps=2)
    assert not run.adapter.exists() and run.best.exists()
    arguments = "import", adapted(folder, "gpt2", steps=1).adapter, "--base", parent.name
    fails(*arguments, cwd=folder, code=2, says="no stock class", hints="--model")
    with pytest.raises(UsageError):
        attnlm.import_run(tmp_path, base=parent)
    assert command("sample", "--run", run.path, "--tokens", "3", cwd=folder).stdout
