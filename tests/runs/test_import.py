"""Folders of Hugging Face's format as runs: exact, or refused in one line."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import attnlm
from attnlm.base.errors import AttnlmError
from attnlm.config.settings import resolve
from attnlm.config.variants import variant
from attnlm.runs import hugging_face
from attnlm.runs.hugging_face import first_difference, read_config
from attnlm.tokens.tokenizer import load_published, visible
from attnlm.tokens.tokenizer_json import library_tokenizer, read_tokenizer, read_tokenizer_files
from tests.kit import command, fails
from tests.models import parts_of, random_run
from tests.texts import PUBLISHED, RANKS, TOKENIZERS, texts_with_special
from tests.tolerances import assert_near

GPT2 = {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 40, "vocab_size": 600}
LLAMA = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 600}
LLAMA |= {"num_key_value_heads": 2, "intermediate_size": 20, "max_position_embeddings": 40}
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3_ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 100}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT2),
    "gpt2-untied": ("GPT2", {**GPT2, "tie_word_embeddings": False, "n_inner": 30}),
    "llama": ("Llama", LLAMA),
    "llama-mlp": ("Llama", {**LLAMA, "mlp_bias": True, "num_key_value_heads": 4}),
    "llama-3.1": (
        "Llama",
        {**LLAMA, "head_dim": 16, "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 900.0}},
    ),
    "smollm-biased": (
        "Llama",
        {**LLAMA, "hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3}
        | {"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "attention_bias": True},
    ),
    "qwen3": ("Qwen3", {**LLAMA, "head_dim": 10, "num_key_value_heads": 1}),
    "qwen3-linear-tied": (
        "Qwen3",
        {**LLAMA, "head_dim": 6, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}},
    ),
    "qwen2": ("Qwen2", {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2-window-tied": (
        "Qwen2",
        {**LLAMA, "num_key_value_heads": 1, "tie_word_embeddings": True}
        | {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    ),
    "mistral": ("Mistral", {**LLAMA, "sliding_window": 40, "head_dim": 10}),
}
PER_CHANGE = ("gpt2-untied", "llama", "llama-3.1", "qwen3", "qwen2-window-tied", "mistral")
AGAIN = {"Mistral": "Llama", "Qwen2": "Llama"}
"""the class that a run is exported as, if it is not the one that it was imported from"""


@pytest.fixture(scope="module")
def tokenizer_json() -> str:
    return str(library_tokenizer(TOKENIZERS[2]).to_str())


def make_model(name: str, folder: Path, tokenizer_json: str, **more: Any) -> Any:
    """Write a model of a family, with weights that are nowhere small, and return it."""
    import transformers

    family, sizes = FAMILIES[name]
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    config = getattr(transformers, f"{family}Config")(**{**sizes, **more})
    torch.manual_seed(1)
    theirs = getattr(transformers, family + head)(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    sharded = {"max_shard_size": "20KB"} if name == "llama" else {}
    dtype = {"qwen3": torch.bfloat16, "gpt2-untied": torch.float16}.get(name, torch.float32)
    theirs.to(dtype).save_pretrained(folder, **sharded)
    (folder / "tokenizer.json").write_text(tokenizer_json)
    return type(theirs).from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in PER_CHANGE else pytest.mark.variants)
        for name in FAMILIES
    ],
)
def test_a_model_of_transformers_computes_the_same_here(
    name: str, tmp_path: Path, transformers: Any, tokenizer_json: str
) -> None:
    theirs = make_model(name, tmp_path / "theirs", tokenizer_json)
    family, form = FAMILIES[name][0], type(theirs).__name__
    head = form.removeprefix(family)
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists() == (name == "llama")

    run = attnlm.import_run(tmp_path / "theirs", checkpoint_dir=tmp_path / "checkpoints")
    model, _ = attnlm.load_model(run, device="cpu")
    ids = torch.randint(600, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, expected = model(ids), theirs(ids).logits
    assert expected.abs().max() > 0.5
    assert_near(ours, expected)
    assert run.tokenizer.to_json() == TOKENIZERS[2].to_json()
    assert attnlm.samples(run, num_samples=1, tokens=5, seed=1)

    again = attnlm.export(run, tmp_path / "again")
    assert again.form == AGAIN.get(family, family) + head
    back = transformers.AutoModelForCausalLM.from_pretrained(again.path, dtype=torch.float32)
    assert back.config.model_type == AGAIN.get(family, family).lower()
    intact = theirs.state_dict()
    for tensor, numbers in back.state_dict().items():
        assert torch.equal(numbers, intact.get(tensor, torch.zeros(1)).expand(numbers.shape)), (
            tensor
        )


@pytest.mark.parametrize("tokenizer", ["qwen2", "smollm"])
def test_transformers_reads_the_ids_of_the_exported_tokenizer(
    tokenizer: str, tmp_path: Path, transformers: Any
) -> None:
    """`transformers` reads every tokenizer of a Qwen2 model as Qwen2's."""
    torch.manual_seed(1)
    config = transformers.Qwen2Config(**{**LLAMA, "vocab_size": 612})
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path / "theirs")
    content, _ = PUBLISHED[tokenizer]
    (tmp_path / "theirs" / "tokenizer.json").write_text(json.dumps(content))
    run = attnlm.import_run(tmp_path / "theirs", checkpoint_dir=tmp_path / "checkpoints")
    again = attnlm.export(run, tmp_path / "again")
    assert again.form == "LlamaForCausalLM"
    theirs = transformers.AutoTokenizer.from_pretrained(again.path)
    for text in texts_with_special(["<|im_start|>"], 20):
        assert theirs(text).input_ids == run.tokenizer.encode(text)


def test_truncation_and_padding_of_the_last_call_are_ignored(
    tmp_path: Path, transformers: Any
) -> None:
    made = library_tokenizer(TOKENIZERS[3])
    before = read_tokenizer(json.loads(made.to_str()), 601)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<|endoftext|>")
    theirs(["a", "apples and"], padding=True, truncation=True, max_length=4)
    theirs.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    assert content["truncation"] and content["padding"]
    assert read_tokenizer(content, 601).to_json() == before.to_json()


@pytest.mark.parametrize("name", ["gpt2", "llama:bias=true"])
def test_only_an_mlp_without_effect_is_dropped(name: str, dataset: Any, tmp_path: Path) -> None:
    run = random_run(f"{name}:mlp=none", dataset, tmp_path / "runs")
    folder = attnlm.export(run, tmp_path / "out").path

    def imported() -> attnlm.Run:
        return attnlm.import_run(folder, checkpoint_dir=tmp_path / "checkpoints")

    assert parts_of(imported().config).mlp == "none"
    part = "transformer.h.1.mlp.c_proj" if name == "gpt2" else "model.layers.1.mlp.down_proj"

    def set_last(kind: str, number: float) -> None:
        def edit(tensors: dict[str, torch.Tensor]) -> None:
            tensors[f"{part}.{kind}"].view(-1)[-1] = number

        change_weights(edit)(folder)

    for kind in ("weight", "bias"):
        set_last(kind, 0.5)
        back = parts_of(imported().config)
        assert back.mlp != "none" and back.mlp_width == 1
        set_last(kind, 0)
    assert parts_of(imported().config).mlp == "none"


@pytest.fixture(scope="module")
def exported(dataset: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported")
    return attnlm.export(random_run("llama:kv_heads=2", dataset, path), path / "out").path


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    """Return the files of an exported run."""
    return shutil.copytree(exported, tmp_path / "out")


WITH_BIASES = "llama:qkv_bias=true:mlp_width=1"


@pytest.mark.parametrize("name", ["gpt2", "llama:bias=true", "qwen3:kv_heads=2", WITH_BIASES])
def test_exported_runs_import_unchanged(name: str, dataset: Any, tmp_path: Path) -> None:
    run = random_run(name, dataset, tmp_path / "checkpoints")
    source = attnlm.export(run, tmp_path / "out").path
    place: dict[str, Any] = {"checkpoint_dir": tmp_path / "checkpoints"}
    back = attnlm.import_run(source, name="back", **place)
    assert back.tokenizer.to_json() == run.tokenizer.to_json()
    assert back.imported_from == str(source) and back.dataset.name == "out"
    losses = [attnlm.evaluate(r, data=dataset, device="cpu").loss for r in (run, back)]
    assert losses[0] == losses[1]
    again = attnlm.export(back, tmp_path / "again").path
    same = [(path / "model.safetensors").read_bytes() for path in (source, again)]
    if "bias" not in name:  # which brings biases of queries, keys and values, all zero
        assert same[0] == same[1]
    card = (again / "README.md").read_text(encoding="utf-8")
    assert "imported from: out\n" in card and str(tmp_path) not in card

    short = attnlm.import_run(source, block_size=20, **place)
    assert short.config.spec.block_size == 20
    ours, theirs = (attnlm.load_model(r, device="cpu")[0] for r in (short, run))
    ids = torch.arange(20)[None] % run.vocab_size
    assert torch.equal(ours(ids), theirs(ids))


def test_every_command_reads_imported_runs_or_explains_why_not(
    folder: Path, tmp_path: Path
) -> None:
    done = command("import", folder, "--name", "theirs", cwd=tmp_path)
    assert done.stdout == "checkpoints/theirs\n" and "210" in done.stderr
    text = "12 apples and 13 pears"
    (tmp_path / "text.txt").write_text(text * 20)
    sampled = command("sample", "--prompt", text, "--tokens", "300", cwd=tmp_path)
    assert sampled.stdout.startswith(text) and "attnlm report" in sampled.stderr
    for arguments in (("attend", text), ("trace", text), ("trace", text, "--as-code")):
        assert command(*arguments, cwd=tmp_path).stdout
    assert "mixed" in command("heads", "--text", "text.txt", cwd=tmp_path).stdout
    lacks: dict[str, Any] = {"cwd": tmp_path, "code": 1, "says": "was imported"}
    assert "random tokens" in command("heads", cwd=tmp_path).stderr
    fails("heads", "--ablate", **lacks, hints="--text")
    fails("eval", **lacks, hints="--data")
    reported = command("report", cwd=tmp_path)
    assert reported.stdout == "checkpoints/theirs/report.html\n"
    assert ": it was imported, so the page shows no training" in reported.stderr
    facts = json.loads(command("report", "--text", text, "--json", cwd=tmp_path).stdout)
    assert facts["imported_from"] == str(folder) and facts["val_loss"] is None
    assert facts["commands"][0] == f"attnlm import {folder} --name theirs"
    fails("train", "--resume", "theirs", **lacks, hints="--from theirs")


Change = Callable[[Path], object]


def change_json(name: str, edit: Callable[[Any], object]) -> Change:
    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        edit(content)
        (folder / name).write_text(json.dumps(content))

    return change


def change_config(**changes: object) -> Change:
    return change_json("config.json", lambda content: content.update(changes))


def change_tokenizer(**changes: object) -> Change:
    return change_json("tokenizer.json", lambda content: content.update(changes))


def change_weights(edit: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors")

    return change


def write(name: str, content: bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(content)


NORM = "model.norm.weight"
HOSTILE: dict[str, tuple[Change, str]] = {
    "a wrong size": (change_config(hidden_size=-3), "The hidden size (-3)"),
    "many layers": (change_config(model_type="qwen2", num_hidden_layers=10**12), "too many layers"),
    "text for a number": (change_config(num_hidden_layers="2"), "transformers cannot read"),
    "deep JSON": (write("config.json", b"[" * 10**5), "is not valid JSON"),
    "a shape": (change_weights(lambda t: t.update({NORM: torch.ones(7)})), "mismatch"),
    "a missing tensor": (change_weights(lambda t: t.pop(NORM)), f"{NORM} is missing"),
    "an LM head that is not tied": (change_config(tie_word_embeddings=True), ""),
    "one too many": (change_weights(lambda t: t.update(x=torch.ones(7))), "'x' does not belong to"),
    "not finite": (change_weights(lambda t: t[NORM].fill_(torch.nan)), "NaN"),
    "a header": (write("model.safetensors", struct.pack("<Q", 2**50)), "header too large"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no model.safetensors"),
    "other classes": (change_config(fusion_config={"a": True}), "'fusion_config'"),
    "a normaliser": (change_tokenizer(normalizer={"type": "NFKC"}), "normalizer"),
    "an added token": (
        change_tokenizer(added_tokens=[{"id": 1, "content": "<s>", "lstrip": True}]),
        "is damaged",
    ),
    "another tokenizer": (
        change_json("tokenizer.json", lambda content: content["model"].update(type="Unigram")),
        "is damaged",
    ),
    "a gap in the ids": (
        change_json("tokenizer.json", lambda content: content["model"]["vocab"].update(a=999)),
        "ids are not those",
    ),
    "no model": (change_tokenizer(model=3), "is damaged"),
    "another decoder": (change_tokenizer(decoder=None), "differently"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_inconsistent_files_are_refused_in_one_line(
    name: str, folder: Path, tmp_path: Path
) -> None:
    harm, says = HOSTILE[name]
    harm(folder)
    with pytest.raises(AttnlmError) as refused:
        attnlm.import_run(folder, checkpoint_dir=tmp_path / "checkpoints")
    assert says in refused.value.message and "\n" not in refused.value.message
    assert refused.value.hint
    assert not list((tmp_path / "checkpoints").glob("*"))


def test_a_file_and_the_names_of_the_published_gpt2(dataset: Any, tmp_path: Path) -> None:
    run = random_run("gpt2", dataset, tmp_path / "runs")
    folder = attnlm.export(run, tmp_path / "out").path
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare |= {"h.0.attn.bias": torch.ones(1, 1, 210, 210), "lm_head.weight": bare["wte.weight"] + 0}
    save_file(bare, folder / "other.safetensors")
    back = attnlm.import_run(folder / "other.safetensors", checkpoint_dir=tmp_path / "checkpoints")
    assert parts_of(back.config).tie_embeddings
    ids = torch.arange(20)[None] % run.vocab_size
    ours, theirs = (attnlm.load_model(r, device="cpu")[0] for r in (run, back))
    assert torch.equal(ours(ids), theirs(ids))


# As the published models describe themselves, without their ids and training.
PUBLISHED_CONFIGS: dict[str, tuple[str, str]] = {
    "Qwen2.5-0.5B": (
        """
        {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
        "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
        "max_position_embeddings": 32768, "sliding_window": 32768, "vocab_size": 151936,
        "hidden_act": "silu", "max_window_layers": 24, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0, "tie_word_embeddings": true, "use_mrope": false,
        "use_cache": true, "use_sliding_window": false, "torch_dtype": "bfloat16"}
        """,
        "llama:embed_dim=896:heads=14:kv_heads=2:head_size=64:layers=24:mlp_width=4864:"
        "block_size=32768:norm_epsilon=1e-6:rotary_base=1e6:tie_embeddings=true:qkv_bias=true",
    ),
}


@pytest.mark.parametrize("name", PUBLISHED_CONFIGS)
def test_published_configs_are_understood(name: str, tmp_path: Path, transformers: Any) -> None:
    text, expected = PUBLISHED_CONFIGS[name]
    (tmp_path / "config.json").write_text(text)
    ours = parts_of(read_config(tmp_path, 8192)[1])
    model = parts_of(resolve({**variant(expected), "block_size": 8192}))
    assert replace(ours, kv_heads=ours.num_kv_heads, head_size=ours.head_dim) == model
    assert read_config(tmp_path, None)[1].spec.block_size == 1024


def test_a_run_has_their_weights_without_a_copy(
    tmp_path: Path, transformers: Any, tokenizer_json: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("gpt2", tmp_path / "theirs", tokenizer_json)
    compared: list[Any] = []
    monkeypatch.setattr(hugging_face, "first_difference", lambda *both: compared.extend(both))
    attnlm.import_run(tmp_path / "theirs", checkpoint_dir=tmp_path)
    ours, theirs = ([*model.parameters()] for model in compared[:2])
    for mine in ours:
        assert any(p.data_ptr() <= mine.data_ptr() < p.data_ptr() + p.nbytes for p in theirs)


WINDOW = {"use_sliding_window": True, "sliding_window": 30}
DIFFERENT: dict[str, tuple[str, dict[str, Any]]] = {
    "scores without a scale": ("gpt2", {"scale_attn_weights": False}),
    "scores with another scale in each layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "exact GELU": ("gpt2", {"activation_function": "gelu"}),
    "another activation": ("llama", {"hidden_act": "gelu"}),
    "YaRN": ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0}}),
    "other factors of Llama 3": (
        "llama",
        {"rope_parameters": {**LLAMA3_ROPE, "low_freq_factor": 2.0, "rope_theta": 900.0}},
    ),
    "a window of Mistral": ("mistral", {"sliding_window": 30}),
    "a window of Qwen3 in one layer": (
        "qwen3",
        {**WINDOW, "layer_types": ["full_attention", "sliding_attention"]},
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_model_that_computes_something_else_is_refused(
    name: str, tmp_path: Path, transformers: Any, tokenizer_json: str
) -> None:
    family, options = DIFFERENT[name]
    make_model(family, tmp_path / "theirs", tokenizer_json)
    change_config(**options)(tmp_path / "theirs")
    with pytest.raises(AttnlmError, match=r"different results|invalid value for `mlp`") as refused:
        attnlm.import_run(tmp_path / "theirs", checkpoint_dir=tmp_path / "checkpoints")
    assert not (tmp_path / "checkpoints").exists()
    if "window" in name:
        assert refused.value.hint == "use a shorter context: `block_size` 30"
        short = attnlm.import_run(tmp_path / "theirs", block_size=30, checkpoint_dir=tmp_path)
        assert short.config.spec.block_size == 30


def test_a_window_that_is_the_default_of_a_missing_key_is_compared(
    tmp_path: Path, transformers: Any, tokenizer_json: str
) -> None:
    make_model("mistral", tmp_path / "theirs", tokenizer_json, max_position_embeddings=4300)
    change_json("config.json", lambda content: content.pop("sliding_window"))(tmp_path / "theirs")
    place: dict[str, Any] = {"checkpoint_dir": tmp_path / "checkpoints"}
    with pytest.raises(AttnlmError, match=r"from token 4,097 on"):
        attnlm.import_run(tmp_path / "theirs", block_size=4300, **place)
    assert attnlm.import_run(tmp_path / "theirs", **place).config.spec.block_size == 1024


def _capped(head: Any) -> None:
    head.register_forward_hook(lambda module, inputs, logits: 3 * torch.tanh(logits / 3))


def _partly_rotated(rotary: Any) -> None:
    def keep_the_rest(module: Any, inputs: Any, angles: Any) -> None:
        angles[0][..., 4:8], angles[0][..., 12:], angles[1][..., 4:8], angles[1][..., 12:] = (
            1,
            1,
            0,
            0,
        )

    rotary.register_forward_hook(keep_the_rest)


CHANGES: dict[str, Callable[[Any], object]] = {
    "capped logits": lambda m: _capped(m.lm_head),
    "capped values": lambda m: _capped(m.model.layers[1].self_attn.v_proj),
    "partial rotation": lambda m: _partly_rotated(m.model.rotary_emb),
    "another scale of scores": lambda m: setattr(m.model.layers[1].self_attn, "scaling", 0.3),
    "a bias": lambda m: m.lm_head.register_parameter("bias", torch.nn.Parameter(torch.ones(600))),
    "scaled embeddings": lambda m: m.model.embed_tokens.register_forward_hook(lambda *x: 5 * x[2]),
    "another epsilon": lambda m: setattr(m.model.norm, "variance_epsilon", 0.1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_difference_that_no_key_names_is_found(
    name: str, tmp_path: Path, transformers: Any, tokenizer_json: str
) -> None:
    theirs = make_model("llama-3.1", tmp_path / "theirs", tokenizer_json)
    run = attnlm.import_run(tmp_path / "theirs", checkpoint_dir=tmp_path)
    ours: Any = attnlm.load_model(run, device="cpu")[0]
    assert first_difference(ours, theirs, run.tokenizer) is None
    CHANGES[name](theirs)
    assert first_difference(ours, theirs, run.tokenizer) is not None


def test_merges_in_another_order_are_refused(tokenizer_json: str) -> None:
    content = json.loads(tokenizer_json)
    content["model"]["merges"].reverse()
    with pytest.raises(AttnlmError, match="another order"):
        read_tokenizer(content, len(RANKS))


@pytest.mark.skipif("TIKTOKEN_CACHE_DIR" not in os.environ, reason="GPT-2's vocabulary is needed")
def test_gpt2s_own_files_are_our_gpt2(tmp_path: Path) -> None:
    ours = load_published("gpt2", spool=tmp_path, offline=True)
    (merges,) = [
        path.read_bytes()
        for path in Path(os.environ["TIKTOKEN_CACHE_DIR"]).iterdir()
        if path.read_bytes()[:8] == b"#version"
    ]
    (tmp_path / "merges.txt").write_bytes(merges)
    vocabulary = {visible(token): i for i, token in enumerate(ours.ranks)}
    (tmp_path / "vocab.json").write_text(json.dumps({**vocabulary, "<|endoftext|>": 50256}))
    assert read_tokenizer_files(tmp_path, 50257).to_json() == ours.to_json()
