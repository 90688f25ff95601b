"""Hugging Face: models of `transformers` become runs, and runs become models of `transformers`.

Two tables hold their names of sizes and modules, for both directions. Whatever a config.json says,
a model is imported or exported only if both libraries compute the same (`first_difference`).

If a class has parts that our model lacks, they are stored such that no logit changes: biases,
position embeddings and an MLP of zeros, and the identity as a projection.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnlm.base import files
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import OnEvent, ignore
from attnlm.base.folders import CHECKPOINT_DIR, is_folder
from attnlm.base.formatting import quantity
from attnlm.base.setting_fields import check_value, quoted
from attnlm.compute.device import machine_memory
from attnlm.config.settings import Config, resolve
from attnlm.model.architecture import Architecture
from attnlm.model.building import build_with_weights
from attnlm.model.inspection import check_finite
from attnlm.model.language_model import LanguageModel
from attnlm.model.spec import Shapes, require_architecture
from attnlm.runs import hub
from attnlm.runs.checkpoint import Array
from attnlm.runs.create_run import check_name_is_free, create_imported
from attnlm.runs.hub import quiet_transformers
from attnlm.runs.import_from_page import read_page_model
from attnlm.runs.load_model import load_weights
from attnlm.runs.run import Checkpoint, Run
from attnlm.text.corpus_tales import RULES, generate_story, parse_grammar, uniform_words
from attnlm.tokens.tokenizer import CharTokenizer, Tokenizer
from attnlm.tokens.tokenizer_json import check_equal, library_tokenizer, read_tokenizer_files

_HINT = "import a GPT-2, Llama, SmolLM, Mistral, Qwen2 or Qwen3 model without such options"
_EXPORTED = "train a `model` transformer, gpt2, llama or qwen3 without other parts"
_OPENED = 1.7  # memory to import and to sample, as a multiple of the weights: measured
_AGREEMENT = 1e-4  # of the largest number, between a model of ours and of theirs
_CONTEXT = 1024  # tokens, unless `block_size` is given

# --- Their names and values, and ours -------------------------------------------------------------

_CLASSES = {
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    # Never exported: LlamaForCausalLM has the same parts.
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",  # `transformers` reads any tokenizer beside it as Qwen2's
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
    if is_local and revision is not None:
        hint = f"leave it out: {source} is on this machine"
        raise UsageError("`revision` applies only to models of the Hub", hint)
    origin = str(path.absolute())
    if file and (saved := read_page_model(file)):
        if block_size is not None:
            what = "`block_size` does not apply to a model that a page trained"
            raise UsageError(what, "leave it out")
        return create_imported(*saved, origin, name, checkpoint_dir)
    hub.import_transformers(f"importing {source}")
    folders = hub.describe(source, base, revision, on_event)
    folder = folders[source]
    if not is_local:
        origin = f"{source}@{folder.name}"
    model_folder, *adapters = folders.values()
    their_config, config = read_config(model_folder, block_size)
    for each, place in folders.items():
        hub.fetch(each, place.name, hub.WEIGHTS, on_event)
    size, stock = their_config.vocab_size, _class(their_config.model_type)
    theirs = hub.load(stock, their_config, model_folder, None if adapters else file)
    for adapter in adapters:
        theirs = hub.with_adapter(theirs, adapter)
    own = (folder / "tokenizer.json").exists()
    tokenizer = read_tokenizer_files(folder if own else model_folder, size)
    config, weights = _our_weights(theirs, config)
    ours = build_with_weights(config.spec, size, weights).eval()
    with quiet_transformers("compute the model", _HINT):
        token = first_difference(ours, theirs, tokenizer)
    if token is not None:
        raise AttnlmError(
            f"attnlm and transformers compute different results for {source}, from token "
            f"{token + 1:,} on",
            f"use a shorter context: `block_size` {token}" if token > 7 else _HINT,
        )
    text = origin.rpartition("/")[2].partition("@")[0]
    named = dict(ours.named_parameters())
    return create_imported(config, tokenizer, named, text, 0, origin, name, checkpoint_dir)


def _our_weights(theirs: Any, config: Config) -> tuple[Config, dict[str, Any]]:
    """Return the weights of their model under our names, and our configuration of it.

    The configuration lacks an MLP that has no effect, as exports of models without one have it.
    """
    a = require_architecture(config.spec, "the format of another tool")
    shapes = a.parameter_shapes(theirs.config.vocab_size)
    weights = {name: torch.zeros(()).expand(shape) for name, shape in shapes.items()}
    weights |= _views(theirs, shapes)
    check_finite(*weights.values())
    if a.mlp_dim == 1 and not any(weights[n].any() for n in shapes if ".mlp.down." in n):
        config = replace(config, spec=replace(a, mlp="none", mlp_width=None))
    return config, {name: tensor.numpy() for name, tensor in weights.items()}


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
            f"the model's {parameters:,} parameters need {quantity(needed, 'B')} of memory, "
            f"but this machine has {quantity(memory, 'B')}",
            "import a smaller model",
        )
    return theirs, ours


# --- Export ---------------------------------------------------------------------------------------


def write_model(run: Run, checkpoint: Checkpoint, folder: Path) -> str:
    """Write a run's model and tokenizer to a new folder, and return the class of `transformers`.

    Raises AttnlmError if the class computes something else, or encodes texts differently.
    """
    from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

    a = require_architecture(run.config.spec, "the format of another tool")
    tokenizer, weights = run.tokenizer, load_weights(run, checkpoint)
    if tokenizer.name == "ids":
        raise UsageError(
            f"{run.name} was trained on ids, for which transformers has no tokenizer",
            "read its weights with safetensors, or export to html",
        )
    end, first = tokenizer.end_of_text, tokenizer.beginning
    # Without these keys, `transformers` would use default ids.
    special = {"bos_token_id": end if first is None else first}
    special |= {"eos_token_id": end, "pad_token_id": end}
    ours = build_with_weights(a, run.vocab_size, weights).eval()
    kind = "gpt2" if a.norm == "layer" else "qwen3" if a.query_key_norm else "llama"
    with quiet_transformers(f"express {run.name} as {_CLASSES[kind]}", _EXPORTED):
        model = _filled_model(a, kind, weights, {**special, "vocab_size": run.vocab_size})
        if first_difference(ours, model, tokenizer) is not None:
            raise ValueError("it computes something else")
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


def _filled_model(
    a: Architecture, kind: str, weights: Mapping[str, Array], ids: Mapping[str, int | None]
) -> Any:
    """Return a model of the class of a `model_type` with these weights, and zeros elsewhere.

    Raises ValueError and other errors if the class has no place for a weight.
    """
    whole = _completed(a, kind)
    with torch.random.fork_rng([]):
        config = _class(kind).config_class(**_config(whole, kind), **ids, dtype="float32")
        theirs = _class(kind)(config).eval()
    if kind != "gpt2":
        theirs.config.rope_theta = a.rotary_base  # for older versions
    for parameter in theirs.parameters():
        parameter.data.zero_()
    views = _views(theirs, whole.parameter_shapes(config.vocab_size))
    for name in sorted(weights.keys() - views.keys()):
        raise ValueError(f"it has no place for {name}")
    for name, view in views.items():
        if name in weights:
            view.copy_(torch.from_numpy(weights[name]))
        elif name.endswith("projection.weight"):
            view.copy_(torch.eye(a.width))
    return theirs


# --- Both -----------------------------------------------------------------------------------------


@torch.inference_mode()
def first_difference(ours: LanguageModel, theirs: Any, tokenizer: Tokenizer) -> int | None:
    """Return the first token at which two models differ, in windows of a text and of random ids.

    What their LM heads read is compared at all tokens, and the logits at 256. A difference is more
    than 1e-4 of the largest number, or NaN.
    """
    grammar, words = parse_grammar(RULES), uniform_words("text to compare")
    text = "\n".join(generate_story(grammar, words)[0] for _ in range(20))
    if isinstance(tokenizer, CharTokenizer):
        text = "".join(c for c in text if c in tokenizer.characters)
    length, ids = ours.block_size, tokenizer.encode(text) or [0]
    random_source = torch.Generator().manual_seed(0)
    text_ids = torch.tensor(ids * -(-length // len(ids)))[:length]
    random_ids = torch.randint(ours.vocab_size, (length,), generator=random_source)
    places = torch.linspace(0, length - 1, min(length, 256)).long()
    for window_T in (text_ids, random_ids):
        found = _pass(ours, ours.head, window_T, places)
        expected = _pass(theirs, theirs.lm_head, window_T, places)
        every: Any = range(length)
        for mine, their, tokens in zip(found, expected, (every, places), strict=True):
            errors = (mine - their).abs().amax(-1).tolist()
            bound = _AGREEMENT * their.abs().max().item()
            for token, error in zip(tokens, errors, strict=True):
                if not error <= bound:
                    return int(token)
    return None


def _pass(model: nn.Module, head: Any, ids_T: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a model's LM head reads (T, C), and its logits at some places (N, V)."""
    read: list[Tensor] = []

    def keep(_: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        read.append(inputs[0][0])
        return inputs[0][:, places]

    hook = head.register_forward_pre_hook(keep)
    try:
        out = model(ids_T[None])
    finally:
        hook.remove()
    return read[0], getattr(out, "logits", out)[0]
