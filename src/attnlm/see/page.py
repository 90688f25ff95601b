"""Render the templates in pages/ as single HTML files that load nothing else."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

from numpy.typing import NDArray

from attnlm.base.formatting import escape_control_characters

_IMPORT = r'(?m)^import \{([^}]*)\} from "\./([\w.]+)";$'
_EXPORT = r"(?m)^export (?=(?:async )?(?:class|const|function\*?) (\w+))"


def render(
    template: str,
    *,
    script: str,
    worker: str = "",
    data: Mapping[str, Any],
    **content: Any,
) -> bytes:
    """Return the page of a template, in UTF-8, with the stylesheet that all pages share.

    `script` names the JavaScript module in pages/ that the page runs, `worker` the module for which
    the page starts a worker. The page has both, and what they import. `data` holds the JSON values
    that the scripts read; the template sees them too, by name, and `content`.
    """
    from markupsafe import Markup

    packed = json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    html = _fill(
        template,
        style=Markup(_source("page.css")),
        scripts={name: Markup(_script_of_module(name)) for name in _with_imports(worker, script)},
        worker_scripts=_with_imports(worker),
        # Escaped, so that no text in the data can end its script element, or control a terminal.
        data=Markup(packed.translate({c: f"\\u{c:04x}" for c in (ord("<"), *range(127, 160))})),
        **{**data, **content},
    )
    return html.encode(errors="backslashreplace")  # folder names may be invalid Unicode


def _fill(template: str, **content: Any) -> str:
    """Return the text of a template, filled with `content`, in which HTML and control characters
    are escaped."""
    import jinja2
    from markupsafe import Markup

    def finalize(value: object) -> object:
        is_text = isinstance(value, str) and not isinstance(value, Markup)
        return escape_control_characters(str(value)) if is_text else value

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("attnlm.see", "pages"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["sentence"] = lambda text: f"{text[0].upper()}{text[1:]}."
    return environment.get_template(template).render(**content)


def _source(name: str) -> str:
    return (resources.files("attnlm.see") / "pages" / name).read_text(encoding="utf-8").strip()


def _with_imports(*names: str) -> list[str]:
    """Return JavaScript modules and those that they import, each after the ones that it imports."""
    modules = list[str]()

    def add(name: str) -> None:
        if name in modules:
            return
        for _, imported in re.findall(_IMPORT, _source(name)):
            add(imported)
        modules.append(name)

    for name in filter(None, names):
        add(name)
    return modules


def _script_of_module(name: str) -> str:
    """Return a JavaScript module as a script with a scope of its own.

    A page that was opened from a file cannot import modules from its other scripts. So a script
    puts what its module exports into `attnlm.modules`, where the next scripts find it.
    """
    text = _source(name)
    exported = ", ".join(re.findall(_EXPORT, text))
    text = re.sub(_IMPORT, r'const {\1} = attnlm.modules["\2"];', text)
    text = re.sub(_EXPORT, "", text)
    return (
        f'(globalThis.attnlm ??= {{modules: {{}}}}).modules["{name}"] = (() => {{\n'
        f'"use strict";\n{text}\nreturn {{{exported}}};\n}})();'
    )


def encode_base64(numbers: NDArray[Any]) -> str:
    """Return the bytes of an array, for JSON values that scripts read."""
    return base64.b64encode(numbers.tobytes()).decode()
