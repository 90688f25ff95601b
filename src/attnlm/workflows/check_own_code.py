"""Check own code: does it fit, is it causal, what does it cost, and which attention maps has it?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.formatting import listed, quantity
from attnlm.base.own_code import OwnCode, named_code, own_traceback
from attnlm.compute.device import choose_device
from attnlm.config.new_run import resolve_new, with_own_code
from attnlm.config.settings import CHOSEN_BY_NAME, Config, resolve
from attnlm.model.architecture import Architecture
from attnlm.model.inspection import draw_zeros, parameter_count, restoring
from attnlm.model.language_model import LanguageModel
from attnlm.model.own_arguments import PREFIX, infer_kind
from attnlm.model.own_modules import OwnLanguageModel
from attnlm.model.recorder import SOFTMAX, record
from attnlm.model.spec import ModelSpec
from attnlm.training.optimizer import flatten_parameters
from attnlm.training.own_code_trial import mixes_texts
from attnlm.training.recorded import check_recorded
from attnlm.training.step import StepNotFiniteError
from attnlm.workflows.autotune import random_dataset, seconds_per_token
from attnlm.workflows.doctor import Finding

_VOCAB_SIZE = 65  # as Tiny Shakespeare's characters
_MOST_TOKENS = 64  # of a text that is checked
_MOST_CHANGED = 32  # tokens that are changed one by one
_TOLERANCE = 1e-4
"""Logits are equal if they differ by at most this fraction of the largest."""
_LEAK = 2e-5
"""A causal model's logits change by less, as a fraction of the largest, by rounding alone."""
_TIMED = 0.05  # seconds
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.InstanceNorm1d)
_MASK = "mask the scores before the softmax, with -inf where the key is later than the query"
_APART = "compute each text by itself: no sum, mean or softmax over the first axis"
_AXIS = "normalise over the keys: softmax(dim=-1)"


@dataclass(frozen=True)
class Leak:
    """Information that flows from a later token to an earlier one, both counted from 1."""

    source: int
    target: int
    change: float
    cause: str
    in_training: bool = False
    """True if evaluation, in which dropout is off, has no leak"""

    def __str__(self) -> str:
        mode = "in training, " if self.in_training else ""
        return (
            f"{mode}the logits at token {self.target} change by {self.change:.2g} when the later "
            f"token {self.source} changes"
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
    yield from _check_loss(model, ids_BT, logits_BTV)
    draw_zeros(model)
    yield _check_gradients(model, ids_BT)
    leak = find_leak(model)
    text = "logits depend on no later token" if leak is None else str(leak)
    yield Finding("causality", text, "" if leak is None else leak.cause, leak is not None)
    yield from _check_contexts(model)
    alone = model(ids_BT[:1])
    together = model(ids_BT)[:1]
    batch = _check_equal("batch", alone, together, "texts of a batch do not change each other")
    if not batch.remedy and mixes_texts(config, model, choose_device("cpu"), ids_BT.numpy()):
        batch = Finding("batch", "in training, texts of a batch change each other", _APART)
    yield batch
    yield _check_equal(
        "evaluation", model(ids_BT), model(ids_BT), "the same ids give the same logits"
    )
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
    first: list[str] = []

    def look(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            has_floats = isinstance(output, Tensor) and output.is_floating_point()
            if has_floats and not output.isfinite().all():
                first.append(name or "the model")

        return hook

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            handle = nn.Module.register_forward_hook(module, look(name))
            hooks.callback(handle.remove)
        model(ids_BT)
    where = f": they come first from {first[0]}" if first else ""
    remedy = "look for a row whose scores are all -inf, a division by 0, or a logarithm of 0"
    return Finding("numbers", f"logits are NaN or infinite{where}", remedy, is_fatal=True)


def _check_loss(model: LanguageModel, ids_BT: Tensor, logits_BTV: Tensor) -> Iterator[Finding]:
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
    shown = ", ".join(without[:4]) + (" and others" if len(without) > 4 else "")
    return Finding("gradients", text, f"without one: {shown}: use or remove them")


def find_leak(model: LanguageModel, most: int = _MOST_CHANGED) -> Leak | None:
    """Return the largest change of logits by a later token, or None if the model is causal.

    Evaluation is tried first, then training. The model is in evaluation mode before and afterwards.
    """
    try:
        return _find_leak(model.eval(), most) or _find_leak(model.train(), most)
    finally:
        model.eval()


@torch.no_grad()
def _find_leak(model: LanguageModel, most: int) -> Leak | None:
    ids_1T = _random_ids(model, 1)
    length = ids_1T.size(1)

    def logits_of(ids_1T: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]), restoring(model):
            torch.manual_seed(0)  # neither noise nor a count is a leak
            logits: Tensor = model(ids_1T)[0]
        return logits

    before_TV = logits_of(ids_1T)
    tolerance = _LEAK * float(before_TV.abs().max())
    if not (logits_of(ids_1T) - before_TV).abs().max() <= tolerance:
        return None  # it counts, or draws from a generator of its own: nothing can be said
    changes: list[tuple[float, int, int]] = []
    for source in {*range(1, length, max(1, length // most)), *range(1, length)[-1:]}:
        changed_1T = ids_1T.clone()
        changed_1T[0, source] = (ids_1T[0, source] + 1) % model.vocab_size
        change_T = (logits_of(changed_1T)[:source] - before_TV[:source]).abs().amax(-1)
        changes.append((float(change_T.max()), source, int(change_T.argmax())))
    change, source, target = max(changes, default=(0.0, 0, 0))
    if not change > tolerance:
        return None
    cause = _cause_of_leak(model, ids_1T)
    return Leak(source + 1, target + 1, change, cause, in_training=model.training)


class _SoftmaxObserver(TorchFunctionMode):
    """A mode that looks at each softmax over as many keys as queries."""

    def __init__(self) -> None:
        super().__init__()
        self.looks_ahead = self.over_queries = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in SOFTMAX and result.dim() > 1 and result.size(-1) == result.size(-2) > 1:
            ones = torch.ones(())
            over_keys = result.sum(-1).isclose(ones, atol=1e-4).all()
            self.over_queries |= bool(
                not over_keys and result.sum(-2).isclose(ones, atol=1e-4).any()
            )
            self.looks_ahead |= bool(result.triu(1).any())
        return result


def _cause_of_leak(model: LanguageModel, ids_1T: Tensor) -> str:
    if any(isinstance(module, _BATCH_NORMS) and module.training for module in model.modules()):
        return "its batch norm takes means over all tokens: use LayerNorm or RMSNorm"
    with _SoftmaxObserver() as observer:
        model(ids_1T)
    if observer.over_queries:
        return _AXIS
    if observer.looks_ahead:
        return f"its softmax gives weights to later tokens: {_MASK}"
    return f"look for a missing mask, a mask after the softmax, or a wrong axis: {_MASK}"


def check_causal(spec: ModelSpec, vocab_size: int) -> str:
    """Return what flows from later tokens to earlier ones in a model with own code; "" if nothing.

    Raises AttnlmError if the model computes no finite logits.
    """
    if not spec.codes:
        return ""
    model = _built_model(spec, vocab_size)
    ids_BT = _random_ids(model, 1)
    numbers = _check_finite(model, ids_BT, model(ids_BT))
    if numbers.is_fatal:
        raise AttnlmError(numbers.text, numbers.remedy)
    draw_zeros(model)
    leak = find_leak(model, most=8)
    return "" if leak is None else f"{leak}; {leak.cause}"


@torch.inference_mode()
def _check_contexts(model: LanguageModel) -> Iterator[Finding]:
    lengths = sorted({1, min(2, model.block_size), max(1, model.block_size - 1), model.block_size})
    for length in lengths:
        ids_1T = torch.zeros(1, length, dtype=torch.long)
        try:
            model(ids_1T)
        except Exception as error:  # noqa: BLE001 - own code may raise anything
            reason = str(error).partition("\n")[0]  # which may be empty
            text = f"{length} tokens: {type(error).__name__}: {reason}"
            yield Finding("contexts", text, "texts begin with one token: allow any length", True)
            return
    yield Finding("contexts", f"from 1 to {model.block_size} tokens")


def _check_equal(name: str, logits: Tensor, others: Tensor, promise: str) -> Finding:
    difference = (logits - others).abs().max().item()
    if difference <= _TOLERANCE * logits.abs().max().item():
        return Finding(name, promise)
    remedies = {
        "batch": _APART,
        "evaluation": "switch dropout and noise off in evaluation: if self.training",
    }
    return Finding(name, f"logits differ by {difference:.2g}", remedies[name])


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
    recorder = record(model, ids_BT)
    counts = [layer.head_count for layer in recorder.layers]
    if not any(counts):
        return Finding("maps", "no attention maps were found: reports go without them")
    each = " and ".join(str(count) for count in sorted(set(counts)))
    text = f"{len(counts)} {'layer' if len(counts) == 1 else 'layers'} × {each} heads"
    heads = getattr(model.spec, "heads", None)
    if heads is None or set(counts) == {heads}:
        return Finding("maps", text)
    return Finding("maps", text, f"the model has `heads` {heads}: does the code use the argument?")


def _cost_findings(config: Config, vocab_size: int) -> Iterator[Finding]:
    """Yield the costs of the model and of the same model with the standard part."""
    spec = config.spec
    configs = {"": config}
    if isinstance(spec, Architecture):
        standard = spec.settings()
        sizes = ("model", "embed_dim", "heads", "block_size")
        sizes_of = {k: standard[k] for k in sizes if k in standard and k not in spec.codes}
        configs[f"; the standard {spec.preset}: "] = resolve(sizes_of)
    numbers: dict[str, list[str]] = {"parameters": [], "operations": [], "time": []}
    for label, compared in configs.items():
        parameters = parameter_count(compared.spec, vocab_size)
        flops = compared.spec.costs(vocab_size).training_flops
        modules = compared.with_training(device="cpu", compile="modules", seed=0)
        data = random_dataset(vocab_size, compared.spec.block_size)
        milliseconds = math.nan
        with suppress(StepNotFiniteError):  # `_check_finite` says where it comes from
            milliseconds = 1e3 * seconds_per_token(modules, data, _TIMED) * compared.tokens_per_step
        numbers["parameters"].append(f"{label}{parameters:,}")
        numbers["operations"].append(f"{label}{quantity(flops, 'FLOP')} per token")
        numbers["time"].append(f"{label}{milliseconds:.3g} ms per step")
    for name, texts in numbers.items():
        yield Finding(name, "".join(texts))
    if config.training.optimizer == "muon":
        model = _built_model(spec, vocab_size)
        names = [name for name, p in model.named_parameters() if model.is_matrix(name, p)]
        by_adamw = sum(1 for _ in model.parameters()) - len(names)
        updated = f"Muon updates {listed(names, 6) or 'no parameter'}; AdamW the other {by_adamw}"
        yield Finding("optimizer", updated)
