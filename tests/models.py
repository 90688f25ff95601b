"""Small models of every preset, and odd variants of the transformer, for the tests that need them.

Their sizes differ from each other, so that swapped axes fail.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnlm.base.settings import Setting, Settings
from attnlm.compute.native import kernels
from attnlm.config.settings import resolve
from attnlm.config.variants import variant
from attnlm.data.dataset import Dataset
from attnlm.data.prepare import prepare
from attnlm.model.architecture import MODELS
from attnlm.model.attention import SelfAttention
from attnlm.model.language_model import Block, LanguageModel, Transformer, build_model
from attnlm.model.ops import Kernels
from attnlm.model.ops.pointwise import rotary_angles

V = 11
FRUITS = "".join(f"{i} apples and {i + 1} pears are {2 * i + 1} fruits.\n" for i in range(150))
COMPILED = Kernels(compiled=True, matmul="onednn", attention="native")
needs_kernels = pytest.mark.skipif(kernels() is None, reason="there are no kernels here")
SIZES: Settings = {"embed_dim": 22, "heads": 4, "head_size": 6, "layers": 2, "block_size": 13}

VARIANTS = (
    *MODELS,
    "single-head:embed_dim=7:head_size=3",
    "single-head:embed_dim=3:head_size=1",
    "multi-head:projection=true:qkv_bias=true",
    "llama:kv_heads=2:tie_embeddings=true",
    "qwen3:kv_heads=1:mlp_width=5",
    "gpt2:positions=none:heads=2:bias=false",
    "transformer:norm=none:norm_epsilon=0.03:rotary_base=7",
    "llama:rotary_base=900:rotary_factor=8:rotary_context=30",
    "llama:rotary_factor=3",
    "transformer:residual=false:mlp=relu2:bias=true",
    "transformer:mlp=none:positions=learned:head_bias=true",
    "transformer:projection=false:embed_dim=24:mlp=gelu",
    "transformer:attention=uniform:positions=learned",
    "transformer:attention=parameter-free:positions=none",
    "transformer:attention=none:positions=learned",
    "transformer:layers=1:query_key_norm=false:mlp=none:norm=none:residual=false:kv_heads=2",
    "gpt2:layers=1:norm=none:mlp=none:positions=none",
    "gpt2:norm=none:query_key_norm=true:mlp=swiglu",
    "gpt2:attention=uniform:layers=1:mlp=none:residual=false",
    "gpt2:attention=none:positions=none:layers=3",
)
"""Every preset, and others of every part."""


def small_model(name: str, vocab_size: int = V, **more: Setting) -> LanguageModel:
    """A model in evaluation, in float64, whose weights are nowhere zero: every path counts."""
    torch.manual_seed(1)
    config = resolve({**variant(name), **more}, SIZES)
    model = build_model(config.model, vocab_size).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    a = model.architecture
    if isinstance(model, Transformer) and a.positions == "rotary":
        # As exact as the rest; they are made in float32.
        rotary = a.rotary_base, a.rotary_factor, a.rotary_context, torch.float64
        model.cosines, model.sines = rotary_angles(a.block_size, a.head_dim, *rotary)
    return model


def prepared(folder: Path, text: str = FRUITS, name: str = "fruits", **about: Any) -> Dataset:
    """Return the data set of a text, which lies in the folder with its data in `data`."""
    path = folder / f"{name}.txt"
    path.write_text(text)
    return prepare(path, data_dir=folder / "data", **about)


def places(folder: Path) -> dict[str, Any]:
    """Arguments for data sets and runs in a folder."""
    return {"data_dir": folder / "data", "checkpoint_dir": folder / "checkpoints"}


def some_ids(*shape: int) -> Tensor:
    """Ids, always the same for a shape."""
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(2))


def self_attention(model: LanguageModel, layer: int = 0) -> SelfAttention:
    """The attention of a block."""
    assert isinstance(model, Transformer)
    block = model.blocks[layer]
    assert isinstance(block, Block) and isinstance(block.attention, SelfAttention)
    return block.attention


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Of a loss, by each parameter."""
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()))
    return dict(zip(named, found, strict=True))


def timeless(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run, without those that depend on time."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    timed = ("seconds", "tokens_per_second", "crc32")
    return [{k: v for k, v in record.items() if k not in timed} for record in records]


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of each file below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
