"""Hugging Face: models of `transformers` become runs, and runs become models of `transformers`.

Two tables hold their names of sizes and modules, for both directions. Whatever a config.json says,
a model is accepted only if both libraries compute the same (`first_difference`).

If a class has parts that our model lacks, they are stored such that no logit changes: biases,
position embeddings and an MLP of zeros, and the identity as a projection.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from attnlm.base import files
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import OnEvent, ignore
from attnlm.base.folders import CHECKPOINT_DIR, is_folder
from attnlm.base.formatting import byte_size
from attnlm.base.setting_fields import check_value, quoted
from attnlm.compute.device import machine_memory
from attnlm.config.settings import Config, resolve
from attnlm.model.architecture import PRESETS, Architecture, require_architecture
from attnlm.model.inspection import (
    ChangedModelError,
    build_with_weights,
    check_finite,
    first_difference,
)
from attnlm.model.spec import Shapes
from attnlm.runs import hub
from attnlm.runs.checkpoint import save_checkpoint
from attnlm.runs.create_run import check_name_is_free, create_run_folder
from attnlm.runs.hub import quiet_transformers
from attnlm.runs.import_from_page import import_page_model
from attnlm.runs.load_model import load_weights
from attnlm.runs.records import CheckpointFacts, DatasetFacts
from attnlm.runs.run import Checkpoint, Run
from attnlm.tokens.tokenizer_json import check_equal, library_tokenizer, read_tokenizer_files

_HINT = "import a GPT-2, Llama, SmolLM, Mistral, Qwen2 or Qwen3 model without such options"
_OPENED = 1.7  # memory to import and to sample, as a multiple of the weights: measured
_CONTEXT = 1024  # tokens, unless `block_size` is given

# --- Their names and values, and ours -------------------------------------------------------------

_CLASSES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "mistral": "MistralForCausalLM",  # never exported: it is LlamaForCausalLM with a window
}
"""The classes by `model_type`."""
_PRESETS = {"gpt2": "gpt2", "qwen3": "qwen3"}  # llama for the others
_MLPS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu2": "relu2"}
_GPT2_SIZES = {
    "n_positions": "block_size", "n_embd": "embed_dim", "n_layer": "layers", "n_head": "heads",
    "n_inner": "mlp_width", "layer_norm_epsilon": "norm_epsilon",
    "tie_word_embeddings": "tie_embeddings",
}  # fmt: skip
_SIZES = {
    "max_position_embeddings": "block_size", "hidden_size": "embed_dim",
    "num_hidden_layers": "layers", "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads", "head_dim": "head_size", "intermediate_size": "mlp_width",
    "rms_norm_eps": "norm_epsilon", "tie_word_embeddings": "tie_embeddings",
}  # fmt: skip
"""Our settings by their keys in config.json."""
_GPT2_MODULES = {
    "token_embedding": "transformer.wte", "position_embedding": "transformer.wpe",
    "norm": "transformer.ln_f", "head": "lm_head", "blocks": "transformer.h",
    "attention_norm": "ln_1", "attention.query": "attn.c_attn", "attention.key": "attn.c_attn",
    "attention.value": "attn.c_attn", "attention.projection": "attn.c_proj",
    "mlp_norm": "ln_2", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
}  # fmt: skip
_MODULES = {
    "token_embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head",
    "blocks": "model.layers", "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj", "attention.query_norm": "self_attn.q_norm",
    "attention.key": "self_attn.k_proj", "attention.key_norm": "self_attn.k_norm",
    "attention.value": "self_attn.v_proj", "attention.projection": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
}  # fmt: skip
"""Their modules by ours."""


def _class(kind: str) -> Any:
    return getattr(hub.import_transformers("this"), _CLASSES[kind])


def _settings(config: Any) -> dict[str, Any]:
    """Return our settings for a configuration of transformers, which has all its defaults."""
    kind = config.model_type
    sizes = _GPT2_SIZES if kind == "gpt2" else _SIZES
    settings = {ours: getattr(config, theirs, None) for theirs, ours in sizes.items()}
    if kind == "gpt2":
        function = config.activation_function
        settings["mlp"] = _MLPS.get(function, f"with {function}")
    else:
        is_silu = config.hidden_act in ("silu", "swish")
        settings["mlp"] = "swiglu" if is_silu else f"gated with {config.hidden_act}"
        biased = bool(getattr(config, "attention_bias", False))  # the projection, too
        settings["qkv_bias"] = biased or kind == "qwen2"
        settings["bias"] = biased or bool(getattr(config, "mlp_bias", False))
        rotary = getattr(config, "rope_parameters", None) or {}
        settings["rotary_base"] = rotary.get("rope_theta")
        if rotary.get("rope_type") in ("linear", "llama3"):
            settings["rotary_factor"] = rotary.get("factor")
        if rotary.get("rope_type") == "llama3":
            settings["rotary_context"] = rotary.get("original_max_position_embeddings")
    return {name: value for name, value in settings.items() if value is not None}


def _config(a: Architecture, kind: str) -> dict[str, Any]:
    """Return the configuration of a model with all parts that the class of a `model_type` has."""
    ours = vars(a) | {"kv_heads": a.num_kv_heads, "head_size": a.head_dim, "mlp_width": a.mlp_dim}
    sizes = _GPT2_SIZES if kind == "gpt2" else _SIZES
    config = {"model_type": kind} | {theirs: ours[name] for theirs, name in sizes.items()}
    if kind == "gpt2":
        function = "gelu_new" if a.mlp == "gelu" else a.mlp
        dropout = {"embd_pdrop": a.dropout, "resid_pdrop": a.dropout, "attn_pdrop": 0.0}
        return config | dropout | {"activation_function": function}
    rotary = {"rope_type": "default", "rope_theta": a.rotary_base}
    if a.rotary_factor is not None:
        rotary |= {"rope_type": "linear", "factor": a.rotary_factor}
    if a.rotary_context is not None:
        rotary |= {"rope_type": "llama3", "original_max_position_embeddings": a.rotary_context}
        rotary |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config |= {"rope_parameters": rotary, "hidden_act": "silu" if a.mlp == "swiglu" else a.mlp}
    if kind == "qwen2":
        return {key: value for key, value in config.items() if key != "head_dim"}
    biases = {"attention_bias": a.qkv_bias or (a.bias and kind == "llama")}
    return config | biases | ({"mlp_bias": a.bias} if kind == "llama" else {})


def _completed(a: Architecture, kind: str) -> Architecture:
    """Return the model with those parts of a class that change no logit."""
    if a.lm_head_inputs != a.width:
        return a  # the identity cannot change the width
    parts: dict[str, Any] = {"projection": True}
    if a.mlp == "none":
        parts |= {"mlp": "gelu" if kind == "gpt2" else "swiglu", "mlp_width": 1}
    if a.positions == "none" and kind == "gpt2":
        parts["positions"] = "learned"
    return replace(a, **parts)


def lost_parts(a: Architecture, kind: str) -> list[str]:
    """Return, in words, the parts of a model that a configuration of a `model_type` can't say."""
    if a.embed_dim is None:
        return ["a table of logits, and no layers"]
    a = _completed(a, kind)
    ours = {part.name: getattr(a, part.name) for part in fields(a) if part.name != "arguments"}
    back: dict[str, Any] = {part.name: part.default for part in fields(a)}
    back |= PRESETS[_PRESETS.get(kind, "llama")].parts
    back |= _settings(SimpleNamespace(**_config(a, kind)))
    for parts in (ours, back):  # defaults, written out
        width = a.width if parts["wide_heads"] else a.width // parts["heads"]
        parts |= {"head_size": parts["head_size"] or width, "wide_heads": False}
        parts |= {"kv_heads": parts["kv_heads"] or parts["heads"], "mlp_width": a.mlp_dim}
    back |= {"model": a.model, "dropout": a.dropout}
    back["bias"] = ours["bias"] and kind in ("gpt2", "llama")
    back["qkv_bias"] &= ours["qkv_bias"] or kind == "qwen2"  # others may be zero
    return [
        f"no `{n}`" if v in (False, None, "none") else f"`{n}`" if v is True else f"`{n}` {v}"
        for n, v in ours.items()
        if v != back[n]
    ]


def choose_class(run: Run) -> str:
    """Return the `model_type` of the first class that has all parts of a run's model.

    Raises UsageError if there is none.
    """
    a = require_architecture(run.config.spec, "the format of another tool")
    if run.tokenizer.name == "ids":
        raise UsageError(
            f"{run.name} was trained on ids, for which transformers has no tokenizer",
            "read its weights with safetensors, or export to html",
        )
    # `transformers` reads any tokenizer of a Qwen2 model as Qwen2's.
    others = ("mistral",) if run.tokenizer.name == "qwen2" else ("mistral", "qwen2")
    lost = {kind: lost_parts(a, kind) for kind in _CLASSES if kind not in others}
    closest = min(lost, key=lambda kind: len(lost[kind]))
    if lost[closest]:
        raise UsageError(
            f"no stock class of transformers can express {run.name}: it has "
            f"{', '.join(lost[closest])}; the closest format is {_CLASSES[closest]}",
            "train a `model` transformer, gpt2, llama or qwen3 without these settings",
        )
    return closest


def _views(theirs: Any, shapes: Shapes) -> dict[str, Tensor]:
    """Return the part of their tensors that holds each of our parameters, where there is one."""
    is_gpt2 = theirs.config.model_type == "gpt2"
    modules = _GPT2_MODULES if is_gpt2 else _MODULES
    stored = {name: p.detach() for name, p in theirs.named_parameters(remove_duplicate=False)}
    views = {}
    for name, shape in shapes.items():
        *block, module, kind = re.split(r"(?<=\d)\.|\.(?=\w+$)", name)  # blocks.2, mlp.up, weight
        path = "".join(f"{modules['blocks']}{place.removeprefix('blocks')}." for place in block)
        path += modules.get(module, "")
        tensor = stored.get(f"{path}.{'bias' if kind == 'bias' else 'weight'}")
        if tensor is None:
            continue
        if is_gpt2 and block and tensor.dim() == 2:
            tensor = tensor.T  # their linear maps are (inputs, outputs)
        if path.endswith("c_attn"):
            tensor = tensor.chunk(3)[["query", "key", "value"].index(module.split(".")[1])]
        views[name] = tensor[: shape[0]]  # a run's context may be shorter
    return views


# --- Import ---------------------------------------------------------------------------------------


def import_run(
    source: str | Path,
    *,
    base: str | Path | None = None,
    name: str | None = None,
    revision: str | None = None,
    block_size: int | None = None,
    checkpoint_dir: str | Path = CHECKPOINT_DIR,
    on_event: OnEvent | None = None,
) -> Run:
    """Create a run from a Hugging Face folder, one of its safetensors files, or a name on the Hub.

        run = attnlm.import_run("exported", name="imported")

    The folder has config.json, safetensors files, and either tokenizer.json or both vocab.json and
    merges.txt. The model is of the GPT-2, Llama, Mistral, Qwen2 or Qwen3 family; `transformers`
    reads it. A name, such as Qwen/Qwen3-0.6B, that no folder has is a model of the Hub; `revision`
    is a branch, tag or commit there. The run has a context of `block_size` tokens (default: the
    model's, but at most 1,024). A LoRA adapter of `peft` is merged into its model, the folder or
    name `base` (default: as the adapter says). A file that a page saved needs no other file.

    Raises AttnlmError if files are missing or damaged, if the run computes other hidden states or
    logits than the model in windows of its context, or if the weights do not fit into this
    machine's memory. Raises UsageError for invalid arguments.
    """
    checkpoint_dir, on_event = Path(checkpoint_dir), on_event or ignore
    source = str(source).removeprefix(hub.PREFIX)
    is_local, path = os.path.lexists(source), Path(source)
    file = path if is_local and not is_folder(path) else None
    hub.check_source(source)
    if name is not None:
        check_name_is_free(name, checkpoint_dir, is_trained=False)
    if block_size is not None:
        check_value(Architecture, "block_size", block_size)
    with files.explaining_os_errors(checkpoint_dir, ", or name another `checkpoint_dir`"):
        if is_local and revision is not None:
            hint = f"leave it out: {source} is on this machine"
            raise UsageError("`revision` applies only to models of the Hub", hint)
        if file and (run := import_page_model(file, block_size, name, checkpoint_dir)):
            return run
        hub.import_transformers(f"importing {source}")
        folders = hub.describe(source, base, revision, on_event)
        folder = folders[source]
        origin = str(path.absolute()) if is_local else f"{source}@{folder.name}"
        model_folder, *adapters = folders.values()
        their_config, config = read_config(model_folder, block_size)
        for each, place in folders.items():
            hub.fetch(each, place.name, hub.WEIGHTS, on_event)
        size, stock = their_config.vocab_size, _class(their_config.model_type)
        theirs = hub.load(stock, their_config, model_folder, None if adapters else file)
        for adapter in adapters:
            theirs = hub.with_adapter(theirs, adapter)
        shapes = config.spec.parameter_shapes(size)
        weights = {name: torch.zeros(()).expand(shape) for name, shape in shapes.items()}
        weights |= _views(theirs, shapes)
        check_finite(*weights.values())
        a = require_architecture(config.spec, "the format of another tool")
        if a.mlp_dim == 1 and not any(weights[n].any() for n in shapes if ".mlp.down." in n):
            config = replace(config, spec=replace(a, mlp="none", mlp_width=None))  # as exported
        own = (folder / "tokenizer.json").exists()
        tokenizer = read_tokenizer_files(folder if own else model_folder, size)
        arrays = {name: tensor.numpy() for name, tensor in weights.items()}
        ours = build_with_weights(config.spec, size, arrays).eval()
        with quiet_transformers("compute the model", _HINT):
            token = first_difference(ours, theirs, tokenizer)
        if token is not None:
            raise AttnlmError(
                f"attnlm and transformers compute different results for {source}, from token "
                f"{token + 1:,} on",
                f"use a shorter context: `block_size` {token}" if token > 7 else _HINT,
            )
        facts = CheckpointFacts(step=0).content()
        return create_run_folder(
            Run(
                Path(),
                config,
                vocab_size=size,
                parameters=sum(p.numel() for p in ours.parameters()),
                dataset=DatasetFacts(name=origin.rpartition("/")[2].partition("@")[0]),
                imported_from=origin,
            ),
            tokenizer,
            name,
            checkpoint_dir,
            lambda run: save_checkpoint(run.best, dict(ours.named_parameters()), facts),
        )


def read_config(folder: Path, block_size: int | None) -> tuple[Any, Config]:
    """Return their configuration and ours. Raises AttnlmError if the model can't be expressed, or
    does not fit into memory."""
    path = folder / "config.json"
    content = files.json_object(path)
    kind = str(content.get("model_type"))
    if "attnlm" in content:
        raise AttnlmError(f"{folder} is already a run of attnlm", "use its path as RUN")
    for key in ("model_type", "quantization_config", "fusion_config"):  # the last: other classes
        value = content.get(key)
        if kind not in _CLASSES if key == "model_type" else value is not None:
            raise AttnlmError(
                f"{path} has {quoted(key)} {quoted(value)}, which attnlm does not support",
                f"import one of {', '.join(sorted(_CLASSES))}, without such options",
            )
    with quiet_transformers(f"read {path}", _HINT):
        if content.get("num_hidden_layers", 1) > 4096:  # it would list the type of each
            raise ValueError("too many layers")
        theirs = _class(kind).config_class.from_dict(content)
    settings = _settings(theirs)
    if block_size is not None and block_size > settings["block_size"]:
        raise UsageError(
            f"`block_size` {block_size:,} is longer than the model's context",
            f"use `block_size` {settings['block_size']} or less",
        )
    settings["block_size"] = block_size or min(settings["block_size"], _CONTEXT)
    try:
        ours = resolve({"model": _PRESETS.get(kind, "llama"), **settings, "steps": 1})
    except UsageError as error:
        raise AttnlmError(f"{path}: {error.message}", _HINT) from None
    with quiet_transformers(f"read {path}", hub.COPY):  # an impossible vocab_size
        parameters = sum(map(math.prod, ours.spec.parameter_shapes(theirs.vocab_size).values()))
    needed, memory = int(_OPENED * 4 * parameters), machine_memory()
    if memory is not None and needed > memory:
        raise AttnlmError(
            f"the model's {parameters:,} parameters need {byte_size(needed)} of memory, "
            f"but this machine has {byte_size(memory)}",
            "import a smaller model",
        )
    return theirs, ours


# --- Export ---------------------------------------------------------------------------------------


def write_model(run: Run, checkpoint: Checkpoint, folder: Path) -> str:
    """Write a run's model and tokenizer to a new folder, and return the class of `transformers`.

    Raises AttnlmError if the class computes something else, or encodes texts differently.
    """
    from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

    kind = choose_class(run)
    a = _completed(require_architecture(run.config.spec, "the format of another tool"), kind)
    tokenizer, weights = run.tokenizer, load_weights(run, checkpoint)
    end, first = tokenizer.end_of_text, tokenizer.beginning
    # Without these keys, `transformers` would use default ids.
    special = {"bos_token_id": end if first is None else first}
    special |= {"eos_token_id": end, "pad_token_id": end}
    sizes = {"vocab_size": run.vocab_size, "dtype": "float32"}
    with torch.random.fork_rng([]):
        config = _class(kind).config_class(**_config(a, kind), **special, **sizes)
        model = _class(kind)(config).eval()
    if kind != "gpt2":
        model.config.rope_theta = a.rotary_base  # for older versions
    for parameter in model.parameters():
        parameter.data.zero_()
    for name, view in _views(model, a.parameter_shapes(run.vocab_size)).items():
        if name in weights:
            view.copy_(torch.from_numpy(weights[name]))
        elif name.endswith("projection.weight"):
            view.copy_(torch.eye(a.width))
    ours = build_with_weights(run.config.spec, run.vocab_size, weights).eval()
    if first_difference(ours, model, tokenizer) is not None:
        raise ChangedModelError(
            f"{run.name} computes something else than its settings say",
            "use a model of attnlm's own classes, unchanged",
        )
    # Sample from all tokens at temperature 1, the defaults of `attnlm sample`.
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    model.generation_config = GenerationConfig(**special, **sampling)
    model.save_pretrained(folder)
    named = {name.removesuffix("_id"): i for name, i in special.items() if i is not None}
    PreTrainedTokenizerFast(
        tokenizer_object=library_tokenizer(tokenizer),
        model_max_length=a.block_size,
        clean_up_tokenization_spaces=False,
        padding_side="left",  # as `generate` needs it
        model_input_names=["input_ids", "attention_mask"],
        **{name: tokenizer.decode([i]) for name, i in named.items()},
    ).save_pretrained(folder)
    loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    check_equal(tokenizer, loaded.backend_tokenizer)
    return _CLASSES[kind]
