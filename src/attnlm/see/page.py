"""Renders the templates of pages/: each page is one HTML file that loads nothing from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from attnlm.see.text import visible


def render(
    template: str, *, scripts: Sequence[str] = (), data: object = None, **content: Any
) -> bytes:
    """Return the page of a template, in UTF-8, with the stylesheet that all pages share.

    `scripts` are files of pages/ too, and `data` the JSON values that they read.
    """
    from markupsafe import Markup

    packed = json.dumps(data, allow_nan=False, separators=(",", ":"))
    html = fill(
        template,
        style=Markup(_file("page.css")),
        scripts=[Markup(_file(script)) for script in scripts],
        # Nothing in the data may end the script element that they lie in.
        data=Markup(packed.replace("<", "\\u003c")),
        **content,
    )
    return html.encode(errors="backslashreplace")  # names of folders need not be Unicode


def fill(template: str, **content: Any) -> str:
    """Return the text of a template with this content, which is escaped."""
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
