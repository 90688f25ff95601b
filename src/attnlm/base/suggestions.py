"""Suggestions for a name that does not exist: a similar name, or our name for another tool's."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MEANS = {
    "n_layer": "layers",
    "n_head": "heads",
    "n_embd": "embed_dim",
    "hidden_size": "embed_dim",
    "max_steps": "steps",
    "max_iters": "steps",
    "lr": "learning_rate",
    "config": "recipe",
    "start": "prompt",
}
"""Names of other tools that are understood in place of ours, as options and in recipes."""

# Our names of settings, flags, arguments, values and commands, each with names in other tools that
# are not similar to ours.
_OTHER_NAMES = {
    # the model
    "model": "arch architecture rung",
    "heads": "num_attention_heads",
    "layers": "num_hidden_layers depth blocks",
    "embed_dim": "n_embd embedding_dim d_model dim hidden hidden_dim hidden_size width",
    "head_size": "head_dim d_head",
    "block_size": "context context_length context_size ctx_len n_ctx n_positions seq_len "
    "seq_length sequence_length max_seq_len max_length window window_size",
    "kv_heads": "num_key_value_heads query_groups",
    "query_key_norm": "qk_norm",
    "positions": "pos_emb",
    "rotary_base": "rope_base rope_theta",
    "norm_epsilon": "eps layer_norm_eps rms_norm_eps",
    "mlp": "activation ffn",
    "mlp_width": "d_ff ffn_dim intermediate_size n_inner",
    # its training
    "steps": "iters iterations max_iters num_steps updates epoch epochs num_epochs",
    "budget": "time max_time minutes duration",
    "batch_size": "bs",
    "micro_batch_size": "gradient_accumulation_steps grad_accum",
    "learning_rate": "lr max_lr",
    "min_learning_rate": "min_lr final_lr",
    "weight_decay": "wd decay",
    "eval_every": "eval_interval eval_freq",
    "patience": "early_stopping",
    "dtype": "precision",
    "processes": "nproc_per_node world_size workers",
    "recipe": "preset",
    "resume": "continue",
    "from": "finetune init_from parent pretrained",
    "log": "report_to tracker",
    "checkpoint_dir": "out_dir output_dir save_dir",
    "rungs": "model models rung",
    # text and samples
    "tokens": "length max_length max_new_tokens num_tokens",
    "interactive": "chat repl",
    "show_probs": "logprobs",
    "val_fraction": "split val_size test_size",
    "column": "content_key field key",
    "force": "overwrite",
    # arguments
    "run": "model name",
    "dataset": "data",
    "source": "file input text path url corpus",
    # values
    "cuda": "gpu",
    "mps": "metal",
    "float32": "fp32",
    "bfloat16": "bf16",
    # commands
    "prepare": "data download encode tokenize",
    "train": "continue fit resume",
    "sample": "chat complete generate predict",
    "eval": "evaluate perplexity test validate",
    "list": "checkpoints datasets ls models recipes runs show",
    "compare": "diff",
    "doctor": "diagnose env info",
}

_BEGINS_ALIKE = 0.8
_NEAR = 0.6  # the default cutoff of difflib.get_close_matches


def our_name(name: str) -> str:
    """Return our name for what other tools call `name`, or `name` itself."""
    return _MEANS.get(name, name)


def suggestion(name: str, names: Iterable[str], otherwise: str) -> str:
    """Return the hint `did you mean NAME?` for a similar one of `names`, or else `otherwise`."""
    names = list(names)
    if (similar := equivalent_name(name, names) or _nearest(name, names)) is None:
        return otherwise
    is_for_epochs = "epoch" in _normalised(name) and _normalised(similar) == "steps"
    return f"did you mean {similar}?{' (a step is one batch)' if is_for_epochs else ''}"


def equivalent_name(name: str, names: Iterable[str]) -> str | None:
    """Return the one of `names` that equals `name` except for case and hyphens.

    Otherwise, return the one that other tools call `name`, or None.
    """
    by_plain = {_normalised(known): known for known in names}
    plain = _normalised(name)
    synonyms = (known for known, others in _OTHER_NAMES.items() if plain in others.split())
    return next((by_plain[key] for key in (plain, *synonyms) if key in by_plain), None)


def _nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the most similar name (in a tie, the first), or None. Prefixes count as similar."""
    plain = _normalised(name)

    def likeness(other: str) -> float:
        short, long = sorted((plain, _normalised(other)), key=len)
        is_prefix = len(short) > 1 and long.startswith(short)
        ratio = difflib.SequenceMatcher(None, short, long).ratio()
        return max(ratio, _BEGINS_ALIKE) if is_prefix else ratio

    best = max(names, key=likeness, default=None)
    return best if best is not None and likeness(best) >= _NEAR else None


def _normalised(name: str) -> str:
    return name.strip("-").replace("-", "_").lower()
