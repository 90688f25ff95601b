"""Check own code: does it fit, is it causal, what does it cost, and which attention maps has it?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.formatting import listed, quantity
from attnlm.base.own_code import OwnCode, named_code, own_traceback
from attnlm.compute.device import choose_device
from attnlm.config.settings import CHOSEN_BY_NAME, Config, resolve, resolve_new, with_own_code
from attnlm.model.inspection import draw_zeros, parameter_count
from attnlm.model.language_model import LanguageModel
from attnlm.model.own_arguments import PREFIX, infer_kind
from attnlm.model.own_modules import OwnLanguageModel
from attnlm.model.recorder import record
from attnlm.model.spec import ModelSpec
from attnlm.training.optimizer import flatten_parameters
from attnlm.training.own_code_trial import LeakUnknownError, find_leak, mixes_texts
from attnlm.training.random_state import keeping_random_state
from attnlm.training.recorded import check_recorded
from attnlm.training.step import StepNotFiniteError
from attnlm.workflows.autotune import random_dataset, seconds_per_token
from attnlm.workflows.doctor import Finding

_VOCAB_SIZE = 65  # as Tiny Shakespeare's characters
_MOST_TOKENS = 64  # of a text that is checked
_FLOP_TO_TRAIN, _FLOP_TO_CHECK = 1e10, 1e12
"""About the operations of a search for leaks: all tokens of contexts that are not too long."""
_TOLERANCE = 1e-4
"""Results are equal if they differ by at most this fraction of the largest."""
_TIMED = 0.05  # seconds
_CAUSAL = (
    "mask the scores before the softmax, with -inf where the key is later than the query; "
    "normalise over the keys, softmax(dim=-1), and by LayerNorm or RMSNorm, not over the tokens"
)


def check(
    code: str | Callable[..., Any],
    *,
    part: str | None = None,
    vocab_size: int = _VOCAB_SIZE,
    **settings: Any,
) -> Iterator[Finding]:
    """Check own code, and yield a finding for each thing that was checked.

        for finding in attnlm.check("mine.py:Temperature", heads=4):
            print(finding.name, finding.text, finding.remedy)

    `code` is a class or function, or its name as in `mine.py:Temperature`. `part` says what it is:
    attention, mlp, scores or model; by default, its arguments tell. `settings` describe the model
    around it, as in `train`. A finding with a remedy is a problem; a fatal finding keeps `train`
    from training the model. Raises AttnlmError if the code can't be called, and what the code
    raises.
    """
    named = with_own_code({"model": code})["model"]
    if not isinstance(named, OwnCode):
        named = named_code(str(named))  # refuses it, and says how to name code
    kind = part or infer_kind(named)
    if kind not in CHOSEN_BY_NAME:
        raise UsageError(f"invalid value for `part`: {kind!r}", f"use {', '.join(CHOSEN_BY_NAME)}")
    config = resolve_new({**settings, kind: named}, None).config
    yield from _findings(config, vocab_size)


def _findings(config: Config, vocab_size: int) -> Iterator[Finding]:
    values = config.spec.settings().items()
    arguments = [f"{k.removeprefix(PREFIX)}={v!r}" for k, v in values if k.startswith(PREFIX)]
    code = " and ".join(config.codes)
    yield Finding("arguments", f"{code}: {', '.join(arguments) or 'none of its own'}")
    model = _built_model(config.spec, vocab_size)
    ids_BT = _random_ids(model, 2)
    logits_BTV = model(ids_BT)
    yield Finding("shapes", f"ids {tuple(ids_BT.shape)} → logits {tuple(logits_BTV.shape)}")
    yield _check_finite(model, ids_BT, logits_BTV)
    yield from _check_loss(model, ids_BT)
    draw_zeros(model)
    yield _check_gradients(model, ids_BT)
    with keeping_random_state(choose_device("cpu"), config):
        yield _check_causality(config, model)
        is_mixing = mixes_texts(config, model, ids_BT)
    yield _check_contexts(model)
    apart = "compute each text by itself: no sum, mean or softmax over the first axis"
    text = f"texts of a batch {'' if is_mixing else 'do not '}change each other"
    yield Finding("batch", text, apart if is_mixing else "")
    first = model(ids_BT)
    if (difference := (model(ids_BT) - first).abs().max()) <= _TOLERANCE * first.abs().max():
        yield Finding("evaluation", "the same ids give the same logits")
    else:
        remedy = "switch dropout and noise off in evaluation: if self.training"
        yield Finding("evaluation", f"logits differ by {difference:.2g}", remedy)
    yield check_opened(config, vocab_size)
    yield _check_maps(model, ids_BT[:1])
    yield from _cost_findings(config, vocab_size)


def _built_model(spec: ModelSpec, vocab_size: int) -> LanguageModel:
    """Return the model in evaluation mode, as a run with the seed 0 builds it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return spec.build(vocab_size).eval()


def _random_ids(model: LanguageModel, texts: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = texts, min(model.block_size, _MOST_TOKENS)
    return torch.randint(model.vocab_size, shape, generator=generator)


def _check_finite(model: LanguageModel, ids_BT: Tensor, logits_BTV: Tensor) -> Finding:
    if logits_BTV.isfinite().all():
        return Finding("numbers", "all logits are finite")
    found: list[nn.Module] = []

    def look(module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor) and not output.isfinite().all():
            found.append(module)

    hook = register_module_forward_hook(look)
    model(ids_BT)
    hook.remove()
    names = {module: name or "the model" for name, module in model.named_modules()}
    where = f": they come first from {names[found[0]]}" if found else ""
    remedy = "look for a row whose scores are all -inf, a division by 0, or a logarithm of 0"
    return Finding("numbers", f"logits are NaN or infinite{where}", remedy, is_fatal=True)


def _check_loss(model: LanguageModel, ids_BT: Tensor) -> Iterator[Finding]:
    inputs_BT = ids_BT[:, :-1]
    targets_BT = ids_BT[:, 1:]
    loss = model.loss(inputs_BT, targets_BT).item() if ids_BT.size(1) > 1 else math.nan
    uniform = math.log(model.vocab_size)
    remedy = "start with smaller weights, above all in the LM head" if loss > 2 * uniform else ""
    yield Finding("loss at start", f"{loss:.2f} (uniform, ln V: {uniform:.2f})", remedy)
    if isinstance(model, OwnLanguageModel) and model.targets_name is not None:
        _, own_loss = model.call(inputs_BT, targets_BT)
        returned = loss if own_loss is None else own_loss.item()
        if abs(returned - loss) > _TOLERANCE * max(1.0, loss):
            yield Finding(
                "its own loss",
                f"{returned:.4f}, but the mean cross-entropy is {loss:.4f}",
                "attnlm trains the cross-entropy; pass another `loss` for others",
            )


def _check_gradients(model: LanguageModel, ids_BT: Tensor) -> Finding:
    model.zero_grad()
    loss = model.loss(ids_BT[:, :-1], ids_BT[:, 1:])
    try:
        loss.backward()
    except RuntimeError as error:
        if own_traceback(error) is not None:
            raise
        reason = str(error).partition("\n")[0].partition(": [")[0]
        raise AttnlmError(
            f"gradients cannot be computed: {reason}",
            "use no torch.no_grad, and change nothing in place: y = y + x instead of y += x",
        ) from error
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    without = [name for name, p in trained.items() if p.grad is None or not p.grad.any()]
    text = f"{len(trained) - len(without)} of {len(trained)} parameters get a gradient"
    if not without:
        return Finding("gradients", text)
    model.zero_grad()
    return Finding("gradients", text, f"without one: {listed(without, 4)}: use or remove them")


def _check_causality(config: Config, model: LanguageModel) -> Finding:
    most = _affordable(config, model, _FLOP_TO_CHECK)
    try:
        leak = find_leak(config, model, most)
    except LeakUnknownError as error:
        return Finding("causality", f"unknown: {error.message}", error.hint, is_fatal=True)
    places = model.block_size - 1
    some = f" ({most:,} of {places:,} places were tried)" if most < places else ""
    text = leak or f"logits depend on no later token{some}"
    return Finding("causality", text, _CAUSAL if leak else "", is_fatal=bool(leak))


def _affordable(config: Config, model: LanguageModel, flop: float) -> int:
    """Return from how many tokens on a text may change, in both modes and with two seeds."""
    of_text = config.spec.costs(model.vocab_size).forward_flops * model.block_size
    return max(8, int(flop / (4 * max(of_text, 1))))


def check_causal(config: Config, vocab_size: int) -> str:
    """Return what flows from later tokens to earlier ones in a model with own code; "" if nothing.

    Raises AttnlmError if the model computes no finite logits, or other ones for the same ids.
    """
    if not config.spec.codes:
        return ""
    model = _built_model(config.spec, vocab_size)
    ids_1T = _random_ids(model, 1)
    numbers = _check_finite(model, ids_1T, model(ids_1T))
    if numbers.is_fatal:
        raise AttnlmError(numbers.text, numbers.remedy)
    with keeping_random_state(choose_device("cpu"), config):
        leak = find_leak(config, model, _affordable(config, model, _FLOP_TO_TRAIN))
    return f"{leak}; {_CAUSAL}" if leak else ""


@torch.inference_mode()
def _check_contexts(model: LanguageModel) -> Finding:
    lengths = sorted({1, min(2, model.block_size), max(1, model.block_size - 1), model.block_size})
    for length in lengths:
        try:
            model(torch.zeros(1, length, dtype=torch.long))
        except Exception as error:  # noqa: BLE001 - own code may raise anything
            reason = str(error).partition("\n")[0]  # which may be empty
            text = f"{length} tokens: {type(error).__name__}: {reason}"
            remedy = "texts begin with one token: allow any length"
            return Finding("contexts", text, remedy, is_fatal=True)
    return Finding("contexts", f"from 1 to {model.block_size} tokens")


def check_opened(config: Config, vocab_size: int) -> Finding:
    """Return whether a run with own code computes the same when it is opened again."""
    model = _built_model(config.spec, vocab_size)
    flatten_parameters(model, config.training)
    try:
        check_recorded(config, model, choose_device("cpu"))
    except AttnlmError as error:
        return Finding("recorded", error.message, error.hint, is_fatal=True)
    return Finding("recorded", "a run that is opened again computes the same")


def _check_maps(model: LanguageModel, ids_BT: Tensor) -> Finding:
    counts = [layer.head_count for layer in record(model, ids_BT).layers]
    if not any(counts):
        return Finding("maps", "no attention maps were found: reports go without them")
    each = " and ".join(str(count) for count in sorted(set(counts)))
    text = f"{len(counts)} {'layer' if len(counts) == 1 else 'layers'} × {each} heads"
    heads = getattr(model.spec, "heads", None)
    remedy = f"the model has `heads` {heads}: does the code use the argument?"
    return Finding("maps", text, "" if heads is None or set(counts) == {heads} else remedy)


def _cost_findings(config: Config, vocab_size: int) -> Iterator[Finding]:
    """Yield the costs of the model and, for a part, of the same model with the standard part."""
    configs = {"": config}
    if preset := config.spec.preset:
        sizes = ("model", "embed_dim", "heads", "block_size")
        settings = config.spec.settings()
        configs[f"; the standard {preset}: "] = resolve(
            {k: settings[k] for k in sizes if k in settings}
        )
    texts = {"parameters": "", "operations": "", "time": ""}
    for label, compared in configs.items():
        flops = compared.spec.costs(vocab_size).training_flops
        modules = compared.with_training(device="cpu", compile="modules", seed=0)
        data = random_dataset(vocab_size, compared.spec.block_size)
        milliseconds = math.nan
        with suppress(StepNotFiniteError):  # `_check_finite` says where it comes from
            milliseconds = 1e3 * seconds_per_token(modules, data, _TIMED) * compared.tokens_per_step
        texts["parameters"] += f"{label}{parameter_count(compared.spec, vocab_size):,}"
        texts["operations"] += f"{label}{quantity(flops, 'FLOP')} per token"
        texts["time"] += f"{label}{milliseconds:.3g} ms per step"
    yield from (Finding(name, text) for name, text in texts.items())
