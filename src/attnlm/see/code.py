"""A run's forward pass as a plain PyTorch script that needs nothing of ours but the weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from attnlm.attention import RMS_EPSILON
from attnlm.config import ModelConfig
from attnlm.run import Run, load_model
from attnlm.see.text import ids_within_context, token_texts


def as_code(run: Run, text: str, *, checkpoint: str = "auto") -> str:
    """A script of at most 60 lines that computes the `logits` (T, V) of `text`.

    It loads the checkpoint from where it lies and prints the likeliest next tokens. Raises
    AttnlmError when the text does not fit the context or the vocabulary, and when files are
    missing or damaged.
    """
    ids = ids_within_context(run, text)
    load_model(run, checkpoint=checkpoint, device="cpu")  # refuses what is missing or damaged
    path = run.checkpoint(checkpoint).path
    return "\n".join([*_begin(run, path, ids), *_body(run.config.model), *_end(run)]) + "\n"


def _begin(run: Run, path: Path, ids: list[int]) -> Iterator[str]:
    model = run.config.model
    yield f"# The forward pass of a {model.model}, from ids (T,) to logits (T, V)."
    yield "import torch"
    yield "from safetensors.torch import load_file"
    yield ""
    yield f"weights = load_file({str(path.resolve())!r})"
    yield 'weights = {name.removeprefix("model."): w for name, w in weights.items()}'
    yield f"ids = torch.tensor({ids})  # {run.tokenizer.decode(ids)!r}"
    yield ""


def _body(config: ModelConfig) -> Iterator[str]:
    if config.model == "bigram":
        yield 'logits = weights["table.weight"][ids]  # each token\'s row of the table'
        return
    yield "T = len(ids)"
    yield "later = torch.ones(T, T, dtype=torch.bool).triu(1)  # keys after the query"
    if config.model == "transformer":
        yield from _transformer(config)
        return
    yield 'x = weights["token_embedding.weight"][ids] + weights["position_embedding.weight"][:T]'
    yield ""
    if config.model in ("average", "dot-product"):
        scores = "torch.zeros(T, T)" if config.model == "average" else "x @ x.T / x.size(-1) ** 0.5"
        yield f"scores = {scores}"
        yield 'x = torch.softmax(scores.masked_fill(later, float("-inf")), dim=-1) @ x'
    else:
        yield f"H, D = {config.num_heads}, {config.head_dim}  # heads, their width"
        yield 'q, k, v = (x @ w.T for w in weights["body.qkv"])'
        if config.qkv_bias:
            yield 'q, k, v = (y + b for y, b in zip((q, k, v), weights["body.qkv_bias"].chunk(3)))'
        yield "q, k, v = (y.view(T, H, D).transpose(0, 1) for y in (q, k, v))  # (H, T, D)"
        yield from _mix("")
        if config.model == "wide-head" or config.projection:
            yield 'x = x @ weights["body.projection.weight"].T + weights["body.projection.bias"]'
    yield 'logits = x @ weights["head.weight"].T + weights["head.bias"]'


def _mix(indent: str) -> Iterator[str]:
    yield indent + "scores = q @ k.mT / D**0.5  # (H, T, T)"
    yield indent + 'attention = torch.softmax(scores.masked_fill(later, float("-inf")), dim=-1)'
    name = "mixed" if indent else "x"
    yield indent + f"{name} = (attention @ v).transpose(0, 1).reshape(T, H * D)"


def _transformer(config: ModelConfig) -> Iterator[str]:
    head = "token_embedding.weight" if config.tie_embeddings else "head.weight"
    yield f"H, D = {config.num_heads}, {config.head_dim}  # heads, their width"
    yield "# Rotary positions: each pair of a head's numbers is turned by its angle."
    yield "frequencies = 10_000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)"
    yield "angles = torch.outer(torch.arange(T), frequencies).repeat(1, 2)"
    yield "cosines, sines = angles.cos().float(), angles.sin().float()"
    yield ""
    yield ""
    yield "def norm(x, gain):"
    yield f"    return x / (x.square().mean(-1, keepdim=True) + {RMS_EPSILON}).sqrt() * gain"
    yield ""
    yield ""
    yield "def turn(x):"
    yield "    first, second = x.chunk(2, dim=-1)"
    yield "    return x * cosines + torch.cat((-second, first), dim=-1) * sines"
    yield ""
    yield ""
    yield 'x = weights["token_embedding.weight"][ids]'
    yield f"for layer in range({config.layers}):"
    yield '    prefix = f"blocks.{layer}."'
    yield "    names = [name for name in weights if name.startswith(prefix)]"
    yield "    block = {name.removeprefix(prefix): weights[name] for name in names}"
    yield '    y = norm(x, block["attention_norm.gain"])'
    yield '    qkv = (y @ w.T for w in block["attention.qkv"])'
    yield "    q, k, v = (z.view(T, H, D).transpose(0, 1) for z in qkv)  # (H, T, D)"
    yield '    q = turn(norm(q, block["attention.query_gain"]))'
    yield '    k = turn(norm(k, block["attention.key_gain"]))'
    yield from _mix("    ")
    yield '    x = x + mixed @ block["attention.projection.weight"].T'
    yield '    y = norm(x, block["mlp_norm.gain"])'
    yield '    gate, up = (y @ w.T for w in block["mlp.gate_up"])'
    yield '    x = x + (torch.nn.functional.silu(gate) * up) @ block["mlp.down.weight"].T'
    yield f'logits = norm(x, weights["norm.gain"]) @ weights["{head}"].T'


def _end(run: Run) -> Iterator[str]:
    yield ""
    if run.vocab_size <= 256:
        texts = token_texts(run.tokenizer, list(range(run.vocab_size)))
        yield f"vocabulary = {texts}"
        shown = "repr(vocabulary[i])"
    else:
        shown = "i"
    yield "probabilities = torch.softmax(logits[-1], dim=-1)"
    yield f"for i in probabilities.argsort(descending=True)[:{min(5, run.vocab_size)}].tolist():"
    yield f'    print(f"{{probabilities[i]:.4f}}", {shown})'
