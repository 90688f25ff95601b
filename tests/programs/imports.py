"""`imports.py python -m attnlm MODULES COMMAND…`: no command, `CODE WORDS…`, loads a module."""

from __future__ import annotations

import sys

from attnlm.__main__ import main

modules, *commands = sys.argv[4:]
for command in commands:
    code, *words = command.split()
    sys.argv = ["attnlm", *words]
    try:
        main()
    except SystemExit as end:
        assert (end.code or 0) == int(code), (command, end.code)
    loaded = set(modules.split()) & set(sys.modules)
    assert not loaded, (command, loaded)
