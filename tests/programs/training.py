"""`training.py python -m attnlm COMMAND…`: train in Python, then by the command.

PyTorch's compiler, and sympy for it, take longer to import than a small model to train: neither is
loaded. The environment stays as it was.
"""

from __future__ import annotations

import os
import sys

import attnlm
from attnlm.__main__ import main
from attnlm.config.settings import resolve_new

environment = dict(os.environ)
resolve_new({"attention": "parts.py:Head", "embed_dim": 8}, None).config.spec.costs(30)
for model in ("multi-head", "transformer"):
    trained = attnlm.train(model=model, steps=2, seed=1, embed_dim=8, heads=2)
    "".join(attnlm.sample(trained, tokens=3, seed=1))
assert environment == os.environ
sys.argv = sys.argv[3:]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
loaded = {"torch._dynamo", "sympy"} & set(sys.modules)
assert not loaded, loaded
