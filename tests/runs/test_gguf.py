"""Runs as GGUF files, read back tensor by tensor; test_llama_cpp.py runs them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import attnlm
from attnlm.base.errors import AttnlmError
from attnlm.base.events import Note
from attnlm.data.dataset import Dataset
from attnlm.runs.gguf_vocabulary import vocabulary
from attnlm.runs.load_model import load_model
from attnlm.runs.run import Run
from attnlm.tokens.specs import CL100K_PATTERN, GPT2_PATTERN, O200K_PATTERN
from attnlm.tokens.tokenizer import BpeTokenizer, ByteTokenizer, CharTokenizer, Tokenizer
from attnlm.tokens.tokenizer_json import read_tokenizer
from attnlm.workflows.export import convert_tensor
from tests.command import attnlm as command
from tests.command import fails
from tests.models import parts_of, random_run
from tests.texts import PUBLISHED, RANKS

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

# Embeddings that fill blocks of 32, and an MLP that does not.
NAMES = {
    "qwen3:kv_heads=2:head_size=10:embed_dim=32:mlp_width=40": "qwen3",
    "llama:kv_heads=2:qkv_bias=true:embed_dim=24:mlp_width=64": "qwen2",
    "llama:kv_heads=2:bias=true:qkv_bias=true:embed_dim=32:mlp_width=40": "llama",
    "gpt2:embed_dim=64:head_size=16:mlp_width=40:bias=false:qkv_bias=false": "gpt2",
}
TYPES = ("f32", "f16", "q8_0")
OURS = {
    "token_embd": "token_embedding",
    "position_embd": "position_embedding",
    "output_norm": "norm",
    "output": "head",
    "attn_q": "attention.query",
    "attn_k": "attention.key",
    "attn_v": "attention.value",
    "attn_output": "attention.projection",
    "attn_q_norm": "attention.query_norm",
    "attn_k_norm": "attention.key_norm",
    "attn_norm": "attention_norm",
    "ffn_norm": "mlp_norm",
    **{f"ffn_{name}": f"mlp.{name}" for name in ("gate", "up", "down")},
}


def exported(run: Run, path: Path, **more: Any) -> Any:
    attnlm.export(run, path, to="gguf", **more)
    return gguf.GGUFReader(path)


def value(reader: Any, key: str) -> Any:
    return reader.fields[key].contents()


def expected(name: str, weights: dict[str, torch.Tensor], run: Run) -> torch.Tensor:
    """Return our weights that a tensor of the file stores."""
    block, stem, kind = "", *name.rsplit(".", 1)
    if stem.startswith("blk."):
        _, layer, stem = stem.split(".")
        block = f"blocks.{layer}."
    if stem == "attn_qkv":
        parts = (expected(f"blk.{layer}.attn_{x}.{kind}", weights, run) for x in "qkv")
        return torch.cat(list(parts))
    ours = f"{block}{OURS[stem]}."
    if kind == "bias":
        rows = next(len(weights[ours + k]) for k in ("weight", "gain") if ours + k in weights)
        return weights.get(ours + "bias", torch.zeros(rows))
    found = weights.get(ours + "weight")
    return weights[ours + "gain"] if found is None else found


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_equals_the_run(
    name: str, kind: str, dataset: Dataset, tmp_path: Path
) -> None:
    run = random_run(name, dataset, tmp_path)
    a = parts_of(run.config)
    weights = dict(load_model(run, device="cpu")[0].state_dict())
    reader = exported(run, tmp_path / "out.gguf", type=kind)
    assert value(reader, "general.architecture") == NAMES[name]
    stored, found = set(), set()
    for tensor in reader.tensors:
        wanted = expected(tensor.name, weights, run).numpy()
        for part, heads in {"attn_q.": a.heads, "attn_k.": a.num_kv_heads}.items():
            if NAMES[name] == "llama" and part in tensor.name:
                wanted = interleaved(wanted, heads)
        assert [int(n) for n in reversed(tensor.shape)] == list(wanted.shape), tensor.name
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
        within_its_type(numbers, wanted, tensor.tensor_type.name)
        found.add(tensor.tensor_type.name)
        stored.add(tensor.name)
    names = gguf.MODEL_ARCH_NAMES
    there = next(number for number, architecture in names.items() if architecture == NAMES[name])
    known = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[there]}
    stems = {re.sub(r"blk\.\d+", "blk.{bid}", stem.rpartition(".")[0]) for stem in stored}
    assert stems <= known
    tied = a.tie_embeddings
    assert len(stored) == len(reader.tensors) and ("output.weight" in stored) is not tied
    blocks = {n.split(".", 2)[2] for n in stored if n.startswith("blk.")}
    assert all(f"blk.{layer}.{n}" in stored for layer in range(a.layers) for n in blocks)
    # The MLP's output projection has rows of 40 numbers, which blocks of 32 do not divide.
    assert found == {"f32": {"F32"}, "f16": {"F32", "F16"}, "q8_0": {"F32", "F16", "Q8_0"}}[kind]
    assert value(reader, "general.file_type") == {"f32": 0, "f16": 1, "q8_0": 7}[kind]


@pytest.mark.parametrize(
    ("name", "architecture", "kind"),
    [
        ("qwen3:kv_heads=2:mlp=none", "qwen3", "q8_0"),
        ("llama:mlp=none:projection=false", "llama", "f16"),
        ("gpt2:mlp=none:projection=false:positions=none", "gpt2", "f32"),
    ],
)
def test_missing_modules_are_written_as_identities(
    name: str, architecture: str, kind: str, dataset: Dataset, tmp_path: Path
) -> None:
    run = random_run(name, dataset, tmp_path)
    reader = exported(run, tmp_path / "out.gguf", type=kind)
    assert value(reader, "general.architecture") == architecture
    assert value(reader, f"{architecture}.feed_forward_length") == 1
    written = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    for layer in range(2):
        gate = ["gate"] if architecture != "gpt2" else []
        for part, shape in {"up": (1, 24), "down": (24, 1), **dict.fromkeys(gate, (1, 24))}.items():
            numbers = written[f"blk.{layer}.ffn_{part}.weight"]
            assert numbers.shape == shape and not numbers.any()
        is_identity = np.array_equal(written[f"blk.{layer}.attn_output.weight"], np.eye(24))
        assert is_identity is ("projection" in name)
    assert architecture != "gpt2" or not written["position_embd.weight"].any()


def interleaved(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder the rows of each head: 0, D/2, 1, D/2 + 1, …"""
    size = len(rows) // heads
    order = [half + i for i in range(size // 2) for half in (0, size // 2)]
    return np.concatenate([rows[h * size : (h + 1) * size][order] for h in range(heads)])


def within_its_type(numbers: Any, wanted: NDArray[np.float32], kind: str) -> None:
    error = np.abs(numbers - wanted)
    if kind == "F32":
        assert not error.any()
    elif kind == "F16":
        assert (error <= np.abs(wanted) * 2**-11 + 2**-25).all()
    else:  # half a step of the largest of 32 numbers, and the rounding of the step itself
        largest = np.abs(wanted.reshape(-1, 32)).max(1, keepdims=True)
        assert (error.reshape(-1, 32) <= largest * (1 / 254 + 2**-11) + 2**-24).all()
        assert error.any()


def test_metadata_describe_the_model(dataset: Dataset, tmp_path: Path) -> None:
    run = random_run("llama:rotary_base=500:rotary_factor=4:kv_heads=2", dataset, tmp_path)
    reader = exported(run, tmp_path / "out.gguf")
    sizes = {
        "context_length": 210,
        "embedding_length": 24,
        "block_count": 2,
        "feed_forward_length": parts_of(run.config).mlp_dim,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 6,
        "attention.value_length": 6,
        "rope.dimension_count": 6,
        "rope.freq_base": 500.0,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 4.0,
        "vocab_size": run.vocab_size,
    }
    assert {key: value(reader, f"llama.{key}") for key in sizes} == sizes
    assert math.isclose(value(reader, "llama.attention.layer_norm_rms_epsilon"), 1e-5, rel_tol=1e-6)
    assert value(reader, "general.name") == run.name == "llama-001"
    assert json.loads(value(reader, "attnlm.settings"))["rotary_base"] == 500
    description = value(reader, "general.description")
    for fact in ("A llama of", "fruits-char", run.dataset.train_sha256, "loss 2.5000"):
        assert fact in description
    keys = set(reader.fields)
    assert not {"general.author", "general.license", "general.organization"} & keys
    assert all(tensor.data_offset % 32 == 0 for tensor in reader.tensors)
    # The default is that the id 11 ends a text: neither this nor another may be named.
    assert value(reader, "tokenizer.ggml.model") == "rwkv"
    assert not [key for key in keys if key.endswith("_token_id")]


def bpe(pattern: str, ranks: Any = RANKS, end: bool = True) -> BpeTokenizer:
    names = {GPT2_PATTERN: "gpt2", CL100K_PATTERN: "cl100k_base", O200K_PATTERN: "o200k_base"}
    size, of_end = (len(ranks) + 5, len(ranks) + 2) if end else (None, None)
    return BpeTokenizer(names[pattern], ranks, vocab_size=size, end_of_text=of_end)


def test_tokenizers_as_llama_cpp_reads_them() -> None:
    keys = vocabulary(bpe(GPT2_PATTERN))
    assert keys["model"] == "gpt2" and keys["pre"] == "gpt-2" and not keys["add_bos_token"]
    assert len(set(keys["tokens"])) == len(keys["token_type"]) == len(RANKS) + 5
    end = keys["eos_token_id"]
    assert keys["tokens"][end] == "<|endoftext|>" and keys["token_type"][end] == 3
    assert keys["token_type"][end - 1] == 5 and "Ġ" in "".join(keys["merges"])
    assert vocabulary(bpe(CL100K_PATTERN))["pre"] == "llama-bpe"
    # Imported ones.
    keys = vocabulary(read_tokenizer(PUBLISHED["llama3"][0], 612))
    assert keys["pre"] == "llama-bpe" and keys["add_bos_token"]
    assert (keys["bos_token_id"], keys["eos_token_id"]) == (600, 601)
    keys = vocabulary(read_tokenizer(PUBLISHED["smollm"][0], 612))
    assert keys["pre"] == "smollm" and not keys["add_bos_token"] and keys["eos_token_id"] == 0
    assert keys["tokens"][:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert keys["token_type"][:4] == [3, 3, 3, 1]
    # Without an end the byte stands for it that no text has; else it would be the id 11.
    keys = vocabulary(bpe(GPT2_PATTERN, end=False))
    assert (keys["bos_token_id"], keys["eos_token_id"]) == (10, 255)
    assert keys["token_type"] == [1] * len(RANKS)
    # Characters and bytes.
    keys = vocabulary(CharTokenizer("\n\\a\x7f"))
    assert keys["tokens"] == ["\\x0a", "\\x5c", "a", "\\x7f"]
    assert len(set(vocabulary(ByteTokenizer())["tokens"])) == 256


@pytest.mark.parametrize(
    ("tokenizer", "reason"),
    [
        (CharTokenizer("aé"), "outside of ASCII, such as 'é'"),
        (bpe(O200K_PATTERN), "no pre-tokenizer that is equal"),
        (read_tokenizer(PUBLISHED["qwen2"][0], 612), "no pre-tokenizer that is equal"),
        (bpe(GPT2_PATTERN, [*RANKS, b"</", b"</s", b"</s>"]), "'</s>' is an ordinary token"),
        (bpe(GPT2_PATTERN, [*RANKS, b"qzqz"]), "differently"),
    ],
    ids=lambda given: getattr(given, "name", ""),
)
def test_models_that_llama_cpp_reads_differently_are_refused(
    tokenizer: Tokenizer, reason: str
) -> None:
    with pytest.raises(AttnlmError) as refused:
        vocabulary(tokenizer)
    assert reason in refused.value.message and "`tokenizer` byte" in refused.value.hint


def test_a_file_is_whole_or_absent(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = random_run("gpt2", dataset, tmp_path / "runs")
    new, notes = tmp_path / "new" / "out.gguf", list[object]()
    with monkeypatch.context() as patch:

        def fails_late(name: str, numbers: Any, kind: str) -> Any:
            if name == "output_norm.bias":
                assert len(list(new.parent.iterdir())) == 1
                raise OSError("9 requested and 0 written")  # as numpy says it
            return numbers

        patch.setattr("attnlm.workflows.export.convert_tensor", fails_late)
        with pytest.raises(AttnlmError, match=r"out\.gguf: 9 requested and 0 written"):
            attnlm.export(run, new, to="gguf")
    assert list(new.parent.iterdir()) == []
    attnlm.export(run, new, to="gguf", on_event=notes.append)
    assert notes == [
        Note(
            "llama.cpp aborts after 210 tokens, the context of this model, because it rounds its "
            "own limit up to a multiple of 256"
        )
    ]
    before = new.read_bytes()
    with pytest.raises(AttnlmError, match="already exists"):
        attnlm.export(run, new, to="gguf", type="f16")
    assert new.read_bytes() == before and len(list(new.parent.iterdir())) == 1


def test_numbers_that_a_type_cannot_hold_are_refused() -> None:
    numbers = np.full((2, 32), 70_000.0, np.float32)
    assert convert_tensor("x", numbers, "F32").max() == 70_000
    with pytest.raises(AttnlmError, match="the tensor x has 70000, which is too large for F16"):
        convert_tensor("x", numbers, "F16")
    with pytest.raises(AttnlmError, match="too large for Q8_0"):
        convert_tensor("x", numbers * 200, "Q8_0")


def test_the_command_exports_and_says_what(dataset: Dataset, tmp_path: Path) -> None:
    run = random_run("transformer", dataset, tmp_path / "checkpoints")
    done = command("export", "x.gguf", "--to", "gguf", "--type", "f16", "--json", cwd=tmp_path)
    assert json.loads(done.stdout) == {
        "path": "x.gguf",
        "architecture": "qwen3",
        "checkpoint": "best",
        "parameters": run.parameters,
    }
    gguf_options = ("--to", "gguf")
    again = {"says": "x.gguf already exists", "hints": "new name"}
    fails("export", "x.gguf", *gguf_options, cwd=tmp_path, code=1, **again)
    named = {"says": "must end with .gguf", "hints": "out.gguf"}
    fails("export", "out", *gguf_options, cwd=tmp_path, code=2, **named)
    wrong = {"says": "invalid value for --type: 'q4'", "hints": "q8_0"}
    fails("export", "y.gguf", *gguf_options, "--type", "q4", cwd=tmp_path, code=2, **wrong)
    alone = {"says": "--type applies only to --to gguf", "hints": "leave --type out"}
    fails("export", "out", "--type", "f16", cwd=tmp_path, code=2, **alone)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "x.gguf"]
