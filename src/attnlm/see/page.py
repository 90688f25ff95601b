"""Render the templates in pages/ as single HTML files that load nothing else."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

from numpy.typing import NDArray

from attnlm.see.text import visible

_COMMENT = r"^ *(//[^\n]*|/\*((?!\*/).)*\*/)$"
"""Comments that are one or more whole lines, in JavaScript and CSS"""


def render(
    template: str, *, scripts: Sequence[str] = (), data: object = None, **content: Any
) -> bytes:
    """Return the page of a template, in UTF-8, with the stylesheet that all pages share.

    `scripts` names JavaScript files in pages/. `data` holds the JSON values that the scripts read.
    """
    from markupsafe import Markup

    packed = json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    html = fill(
        template,
        style=Markup(_compact("page.css")),
        scripts={script: Markup(_compact(script)) for script in scripts},
        # Escaped, so that no text in the data can end its script element.
        data=Markup(packed.replace("<", "\\u003c")),
        **content,
    )
    return html.encode(errors="backslashreplace")  # folder names may be invalid Unicode


def fill(template: str, **content: Any) -> str:
    """Return the text of a template, filled with escaped `content`."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("attnlm.see", "pages"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["visible"] = visible
    return environment.get_template(template).render(**content)


def _file(name: str) -> str:
    return (resources.files("attnlm.see") / "pages" / name).read_text(encoding="utf-8").strip()


def _compact(name: str) -> str:
    """Return a script or stylesheet without indentation, empty lines and comments of whole lines.

    No string or template of our scripts has several lines, so what begins a line is no text.
    """
    text = re.sub(_COMMENT, "", _file(name), flags=re.MULTILINE | re.DOTALL)
    if name.endswith(".css"):
        return re.sub(r"\s*([{};])\s*|(?<=:) ", r"\1", text)
    return re.sub(r"^\s+", "", text, flags=re.MULTILINE)


def base64_of(numbers: NDArray[Any]) -> str:
    """Return the bytes of an array, for JSON values that scripts read."""
    return base64.b64encode(numbers.tobytes()).decode()
