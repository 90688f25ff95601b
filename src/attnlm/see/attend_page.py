"""Attention as one HTML page: all heads in a grid, one of them large, and the text in its tint."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnlm.see.attend import CAUTION, Attention, Numbers
from attnlm.see.maps import packed_maps
from attnlm.see.next_tokens import next_tokens_data
from attnlm.see.page import render
from attnlm.see.text import visible

SCRIPTS = ("attend.js", "next.js")


def attention_page(attention: Attention) -> bytes:
    """The page, in UTF-8. As it opens, it shows what the last token looks at in the first head."""
    data, content = attention_parts(attention)
    return render("attend.html", scripts=SCRIPTS, data=data, attention=attention, **content)


def attention_parts(attention: Attention) -> tuple[dict[str, Any], dict[str, Any]]:
    """What SCRIPTS read, and what the templates text.html, heads.html and next.html show."""
    shown = [visible(token) for token in attention.tokens]
    next_tokens = next_tokens_data(attention)
    layers, heads = attention.weights.shape[:2]
    maps = packed_maps(attention.weights) if layers else None
    likeliest = [
        (visible(t), p) for t, p in attention.next_tokens(-1, len(next_tokens["candidates"][-1]))
    ]
    data = {"tokens": shown, "heads": heads, "maps": maps, "next": next_tokens}
    content = {
        "caution": CAUTION,
        "shown": shown,
        "shares": attention.weights[0, 0, -1].tolist() if layers else [0.0] * len(shown),
        "most": _most(attention.weights, shown),
        "least_share": maps["least"] / 255 if maps else 0.0,
        "likeliest": likeliest,
        "others": max(0.0, 1 - sum(p for _, p in likeliest)),
        "vocabulary": len(attention.vocabulary),
    }
    return data, content


def _most(weights: Numbers, shown: list[str]) -> list[list[tuple[str, float]]]:
    """For each layer and head the token that the last one looks at most, and its share.

    The share is in steps of 1/255, as in the packed maps: it is then rounded to the same percent.
    """
    places_LH = weights[..., -1, :].argmax(-1) if weights.size else np.empty((0, 0), int)
    return [
        [
            (shown[s], round(255 * float(weights[layer, head, -1, s])) / 255)
            for head, s in enumerate(places)
        ]
        for layer, places in enumerate(places_LH.tolist())
    ]
