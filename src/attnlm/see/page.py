"""Pages that open anywhere: each one HTML file, with nothing from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from typing import Any


def render(
    template: str, *, scripts: Sequence[str] = (), data: object = None, **content: Any
) -> bytes:
    """The page of a template in pages/, in UTF-8, with the stylesheet that all share.

    `scripts` are files of pages/ too, and `data` the JSON values that they read.
    """
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("attnlm.see", "pages"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    packed = json.dumps(data, allow_nan=False, separators=(",", ":"))
    html = environment.get_template(template).render(
        style=Markup(_file("page.css")),
        scripts=[Markup(_file(script)) for script in scripts],
        # Nothing in the data may end the script element that they lie in.
        data=Markup(packed.replace("<", "\\u003c")),
        **content,
    )
    return html.encode(errors="backslashreplace")  # names of folders need not be Unicode


def _file(name: str) -> str:
    return (resources.files("attnlm.see") / "pages" / name).read_text(encoding="utf-8").strip()
