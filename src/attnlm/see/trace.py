"""Trace one forward pass step by step, or print it as a PyTorch script without attnlm.

Both are the forward pass of textbook.py, with the model's settings as constants and without the
branches that the model does not take. A step is a tensor whose name there ends with its axes.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from attnlm.model import textbook
from attnlm.model.architecture import Architecture
from attnlm.model.inspection import check_finite, check_textbook
from attnlm.model.spec import require_architecture
from attnlm.runs.load_model import load_model
from attnlm.runs.run import Run, open_run
from attnlm.see.attend import likeliest
from attnlm.see.shown_tokens import ids_within_context, token_texts, visible

_SHOWN = 6  # numbers shown of a row
_CANDIDATES = 5


@dataclass(frozen=True)
class Operation:
    """One operation: its name, its code in the script, and its numbers with axes.

    The axes are letters, such as "T C": T tokens, C features, H heads, K key and value heads,
    D head size, X = H·D, F width of an MLP, V vocabulary.
    """

    name: str
    formula: str
    axes: str
    values: Tensor


@dataclass(frozen=True, repr=False)
class Trace:
    """A forward pass over a text of T tokens."""

    run: str
    model: str
    tokens: list[str]
    operations: list[Operation]
    next: list[tuple[str, float]]
    """candidates for the next token with their probabilities, likeliest first"""

    def __repr__(self) -> str:
        made = f"{len(self.operations)} operations over {len(self.tokens)} tokens"
        return f"<Trace of {self.run!r}: {made}>"

    def __str__(self) -> str:
        """Return each operation's shape and the last token's numbers, in the first head.

        If the text has few tokens, attention maps are shown with all rows.
        """
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        shown = [visible(token) for token in self.tokens]
        for number, one in enumerate(self.operations, 1):
            shape = " × ".join(map(str, one.values.shape))
            yield f"{number}. {one.name}  ({one.axes.replace(' ', ', ')}) = {shape}"
            yield f"   {one.formula}"
            values, prefix = one.values, ""
            if values.dim() == 3:
                prefix = f"head 1 of {len(values)}, " if len(values) > 1 else ""
                values = values[0]
            if one.axes == "T":
                numbers = zip(shown[-_SHOWN:], values[-_SHOWN:].tolist(), strict=True)
                yield "   " + "  ".join(f"{token} {i}" for token, i in numbers)
                continue
            is_map = one.axes == "H T T" and len(shown) <= _SHOWN
            for token, row in list(zip(shown, values, strict=True))[0 if is_map else -1 :]:
                cells = "  ".join(
                    "     −∞" if x == -torch.inf else f"{x:z7.3f}" for x in row[:_SHOWN].tolist()
                )
                yield f"   {prefix}{token}: {cells}{'  …' if len(row) > _SHOWN else ''}"
        yield "next token"
        yield from (f"  {probability:6.1%}  {visible(token)}" for token, probability in self.next)

    def facts(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        operations = []
        for one in self.operations:
            numbers = one.values.numpy().astype(object)
            numbers[one.values.isneginf().numpy()] = None  # JSON does not have −∞
            shape = [*numbers.shape]
            operations.append({**vars(one), "shape": shape, "values": numbers.tolist()})
        likeliest = [{"token": token, "probability": p} for token, p in self.next]
        return {**vars(self), "operations": operations, "next": likeliest}


def trace(
    text: str,
    run: str | Path | Run | None = None,
    *,
    checkpoint: str = "auto",
) -> Trace:
    """Follow one forward pass of a run (default: the one trained last) over `text`, step by step.

        traced = attnlm.trace("Once upon", "multi-head-001")
        for operation in traced.operations:
            print(operation.name, operation.formula, operation.axes, operation.values.shape)
        print(traced)  # with numbers

    `checkpoint` is auto, best or last. Runs on the CPU. Raises AttnlmError if the text does not fit
    the context or the vocabulary, if files are missing or damaged, for numbers that are not finite,
    and if the model's classes were changed, so that the formulas would be wrong.
    """
    run = open_run(run)
    ids = ids_within_context(run, text)
    model, _ = load_model(run, checkpoint=checkpoint, device="cpu")
    architecture = require_architecture(run.config.spec, "a trace")
    check_textbook(model, run.name)
    operations = [
        Operation("tokens", "the text's ids in the vocabulary", "T", torch.tensor(ids)),
        *_operations(architecture, model.state_dict(), torch.tensor(ids)),
    ]
    probabilities_TV = torch.softmax(operations[-1].values, -1)
    operations.append(Operation("probabilities", "softmax(logits)", "T V", probabilities_TV))
    check_finite(*(one.values for one in operations if not one.name.endswith("masked")))
    last_V = probabilities_TV[-1].numpy()
    order = likeliest(last_V, _CANDIDATES)
    candidates = list(zip(token_texts(run.tokenizer, order), last_V[order].tolist(), strict=True))
    tokens = token_texts(run.tokenizer, ids)
    return Trace(run.name, run.config.spec.name, tokens, operations, candidates)


def _operations(a: Architecture, weights: textbook.Weights, ids: Tensor) -> Iterator[Operation]:
    """Compute the textbook pass; yield the assignments to names that end with axes."""
    steps: list[tuple[str, str, Any]] = []
    names: dict[str, Any] = {
        "torch": torch,
        "F": functional,
        "keep": lambda *step: steps.append(step),
    }
    # The text is that of textbook.py; settings stand in it as Python writes checked values.
    exec(re.sub(r"(?m)^( +)(block|\w+_[A-Z]+) = (.+)$", _and_keep, specialise_textbook(a)), names)
    names["forward"](weights, ids)
    layer = 0
    for target, formula, value in steps:
        name, _, axes = target.rpartition("_")
        layer += target == "block"  # the weights of the next layer
        prefix = (
            f"layer {layer} " if a.layers > 1 and layer and name not in ("last", "logits") else ""
        )
        if axes.isupper():
            yield Operation(prefix + name, formula, " ".join(axes), value)


def _and_keep(line: re.Match[str]) -> str:
    """Return the line of an assignment and, for a new value, a line that keeps it."""
    indent, name, code = line.groups()
    is_new = re.search(r"[^\w= ]", code)
    return f"{line[0]}\n{indent}keep({name!r}, {code!r}, {name})" if is_new else line[0]


# --- The pass as a script -------------------------------------------------------------------------

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
        vocabulary=f"vocabulary = {vocabulary}" if is_small else "",
        shown="repr(vocabulary[i])" if is_small else "i",
    )


def specialise_textbook(a: Architecture) -> str:
    """Return the functions of textbook.py that the model uses, with its settings as constants."""
    source = inspect.getsource(textbook).replace(" is None", " == None")
    source = source.replace(" is not None", " != None")  # Python warns of `is` beside a constant
    source = re.sub(r"\ba\.(\w+)", lambda setting: repr(getattr(a, setting[1])), source)
    module = ast.parse(re.sub(r"\ba(: Architecture)?, ", "", source))
    functions = {f.name: f for f in module.body if isinstance(f, ast.FunctionDef)}
    for function in functions.values():
        _Taken().visit(function)
    used = ["forward"]
    for name in used:  # which grows
        names = {node.id for node in ast.walk(functions[name]) if isinstance(node, ast.Name)}
        used += [called for called in functions if called in names and called not in used]
    return "\n\n".join(ast.unparse(f) for name, f in functions.items() if name in used)


class _Taken(ast.NodeTransformer):
    """An AST pass that keeps only the branches taken, where a test has constants alone."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.returns = None
        for argument in node.args.args:
            argument.annotation = None
        ends = [n for n, statement in enumerate(node.body) if isinstance(statement, ast.Return)]
        node.body = node.body[: ends[0] + 1]
        return node

    def visit_If(self, node: ast.If | ast.IfExp) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        try:
            is_taken = eval(ast.unparse(node.test), {})
        except NameError:  # it depends on the weights
            return node
        return node.body if is_taken else node.orelse

    visit_IfExp = visit_If  # noqa: N815 - the name that ast calls
