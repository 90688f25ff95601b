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

# Our names of settings, flags, arguments, values and commands, each with names in other tools.
_OTHER_NAMES = {
    # the model
    "model": "arch architecture model_type rung",
    "heads": "head n_head n_heads nhead num_heads num_attention_heads",
    "layers": "layer n_layer n_layers nlayers num_layers num_hidden_layers depth blocks",
    "embed_dim": "n_embd n_embed embd emb_dim embedding_dim embed_size d_model dim hidden "
    "hidden_dim hidden_size width",
    "head_size": "head_dim d_head",
    "block_size": "context context_length context_size ctx ctx_len n_ctx n_positions seq_len "
    "seq_length sequence_length max_seq_len max_length window window_size",
    "dropout": "drop dropout_rate",
    "kv_heads": "n_kv_head n_kv_heads num_kv_heads num_key_value_heads query_groups",
    "query_key_norm": "qk_norm",
    "qkv_bias": "attention_bias",
    "positions": "position_embedding pos_emb positional_encoding",
    "rotary_base": "rope_base rope_theta",
    "norm": "norm_type normalization",
    "norm_epsilon": "eps layer_norm_eps layer_norm_epsilon norm_eps rms_norm_eps",
    "mlp": "activation ffn",
    "mlp_width": "d_ff d_inner ffn_dim intermediate_size n_inner",
    "tie_embeddings": "tied tie_weights weight_tying tie_word_embeddings",
    # its training
    "steps": "iters iterations max_iters max_steps n_steps num_steps train_steps updates epoch "
    "epochs n_epochs num_epochs",
    "budget": "time max_time minutes duration",
    "batch_size": "batch bs",
    "micro_batch_size": "gradient_accumulation_steps grad_accum accumulation microbatch",
    "learning_rate": "lr max_lr",
    "min_learning_rate": "min_lr lr_min final_lr",
    "optimizer": "optim optimiser",
    "beta1": "momentum",
    "schedule": "scheduler lr_schedule lr_scheduler",
    "warmup": "warmup_iters warmup_steps",
    "weight_decay": "wd decay",
    "gradient_clip": "clip clip_grad grad_clip max_grad_norm",
    "eval_every": "eval_interval eval_freq eval_steps val_every",
    "patience": "early_stopping",
    "seed": "random_seed",
    "dtype": "precision",
    "threads": "n_threads num_threads",
    "processes": "num_processes nproc nproc_per_node world_size workers num_workers ranks",
    "recipe": "config preset",
    "name": "run_name",
    "resume": "continue",
    "from": "finetune fine_tune from_pretrained init_from parent pretrained start_from",
    "log": "logger logging report_to tracker",
    "checkpoint_dir": "ckpt_dir out_dir output_dir run_dir runs_dir save_dir",
    "rungs": "model models rung",
    # text and samples
    "tokens": "length max_length max_new_tokens max_tokens n_tokens num_tokens new_tokens",
    "prompt": "start",
    "temperature": "temp",
    "num_samples": "n_samples samples",
    "top_p": "nucleus",
    "interactive": "chat repl",
    "show_probs": "logprobs probabilities probs",
    "val_fraction": "split val_size val_split valid_fraction validation_split test_size",
    "val_file": "val validation_file",
    "column": "col content_key field key text_column text_field",
    "force": "overwrite",
    "output": "out",
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
    "prepare": "data download encode tokenize preprocess",
    "train": "continue fit resume",
    "sample": "chat complete generate inference predict repl speak talk",
    "eval": "evaluate measure perplexity test validate",
    "attend": "attention",
    "list": "checkpoints datasets ls models recipes runs show",
    "compare": "diff significance",
    "doctor": "check diagnose env info system",
}

_ALL_WEIGHTS = "use `start_from`, which trains all weights of another run"
# Options, commands and values that attnlm had, and the hint that names what to use in their place.
_REPLACED: dict[str, str] = {
    "gguf": "use `to` hf, then llama.cpp's convert_hf_to_gguf.py",
    "q8_0": "use `to` hf, then llama.cpp's convert_hf_to_gguf.py",
    "lora": _ALL_WEIGHTS,
    "lora_alpha": _ALL_WEIGHTS,
    "lora_on": _ALL_WEIGHTS,
    "split_seed": "leave it out: `split` documents always makes the same choice",
    "newlines": "line ends are kept: dos2unix converts those of a file",
    "names": "prepare a file or a URL of names, such as names.txt of karpathy/makemore",
    "errors": "in Python: attnlm.answer_pairs(run, pairs)",
    "prompts": "in Python: attnlm.samples(run, prompts=[…])",
    "prompt_file": "read it on stdin: attnlm sample --prompt - < FILE",
    "shard": "to train with less memory, lower `micro_batch_size` or use `recompute`",
    "mlflow": "use tensorboard, wandb or trackio",
    "peak": "train with `dry_run` measures steps on this machine",
    "plan": "use train with `dry_run`",
    "rm": "delete the folder of the run",
    "seeds": "use a ladder of one rung, with `seeds`",
    "share": "train with `dry_run` measures steps on this machine",
}

_NEAR = 0.6  # the default cutoff of difflib.get_close_matches
_BEGINS_ALIKE = 0.8


def our_name(name: str) -> str:
    """Return our name for what other tools call `name`, or `name` itself."""
    return _MEANS.get(name, name)


def suggestion(name: str, names: Iterable[str], otherwise: str) -> str:
    """Return what replaces a name that attnlm had; for other names, return as `similar_name`."""
    return _REPLACED.get(_normalised(name)) or similar_name(name, names, otherwise)


def similar_name(name: str, names: Iterable[str], otherwise: str) -> str:
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
