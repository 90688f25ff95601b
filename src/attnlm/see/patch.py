"""Patch activations: which place of a model carries the difference between two texts?

A model reads a clean and a corrupted text of equal length. The clean activation of one place is put
into the corrupted pass, and the logits after the last token are compared: how much of the
difference between the two texts comes back? (Meng et al., 2022; Wang et al., 2023)

Axes: N pairs, B batch, T tokens, C features, V vocabulary, L layers, H heads, E value size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import OnEvent, Progress, ignore
from attnlm.model.inspection import check_finite
from attnlm.model.language_model import LanguageModel
from attnlm.model.recorder import See, Site, record
from attnlm.runs.load_model import load_model
from attnlm.runs.run import Run, open_run
from attnlm.see.pictures import Grid, Numbers, Pictured
from attnlm.see.shown_tokens import ids_within_context, token_texts, visible

_BATCH_TOKENS = 2**11
_KINDS = {"stream": "residual stream", "attention": "attention output", "mlp": "MLP output"}
_PATCHED = (*_KINDS, "heads")


@dataclass(frozen=True, repr=False)
class Patching(Pictured):
    """The share of the logit difference that each clean activation brings back.

    0 is the corrupted pass, 1 the clean one. A share may be negative, or larger than 1. An array is
    empty if its activations cannot be observed: whole models of your own have no blocks, and a
    layer without `scaled_dot_product_attention`, and without softmax times values, has no heads.
    """

    model: str
    clean: list[str]
    """T tokens; … for tokens that differ from pair to pair"""
    corrupted: list[str]
    """T tokens, as in `clean`"""
    answers: list[tuple[str, str]]
    """for each pair, the tokens whose logits are compared: the clean and the corrupted answer"""
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

    @property
    def compared(self) -> str:
        """The answers, and the difference of their logits after each text, in words."""
        clean, corrupted = map(visible, self.answers[0])
        logits = f"logit of {clean} − logit of {corrupted}"
        if len(self.answers) > 1:
            logits = f"logit of the clean − of the corrupted answer, mean of {len(self.answers)}"
        after_clean, after_corrupted = self.differences
        return (
            f"{logits}: {after_clean:.3f} after the clean text (share 1), "
            f"{after_corrupted:.3f} after the corrupted text (share 0)"
        )

    @property
    def title(self) -> str:
        return f"{self.run}: {self.compared}"

    @property
    def grids(self) -> list[Grid]:
        """The shares as tables: tokens by layers, and layers by heads.

        Tokens before the first that differs are left out: there, both texts have equal activations.
        """
        pairs = list(zip(self.clean, self.corrupted, strict=True))
        first = next(t for t, (c, d) in enumerate(pairs) if c != d or c == "…")
        shown = [visible(c) if c == d else f"{visible(d)}→{visible(c)}" for c, d in pairs]
        widest = max(map(len, shown[first:]))
        tokens = [f"{t:>3} {shown[t]:<{widest}}" for t in range(first, len(shown))]
        numbers = [str(n + 1) for n in range(max(len(self.stream), *self.heads.shape))]
        grids = []
        for name, title in _KINDS.items():
            shares = getattr(self, name)
            layers = ["embed", *numbers] if name == "stream" else numbers
            grids.append(Grid(title, tokens, layers[: len(shares)], shares.T[first:], "layer"))
        layers, heads = ([*numbers[:count]] for count in self.heads.shape)
        grids.append(Grid("heads", [f"layer {n}" for n in layers], heads, self.heads, "head"))
        return [grid for grid in grids if grid.values.size]


def patch(
    clean: str | Sequence[str],
    corrupted: str | Sequence[str],
    run: str | Path | Run | None = None,
    *,
    answers: tuple[str, str] | Sequence[tuple[str, str]] | None = None,
    checkpoint: str = "auto",
    on_event: OnEvent | None = None,
) -> Patching:
    """Find where a run (default: the one trained last) carries the difference between two texts.

        patching = attnlm.patch("the cat", "the hat", "transformer-001", answers=("s", "e"))
        patching.heads  # (L, H): the share that each head brings back
        patching.stream[2, 4]  # the share of the residual stream after layer 2, at token 5
        print(patching)  # as tables

    `clean` and `corrupted` are two texts, or two lists of N texts; all have equally many tokens.
    `answers` has a token for the clean and one for the corrupted text, or a list of N such pairs;
    by default, they are the likeliest next tokens after each text.

    The clean activation of one place after the other is put into a pass over the corrupted text.
    Let d be the logit of the clean answer minus the logit of the corrupted answer after the last
    token, averaged over all pairs. A place with a difference of d has the share (d − d₀) / (d₁ −
    d₀). The corrupted pass has d₀ and the clean pass d₁.

    Residual stream, attention output and MLP output are patched at each token, if the model has
    blocks. A head is patched at all tokens together. It is observed in
    `scaled_dot_product_attention`, and where a softmax over all tokens is multiplied by values,
    also in code of your own. `on_event` receives events of type Progress. Runs on the CPU.

    Raises UsageError if an answer is not one token. Raises AttnlmError if texts have different
    numbers of tokens, or do not fit the context or the vocabulary; if the model continues both
    texts alike; if nothing can be patched, as in a bigram; for missing or damaged files, and for
    numbers that are not finite.
    """
    run = open_run(run)
    if isinstance(clean, str):
        clean, corrupted, answers = [clean], [str(corrupted)], answers and [answers]  # type: ignore[list-item]
    texts_N2T = _encoded(run, clean, corrupted)
    pairs = [()] * len(clean) if answers is None else [*answers]
    answer_ids = [[_answer_id(run, one) for one in pair] for pair in pairs]
    model, _ = load_model(run, checkpoint=checkpoint, device="cpu")
    sums: dict[Site, Tensor] = {}
    compared, differences = [], []
    for number, (texts_2T, ids) in enumerate(zip(texts_N2T, answer_ids, strict=True)):
        (on_event or ignore)(Progress("patch", number, len(texts_N2T), "pair"))
        ids, d_2 = _add_recovered(model, texts_2T, ids, sums)
        first, second = token_texts(run.tokenizer, ids)
        compared.append((first, second))
        differences.append(d_2)
    if not sums:
        raise AttnlmError(
            f"{run.name} has nothing to patch: no layers and no attention were observed",
            "use another model, such as single-head",
        )
    clean_d, corrupted_d = torch.stack(differences).mean(0).tolist()
    if clean_d == corrupted_d:
        a, b = compared[0]
        raise AttnlmError(
            f"the logit of {a!r} minus that of {b!r} is {clean_d:.4g} after both texts",
            "use texts that the model continues differently, or name two tokens by `answers`",
        )
    tokens = [token_texts(run.tokenizer, ids) for ids in texts_N2T[0].tolist()]
    for side, t in (texts_N2T != texts_N2T[0]).any(0).nonzero().tolist():
        tokens[side][t] = "…"
    total = len(compared) * (clean_d - corrupted_d)
    return Patching(
        run=run.name,
        model=run.config.spec.name,
        clean=tokens[0],
        corrupted=tokens[1],
        answers=compared,
        differences=(clean_d, corrupted_d),
        **{kind: _shares(sums, kind, total) for kind in _PATCHED},
    )


def _encoded(run: Run, *sides: Sequence[str]) -> Tensor:
    """Return the ids of all pairs of texts, (N, 2, T)."""
    ids = [[ids_within_context(run, text) for text in side] for side in sides]
    sizes = {len(text): None for side in ids for text in side}
    if len(sizes) != 1 or len(ids[0]) != len(ids[1]):
        raise AttnlmError(
            f"the texts have {' and '.join(map(str, sizes))} tokens, which must be equal",
            "replace words by others with as many tokens",
        )
    return torch.tensor(ids).transpose(0, 1)


def _answer_id(run: Run, answer: str) -> int:
    ids = run.tokenizer.encode(answer)
    if len(ids) != 1:
        message = f"invalid value for `answers`: {answer!r} has {len(ids)} tokens"
        raise UsageError(message, "name one token for each text")
    return ids[0]


@torch.inference_mode()
def _add_recovered(
    model: LanguageModel, texts_2T: Tensor, answers: list[int], sums: dict[Site, Tensor]
) -> tuple[list[int], Tensor]:
    """Patch a pair of texts; return the ids of the answers (default: the likeliest), and d₁ and d₀.

    In `sums`, each place has a number for each token, (T,), or for each head, (H,). The d − d₀ of
    the pair are added to these numbers.
    """
    places: dict[Site, Tensor] = {}  # activations of the clean and of the corrupted pass

    def keep(site: Site, x: Tensor) -> Tensor:
        if site.kind in _PATCHED:
            places[site] = x.clone()
        return x

    def difference(logits_BV: Tensor) -> Tensor:
        return logits_BV[:, answers[0]] - logits_BV[:, answers[1]]

    logits_2V = record(model, texts_2T, see=keep, compute=model.next_logits).logits
    check_finite(logits_2V)
    answers = answers or logits_2V.argmax(-1).tolist()
    d_2 = difference(logits_2V)
    for site, (clean, corrupted) in places.items():
        sum_I = sums.setdefault(site, torch.zeros(len(clean)))
        # Equal activations, as those before the first token that differs, change nothing.
        changed = (clean != corrupted).flatten(1).any(1).nonzero()[:, 0]
        for index in changed.split(max(1, _BATCH_TOKENS // texts_2T.size(1))):
            if len(index):  # an empty tensor has one empty part
                texts_BT = texts_2T[1].expand(len(index), -1)
                edit = _replacing(site, index, clean[index])
                patched = record(model, texts_BT, see=edit, compute=model.next_logits)
                sum_I[index] += difference(patched.logits) - d_2[1]
    return answers, d_2


def _replacing(site: Site, index: Tensor, values: Tensor) -> See:
    """Return an edit that gives each text of a batch one of `values`, at an index of axis 1."""

    def edit(at: Site, x: Tensor) -> Tensor:
        return x.clone().index_put_((torch.arange(len(index)), index), values) if at == site else x

    return edit


def _shares(sums: Mapping[Site, Tensor], kind: str, total: float) -> Numbers:
    """Return the shares of a kind by layer, as far as the layers that have it are alike."""
    rows: dict[int, list[Tensor]] = {}
    for site, sum_I in sums.items():
        if site.kind == kind:
            rows.setdefault(site.layer, []).append(sum_I)
    layers = [torch.cat(row) for _, row in sorted(rows.items())]
    is_part = kind == "heads" and len(layers) <= max(site.layer for site in sums)
    if is_part or len(set(map(len, layers))) != 1:
        return np.empty((0, 0), np.float32)
    return (torch.stack(layers) / total).numpy()
