"""Patch activations: which place of a model carries the difference between two texts?

A model reads a clean and a corrupted text of equal length. The clean activation of one place is put
into the corrupted pass, and the logits after the last token are compared: how much of the
difference between the two texts comes back? (Meng et al., 2022; Wang et al., 2023)

Axes: B batch, T tokens, C features, V vocabulary, L layers, H heads, E value size.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import OnEvent, Progress, ignore
from attnlm.model.inspection import check_finite
from attnlm.model.language_model import Bigram, LanguageModel
from attnlm.model.recorder import Place, Recorder, observed
from attnlm.runs.load_model import load_model
from attnlm.runs.run import Run, open_run
from attnlm.see.attend import Numbers
from attnlm.see.text import ids_within_context, tint, token_texts, visible

if TYPE_CHECKING:
    from rich.columns import Columns

_BATCH_TOKENS = 2**11
_CELL, _NARROW = 6, 2  # characters, with and without a number

_NO_BLOCKS = (
    "only heads are patched: residual stream, attention and MLP outputs are known in blocks of "
    "attnlm, which a whole model of your own does not have"
)
_NO_HEADS = (
    "heads are not patched: no scaled_dot_product_attention, and no softmax times values, was "
    "observed in each layer"
)


@dataclass(frozen=True)
class Grid:
    """A table of shares, with a name for each of R rows and C columns."""

    title: str
    rows: list[str]
    columns: list[str]
    values: Numbers
    """(R, C)"""


@dataclass(frozen=True, repr=False)
class Patching:
    """The share of the logit difference that each clean activation brings back.

    0 is the corrupted pass, 1 the clean one. A share may be negative, or larger than 1.
    """

    run: str
    model: str
    clean: list[str]
    """T tokens"""
    corrupted: list[str]
    """T tokens"""
    answers: tuple[str, str]
    """the tokens whose logits are compared: the clean answer and the corrupted answer"""
    differences: tuple[float, float]
    """logit of the clean answer − logit of the corrupted answer, after each of the two texts"""
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
        shown = " and ".join(map(repr, self.answers))
        return f"<Patching of {self.run!r}: {shown} over {len(self.clean)} tokens>"

    def __str__(self) -> str:
        """Return a table for each kind of activation."""
        return "\n".join(in_words(self))

    @property
    def compared(self) -> str:
        """The answers, and the difference of their logits after each text, in words."""
        a, b = map(visible, self.answers)
        after_clean, after_corrupted = self.differences
        return (
            f"logit of {a} − logit of {b}: {after_clean:.3f} after the clean text (share 1), "
            f"{after_corrupted:.3f} after the corrupted text (share 0)"
        )

    @property
    def grids(self) -> list[Grid]:
        """The shares as tables that are not empty: tokens by layers, and layers by heads.

        Tokens before the first that differs are left out: there, both texts have equal activations.
        """
        pairs = [*zip(self.clean, self.corrupted, strict=True)]
        first = next((t for t, (c, d) in enumerate(pairs) if c != d), 0)
        shown = [visible(c) if c == d else f"{visible(d)}→{visible(c)}" for c, d in pairs[first:]]
        widest = max(map(len, shown))
        tokens = [f"{t:>3} {token:<{widest}}" for t, token in enumerate(shown, first)]
        parts = {"residual stream": self.stream, "attention output": self.attention}
        found = [
            Grid(name, tokens, _numbered(x, 1 - (x is self.stream)), x.T[first:])
            for name, x in (parts | {"MLP output": self.mlp}).items()
        ]
        layers = [f"layer {layer}" for layer in _numbered(self.heads)]
        found.append(Grid("heads", layers, _numbered(self.heads.T), self.heads))
        return [grid for grid in found if grid.values.size]

    def facts(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in vars(self).items()}


def _numbered(rows: Numbers, first: int = 1) -> list[str]:
    return ["embed" if not n else str(n) for n in range(first, first + len(rows))]


def patch(
    clean: str,
    corrupted: str,
    run: str | Path | Run | None = None,
    *,
    answers: tuple[str, str] | None = None,
    checkpoint: str = "auto",
    checkpoint_dir: str | Path = "checkpoints",
    on_event: OnEvent | None = None,
) -> Patching:
    """Find where a run (default: the one trained last) carries the difference between two texts.

        found = attnlm.patch("the cat", "the hat", "transformer-001", answers=("s", "e"))
        found.heads  # (L, H): the share that each head brings back
        found.stream[2, 4]  # the share of the residual stream after layer 2, at the fifth token
        print(found)  # as tables

    The clean activation of one place after the other is put into a pass over the corrupted text.
    Let d be the logit of the clean answer minus the logit of the corrupted answer, after the last
    token. A place with a difference of d has the share (d − d₀) / (d₁ − d₀). The corrupted pass has
    d₀ and the clean pass d₁. The answers are the likeliest next token after each text, or the two
    tokens `answers`.

    Residual stream, attention output and MLP output are patched at each token, if the model has
    blocks. A head is patched at all tokens together. It is observed in
    `scaled_dot_product_attention`, and where a softmax over all tokens is multiplied by values,
    also in code of your own. `on_event` receives events of type Progress. Runs on the CPU.

    Raises UsageError if an answer is not one token. Raises AttnlmError if the texts have different
    numbers of tokens, or do not fit the context or the vocabulary. The same error is raised if the
    answers are equal, if nothing can be patched, as in a bigram, for missing or damaged files, and
    for numbers that are not finite.
    """
    run = open_run(run, checkpoint_dir=checkpoint_dir)
    pair = [ids_within_context(run, text) for text in (clean, corrupted)]
    if len(pair[0]) != len(pair[1]):
        raise AttnlmError(
            f"the texts have {len(pair[0])} and {len(pair[1])} tokens, which must be equal",
            "replace words by others with as many tokens",
        )
    model, _ = load_model(run, checkpoint=checkpoint, device="cpu")
    if isinstance(model, Bigram):
        raise AttnlmError(
            "a bigram has no layers, so there is nothing to patch",
            "use another model, such as single-head",
        )
    found: dict[Place, Tensor] = {}
    logits_2V = _pass(model, torch.tensor(pair), lambda at, x: found.setdefault(at, x.clone()))
    check_finite(logits_2V)
    heads: Counter[int] = Counter()
    for (name, layer, _), both in found.items():
        heads[layer] += both.size(1) if name == "mixed" else 0
    del heads[-1]  # the embedding
    is_whole = sorted(heads) == [*range(len(heads))]
    has_heads = is_whole and 0 not in heads.values() and len(set(heads.values())) == 1
    if not has_heads:
        found = {place: both for place, both in found.items() if place[0] != "mixed"}
    if not found:
        raise AttnlmError(f"nothing to patch was observed in {run.name}", _NO_HEADS)
    a, b = _answers(run, answers, logits_2V)
    clean_d, corrupted_d = (logits_2V[:, a] - logits_2V[:, b]).tolist()
    if clean_d == corrupted_d:
        raise AttnlmError(
            f"the difference of the answers' logits is {clean_d:.4g} after both texts",
            "use texts that the model continues differently",
        )

    def share(logits_BV: Tensor) -> Tensor:
        d_B = logits_BV[:, a] - logits_BV[:, b]
        return torch.div(d_B - corrupted_d, clean_d - corrupted_d)

    shares: dict[str, list[Tensor]] = defaultdict(list)
    for done, (place, both) in enumerate(found.items()):
        (on_event or ignore)(Progress("patch", done, len(found), "place"))
        shares[place[0]].append(_shares(model, pair[1], place, both, share))
    stream, attention, mlp = (_stacked(shares[name]) for name in ("stream", "attended", "mlp"))
    heads_LH = torch.cat(shares["mixed"]).view(len(heads), -1) if has_heads else ()
    return Patching(
        run=run.name,
        model=run.config.spec.name,
        clean=token_texts(run.tokenizer, pair[0]),
        corrupted=token_texts(run.tokenizer, pair[1]),
        answers=(run.tokenizer.decode([a]), run.tokenizer.decode([b])),
        differences=(clean_d, corrupted_d),
        stream=stream,
        attention=attention,
        mlp=mlp,
        heads=_stacked(heads_LH),
        missing=_NO_BLOCKS if not stream.size else "" if has_heads else _NO_HEADS,
    )


def _stacked(rows: Sequence[Tensor] | Tensor) -> Numbers:
    return torch.stack([*rows]).numpy() if len(rows) else np.empty((0, 0), np.float32)


def _answers(run: Run, answers: tuple[str, str] | None, logits_2V: Tensor) -> tuple[int, int]:
    """Return the ids of the clean and the corrupted answer."""
    if answers is None:
        a, b = logits_2V.argmax(-1).tolist()
        if a == b:
            token = run.tokenizer.decode([a])
            raise AttnlmError(
                f"the likeliest next token is {token!r} after both texts",
                "use texts that the model continues differently, or name two tokens by `answers`",
            )
        return a, b
    ids = [run.tokenizer.encode(answer) for answer in answers]
    for answer, found in zip(answers, ids, strict=True):
        if len(found) != 1:
            message = f"invalid value for `answers`: {answer!r} has {len(found)} tokens"
            raise UsageError(message, "name one token for each text")
    if ids[0] == ids[1]:
        raise UsageError("invalid value for `answers`: they are equal", "name two tokens")
    return ids[0][0], ids[1][0]


@torch.inference_mode()
def _pass(
    model: LanguageModel, tokens_BT: Tensor, edit: Callable[[Place, Tensor], Tensor]
) -> Tensor:
    """Return the logits of the next token, (B, V), with edited activations."""
    recorder = Recorder(watch=lambda _: None, edit=edit, texts=len(tokens_BT))
    with observed(model, recorder):
        return model.next_logits(tokens_BT)


@torch.inference_mode()
def _shares(
    model: LanguageModel,
    corrupted: list[int],
    place: Place,
    both: Tensor,
    share: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the share that the clean activation of each token, or of each head, brings back.

    `both` has the activations of the clean and of the corrupted pass, (2, T, C) or (2, H, T, E).
    Each text of a batch gets the clean activation at one index of axis 1. `share` maps logits,
    (B, V) → (B,).
    """
    clean, other = both
    # Equal activations, as those before the first token that differs, change nothing.
    changed = (clean != other).flatten(1).any(1).nonzero()[:, 0]
    found = torch.zeros(len(clean))
    for some in changed.split(max(1, _BATCH_TOKENS // len(corrupted))):
        if not len(some):  # an empty tensor has one empty part
            break

        def edit(at: Place, x: Tensor, some: Tensor = some) -> Tensor:
            if at == place:
                x = x.clone()
                x[torch.arange(len(some)), some] = clean[some]
            return x

        found[some] = share(_pass(model, torch.tensor([corrupted] * len(some)), edit))
    return found


def in_words(found: Patching) -> Iterator[str]:
    """Yield the lines of a table for each kind of activation."""
    for grid in found.grids:
        start = max(map(len, [grid.title, *grid.rows]))
        yield f"{grid.title:<{start}}{''.join(f'{name:>{_CELL}}' for name in grid.columns)}"
        for name, shares in zip(grid.rows, grid.values.tolist(), strict=True):
            yield f"{name:<{start}}{''.join(f'{share:z{_CELL}.2f}' for share in shares)}"


def in_colour(found: Patching, width: int) -> Columns:
    """Return coloured tables for a terminal of `width` columns; wide ones show no numbers."""
    from rich.cells import set_cell_size
    from rich.columns import Columns
    from rich.text import Text

    tables = []
    for grid in found.grids:
        start = max(map(len, grid.rows))
        fits = start + _CELL * len(grid.columns) <= width
        cell = _CELL if fits else _NARROW
        table = Text(f"{grid.title}\n{'':<{start}}", no_wrap=True)
        table.append("".join(set_cell_size(f" {name}"[-cell:], cell) for name in grid.columns))
        for name, shares in zip(grid.rows, grid.values.tolist(), strict=True):
            table.append(f"\n{name:<{start}}")
            for share in shares:
                number = f"{share:z{_CELL - 1}.2f} " if fits else ""
                table.append(f"{number:<{cell}}", tint(max(-1.0, min(share, 1.0))))
        tables.append(table.append("\n"))
    return Columns(tables, padding=(0, 1))


def patch_page(found: Patching) -> bytes:
    """Return an HTML page of all tables, in UTF-8."""
    from attnlm.see.page import render

    return render("patch.html", found=found)
