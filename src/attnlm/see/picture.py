"""Attention as a picture: a grid of maps, a row for each layer and a column for each head."""

from __future__ import annotations

import io

from attnlm.see.attend import Attention
from attnlm.see.drawing import drawing, fonts_for
from attnlm.see.text import visible

_MOST_LABELS = 48  # characters on an axis that can still be read
_LARGEST_SIDE = 30  # inches


def picture(attention: Attention, format: str) -> bytes:
    """A PNG or an SVG file (`format` is png or svg), the same bytes for the same attention."""
    layers, heads, length, _ = attention.weights.shape
    side = min(max(2.2, 0.16 * min(length, _MOST_LABELS)), _LARGEST_SIDE / max(layers, heads))
    families, _ = fonts_for(_shown(attention))
    style = {"svg.hashsalt": "attnlm", "svg.fonttype": "none", "font.family": families}
    with drawing(**style):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import LinearSegmentedColormap
        from matplotlib.figure import Figure

        scale = LinearSegmentedColormap.from_list("share", ["#f3f6f9", "#2f80d8", "#08264a"])
        figure = Figure(
            figsize=(heads * side + 1.4, layers * side + 1.3), layout="constrained", dpi=120
        )
        FigureCanvasAgg(figure)
        axes = figure.subplots(layers, heads, squeeze=False)
        for (layer, head), axis in (
            ((i, j), axes[i, j]) for i in range(layers) for j in range(heads)
        ):
            image = axis.imshow(
                attention.weights[layer, head], cmap=scale, vmin=0, vmax=1, interpolation="nearest"
            )
            axis.set_title(f"layer {layer + 1} head {head + 1}", fontsize=8)
            _label(axis, attention.tokens)
        bar = figure.colorbar(image, ax=axes, shrink=0.6, aspect=30)
        bar.set_label("share of attention", fontsize=8)
        bar.ax.tick_params(labelsize=7)
        figure.supxlabel("looked at", fontsize=8)
        figure.supylabel("looks", fontsize=8)
        file = io.BytesIO()
        unchanging = {"Date": None} if format == "svg" else None
        figure.savefig(file, format=format, metadata=unchanging, facecolor="white")
    return file.getvalue()


def undrawn(attention: Attention) -> str:
    """Return the characters that no installed font has: a PNG shows boxes in their places."""
    return fonts_for(_shown(attention))[1]


def _shown(attention: Attention) -> str:
    return "".join(map(visible, attention.tokens))


def _label(axis: object, tokens: list[str]) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axis, Axes)
    if len(tokens) > _MOST_LABELS:
        axis.tick_params(labelsize=6)
        return
    # A dollar sign would begin a formula.
    shown = [visible(token).replace("$", r"\$") for token in tokens]
    turn = 0 if max(map(len, shown)) == 1 else 90
    axis.set_xticks(range(len(tokens)), shown, fontsize=6, rotation=turn)
    axis.set_yticks(range(len(tokens)), shown, fontsize=6)
    axis.tick_params(length=0, pad=2)
