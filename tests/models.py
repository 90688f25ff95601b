"""Small models of every preset, and odd variants of the transformer, for the tests that need them.

Sizes differ from each other, so that swapped axes fail.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlm.base.setting_fields import Setting, Settings
from attnlm.compute.native import native_library
from attnlm.config.settings import Config, resolve
from attnlm.config.variants import variant
from attnlm.data.dataset import Dataset
from attnlm.data.prepare import prepare
from attnlm.model import layers
from attnlm.model.architecture import MODELS, Architecture
from attnlm.model.language_model import Bigram, Block, LanguageModel, Transformer
from attnlm.model.layers import Linear, SelfAttention, rotation_of
from attnlm.model.recorder import See, Site, record
from attnlm.model.spec import ModelSpec, parameter_count
from attnlm.model.textbook import forward
from attnlm.runs.checkpoint import save_checkpoint
from attnlm.runs.create_run import create_run
from attnlm.runs.journal import EvaluationRecord
from attnlm.runs.run import Run
from attnlm.see.attend import Attention

V = 11
FRUITS = "".join(f"{i} apples and {i + 1} pears are {2 * i + 1} fruits.\n" for i in range(150))
needs_kernels = pytest.mark.skipif(native_library() is None, reason="there are no kernels here")
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
    "gpt2:norm=none:query_key_norm=true:mlp=swiglu:dropout=0.2",
    "gpt2:attention=uniform:layers=1:mlp=none:residual=false",
    "gpt2:attention=none:positions=none:layers=3",
)
"""Every preset, and others of every part."""


def _values(name: str) -> set[tuple[str, Setting]]:
    """What a variant shows of each part: its value, or for a number whether it is the default."""
    shown = dataclasses.asdict(parts_of(resolve(variant(name))))
    usual = dataclasses.asdict(Architecture())
    return {
        (part, value if isinstance(value, str | bool) else value == usual[part])
        for part, value in shown.items()
        if part != "model"
    }


def _few() -> Iterator[str]:
    """Yield variants, greedily, until each value of each part was shown."""
    missing = set().union(*map(_values, VARIANTS))
    while missing:
        yield (most := max(VARIANTS, key=lambda name: len(missing & _values(name))))
        missing -= _values(most)


def parts_of(config: Config) -> Architecture:
    """The parts of the model that a configuration describes."""
    assert isinstance(config.spec, Architecture)
    return config.spec


MORE_VARIANTS = frozenset(VARIANTS) - {*_few(), *MODELS}
"""The variants that `make test` leaves out; `make test-all` has them."""


def variants_where(is_so: Callable[[ModelSpec], object]) -> list[str]:
    """The variants of which something is so."""
    return [v for v in VARIANTS if is_so(resolve(variant(v)).spec)]


def small_model(name: str, vocab_size: int = V, **more: Setting) -> Bigram | Transformer:
    """A model in evaluation, in float64, whose weights are nowhere zero: every path counts."""
    torch.manual_seed(1)
    config = resolve({**variant(name), **more}, SIZES)
    model = parts_of(config).build(vocab_size).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    a = model.architecture
    if isinstance(model, Transformer) and a.positions == "rotary":
        # As exact as the rest; they are made in float32.
        model.cosines, model.sines = rotation_of(a, torch.float64)
    return model


class Tempered(SelfAttention):
    """Attention with a parameter of its own. It multiplies the input, and is 1 at first."""

    def __init__(self, a: Architecture) -> None:
        super().__init__(a)
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x_BTC: Tensor, *others: Any) -> Tensor:
        return super().forward(x_BTC * self.factor, *others)


class WithoutCache(SelfAttention):
    """Attention as a lecture writes it, which keeps no cache."""

    def forward(self, x_BTC: Tensor, *others: Any) -> Tensor:
        maps = self.query, self.key, self.value
        qkv = (m(x_BTC).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in maps)
        mixed = self.mix(*qkv).transpose(1, 2).flatten(2)
        return mixed if self.projection is None else self.projection(mixed)

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Widened(WithoutCache):
    """Attention whose values are twice as wide as its queries; it sums their halves."""

    def __init__(self, a: Architecture) -> None:
        super().__init__(a)
        self.value = Linear(a.width, 2 * a.heads * a.head_dim, bias=a.qkv_bias)

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        first, second = layers.attention(query, key, value).chunk(2, -1)
        return first + second


class WithSoftmax(WithoutCache):
    """The same with a softmax over all scores of a head."""

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.mT * self.head_size**-0.5
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        return torch.softmax(scores.masked_fill(later, -torch.inf), -1) @ value


class WithoutMaps(WithoutCache):
    """Attention that is not normalised by a softmax: it has no maps."""

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        exponentials: Tensor = (query @ key.mT * self.head_size**-0.5).exp().tril()
        return exponentials @ value


CHANGES: dict[str, tuple[str, Any]] = {
    "a class with one more parameter": ("language_model.SelfAttention", Tempered),
    "a class with other shapes": ("language_model.SelfAttention", Widened),
    "another forward": (
        "layers.SelfAttention.forward",
        lambda self, x_BTC, *others, forward=SelfAttention.forward: forward(
            self, 2 * x_BTC, *others
        ),
    ),
    "another scale": (
        "layers.attention",
        lambda query, *kv, attention=layers.attention, **_: attention(2 * query, *kv),
    ),
}
"""Changes of a model from outside: what is replaced in attnlm.model, and by what."""


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


def activations(model: nn.Module, ids_BT: Tensor, edit: See | None = None) -> dict[Site, Tensor]:
    """What a recorder sees in a forward pass, after an edit."""
    seen: dict[Site, Tensor] = {}

    def keep(site: Site, x: Tensor) -> Tensor:
        seen[site] = edit(site, x) if edit else x
        return seen[site]

    record(model, ids_BT, keep)
    return seen


def self_attention(model: LanguageModel, layer: int = 0) -> SelfAttention:
    """The attention of a block."""
    assert isinstance(model, Transformer)
    block = model.blocks[layer]
    assert isinstance(block, Block) and isinstance(block.attention, SelfAttention)
    return block.attention


def by_the_book(model: Bigram | Transformer, ids_BT: Tensor) -> Tensor:
    """Return the logits of the textbook pass in float64, (B, T) → (B, T, V)."""
    weights = {name: weight.double() for name, weight in model.named_parameters()}
    logits: Tensor = torch.vmap(lambda ids: forward(model.architecture, weights, ids))(ids_BT)
    return logits


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Return the gradient of a loss for each parameter."""
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()))
    return dict(zip(named, found, strict=True))


def evaluation_record(step: int = 0, **values: Any) -> EvaluationRecord:
    """Return a line of metrics.jsonl."""
    losses: dict[str, Any] = {"train_loss": 2.5, "val_loss": 2.5, "bits_per_byte": 3.5}
    others: dict[str, Any] = {"tokens": 0, "seconds": 1.0, "learning_rate": 0.01}
    return EvaluationRecord(**{"step": step, "tokens_per_second": 9, **losses, **others, **values})


def timeless(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run, without those that depend on time."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    timed = ("seconds", "tokens_per_second")
    return [{k: v for k, v in record.items() if k not in timed} for record in records]


def assert_same_run(one: Run, other: Run) -> None:
    """Assert that two runs have the same bytes, except for times."""
    assert timeless(one.path) == timeless(other.path)
    for name in ("ticker.jsonl", one.last.name, one.best.name):
        assert (one.path / name).read_bytes() == (other.path / name).read_bytes(), name


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of each file below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def attention_like(layers: int, heads: int, length: int) -> Attention:
    """Return made-up attention in which each head is sharper than the one before."""
    random = np.random.default_rng(1)
    maps = np.zeros((layers, heads, length, length), np.float32)
    for number, map_TT in enumerate(maps.reshape(-1, length, length)):
        scores = random.standard_normal((length, length), np.float32) * (number % 9)
        map_TT[:] = np.tril(np.exp(scores - scores.max(-1, keepdims=True)))
        map_TT /= map_TT.sum(-1, keepdims=True).clip(1e-9)
    return Attention("run", "gpt2", [f" word{i % 65}" for i in range(length)], maps)


EXPORTED: Settings = {**SIZES, "embed_dim": 24, "block_size": 210, "steps": 1}
TRANSFORMERS_CLASSES = {
    "transformer": "Qwen3ForCausalLM",
    "qwen3:kv_heads=2:head_size=10": "Qwen3ForCausalLM",
    "qwen3:qkv_bias=true:rotary_base=500:rotary_factor=4:rotary_context=60": "Qwen3ForCausalLM",
    "llama:kv_heads=1:tie_embeddings=true:rotary_factor=2": "LlamaForCausalLM",
    "llama:bias=true:mlp_width=20": "LlamaForCausalLM",
    "llama:qkv_bias=true:head_size=10:norm_epsilon=0.03": "LlamaForCausalLM",
    "transformer:query_key_norm=false:qkv_bias=true:kv_heads=2": "LlamaForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt2:bias=false:tie_embeddings=false:mlp=relu2": "GPT2LMHeadModel",
    "gpt2:positions=none:qkv_bias=false": "GPT2LMHeadModel",
    "transformer:mlp=none": "Qwen3ForCausalLM",
    "llama:mlp=none:bias=true:kv_heads=2": "LlamaForCausalLM",
    "gpt2:mlp=none:tie_embeddings=false": "GPT2LMHeadModel",
    "gpt2:mlp=none:bias=false:positions=none": "GPT2LMHeadModel",
    "llama:projection=false:bias=true": "LlamaForCausalLM",
    "gpt2:projection=false:mlp=none": "GPT2LMHeadModel",
}
"""Variants that can be exported, and their classes in transformers."""


def random_run(name: str, dataset: Dataset, folder: Path) -> Run:
    """Return an untrained run whose weights are nowhere zero."""
    torch.manual_seed(1)
    config = resolve(variant(name), EXPORTED)
    model = parts_of(config).build(dataset.vocab_size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return saved_run(model, config, dataset, folder)


def saved_run(model: LanguageModel, config: Config, dataset: Dataset, folder: Path) -> Run:
    """Return a new run with this model as its best checkpoint."""
    parameters = parameter_count(config.spec, dataset.vocab_size)
    run = create_run(config, dataset, parameters, name=None, checkpoint_dir=folder)
    save_checkpoint(run.best, dict(model.named_parameters()), {"step": 1, "val_loss": 2.5})
    return run


CONTEXT, BUILT_HEADS = 40, 5  # of the model built by hand
SHARP = 60.0  # scores this large give the target nearly all attention
BUILT = {
    (0, 1): "previous-token",
    (0, 2): "same-token",
    (0, 3): "first-token",
    (0, 4): "current token",
    (1, 0): "induction",
}
"""The heads that look for something; the others have equal scores, and look everywhere."""


def induction_by_hand(dataset: Dataset, folder: Path) -> Run:
    """Two layers of attention on a stream of three parts: the token, its position, and the token
    before, which the first layer writes there and the second compares with the token. The induction
    head adds the token that it finds to the token, so it decides what comes next."""
    size = dataset.vocab_size
    name = "transformer:mlp=none:norm=none:positions=learned:query_key_norm=false:bias=false"
    sizes = {"embed_dim": 2 * size + CONTEXT, "head_size": CONTEXT, "heads": BUILT_HEADS}
    config = resolve({**variant(name), **sizes, "layers": 2, "block_size": CONTEXT})
    model = parts_of(config).build(size)
    token, position = slice(size), slice(size, size + CONTEXT)
    before = slice(size + CONTEXT, None)
    tokens, positions = torch.eye(size), torch.eye(CONTEXT)
    sought = {"current token": positions, "previous-token": positions.roll(-1, 0).triu(1)}
    written = {"previous-token": before, "induction": token}
    of: dict[str, Tensor] = dict(model.named_parameters())
    with torch.no_grad():
        for parameter in of.values():
            parameter.zero_()
        of["token_embedding.weight"][:, token] = of["head.weight"][:, token] = tokens
        of["position_embedding.weight"][:, position] = positions
        for (layer, head), pattern in BUILT.items():
            attention = self_attention(model, layer)
            rows = slice(head * CONTEXT, (head + 1) * CONTEXT)
            query, key = attention.query.weight[rows], attention.key.weight[rows]
            if pattern in sought:
                query[:, position], key[:, position] = SHARP * sought[pattern], positions
            elif pattern == "first-token":
                query[0, token], key[0, position.start] = SHARP, 1
            else:
                query[:size, token] = SHARP * tokens
                key[:size, before if layer else token] = tokens
            if pattern in written:
                attention.value.weight[rows][:size, token] = tokens
                assert attention.projection is not None
                attention.projection.weight[written[pattern], rows][:, :size] = 2 * tokens
    return saved_run(model, config, dataset, folder)
