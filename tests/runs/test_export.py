"""Runs as stock classes of `transformers`: the same ids, logits and texts there."""

from __future__ import annotations

import functools
import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import attnlm
from attnlm.base.errors import AttnlmError
from attnlm.data.dataset import Dataset
from attnlm.tokens.tokenizer import CharTokenizer, Tokenizer
from attnlm.tokens.tokenizer_json import library_tokenizer
from tests.kit import command
from tests.models import FRUITS, TRANSFORMERS_CLASSES, random_run
from tests.texts import TOKENIZERS, texts
from tests.tolerances import assert_near

PER_CHANGE = (
    "transformer",
    "qwen3:qkv_bias=true:rotary_base=500:rotary_factor=4:rotary_context=60",
    "llama:kv_heads=1:tie_embeddings=true:rotary_factor=2",
    "transformer:query_key_norm=false:qkv_bias=true:kv_heads=2",
    "llama:projection=false:bias=true",
    "gpt2",
    "gpt2:mlp=none:bias=false:positions=none",
)
"""one of each class, and of each part that its class writes in another way"""


@pytest.fixture(scope="module")
def exported(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory, transformers: Any) -> Any:
    """Makes a run of random weights once, exports it and opens the folder with transformers."""

    @functools.cache
    def made(name: str) -> Any:
        folder = tmp_path_factory.mktemp("exported")
        run = random_run(name, dataset, folder)
        exported = attnlm.export(run, folder / "out")
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            exported.path, dtype="auto", output_loading_info=True
        )
        assert exported.form == type(model).__name__ and not any(loading.values())
        tokenizer = transformers.AutoTokenizer.from_pretrained(exported.path)
        return SimpleNamespace(run=run, path=exported.path, model=model, tokenizer=tokenizer)

    return made


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in PER_CHANGE else pytest.mark.variants)
        for name in TRANSFORMERS_CLASSES
    ],
)
def test_a_stock_class_computes_the_same(name: str, exported: Any) -> None:
    run, theirs = exported(name).run, exported(name).model
    assert type(theirs).__name__ == TRANSFORMERS_CLASSES[name] and theirs.dtype == torch.float32
    model, _ = attnlm.load_model(run, device="cpu")
    ids = torch.randint(run.vocab_size, (2, 200), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits, their_logits = model(ids), theirs(ids).logits
    assert logits.abs().max() > 1
    assert_near(their_logits, logits)


THREE_CLASSES = (PER_CHANGE[0], PER_CHANGE[2], "gpt2")


@pytest.mark.parametrize("name", THREE_CLASSES)
def test_transformers_encodes_and_continues_a_text_alike(name: str, exported: Any) -> None:
    run, tokenizer, prompt = exported(name).run, exported(name).tokenizer, "3 apples"
    encoded = run.tokenizer.encode(FRUITS[:300])
    assert tokenizer(FRUITS[:300]).input_ids == encoded
    assert tokenizer.decode(encoded) == FRUITS[:300]
    assert tokenizer.model_max_length == 210
    text = "".join(attnlm.sample(run, prompt=prompt, tokens=60, temperature=0, device="cpu"))
    given = tokenizer(prompt, return_tensors="pt")
    (generated,) = exported(name).model.generate(**given, max_new_tokens=60, do_sample=False)
    assert len(generated) == 68 and tokenizer.decode(generated) == text


def test_exported_characters_are_not_special_tokens(exported: Any, tmp_path: Path) -> None:
    run, model, tokenizer = (getattr(exported("gpt2"), n) for n in ("run", "model", "tokenizer"))
    assert tokenizer.special_tokens_map == {} and len(tokenizer) == run.vocab_size
    for config in (model.config, model.generation_config):
        assert {config.bos_token_id, config.eos_token_id, config.pad_token_id} == {None}
    texts = ["3 apples and", "12"]
    with pytest.raises(ValueError, match="does not have a padding token"):
        tokenizer(texts, padding=True)

    def generated(given: Any) -> list[str]:
        made = model.generate(**given, max_new_tokens=20, do_sample=False)
        return [tokenizer.decode(ids[-20:]) for ids in made]

    alone = [generated(tokenizer(text, return_tensors="pt"))[0] for text in texts]
    # Any character will do: padding is on the left and masked.
    tokenizer.pad_token = "\n"
    together = tokenizer(texts, padding=True, return_tensors="pt")
    assert together.input_ids[1, :3].tolist() == run.tokenizer.encode("\n" * 3)
    assert generated(together) == alone
    shutil.copytree(exported("gpt2").path, tmp_path / "padded")
    tokenizer.save_pretrained(tmp_path / "padded")
    back = attnlm.import_run(tmp_path / "padded", checkpoint_dir=tmp_path, name="back")
    assert back.tokenizer.to_json() == run.tokenizer.to_json()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bigram", "LlamaForCausalLM"),
        ("multi-head", "LlamaForCausalLM: it has no place for"),
        ("gpt2:kv_heads=2", "GPT2LMHeadModel: it computes something else"),
        ("gpt2:head_size=10", "GPT2LMHeadModel"),
        ("gpt2:query_key_norm=true", "no place for blocks.0.attention.key_norm.gain"),
        ("llama:positions=none", "LlamaForCausalLM: it computes something else"),
        ("llama:mlp=gelu", "LlamaForCausalLM: it computes something else"),
        ("transformer:bias=true", "no place for"),
        ("transformer:head_bias=true", "no place for head.bias"),
        ("transformer:attention=none:positions=learned", "LlamaForCausalLM"),
        ("transformer:mlp=none:norm=none", "Qwen3ForCausalLM"),
        ("transformer:attention=uniform:positions=none", "LlamaForCausalLM"),
        ("transformer:residual=false", "Qwen3ForCausalLM: it computes something else"),
    ],
)
def test_models_that_no_class_computes_are_refused(
    name: str, reason: str, dataset: Dataset, tmp_path: Path, transformers: Any
) -> None:
    run = random_run(name, dataset, tmp_path / "runs")
    with pytest.raises(AttnlmError, match="transformers cannot express") as refused:
        attnlm.export(run, tmp_path / "out")
    assert reason in refused.value.message and "`model`" in refused.value.hint
    assert not (tmp_path / "out").exists()


def test_a_folder_is_whole_or_absent(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = random_run("transformer", dataset, tmp_path / "checkpoints")
    with monkeypatch.context() as patch:
        full = OSError(28, "No space left on device")

        def fails_late(*_: object) -> str:
            (folder,) = tmp_path.glob(".*/new")
            assert len(list(folder.iterdir())) == 5
            raise full

        patch.setattr("attnlm.workflows.export._model_card", fails_late)
        with pytest.raises(AttnlmError, match="No space left"):
            attnlm.export(run, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoints"]
    attnlm.export(run, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        *("README.md", "config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
    }


def test_the_command_and_its_card(dataset: Dataset, tmp_path: Path) -> None:
    run = random_run("gpt2", dataset, tmp_path / "checkpoints")
    done = command("export", "out", "--json", cwd=tmp_path)
    assert json.loads(done.stdout) == {
        "output": "out",
        "form": "GPT2LMHeadModel",
        "checkpoint": "best",
        "parameters": run.parameters,
    }
    assert command("export", run.name, "again", "--to", "hf", cwd=tmp_path).stdout == "again\n"
    command("export", run.name, "once-more", cwd=tmp_path)
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    for fact in (
        *("GPT2LMHeadModel", attnlm.__version__, run.dataset.train_sha256, "step 1"),
        *("validation loss 2.5000", "learning_rate = 0.02", 'model = "gpt2"', "fruits-char"),
    ):
        assert fact in card
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {str(t.dtype) for t in tensors.values()} == {"torch.float32"}
    assert "lm_head.weight" not in tensors  # it is the token embedding


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=lambda t: t.name)
def test_ids_and_decoded_texts_are_identical(tokenizer: Tokenizer) -> None:
    from tokenizers import Tokenizer as LibraryTokenizer

    theirs = LibraryTokenizer.from_str(library_tokenizer(tokenizer).to_str())
    assert theirs.get_vocab_size() <= tokenizer.vocab_size
    drawn = random.Random(3)
    for text in texts(tokenizer):
        ids = tokenizer.encode(text)
        assert theirs.encode(text).ids == ids
        assert theirs.decode(ids, skip_special_tokens=False) == text
        any_ids = drawn.choices(range(tokenizer.vocab_size), k=20)
        assert theirs.decode(any_ids, skip_special_tokens=False) == tokenizer.decode(any_ids)


def test_transformers_refuses_unknown_characters_too() -> None:
    theirs = library_tokenizer(CharTokenizer("abc"))
    with pytest.raises(Exception, match="UNK"):
        theirs.encode("abd")


def test_a_tokenizer_that_the_library_encodes_differently_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("attnlm.tokens.tokenizer_json.library_pattern", lambda pattern: r"\S+")
    with pytest.raises(AttnlmError, match="bpe:600 and the installed version of"):
        library_tokenizer(TOKENIZERS[2])
