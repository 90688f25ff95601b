"""Scripts in pages, without their comments."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnlm.see import page

SCRIPTS = sorted((Path(page.__file__).parent / "pages").glob("*.js"))
SCRIPT = """\
"use strict";
/* A comment
   of two lines. */
const a = "x; // not", b = "/* nor this */", c = `{ // nor ${a}`; // stays
  // a whole line
/* one */ const d = 1; /* two */

const e = a /* three */
  + b;
"""


def test_only_comments_of_whole_lines_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "_source", lambda name: SCRIPT)
    assert page._compact_source("some.js").splitlines() == [
        '"use strict";',
        'const a = "x; // not", b = "/* nor this */", c = `{ // nor ${a}`; // stays',
        "/* one */ const d = 1; /* two */",
        "const e = a /* three */",
        "+ b;",
    ]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_no_template_has_several_lines(script: Path) -> None:
    """In such a template, what looks like a comment, and indentation, would be text."""
    for line in page._compact_source(script.name).splitlines():
        assert line.count("`") % 2 == 0 and not line.endswith("\\"), line
