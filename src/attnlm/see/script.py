"""A run's forward pass as a plain PyTorch script that needs nothing of ours but the weights.

It is the textbook pass, with the model's parts put in and the branches that it does not take left
out.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

from attnlm.base.errors import AttnlmError
from attnlm.model import textbook
from attnlm.model.architecture import Architecture
from attnlm.runs.load_model import load_model
from attnlm.runs.run import Run
from attnlm.see.text import ids_within_context, token_texts


def as_script(run: Run, text: str, *, checkpoint: str = "best") -> str:
    """A script of at most 80 lines that computes the `logits` (T, V) of `text`.

    It loads the checkpoint from where it lies and prints the likeliest next tokens. Raises
    AttnlmError when the text does not fit the context or the vocabulary, and when files are missing
    or damaged.
    """
    ids = ids_within_context(run, text)
    chosen = run.checkpoint(checkpoint)
    load_model(run, checkpoint=chosen, device="cpu")  # which checks it
    if run.config.training.adapters is not None:
        raise AttnlmError(
            f"{run.name} is a run of adapters: no one file has its weights",
            f"fold them in first: attnlm export {run.name} DIR, then attnlm import DIR",
        )
    functions = specialised(run.config.model)
    return "\n".join([*_begin(run), functions, "", *_end(run, chosen.path, ids)]) + "\n"


def specialised(a: Architecture) -> str:
    """The functions of the textbook pass that this model takes, with its parts put in."""
    module = ast.parse(inspect.getsource(textbook))
    functions = {f.name: f for f in module.body if isinstance(f, ast.FunctionDef)}
    for function in functions.values():
        _Specialised(a).visit(function)
    used = _reachable("forward", functions)
    return "\n\n".join(ast.unparse(f) for name, f in functions.items() if name in used)


def _reachable(start: str, functions: dict[str, ast.FunctionDef]) -> set[str]:
    found = {start}
    waiting = [start]
    while waiting:
        for node in ast.walk(functions[waiting.pop()]):
            if isinstance(node, ast.Name) and node.id in functions.keys() - found:
                found.add(node.id)
                waiting.append(node.id)
    return found


class _Specialised(ast.NodeTransformer):
    """Puts the parts of an Architecture in the place of `a.part`, and decides what they decide."""

    def __init__(self, a: Architecture) -> None:
        self._architecture = a

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.args.args = [ast.arg(arg.arg) for arg in node.args.args if arg.arg != "a"]
        node.returns = None
        ends = [n for n, statement in enumerate(node.body) if isinstance(statement, ast.Return)]
        node.body = node.body[: ends[0] + 1]
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id == "a":
            return ast.Constant(getattr(self._architecture, node.attr))
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        node.args = [x for x in node.args if not (isinstance(x, ast.Name) and x.id == "a")]
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        left, right = node.left, node.comparators[0]
        if not (isinstance(left, ast.Constant) and isinstance(right, ast.Constant)):
            return node
        is_equal = left.value == right.value
        return ast.Constant(is_equal == isinstance(node.ops[0], (ast.Eq, ast.Is)))

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        if not isinstance(node.test, ast.Constant):
            return node
        return node.body if node.test.value else node.orelse

    def visit_If(self, node: ast.If) -> ast.stmt | list[ast.stmt]:
        self.generic_visit(node)
        if not isinstance(node.test, ast.Constant):
            return node
        return node.body if node.test.value else node.orelse


def _begin(run: Run) -> Iterator[str]:
    yield f"# The forward pass of a {run.config.model.model}, from ids (T,) to logits (T, V)."
    if run.config.training.shard:
        yield "from pathlib import Path"
    yield "import torch"
    yield "from safetensors.torch import load_file"
    yield "from torch.nn import functional as F"
    yield ""


def _end(run: Run, path: Path, ids: list[int]) -> Iterator[str]:
    place = str(path.resolve())
    if run.config.training.shard:
        # Each process' rows, in order.
        yield f"files = sorted(Path({place!r}).glob('shard-*-model-00001-*.safetensors'))"
        yield "parts = [load_file(file) for file in files]"
        yield "weights = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}"
    else:
        yield f"weights = load_file({place!r})"
    yield 'weights = {name.removeprefix("model."): w for name, w in weights.items()}'
    yield f"ids = torch.tensor({ids})  # {run.tokenizer.decode(ids)!r}"
    yield "logits = forward(weights, ids)"
    yield ""
    if run.vocab_size <= 256:
        texts = token_texts(run.tokenizer, list(range(run.vocab_size)))
        yield f"vocabulary = {texts}"
        shown = "repr(vocabulary[i])"
    else:
        shown = "i"
    yield "probabilities = torch.softmax(logits[-1], dim=-1)"
    yield f"for i in probabilities.argsort(descending=True)[:{min(5, run.vocab_size)}].tolist():"
    yield f'    print(f"{{probabilities[i]:.4f}}", {shown})'
