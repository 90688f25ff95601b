"""Attention as one HTML page, where pointing at a token shows what it looks at."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from attnlm.see.attend import CAUTION, Attention, Numbers
from attnlm.see.next_tokens import next_tokens_data
from attnlm.see.page import render
from attnlm.see.text import visible

SCRIPTS = ("attend.js", "next.js")
_MOST = 2  # tokens that a head's caption names


def attention_page(attention: Attention) -> bytes:
    """The page, in UTF-8. As it opens, it shows what the last token looks at."""
    data, content = attention_parts(attention)
    return render("attend.html", scripts=SCRIPTS, data=data, attention=attention, **content)


def attention_parts(attention: Attention) -> tuple[dict[str, Any], dict[str, Any]]:
    """What SCRIPTS read, and what the templates text.html, heads.html and next.html show."""
    shown = [visible(token) for token in attention.tokens]
    next_tokens = next_tokens_data(attention)
    data = {"tokens": shown, "weights": _packed(attention.weights), "next": next_tokens}
    likeliest = [
        (visible(t), p) for t, p in attention.next_tokens(-1, len(next_tokens["candidates"][-1]))
    ]
    content = {
        "caution": CAUTION,
        "shown": shown,
        "weights": _last_rows(attention.weights, shown),
        "likeliest": likeliest,
        "others": max(0.0, 1 - sum(p for _, p in likeliest)),
        "vocabulary": len(attention.vocabulary),
    }
    return data, content


def _last_rows(weights: Numbers, shown: list[str]) -> list[list[dict[str, Any]]]:
    """For each layer and head the tokens with their shares, and in words those with the largest."""

    def of_head(weights_TT: Numbers) -> dict[str, Any]:
        shares = weights_TT[-1]
        most = np.argsort(-shares, kind="stable")[:_MOST]
        return {
            "row": [(t, f"{w:.3f}") for t, w in zip(shown, shares.tolist(), strict=True)],
            "most": ", ".join(f"{shown[s]} {shares[s]:.0%}" for s in most),
        }

    return [[of_head(weights_TT) for weights_TT in weights_HTT] for weights_HTT in weights]


def _packed(weights_LHTT: Numbers) -> str:
    """The lower triangles, a byte for each weight, in base64: small enough for long texts."""
    length = weights_LHTT.shape[-1]
    triangles = weights_LHTT[..., *np.tril_indices(length)]
    return base64.b64encode(np.rint(triangles * 255).astype(np.uint8).tobytes()).decode()
