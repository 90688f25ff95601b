"""LoRA adapters of `peft` become runs, merged by peft."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import attnlm
from attnlm.base.errors import AttnlmError
from tests.models import random_run
from tests.tolerances import assert_near

BASES = {"gpt2": "gpt2", "llama": "llama:kv_heads=2", "qwen": "transformer"}
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "fused": ("gpt2", {"r": 5, "lora_alpha": 10, "target_modules": ["c_attn"]}),
    "all of gpt2": ("gpt2", {"r": 2, "target_modules": ["c_attn", "c_proj", "c_fc"]}),
    "biases": ("gpt2", {"r": 2, "target_modules": ["c_attn"], "bias": "all"}),
    "a layer for each": ("gpt2", {"r": 2, "target_modules": ["c_fc"], "layers_to_transform": [1]}),
    "patterns": (
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
    "a whole module": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "embeddings": ("llama", {"r": 3, "target_modules": ["embed_tokens"]}),
    "weight decomposition": ("llama", {"target_modules": ["q_proj"], "use_dora": True}),
    "square root": ("qwen", {"target_modules": "all-linear", "use_rslora": True}),
    "without": ("qwen", {"target_modules": "all-linear", "exclude_modules": ["gate_proj"]}),
    "named by a pattern": ("qwen", {"target_modules": r".*\.1\..*_proj"}),
}
PER_CHANGE = ("fused", "patterns", "weight decomposition")


@pytest.fixture(scope="module")
def peft() -> Any:
    pytest.importorskip("transformers", reason="transformers is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("peft", reason="peft is not installed")


@pytest.fixture(scope="module")
def folder(dataset: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with exported models."""
    path = tmp_path_factory.mktemp("bases")
    for name, model in BASES.items():
        attnlm.export(random_run(model, dataset, path / "runs"), path / name)
    return path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in PER_CHANGE else pytest.mark.variants)
        for name in ADAPTERS
    ],
)
def test_an_adapter_is_imported_merged(name: str, folder: Path, peft: Any, tmp_path: Path) -> None:
    base, settings = ADAPTERS[name]
    theirs = adapted(folder / base, peft, **settings)
    theirs.save_pretrained(tmp_path / "adapter")
    before = torch.random.get_rng_state()
    run = attnlm.import_run(tmp_path / "adapter", checkpoint_dir=tmp_path / "checkpoints")
    assert torch.equal(torch.random.get_rng_state(), before)
    ids = torch.randint(run.vocab_size, (3, 40), generator=torch.Generator().manual_seed(1))
    model, _ = attnlm.load_model(run, device="cpu")
    with torch.no_grad():
        ours, expected = model(ids), theirs(ids).logits
        with theirs.disable_adapter():
            assert (theirs(ids).logits - expected).abs().max() > 0.01
    assert_near(ours, expected)
    assert run.imported_from == str(tmp_path / "adapter")


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_that_does_not_fit_is_refused(folder: Path, peft: Any, tmp_path: Path) -> None:
    path = tmp_path / "adapter"
    adapted(folder / "llama", peft, target_modules=["q_proj"]).save_pretrained(path)
    config, tensors = path / "adapter_config.json", path / "adapter_model.safetensors"
    described, intact = json.loads(config.read_text()), load_file(tensors)
    first = min(intact)

    def refused(says: str, **more: Any) -> None:
        with pytest.raises(AttnlmError, match=says) as error:
            attnlm.import_run(path, checkpoint_dir=tmp_path / "checkpoints", **more)
        assert error.value.hint and "\n" not in error.value.message
        assert not (tmp_path / "checkpoints").exists()

    refused("not found in the base model", base=folder / "gpt2")
    for changed, says in (
        ({n: t for n, t in intact.items() if n != first}, "does not fit its model"),
        ({**intact, first: intact[first][:, :5].contiguous()}, "size mismatch"),
        ({**intact, first: intact[first] * float("nan")}, "NaN"),
        ({**intact, "more": intact[first].clone()}, "does not fit its model"),
    ):
        save_file(changed, tensors)
        refused(says)
    save_file(intact, tensors)
    for change, says in (
        ({"peft_type": "LOHA"}, "is not LORA"),
        ({"megatron_config": {"a": 1}, "megatron_core": "evil"}, "names code"),
        ({"target_modules": ["evil"]}, "evil"),
        ({"base_model_name_or_path": "../nothing"}, "is not a folder"),
    ):
        config.write_text(json.dumps({**described, **change}))
        refused(says)
    config.write_text(json.dumps(described))
    tensors.rename(path / "adapter_model.bin")
    refused("No such file")


def adapted(base: Path, peft: Any, **settings: Any) -> Any:
    """Return a model of peft whose adapter changes what it computes."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    torch.manual_seed(1)
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings)
    theirs = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return theirs
