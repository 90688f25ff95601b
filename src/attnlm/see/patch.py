"""Patch activations: which place of a model carries the difference between two texts?

A model reads a clean and a corrupted text of equal length. The clean activation of one place is put
into the corrupted pass, and the logits after the last token are compared: how much of the
difference between the two texts comes back? (Meng et al., 2022; Wang et al., 2023)

Axes: N pairs, B batch, T tokens, C features, V vocabulary, L layers, H heads, E value size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import OnEvent, Progress, ignore
from attnlm.model.inspection import check_finite
from attnlm.model.language_model import LanguageModel
from attnlm.model.recorder import Recorder, Site, observed
from attnlm.runs.load_model import load_model
from attnlm.runs.run import Run, open_run
from attnlm.see.pictures import Grid, HeatMaps, Numbers
from attnlm.see.shown_tokens import ids_within_context, token_texts, visible

_BATCH_TOKENS = 2**11
_LIKELIEST = -1
"""stands for the id of an answer that is the likeliest next token"""
_KINDS = {"stream": "residual stream", "attention": "attention output", "mlp": "MLP output"}
_NO_BLOCKS = (
    "only heads are patched: residual stream, attention and MLP outputs are known in blocks of "
    "attnlm, which a whole model of your own does not have"
)
_NO_HEADS = (
    "heads are not patched: no scaled_dot_product_attention, and no softmax times values, was "
    "observed in each layer"
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
            f"{logits}: {after_clean:.3f} after the clean text (share 1), "
            f"{after_corrupted:.3f} after the corrupted text (share 0)"
        )

    @property
    def maps(self) -> HeatMaps:
        """The shares as tables: tokens by layers, and layers by heads.

        Tokens before the first that differs are left out: there, both texts have equal activations.
        """
        pairs = list(zip(self.clean, self.corrupted, strict=True))
        first = next(t for t, (c, d) in enumerate(pairs) if c != d or c == "…")
        shown = [visible(c) if c == d else f"{visible(d)}→{visible(c)}" for c, d in pairs]
        widest = max(map(len, shown[first:]))
        tokens = [f"{t:>3} {shown[t]:<{widest}}" for t in range(first, len(shown))]
        grids = []
        for name, title in _KINDS.items():
            shares = getattr(self, name)
            layers = [str(n + 1) for n in range(len(shares))]
            layers = ["embed", *layers[:-1]] if name == "stream" else layers
            grids.append(Grid(title, tokens, layers, shares.T[first:], "layer"))
        layers = [f"layer {n + 1}" for n in range(len(self.heads))]
        heads = [str(n + 1) for n in range(self.heads.shape[1])]
        grids.append(Grid("heads", layers, heads, self.heads, "head"))
        return HeatMaps(f"{self.run}: {self.compared}", [g for g in grids if g.values.size])

    def _repr_png_(self) -> bytes:
        return self.maps.picture()

    def facts(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in vars(self).items()}


def patch(
    clean: str | Sequence[str],
    corrupted: str | Sequence[str],
    run: str | Path | Run | None = None,
    *,
    answers: tuple[str, str] | Sequence[tuple[str, str]] | None = None,
    checkpoint: str = "auto",
    checkpoint_dir: str | Path = "checkpoints",
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
    run = open_run(run, checkpoint_dir=checkpoint_dir)
    texts_N2T = _encoded(run, clean, corrupted)
    given_N2 = torch.full((len(texts_N2T), 2), _LIKELIEST)
    if answers is not None:
        pairs = [answers] if isinstance(clean, str) else answers
        given_N2 = torch.tensor([[_answer_id(run, str(one)) for one in pair] for pair in pairs])
    model, _ = load_model(run, checkpoint=checkpoint, device="cpu")
    sums, answers_N2, (clean_d, corrupted_d) = _brought_back(
        model, texts_N2T, given_N2, on_event or ignore
    )
    if not sums:
        raise AttnlmError(
            f"{run.name} has nothing to patch: no layers and no attention were observed",
            "use another model, such as single-head",
        )
    decode = run.tokenizer.decode
    if clean_d == corrupted_d:
        a, b = (decode([i]) for i in answers_N2[0].tolist())
        raise AttnlmError(
            f"the logit of {a!r} minus that of {b!r} is {clean_d:.4g} after both texts",
            "use texts that the model continues differently, or name two tokens by `answers`",
        )
    total = clean_d - corrupted_d
    tokens = [token_texts(run.tokenizer, ids) for ids in texts_N2T[0].tolist()]
    for side, t in (texts_N2T != texts_N2T[0]).any(0).nonzero().tolist():
        tokens[side][t] = "…"
    stream, heads = _shares(sums, "stream", total), _shares(sums, "mixed", total)
    return Patching(
        run=run.name,
        model=run.config.spec.name,
        clean=tokens[0],
        corrupted=tokens[1],
        answers=[(decode([a]), decode([b])) for a, b in answers_N2.tolist()],
        differences=(clean_d, corrupted_d),
        stream=stream,
        attention=_shares(sums, "attended", total),
        mlp=_shares(sums, "mlp", total),
        heads=heads,
        missing=_NO_BLOCKS if not stream.size else "" if heads.size else _NO_HEADS,
    )


def _encoded(run: Run, clean: str | Sequence[str], corrupted: str | Sequence[str]) -> Tensor:
    """Return the ids of all pairs of texts, (N, 2, T)."""
    sides = [[x] if isinstance(x, str) else list(x) for x in (clean, corrupted)]
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
def _brought_back(
    model: LanguageModel, texts_N2T: Tensor, given_N2: Tensor, on_event: OnEvent
) -> tuple[dict[Site, Tensor], Tensor, tuple[float, float]]:
    """Return the mean d − d₀ by place, the answers, (N, 2), and the means d₁ and d₀.

    A place has a number for each token, (T,), or for each head, (H,).
    """
    sums: dict[Site, Tensor] = {}
    answers, differences = [], []
    batches = torch.arange(len(texts_N2T)).split(max(1, _BATCH_TOKENS // texts_N2T[0].numel()))
    for number, pairs in enumerate(batches):
        places: dict[Site, Tensor] = {}  # activations of the clean and of the corrupted pass

        def keep(site: Site, x: Tensor, kept: dict[Site, Tensor] = places) -> Tensor:
            return kept.setdefault(site, x.clone())

        logits_BV = _logits(model, texts_N2T[pairs].flatten(0, 1), keep)
        check_finite(logits_BV)
        likeliest_N2 = logits_BV.argmax(-1).view(-1, 2)
        answers_N2 = torch.where(given_N2[pairs] == _LIKELIEST, likeliest_N2, given_N2[pairs])
        d_N2 = _difference(logits_BV, answers_N2.repeat_interleave(2, 0)).view(-1, 2)
        answers.append(answers_N2)
        differences.append(d_N2)
        for done, (site, values) in enumerate(places.items(), number * len(places)):
            on_event(Progress("patch", done, len(batches) * len(places), "place"))
            clean, corrupted = values[::2], values[1::2]
            sum_I = sums.setdefault(site, torch.zeros(clean.size(1)))
            # Equal activations, as those before the first token that differs, change nothing.
            changed_NI = (clean != corrupted).flatten(2).any(2)
            most = max(1, _BATCH_TOKENS // texts_N2T.size(2))
            for pair, index in (rows.T for rows in changed_NI.nonzero().split(most) if len(rows)):
                patched = clean[pair, index]

                def edit(
                    at: Site, x: Tensor, site: Site = site, index: Tensor = index,
                    patched: Tensor = patched,
                ) -> Tensor:  # fmt: skip
                    if at == site:
                        x = x.clone()
                        x[torch.arange(len(index)), index] = patched
                    return x

                logits_BV = _logits(model, texts_N2T[pairs[pair], 1], edit)
                d_B = _difference(logits_BV, answers_N2[pair])
                sum_I.index_add_(0, index, d_B - d_N2[pair, 1])
    clean_d, corrupted_d = torch.cat(differences).mean(0).tolist()
    means = {site: sum_I / len(texts_N2T) for site, sum_I in sums.items()}
    return means, torch.cat(answers), (clean_d, corrupted_d)


def _difference(logits_BV: Tensor, answers_B2: Tensor) -> Tensor:
    answer_logits_B2 = logits_BV.gather(1, answers_B2)
    return answer_logits_B2[:, 0] - answer_logits_B2[:, 1]


def _logits(
    model: LanguageModel, tokens_BT: Tensor, edit: Callable[[Site, Tensor], Tensor]
) -> Tensor:
    """Return the logits of the next token, (B, V), with edited activations."""
    recorder = Recorder(watch=lambda _: None, edit=edit, texts=len(tokens_BT))
    with observed(model, recorder):
        return model.next_logits(tokens_BT)


def _shares(means: Mapping[Site, Tensor], kind: str, total: float) -> Numbers:
    """Return the shares of a kind by layer, as far as the layers that have it are alike."""
    layers = sorted({site.layer for site in means if site.kind == kind})
    rows = [torch.cat([x for s, x in means.items() if (s.kind, s.layer) == (kind, n)])
            for n in layers]  # fmt: skip
    is_part = kind == "mixed" and len(rows) <= max(site.layer for site in means)
    if is_part or len(set(map(len, rows))) != 1:
        return np.empty((0, 0), np.float32)
    return (torch.stack(rows) / total).numpy()
