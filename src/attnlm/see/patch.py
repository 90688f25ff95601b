"""Patch activations: which place of a model carries the difference between two texts?

A model reads a clean and a corrupted text of equal length. The clean activation of one place is put
into the corrupted pass, and the logits after the last token are compared: how much of the
difference between the two texts comes back? (Meng et al., 2022; Wang et al., 2023)

Axes: N pairs, B batch, T tokens, C features, V vocabulary, L layers, H heads, E value size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import OnEvent, Progress, ignore
from attnlm.base.files import read_text
from attnlm.model.inspection import check_finite
from attnlm.model.language_model import Bigram, LanguageModel, Transformer
from attnlm.model.recorder import Recorder, Site, observed
from attnlm.runs.load_model import load_model
from attnlm.runs.run import Run, open_run
from attnlm.see.attend import Numbers
from attnlm.see.heat_maps import Grid, HeatMaps
from attnlm.see.shown_tokens import ids_within_context, token_texts, visible

_BATCH_TOKENS = 2**11
_DIFFERING = "…"
_LIKELIEST = -1
"""stands for the id of an answer that is the likeliest next token"""
_LINE = 'a line of the file is {"clean": "the cat", "corrupted": "the hat", "answers": ["s", "e"]}'

_NO_BLOCKS = (
    "only heads are patched: residual stream, attention and MLP outputs are known in blocks of "
    "attnlm, which a whole model of your own does not have"
)
_NO_HEADS = (
    "heads are not patched: no scaled_dot_product_attention, and no softmax times values, was "
    "observed in each layer"
)
_MEANING = (
    "A number is the share of this difference, in percent, that comes back if the clean activation "
    "of one place is put into the pass over the corrupted text. Blue brings it back, orange takes "
    "it away."
)


@dataclass(frozen=True, repr=False)
class Patching:
    """The share of the logit difference that each clean activation brings back.

    0 is the corrupted pass, 1 the clean one. A share may be negative, or larger than 1.
    """

    run: str
    model: str
    clean: list[str]
    """T tokens; … for tokens that differ from pair to pair"""
    corrupted: list[str]
    """T tokens, as in `clean`"""
    first: int
    """the index of the first token that differs between a clean and its corrupted text"""
    answers: list[tuple[str, str]]
    """for each pair, the tokens whose logits are compared: the clean and the corrupted answer"""
    left_out: int
    """the number of further pairs, after whose texts the likeliest next token is the same"""
    differences: tuple[float, float]
    """logit of the clean answer − logit of the corrupted answer, after the clean text and after the
    corrupted text, as means over the pairs"""
    stream: Numbers
    """(1 + L, T): the residual stream at each token, after the embedding and after each layer"""
    attention: Numbers
    """(L, T): the output of the attention at each token"""
    mlp: Numbers
    """(L, T): the output of the MLP at each token"""
    heads: Numbers
    """(L, H): a head's mixed values, weights · v before the projection, at all tokens together"""
    missing: str
    """what could not be observed in this model, and why, in a sentence; empty if nothing is"""

    def __repr__(self) -> str:
        return f"<Patching of {self.run!r}: {self.compared}>"

    def __str__(self) -> str:
        """Return a table for each kind of activation."""
        return str(self.maps)

    @property
    def compared(self) -> str:
        """The answers, and the difference of their logits after each text, in words."""
        clean, corrupted = map(visible, self.answers[0])
        logits = f"logit of {clean} − logit of {corrupted}"
        if len(self.answers) > 1:
            pairs = f"{len(self.answers):,} pairs"
            logits = f"logit of the clean answer − logit of the corrupted one, mean of {pairs}"
        after_clean, after_corrupted = self.differences
        return (
            f"{logits}: "
            f"{after_clean:.3f} after the clean text (share 1), "
            f"{after_corrupted:.3f} after the corrupted text (share 0)"
        )

    @property
    def notes(self) -> list[str]:
        """Return sentences about what was not measured, and why."""
        notes = [self.missing] if self.missing else []
        if self.left_out:
            reason = "the likeliest next token is the same after both texts"
            notes.insert(0, f"{self.left_out:,} pairs do not count: {reason}")
        return notes

    @property
    def maps(self) -> HeatMaps:
        """The shares as tables: tokens by layers, and layers by heads.

        Tokens before the first that differs are left out: there, both texts have equal activations.
        """
        pairs = [*zip(self.clean, self.corrupted, strict=True)][self.first :]
        shown = [visible(c) if c == d else f"{visible(d)}→{visible(c)}" for c, d in pairs]
        widest = max(map(len, shown))
        tokens = [f"{t:>3} {token:<{widest}}" for t, token in enumerate(shown, self.first)]
        kinds = (
            ("residual stream", self.stream, 0),
            ("attention output", self.attention, 1),
            ("MLP output", self.mlp, 1),
        )
        grids = [
            Grid(name, tokens, _labels(x, first), x.T[self.first :], "layer")
            for name, x, first in kinds
        ]
        layers = [f"layer {layer}" for layer in _labels(self.heads)]
        grids.append(Grid("heads", layers, _labels(self.heads.T), self.heads, "head"))
        texts = {"Clean": self.clean, "Corrupted": self.corrupted}
        shown_texts = [f"{name}: {visible(''.join(tokens))}" for name, tokens in texts.items()]
        return HeatMaps(
            f"What {self.run} carries from text to text",
            [f"{self.model}: {self.compared}", _MEANING, *shown_texts, *self.notes],
            [grid for grid in grids if grid.values.size],
        )

    def facts(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in vars(self).items()}


def _labels(rows: Numbers, first: int = 1) -> list[str]:
    return ["embed" if not n else str(n) for n in range(first, first + len(rows))]


def patch(
    run: str | Path | Run | None,
    pairs: Sequence[tuple[str, ...]] | str | Path,
    *,
    checkpoint: str = "auto",
    checkpoint_dir: str | Path = "checkpoints",
    on_event: OnEvent | None = None,
) -> Patching:
    """Find where a run (default: the one trained last) carries the difference between two texts.

        patching = attnlm.patch("transformer-001", [("the cat", "the hat", "s", "e")])
        patching.heads  # (L, H): the share that each head brings back
        patching.stream[2, 4]  # the share of the residual stream after layer 2, at token 5
        print(patching)  # as tables

    Each of `pairs` has a clean and a corrupted text, and may have the answer to each, one token.
    The answers are otherwise the likeliest next tokens. All texts have equally many tokens. `pairs`
    may also be the path of a file, whose lines are JSON objects with the keys "clean", "corrupted"
    and, if wanted, "answers", a list of two.

    The clean activation of one place after the other is put into a pass over the corrupted text.
    Let d be the logit of the clean answer minus the logit of the corrupted answer after the last
    token, averaged over all pairs. A place with a difference of d has the share (d − d₀) / (d₁ −
    d₀). The corrupted pass has d₀ and the clean pass d₁.

    Residual stream, attention output and MLP output are patched at each token, if the model has
    blocks. A head is patched at all tokens together. It is observed in
    `scaled_dot_product_attention`, and where a softmax over all tokens is multiplied by values,
    also in code of your own. `on_event` receives events of type Progress. Runs on the CPU.

    Raises UsageError if an answer is not one token. Raises AttnlmError if texts have different
    numbers of tokens, or do not fit the context or the vocabulary. With several pairs, both name
    the pair, or the line of the file. AttnlmError is also raised if the answers are equal, if
    nothing can be patched, as in a bigram, for missing or damaged files, and for numbers that are
    not finite.
    """
    run = open_run(run, checkpoint_dir=checkpoint_dir)
    texts_N2T, given_N2 = _encoded_pairs(run, _pairs_by_origin(pairs))
    model, _ = load_model(run, checkpoint=checkpoint, device="cpu")
    if isinstance(model, Bigram):
        raise AttnlmError(
            "a bigram has no layers, so there is nothing to patch",
            "use another model, such as single-head",
        )
    sums, answers_N2, d_N2 = _recovered_by_place(model, texts_N2T, given_N2, on_event or ignore)
    sums_of = _sums_of_kinds(sums)
    if not any(sums_of.values()):
        raise AttnlmError(f"nothing to patch was observed in {run.name}", _NO_HEADS)
    decode = run.tokenizer.decode
    answers = [(decode([a]), decode([b])) for a, b in answers_N2.tolist() if a != b]
    clean_d, corrupted_d = (d_N2.sum(0) / max(1, len(answers))).tolist()
    if clean_d == corrupted_d:
        problem = f"the difference of the answers' logits is {clean_d:.4g}"
        if not answers:
            problem = f"the likeliest next token is {decode([int(answers_N2[0, 0])])!r}"
        raise AttnlmError(
            f"{problem} after both texts",
            "use texts that the model continues differently, or name two tokens by `answers`",
        )
    total = len(answers) * (clean_d - corrupted_d)
    tokens = [token_texts(run.tokenizer, ids) for ids in texts_N2T[0].tolist()]
    for side, t in (texts_N2T != texts_N2T[0]).any(0).nonzero().tolist():  # where pairs differ
        tokens[side][t] = _DIFFERING
    return Patching(
        run=run.name,
        model=run.config.spec.name,
        clean=tokens[0],
        corrupted=tokens[1],
        first=int((texts_N2T[:, 0] != texts_N2T[:, 1]).any(0).int().argmax()),
        answers=answers,
        left_out=len(answers_N2) - len(answers),
        differences=(clean_d, corrupted_d),
        stream=_shares(sums_of["stream"], total),
        attention=_shares(sums_of["attended"], total),
        mlp=_shares(sums_of["mlp"], total),
        heads=_shares(sums_of["mixed"], total),
        missing=_NO_BLOCKS if not sums_of["stream"] else "" if sums_of["mixed"] else _NO_HEADS,
    )


def _sums_of_kinds(sums: Mapping[Site, Tensor]) -> dict[str, list[Tensor]]:
    """Return the sums of each kind, one tensor for each layer that has it.

    Heads are left out unless all layers have the same number of them.
    """
    layers = range(-1, 1 + max((site.layer for site in sums), default=-1))
    by_kind: dict[str, list[Tensor]] = {}
    for kind in ("stream", "attended", "mlp", "mixed"):
        of_kind = {site: x for site, x in sums.items() if site.kind == kind}
        of_layers = [[x for site, x in of_kind.items() if site.layer == n] for n in layers]
        by_kind[kind] = [torch.cat(tensors) for tensors in of_layers if tensors]
    head_counts = [*map(len, by_kind["mixed"])]
    if len(head_counts) != len(layers) - 1 or len({*head_counts}) != 1:
        by_kind["mixed"] = []
    return by_kind


def _shares(layer_sums: list[Tensor], total: float) -> Numbers:
    """Return the sums as shares of the total difference between clean and corrupted passes."""
    return (torch.stack(layer_sums) / total).numpy() if layer_sums else np.empty((0, 0), np.float32)


def _pairs_by_origin(pairs: Sequence[tuple[str, ...]] | str | Path) -> dict[str, Sequence[str]]:
    """Return the pairs by the beginning of an error message about them."""
    if not isinstance(pairs, str | Path):
        return {f"pair {n}: " if len(pairs) > 1 else "": pair for n, pair in enumerate(pairs, 1)}
    by_origin: dict[str, Sequence[str]] = {}
    for number, line in enumerate(read_text(Path(pairs)).split("\n"), 1):
        if not line.strip():
            continue
        origin = f"line {number:,} of {pairs}"
        try:
            record = json.loads(line)
            texts = record["clean"], record["corrupted"]
            by_origin[f"{origin}: "] = [*texts, *record.get("answers", ())]
        except (ValueError, LookupError, TypeError, RecursionError):
            raise AttnlmError(f"{origin} has no two texts", _LINE) from None
    return by_origin


def _encoded_pairs(run: Run, by_origin: Mapping[str, Sequence[str]]) -> tuple[Tensor, Tensor]:
    """Return the ids of all pairs, (N, 2, T), and of their answers, (N, 2)."""
    texts: list[list[list[int]]] = []
    answers: list[list[int]] = []
    for origin, pair in by_origin.items():
        try:
            is_text = [isinstance(text, str) for text in pair]
            if isinstance(pair, str) or is_text not in ([True] * 2, [True] * 4):
                raise UsageError("a pair is two texts, or two texts and two answers", _LINE)
            texts.append([ids_within_context(run, text) for text in pair[:2]])
            sizes = {len(ids): None for ids in (*texts[0], *texts[-1])}
            if len(sizes) > 1:
                raise AttnlmError(
                    f"the texts have {' and '.join(map(str, sizes))} tokens, which must be equal",
                    "replace words by others with as many tokens",
                )
            answers.append([_answer_id(run, answer) for answer in pair[2:]] or [_LIKELIEST] * 2)
            if answers[-1][0] == answers[-1][1] != _LIKELIEST:
                raise UsageError("invalid value for `answers`: they are equal", "name two tokens")
        except AttnlmError as error:
            raise type(error)(origin + error.message, error.hint) from None
    if not texts:
        raise UsageError("there are no pairs of texts", _LINE)
    return torch.tensor(texts), torch.tensor(answers)


def _answer_id(run: Run, answer: str) -> int:
    ids = run.tokenizer.encode(answer)
    if len(ids) != 1:
        message = f"invalid value for `answers`: {answer!r} has {len(ids)} tokens"
        raise UsageError(message, "name one token for each text")
    return ids[0]


@torch.inference_mode()
def _recovered_by_place(
    model: LanguageModel, texts_N2T: Tensor, given_N2: Tensor, on_event: OnEvent
) -> tuple[dict[Site, Tensor], Tensor, Tensor]:
    """Return Σ (d − d₀) over pairs by place, the answers, (N, 2), and d₁ and d₀, (N, 2).

    A sum has a number for each token, (T,), or for each head, (H,).
    """
    sums: dict[Site, Tensor] = {}
    answers: list[Tensor] = []
    differences: list[Tensor] = []
    batches = torch.arange(len(texts_N2T)).split(max(1, _BATCH_TOKENS // texts_N2T[0].numel()))
    for number, pairs in enumerate(batches):
        activations: dict[Site, Tensor] = {}  # of the clean and of the corrupted pass

        def keep(site: Site, x: Tensor, kept: dict[Site, Tensor] = activations) -> Tensor:
            return kept.setdefault(site, x.clone())

        texts_BT = texts_N2T[pairs].flatten(0, 1)
        logits_BV = _logits(model, texts_BT, keep)
        check_finite(logits_BV)
        likeliest_N2 = logits_BV.argmax(-1).view(-1, 2)
        answers_N2 = torch.where(given_N2[pairs] == _LIKELIEST, likeliest_N2, given_N2[pairs])
        d_N2 = _logit_difference(logits_BV, answers_N2.repeat_interleave(2, 0)).view(-1, 2)
        answers.append(answers_N2)
        differences.append(d_N2)
        for done, (site, values) in enumerate(activations.items(), number * len(activations)):
            on_event(Progress("patch", done, len(batches) * len(activations), "place"))
            recovered_I = _recovered(model, texts_BT[1::2], answers_N2, d_N2[:, 1], site, values)
            sums[site] = sums[site] + recovered_I if number else recovered_I
    return sums, torch.cat(answers), torch.cat(differences)


def _recovered(
    model: LanguageModel,
    corrupted_NT: Tensor,
    answers_N2: Tensor,
    d_N: Tensor,
    site: Site,
    values: Tensor,
) -> Tensor:
    """Return Σ (d − d₀) over pairs, for the clean activation of each token, or of each head.

    `values` has the activations of the clean and the corrupted pass of each pair, (2 N, T, C) or
    (2 N, H, T, E). Each text of a batch gets the clean activation at one index of axis 1.
    """
    clean = values[::2]
    corrupted = values[1::2]
    # Equal activations, as those before the first token that differs, change nothing.
    changed = (clean != corrupted).flatten(2).any(2) & (answers_N2[:, :1] != answers_N2[:, 1:])
    is_last = isinstance(model, Transformer) and site.layer == len(model.blocks) - 1
    if is_last and site.kind in ("stream", "mlp"):
        changed[:, :-1] = False  # only the last token is read out
    sum_I = torch.zeros(changed.size(1))
    for rows in changed.nonzero().split(max(1, _BATCH_TOKENS // corrupted_NT.size(1))):
        pair, index = rows.T

        def edit(at: Site, x: Tensor, pair: Tensor = pair, index: Tensor = index) -> Tensor:
            if at == site:
                x = x.clone()
                x[torch.arange(len(pair)), index] = clean[pair, index]
            return x

        if len(rows):  # an empty tensor has one empty part
            d_B = _logit_difference(_logits(model, corrupted_NT[pair], edit), answers_N2[pair])
            sum_I.index_add_(0, index, d_B - d_N[pair])
    return sum_I


def _logit_difference(logits_BV: Tensor, answers_B2: Tensor) -> Tensor:
    answer_logits_B2 = logits_BV.gather(1, answers_B2)
    return answer_logits_B2[:, 0] - answer_logits_B2[:, 1]


def _logits(
    model: LanguageModel, tokens_BT: Tensor, edit: Callable[[Site, Tensor], Tensor]
) -> Tensor:
    """Return the logits of the next token, (B, V), with edited activations."""
    recorder = Recorder(watch=lambda _: None, edit=edit, texts=len(tokens_BT))
    with observed(model, recorder):
        return model.next_logits(tokens_BT)
