"""Export a run's forward pass as a plain PyTorch script that needs only the weights, not attnlm.

The script is the forward pass of textbook.py, with the model's settings as constants and without
the branches that the model does not take.
"""

from __future__ import annotations

import ast
import inspect

from attnlm.model import textbook
from attnlm.model.architecture import Architecture, require_architecture
from attnlm.model.inspection import check_textbook
from attnlm.runs.load_model import load_model
from attnlm.runs.run import Run
from attnlm.see.shown_tokens import ids_within_context, token_texts

_SCRIPT = """\
# The forward pass of a {model}, from ids (T,) to logits (T, V).
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

{functions}

weights = load_file({path!r})
weights = {{name.removeprefix("model."): w for name, w in weights.items()}}
ids = torch.tensor({ids})  # {text!r}
logits = forward(weights, ids)
{vocabulary}
probabilities = torch.softmax(logits[-1], dim=-1)
for i in probabilities.argsort(descending=True)[:5].tolist():
    print(f"{{probabilities[i]:.4f}}", {shown})
"""


def as_script(run: Run, text: str, *, checkpoint: str = "best") -> str:
    """Return a script of at most 80 lines that computes the `logits` (T, V) of `text`.

    The script loads the checkpoint file and prints the likeliest next tokens. Raises AttnlmError
    if the text does not fit the context or the vocabulary, if files are missing or damaged, or if
    the model's classes were changed.
    """
    ids = ids_within_context(run, text)
    chosen = run.checkpoint(checkpoint)
    architecture = require_architecture(run.config.spec, "a textbook script")
    check_textbook(load_model(run, checkpoint=chosen, device="cpu")[0], run.name)
    is_small = run.vocab_size <= 257  # bytes and the end of text
    vocabulary = token_texts(run.tokenizer, list(range(run.vocab_size))) if is_small else []
    return _SCRIPT.format(
        model=run.config.spec.name,
        functions=specialise_textbook(architecture),
        path=str(chosen.path.resolve()),
        ids=ids,
        text=run.tokenizer.decode(ids),
        vocabulary=f"\nvocabulary = {vocabulary}" if is_small else "",
        shown="repr(vocabulary[i])" if is_small else "i",
    )


def specialise_textbook(a: Architecture) -> str:
    """Return the functions of textbook.py that the model uses, with its settings as constants."""
    module = ast.parse(inspect.getsource(textbook))
    functions = {f.name: f for f in module.body if isinstance(f, ast.FunctionDef)}
    for function in functions.values():
        _Specialised(a).visit(function)
    used = ["forward"]
    for name in used:  # which grows
        names = {node.id for node in ast.walk(functions[name]) if isinstance(node, ast.Name)}
        used += [called for called in functions if called in names and called not in used]
    return "\n\n".join(ast.unparse(f) for name, f in functions.items() if name in used)


class _Specialised(ast.NodeTransformer):
    """An AST pass that replaces `a.name` with the model's setting and keeps the branches taken."""

    def __init__(self, a: Architecture) -> None:
        self._architecture = a

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.returns = None
        ends = [n for n, statement in enumerate(node.body) if isinstance(statement, ast.Return)]
        node.body = node.body[: ends[0] + 1]
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg | None:
        return None if node.arg == "a" else ast.arg(node.arg)

    def visit_Name(self, node: ast.Name) -> ast.Name | None:
        return None if node.id == "a" else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id == "a":
            return ast.Constant(getattr(self._architecture, node.attr))
        return self.generic_visit(node)

    def visit_If(self, node: ast.If | ast.IfExp) -> ast.AST | list[ast.stmt]:
        """Keep only the branch taken, if the test depends only on the architecture."""
        self.generic_visit(node)
        match node.test:
            case ast.Constant(value):
                is_taken = bool(value)
            case ast.Compare(ast.Constant(left), [sign], [ast.Constant(right)]):
                # textbook.py uses ==, !=, `is` and `is not`, and no other comparison.
                is_taken = (left == right) == isinstance(sign, ast.Eq | ast.Is)
            case _:
                return node
        return node.body if is_taken else node.orelse

    visit_IfExp = visit_If  # noqa: N815 - the name that ast calls
