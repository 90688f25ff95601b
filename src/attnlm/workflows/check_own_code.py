"""Check own code: what each run with it needs, and what else is worth to know before training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.formatting import listed, quantity
from attnlm.base.own_code import OwnCode, OwnCodeError, named_code, own_traceback
from attnlm.compute.device import Device
from attnlm.config.settings import CHOSEN_BY_NAME, Config, resolve, resolve_new, with_own_code
from attnlm.model.inspection import draw_zeros, restoring
from attnlm.model.language_model import LanguageModel
from attnlm.model.own_arguments import PREFIX, infer_kind
from attnlm.model.own_modules import OwnLanguageModel
from attnlm.model.recorder import record
from attnlm.model.spec import parameter_count
from attnlm.training.optimizer import flatten_parameters
from attnlm.training.own_code_trial import find_leak, mixes_texts
from attnlm.training.random_state import keeping_random_state
from attnlm.training.recorded import check_recorded
from attnlm.training.step import StepNotFiniteError
from attnlm.workflows.autotune import random_dataset, seconds_per_token
from attnlm.workflows.doctor import Finding

_VOCAB_SIZE = 65  # as Tiny Shakespeare's characters
_CPU = Device("cpu", "float32", "")
_MOST_TOKENS = 64  # of a text that is checked
_FLOP = 1e10
"""About the operations of a search for leaks: all tokens of contexts that are not too long."""
_TOLERANCE = 1e-4
"""Results are equal if they differ by at most this fraction of the largest."""
_TIMED = 0.05  # seconds


# --- What each run with own code needs ------------------------------------------------------------


class NotCausalError(OwnCodeError):
    """Raised for a model whose logits depend on later tokens; `leak` says how."""

    def __init__(self, name: str, leak: str, more: str = "") -> None:
        self.leak = leak
        super().__init__(
            f"{name} is not causal: {leak}",
            "mask the scores before the softmax, with -inf where the key is later than the query; "
            "normalise over the keys, softmax(dim=-1), and by LayerNorm or RMSNorm, not over the "
            f"tokens{more}",
        )


def check_causality(config: Config, vocab_size: int, force: bool = False) -> str:
    """Raise NotCausalError if the logits of a model with own code depend on later tokens.

    If `force` is True, return how instead, "" if they don't. Raises also what the code raises.
    """
    if config.spec.codes:
        try:
            _check_causal(config, _built_model(config, vocab_size))
        except NotCausalError as error:
            if not force:
                raise
            return error.leak
    return ""


def check_required(config: Config, vocab_size: int, force: bool = False) -> str:
    """Check what a run with own code needs, on the CPU and with new weights.

    `force`, errors and result are as of `check_causality`. Raises AttnlmError also if a run that is
    opened again computes something else.
    """
    leak = check_causality(config, vocab_size, force)
    if config.codes:
        _check_recorded(config, _built_model(config, vocab_size))
    return leak


def _check_causal(config: Config, model: LanguageModel) -> str:
    of_text = config.spec.costs(model.vocab_size).forward_flops * model.block_size
    most = max(8, int(_FLOP / (4 * max(of_text, 1))))  # in both modes, with two seeds
    with keeping_random_state(_CPU):
        leak = find_leak(model, most)
    if leak:
        raise NotCausalError(config.spec.name, leak)
    places = model.block_size - 1
    some = f" ({most:,} of {places:,} places were tried)" if most < places else ""
    return f"logits depend on no later token{some}"


def _check_recorded(config: Config, model: LanguageModel) -> str:
    check_recorded(config, model, _CPU)
    return "a run that is opened again computes the same"


REQUIRED: dict[str, Callable[[Config, LanguageModel], str]] = {
    "causality": _check_causal,
    "recorded": _check_recorded,
}
"""Each returns what holds of a new model, or raises AttnlmError for what keeps it from training"""


def _built_model(config: Config, vocab_size: int) -> LanguageModel:
    """Return the model in evaluation mode, as a run with the seed 0 builds it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = config.spec.build(vocab_size).eval()
    flatten_parameters(model, config.training)
    return model


# --- What `check` shows beside --------------------------------------------------------------------


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
    model = _built_model(config, vocab_size)
    ids_BT = _random_ids(model, 2)
    yield Finding("shapes", f"ids {tuple(ids_BT.shape)} → logits {tuple(model(ids_BT).shape)}")
    for name, look in REQUIRED.items():
        try:
            with restoring(model):
                yield Finding(name, look(config, model))
        except AttnlmError as error:
            yield Finding(name, error.message, error.hint, is_fatal=True)
    yield from _check_loss(model, ids_BT)
    draw_zeros(model)
    yield _check_gradients(model, ids_BT)
    with keeping_random_state(_CPU):
        is_mixing = mixes_texts(model, ids_BT)
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
    yield _check_maps(model, ids_BT[:1])
    yield from _cost_findings(config, vocab_size)


def _random_ids(model: LanguageModel, texts: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = texts, min(model.block_size, _MOST_TOKENS)
    return torch.randint(model.vocab_size, shape, generator=generator)


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


def _check_maps(model: LanguageModel, ids_BT: Tensor) -> Finding:
    counts = record(model, ids_BT).heads
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
